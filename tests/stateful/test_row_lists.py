"""What a map gives beside ids reaches the microbatch in which its row begins, once, on every rank of the replica."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.loaders import Rank, run_job
from tests.support.maps import write_functions
from torchmix.constructor.fields import Microbatch
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader

LENGTH = 64
TEXTS = random_texts(8, 60, mean_words=12)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of letters with their bytes beside them, and one of plain ids."""
    folder = tmp_path_factory.mktemp("rows")
    make_text_file(folder / "web.parquet", TEXTS)
    make_tokens_file(folder / "ids.parquet", random_tokens(4, 60, mean_tokens=40))
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
version: 1
seed: 5
batch: {{samples: 8, length: {LENGTH}}}
sources:
  web: {{path: web.parquet, text: text, map: "{write_functions(folder)}:letters"}}
  ids: {{path: ids.parquet, tokens: input_ids}}
mixture: {{web: 60%, ids: 40%}}
"""
    )
    return path


def given(recipe: Path, topology: Topology, where: str) -> list[list[tuple[int, int, int, list[int]]]]:
    """By rank: step, microbatch, place and numbers of every row."""

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        rank.result = []
        for microbatch in loader:
            rank.result += rows_of(microbatch, is_whole=topology.cp == topology.pp == 1)

    options = {"loaders": where, "one_pass": True, "max_steps": None, "micro_batch_size": 2}
    return [rank.result for rank in run_job(recipe, topology, program=program, **options)]


def rows_of(microbatch: Microbatch, *, is_whole: bool) -> list[tuple[int, int, int, list[int]]]:
    if "raw" not in microbatch.rows:
        return []
    lists = microbatch.to("cpu").rows["raw"]
    assert lists.values.dtype == torch.uint8
    found = [row.tolist() for row in lists.rows()]
    for place, row in zip(lists.places.tolist(), found, strict=True):
        letters = [ord(letter) for letter in bytes(row).decode()]
        if is_whole and len(letters) <= LENGTH:
            assert microbatch.tokens is not None
            assert microbatch.tokens.flatten()[place : place + len(letters)].tolist() == letters
    return [
        (microbatch.step, microbatch.index, place, row) for place, row in zip(lists.places.tolist(), found, strict=True)
    ]


@pytest.mark.parametrize("where", ["in_process", pytest.param("node", marks=pytest.mark.system)])
def test_over_an_epoch_the_lists_of_each_row_come_once(recipe: Path, where: str) -> None:
    assert max(map(len, TEXTS)) > LENGTH
    ranks = given(recipe, Topology(dp=2), where)
    found = Counter(bytes(row).decode() for rank in ranks for *_, row in rank)
    assert found == Counter(text for text in TEXTS if text)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"pp": 2}])
def test_all_ranks_of_a_replica_have_the_same_lists(recipe: Path, sizes: dict[str, int]) -> None:
    [alone] = given(recipe, Topology(), "in_process")
    assert alone and given(recipe, Topology(**sizes), "in_process") == [alone, alone]
