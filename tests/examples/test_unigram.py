"""The unigram entropy of a recipe's sources, against counts made by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.example import example_module
from torchmix.recipe.structs import Batch, Recipe, Source

unigram = example_module("unigram")


def test_sources_count_by_their_shares_and_text_by_its_bytes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["aab", None, "\u00e9"]}), tmp_path / "text-0.parquet")
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "text-1.parquet")
    pq.write_table(pa.table({"ids": pa.array([[97, 7], [], [7, 300]])}), tmp_path / "ids.parquet")
    recipe = Recipe(
        version=1,
        seed=1,
        batch=Batch(samples=1, length=8),
        sources={
            "text": Source(path="text-*.parquet", text="text", tokenizer="bytes"),
            "ids": Source(path=("ids.parquet",), tokens="ids"),
        },
        mixture={"text": "75%", "ids": "25%"},
    )
    # text: a a b C3 A9 b, and three ends of documents; ids: 97 is `a`
    frequency = [0.75 * 2 / 9 + 0.25 / 4, 0.75 * 2 / 9, 0.75 / 9, 0.75 / 9, 0.75 * 3 / 9, 0.25 * 2 / 4, 0.25 / 4]
    assert sum(frequency) == pytest.approx(1)
    expected = -sum(share * math.log(share) for share in frequency)
    assert unigram.unigram_entropy(recipe, tmp_path) == pytest.approx(expected, rel=1e-12)
