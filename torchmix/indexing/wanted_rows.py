"""What a recipe says of rows -> properties and views of its catalog.

In: the recipe's properties, selections, cuts and hold-outs; sources that are about to be published. Out: what the
manifest says of properties and views, their files written. Must hold: nothing here reads or changes what a source's
own entry says. Cost: none for a recipe without these keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from torchmix.catalog.denied.entries import denied_entry
from torchmix.catalog.manifest import DeniedEntry, Manifest, PropertiesEntry, SideEntry, SourceEntry
from torchmix.catalog.properties.files import name_of_table, save_table
from torchmix.catalog.properties.rows import PropertyRows
from torchmix.catalog.store import open_source
from torchmix.catalog.views.entries import Views, views_of_manifest
from torchmix.catalog.views.wanted import PartViews, views_of
from torchmix.errors import SideTableError
from torchmix.formats.source import FormatSource
from torchmix.indexing.deny_lists import rows_of_lists
from torchmix.indexing.property_files import SourceFiles, WantedProperties, property_entries
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.source.documents import PARTS
from torchmix.recipe.source.properties import columns_of
from torchmix.recipe.structs import Recipe


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
