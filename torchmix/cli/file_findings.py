"""What is wrong with the files of a recipe: missing, unreadable, without the column, new or changed since indexing.

In: the recipe, its folder, and its catalog if there is one that fits. Out: findings, one for each file at fault. Must
hold: files are only read, at their ends; every source is looked at, so that one run names all faults. Cost: the footer
of each file; of indexed files also a listing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.catalog.store import Catalog, SourceCatalog, SourceSettings, settings_of
from torchmix.cli.findings import Finding, Level
from torchmix.errors import SourceUnreadable
from torchmix.recipe.structs import Recipe
from torchmix.sources.file_changes import match_files
from torchmix.sources.find_files import find_files
from torchmix.sources.formats import choose_source
from torchmix.sources.parquet_column import check_column
from torchmix.sources.scan_files import fingerprint_files

SHOWN_FILES = 5
"""Files named in one finding; the others are counted."""


def file_findings(recipe: Recipe, directory: Path, catalog: Catalog | None) -> list[Finding]:
    """Look at every data file of a recipe.

    Args:
        recipe: A checked recipe.
        directory: Its folder.
        catalog: Its catalog; None if there is none that fits, so that only files and columns are looked at.
    """
    findings: list[Finding] = []
    for name in sorted(recipe.sources):
        settings = settings_of(recipe, name)
        try:
            paths = find_files(name, settings.patterns, directory)
        except SourceUnreadable as error:
            findings.append(Finding(level=Level.DATA, where=f"sources.{name}.path", message=str(error)))
            continue
        unreadable = list(_column_findings(name, settings, paths, directory))
        findings += unreadable
        if catalog is not None and not unreadable:
            findings += _changes(name, settings, paths, directory, catalog.sources[name])
    return findings


def _column_findings(name: str, settings: SourceSettings, paths: list[str], directory: Path) -> Iterator[Finding]:
    """Files that cannot be opened, or lack the column, or hold something else in it."""
    key, kind = ("tokens", "tokens") if settings.tokenizer is None else ("text", "text")
    for path in paths:
        where = f"source {name!r}: {directory / path}"
        try:
            check_column(_read_schema(directory / path, where), settings.column, kind, where)  # type: ignore[arg-type]
        except SourceUnreadable as error:
            yield Finding(level=Level.DATA, where=f"sources.{name}.{key}", message=str(error))


def _read_schema(place: Path, where: str) -> pa.Schema:
    try:
        return pq.read_schema(place)
    except (OSError, pa.ArrowException) as error:
        raise SourceUnreadable(
            f"{where}: cannot be read as Parquet: {error}; restore it or name another file"
        ) from error


def _changes(
    name: str, settings: SourceSettings, paths: list[str], directory: Path, held: SourceCatalog
) -> Iterator[Finding]:
    """Files that differ from what was indexed."""
    source = choose_source(name, settings.column, settings.tokenizer, paths)
    found = fingerprint_files([(source, path) for path in paths], directory)
    _, changes = match_files(name, found, held.files)
    remedies = {
        "added": (Level.FINDING, "not in the catalog, so not trained on; run torchmix index to add them"),
        "moved": (Level.FINDING, "at another path than indexed; run torchmix index, which keeps the order"),
        "changed": (
            Level.DATA,
            "not the files that were indexed; put them back, or run torchmix index for another order",
        ),
        "removed": (Level.DATA, "gone since indexing; put them back, or run torchmix index for another order"),
    }
    for change, (level, remedy) in remedies.items():
        of_kind = [one.path for one in changes if one.change == change]
        if of_kind:
            names = ", ".join(of_kind[:SHOWN_FILES]) + (", ..." if len(of_kind) > SHOWN_FILES else "")
            yield Finding(
                level=level,
                where=f"sources.{name}.path",
                message=f"{len(of_kind)} file(s) {change} - {names}: {remedy}",
            )
