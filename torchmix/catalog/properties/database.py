"""A database in memory that reaches nothing outside of it.

In: nothing. Out: a DuckDB connection. Must hold: what a recipe or a command line says in SQL opens no file, no network
and no extension, and cannot change that. Cost: the first connection loads DuckDB, in about 0.1 s; a recipe without
selections does not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

MOST_THREADS = 4
"""Most threads of one database: an index run has several side by side."""


def open_database() -> duckdb.DuckDBPyConnection:
    """An empty database; close it, or use it in a `with`."""
    import duckdb

    return duckdb.connect(
        config={
            "enable_external_access": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_community_extensions": "false",
            "python_enable_replacements": "false",
            "threads": str(MOST_THREADS),
            "lock_configuration": "true",
        }
    )
