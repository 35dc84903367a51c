"""The history of edited runs: earlier steps are planned as they were given, by the tokens; what is missing is named."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.command_line import values_of
from tests.support.files import make_tokens_file, random_tokens
from tests.support.loaders import run_job
from tests.support.numbered_rows import Document, delivered, traced, write_numbered
from torchmix.catalog.store import open_part
from torchmix.cli.main import main
from torchmix.errors import CatalogStale, HistoryMissing, StateMismatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.place_tree import Layout
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import Part, part_of
from torchmix.stateful.open import build_loader
from torchmix.stateful.stream import StepStream
from torchmix.steps.history import RunHistory, Segment, segments_of_recipe
from torchmix.steps.state import read_state, start_state

Capture = pytest.CaptureFixture[str]
Given = dict[int, Counter[Document]]
ALONE = Topology()
EDIT, STOP = 9, 16
FIRST, SECOND = "{web: 70%, code: 30%}", "{web: 20%, code: 40%, late: 40%}"
SOURCES = "web code late"


def word_of(recipe: Path, state: dict[str, Any]) -> str | None:
    """The code that accepts the recipe, if it is an edit."""
    with build_loader(recipe, topology=ALONE, loaders="in_process") as loader:
        try:
            loader.load_state_dict(state)
        except StateMismatch as error:
            return str(re.findall(r"accept_edit='([0-9a-f]+)'", str(error))[0])
    return None


def run(recipe: Path, stop: int, state: dict[str, Any] | None = None, **options: Any) -> tuple[Given, dict[str, Any]]:
    """Steps up to `stop`, with whatever edit the recipe is; what was delivered, and the state."""
    word = None if state is None else word_of(recipe, state)

    def program(loader: Any, rank: Any) -> None:
        if state is not None:
            loader.load_state_dict(state, accept_edit=word)
        for microbatch in loader:
            rank.microbatches.append(microbatch)
            if microbatch.is_last_of_step and microbatch.step == stop - 1:
                break

    [rank] = run_job(recipe, ALONE, program=program, **options)
    return delivered(rank.microbatches), rank.state


def edited(folder: Path, *, edit: int = EDIT) -> tuple[Path, Given, dict[str, Any]]:
    """A run with an edit at a step: the recipe, what was delivered, the state at STOP."""
    before, state = run(write_numbered(folder, FIRST), edit)
    recipe = write_numbered(folder, SECOND, sources=SOURCES)
    after, state = run(recipe, STOP, state)
    return recipe, {**before, **after}, state


def save(folder: Path, state: dict[str, Any], name: str = "state.bin") -> Path:
    (folder / name).write_bytes(state["torchmix_state"])
    return folder / name


def trace_all(capsys: Capture, recipe: Path, *words: object) -> dict[str, Any]:
    rows = recipe.parent / "rows.txt"
    rows.write_text("".join(f"{name}:{row}\n" for name in SOURCES.split() for row in range(600)))
    return values_of(capsys, "trace", recipe, "--list", rows, *words)


@pytest.mark.parametrize("by_state", [True, False])
def test_every_step_of_an_edited_run_is_traced_as_it_was_given(by_state: bool, tmp_path: Path, capsys: Capture) -> None:
    recipe, given, state = edited(tmp_path)
    words: list[object] = ["--state", save(tmp_path, state)] if by_state else ["--steps", STOP]
    found = trace_all(capsys, recipe, *words)
    assert traced(found["pieces"]) == given and len(given) == STOP
    assert found["edits"] == [EDIT]


@pytest.mark.parametrize("is_resumed", [True, False])
def test_steps_before_other_epochs_are_those_of_the_run(is_resumed: bool, tmp_path: Path, capsys: Capture) -> None:
    def write(epochs: int) -> Path:
        recipe = write_numbered(tmp_path, "{web: 5%, late: 5%, code: 90%}", sources=SOURCES)
        bound = f"max_epochs: {epochs}, on_exhausted: renormalise"
        recipe.write_text(recipe.read_text().replace("code.parquet, ", f"code.parquet, {bound}, "))
        return recipe

    given, state = run(write(1), 40)
    recipe = write(2)
    if is_resumed:
        after, state = run(recipe, 44, state)
        given |= after
    at = read_state(state["torchmix_state"]).at
    assert [one.step for one in at.decisions] == ([] if is_resumed else [at.decisions[0].step]), "code comes again"
    found = trace_all(capsys, recipe, "--state", save(tmp_path, state))
    assert traced(found["pieces"]) == given and found["edits"] == []
    counts = [len([*(tmp_path / "catalog" / "history").glob("*.run.json")]) for _ in range(2) if run(recipe, 46, state)]
    assert counts[0] == counts[1], "one entry for one beginning"


def test_a_plan_and_a_step_shown_are_those_of_the_run(tmp_path: Path, capsys: Capture) -> None:
    recipe, given, state = edited(tmp_path)
    capsys.readouterr()
    for step in (0, EDIT - 1, EDIT, STOP - 1):
        assert main(["show", str(recipe), "--step", str(step), "--json"]) == 0
        pieces = [piece for sample in json.loads(capsys.readouterr().out)["samples"] for piece in sample["pieces"]]
        shown = Counter({(piece["source"], piece["row"]): 0 for piece in pieces})
        for piece in pieces:
            shown[piece["source"], piece["row"]] += piece["tokens"]
        assert shown == given[step]
    assert main(["plan", str(recipe), "--steps", str(STOP), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["edits"] == [EDIT] and [source["name"] for source in plan["sources"]] == ["code", "late", "web"]
    tokens = sum((counts for counts in given.values()), Counter[Document]())
    for source in plan["sources"]:
        assert source["delivered_tokens"] == sum(n for (name, _), n in tokens.items() if name == source["name"])
    assert main(["plan", str(recipe), "--steps", "3", "--state", str(save(tmp_path, state)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_step"] == STOP
    assert main(["plan", str(recipe), "--steps", str(STOP), "--out", str(tmp_path / "out")]) == 2
    assert f"the run was edited at step {EDIT}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_before_a_source_was_removed_is_shown(tmp_path: Path, capsys: Capture) -> None:
    before, state = run(write_numbered(tmp_path, FIRST), EDIT)
    recipe = write_numbered(tmp_path, "{web: 100%}", sources="web")
    _, state = run(recipe, STOP, state)
    for words in ([], ["--state", str(save(tmp_path, state))]):
        capsys.readouterr()
        assert main(["show", str(recipe), "--step", "2", *words, "--json"]) == 0
        shown: Counter[Document] = Counter()
        for sample in json.loads(capsys.readouterr().out)["samples"]:
            for piece in sample["pieces"]:
                shown[piece["source"], piece["row"]] += piece["tokens"]
        assert shown == before[2] and "code" in {name for name, _ in shown}
        page = tmp_path / "page.html"
        assert main(["show", str(recipe), "--step", "2", *words, "--html", str(page)]) == 0
        assert "code" in page.read_text(encoding="utf-8")
        assert main(["show", str(recipe), "--step", "2", *words]) == 0
        assert main(["trace", str(recipe), "--step", "2", *words, "--json"]) == 0
        assert main(["trace", str(recipe), "--step", "2", "--out", str(tmp_path / "t.parquet"), *words]) == 0
        assert main(["trace", str(recipe), "--step", "2", "--deny-from", str(tmp_path / "d.parquet"), *words]) == 0
        assert main(["plan", str(recipe), "--steps", str(STOP), "--json"]) == 0


def test_a_step_number_alone_begins_in_the_edited_run(tmp_path: Path) -> None:
    recipe, given, state = edited(tmp_path)
    again, last = run(recipe, STOP, start_step=EDIT + 3)
    assert again == {step: given[step] for step in range(EDIT + 3, STOP)}
    assert last == state
    with pytest.raises(HistoryMissing, match=f"has had this recipe since step {EDIT}, and was to begin at step 4"):
        run(recipe, STOP, start_step=4)


def test_a_recipe_that_comes_back_is_the_same_run(tmp_path: Path, capsys: Capture) -> None:
    _, given, state = edited(tmp_path)
    recipe = write_numbered(tmp_path, FIRST)
    more, _ = run(recipe, STOP + 6, state)
    found = trace_all(capsys, write_numbered(tmp_path, SECOND, sources=SOURCES), "--steps", STOP)
    assert traced(found["pieces"]) == given
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(f"{name}:{row}\n" for name in SOURCES.split() for row in range(600)))
    write_numbered(tmp_path, FIRST)
    capsys.readouterr()
    assert main(["trace", str(recipe), "--list", str(rows), "--steps", str(STOP + 6), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert traced(found["pieces"]) == {**given, **more} and found["edits"] == [EDIT, STOP]


def test_what_does_not_decide_the_order_is_that_of_the_recipe_at_hand(tmp_path: Path, capsys: Capture) -> None:
    recipe, given, state = edited(tmp_path)
    balances = ["", "balance: {model: {layers: 2, hidden: 32, ffn: 64, heads: 2}}"]
    for balance in balances:  # each start keeps its recipe
        write_numbered(tmp_path, FIRST, extra=balance)
        run(recipe, 2)
    capsys.readouterr()
    assert main(["plan", str(recipe), "--steps", "2", "--json"]) == 0, "starts of one order are one run"
    assert json.loads(capsys.readouterr().out)["edits"] == []
    write_numbered(tmp_path, SECOND, sources=SOURCES, extra=balances[1])
    run(recipe, STOP + 2, state)
    part = part_of(load_recipe(recipe), "train")
    present = Segment(part=part, catalog=open_part(tmp_path / "catalog", part))
    segments = segments_of_recipe(tmp_path / "catalog", present)
    assert [segment.step for segment in segments] == [0, EDIT]
    assert segments[-1].part == part and segments[-1].part.balance.model is not None
    found = trace_all(capsys, recipe, "--steps", STOP)
    assert traced(found["pieces"]) == given


def test_an_edit_that_is_accepted_again_by_another_job_is_one_run(tmp_path: Path, capsys: Capture) -> None:
    """Its first job was lost before it has saved, and the next one has other ranks and microbatches."""
    before, state = run(write_numbered(tmp_path, FIRST), EDIT)
    recipe = write_numbered(tmp_path, SECOND, sources=SOURCES)
    run(recipe, EDIT + 1, state)
    after, _ = run(recipe, STOP, state, micro_batch_size=2)
    assert entries_in(tmp_path) == [(0, False), (EDIT, True)]
    found = trace_all(capsys, recipe, "--steps", STOP)
    assert traced(found["pieces"]) == {**before, **after}


def test_branches_are_told_apart_by_a_state_and_never_guessed(tmp_path: Path, capsys: Capture) -> None:
    recipe = write_numbered(tmp_path, FIRST)
    early_given, early = run(recipe, 5)
    late_given, late = run(recipe, EDIT, early)
    recipe = write_numbered(tmp_path, SECOND, sources=SOURCES)
    branch, state_of_branch = run(recipe, STOP, early)
    other, state_of_other = run(recipe, STOP, late)
    capsys.readouterr()
    assert main(["trace", str(recipe), "--row", "web:1", "--steps", "3"]) == 3
    assert "2 runs have had this recipe (from step 5 on, from step 9 on)" in capsys.readouterr().err
    with pytest.raises(HistoryMissing, match="2 runs have had this recipe"):
        run(recipe, STOP, start_step=12)
    found = trace_all(capsys, recipe, "--state", save(tmp_path, state_of_branch))
    assert traced(found["pieces"]) == {**early_given, **branch}
    found = trace_all(capsys, recipe, "--state", save(tmp_path, state_of_other))
    assert traced(found["pieces"]) == {**early_given, **late_given, **other}


def test_documents_of_a_spike_are_taken_out_and_the_run_stays_traceable(tmp_path: Path, capsys: Capture) -> None:
    recipe = write_numbered(tmp_path, FIRST)
    before, state = run(recipe, EDIT)
    words = ["--step", str(EDIT - 1), "--deny-from", str(tmp_path / "spike.parquet")]
    assert main(["trace", str(recipe), *words]) == 0
    write_numbered(tmp_path, FIRST, extra="deny: [spike.parquet]")
    after, state = run(recipe, 40, state)
    assert not set(before[EDIT - 1]) & {document for counts in after.values() for document in counts}
    found = trace_all_of(capsys, recipe, save(tmp_path, state))
    assert traced(found["pieces"]) == {**before, **after} and found["edits"] == [EDIT]


def test_a_start_by_number_with_other_documents_denied_is_a_run_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    recipe = write_numbered(tmp_path, FIRST)
    run(recipe, 5)
    words = ["--step", "4", "--deny-from", str(tmp_path / "spike.parquet")]
    assert main(["trace", str(recipe), *words]) == 0
    deny = "deny: [spike.parquet]"
    given, state = run(write_numbered(tmp_path, FIRST, extra=deny), EDIT, start_step=5)
    after, state = run(write_numbered(tmp_path, SECOND, sources=SOURCES, extra=deny), STOP, state)
    assert entries_in(tmp_path) == [(0, False), (0, False), (EDIT, True)]
    found = trace_all(capsys, recipe, "--state", save(tmp_path, state))
    told = traced(found["pieces"])
    assert {step: told[step] for step in range(5, STOP)} == {**given, **after} and found["edits"] == [EDIT]


def test_a_run_that_begins_with_an_edited_recipe_is_no_edit_of_the_one_before(tmp_path: Path, capsys: Capture) -> None:
    before, state = run(write_numbered(tmp_path, FIRST), 5)
    recipe = write_numbered(tmp_path, SECOND, sources=SOURCES)
    fresh, state_of_fresh = run(recipe, 6)
    assert entries_in(tmp_path) == [(0, False), (0, False)]
    found = trace_all(capsys, recipe, "--steps", 6)
    assert traced(found["pieces"]) == fresh and found["edits"] == []
    after, state = run(recipe, EDIT, state)
    assert entries_in(tmp_path) == [(0, False), (0, False), (5, True)]
    for saved, given, edits in [(state, {**before, **after}, [5]), (state_of_fresh, fresh, [])]:
        found = trace_all(capsys, recipe, "--state", save(tmp_path, saved))
        assert traced(found["pieces"]) == given and found["edits"] == edits


def entries_in(folder: Path) -> list[tuple[int, bool]]:
    """The step of each entry, and whether a state stands there."""
    entries = [json.loads(path.read_bytes()) for path in (folder / "catalog" / "history").glob("*.run.json")]
    return sorted((entry["step"], bool(entry["state"])) for entry in entries)


@pytest.mark.parametrize("what", ["all", "first", "altered", "foreign"])
def test_a_history_that_is_gone_is_named_and_later_steps_need_only_a_state(
    what: str, tmp_path: Path, capsys: Capture
) -> None:
    recipe, _, state = edited(tmp_path)
    folder = tmp_path / "catalog" / "history"
    entries = {json.loads(path.read_bytes())["step"]: path for path in folder.glob("*.run.json")}
    assert sorted(entries) == [0, EDIT]
    if what == "foreign":  # of a run that was edited at another step
        edited(tmp_path, edit=EDIT - 4)
        entries[EDIT].unlink()
    elif what == "altered":
        entries[EDIT].write_bytes(entries[EDIT].read_bytes() + b"\n")
    else:
        for path in entries.values() if what == "all" else [entries[0]]:
            path.unlink()
    file = save(tmp_path, state)
    capsys.readouterr()
    assert main(["trace", str(recipe), "--row", "web:1", "--state", str(file)]) == 3
    others = "give other steps than the run had"
    said = {"all": others, "first": "does not have the recipe", "altered": "was altered", "foreign": others}
    assert said[what] in capsys.readouterr().err
    assert (
        main(["trace", str(recipe), "--row", "web:1", "--state", str(file), "--start", str(STOP), "--steps", "20"]) == 0
    )


def test_a_run_goes_on_where_the_history_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = write_numbered(tmp_path, FIRST)
    (tmp_path / "catalog" / "history").write_text("in the way")
    given, _ = run(recipe, 3)
    assert len(given) == 3 and "the history of this run is not kept" in caplog.text


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_kill_between_two_files_leaves_a_whole_history_to_the_next_start(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder = write_numbered(tmp_path, FIRST), tmp_path / "catalog" / "history"
    whole, replaced = Path.replace, []

    def killed(path: Path, target: Path) -> Path:
        if target.parent == folder:
            if len(replaced) == written:
                raise KeyboardInterrupt
            replaced.append(target)
        return whole(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        RunHistory(tmp_path / "catalog", *facts_of(recipe)).keep(
            start_state(Layout(), recipe="x"), catalog=print_of(recipe)
        )
    assert not list(folder.glob("*.run.json")) and len(list(folder.glob("[!.]*"))) == written
    monkeypatch.undo()
    run(recipe, 2)
    assert len(list(folder.glob("*.run.json"))) == 1 and len(list(folder.iterdir())) == 3


def facts_of(recipe: Path) -> tuple[Any, Part]:
    """A recipe as plain values, and its part for training."""
    loaded = load_recipe(recipe)
    return msgspec.to_builtins(loaded), part_of(loaded, "train")


def print_of(recipe: Path) -> str:
    """Fingerprint of the catalog."""
    return open_part(recipe.parent / "catalog", facts_of(recipe)[1]).fingerprint


def test_an_index_run_keeps_the_arrays_of_a_run(tmp_path: Path, capsys: Capture) -> None:
    recipe, given, state = edited(tmp_path)
    for _ in range(3):  # arrays of the manifest before the last would go
        assert main(["index", str(recipe), "--force"]) == 0
    found = trace_all(capsys, recipe, "--state", save(tmp_path, state))
    assert traced(found["pieces"]) == given


def test_an_unwritten_history_leaves_an_unedited_run_traceable(tmp_path: Path, capsys: Capture) -> None:
    recipe = write_numbered(tmp_path, FIRST)
    given, state = run(recipe, 6)
    for path in (tmp_path / "catalog" / "history").iterdir():
        path.unlink()
    found = trace_all_of(capsys, recipe, save(tmp_path, state))
    assert traced(found["pieces"]) == given


def trace_all_of(capsys: Capture, recipe: Path, state: Path) -> dict[str, Any]:
    rows = recipe.parent / "rows.txt"
    rows.write_text("".join(f"{name}:{row}\n" for name in ("web", "code") for row in range(600)))
    capsys.readouterr()
    assert main(["trace", str(recipe), "--list", str(rows), "--state", str(state), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_job_goes_on_with_its_own_catalog_after_another_index(tmp_path: Path) -> None:
    make_tokens_file(tmp_path / "web-0.parquet", random_tokens(1, 300))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nseed: 5\nbatch: {samples: 4, length: 64}\nmixture: {web: 1}\n"
        'sources: {web: {path: "web-*.parquet", tokens: input_ids}}\n'
    )
    with build_loader(recipe, topology=ALONE, loaders="in_process", max_steps=6) as loader:
        state = [loader.state_dict() for microbatch in loader if microbatch.step == 1][-1]
        stream = StepStream(loader.dataset._settings)  # as the worker that takes the place of a lost one opens it
        for later in ("another file", "other settings"):
            if later == "another file":
                make_tokens_file(tmp_path / "web-1.parquet", random_tokens(2, 300))
            else:
                recipe.write_text(recipe.read_text().replace("length: 64", "length: 64}\nshuffle: {window_pages: 3"))
            index_recipe(load_recipe(recipe), tmp_path)
            stream.load_state_dict(state)
            assert [step.header.step for step in stream] == [2, 3, 4, 5], later
            assert stream.state_dict() == loader.state_dict(), later
        for path in (tmp_path / "catalog" / "history").iterdir():
            path.unlink()
        with pytest.raises(CatalogStale):
            list(stream)
        recipe.write_text(recipe.read_text().replace("\nshuffle: {window_pages: 3}", ""))
        index_recipe(load_recipe(recipe), tmp_path)
        with pytest.raises(CatalogStale, match=r"indexed again while this job ran: .* start the job again from"):
            list(stream)
