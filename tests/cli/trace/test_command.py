"""`torchmix trace`: what it finds is what a loader hands out, by the tokens themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from tests.support.command_line import values_of
from tests.support.loaders import run_job
from tests.support.numbered_rows import ROWS, delivered, traced, write_numbered
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology
from torchmix.steps.state import encode_state, read_state

Capture = pytest.CaptureFixture[str]
STEPS = 40


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_numbered(tmp_path, "{web: 70%, code: 30%}")


def trace(capsys: Capture, *words: object) -> dict[str, Any]:
    return values_of(capsys, "trace", *words)


def every_row(folder: Path) -> Path:
    path = folder / "rows.txt"
    path.write_text("".join(f"{name}:{row}\n" for name in ("web", "code") for row in range(ROWS)))
    return path


def test_all_documents_are_in_the_steps_in_which_they_were_delivered(recipe: Path, capsys: Capture) -> None:
    [rank] = run_job(recipe, Topology(), steps=STEPS)
    found = trace(capsys, recipe, "--list", every_row(recipe.parent), "--steps", STEPS)
    assert traced(found["pieces"]) == delivered(rank.microbatches)
    assert max(piece["epoch"] for piece in found["pieces"]) > 0, "documents come again"


def test_a_state_ends_the_steps_and_tells_what_was_from_what_will_be(
    recipe: Path, tmp_path: Path, capsys: Capture
) -> None:
    [rank] = run_job(recipe, Topology(), steps=10)
    state = tmp_path / "state.bin"
    state.write_bytes(rank.state["torchmix_state"])
    given = delivered(rank.microbatches)
    name, row = min(given[4])
    was = trace(capsys, recipe, "--state", state, "--row", f"{name}:{row}")
    assert was["stop"] == 10
    assert traced(was["pieces"]) == {
        step: {(name, row): counts[name, row]} for step, counts in given.items() if (name, row) in counts
    }
    assert main(["trace", str(recipe), "--state", str(state), "--steps", "200", "--row", f"{name}:{row}"]) == 0
    text = capsys.readouterr().out
    assert " was " in text and " will be " in text and "1 of 1 documents are in" in text


def test_an_id_stands_for_the_rows_that_have_it(recipe: Path, capsys: Capture) -> None:
    by_row = trace(capsys, recipe, "--row", "web:17", "--steps", STEPS)
    by_id = trace(capsys, recipe, "--id", "https://17.example", "--steps", STEPS)
    assert by_id["pieces"] == by_row["pieces"] != []


def test_a_step_has_the_documents_that_were_delivered(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    [rank] = run_job(recipe, Topology(), steps=6)
    out, deny = tmp_path / "made" / "step.parquet", tmp_path / "deny.parquet"
    assert main(["trace", str(recipe), "--step", "5", "--out", str(out)]) == 2
    assert f"--out {out}: there is no folder {out.parent}; make it" in capsys.readouterr().err
    out.parent.mkdir()
    trace(capsys, recipe, "--step", 5, "--out", out, "--deny-from", deny)
    table = pq.read_table(out)
    assert traced(table.to_pylist()) == {5: delivered(rank.microbatches)[5]}
    for source, row, name in zip(*(table[column].to_pylist() for column in ("source", "row", "id")), strict=True):
        assert name == (f"https://{row}.example" if source == "web" else None)
    denied = pq.read_table(deny)
    assert denied.column_names == ["source", "row"]
    rows = list(zip(denied["source"].to_pylist(), denied["row"].to_pylist(), strict=True))
    assert rows == sorted(delivered(rank.microbatches)[5])


def test_a_deny_list_of_named_documents_needs_no_steps(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "deny.parquet"
    words = ["--row", "code:3", "--id", "https://9.example", "--row", "web:9", "--deny-from", out]
    found = trace(capsys, recipe, *words)
    assert found["files"] == [str(out)] and "pieces" not in found
    assert pq.read_table(out).to_pylist() == [{"source": "code", "row": 3}, {"source": "web", "row": 9}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--row", "wob:3", "--steps", "2"], "there is no source 'wob' (did you mean 'web'?)"),
        (["--row", f"web:{ROWS}", "--steps", "2"], f"'web' has {ROWS} rows"),
        (["--row", "web", "--steps", "2"], "is no row of a source; write it as web:1234"),
        (["--id", "https://nowhere", "--steps", "2"], "no row has the id 'https://nowhere'; looked at the rows of web"),
        (["--row", "web:1"], "give --state FILE"),
        (["--steps", "3"], "name documents with --row, --id or --list, or a step with --step"),
        (["--row", "web:1", "--step", "3"], "name documents with --row, --id or --list, or a step with --step"),
        (["--row", "web:1", "--out", "x", "--deny-from", "y"], "--out writes what was found in steps"),
        (["--list", "nowhere.txt", "--steps", "2"], "No such file"),
    ],
)
def test_what_is_not_there_is_named(recipe: Path, words: list[str], said: str, capsys: Capture) -> None:
    assert main(["trace", str(recipe), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_state_whose_run_had_other_steps_is_refused(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    [rank] = run_job(recipe, Topology(), steps=6)
    state = tmp_path / "state.bin"
    state.write_bytes(rank.state["torchmix_state"])
    write_numbered(tmp_path, "{web: 50%, code: 50%}")
    assert main(["trace", str(recipe), "--row", "web:1", "--state", str(state)]) == 3
    assert "the state was saved with recipe" in capsys.readouterr().err


def test_a_document_that_is_never_drawn_is_named_with_the_reason(tmp_path: Path, capsys: Capture) -> None:
    documents = [[row] * (row % 5) for row in range(40)]
    table = pa.table({"ids": documents, "url": [f"u{row}" for row in range(40)], "lang": ["de", "en"] * 20})
    pq.write_table(table, tmp_path / "web.parquet")
    pq.write_table(pa.table({"source": ["web"], "row": [2]}), tmp_path / "denied.parquet")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        """\
version: 1
seed: 3
batch: {samples: 2, length: 8}
sources:
  web: {path: web.parquet, tokens: ids, id: url, properties: [lang], documents: ["0%", "50%"],
        packing: {overflow: drop, max_length: 3}}
  german: {from: web, where: "lang = 'de'"}
mixture: {german: 1}
deny: [denied.parquet]
packing: {align_tokens: 1}
"""
    )
    assert main(["index", str(recipe), "--quiet"]) == 0
    capsys.readouterr()
    asked = [word for row in (0, 2, 3, 4, 6, 30) for word in ("--id", f"u{row}")]
    found = trace(capsys, recipe, *asked, "--steps", 10)
    assert {piece["row"] for piece in found["pieces"]} == {6}
    assert {one["row"]: one["reason"] for one in found["never"]} == {
        0: "it has no tokens",
        2: "a deny-list names it",
        3: "it is in no stream of the mixture: held out, or in no selection, child or cell",
        4: "overflow: drop leaves out what is longer than 3 tokens",
        30: "train uses the rows 0 to 20 of web",
    }
    assert main(["trace", str(recipe), *asked, "--steps", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "never drawn, since it has no tokens: web:0" in lines
    assert "never drawn, since train uses the rows 0 to 20 of web: web:30" in lines


def test_runs_of_several_recipes_on_a_catalog_are_told_apart(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    """By their own recipes and seeds, kept in the history; an edited run, too."""
    runs = tmp_path / "runs"
    (runs / "second").mkdir(parents=True)
    [first] = run_job(recipe, Topology(), steps=12)
    (runs / "first.bin").write_bytes(first.state["torchmix_state"])
    text = recipe.read_text()
    recipe.write_text(text.replace("seed: ", "seed: 1"))
    [second] = run_job(recipe, Topology(), steps=7)
    (runs / "second" / "7.bin").write_bytes(second.state["torchmix_state"])
    expected = {"first.bin": delivered(first.microbatches), "second/7.bin": delivered(second.microbatches)}
    assert expected["first.bin"][0] != expected["second/7.bin"][0]
    for now in (text, recipe.read_text()):  # whichever of them is the recipe now
        recipe.write_text(now)
        found = trace(capsys, recipe, "--list", every_row(recipe.parent), "--runs", runs)
        for run, given in expected.items():
            assert traced([piece for piece in found["pieces"] if piece["run"] == run]) == given
        assert found["runs"] == {"first.bin": {"start": 0, "stop": 12}, "second/7.bin": {"start": 0, "stop": 7}}
    assert main(["trace", str(recipe), "--runs", str(runs), "--row", "web:17", "--start", "2", "--steps", "5"]) == 0
    assert "first.bin: " in (said := capsys.readouterr().out) and "in the steps 2 to 4" in said
    (runs / "third").write_bytes(b"no state")
    assert main(["trace", str(recipe), "--runs", str(runs), "--row", "web:17"]) == 3
    assert "third: " in capsys.readouterr().err
    state = read_state(first.state["torchmix_state"])
    other = encode_state(replace(state, at=replace(state.at, order_digest=b"no digest"[:8])))
    (runs / "third").write_bytes(other)
    assert main(["trace", str(recipe), "--runs", str(runs), "--row", "web:17"]) == 3
    assert f"{runs / 'third'}: the recipes that are known of the steps before" in capsys.readouterr().err
    (runs / "third").write_bytes(first.state["torchmix_state"])
    recipe.write_text(text.replace("seed: ", "seed: 2"))
    for kept in (recipe.parent / "catalog" / "history").glob("*.run.json"):
        kept.unlink()
    assert main(["trace", str(recipe), "--runs", str(runs), "--row", "web:17"]) == 3
    assert "first.bin: no run of its recipe" in capsys.readouterr().err
