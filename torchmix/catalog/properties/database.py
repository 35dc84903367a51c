"""A database in memory that reaches nothing outside of it.

In: nothing. Out: a DuckDB connection. Must hold: what a recipe or a command line says in SQL opens no file, no network
and no extension, and cannot change that; what does not fit into memory is an error, and is not written to a disk. Cost:
the first connection loads DuckDB, in about 0.1 s; a recipe without selections does not load it.
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
