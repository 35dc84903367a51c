"""What a recipe says of rows -> properties and views of its catalog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from torchmix.catalog.manifest import DeniedEntry, FileEntry, Manifest, PropertiesEntry, SideEntry, SourceEntry
from torchmix.catalog.properties import (
    PropertyRows,
    has_table,
    identity_of,
    join_rows,
    name_of_table,
    open_table,
    save_table,
)
from torchmix.catalog.publish import denied_entry
from torchmix.catalog.store import PartViews, open_source, views_of
from torchmix.catalog.views import Views, views_of_manifest
from torchmix.errors import SideTableError, SourceUnreadable, where_of
from torchmix.formats.source import FormatSource
from torchmix.indexing.deny_lists import rows_of_lists
from torchmix.indexing.scan_files import in_threads
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.sources import PARTS, columns_of
from torchmix.recipe.structs import Recipe
from torchmix.storage.stores import place_of

# --- Properties of sources -> their files in the catalog.
#
# A data file is read only where its properties are not kept, and its tokens are never read for them; a joined table
# names every row. Cost: the columns of new files are decoded once.


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
    # A file without rows may have any columns, of any type.
    table = source.properties(place, columns) if file.num_rows else pa.table({name: pa.nulls(0) for name in columns})
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


# --- What a recipe says of rows -> properties and views of its catalog.


class AddedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table that is to be joined to a source."""

    source: str
    """The source."""
    table: pa.Table
    """The key, then properties; keys are checked."""
    token: str
    """Part of the name of its copy in the catalog, another for each call."""


class WantedRows(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe says of rows."""

    properties: Mapping[str, WantedProperties]
    """By source."""
    parts: tuple[PartViews, ...]
    """The views that each part needs."""
    deny: tuple[str, ...] = ()
    """Paths of deny-lists."""
    ids: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The property that names each row, of sources that have one."""
    added: AddedTable | None = None
    """A table that is new."""


def wanted_rows(recipe: Recipe) -> WantedRows:
    """What a recipe says of rows, in all of its parts."""
    parts = [part_of(recipe, part) for part in PARTS if has_part(recipe, part)]
    sources = {name: source for part in parts for name, source in part.sources.items()}
    return WantedRows(
        properties={name: WantedProperties(columns=columns_of(one), id=one.id) for name, one in sources.items()},
        parts=tuple(map(views_of, parts)),
        deny=recipe.deny,
        ids={name: one.id for name, one in sources.items() if one.id is not None},
    )


def with_table(rows: WantedRows, added: AddedTable) -> WantedRows:
    """The same with a table that is new."""
    return replace(rows, added=added)


def properties_and_views(
    folder: Path,
    base: Path,
    rows: WantedRows,
    sources: Mapping[str, FormatSource],
    entries: Mapping[str, SourceEntry],
    old: Manifest | None,
) -> tuple[dict[str, PropertiesEntry], Views]:
    """What the manifest is to say of properties and views.

    Args:
        folder: The catalog's folder, locked by the caller.
        base: The folder that paths of data files are relative to.
        rows: What the recipe says.
        sources: How the files of each source are read.
        entries: The sources' entries, their arrays written.
        old: What was published before.

    Raises:
        RecipeError, SourceUnreadable, SideTableError: As `property_entries` and `views_of_manifest`.
        OSError: The disk is full, or not writable.
    """
    before = {} if old is None else dict(old.properties)
    if rows.added is not None:
        before[rows.added.source] = _with_side(folder, rows, rows.added, before.get(rows.added.source))
    files = [
        SourceFiles(source=source, files=entries[name].files, wanted=rows.properties[name])
        for name, source in sources.items()
        if name in rows.properties
    ]
    properties = property_entries(folder, base, files, before)
    needed = {name for part in rows.parts for name in part.sources}
    opened = {name: open_source(folder, name, entries[name]) for name in sorted(needed)}
    return properties, views_of_manifest(folder, rows.parts, opened, properties, old)


def denied_of(
    folder: Path,
    base: Path,
    rows: WantedRows,
    entries: Mapping[str, SourceEntry],
    properties: Mapping[str, PropertiesEntry],
    old: Manifest | None,
) -> dict[str, DeniedEntry]:
    """What the manifest is to say of denied rows; arguments as those of `properties_and_views`.

    Raises:
        DenyListError, SourceUnreadable: As `rows_of_lists`.
        OSError: The disk is full, or not writable.
    """
    before = {} if old is None else dict(old.denied)
    if not rows.deny:
        return before
    sources = {name: open_source(folder, name, entry) for name, entry in entries.items() if name in rows.properties}

    def ids(name: str) -> pa.ChunkedArray | None:
        if name not in rows.ids:
            return None
        of_source = PropertyRows(folder, sources[name], properties.get(name), {})
        of_source.check([rows.ids[name]], f"sources.{name}.id")
        return of_source.whole([rows.ids[name]])[rows.ids[name]]

    num_rows = {name: source.num_documents for name, source in sources.items()}
    denied, hashes = rows_of_lists(base, rows.deny, num_rows, ids)
    for name, source in sources.items():
        kept = before.get(name)
        if kept is None or (kept.lists, kept.source_fingerprint) != (dict(sorted(hashes.items())), source.fingerprint):
            before[name] = denied_entry(folder, source, denied[name], hashes)
    return dict(sorted(before.items()))


def _with_side(folder: Path, rows: WantedRows, added: AddedTable, before: PropertiesEntry | None) -> PropertiesEntry:
    """What is kept of a source, with a new table; a table of the same properties is replaced."""
    columns = tuple(added.table.column_names[1:])
    wanted = rows.properties[added.source]
    for name in columns:
        if name in wanted.columns:
            raise SideTableError(
                f"source {added.source!r} has property {name!r} in its files; rename the column of the table"
            )
    name = name_of_table(added.source, "table", added.token)
    save_table(folder, name, added.table)
    entry = before or PropertiesEntry(columns=dict(wanted.columns), id=wanted.id, files={})
    kept = tuple(side for side in entry.side if not set(side.columns) <= set(columns))
    return msgspec.structs.replace(entry, side=(SideEntry(table=name, columns=columns, files={}), *kept))
