"""Sources whose rows have properties: files, the recipe that selects from them, and their catalog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.catalog.manifest import Manifest, ViewEntry, read_manifest
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog, open_catalog, views_of
from torchmix.indexing.scan import IndexReport, index_sources
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of, with_all_sources
from torchmix.recipe.structs import Recipe

LANGUAGES = ["de", "en", "fr", None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """A recipe over files with properties."""

    directory: Path
    recipe: Recipe

    def index(self, **options: Any) -> IndexReport:
        """Bring the catalog up to date."""
        return index_sources(with_all_sources(self.recipe), self.directory, **options)

    def open(self, part: str = "train") -> Catalog:
        """The catalog of a part, with its views."""
        planned = part_of(self.recipe, part)
        return open_catalog(
            self.directory / "catalog", settings_of(planned.sources, planned.shuffle), views_of(planned)
        )

    def manifest(self) -> Manifest:
        """The catalog's manifest."""
        return read_manifest(self.directory / "catalog")

    def view(self, name: str, part: str = "train") -> ViewEntry:
        """What the catalog says of a view."""
        return self.manifest().views[part][name]

    def rows(self, name: str, part: str = "train") -> list[int]:
        """The rows of a stream: those of its view, or all of its source."""
        catalog = self.open(part)
        if name in catalog.views:
            return np.asarray(catalog.views[name].kept).tolist()
        return list(range(catalog.sources[self.view(name, part).source].num_documents))


def make_rows(first: int, count: int) -> pa.Table:
    """Rows with a url, a language, a quality in [0, 1) and 1 to 40 tokens; row r is the same in all files."""
    numbers = np.arange(first, first + count)
    return pa.table(
        {
            "ids": [[int(number)] * (1 + int(number) * 7 % 40) for number in numbers],
            "url": [f"https://{number}.example" for number in numbers],
            "lang": [LANGUAGES[number % 4] for number in numbers],
            "quality": [None if number % 10 == 9 else float(number * 37 % 100) / 100 for number in numbers],
        }
    )


def write_rows(path: Path, first: int, count: int, **choices: Any) -> pa.Table:
    """Write `make_rows` to a Parquet file of small pages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = make_rows(first, count)
    pq.write_table(table, path, **{"data_page_size": 2000, "write_batch_size": 16, **choices})
    return table


def make_selected(
    directory: Path, sources: Mapping[str, Any], mixture: Mapping[str, Any] | Sequence[str], **keys: Any
) -> Selected:
    """A recipe over files that exist; sources get `tokens: ids` where they have a path."""
    if not isinstance(mixture, Mapping):
        mixture = dict.fromkeys(mixture, 1)
    filled = {name: {"tokens": "ids", **one} if "path" in one else one for name, one in sources.items()}
    recipe = {
        "version": 1,
        "seed": 5,
        "batch": {"samples": 4, "length": 64},
        "sources": filled,
        "mixture": mixture,
        "packing": {"align_tokens": 1},
        **keys,
    }
    return Selected(directory=directory, recipe=check_recipe(recipe))
