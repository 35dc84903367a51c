"""The `where` of a selection: one SQL expression over the properties of a document -> the rows that it keeps.

In: the text of the expression, and a table of properties. Out: which columns it names, and a mask of the rows. Must
hold: the mask is a function of the text and of each row alone: no subquery, no aggregate, no window, nothing that
differs from run to run or reaches outside. A row for which it is null is not kept. Cost: DuckDB's, over the columns
that the expression names.

DuckDB parses the expression, and the checks read its syntax tree; they search no text for words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.catalog.properties.database import open_database
from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest

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
