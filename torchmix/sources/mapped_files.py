"""Files whose tokens lie in them as they are: memory-mapped, so that a page costs nothing to keep.

In: files of a source. Out: all tokens of a file as one array, which is the kernel's own cache of it. Must hold: what is
mapped is the indexed file, checked when it is mapped and every CHECK_EVERY_S; a file that is replaced stays the indexed
one. No descriptor stays open. A file that cannot be mapped is none of ours: it is read as others are. Cost: opening and
mapping, some 50 microseconds a file and window; of memory only the kernel's, shared by all processes of the node.

A mapping is read without a system call, which is its speed and its danger: a file that is cut while it is mapped, or a
disk that fails under it, ends the process by SIGBUS where `read` would have given an error. The checks find a cut file
before it is used, but for one that is cut in the moments between.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.store import SourceCatalog
from torchmix.sources.indexed import dtype_of_schema
from torchmix.sources.open_files import OpenFiles

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0


class MappedFiles:
    """The files of one source; not for several threads at once."""

    def __init__(self, catalog: SourceCatalog, files: OpenFiles) -> None:
        """Nothing is opened yet."""
        self._catalog = catalog
        self._files = files
        self._dtypes = [_dtype_as_it_lies(catalog.format, schema) for schema in catalog.schemas]
        self._is_possible = any(dtype is not None for dtype in self._dtypes)
        self._mapped: dict[int, NDArray[np.integer[Any]]] = {}
        self._ever_mapped: set[int] = set()
        """Pages may hold a mapping that was forgotten here."""
        self._checked_s = time.monotonic()

    @property
    def is_possible(self) -> bool:
        """Whether the tokens of some file lie in it as they are, and nothing has kept us from mapping it."""
        return self._is_possible

    def tokens(self, file: int) -> NDArray[np.integer[Any]] | None:
        """All of a file's tokens; None if it is to be read as others are.

        Raises:
            SourceChanged: The file is not the one that was indexed.
            SourceUnreadable: It was deleted, or may not be read.
        """
        mapped = self._mapped.get(file)
        if mapped is not None:
            return mapped
        dtype = self._dtypes[self._catalog.files[file].schema] if self._is_possible else None
        if dtype is None:
            return None
        try:
            content = self._files.map(file)
        except OSError as error:
            logger.warning(
                "source %r: %s cannot be memory-mapped (%s); it is read instead",
                self._catalog.name,
                self._files.path(file),
                error,
            )
            self._is_possible = False
            return None
        mapped = np.frombuffer(content, dtype, len(content) // dtype.itemsize)
        self._mapped[file] = mapped
        self._ever_mapped.add(file)
        return mapped

    def check(self) -> None:
        """Look, at most every CHECK_EVERY_S, whether files that were mapped are still what was indexed.

        Raises:
            SourceChanged: One was cut or overwritten.
        """
        if not self._ever_mapped or time.monotonic() - self._checked_s < CHECK_EVERY_S:
            return
        for file in self._ever_mapped:
            self._files.check_in_place(file)
        self._checked_s = time.monotonic()

    def forget(self) -> None:
        """Let go of all mappings: each ends with the last page that was made from it, and with it what the process
        counts as its memory."""
        self._mapped.clear()


def _dtype_as_it_lies(format: str, schema: bytes) -> np.dtype[np.integer[Any]] | None:
    """Of the tokens in a file; None if pages must be decoded, or may hold ids that int32 does not."""
    if format != "megatron":
        return None
    dtype = dtype_of_schema(schema)
    return dtype if dtype.itemsize <= 4 else None
