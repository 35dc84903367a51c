"""The source of Megatron's datasets: pairs of .bin and .idx, read as they are.

In: a file's path, which is that of the .bin; later the bytes of its pages. Out: `FileScan` and `Documents`, see
source.py. Must hold: tokens are those of the .bin, unaltered; an end-of-document token is there only if it was written.
Sequences that the multimodal variant marks with a mode are tokens like the others, as Megatron's GPTDataset takes them.
Cost: a scan reads the .idx once, and of the .bin its size.

The identity of a dataset is a hash over the sizes of both files and samples of both: all of a small file, of a large
one SAMPLES blocks spread evenly. To read whole .idx files of hundreds of sources would cost every start minutes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from torchmix.catalog.bad_rows import BadRows
from torchmix.catalog.manifest import FileStatus
from torchmix.errors import CorruptPage, SourceUnreadable, located, where_of
from torchmix.formats.megatron.documents import read_documents
from torchmix.formats.megatron.files import index_path
from torchmix.formats.megatron.header import IndexHeader, read_header
from torchmix.formats.source import Documents, FileScan, PageRun
from torchmix.storage.file_status import settled_statuses
from torchmix.storage.open_path import opened
from torchmix.storage.random_access import LocalFile, RandomAccessFile
from torchmix.storage.stores import is_uri
from torchmix.transform.row_encoder import RowEncoder

logger = logging.getLogger(__name__)

TRANSFORM_ID = "indexed-1"
SAMPLES = 16
SAMPLE_BYTES = 1 << 12
QUICK_DOCUMENTS = 1 << 16
"""A .idx of fewer is read in a few milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedSource:
    """A source of the recipe whose files are Megatron's; implements `source.FormatSource`."""

    name: str
    _known: dict[str, tuple[tuple[FileStatus, ...], tuple[int, str]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Status and identity of files that had settled when they were hashed, by path."""

    @property
    def format(self) -> str:
        """See `source.FormatSource.format`."""
        return "megatron"

    @property
    def transform_id(self) -> str:
        """See `source.FormatSource.transform_id`."""
        return TRANSFORM_ID

    @property
    def vocab_size(self) -> int | None:
        """See `source.FormatSource.vocab_size`."""
        return None

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `source.FormatSource.row_encoder`."""
        return None

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.FormatSource.fingerprint`; from samples of the .bin and of the .idx beside it."""
        with _open(index_path(path), where_of(self.name, path)) as index:
            return self._identity(file, index, path)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `source.FormatSource.check`; reads the head of the .idx."""
        of_index = index_path(str(path))
        with _open(of_index, where_of(self.name, path)) as index, located(where_of(self.name, of_index)):
            read_header(index)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.FormatSource.scan`; no row is bad, since nothing of a row is looked at."""
        of_index = index_path(str(path))
        where = where_of(self.name, path)
        with _open(str(path), where) as file, _open(of_index, where) as index:
            num_bytes, footer_hash = self._identity(file, index, str(path))
            with located(where_of(self.name, of_index)):
                header = read_header(index)
                documents = read_documents(index, header, bin_bytes=num_bytes, progress=progress)
            _log_oddities(index, header, where_of(self.name, of_index))
        pages = len(documents.page_offset)
        return FileScan(
            num_bytes=num_bytes,
            footer_hash=footer_hash,
            num_rows=len(documents.tokens),
            chunk_of_page=np.zeros(pages, np.int32),
            page_offset=documents.page_offset,
            page_bytes=documents.page_bytes,
            page_rows=documents.page_rows,
            kind=np.array([0], np.int8),
            tokens=documents.tokens,
            schema=header.dtype.str.encode(),
            is_quick=len(documents.tokens) < QUICK_DOCUMENTS,
        )

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `source.FormatSource.properties`; these files have none."""
        raise SourceUnreadable(
            f"has no columns, so no property {columns[0]!r}; join a table of properties by row, or take them from the "
            "path",
            where_of(self.name, path),
        )

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `source.FormatSource.decode`; the lengths are the catalog's, since the .bin has none."""
        return list(map(self._documents, runs))

    def _documents(self, run: PageRun) -> Documents:
        dtype = dtype_of_schema(run.schema)
        assert run.tokens is not None, "pages of a .bin are read with the catalog's lengths"
        offsets = np.zeros(run.num_rows + 1, np.int64)
        np.cumsum(run.tokens, out=offsets[1:])
        if offsets[-1] * dtype.itemsize != len(run.pages):
            raise CorruptPage(
                f"the page at byte {run.offset} has {len(run.pages)} bytes, its {run.num_rows} documents have "
                f"{offsets[-1]} tokens of {dtype.itemsize}; the catalog is damaged, run torchmix index",
                where_of(self.name, run.path),
                offset=run.offset,
            )
        return Documents(values=np.frombuffer(run.pages, dtype), offsets=offsets)

    def _identity(self, file: RandomAccessFile, index: RandomAccessFile, path: str) -> tuple[int, str]:
        """`_fingerprint`, once for files that nobody writes to."""
        status = (*settled_statuses(file), *settled_statuses(index))
        known = self._known.get(path)
        if known is not None and known[0] == status:
            return known[1]
        identity = _fingerprint(file, index)
        if len(status) == 2:
            self._known[path] = status, identity
        return identity


def dtype_of_schema(schema: bytes) -> np.dtype[np.integer[Any]]:
    """The type of the tokens of a file, of which `FileScan.schema` is this."""
    return np.dtype(schema.decode())


def _log_oddities(index: RandomAccessFile, header: IndexHeader, where: str) -> None:
    if header.num_documents != header.num_sequences:
        logger.warning(
            "%s: %d sequences in %d documents; torchmix keeps a document together, where Megatron's GPTDataset takes "
            "each sequence by itself",
            where,
            header.num_sequences,
            header.num_documents,
        )
    if header.has_modes:
        marked = np.count_nonzero(header.modes(index, 0, header.num_sequences))
        if marked:
            logger.warning(
                "%s: %d of %d sequences have a mode; they are read as tokens, as Megatron's GPTDataset reads them",
                where,
                marked,
                header.num_sequences,
            )


def _fingerprint(file: RandomAccessFile, index: RandomAccessFile) -> tuple[int, str]:
    """Size of the .bin, and the hash of both files, which are open."""
    sizes = [file.num_bytes, index.num_bytes]
    digest = hashlib.sha256()
    for size in sizes:
        digest.update(size.to_bytes(8, "little"))
    for sampled, size in zip((index, file), sizes[::-1], strict=True):
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(sampled.read(0, size))
            continue
        for i in range(SAMPLES):
            digest.update(sampled.read(i * (size - SAMPLE_BYTES) // (SAMPLES - 1), SAMPLE_BYTES))
    return sizes[0], digest.hexdigest()[:32]


@contextmanager
def _open(path: str, where: str) -> Iterator[RandomAccessFile]:
    """The .bin or the .idx while it is used; `where` is the source and the .bin."""
    if is_uri(path):
        with opened(path, f"{where}: {PurePosixPath(path).name}") as stored:
            yield stored
        return
    try:
        file = LocalFile(path)
    except OSError as error:
        raise SourceUnreadable(
            f"{Path(path).name} cannot be opened: {error.strerror}; a dataset is a .bin and a .idx: put it there", where
        ) from None
    try:
        yield file
    except OSError as error:
        raise SourceUnreadable(f"{Path(path).name} cannot be read: {error.strerror or error}", where) from None
    finally:
        file.close()
