"""`torchmix diff`: the shares, ends and ramps of the next steps by both recipes, in numbers that are known by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.command_line import values_of
from tests.support.files import make_tokens_file
from tests.support.loaders import run_job
from torchmix.cli.main import main
from torchmix.errors import StateMismatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe

Capture = pytest.CaptureFixture[str]
DOCUMENTS = {"a": 600, "b": 200, "c": 600}
TOKENS = 16
"""In each document."""
STEP = 4 * 64
"""Tokens of a step."""


def write(
    folder: Path, name: str, mixture: str, *, sources: str = "ab", more: str = "", extra: str = "", index: bool = True
) -> Path:
    """A recipe over the files, which are made at the first call; `more`: keys of source b."""
    for source, rows in DOCUMENTS.items():
        if not (folder / source / "0.parquet").exists():
            (folder / source).mkdir()
            make_tokens_file(folder / source / "0.parquet", [[number] * TOKENS for number in range(rows)])
    lines = "".join(
        f"  {one}: {{path: '{one}/*.parquet', tokens: input_ids{more if one == 'b' else ''}}}\n" for one in sources
    )
    path = folder / f"{name}.yaml"
    path.write_text(
        f"version: 1\nseed: 3\nbatch: {{samples: 4, length: 64}}\nsources:\n{lines}mixture: {mixture}\n"
        f"packing: {{align_tokens: 1}}\nshuffle: {{window_pages: 4}}\n{extra}\n",
        encoding="utf-8",
    )
    if index:
        index_recipe(load_recipe(path), folder)
    return path


def state_of(recipe: Path, steps: int) -> Path:
    [rank] = run_job(recipe, Topology(), steps=steps, keep=False)
    path = recipe.parent / "state"
    path.write_bytes(rank.state["torchmix_state"])
    return path


def diff(capsys: Capture, *words: object, code: int = 0) -> dict[str, Any]:
    return values_of(capsys, "diff", *words, code=code)


def printed(capsys: Capture, *words: object, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["diff", *map(str, words)]) == code
    return capsys.readouterr().out


def figures(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {one["stream"]: one[key] for one in values["streams"]}


def word_of(recipe: Path, state: Path) -> str:
    """The code that a loader asks for."""
    with pytest.raises(StateMismatch, match="accept_edit=") as caught:
        run_job(recipe, Topology(), steps=1, state={"torchmix_state": state.read_bytes()})
    return str(re.findall(r"accept_edit='([0-9a-f]{16})'", str(caught.value))[0])


@pytest.mark.parametrize("wrong", ["old", "new"])
@pytest.mark.parametrize(
    ("key", "place", "said"),
    [("sheds: 3", "line 11: sheds: ", "unknown key"), ("seed: [", "line 12: ", "not valid YAML")],
)
def test_a_typo_names_the_file_and_the_line(
    wrong: str, key: str, place: str, said: str, tmp_path: Path, capsys: Capture
) -> None:
    paths = {name: write(tmp_path, name, "{a: 50%, b: 50%}") for name in ("old", "new")}
    paths[wrong].write_text(paths[wrong].read_text() + key + "\n")
    assert main(["diff", *map(str, paths.values())]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"torchmix: {paths[wrong]}: {place}") and said in message
    found = diff(capsys, *paths.values(), code=2)["error"]
    assert (found["kind"], found["file"]) == ("RecipeError", str(paths[wrong]))


def test_shares_are_those_that_a_plan_of_the_next_steps_asks(tmp_path: Path, capsys: Capture) -> None:
    old = write(tmp_path, "old", "{a: 80%, b: 20%}")
    state = state_of(old, 6)
    new = write(tmp_path, "new", "{a: 20%, b: 30%, c: 50%}", sources="abc")
    found = diff(capsys, old, new, "--state", state, "--steps", 20)
    assert (found["step"], found["num_steps"], found["changed"]) == (6, 20, ["shares", "sources.c added"])
    assert figures(found, "before") == {"a": pytest.approx(0.8), "b": pytest.approx(0.2), "c": None}
    assert figures(found, "after") == pytest.approx({"a": 0.2, "b": 0.3, "c": 0.5})
    assert figures(found, "what") == {"a": "changed", "b": "changed", "c": "added"}
    assert found["accept_edit"] == word_of(new, state) and found["is_same_order"] is False
    capsys.readouterr()
    words = ["--state", state, "--accept-edit", found["accept_edit"], "--steps", 20, "--json"]
    assert main(["plan", str(new), *map(str, words)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {one["name"]: one["share"] for one in plan["sources"]} == pytest.approx(figures(found, "after"))


def test_shares_by_size_take_the_sizes_of_the_catalog(tmp_path: Path, capsys: Capture) -> None:
    old = write(tmp_path, "old", "{all: {share: 1, proportional: 1, children: [a, b]}}")
    new = write(tmp_path, "new", "{all: {share: 1, proportional: 0, children: [a, b]}}")
    found = diff(capsys, old, new, "--steps", 10)
    assert figures(found, "before") == pytest.approx({"a": 600 / 800, "b": 200 / 800})
    assert figures(found, "after") == pytest.approx({"a": 0.5, "b": 0.5})


def test_a_stream_that_has_run_out_has_nothing_and_one_that_will_has_its_step(tmp_path: Path, capsys: Capture) -> None:
    once = ", max_epochs: 1, on_exhausted: renormalise"
    old = write(tmp_path, "old", "{a: 40%, b: 40%, c: 20%}", sources="abc", more=once)
    new = write(tmp_path, "new", "{a: 20%, b: 40%, c: 40%}", sources="abc", more=once)
    out = 200 * TOKENS / (0.4 * STEP)  # 31.25 steps of 40 % until all 200 documents are given
    found = diff(capsys, old, new, "--steps", 60)
    step = found["streams"][1]["runs_out_before"]
    assert step in (int(out), int(out) + 1) and figures(found, "runs_out_after")["b"] == step
    part = (step + 1) / 60  # of the steps, b has 40 %, then nothing; its part goes to the others by their shares
    expected = {"a": part * 0.4 + (1 - part) * 2 / 3, "b": part * 0.4, "c": part * 0.2 + (1 - part) / 3}
    assert figures(found, "before") == pytest.approx(expected)
    text = printed(capsys, old, new, "--steps", 60)
    assert "out before" in text and re.search(rf"^b .* {step} +{step}$", text, re.MULTILINE)
    found = diff(capsys, old, new, "--state", state_of(old, step + 2), "--steps", 30)
    assert figures(found, "before") == pytest.approx({"a": 2 / 3, "b": 0.0, "c": 1 / 3})
    assert figures(found, "after") == pytest.approx({"a": 1 / 3, "b": 0.0, "c": 2 / 3})
    assert figures(found, "runs_out_before") == {"a": None, "b": step, "c": None}


def test_only_more_epochs_need_no_word_and_their_end_is_shown(tmp_path: Path, capsys: Capture) -> None:
    once = ", max_epochs: 1, on_exhausted: renormalise"
    old = write(tmp_path, "old", "{a: 50%, b: 50%}", more=once)
    new = write(tmp_path, "new", "{a: 50%, b: 50%}", more=once.replace("1", "2"))
    found = diff(capsys, old, new, "--state", state_of(old, 3), "--steps", 40)
    assert found["changed"] == ["sources.b.max_epochs"] and found["is_same_order"] and found["accept_edit"] is None
    assert figures(found, "runs_out_before")["b"] in range(23, 28) and figures(found, "runs_out_after")["b"] is None
    assert figures(found, "after") == pytest.approx({"a": 0.5, "b": 0.5}) and figures(found, "before")["b"] < 0.4


def test_what_of_a_begun_ramp_remains(tmp_path: Path, capsys: Capture) -> None:
    ramp = "schedule: [{from: 5 steps, to: 25 steps, set: {a: 10%}}]"
    old = write(tmp_path, "old", "{a: 90%, b: 10%}", extra=ramp)
    new = write(tmp_path, "new", "{a: 90%, b: 10%}", extra=ramp.replace("10%", "50%"))
    state = state_of(old, 17)
    found = diff(capsys, old, new, "--state", state, "--steps", 16)
    assert found["changed"] == ["schedule"]
    # 12 of 20 steps are over: 42 % on the way from 90 to 10 %, or 66 % to 50; 8 steps on the line, then 8 at its end.
    assert figures(found, "before")["a"] == pytest.approx(((0.42 + 0.1) / 2 + 0.1) / 2)
    assert figures(found, "after")["a"] == pytest.approx(((0.66 + 0.5) / 2 + 0.5) / 2)
    place = {"start": 5, "stop": 25}
    assert found["schedule"] == {"before": [place], "after": [place]}
    line = "schedule[0]: a ramp from step 5 to 24; 8 of its 20 steps remain"
    assert line in printed(capsys, old, new, "--state", state, "--steps", 1)


def test_a_ramp_that_began_at_an_epoch_goes_on_under_an_edit(tmp_path: Path, capsys: Capture) -> None:
    ramp = "schedule: [{from: {epochs: 1, of: b}, to: 20 steps, set: {a: 90%}}]"
    old = write(tmp_path, "old", "{a: 50%, b: 50%}", extra=ramp)
    [place] = diff(capsys, old, old, "--steps", 40)["schedule"]["before"]
    begins = place["start"]  # b has 200 documents, and gives half of each step
    assert begins in range(24, 28) and place["stop"] == begins + 20
    state = state_of(old, begins + 15)
    pq.write_table(pa.table({"source": ["a"], "row": [3]}), tmp_path / "deny.parquet")
    new = write(tmp_path, "new", "{a: 50%, b: 50%}", extra=f"{ramp}\ndeny: [deny.parquet]")
    found = diff(capsys, old, new, "--state", state, "--steps", 10)
    assert found["changed"] == ["deny"] and found["schedule"] == {"before": [place], "after": [place]}
    mean = ((0.8 + 0.9) / 2 + 0.9) / 2  # three quarters of the way from 50 to 90 %; 5 steps on the line, 5 at its end
    assert figures(found, "after")["a"] == pytest.approx(mean) and figures(found, "before")["a"] == pytest.approx(mean)
    line = f"schedule[0]: a ramp from step {begins} to {begins + 19}; 5 of its 20 steps remain"
    assert line in printed(capsys, old, new, "--state", state, "--steps", 1)
    longer = write(tmp_path, "new", "{a: 50%, b: 50%}", extra=ramp.replace("20", "30"))
    assert (
        f"before: {line.removeprefix('schedule[0]: ')}; after: a ramp from step {begins} to {begins + 29}; 15 of"
        in (printed(capsys, old, longer, "--state", state, "--steps", 1))
    )


def test_only_shares_changed_where_a_schedule_follows_from_them(tmp_path: Path, capsys: Capture) -> None:
    change = "schedule: [{from: 30 steps, set: {a: 10%}}]"
    old = write(tmp_path, "old", "{a: 50%, b: 30%, c: 20%}", sources="abc", extra=change)
    new = write(tmp_path, "new", "{a: 50%, b: 20%, c: 30%}", sources="abc", extra=change)
    state = state_of(old, 2)
    assert diff(capsys, old, new, "--state", state, "--steps", 2)["changed"] == ["shares"]
    assert "schedule[0]: begins in step 30" in printed(capsys, old, new, "--state", state, "--steps", 2)
    with pytest.raises(StateMismatch, match="mixture and what the schedule leads to changed"):
        run_job(new, Topology(), steps=1, state={"torchmix_state": state.read_bytes()})
    grouped = write(tmp_path, "new", "{a: 50%, g: {share: 50%, children: {b: 3, c: 2}}}", sources="abc")
    found = diff(capsys, old, grouped, "--steps", 2)
    assert found["changed"] == ["groups", "schedule"] and figures(found, "before") == pytest.approx(
        figures(found, "after")
    )


def test_where_and_deny_change_rows_whatever_the_recipes_have_in_common(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "s").mkdir()
    table = {"input_ids": [[number] * TOKENS for number in range(400)], "score": [number % 4 for number in range(400)]}
    pq.write_table(pa.table(table), tmp_path / "s" / "0.parquet")
    mixture = "{a: 50%, good: 50%}"

    def recipe(name: str, where: str, deny: str = "") -> Path:
        path = write(tmp_path, name, mixture, sources="a", extra=deny, index=False)
        lines = (
            "  s: {path: 's/*.parquet', tokens: input_ids, properties: [score]}\n"
            f"  good: {{from: s, where: 'score >= {where}'}}\n"
        )
        path.write_text(path.read_text().replace("mixture:", f"{lines}mixture:"))
        index_recipe(load_recipe(path), tmp_path)
        return path

    old = recipe("old", "1")
    state = state_of(old, 3)
    new = recipe("new", "2")
    found = diff(capsys, old, new, "--steps", 5)
    assert found["changed"] == ["sources.good.where"] and found["is_same_order"] is None
    assert found["accept_edit"] is None and "torchmix index" in found["not_planned"]["before"]
    text = printed(capsys, old, new, "--steps", 5)
    assert "same order" not in text and "--state FILE, of the run, has the code" in text and "?" in text
    found = diff(capsys, old, new, "--state", state, "--steps", 5)
    assert found["changed"] == ["sources.good.where", "rows of good"] and found["is_same_order"] is False
    assert figures(found, "what")["good"] == "other rows" and not found["not_planned"]
    assert found["accept_edit"] == word_of(new, state)
    assert figures(found, "before") == figures(found, "after") == pytest.approx({"a": 0.5, "good": 0.5})

    pq.write_table(pa.table({"source": ["a", "s"], "row": [3, 5]}), tmp_path / "deny.parquet")
    denied = recipe("new", "1", "deny: [deny.parquet]")
    found = diff(capsys, old, denied, "--steps", 5)
    assert found["changed"] == ["deny"] and found["is_same_order"] is not True
    assert "same order" not in printed(capsys, old, denied, "--steps", 5)
    found = diff(capsys, old, denied, "--state", state, "--steps", 5)
    assert found["deny_lists_changed"] and found["accept_edit"] == word_of(denied, state)


def test_added_files_show_with_a_state_and_the_run_as_it_was_comes_from_its_history(
    tmp_path: Path, capsys: Capture
) -> None:
    mixture = "{all: {share: 1, proportional: 1, children: [a, b]}}"
    old = write(tmp_path, "old", mixture)
    state = state_of(old, 3)
    make_tokens_file(tmp_path / "b" / "1.parquet", [[number] * TOKENS for number in range(200, 600)])
    new = write(tmp_path, "new", mixture)
    found = diff(capsys, old, new, "--state", state, "--steps", 10)
    assert (found["changed"], found["is_same_order"]) == (["rows of b"], False)
    assert figures(found, "before") == pytest.approx({"a": 0.75, "b": 0.25})
    assert figures(found, "after") == pytest.approx({"a": 0.5, "b": 0.5})
    assert figures(found, "what") == {"a": "changed", "b": "changed, other rows"}
    for kept in (tmp_path / "catalog" / "history").glob("*"):
        kept.unlink()
    found = diff(capsys, old, new, "--state", state, "--steps", 10)
    assert "no history of the run says which" in found["not_planned"]["before"]
    assert figures(found, "before") == {"a": None, "b": None} and figures(found, "after")["b"] == pytest.approx(0.5)


def test_equal_recipes_need_nothing_and_what_may_not_change_has_no_figures(tmp_path: Path, capsys: Capture) -> None:
    old = write(tmp_path, "old", "{a: 80%, b: 20%}")
    new = write(tmp_path, "new", "{b: 1/5, a: 4/5}")
    found = diff(capsys, old, new, "--steps", 5)
    assert (found["changed"], found["is_same_order"], found["accept_edit"]) == ([], True, None)
    assert "both recipes give the same order" in printed(capsys, old, new, "--steps", 5)
    new.write_text(new.read_text().replace("seed: 3", "seed: 4"))
    assert "these keys differ: seed" in printed(capsys, old, new, "--steps", 5, code=1)
    found = diff(capsys, old, new, "--state", state_of(old, 2), "--steps", 5, code=1)
    assert (found["changed"], found["refused"], found["accept_edit"]) == (["seed"], ["seed"], None)
    assert figures(found, "after") == {"a": None, "b": None}


def test_without_a_catalog_shares_have_a_word_and_no_figures(tmp_path: Path, capsys: Capture) -> None:
    old = write(tmp_path, "old", "{a: 80%, b: 20%}", index=False)
    new = write(tmp_path, "new", "{a: 70%, b: 30%}", index=False)
    found = diff(capsys, old, new)
    assert (found["changed"], found["is_same_order"]) == (["shares"], False) and found["accept_edit"]
    assert figures(found, "after") == {"a": None, "b": None} and "torchmix index" in found["not_planned"]["after"]
