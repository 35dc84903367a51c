"""Small real sources in a folder: Parquet files, the recipe that names them, and their catalog.

In: what each source holds, or how much to draw from a seed. Out: `World`, with the documents as the files hold them, so
that a test can compare whatever comes out with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.recipes import make_recipe
from torchmix.catalog import store
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.parts import Part
from torchmix.recipe.structs import Recipe

Document = Sequence[int] | str | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class World:
    """A recipe over files that exist."""

    directory: Path
    """The recipe's folder."""
    recipe: Recipe
    documents: dict[str, list[NDArray[np.int64]]]
    """Tokens of every row of each source, by sorted name, in the order of its files' names."""

    def index(self, **options: Any) -> Catalog:
        """Bring the catalog up to date and open it."""
        return index_recipe(self.recipe, self.directory, **options)


def tokens_of(document: Document) -> NDArray[np.int64]:
    """A document's tokens by the rules, written anew: a null has none, text is its bytes and 256."""
    if document is None:
        return np.zeros(0, np.int64)
    return np.array([*document.encode(), 256] if isinstance(document, str) else document, np.int64)


def make_source(
    directory: Path, name: str, files: Sequence[Sequence[Document]], **choices: Any
) -> list[NDArray[np.int64]]:
    """Write `directory/name/0.parquet`, `1.parquet`, ... (fewer than 10), of texts where the first document is one.

    `choices` are those of `tests.support.files.write_file`. Returns the tokens of all rows.
    """
    assert len(files) <= 10, "names must sort as numbers do"
    for number, documents in enumerate(files):
        make = make_text_file if is_text(files) else make_tokens_file
        make(directory / name / f"{number}.parquet", documents, **choices)
    return [tokens_of(document) for documents in files for document in documents]


def is_text(files: Sequence[Sequence[Document]]) -> bool:
    """Whether the documents are texts."""
    return any(isinstance(document, str) for documents in files for document in documents)


def make_world(
    directory: Path,
    files_of_source: Mapping[str, Sequence[Sequence[Document]]],
    *,
    shares: Mapping[str, str] | None = None,
    choices: Mapping[str, Mapping[str, Any]] | None = None,
    sources: Mapping[str, Mapping[str, Any]] | None = None,
    **recipe: Any,
) -> World:
    """Write sources and the recipe that names them.

    Args:
        directory: Becomes the recipe's folder.
        files_of_source: Documents of each file of each source.
        shares: By default equal ones.
        choices: How files of a source are written, see `write_file`.
        sources: More keys of sources in the recipe.
        recipe: More of `make_recipe`.
    """
    names = sorted(files_of_source)
    even = [100 // len(names)] * (len(names) - 1)
    shares = shares or {name: f"{share}%" for name, share in zip(names, [*even, 100 - sum(even)], strict=True)}
    keys: dict[str, dict[str, Any]] = {}
    documents: dict[str, list[NDArray[np.int64]]] = {}
    for name in names:
        documents[name] = make_source(directory, name, files_of_source[name], **(choices or {}).get(name, {}))
        keys[name] = {"path": f"{name}/*.parquet", **(sources or {}).get(name, {})}
        if is_text(files_of_source[name]):
            keys[name] = {"tokens": None, "text": "text", "tokenizer": "bytes", **keys[name]}
    return World(directory=directory, recipe=make_recipe(shares, sources=keys, **recipe), documents=documents)


def random_world(directory: Path, seed: int, *, num_documents: int = 600, **options: Any) -> World:
    """Three sources: `peps` of texts in one file, `tiny` of a few rows, `web` of token lists in two files."""
    files_of_source: dict[str, list[list[Any]]] = {
        "peps": [random_texts(seed, num_documents)],
        "tiny": [random_tokens(seed + 1, 7, mean_tokens=40, empty=0)],
        "web": [
            random_tokens(seed + 2, num_documents, mean_tokens=60),
            random_tokens(seed + 3, num_documents // 2, mean_tokens=200),
        ],
    }
    return make_world(directory, files_of_source, **options)


def open_catalog(recipe: Recipe | Part, directory: Path) -> Catalog:
    """The catalog of a recipe whose folder is `directory`, opened; of a part, where it lies by default."""
    folder = directory / (recipe.catalog if isinstance(recipe, Recipe) else "catalog")
    return store.open_catalog(folder, settings_of(recipe.sources, recipe.shuffle))
