"""Properties of rows: their files, the tables that join them, and SQL over them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchmix.catalog.array_files import flush_files, put_whole
from torchmix.catalog.in_store import bring
from torchmix.catalog.manifest import FileEntry, Manifest, PropertiesEntry
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.errors import CatalogError, CatalogStale, OptionError, RecipeError, SideTableError, SourceUnreadable
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.parts import Part
from torchmix.recipe.sources import TOKENS, path_properties_of
from torchmix.recipe.streams import row_sets_of

if TYPE_CHECKING:
    import duckdb

# --- A database in memory that reaches nothing outside of it.
#
# What a recipe or a command line says in SQL opens no file, no network and no extension, and cannot change that; what
# does not fit into memory is an error, and is not written to a disk. Cost: the first connection loads DuckDB, in about
# 0.1 s; a recipe without selections does not load it.

MOST_THREADS = 4
"""Most threads of one database: an index run has several side by side."""


def open_database() -> duckdb.DuckDBPyConnection:
    """An empty database; close it, or use it in a `with`."""
    import duckdb

    database = duckdb.connect(
        config={
            "temp_directory": "",  # else SQL may read and write `.tmp` in the working directory
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_community_extensions": "false",
            "python_enable_replacements": "false",
            "threads": str(MOST_THREADS),
        }
    )
    # Not at once: without external access DuckDB lets nobody set its temporary directory, not even to none.
    database.execute("SET enable_external_access = false; SET lock_configuration = true")
    return database


# --- Properties on disk: one Arrow file for the rows of each data file, mapped where it is used.
#
# A file is whole or missing, and never altered, so a run that is killed loses at most the one that it was writing.
# Cost: opening maps a file; nothing is read before it is used.

PROPERTIES_FOLDER = "properties"
SUFFIX = ".arrow"
UNFINISHED = ".tmp"


def identity_of(file: FileEntry) -> str:
    """What tells a data file from others: its size and hash, wherever it lies."""
    return f"{file.num_bytes}-{file.footer_hash}"


def name_of_table(source: str, *made_of: object) -> str:
    """The name of the file with a table that follows from `made_of`, plain values."""
    return f"{source}.{hashlib.sha256(msgspec.json.encode(made_of)).hexdigest()[:16]}{SUFFIX}"


def has_table(catalog_folder: Path, name: str, num_rows: int) -> bool:
    """Whether a file is there and whole, with so many rows."""
    try:
        table = open_table(catalog_folder, name)
    except SourceUnreadable:  # the store of the catalog, and not the table
        raise
    except CatalogError:
        return False
    return len(table) == num_rows


def save_table(catalog_folder: Path, name: str, table: pa.Table) -> None:
    """Write a table, whole or not at all.

    Raises:
        OSError: The folder is not writable or the disk is full; nothing stays.
    """
    path = catalog_folder / PROPERTIES_FOLDER / name
    path.parent.mkdir(exist_ok=True)
    with put_whole(path, path.name + UNFINISHED) as unfinished:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        flush_files([unfinished])  # before a manifest names it


def open_table(catalog_folder: Path, name: str) -> pa.Table:
    """A table, mapped.

    Raises:
        CatalogError: The file is missing or damaged.
    """
    path = catalog_folder / PROPERTIES_FOLDER / name
    bring(catalog_folder, [f"{PROPERTIES_FOLDER}/{name}"])
    try:
        with pa.memory_map(str(path)) as mapped:
            return pa.ipc.open_file(mapped).read_all()
    except (OSError, pa.ArrowException) as error:
        raise CatalogError(f"the catalog's file {path} is missing or damaged ({error}); run torchmix index") from None


def remove_tables(catalog_folder: Path, manifest: Manifest) -> None:
    """Remove the files that a manifest, just published, does not name; needs the catalog's lock."""
    folder = catalog_folder / PROPERTIES_FOLDER
    if not folder.is_dir():
        return
    named = set(tables_of(manifest))
    for path in folder.iterdir():
        if path.name not in named and path.name.endswith((SUFFIX, SUFFIX + UNFINISHED)):
            path.unlink(missing_ok=True)


def tables_of(manifest: Manifest) -> Iterable[str]:
    """The files in `properties` that a manifest names."""
    for entry in manifest.properties.values():
        yield from entry.files.values()
        for side in entry.side:
            yield side.table
            yield from side.files.values()


# --- The `where` of a selection: one SQL expression over the properties of a document -> the rows that it keeps.
#
# The mask is a function of the text and of each row alone: no subquery, no aggregate, no window, nothing that differs
# from run to run or reaches outside. A row for which it is null is not kept. Cost: DuckDB's, over the columns that the
# expression names.
#
# DuckDB parses the expression, and the checks read its syntax tree; they search no text for words.

_REFUSED_CLASSES = {
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
    "PARAMETER": "a parameter",
    "STAR": "a star",
    "DEFAULT": "a default",
}
_REFUSED_COLUMNS = {
    "current_date",
    "current_time",
    "current_timestamp",
    "localtime",
    "localtimestamp",
    "user",
    "session_user",
}
"""Names written like a column that are functions of the moment or of the session."""
_OUTSIDE = {
    "getenv",
    "read_text",
    "read_blob",
    "glob",
    "query",
    "query_table",
    "current_setting",
    "getvariable",
    "error",
}
"""Functions that reach outside of the row, or stop a run on purpose."""


def columns_of_expression(text: str, where: str = "") -> tuple[str, ...]:
    """The columns that an expression names, sorted.

    Args:
        text: One SQL expression in DuckDB's dialect.
        where: Path of keys, for errors.

    Raises:
        RecipeError: It is no lone expression, or it could keep other rows in another run.
    """
    return _columns_of(text, where)


def kept_rows(text: str, table: pa.Table, where: str = "") -> NDArray[np.bool_]:
    """The rows of a table of properties that an expression keeps, as a mask.

    Args:
        text: The expression.
        table: A column of each property that it names, by name.
        where: Path of keys, for errors.

    Returns:
        bool [rows]; false where the expression is null.

    Raises:
        RecipeError: It is no lone expression, names what is no property, or does not fit the types of its columns.
    """
    for column in columns_of_expression(text, where):
        if column not in table.column_names:
            raise RecipeError(
                f"there is no property {column!r}{nearest(column, table.column_names)}; "
                f"properties are {', '.join(sorted(table.column_names)) or 'none'}",
                where,
            )
    import duckdb

    with open_database() as database:
        database.register("properties", table)
        try:
            # The rows come in the order of the table: DuckDB keeps it unless an ORDER BY or a join changes it.
            found = database.execute(f"SELECT coalesce(({text}\n), false)::BOOLEAN AS kept FROM properties")
            kept = found.fetchnumpy()["kept"]
        except duckdb.Error as error:
            raise RecipeError(f"{text!r} does not fit its columns: {_first_line(error)}", where) from None
    mask = np.asarray(kept, np.bool_)
    if len(mask) != len(table):
        raise RecipeError(f"{text!r} gave {len(mask)} rows for {len(table)}: it is no expression of one row", where)
    return mask


@lru_cache(maxsize=256)
def _columns_of(text: str, where: str) -> tuple[str, ...]:
    tree = _tree_of(text, where)
    refused = _refused_functions()
    columns = set()
    bound = {name for node in _walk(tree) if node.get("class") == "LAMBDA" for name in _lambda_names(node)}
    for node in _walk(tree):
        kind = node["class"]
        if kind in _REFUSED_CLASSES:
            raise RecipeError(f"{text!r} has {_REFUSED_CLASSES[kind]}; write one expression over columns", where)
        if kind == "FUNCTION" and node["function_name"].lower() in refused:
            raise RecipeError(
                f"{text!r} calls {node['function_name']}, which is no function of one row alone, the same in each run",
                where,
            )
        if kind == "COLUMN_REF":
            name = node["column_names"][0]
            if name.lower() in _REFUSED_COLUMNS:
                raise RecipeError(f"{text!r} names {name}, which is another in each run", where)
            if name not in bound:
                columns.add(name)
    if not columns:
        raise RecipeError(f"{text!r} names no property, so it keeps all rows or none", where)
    return tuple(sorted(columns))


def _tree_of(text: str, where: str) -> Any:
    """The syntax tree of an expression; it must be one expression both with and without brackets."""
    with open_database() as database:
        for before, behind in (("SELECT ", "\nFROM t"), ("SELECT (", "\n) FROM t")):
            (found,) = database.execute("SELECT json_serialize_sql(?)", [before + text + behind]).fetchone() or ("{}",)
            tree = json.loads(found)
            if tree.get("error"):
                message = tree.get("error_message")
                if int(tree.get("position") or 0) >= len(before + text):  # a word that the user has not written
                    message = "it is not whole; more must follow at its end"
                raise RecipeError(f"{text!r} is no SQL expression: {message}", where)
            node = tree["statements"][0]["node"]
            others = [key for key in ("where_clause", "having", "qualify", "sample") if node.get(key)]
            lists = [*node.get("group_expressions", ()), *node.get("modifiers", ())]
            is_lone = len(tree["statements"]) == 1 and node["type"] == "SELECT_NODE" and len(node["select_list"]) == 1
            is_plain = node["from_table"].get("type") == "BASE_TABLE" and node["from_table"].get("table_name") == "t"
            if not is_lone or not is_plain or others or lists or node["select_list"][0].get("alias"):
                raise RecipeError(f"{text!r} is more than one SQL expression", where)
    return node["select_list"]


def _walk(tree: Any) -> Iterator[dict[str, Any]]:
    """Every node of a syntax tree that has a class."""
    if isinstance(tree, dict):
        if "class" in tree:
            yield tree
        for value in tree.values():
            yield from _walk(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _walk(value)


def _lambda_names(node: dict[str, Any]) -> Iterator[str]:
    """Names that a lambda binds: they are no columns."""
    for each in _walk(node.get("lhs")):
        if each["class"] == "COLUMN_REF":
            yield each["column_names"][0]


@lru_cache(maxsize=1)
def _refused_functions() -> frozenset[str]:
    """Functions whose result for a row may differ from run to run."""
    with open_database() as database:
        found = database.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() "
            "WHERE function_type IN ('aggregate', 'table', 'pragma', 'table_macro') "
            "OR coalesce(stability, 'CONSISTENT') <> 'CONSISTENT'"
        ).fetchall()
        scalar = database.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() "
            "WHERE function_type IN ('scalar', 'macro') AND coalesce(stability, 'CONSISTENT') = 'CONSISTENT'"
        ).fetchall()
    also_scalar = {name.lower() for (name,) in scalar}
    return frozenset({name.lower() for (name,) in found} - also_scalar | {"count_star"} | _OUTSIDE)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


# --- A table of further properties, joined to rows by their id.
#
# Each key stands once, and every row finds its key: anything else is an error that names one, never a null. Cost: a
# hash table of the keys for each data file.


def check_keys(table: pa.Table, where: str) -> None:
    """Check the first column of a table, its key; `where` begins errors.

    Raises:
        SideTableError: A key is null or stands twice, or keys are neither text nor whole numbers.
    """
    name, keys = table.column_names[0], table.column(0)
    if not (pa.types.is_integer(keys.type) or pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type)):
        raise SideTableError(f"{where}: key {name!r} is {keys.type}; a key is text or a whole number")
    if keys.null_count:
        row = int(pc.index(keys.is_null(), True).as_py())
        raise SideTableError(f"{where}: row {row} has no key {name!r}; each row needs one")
    counts = pc.value_counts(keys)
    most = pc.greater(counts.field("counts"), 1)
    if pc.any(most).as_py():
        double = counts.field("values").filter(most)
        shown = ", ".join(repr(key.as_py()) for key in double[:3])
        raise SideTableError(
            f"{where}: {len(double):,} keys of {name!r} stand there more than once, as {shown}; keep one row of each"
        )


def join_rows(ids: pa.ChunkedArray, table: pa.Table, where: str) -> pa.Table:
    """The columns of a table beside its key, for rows with these ids.

    Args:
        ids: [rows] the id of each row.
        table: The key first; `check_keys` has passed it.
        where: The source and file of the rows, for errors.

    Raises:
        SideTableError: An id is no key of the table, or null.
    """
    keys = table.column(0).cast(pa.string()).combine_chunks()
    texts = ids.cast(pa.string()).combine_chunks()
    places = pc.index_in(texts, value_set=keys, skip_nulls=True)
    if places.null_count:
        missing = places.is_null()
        row = int(pc.index(missing, True).as_py())
        raise SideTableError(
            f"the table of properties lacks {places.null_count:,} of {len(ids):,} ids, as {ids[row].as_py()!r} of row "
            f"{row}; add a table that has them with torchmix properties add",
            where,
            row=row,
        )
    return table.select(table.column_names[1:]).take(places).combine_chunks()


# --- The properties of a source's rows, as tables that fit the catalog row for row.
#
# Row i of a block that begins at row f is row f + i of the source; a property has one type in all blocks. Cost: kept
# columns are mapped; a block has at least one file, and stops at BLOCK_ROWS rows.

BLOCK_ROWS = 1 << 20
"""A block ends with the file in which it reaches this many rows."""


class PropertyRows:
    """All rows of one source with their properties."""

    def __init__(
        self,
        catalog_folder: Path,
        source: SourceCatalog,
        kept: PropertiesEntry | None,
        patterns: Mapping[str, str],
    ) -> None:
        """Take a source.

        Args:
            catalog_folder: Where the catalog lies.
            source: The source, open.
            kept: What the catalog keeps of its properties, if anything.
            patterns: Properties that follow from paths, with their regular expressions.
        """
        self._folder, self.source = catalog_folder, source
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._tables: dict[str, tuple[str, ...]] = {}
        """Property -> the file in `properties` for each data file."""
        layers = [] if kept is None else [(tuple(kept.columns), kept.files)]
        layers += [] if kept is None else [(side.columns, side.files) for side in reversed(kept.side)]
        for names, files in layers:
            for name in names:
                self._tables[name] = tuple(files.get(identity_of(file), "") for file in source.files)
        self.names = tuple(sorted({TOKENS, *self._tables, *self._patterns}))
        """Names of all properties."""

    def check(self, names: Sequence[str], where: str) -> None:
        """Raise a RecipeError for a name that is no property; `where` is the path of keys."""
        for name in names:
            if name not in self.names:
                raise RecipeError(
                    f"{self.source.name!r} has no property {name!r}{nearest(name, self.names)}; it has "
                    f"{', '.join(self.names)}. Name a column of its files in `properties`, or join a table with "
                    "`torchmix properties add`",
                    where,
                )

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """The first row of each block, and the named properties of its rows, which `check` has passed.

        Raises:
            CatalogStale: Properties of a file are not kept yet.
            CatalogError: What is kept is damaged.
            RecipeError: The files hold values of types that do not fit together.
        """
        schema = self._schema(names)
        waiting: list[pa.Table] = []
        first = num_rows = 0
        for number, file in enumerate(self.source.files):
            waiting.append(self._of_file(number, file, schema))
            num_rows += file.num_rows
            if num_rows >= BLOCK_ROWS or number == len(self.source.files) - 1:
                yield first, pa.concat_tables(waiting)
                first, num_rows, waiting = first + num_rows, 0, []

    def whole(self, names: Sequence[str]) -> pa.Table:
        """All rows in one table; see `blocks`."""
        tables = [table for _, table in self.blocks(names)]
        return pa.concat_tables(tables) if tables else pa.table({name: pa.array([]) for name in names})

    def _schema(self, names: Sequence[str]) -> pa.Schema:
        fields = []
        for name in names:
            types = [self._table(name, number).schema.field(name).type for number in self._numbers(name)]
            fields.append(pa.field(name, self._one_type(name, types)))
        return pa.schema(fields)

    def _one_type(self, name: str, types: Sequence[pa.DataType]) -> pa.DataType:
        if name not in self._tables:
            return pa.int32() if name == TOKENS else pa.string()
        try:
            schemas = [pa.schema([pa.field("value", one)]) for one in dict.fromkeys(types)]
            return pa.unify_schemas(schemas, promote_options="permissive").field("value").type
        except pa.ArrowException:
            listed = ", ".join(sorted({str(one) for one in types}))
            raise RecipeError(
                f"property {name!r} is of types that do not fit together: {listed}; write its files alike",
                f"sources.{self.source.name}.properties",
            ) from None

    def _numbers(self, name: str) -> range:
        return range(len(self.source.files) if name in self._tables else 0)

    def _table(self, name: str, number: int) -> pa.Table:
        file = self._tables[name][number]
        if not file:
            raise CatalogStale(
                f"source {self.source.name!r}: the catalog lacks property {name!r} of "
                f"{self.source.files[number].path}; run torchmix index"
            )
        return open_table(self._folder, file)

    def _of_file(self, number: int, file: FileEntry, schema: pa.Schema) -> pa.Table:
        columns = []
        for field in schema:
            if field.name in self._tables:
                columns.append(self._table(field.name, number)[field.name].cast(field.type))
            elif field.name == TOKENS:
                tokens = self.source.sizes.tokens[file.first_row : file.first_row + file.num_rows]
                columns.append(pa.array(tokens))
            else:
                match = self._patterns[field.name].search(file.path)
                value = pa.scalar(None if match is None else match[1], pa.string())
                columns.append(pa.repeat(value, file.num_rows))
        return pa.table(columns, schema=schema)


# --- SQL over the properties of sources, as the catalog keeps them.
#
# A table has a row for each document, with `tokens`; a query reads no data file, and reaches nothing outside. Cost:
# DuckDB's, over the columns that the query names; a selection's rows are copied.

_MISSING = re.compile(r"Table with name (.+?) does not exist!")


class QueryResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that a query gave."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def run_query(text: str, part: Part, catalog: Catalog, properties: Mapping[str, PropertiesEntry]) -> QueryResult:
    """Run a query whose tables are the sources of a part with all their rows, and its selections and children with the
    rows that they have.

    Args:
        text: A query in DuckDB's SQL.
        part: The part.
        catalog: Its catalog, with views.
        properties: What is kept of the properties of each source.

    Raises:
        OptionError: It is no such query; the message is DuckDB's, with a guess among these tables alone.
        CatalogStale: Properties of a file are not kept yet.
    """
    import duckdb

    names = [*part.sources, *(name for name in row_sets_of(part) if name not in part.sources)]
    with open_database() as database:
        for name in names:
            if name in text:  # tables that it does not name cost nothing
                database.register(name, _table(name, part, catalog, properties))
        try:
            found = database.execute(text)
            columns = tuple(column[0] for column in found.description or ())
            return QueryResult(columns=columns, rows=tuple(map(tuple, found.fetchall())))
        except duckdb.OutOfMemoryException as error:
            cause = " ".join(str(error).partition(".")[0].split())
            raise OptionError(
                f"query: it does not fit into memory, and nothing is written to a disk: {cause}; "
                "name fewer columns or rows, or leave ORDER BY out"
            ) from None
        except duckdb.Error as error:
            message = " ".join(str(error).partition("\nLINE ")[0].split())
            if missing := _MISSING.search(message):  # DuckDB's guess may be a table of its own
                message = f"there is no table {missing[1]!r}{nearest(missing[1], names)}"
            raise OptionError(f"query: {message}; tables are {listed(map(repr, names))}") from None


def _table(name: str, part: Part, catalog: Catalog, properties: Mapping[str, PropertiesEntry]) -> pa.Table:
    base = name if name in part.sources else row_sets_of(part)[name].source
    patterns = path_properties_of(part.sources[base])
    rows = PropertyRows(catalog.directory, catalog.sources[base], properties.get(base), patterns)
    table = rows.whole(rows.names)
    view = catalog.views.get(name)
    return table if name == base or view is None else table.take(pa.array(np.asarray(view.kept)))
