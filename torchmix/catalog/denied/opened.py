"""Denied rows of the catalog, opened.

In: the manifest, and the paths of a recipe's deny-lists. Out: the rows of each source that these lists name. Must hold:
rows that were found in other lists, or in other files of the source, are an error and never used. Cost: one mapping a
source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.array_files import Content, open_arrays
from torchmix.catalog.manifest import Manifest
from torchmix.errors import CatalogMissing, CatalogStale

ROWS = "rows"
"""The array of an entry."""


class Denied(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rows of one source that are not given."""

    rows: NDArray[np.int64]
    """[n] ascending, each once; mapped."""
    num_tokens: int
    """Tokens of these rows."""
    fingerprint: str
    """16 hex digits over the rows."""


def open_denied(
    folder: Path,
    lists: Sequence[str],
    sources: Mapping[str, str],
    manifest: Manifest,
    opened: dict[str | Path, Content],
) -> dict[str, Denied]:
    """The denied rows of sources, by name; sources without are left out.

    Args:
        folder: Of the catalog's arrays.
        lists: Paths of the deny-lists, in the recipe's words.
        sources: Fingerprint of each source.
        manifest: What is published.
        opened: As in `open_arrays`.

    Raises:
        CatalogMissing: A source was not indexed with deny-lists.
        CatalogStale: It was indexed with other ones, or had other files then.
    """
    found: dict[str, Denied] = {}
    for name, fingerprint in sources.items() if lists else ():
        entry = manifest.denied.get(name)
        if entry is None:
            raise CatalogMissing(f"the catalog lacks the denied rows of source {name!r}; run torchmix index")
        if sorted(entry.lists) != sorted(lists) or entry.source_fingerprint != fingerprint:
            what = "had other files" if sorted(entry.lists) == sorted(lists) else "the recipe named other deny-lists"
            raise CatalogStale(
                f"the denied rows of source {name!r} were found when {what} ({', '.join(entry.lists)}); "
                f"run torchmix index"
            )
        if entry.file is not None:
            rows: NDArray[np.int64] = open_arrays(f"{folder}/{entry.file}", entry.arrays, opened)[ROWS]
            found[name] = Denied(rows=rows, num_tokens=entry.num_tokens, fingerprint=entry.fingerprint)
    return found
