"""The steps of a replica: what they read, and how often it is decoded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.files import make_tokens_file, random_tokens
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.stateful.open import build_loader

RECIPE = """\
version: 1
seed: 5
batch: {samples: 4, length: 64}
sources:
%s
mixture: {%s}
packing: {method: %s}
read: {cache: 1}
"""


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_books_of_many_sources_are_decoded_once_with_no_cache(tmp_path: Path, method: str) -> None:
    """Each of 8 sources has a book open nearly always, and each book has a page of its own."""
    names = [f"books{i}" for i in range(8)]
    for i, name in enumerate(names):
        books = [document for document in random_tokens(i, 12, mean_tokens=4000, empty=0.0) if len(document) > 500]
        make_tokens_file(tmp_path / f"{name}.parquet", books, page_bytes=100, codec="none")
    sources = "\n".join(f"  {name}: {{path: {name}.parquet, tokens: input_ids}}" for name in names)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % (sources, ", ".join(f"{name}: 12.5%" for name in names), method))
    index_recipe(load_recipe(recipe), tmp_path)
    with build_loader(recipe, topology=Topology(), workers=0, max_steps=300) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert stats["bytes_served"] > 200 * 4 * 4 * 64
    assert stats["decode_amplification"] < 1.6, "what is open at the end was decoded whole"
