"""Denied rows -> their entries in the catalog, with arrays on disk.

In: the rows of each source that deny-lists name. Out: a `DeniedEntry` each. Must hold: an entry is of one set of lists
with their bytes, and of one set of files. Cost: 8 bytes a denied row.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.catalog.array_files import ArrayEntry, write_arrays
from torchmix.catalog.denied.opened import ROWS
from torchmix.catalog.manifest import DeniedEntry
from torchmix.catalog.store import ARRAYS_FOLDER, SourceCatalog


def denied_entry(folder: Path, source: SourceCatalog, rows: Int64Array, lists: Mapping[str, str]) -> DeniedEntry:
    """Write the denied rows of a source, and describe them.

    Args:
        folder: The catalog's folder, locked by the caller.
        source: The source, as it is to be published.
        rows: [n] ascending, each once.
        lists: Path of each deny-list to the hash of its bytes.

    Raises:
        OSError: The disk is full, or not writable.
    """
    name: str | None = None
    arrays: dict[str, ArrayEntry] = {}
    if len(rows):
        path = folder / ARRAYS_FOLDER / f"{source.name}.{secrets.token_hex(4)}"
        path.parent.mkdir(exist_ok=True)
        name, arrays = path.name, write_arrays(path, {ROWS: [rows]})
    return DeniedEntry(
        lists=dict(sorted(lists.items())),
        source_fingerprint=source.fingerprint,
        fingerprint=hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16] if len(rows) else "",
        num_documents=len(rows),
        num_tokens=int(np.asarray(source.sizes.tokens[rows]).sum(dtype=np.int64)),
        file=name,
        arrays=arrays,
    )
