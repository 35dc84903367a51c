"""Ids that the index keeps of texts: their files, and the source that reads them in place of the texts."""

from __future__ import annotations

import hashlib
import logging
import mmap
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from io import BufferedRandom
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.array_files import read_end, with_end
from torchmix.catalog.manifest import FileEntry
from torchmix.catalog.page_table import PageColumns, PageTable, join_tables, table_of_file
from torchmix.catalog.store import SourceCatalog
from torchmix.errors import CorruptPage, SourceUnreadable, where_of
from torchmix.formats.source import Documents, PageRun, offsets_of
from torchmix.storage.random_access import LocalFile, RandomAccessFile
from torchmix.transform.tokenizer import RowEncoder

# --- Ids of one data file on disk: what its rows became when it was indexed.
#
#     [ids of all rows, end to end, 2 or 4 bytes each, little-endian] [what they are, in msgpack] [its CRC-32 and bytes]
#
# A file belongs to one content of one data file, by size and hash, and to one transform: with any other it is not
# found, or not taken. It is whole or missing; it may be deleted at any time, and then rows are encoded again. So a
# disk that has no room, or fails, costs the file and nothing else. Cost: 2 bytes an id where all are below 65,536,
# else 4; 12 a page.

logger = logging.getLogger(__name__)

KEPT_FOLDER = "kept"
VERSION = 1
NARROW, WIDE = np.dtype("<u2"), np.dtype("<i4")
_FILE = re.compile(r"(?P<source>.+)\.[0-9a-f]{16}\.ids(\.tmp)?")


class _IdsOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the ids are of."""

    version: int
    identity: tuple[int, str, str, str]
    dtype: str
    ids_of_page: bytes
    """[P] int64, how many ids each page has."""
    crc_of_page: bytes
    """[P] uint32, CRC-32 of the bytes of each page's ids."""


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of ids that was found whole, as far as its end tells."""

    path: Path
    num_bytes: int
    digest: str
    """32 hex digits over its end: with its size, its identity."""
    dtype: str
    """Type of an id, as NumPy writes it."""
    ids_of_page: Int64Array
    crc_of_page: NDArray[np.uint32]


def kept_path(folder: Path, source: str, identity: tuple[int, str, str, str]) -> Path:
    """Where the ids of one data file lie.

    Args:
        folder: The catalog's folder.
        source: The source's name.
        identity: Size and hash of the data file, column, transform.
    """
    key = msgspec.json.encode([VERSION, *identity])
    return Path(f"{folder}/{KEPT_FOLDER}/{source}.{hashlib.sha256(key).hexdigest()[:16]}.ids")


_decode_ids_of = msgspec.msgpack.Decoder(_IdsOf).decode


def read_kept(path: Path, identity: tuple[int, str, str, str]) -> KeptFile | None:
    """What a file of ids says of itself; None if there is none, or it is damaged, which is logged."""
    try:
        with closing(LocalFile(path)) as file:
            num_bytes, end = file.num_bytes, read_end(file.read, file.num_bytes)
        about = _decode_ids_of(end)
        ids_of_page = np.frombuffer(about.ids_of_page, "<i8").astype(np.int64)
        width = np.dtype(about.dtype).itemsize
        if about.version != VERSION or about.identity != identity:
            raise ValueError("it is of another file or transform")
        if int(ids_of_page.sum()) * width + len(with_end(end)) != num_bytes:
            raise ValueError(f"it has {num_bytes} bytes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, msgspec.DecodeError) as error:
        logger.warning(
            "ids kept in %s are damaged (%s); delete the file, or run torchmix index --keep-tokens", path, error
        )
        return None
    return KeptFile(
        path=path,
        num_bytes=num_bytes,
        digest=digest_of_end(end),
        dtype=about.dtype,
        ids_of_page=ids_of_page,
        crc_of_page=np.frombuffer(about.crc_of_page, "<u4").astype(np.uint32),
    )


def digest_of_end(end: bytes) -> str:
    """32 hex digits over what a file says of itself, its checksums included."""
    return hashlib.sha256(end).hexdigest()[:32]


def kept_bytes(folder: Path) -> dict[str, int]:
    """Bytes of the ids that a catalog's folder keeps, by source."""
    found: dict[str, int] = {}
    kept = folder / KEPT_FOLDER
    for path in kept.iterdir() if kept.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and not path.name.endswith(".tmp"):
            found[match["source"]] = found.get(match["source"], 0) + path.stat().st_size
    return found


def remove_stale(folder: Path, current: Iterable[Path], sources: Iterable[str]) -> None:
    """Remove files of ids of these sources that are not among the current ones, and unfinished ones."""
    kept, names, wanted = folder / KEPT_FOLDER, set(sources), set(current)
    for path in kept.iterdir() if kept.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and match["source"] in names and path not in wanted:
            path.unlink(missing_ok=True)
    if kept.is_dir() and not any(kept.iterdir()):
        kept.rmdir()


class IdsWriter:
    """Writes the ids of one data file, whole or not at all; a context.

    Where they cannot be written, one warning says why, there is no file, and the rest is ignored.
    """

    def __init__(self, path: Path, identity: tuple[int, str, str, str]) -> None:
        """Begin a file beside `path`."""
        self._path, self._identity = path, identity
        self._unfinished = path.with_name(path.name + ".tmp")
        self._file: BufferedRandom | None = None
        self._dtype: np.dtype[Any] = NARROW
        self._ids_of_page: list[Int64Array] = []
        with self._given_up_if_it_fails():
            path.parent.mkdir(exist_ok=True)
            self._file = self._unfinished.open("w+b")

    def __enter__(self) -> IdsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()  # unless it was finished

    def add(self, values: NDArray[np.integer[Any]], ids_of_page: Int64Array) -> None:
        """Add the ids of some pages, in the order of rows; `ids_of_page` says how many each has."""
        if self._file is None:
            return
        with self._given_up_if_it_fails():
            if self._dtype == NARROW and len(values) and int(values.max()) >= 1 << 16:
                self._file = self._widened(self._file)
            self._file.write(np.ascontiguousarray(values, self._dtype).data)
            self._ids_of_page.append(np.asarray(ids_of_page, np.int64))

    def finish(self) -> None:
        """Put what the ids are behind them, and give the file its name."""
        if self._file is None:
            return
        counts = np.concatenate([np.zeros(0, np.int64), *self._ids_of_page])
        with self._given_up_if_it_fails():
            self._file.flush()
            about = _IdsOf(
                version=VERSION,
                identity=self._identity,
                dtype=self._dtype.str,
                ids_of_page=counts.astype("<i8").tobytes(),
                crc_of_page=_checksums(self._file, counts * self._dtype.itemsize).astype("<u4").tobytes(),
            )
            end = msgspec.msgpack.encode(about)
            self._file.seek(0, 2)
            self._file.write(with_end(end))
            self._file.close()
            self._unfinished.replace(self._path)
            self._file = None

    @contextmanager
    def _given_up_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._drop()
            logger.warning(
                "ids cannot be kept in %s (%s); the index continues, and training tokenizes these rows. Make room, "
                "then run torchmix index --keep-tokens",
                self._path,
                error.strerror or error,
            )

    def _drop(self) -> None:
        """End an unfinished file."""
        if self._file is not None:
            with suppress(OSError):  # of what is still in its buffer
                self._file.close()
            self._file = None
            self._unfinished.unlink(missing_ok=True)

    def _widened(self, narrow: BufferedRandom) -> BufferedRandom:
        """The file with all ids so far in 4 bytes each."""
        narrow.flush()
        narrow.seek(0)
        path = self._unfinished.with_name(self._unfinished.name.removesuffix(".tmp") + ".wide.tmp")
        wide = path.open("w+b")
        try:
            while block := narrow.read(1 << 22):
                wide.write(np.frombuffer(block, NARROW).astype(WIDE).data)
            wide.flush()
            path.replace(self._unfinished)
        except BaseException:
            with suppress(OSError):
                wide.close()
            path.unlink(missing_ok=True)
            raise
        narrow.close()
        self._dtype = WIDE
        return wide


def _checksums(file: BufferedRandom, bytes_of_page: Int64Array) -> NDArray[np.uint32]:
    stops = np.cumsum(bytes_of_page)
    if not len(stops) or not stops[-1]:
        return np.zeros(len(stops), np.uint32)
    with mmap.mmap(file.fileno(), int(stops[-1]), prot=mmap.PROT_READ) as content:
        view = memoryview(content)
        found = [zlib.crc32(view[start:stop]) for start, stop in pairwise([0, *stops.tolist()])]
        view.release()
    return np.array(found, np.uint32)


# --- Files of kept ids as the seam of formats wants them.
#
# It is never indexed: its pages are those of the data file that the ids were made of; lengths are the catalog's.

FORMAT = "kept ids"
"""The format of a catalog over kept ids; no recipe has it."""


class KeptIdsSource(msgspec.Struct, frozen=True, kw_only=True):
    """Ids that were kept of a source; implements `source.PageSource`."""

    name: str

    @property
    def format(self) -> str:
        """See `PageSource.format`."""
        return FORMAT

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `PageSource.row_encoder`."""
        return None

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `PageSource.fingerprint`."""
        try:
            return file.num_bytes, digest_of_end(read_end(file.read, file.num_bytes))
        except ValueError as error:
            raise SourceUnreadable(
                f"source {self.name!r}: ids kept in {path} are damaged ({error}); delete the file, or run torchmix "
                "index --keep-tokens"
            ) from None

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `source.PageSource.decode`; the lengths are the catalog's."""
        return list(map(self._documents, runs))

    def _documents(self, run: PageRun) -> Documents:
        assert run.tokens is not None, "kept ids are read with the catalog's lengths"
        offsets = offsets_of(run.tokens)
        values = np.frombuffer(run.pages, np.dtype(run.schema.decode()))
        if len(values) != offsets[-1]:
            raise CorruptPage(
                f"it has {len(values)} ids for rows [{run.first_row}, {run.first_row} + {run.num_rows}), the catalog "
                f"has {offsets[-1]}; delete the file, or run torchmix index --keep-tokens",
                where_of(self.name, run.path),
                offset=run.offset,
            )
        return Documents(values=values, offsets=offsets)


# --- A source of texts -> the same source over the ids that were kept of it.
#
# A row has the ids that encoding it would give, by the identity of the data file and the transform. Cost: the end of
# each file of ids, and some 30 bytes a page.


def identity_of(num_bytes: int, footer_hash: str, column: str | None, transform_id: str) -> tuple[int, str, str, str]:
    """What a file of ids belongs to; see `ids_file.kept_path`."""
    return num_bytes, footer_hash, column or "", transform_id


def in_place_of(source: SourceCatalog, folder: Path) -> tuple[SourceCatalog, KeptIdsSource] | None:
    """The source over its kept ids, and how they are read.

    Args:
        source: A source whose rows are encoded.
        folder: The catalog's.
    """
    found: list[KeptFile | None] = []
    for entry in source.files:
        if not entry.num_pages:
            found.append(None)
            continue
        identity = identity_of(entry.num_bytes, entry.footer_hash, source.column, source.transform_id)
        kept = read_kept(kept_path(folder, source.name, identity), identity)
        if kept is None or len(kept.ids_of_page) != entry.num_pages:
            return None
        found.append(kept)
    dtypes = list(dict.fromkeys(kept.dtype for kept in found if kept is not None))
    tables = [_table(source.pages.of_file(number), kept) for number, kept in enumerate(found)]
    files = [
        entry if kept is None else _entry(entry, kept, dtypes) for entry, kept in zip(source.files, found, strict=True)
    ]
    logger.info("source %r: ids kept by the index are read in the place of its texts", source.name)
    over_ids = replace(
        source,
        format=FORMAT,
        files=tuple(files),
        schemas=tuple(dtype.encode() for dtype in dtypes),
        pages=join_tables(tables),
    )
    return over_ids, KeptIdsSource(name=source.name)


def _entry(entry: FileEntry, kept: KeptFile, dtypes: list[str]) -> FileEntry:
    return msgspec.structs.replace(
        entry,
        path=str(kept.path.absolute()),
        num_bytes=kept.num_bytes,
        footer_hash=kept.digest,
        schema=dtypes.index(kept.dtype),
        num_bad_rows=0,
        bad_rows=(),
        status=(),
    )


def _table(pages: PageTable, kept: KeptFile | None) -> PageTable:
    """The pages of one file, at their places among its ids."""
    if kept is None:
        return pages
    page_bytes = kept.ids_of_page * np.dtype(kept.dtype).itemsize
    first_row = np.asarray(pages.first_row)
    columns = PageColumns(
        chunk_of_page=np.zeros(len(page_bytes), np.int32),
        page_offset=np.cumsum(page_bytes) - page_bytes,
        page_bytes=page_bytes,
        page_rows=np.diff(first_row),
        page_crc=kept.crc_of_page,
        kind=np.zeros(1, np.int8),
    )
    return table_of_file(columns)
