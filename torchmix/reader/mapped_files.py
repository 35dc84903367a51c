"""Files whose tokens lie in them as they are: memory-mapped, so that a page costs nothing to keep.

What is mapped is the indexed file, checked when it is mapped and every CHECK_EVERY_S; a file that is replaced stays the
indexed one. No descriptor stays open. A file that cannot be mapped is read like any other. Cost: opening and mapping,
some 50 microseconds a file and window; memory of the kernel only, shared by all processes of the node.

A mapping is read without a system call, which is its speed and its danger: a file that is cut while it is mapped, or a
disk that fails under it, ends the process by SIGBUS where `read` would have given an error. The checks find a cut file
before it is used, unless it was cut after the last check.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.store import SourceCatalog
from torchmix.errors import CorruptPage
from torchmix.formats.table import type_in_file
from torchmix.reader.open_files import OpenFiles
from torchmix.reader.page_cache import run_numbers
from torchmix.storage.stores import is_uri

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0


class MappedFiles:
    """The files of one source; not for several threads at once."""

    def __init__(self, catalog: SourceCatalog, files: OpenFiles, *, is_encoded: bool = False) -> None:
        """Nothing is opened yet; `is_encoded`: tokens are made of what lies in the files."""
        self._catalog = catalog
        self._files = files
        schemas = set(catalog.schemas)
        can_be = len(schemas) == 1 and not is_encoded and not any(is_uri(file.path) for file in catalog.files)
        self._dtype = _dtype_as_it_lies(catalog.format, schemas.pop()) if can_be else None
        self._mapped: dict[int, NDArray[np.integer[Any]]] = {}
        self._is_verified: NDArray[np.bool_] | None = None
        self._ever_mapped: set[int] = set()
        """Pages may hold a mapping that was forgotten here."""

    @property
    def is_possible(self) -> bool:
        """Whether all files hold plain tokens of one type, and mapping them has not failed."""
        return self._dtype is not None

    @property
    def num_files(self) -> int:
        """Files of the source."""
        return len(self._catalog.files)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the files; 0 where mapping is not possible."""
        return 0 if self._dtype is None else self._dtype.itemsize

    def files_of_pages(self, pages: NDArray[np.int64]) -> list[tuple[int, NDArray[np.integer[Any]]]] | None:
        """The files of ascending pages: for each, where its pages begin in `pages`, and all of its tokens.

        Returns:
            None if pages are to be decoded.

        Raises:
            SourceChanged, SourceUnreadable: A file is not the indexed one, or cannot be read.
        """
        if self._dtype is None:
            return None
        table = self._catalog.pages
        numbers = table.file_of_chunk[table.chunk_of_pages(pages)]
        first = np.flatnonzero(np.diff(numbers, prepend=-1))
        found: list[tuple[int, NDArray[np.integer[Any]]]] = []
        for begin, file in zip(first.tolist(), numbers[first].tolist(), strict=True):
            tokens = self.tokens(file)
            if tokens is None:
                return None
            found.append((begin, tokens))
        return found

    def tokens(self, file: int) -> NDArray[np.integer[Any]] | None:
        """All tokens of a file; None if it cannot be mapped. Errors as those of `files_of_pages`."""
        mapped = self._mapped.get(file)
        if mapped is not None or self._dtype is None:
            return mapped
        try:
            content = self._files.map(file)
        except OSError as error:
            logger.warning(
                "source %r: %s cannot be memory-mapped (%s); it is read instead",
                self._catalog.name,
                self._files.path(file),
                error,
            )
            self._dtype = None
            return None
        mapped = np.frombuffer(content, self._dtype, len(content) // self._dtype.itemsize)
        self._mapped[file] = mapped
        self._ever_mapped.add(file)
        return mapped

    def verify(self, pages: NDArray[np.int64]) -> None:
        """Compare pages with their checksums, where there are any, each once; its file must be mapped.

        Raises:
            CorruptPage: A page has another checksum.
        """
        table = self._catalog.pages
        if not len(table.page_crc) or self._dtype is None:
            return
        if self._is_verified is None:
            self._is_verified = np.zeros(table.num_pages, np.bool_)
        for page in sorted(set(pages[~self._is_verified[pages]].tolist())):
            place = table.place(np.array([page]))
            file, offset = int(table.file_of_chunk[place.chunk[0]]), int(place.offset[0])
            content = self._mapped[file].data.cast("B")[offset : offset + int(place.num_bytes[0])]
            if zlib.crc32(content) != table.page_crc[page]:
                raise CorruptPage(
                    f"the ids of page {page}, at bytes [{offset}, {offset + len(content)}), have another checksum than "
                    "when they were written; delete the file, then rows are encoded instead, or run torchmix index "
                    "--keep-tokens",
                    self._files.where(file),
                    offset=offset,
                )
            self._is_verified[page] = True

    @property
    def is_checked(self) -> bool:
        """Whether pages have checksums that are compared when a page is first used."""
        return bool(len(self._catalog.pages.page_crc)) and self._dtype is not None

    def check(self) -> None:
        """Check that mapped files are still the indexed ones.

        Raises:
            SourceChanged: One was cut or overwritten.
        """
        for file in self._ever_mapped:
            self._files.check_in_place(file)

    def forget(self) -> None:
        """Release all mappings. A mapping, and the memory that the process counts for it, ends with the last page that
        was made from it."""
        self._mapped.clear()


# --- The mapped files of all sources of a reader, by one number.


class MappedTokens:
    """Which files are mapped now."""

    def __init__(self, sources: Sequence[MappedFiles], first_file: NDArray[np.int64], num_files: int) -> None:
        """Nothing is mapped yet.

        Args:
            sources: The files of each source.
            first_file: [S] number of the first file of each among those of all sources.
            num_files: Of all sources.
        """
        self._sources, self._first_file = sources, first_file
        self.token_bytes = np.array([source.token_bytes for source in sources], np.int64)
        """[S] bytes of a token in sources whose files are mapped; 0 for all others, and where that has failed."""
        self.runs = np.zeros((num_files, 5), np.int64)
        """[F, 5] each file as a native call takes it, see `RunNumbers`; zeros while it is not mapped."""
        self.arrays: list[NDArray[np.integer[Any]] | None] = [None] * num_files
        """[F] the tokens of each file while it is mapped."""
        self._checked = [s for s, source in enumerate(sources) if source.is_checked]

    def open(self, source: NDArray[np.integer[Any]], page: NDArray[np.int64], file: NDArray[np.int64]) -> bool:
        """Map the files of pieces, [n] each by source and row; whether all of them are mapped then.

        Raises:
            SourceChanged, SourceUnreadable: A file is not the indexed one, or cannot be read.
            CorruptPage: A page has another checksum than it was written with.
        """
        missing = file[self.runs[file, 0] == 0] if len(self.runs) else file[:0]
        for number in np.unique(missing[missing >= 0]).tolist():
            s = int(self._first_file.searchsorted(number, side="right")) - 1
            tokens = self._sources[s].tokens(number - int(self._first_file[s]))
            if tokens is None:
                self.token_bytes[s] = 0
                return False
            self.arrays[number], self.runs[number] = tokens, run_numbers(tokens)
        for s in self._checked:
            self._sources[s].verify(page[source == s])
        return True

    def check(self) -> None:
        """Check that mapped files are still the indexed ones; see `MappedFiles.check`."""
        for source in self._sources:
            source.check()

    def forget(self, source: int) -> None:
        """Release all mappings of a source."""
        first, files = int(self._first_file[source]), self._sources[source]
        for number in range(first, first + files.num_files):
            self.arrays[number], self.runs[number] = None, 0
        files.forget()


def _dtype_as_it_lies(format: str, schema: bytes) -> np.dtype[np.integer[Any]] | None:
    """Dtype of the tokens in a file; None if pages must be decoded, or may hold ids beyond int32."""
    dtype = type_in_file(format, schema)
    return None if dtype is None or dtype.itemsize > 4 else dtype
