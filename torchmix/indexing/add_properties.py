"""A table of further properties -> the catalog of a recipe.

Neither data nor fingerprints of sources change; a wrong table changes nothing at all. Cost: the table is read and kept
once; joining is a look-up for each row.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from torchmix.catalog.in_store import catalog_folder
from torchmix.catalog.properties import check_keys
from torchmix.catalog.settings import settings_of
from torchmix.errors import OptionError, SideTableError, SourceUnreadable
from torchmix.indexing.properties import AddedTable, wanted_rows, with_table
from torchmix.indexing.scan import update_catalog
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.parts import with_all_sources
from torchmix.recipe.structs import Recipe

_READ = {
    (".parquet", ".pq"): pq.read_table,
    (".arrow", ".feather", ".ipc"): lambda path: pa.ipc.open_file(path).read_all(),
    (".jsonl", ".ndjson", ".json"): pa_json.read_json,
    (".csv",): pa_csv.read_csv,
}
"""By the ends of names."""


class AddedProperties(msgspec.Struct, frozen=True, kw_only=True):
    """What was joined."""

    source: str
    """The source."""
    properties: tuple[str, ...]
    """The table's columns beside the key."""
    num_documents: int
    """Documents of the source; each has the properties now."""


def add_properties(
    recipe: Recipe, directory: Path, table: Path, *, key: str, source: str | None = None
) -> AddedProperties:
    """Join a table to a source of a recipe, and bring the catalog up to date.

    Args:
        recipe: A checked recipe.
        directory: The recipe's folder.
        table: A file of Parquet, Arrow, JSON lines or CSV.
        key: Its column of ids; each stands once. All other columns become properties.
        source: The source; None: the one that the file is named after, or the only one with an `id`.

    Raises:
        OptionError: There is no such source, or none has an `id`.
        SideTableError: Keys are there twice, or missing; a property is there already.
        SourceUnreadable: The table cannot be read.
        CatalogError: As `update_catalog`.
    """
    every = with_all_sources(recipe)
    name = _source(every, table, source)
    read = _read(table)
    if key not in read.column_names:
        raise SideTableError(
            f"{table} has no column {key!r}{nearest(key, read.column_names)}; it has {listed(read.column_names)}"
        )
    others = [column for column in read.column_names if column != key]
    if not others:
        raise SideTableError(f"{table} has no column beside {key!r}, so no property")
    check_keys(read.select([key]), str(table))
    added = AddedTable(source=name, table=read.select([key, *others]).combine_chunks(), token=secrets.token_hex(8))
    settings = settings_of(every.sources, every.shuffle)
    rows = with_table(wanted_rows(every), added)
    catalog = update_catalog(catalog_folder(directory, recipe.catalog), settings, directory, rows=rows).catalog
    return AddedProperties(source=name, properties=tuple(others), num_documents=catalog.sources[name].num_documents)


def _source(recipe: Recipe, table: Path, given: str | None) -> str:
    with_id = sorted(name for name, source in recipe.sources.items() if source.id is not None)
    if given is not None and given not in recipe.sources:
        raise OptionError(f"there is no source {given!r}{nearest(given, recipe.sources)}")
    name = given if given is not None else table.name.partition(".")[0]
    if name in with_id:
        return name
    if given is not None or not with_id:
        which = f"source {given!r}" if given is not None else "no source"
        has = "has no id" if given is not None else "has an id"
        raise OptionError(f"{which} {has}; write `id: COLUMN` for it in the recipe, since tables are joined by ids")
    if len(with_id) > 1:
        raise OptionError(f"{len(with_id)} sources have an id: {listed(with_id)}; say which with --source")
    return with_id[0]


def _read(path: Path) -> pa.Table:
    for ends, read in _READ.items():
        if path.name.lower().endswith(ends):
            try:
                return read(str(path))
            except (OSError, pa.ArrowException) as error:
                raise SourceUnreadable(f"{path} cannot be read: {error}") from None
    known = ", ".join(end for ends in _READ for end in ends)
    raise SourceUnreadable(f"{path} is no table by its name; a table ends with {known}")
