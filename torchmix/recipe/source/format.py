"""What the files of a source are: said by its `format`, or by their names.

In: a source of the recipe. Out: the name of its format. Must hold: decided by the recipe alone, before anything is
opened, so that all ranks and the fingerprint agree. Cost: none.

`FORMATS` is the part of the table of formats that a recipe needs. How files of each are found, scanned and read is in
the other part, `formats/table.py`.
"""

from __future__ import annotations

import msgspec

from torchmix.recipe.structs import Source


class FormatNames(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe, and its reader, knows of a format."""

    title: str
    """What messages call its files."""
    suffixes: tuple[str, ...]
    """How the paths of a source end that does not say its `format`."""
    has_columns: bool = True
    """A source names the column that holds its documents, and what turns text into ids."""
    pages_as_one: int = 1
    """Pages that count as one of `shuffle.window_pages`, where a page is a single row."""


FORMATS: dict[str, FormatNames] = {
    "parquet": FormatNames(title="Parquet", suffixes=(".parquet", ".pq")),
    "megatron": FormatNames(title="Megatron's", suffixes=(".bin", ".idx"), has_columns=False),
    "jsonl": FormatNames(
        title="JSON lines",
        suffixes=tuple(f"{lines}{codec}" for lines in (".jsonl", ".ndjson", ".json") for codec in ("", ".gz", ".zst")),
    ),
    "arrow": FormatNames(title="Arrow", suffixes=(".arrow", ".feather", ".ipc")),
    "webdataset": FormatNames(title="WebDataset", suffixes=(".tar",), pages_as_one=64),
}
"""By the word that a recipe and the catalog use."""
DEFAULT_FORMAT = "parquet"
"""The format of a source without the key `format` whose files have other names, or names of several formats."""


def converted_csv(path: str) -> str:
    """The line of a shell that makes a file of Parquet of one or several of CSV, which are not read."""
    made = f"{path.partition('.csv')[0].partition('.tsv')[0].replace('*', 'all')}.parquet"
    return f"python -c \"import duckdb; duckdb.read_csv('{path}').write_parquet('{made}')\""


def paths_of(source: Source) -> tuple[str, ...]:
    """The paths and globs of a source, as the recipe gives them."""
    return (source.path,) if isinstance(source.path, str) else tuple(source.path)


def format_of(source: Source) -> str:
    """A key of `FORMATS`. Without a `format`, it is the one whose suffixes all paths have."""
    if source.format is not None:
        return source.format
    paths = paths_of(source)
    named = [name for name, format in FORMATS.items() if all(path.endswith(format.suffixes) for path in paths)]
    return named[0] if named and paths else DEFAULT_FORMAT
