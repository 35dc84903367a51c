"""What the files of a source are: said by its `format`, or by their names.

In: a source of the recipe. Out: the name of its format. Must hold: decided by the recipe alone, before anything is
opened, so that all ranks and the fingerprint agree. Cost: none.
"""

from __future__ import annotations

from torchmix.recipe.structs import Source

SUFFIXES: dict[str, tuple[str, ...]] = {
    "megatron": (".bin", ".idx"),
    "jsonl": tuple(f"{lines}{codec}" for lines in (".jsonl", ".ndjson", ".json") for codec in ("", ".gz", ".zst")),
    "arrow": (".arrow", ".feather", ".ipc"),
}
"""How the paths of a source of each format end, where it does not say its `format`; all others are Parquet's."""


def paths_of(source: Source) -> tuple[str, ...]:
    """The paths and globs of a source, as the recipe gives them."""
    return (source.path,) if isinstance(source.path, str) else tuple(source.path)


def format_of(source: Source) -> str:
    """`parquet`, `megatron`, `jsonl` or `arrow`. Without a `format`, it is the one whose suffixes all paths have."""
    if source.format is not None:
        return source.format
    paths = paths_of(source)
    named = [name for name, suffixes in SUFFIXES.items() if all(path.endswith(suffixes) for path in paths)]
    return named[0] if named and paths else "parquet"
