"""Index runs in tests: what they did, in short, and what they left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.catalogs import World, make_world, open_catalog
from tests.support.files import random_tokens
from torchmix.indexing.scan import IndexReport, index_sources


def two_files(tmp_path: Path, **options: Any) -> World:
    """One source, `web`, of 50 and 60 documents in two files."""
    return make_world(tmp_path, {"web": [random_tokens(1, 50), random_tokens(2, 60)]}, **options)


def indexed(world: World, **options: Any) -> IndexReport:
    """One index run."""
    return index_sources(world.recipe, world.directory, **options)


def counts(report: IndexReport) -> tuple[int, int, int]:
    """Files scanned, resumed and kept."""
    return report.scanned_files, report.resumed_files, report.kept_files


def changes(report: IndexReport) -> list[str]:
    """Each change as `added web/0.parquet`."""
    return [f"{change.change} {change.path}" for change in report.changes]


def names_in(folder: Path) -> set[str]:
    """All files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_lengths(world: World) -> None:
    """The catalog holds the length of every document of the files, in order."""
    for name, source in open_catalog(world.recipe, world.directory).sources.items():
        documents = world.documents[name]
        np.testing.assert_array_equal(source.sizes.tokens, [len(document) for document in documents])
        assert source.num_documents == len(documents)
        assert source.num_tokens == sum(map(len, documents))
        assert source.num_empty == sum(not len(document) for document in documents)
        source.sizes.check()
        source.pages.check()
