"""Properties of sources -> their files in the catalog.

In: the data files of sources, what the recipe says of properties, and what is kept already. Out: a `PropertiesEntry` of
each source, its files written. Must hold: a data file is read only where its properties are not kept, and its tokens
are never read for them; a joined table names every row. Cost: the columns of new files are decoded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa

from torchmix.catalog.manifest import FileEntry, PropertiesEntry, SideEntry
from torchmix.catalog.properties.files import has_table, identity_of, name_of_table, open_table, save_table
from torchmix.catalog.properties.side_tables import join_rows
from torchmix.errors import SourceUnreadable, where_of
from torchmix.formats.source import FormatSource
from torchmix.indexing.scan_files import in_threads
from torchmix.storage.stores import place_of


class WantedProperties(msgspec.Struct, frozen=True, kw_only=True):
    """What the recipe says of the properties of one source."""

    columns: Mapping[str, str]
    """Property to column of the files; the id is one."""
    id: str | None
    """The property that names each row."""


class SourceFiles(msgspec.Struct, frozen=True, kw_only=True):
    """One source whose properties are wanted."""

    source: FormatSource
    """How its files are read."""
    files: tuple[FileEntry, ...]
    """Its data files."""
    wanted: WantedProperties
    """What the recipe says."""


def property_entries(
    folder: Path, base: Path, sources: Sequence[SourceFiles], old: Mapping[str, PropertiesEntry]
) -> dict[str, PropertiesEntry]:
    """What is kept of the properties of each source, by name; those of other sources stay as they are.

    Args:
        folder: The catalog's folder, locked by the caller.
        base: The folder that paths of data files are relative to.
        sources: The sources of the recipe.
        old: What was kept before, or tables that were added since.

    Raises:
        SourceUnreadable: A file lacks a column, or changed while it was read.
        SideTableError: A row has an id that a joined table lacks.
        OSError: The disk is full, or not writable.
    """
    entries = dict(old)
    calls = []
    for one in sources:
        before = old.get(one.source.name)
        if one.wanted.columns:  # a recipe that wants none leaves those of another one in peace
            entries[one.source.name] = _entry(one, before)
            calls += _missing(folder, base, one, entries[one.source.name])
    in_threads(calls)
    in_threads([call for one in sources if one.wanted.columns for call in _joins(folder, one, entries)])
    return {name: entries[name] for name in sorted(entries)}


def _entry(one: SourceFiles, before: PropertiesEntry | None) -> PropertiesEntry:
    name, columns, id = one.source.name, dict(one.wanted.columns), one.wanted.id
    sides = () if before is None else before.side
    if sides and id is None:
        assert before is not None and before.id is not None, "a source with a joined table has an id"
        id = before.id
        columns.setdefault(id, before.columns[id])
    identities = sorted({identity_of(file) for file in one.files})
    return PropertiesEntry(
        columns=columns,
        id=id,
        files={identity: name_of_table(name, identity, sorted(columns.items())) for identity in identities},
        side=tuple(
            msgspec.structs.replace(
                side, files={identity: name_of_table(name, identity, id, side.table) for identity in identities}
            )
            for side in sides
        ),
    )


def _missing(folder: Path, base: Path, one: SourceFiles, entry: PropertiesEntry) -> list[partial[None]]:
    return [
        partial(_read, folder, base, one.source, file, entry)
        for file in _different(one.files)
        if not has_table(folder, entry.files[identity_of(file)], file.num_rows)
    ]


def _read(folder: Path, base: Path, source: FormatSource, file: FileEntry, entry: PropertiesEntry) -> None:
    place = place_of(base, file.path)
    columns = list(dict.fromkeys(entry.columns.values()))
    table = source.properties(place, columns)
    if len(table) != file.num_rows:
        raise SourceUnreadable(
            f"it gave {len(table)} rows of properties for {file.num_rows} documents; it was altered while it was "
            "indexed, so run torchmix index again",
            where_of(source.name, place),
        )
    named = pa.table([table[column] for column in entry.columns.values()], names=list(entry.columns))
    save_table(folder, entry.files[identity_of(file)], named)


def _joins(folder: Path, one: SourceFiles, entries: Mapping[str, PropertiesEntry]) -> list[partial[None]]:
    entry = entries[one.source.name]
    return [
        partial(_join, folder, one.source.name, file, entry, side)
        for side in entry.side
        for file in _different(one.files)
        if not has_table(folder, side.files[identity_of(file)], file.num_rows)
    ]


def _join(folder: Path, name: str, file: FileEntry, entry: PropertiesEntry, side: SideEntry) -> None:
    assert entry.id is not None, "a source with a joined table has an id"
    ids = open_table(folder, entry.files[identity_of(file)])[entry.id]
    where = where_of(name, file.path)
    save_table(folder, side.files[identity_of(file)], join_rows(ids, open_table(folder, side.table), where))


def _different(files: Sequence[FileEntry]) -> list[FileEntry]:
    """Data files without copies of others."""
    return list({identity_of(file): file for file in files}.values())
