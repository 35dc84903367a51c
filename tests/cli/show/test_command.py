"""`torchmix show`: what it shows is what the files hold, and what a loader hands out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.command_line import values_of
from tests.support.files import make_text_file
from tests.support.projects import make_project
from tests.support.templates import made_once
from tests.support.vocabularies import END, make_tokenizer
from torchmix.cli.main import main
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe
from torchmix.stateful.open import build_loader

Capture = pytest.CaptureFixture[str]


@made_once
def project(folder: Path) -> None:
    make_tokenizer(folder / "t.json")
    path = make_project(folder, ("tokenizer: bytes", f'tokenizer: t.json, end_id: "{END}"'))
    make_text_file(folder / "code.parquet", ["\x1b[31mred\n\ttwo", None, "", "plain", *["word " * 40] * 60])
    index_recipe(load_recipe(path), folder)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return Path(shutil.copytree(project(), tmp_path, dirs_exist_ok=True)) / "recipe.yaml"


def shown(capsys: Capture, *words: object) -> dict[str, Any]:
    return values_of(capsys, "show", *words)


def test_rows_are_those_of_the_files(recipe: Path, capsys: Capture) -> None:
    documents = []
    for number in range(2):
        documents += pq.read_table(recipe.parent / "data" / f"web-{number}.parquet")["input_ids"].to_pylist()
    rows = shown(capsys, recipe, "--source", "web", "--rows", "1490:1510")["rows"]
    assert [row["ids"] for row in rows] == documents[1490:1510]
    assert [(row["row"], row["file"], row["file_row"]) for row in rows[9:11]] == [
        (1499, "data/web-0.parquet", 1499),
        (1500, "data/web-1.parquet", 0),
    ]
    assert all(row["text"] is None for row in rows)
    [row] = shown(capsys, recipe, "--source", "web", "--row", 2999)["rows"]
    assert row["ids"] == documents[2999] and row["tokens"] == len(documents[2999])


def test_a_page_is_shown_whole(recipe: Path, capsys: Capture) -> None:
    [last] = shown(capsys, recipe, "--source", "web", "--row", 2999)["rows"]
    rows = shown(capsys, recipe, "--source", "web", "--page", last["page"])["rows"]
    assert rows[-1] == last and {row["page"] for row in rows} == {last["page"]}
    [before] = shown(capsys, recipe, "--source", "web", "--row", rows[0]["row"] - 1)["rows"]
    assert before["page"] == last["page"] - 1


def test_text_is_what_the_ids_say_and_ids_come_when_asked(recipe: Path, capsys: Capture) -> None:
    rows = shown(capsys, recipe, "--source", "code", "--rows", "0:4")["rows"]
    assert [row["text"] for row in rows] == [f"\x1b[31mred\n\ttwo{END}", "", END, f"plain{END}"]
    assert all(row["ids"] is None for row in rows)
    rows = shown(capsys, recipe, "--source", "code", "--rows", "0:4", "--tokens")["rows"]
    assert [len(row["ids"]) for row in rows] == [row["tokens"] for row in rows]
    assert rows[1]["ids"] == [] and rows[2]["ids"] == [0]


def test_ids_become_text_with_a_tokenizer_that_is_named(
    recipe: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = shown(capsys, recipe, "--source", "tiny", "--row", 0, "--tokenizer", "bytes")["rows"]
    assert row["ids"] is None and "<|" in row["text"]
    monkeypatch.chdir(recipe.parent / "data")  # a path of the command line is relative to where it is given
    [row] = shown(capsys, recipe, "--source", "tiny", "--row", 0, "--tokenizer", "../t.json")["rows"]
    assert row["text"]


def test_what_a_document_holds_does_not_act_on_the_terminal(recipe: Path, capsys: Capture) -> None:
    assert main(["show", str(recipe), "--source", "code", "--row", "0", "--tokens"]) == 0
    place, first, second, ids, _ = capsys.readouterr().out.split("\n")
    assert place.startswith("--- code row 0: code.parquet row 0, page 0, ")
    assert first == "\\x1b[31mred" and second == f"\ttwo{END}"
    assert ids.split()[-1] == "0"


def tokens_shown(step: dict[str, Any], length: int) -> dict[int, np.ndarray]:
    """The samples of a step, each as the model gets it."""
    samples = {}
    for sample in step["samples"]:
        row = np.zeros(length, np.int64)
        for piece in sample["pieces"]:
            assert len(piece["ids"]) == piece["tokens"]
            row[piece["offset"] : piece["offset"] + piece["tokens"]] = piece["ids"]
        samples[sample["sample"]] = row
    return samples


def test_a_step_is_the_one_that_a_loader_hands_out(recipe: Path, capsys: Capture) -> None:
    steps: dict[int, dict[int, np.ndarray]] = {}
    with build_loader(recipe, micro_batch_size=2, loaders="in_process", max_steps=5) as loader:
        for microbatch in loader:
            rows = steps.setdefault(microbatch.step, {})
            for slot in range(2):
                rows[2 * microbatch.index + slot] = microbatch.tokens[slot].numpy()
            if microbatch.step == 3 and microbatch.is_last_of_step:
                (recipe.parent / "state").write_bytes(loader.state_dict()["torchmix_state"])
        digest = loader.order_digest
    step = shown(capsys, recipe, "--step", 4, "--tokens", "--micro-batch-size", 2)
    assert step["order_digest"] == digest and step["step"] == 4
    samples = tokens_shown(step, 256)
    placed = [(sample["microbatch"], sample["sample"]) for sample in step["samples"]]
    for slot, (_, sample) in enumerate(sorted(placed)):
        assert np.array_equal(steps[4][slot], samples[sample])
    assert (
        shown(capsys, recipe, "--step", 4, "--tokens", "--micro-batch-size", 2, "--state", recipe.parent / "state")
        == step
    )
    earlier = shown(capsys, recipe, "--step", 3, "--tokens", "--micro-batch-size", 2)
    again = shown(capsys, recipe, "--step", 3, "--tokens", "--micro-batch-size", 2, "--state", recipe.parent / "state")
    assert again == earlier, "a step before the state is planned from the run's beginning"


def test_a_step_is_shown_in_part(recipe: Path, capsys: Capture) -> None:
    layout = ("--dp", 2, "--micro-batch-size", 2)
    whole = shown(capsys, recipe, "--step", 1, *layout)["samples"]
    assert [sample["sample"] for sample in whole] == list(range(16))
    assert shown(capsys, recipe, "--step", 1, "--sample", 7, *layout)["samples"] == [whole[7]]
    part = shown(capsys, recipe, "--step", 1, "--dp-rank", 1, "--microbatch", 3, *layout)["samples"]
    assert part == [sample for sample in whole if (sample["dp_rank"], sample["microbatch"]) == (1, 3)]
    assert len(part) == 2
    assert len(shown(capsys, recipe, "--step", 1, "--microbatch", 0, *layout)["samples"]) == 4


def test_a_step_says_where_each_piece_is_from(recipe: Path, capsys: Capture) -> None:
    [sample] = shown(capsys, recipe, "--step", 0, "--sample", 0)["samples"]
    assert sample["tokens"] == sum(piece["tokens"] for piece in sample["pieces"]) <= 256
    for piece in sample["pieces"]:
        words = ("--source", piece["source"], "--row", piece["row"], "--tokens")
        [row] = shown(capsys, recipe, *words)["rows"]
        assert (row["file"], row["file_row"], row["tokens"]) == (
            piece["file"],
            piece["file_row"],
            piece["document_tokens"],
        )
        assert piece["start"] + piece["tokens"] <= piece["document_tokens"]
    assert main(["show", str(recipe), "--step", "0", "--characters", "5", "--tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"step 0 of {recipe}: 16 samples x 256 tokens, digest ")
    assert sum(line.startswith("sample ") for line in lines) == 16
    assert any(" ... " in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source", "wep", "--row", "0"], "no such source (did you mean 'web'?)"),
        (["--source", "web", "--row", "3000"], "--row: source 'web' has 3000 rows"),
        (["--source", "web", "--rows", "2999:3001"], "--rows: source 'web' has 3000 rows"),
        (["--source", "web", "--rows", "5:5"], "'5:5' is no range"),
        (["--source", "web", "--rows", "5"], "'5' is no range"),
        (["--source", "tiny", "--page", "99"], "source 'tiny' has 1 pages"),
        (["--source", "web"], "--source needs --row"),
        (["--source", "web", "--row", "1", "--dp-rank", "0"], "--dp-rank goes with --step"),
        (["--step", "0", "--page", "1"], "--page goes with --source"),
        (["--step", "0", "--sample", "16"], "step 0 has 16 samples"),
        (["--step", "0", "--sample", "1", "--microbatch", "0"], "--sample names one sample"),
        (["--step", "0", "--dp-rank", "1"], "--dp-rank 1: there are 1"),
        (["--step", "0", "--dp", "3"], "3"),
        (["--step", "0", "--part", "test"], "test"),
        (["--step", "0", "--source", "web"], "not allowed with"),
        ([], "one of the arguments --source --step is required"),
        (["--source", "tiny", "--row", "0", "--tokenizer", "gpt2"], "gpt2"),
    ],
)
def test_what_is_not_there_is_a_fault_of_usage(recipe: Path, words: list[str], message: str, capsys: Capture) -> None:
    assert main(["show", str(recipe), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_part_is_shown_by_its_own_steps(recipe: Path, capsys: Capture) -> None:
    recipe.write_text(recipe.read_text() + "split: [8, 2]\n")
    step = shown(capsys, recipe, "--step", 0, "--part", "validation")
    rows = {piece["row"] for sample in step["samples"] for piece in sample["pieces"] if piece["source"] == "web"}
    assert rows and min(rows) >= 2400


def test_a_damaged_or_foreign_state_is_refused(recipe: Path, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"nothing")
    assert main(["show", str(recipe), "--step", "0", "--state", str(tmp_path / "state")]) == 3
    assert "no torchmix state" in capsys.readouterr().err
    assert main(["show", str(recipe), "--step", "0", "--state", str(tmp_path / "missing")]) == 3
    assert "missing" in capsys.readouterr().err
