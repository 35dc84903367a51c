"""What `plan`, `check`, `show` and `trace` say of an edit before it is made: what the run then gets, by its tokens."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import values_of
from tests.support.loaders import run_job
from tests.support.numbered_rows import Document, delivered, traced, write_numbered
from torchmix.catalog.store import open_part
from torchmix.cli.main import main
from torchmix.cli.run import forecast_of_run
from torchmix.constructor.fields import Microbatch
from torchmix.errors import StateMismatch
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps.state import read_state

Capture = pytest.CaptureFixture[str]
ALONE = Topology()
EDIT, STOP = 9, 18
FIRST, SECOND = "{web: 70%, code: 30%}", "{web: 20%, code: 40%, late: 40%}"
SOURCES = "web code late"


def shares_of(values: dict[str, Any]) -> dict[str, float]:
    return {one["name"]: one["share"] for one in values["sources"]}


def state_at(recipe: Path, *, name: str = "state.bin", **stop: int) -> tuple[Path, dict[str, Any]]:
    """A state of the run, in a file and as a loader has it."""
    [rank] = run_job(recipe, ALONE, **stop)
    path = recipe.parent / name
    path.write_bytes(rank.state["torchmix_state"])
    return path, rank.state


def went_on(recipe: Path, state: dict[str, Any], word: str, **options: Any) -> tuple[list[Microbatch], dict[str, Any]]:
    """The run with the edit: what it was given up to STOP, and its state there."""

    def program(loader: Any, rank: Any) -> None:
        loader.load_state_dict(state, **options)
        for microbatch in loader:
            rank.microbatches.append(microbatch)
            if microbatch.is_last_of_step and microbatch.step == STOP - 1:
                break

    [rank] = run_job(recipe, ALONE, program=program, accept_edit=word)
    return rank.microbatches, rank.state


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_edit_is_planned_before_it_is_made_and_the_run_then_gets_that(tmp_path: Path, capsys: Capture) -> None:
    path, state = state_at(write_numbered(tmp_path, FIRST), steps=EDIT)
    recipe = write_numbered(tmp_path, SECOND, sources=SOURCES)
    before = contents(tmp_path / "catalog")
    words = ("plan", recipe, "--state", path, "--steps", STOP - EDIT)
    message = values_of(capsys, *words, code=3)["error"]["message"]
    assert "mixture changed; late added" in message
    [word] = re.findall(r"accept_edit='([0-9a-f]{16})'", message)
    assert f"--accept-edit {word}" in message
    plan = values_of(capsys, *words, "--accept-edit", word)
    assert (plan["first_step"], shares_of(plan)) == (EDIT, pytest.approx({"code": 0.4, "late": 0.4, "web": 0.2}))
    check = values_of(capsys, "check", recipe, "--state", path, "--steps", STOP - EDIT, "--accept-edit", word)
    shown = values_of(capsys, "show", recipe, "--state", path, "--step", EDIT + 2, "--accept-edit", word)
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(f"{name}:{row}\n" for name in SOURCES.split() for row in range(600)))
    words = ("--state", path, "--list", rows, "--steps", STOP, "--accept-edit", word)
    found = values_of(capsys, "trace", recipe, *words)
    assert contents(tmp_path / "catalog") == before, "an edit that is only looked at leaves no history"

    microbatches, after = went_on(recipe, state, word)
    given = delivered(microbatches)
    of_run = traced(found["pieces"])
    assert {step: of_run[step] for step in given} == given and set(of_run) == set(range(STOP))
    tokens = sum((counts for counts in given.values()), Counter[Document]())
    for values in (plan, check):
        for one in values["sources"]:
            assert one["delivered_tokens"] == sum(n for (name, _), n in tokens.items() if name == one["name"])
    pieces = Counter[Document]()
    for sample in shown["samples"]:
        pieces.update({(one["source"], one["row"]): 0 for one in sample["pieces"]})
        for one in sample["pieces"]:
            pieces[one["source"], one["row"]] += one["tokens"]
    assert pieces == given[EDIT + 2]
    (tmp_path / "after").write_bytes(after["torchmix_state"])
    whole = values_of(capsys, "plan", recipe, "--steps", STOP, "--state", tmp_path / "after", "--start", 0)
    assert whole["order_digest"] == plan["order_digest"]


def test_a_word_needs_a_state_and_another_one_is_refused(tmp_path: Path, capsys: Capture) -> None:
    path, _ = state_at(write_numbered(tmp_path, FIRST), steps=2)
    recipe = write_numbered(tmp_path, SECOND, sources=SOURCES)
    for verb in (["plan", "--steps", "2"], ["check"], ["show", "--step", "3"], ["trace", "--row", "web:1"]):
        assert main([verb[0], str(recipe), *verb[1:], "--accept-edit", "0" * 16, "--state", str(path)]) == 3
        assert f"accept_edit='{'0' * 16}' accepts another edit" in capsys.readouterr().err
    for verb in (["plan", "--steps", "2"], ["check"], ["show", "--step", "3"]):
        assert main([verb[0], str(recipe), *verb[1:], "--accept-edit", "0" * 16]) == 2
        assert "--accept-edit goes with --state" in capsys.readouterr().err


def test_a_state_from_inside_a_step_is_planned_from_the_start_of_it(tmp_path: Path, capsys: Capture) -> None:
    path, state = state_at(write_numbered(tmp_path, FIRST), microbatches=8 * 5 + 3)
    recipe = write_numbered(tmp_path, SECOND, sources=SOURCES)
    words = ("plan", recipe, "--state", path, "--steps", STOP - 5)
    [word] = re.findall(r"accept_edit='([0-9a-f]{16})'", values_of(capsys, *words, code=3)["error"]["message"])
    plan = values_of(capsys, *words, "--accept-edit", word)
    _, after = went_on(recipe, state, word, from_step_start=True)
    (tmp_path / "after").write_bytes(after["torchmix_state"])
    words = ("plan", recipe, "--state", tmp_path / "after", "--start", 5, "--steps", STOP - 5)
    assert plan["first_step"] == 5 and values_of(capsys, *words)["order_digest"] == plan["order_digest"]


def test_the_share_is_the_mean_of_each_steps_own_recipe(tmp_path: Path, capsys: Capture) -> None:
    _, state = state_at(write_numbered(tmp_path, "{web: 80%, code: 20%}"), steps=EDIT)
    recipe = write_numbered(tmp_path, "{web: 50%, late: 50%}", sources="web late")
    with pytest.raises(StateMismatch, match="accept_edit=") as caught:
        went_on(recipe, state, "")
    [word] = re.findall(r"accept_edit='([0-9a-f]{16})'", str(caught.value))
    went_on(recipe, state, word)
    plan = values_of(capsys, "plan", recipe, "--steps", 3 * EDIT)
    assert plan["edits"] == [EDIT]
    assert shares_of(plan) == pytest.approx({"web": (0.8 + 2 * 0.5) / 3, "code": 0.2 / 3, "late": 1 / 3})
    assert shares_of(values_of(capsys, "plan", recipe, "--steps", EDIT)) == pytest.approx(
        {"web": 0.8, "code": 0.2, "late": 0.0}
    ), "steps of the run as it was"


def test_the_share_counts_a_change_at_an_epoch_from_the_step_where_it_begins(tmp_path: Path, capsys: Capture) -> None:
    change = "schedule: [{from: {epochs: 1, of: code}, to: 4 steps, set: {code: 10%}}]"
    recipe = write_numbered(tmp_path, "{web: 50%, code: 50%}", extra=change)
    steps = 60
    check = values_of(capsys, "check", recipe, "--steps", steps)
    [note] = [one["message"] for one in check["findings"] if one["where"] == "schedule[0]"]
    [begins] = map(int, re.findall(r"begins in step (\d+)", note))
    assert 5 < begins < steps - 10
    # Over the ramp of four steps the share falls on a line from 50 to 10 percent: 30 on average.
    asked = (begins * 0.5 + 4 * 0.3 + (steps - begins - 4) * 0.1) / steps
    assert shares_of(values_of(capsys, "plan", recipe, "--steps", steps))["code"] == pytest.approx(asked, abs=1e-6)
    assert {one["name"]: one["asked_share"] for one in check["sources"]}["code"] == pytest.approx(asked, abs=1e-6)
    words = ("plan", recipe, "--start", begins + 4, "--steps", 5)
    assert shares_of(values_of(capsys, *words)) == pytest.approx({"web": 0.9, "code": 0.1})


def test_a_stream_that_has_run_out_is_asked_for_nothing(tmp_path: Path, capsys: Capture) -> None:
    recipe = write_numbered(tmp_path, "{web: 50%, code: 50%}")
    once = "{path: code.parquet, tokens: ids, max_epochs: 1, on_exhausted: renormalise}"
    recipe.write_text(recipe.read_text().replace("{path: code.parquet, tokens: ids}", once))
    steps = 70
    check = values_of(capsys, "check", recipe, "--steps", steps)
    of_check = {one["name"]: one for one in check["sources"]}
    out = of_check["code"]["runs_out_step"]
    assert 5 < out < steps - 10
    asked = 0.5 * (out + 1) / steps  # also in the step in which it runs out
    plan = values_of(capsys, "plan", recipe, "--steps", steps)
    assert shares_of(plan) == pytest.approx({"web": 1 - asked, "code": asked})
    assert of_check["code"]["asked_share"] == pytest.approx(asked) and of_check["code"]["share"] == pytest.approx(0.5)
    path, _ = state_at(recipe, steps=out + 3)
    after = {one["name"]: one for one in values_of(capsys, "check", recipe, "--state", path, "--steps", 5)["sources"]}
    assert (after["code"]["share"], after["code"]["asked_share"], after["code"]["runs_out_step"]) == (0, 0, out)
    assert (after["code"]["epochs"], after["web"]["share"]) == (1, 1)
    of_state = values_of(capsys, "plan", recipe, "--state", path, "--steps", 5)
    whole = values_of(capsys, "plan", recipe, "--start", out + 3, "--steps", 5)
    for one, other in zip(of_state["sources"], whole["sources"], strict=True):
        assert one["epochs"] == pytest.approx(other["epochs"], abs=0.02), "epochs count from step 0"
        assert one["share"] == other["share"]


def test_a_forecast_goes_on_from_a_state_beyond_the_steps_that_it_plans(tmp_path: Path, capsys: Capture) -> None:
    recipe = write_numbered(tmp_path, "{web: 50%, code: 50%}")
    once = "{path: code.parquet, tokens: ids, max_epochs: 1, on_exhausted: renormalise}"
    recipe.write_text(recipe.read_text().replace("{path: code.parquet, tokens: ids}", once))
    [of_run] = [one for one in values_of(capsys, "check", recipe, "--steps", 90)["sources"] if one["name"] == "code"]
    assert 40 < of_run["runs_out_step"] < 80
    path, _ = state_at(recipe, steps=30)
    part = part_of(load_recipe(recipe), "train")
    catalog = open_part(tmp_path / "catalog", part)
    exact, guess = (
        forecast_of_run(part, catalog, 60, state=read_state(path.read_bytes()), simulated_steps=n) for n in (60, 5)
    )
    for one, other in zip(exact.sources, guess.sources, strict=True):
        assert other.epochs == pytest.approx(one.epochs, rel=0.05)
        assert other.asked_share == pytest.approx(one.asked_share, abs=0.03)
    assert exact.sources[0].runs_out_step == of_run["runs_out_step"]
    assert abs(int(guess.sources[0].runs_out_step or 0) - int(of_run["runs_out_step"])) <= 3
