"""The source of Megatron's datasets: pairs of .bin and .idx, read as they are."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.manifest import BadRows
from torchmix.catalog.sizes import MAX_DOCUMENT_TOKENS
from torchmix.errors import CorruptPage, SourceUnreadable, located, where_of
from torchmix.formats.megatron.files import IndexHeader, find_datasets, index_path, read_header
from torchmix.formats.source import Documents, FileScan, FormatRow, FoundColumn, PageRun
from torchmix.storage.random_access import FileStatus, LocalFile, RandomAccessFile, settled_statuses
from torchmix.storage.store_file import opened
from torchmix.storage.stores import is_uri
from torchmix.transform.tokenizer import RowEncoder

# --- A look at one dataset: the head of its .idx -> one column without a name.


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/look.py`."""
    path = index_path(file)
    with opened(path, path) as index:
        header = read_header(index)
    yield FoundColumn(name="", kind="tokens", per_byte=1 / header.dtype.itemsize)


# --- Sequences of a Megatron dataset -> its documents, and the pages they lie in.
#
# Every document lies inside the .bin, in one piece, on a border of tokens; otherwise an error names the first that
# does not. Nothing of the .bin is read. Cost: the .idx is read once, in blocks that stay in the processor's cache,
# about 20 ns a sequence; memory: 4 bytes a document, 24 where documents have several sequences.
#
# A *document* is what the document indices say: the sequences from one index to the next, joined. Pages are cut by a
# fixed rule, since the order of documents follows from them: documents are counted through the file, in the order of
# the .idx, by the bytes of those before; documents that begin in the same 64 KiB of that count are one page. A
# document that does not begin where the one before ends begins a page, too. One without tokens lies in the page of the
# one before.

PAGE_BITS = 16
"""Pages are cut at 2**PAGE_BITS bytes. Part of the order: with another value the same files have other pages."""
BLOCK_SEQUENCES = 1 << 16
"""Sequences that are looked at together."""


class IndexedDocuments(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Documents and pages of one dataset."""

    tokens: Int32Array
    """[N] tokens of each document; [0] if no document has any."""
    page_offset: Int64Array
    """[P] first byte in the .bin."""
    page_bytes: Int64Array
    """[P] at least 1."""
    page_rows: Int64Array
    """[P] documents, at least 1; sums to N."""
    used_bytes: int
    """Bytes of the .bin that belong to some document, each as often as it does."""


class _Spans(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Documents from `first` on: where each lies."""

    first: int
    tokens: Int32Array
    pointers: Int64Array


def read_documents(
    index: RandomAccessFile,
    header: IndexHeader,
    *,
    bin_bytes: int,
    progress: Callable[[int], None] | None = None,
) -> IndexedDocuments:
    """Read the documents of a dataset.

    Args:
        index: Its open .idx.
        header: The head of it.
        bin_bytes: Size of the .bin.
        progress: Called with bytes of the .bin that were accounted for since the last call.

    Raises:
        SourceUnreadable: Lengths, pointers or document indices that contradict each other or the .bin.
    """
    _check_ends(index, header)
    cut = _PageCut(header.dtype.itemsize, bin_bytes)
    tokens = []
    for spans in _spans(index, header):
        num_bytes = cut.add(spans)
        tokens.append(spans.tokens)
        if progress is not None:
            progress(num_bytes)
    offset, page_bytes, page_rows = cut.pages()
    return IndexedDocuments(
        tokens=np.concatenate(tokens) if len(offset) else np.zeros(0, np.int32),
        page_offset=offset,
        page_bytes=page_bytes,
        page_rows=page_rows,
        used_bytes=cut.done_bytes,
    )


def _check_ends(index: RandomAccessFile, header: IndexHeader) -> None:
    first = int(header.document_indices(index, 0, 1)[0])
    last = int(header.document_indices(index, header.num_documents, header.num_documents + 1)[0])
    if first != 0 or last != header.num_sequences:
        raise SourceUnreadable(
            f"documents are sequences {first} to {last}, the file has {header.num_sequences}; it was not "
            "finished, or is damaged: write it again"
        )


def _spans(index: RandomAccessFile, header: IndexHeader) -> Iterator[_Spans]:
    """Documents in order; block by block while each is one sequence, then all that is left at once."""
    for start in range(0, header.num_sequences, BLOCK_SEQUENCES):
        stop = min(start + BLOCK_SEQUENCES, header.num_sequences)
        is_plain = header.num_documents == header.num_sequences and np.array_equal(
            header.document_indices(index, start, stop + 1), np.arange(start, stop + 1)
        )
        if not is_plain:
            yield _joined(index, header, start)
            return
        tokens = header.lengths(index, start, stop)
        _check_lengths(tokens, start)
        yield _Spans(first=start, tokens=tokens, pointers=header.pointers(index, start, stop))
    if not header.num_sequences and header.num_documents:
        yield _Spans(
            first=0, tokens=np.zeros(header.num_documents, np.int32), pointers=np.zeros(header.num_documents, np.int64)
        )


def _joined(index: RandomAccessFile, header: IndexHeader, start: int) -> _Spans:
    """Documents from `start` on, of any number of sequences each; before them, document and sequence are the same."""
    borders = header.document_indices(index, start, header.num_documents + 1)
    if borders[0] != start or np.any(np.diff(borders) < 0):
        i = int(np.argmax(np.diff(borders, prepend=start) < 0))
        raise SourceUnreadable(
            f"document {start + i} begins at sequence {borders[i]}, before the one before it; the file is "
            "damaged, write it again"
        )
    lengths = header.lengths(index, start, header.num_sequences)
    _check_lengths(lengths, start)
    pointers = header.pointers(index, start, header.num_sequences)
    first, last = borders[:-1] - start, borders[1:] - start
    end = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = end[last] - end[first]
    if tokens.max(initial=0) > MAX_DOCUMENT_TOKENS:
        i = int(np.argmax(tokens > MAX_DOCUMENT_TOKENS))
        raise SourceUnreadable(
            f"document {start + i} has {tokens[i]} tokens in {last[i] - first[i]} sequences, at most "
            f"{MAX_DOCUMENT_TOKENS}; write the dataset with shorter documents"
        )
    # Only sequences with tokens have a place. Those of a document must follow on its first.
    full = np.flatnonzero(lengths)
    follows = pointers[full][1:] == (pointers[full] + header.dtype.itemsize * lengths[full].astype(np.int64))[:-1]
    document = np.searchsorted(borders, full + start, side="right") - 1
    torn = np.flatnonzero((document[1:] == document[:-1]) & ~follows)
    if len(torn):
        i = int(torn[0])
        raise SourceUnreadable(
            f"document {start + document[i]} lies in several places of the .bin: its sequence "
            f"{start + full[i + 1]} begins at byte {pointers[full[i + 1]]}, not where the one before ends; write the "
            "dataset again, in the order of its documents"
        )
    own_first = np.searchsorted(full, first)  # the document's first sequence with tokens, where it has any
    padded = np.append(pointers[full], np.int64(0))
    return _Spans(first=start, tokens=tokens.astype(np.int32), pointers=np.where(tokens > 0, padded[own_first], 0))


def _check_lengths(lengths: NDArray[np.int32], start: int) -> None:
    if lengths.min(initial=0) < 0:
        i = int(np.argmax(lengths < 0))
        raise SourceUnreadable(
            f"sequence {start + i} has {lengths[i]} tokens; the file is damaged, write it again", row=start + i
        )


class _PageCut:
    """Cuts documents into pages while they pass."""

    def __init__(self, token_bytes: int, bin_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._bin_bytes = bin_bytes
        self._end = -1
        """Byte of the .bin at which the last document with tokens ends."""
        self._block = -1
        self._rows = 0
        self.done_bytes = 0
        self._first_row: list[Int64Array] = []
        self._offset: list[Int64Array] = []
        self._before: list[Int64Array] = []
        """First row and first byte of each page, and the bytes of all documents before it."""

    def add(self, spans: _Spans) -> int:
        """Take the next documents; returns their bytes."""
        full = None if spans.tokens.all() else np.flatnonzero(spans.tokens)
        pointers = spans.pointers if full is None else spans.pointers[full]
        num_bytes = (spans.tokens if full is None else spans.tokens[full]).astype(np.int64)
        num_bytes *= self._token_bytes
        added_bytes = int(num_bytes.sum())
        if len(pointers):
            # Nearly every dataset lies in one piece; then one comparison of each pointer is all there is to check.
            follows = pointers[1:] - pointers[:-1] == num_bytes[:-1]
            in_one = bool(follows.all())
            self._check_places(spans, full, pointers, num_bytes, in_one=in_one)
            before = pointers - pointers[0] if in_one else np.cumsum(num_bytes) - num_bytes
            before += self.done_bytes
            block = before >> PAGE_BITS
            begins = np.empty(len(pointers), np.bool_)
            begins[0] = pointers[0] != self._end or block[0] != self._block
            np.not_equal(block[1:], block[:-1], out=begins[1:])
            if not in_one:
                begins[1:] |= ~follows
            pages = np.flatnonzero(begins)
            self._first_row.append((pages if full is None else full[pages]) + self._rows)
            self._offset.append(pointers[pages])
            self._before.append(before[pages])
            self._end, self._block = int(pointers[-1] + num_bytes[-1]), int(block[-1])
            self.done_bytes += added_bytes
        self._rows += len(spans.tokens)
        return added_bytes

    def _check_places(
        self, spans: _Spans, full: Int64Array | None, pointers: Int64Array, num_bytes: Int64Array, *, in_one: bool
    ) -> None:
        """Raise unless documents with tokens lie inside the .bin; `in_one`: each begins where the one before ends."""
        if in_one:
            looked_at = np.array([0, len(pointers) - 1])
        else:
            looked_at = np.arange(len(pointers))
        places, last_place = pointers[looked_at], self._bin_bytes - num_bytes[looked_at]
        outside = (places < 0) | (places > last_place) | (places & (self._token_bytes - 1) != 0)
        if not outside.any():
            return
        i = int(looked_at[np.argmax(outside)])
        document = spans.first + (i if full is None else int(full[i]))
        raise SourceUnreadable(
            f"document {document} is {num_bytes[i]} bytes from byte {pointers[i]} of the .bin on, which "
            f"has {self._bin_bytes} bytes and tokens of {self._token_bytes}; the .bin was cut, or the two files are "
            "not of one dataset: copy both again"
        )

    def pages(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Offset, bytes and rows of each page."""
        if not self._offset:
            return (np.zeros(0, np.int64),) * 3
        first_row = np.concatenate(self._first_row)
        first_row[0] = 0  # documents without tokens before the first one with any
        before = np.append(np.concatenate(self._before), np.int64(self.done_bytes))
        rows = np.append(first_row, np.int64(self._rows))
        return np.concatenate(self._offset), before[1:] - before[:-1], rows[1:] - rows[:-1]


# --- The source: its scan, and the documents of its pages.
#
# Tokens are those of the .bin, unaltered; an end-of-document token is there only if it was written. Sequences that the
# multimodal variant marks with a mode are tokens like the others, as Megatron's GPTDataset takes them. Cost: a scan
# reads the .idx once, and of the .bin its size.
#
# The identity of a dataset is a hash over the sizes of both files and samples of both: all of a small file, of a large
# one SAMPLES blocks spread evenly. To read whole .idx files of hundreds of sources would cost every start minutes.

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
        """See `FormatSource.format`."""
        return "megatron"

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        return TRANSFORM_ID

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return None

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`."""
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


FORMAT = FormatRow(
    make_source=IndexedSource,
    look=look,
    find=find_datasets,
    companion=index_path,
    type_in_file=dtype_of_schema,
    scan_reads_tokens=False,
)
