"""What the files of a source are: said by its `format`, or by their names.

In: a source of the recipe. Out: the name of its format. Must hold: decided by the recipe alone, before anything is
opened, so that all ranks and the fingerprint agree. Cost: none.
"""

from __future__ import annotations

from torchmix.recipe.structs import Source

MEGATRON_SUFFIXES = (".bin", ".idx")


def paths_of(source: Source) -> tuple[str, ...]:
    """The paths and globs of a source, as the recipe gives them."""
    return (source.path,) if isinstance(source.path, str) else tuple(source.path)


def format_of(source: Source) -> str:
    """`parquet` or `megatron`. Without a `format`, a source is Megatron's where all its paths end in .bin or .idx."""
    if source.format is not None:
        return source.format
    paths = paths_of(source)
    return "megatron" if paths and all(path.endswith(MEGATRON_SUFFIXES) for path in paths) else "parquet"
