"""What is wrong with the files of a recipe: missing, unreadable, without the column, new or changed since indexing.

In: the recipe, its folder, and its catalog if there is one that fits. Out: findings, one for each file at fault. Must
hold: files are only read, at their ends; every source is looked at, so that one run names all faults. Cost: the footer
of each file; of indexed files also a listing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchmix.catalog.bad_rows import BadRows
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.cli.check.findings import Finding, Level
from torchmix.errors import CatalogError, CorruptPage, SourceUnreadable
from torchmix.formats.source import FormatSource
from torchmix.formats.table import choose_source, find_source_files
from torchmix.indexing.file_changes import match_files
from torchmix.indexing.scan_files import fingerprint_files
from torchmix.recipe.source.row_map import maps_of
from torchmix.recipe.structs import Recipe
from torchmix.storage.stores import place_of
from torchmix.transform.maps.row_map import open_maps
from torchmix.transform.open_tokenizer import Tokenizers

SHOWN_FILES = 5
"""Files named in one finding; the others are counted."""


def file_findings(recipe: Recipe, directory: Path, catalog: Catalog | None) -> list[Finding]:
    """Look at every data file of a recipe.

    Args:
        recipe: A checked recipe.
        directory: Its folder.
        catalog: Its catalog; None if there is none that fits. Of a source that it lacks only files and columns are
            looked at.
    """
    findings: list[Finding] = []
    tokenizers = Tokenizers(directory)
    maps = open_maps(maps_of(recipe.sources), directory)
    for name, settings in sorted(settings_of(recipe.sources, recipe.shuffle).items()):
        key = "tokenizer"
        try:
            if settings.tokenizer is not None:
                tokenizers.open(name, settings.tokenizer, begin_id=settings.begin_id, end_id=settings.end_id)
            key = "path"
            paths = find_source_files(name, settings, directory)
            source = choose_source(name, settings, paths, tokenizers, maps.get(name))
        except SourceUnreadable as error:
            findings.append(_of_error(error, f"sources.{name}.{key}", name))
            continue
        key = "path" if settings.column is None else "tokens" if settings.tokenizer is None else "text"
        if settings.map is not None:
            key = settings.map.takes
        masks_bad_rows = settings.masks_bad_rows
        where = f"sources.{name}.{key}"
        unreadable = [
            _of_error(error, where, name)
            for error in _unreadable(source, paths, directory, masks_bad_rows=masks_bad_rows)
        ]
        findings += unreadable
        held = None if catalog is None else catalog.sources.get(name)
        if held is not None and source.transform_id != held.transform_id:
            what = "tokenizer" if settings.map is None else "map or its tokenizer"
            message = f"the {what} is another than when the source was indexed; put it back, or run torchmix index"
            key = "tokenizer" if settings.map is None else "map"
            findings.append(Finding(level=Level.DATA, where=f"sources.{name}.{key}", message=message))
        if held is not None and not unreadable:
            findings += _changes(source, paths, directory, held)
    return findings


def _of_error(error: CatalogError, where: str, name: str) -> Finding:
    """A finding whose message does not say again where it is."""
    message = str(error).removeprefix(f"{where}: ").removeprefix(f"source {name!r}: ")
    return Finding(level=Level.DATA, where=where, message=message)


def _unreadable(
    source: FormatSource, paths: list[str], directory: Path, *, masks_bad_rows: bool
) -> Iterator[SourceUnreadable | CorruptPage]:
    """Files that cannot be opened, or do not hold what the source needs."""
    for path in paths:
        try:
            source.check(place_of(directory, path), BadRows() if masks_bad_rows else None)
        except (SourceUnreadable, CorruptPage) as error:
            yield error


def _changes(source: FormatSource, paths: list[str], directory: Path, held: SourceCatalog) -> Iterator[Finding]:
    """Files that differ from what was indexed."""
    found = fingerprint_files([(source, path) for path in paths], directory)
    _, changes = match_files(source.name, found, held.files)
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
                where=f"sources.{source.name}.path",
                message=f"{len(of_kind)} file(s) {change} - {names}: {remedy}",
            )
