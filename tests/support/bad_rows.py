"""Files with rows that cannot be read, and recipes over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.catalogs import open_catalog
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Batch, Recipe, Source


def recipe_over(path: str, **keys: Any) -> Recipe:
    """One source, `web`, which masks bad rows, up to all of them unless `max_bad` says otherwise."""
    source = Source(**{"path": path, "bad_rows": "mask", "max_bad": "100%", **keys})
    batch = Batch(samples=4, length=64)
    return check_recipe(Recipe(version=1, seed=1, batch=batch, sources={"web": source}, mixture={"web": "100%"}))


def read_documents(recipe: Recipe, directory: Path) -> list[list[int]]:
    """All documents of `web`, from the last to the first, as a plan would ask for them."""
    catalog = open_catalog(recipe, directory)
    tokens = catalog.sources["web"].sizes.tokens.astype(np.int64)[::-1]
    rows = np.arange(len(tokens))[::-1].copy()
    ends = np.cumsum(tokens)
    reader = Reader(catalog, directory, cache_bytes=1 << 20)
    found = reader.read(WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=tokens))
    documents = [part.tolist() for part in np.split(found.values.copy(), ends[:-1])]
    reader.close()
    return documents[::-1]
