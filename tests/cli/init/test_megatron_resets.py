"""What init writes of Megatron's switches about the ends of documents, and of EODs inside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.indexed_datasets import write_dataset
from torchmix.cli.init import megatron_blend as inner_ends
from torchmix.cli.init.megatron_blend import InnerEnds, look_for_inner_ends
from torchmix.cli.main import main
from torchmix.recipe.load import load_recipe

EOD = 9
WORDS = ["--seq-length", "16", "--global-batch-size", "4"]


def documents(count: int, *, holding: int, end: int | None = EOD) -> list[list[int]]:
    """Documents of which the first `holding` have an EOD inside; `end` None: each ends with another id."""
    return [
        [1, 2, *([EOD] if number < holding else []), 3, end if end is not None else 20 + number]
        for number in range(count)
    ]


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "joined", documents(50, holding=30))
    write_dataset(tmp_path / "plain", documents(50, holding=0))
    write_dataset(tmp_path / "no_eod", documents(50, holding=20, end=None))


def init(*words: str, capsys: Any) -> tuple[Any, list[str]]:
    assert main(["init", "--data-path", "1", "joined", "1", "plain", *WORDS, "--json", *words]) == 0
    return load_recipe("recipe.yaml"), json.loads(capsys.readouterr().out)["warnings"]


@pytest.mark.parametrize(
    ("flags", "boundaries", "positions", "reset_loss"),
    [
        (["--reset-position-ids"], "none", "document", "keep"),
        (["--reset-attention-mask"], "document", "sample", "keep"),
        (["--eod-mask-loss"], "none", None, "mask"),
        (["--reset-position-ids", "--reset-attention-mask"], "document", None, "keep"),
        (["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"], "document", None, "mask"),
    ],
)
def test_each_switch_is_written_by_itself(
    flags: list[str], boundaries: str, positions: str | None, reset_loss: str, capsys: Any
) -> None:
    recipe, warnings = init(*flags, "--split", "1,0,0", capsys=capsys)
    packing = recipe.packing
    assert (packing.boundaries, packing.positions, packing.reset_loss) == (boundaries, positions, reset_loss)
    assert {name: source.reset_id for name, source in recipe.sources.items()} == {"joined": EOD, "plain": None}
    [warning] = [warning for warning in warnings if "EOD" in warning]
    assert warning.startswith("joined: the 50 documents looked at all end with id 9, and 30 hold it inside, too")
    text = Path("recipe.yaml").read_text()
    assert "reset_id: 9}  # 30 of 50 documents looked at hold this EOD inside" in text


def test_without_a_switch_nothing_resets_and_nothing_is_looked_at(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(inner_ends, "LocalFile", None)
    recipe, _ = init("--split", "1,0,0", capsys=capsys)
    assert {source.reset_id for source in recipe.sources.values()} == {None}
    assert (recipe.packing.boundaries, recipe.packing.positions) == ("none", None)
    assert main(["init", "--data-path", "joined", *WORDS, "--eod-id", "9", "--force"]) == 2
    assert "--eod-id says which id resets; give it with --reset-position-ids" in capsys.readouterr().err


def test_an_eod_that_is_given_needs_no_guess(capsys: Any) -> None:
    words = ["--reset-attention-mask", "--split", "1,0,0", "--eod-id", str(EOD)]
    recipe, warnings = init(*words, capsys=capsys)
    assert {name: source.reset_id for name, source in recipe.sources.items()} == {"joined": EOD, "plain": None}
    assert not any("EOD" in warning for warning in warnings)
    assert main(["init", "--data-path", "no_eod", *WORDS, *words, "--force"]) == 0
    assert load_recipe("recipe.yaml").sources["no_eod"].reset_id == EOD


def test_documents_that_end_with_several_ids_are_told_of(capsys: Any) -> None:
    words = ["--reset-attention-mask", "--split", "1,0,0", "--json"]
    assert main(["init", "--data-path", "no_eod", *WORDS, *words]) == 0
    assert "no_eod: its documents end with different ids" in json.loads(capsys.readouterr().out)["warnings"][0]
    assert load_recipe("recipe.yaml").sources["no_eod"].reset_id is None


def test_a_large_dataset_is_looked_at_in_places_and_an_id_is_written_to_be_sure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_ends, "LOOK_BYTES", 640)
    monkeypatch.setattr(inner_ends, "BLOCK_DOCUMENTS", 3)
    path = write_dataset(tmp_path / "large", documents(2000, holding=0))
    found = look_for_inner_ends(path, end_id=None)
    assert (found.end_id, found.num_holding, found.is_whole) == (EOD, 0, False)
    assert 16 <= found.num_documents <= 96
    assert main(["init", "--data-path", "large", *WORDS, "--eod-mask-loss"]) == 0
    assert load_recipe("recipe.yaml").sources["large"].reset_id == EOD


def test_sequences_of_a_document_are_joined_and_empty_documents_end_with_nothing(tmp_path: Path) -> None:
    sequences = [[1, EOD], [2, EOD], [], [3, EOD], [EOD], []]
    path = write_dataset(tmp_path / "odd", sequences, documents=[0, 2, 3, 4, 5, 6])
    assert look_for_inner_ends(path, end_id=None) == InnerEnds(
        end_id=EOD, num_documents=3, num_holding=1, is_whole=True
    )
    # stored in another order than they are counted in
    scattered = write_dataset(
        tmp_path / "scattered",
        [[4, EOD], [5, EOD, 6, EOD]],
        pointers=[8, 0],
        content=np.array([5, EOD, 6, EOD, 4, EOD], np.uint16).tobytes(),
    )
    assert look_for_inner_ends(scattered, end_id=None).num_holding == 1


def test_a_dataset_without_documents_is_no_fault(tmp_path: Path) -> None:
    found = look_for_inner_ends(write_dataset(tmp_path / "none", []), end_id=None)
    assert found == InnerEnds(end_id=None, num_documents=0, num_holding=0, is_whole=True)
