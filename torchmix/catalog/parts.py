"""The part of the catalog from one data file: the result of a scan, kept until the whole catalog is published.

A part on disk belongs to exactly one file, column and transform, and is whole or missing; a damaged one counts as
missing. Cost: 4 bytes a document and 61 a page, at most.
"""

from __future__ import annotations

import hashlib
import logging
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.array_files import ArrayEntry, arrays_in, write_arrays
from torchmix.catalog.manifest import BadRow, IdRange, ListBytes
from torchmix.catalog.page_table import ARRAY_NAMES, PageTable
from torchmix.catalog.sizes import Column, ItemTable, from_named_arrays, named_arrays
from torchmix.errors import CatalogError

logger = logging.getLogger(__name__)

PARTS_FOLDER = "parts"
PART_VERSION = 1
PART_FILE = re.compile(r"(?P<source>.+)\.[0-9a-f]{16}\.part(?P<unfinished>\.tmp)?")
_END = struct.Struct("<II")
"""End of a part: its content besides arrays, in msgpack, then the CRC-32 and the number of these bytes."""


class FilePart(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One file of a source; rows, chunks and files of its table count from 0."""

    num_bytes: int
    """Size of the file."""
    footer_hash: str
    """With the size, the file's identity."""
    split_pages: int
    """Number of the writer's pages that begin inside a row."""
    whole_chunks: bool
    """Whether some page is a whole large chunk."""
    schema: bytes
    """What decoding needs to know besides the pages."""
    pages: PageTable
    """Where its pages lie."""
    tokens: NDArray[np.int32]
    """[rows] tokens of each document."""
    ids: IdRange | None
    """Smallest and largest token id, where the scan reads ids."""
    num_bad_rows: int = 0
    """Number of rows that could not be read and have no tokens."""
    bad_rows: tuple[BadRow, ...] = ()
    """The first of these rows."""
    lists: ListBytes | None = None
    """What a map gives beside ids; None where there is nothing."""
    sizes: Mapping[str, Column] = msgspec.field(default_factory=dict)
    """[rows] other sizes of each document, by name."""
    items: Mapping[str, ItemTable] = msgspec.field(default_factory=dict)
    """Items inside the documents, by kind."""
    marks: Mapping[str, ItemTable] = msgspec.field(default_factory=dict)
    """What is known of tokens beside items, by name."""

    def check(self) -> None:
        """Check the arrays against each other.

        Raises:
            CatalogError: Arrays contradict each other; names which.
        """
        self.pages.check()
        if self.tokens.dtype != np.int32 or len(self.tokens) != self.pages.num_rows:
            raise CatalogError(
                f"{len(self.tokens)} lengths of {self.tokens.dtype} for {self.pages.num_rows} rows, not one int32 each"
            )
        if len(self.tokens) and self.tokens.min() < 0:
            raise CatalogError(f"row {int(self.tokens.argmin())} has {self.tokens.min()} tokens")
        for name, column in self.sizes.items():
            if len(column) != self.pages.num_rows:
                raise CatalogError(f"{len(column)} sizes {name} for {self.pages.num_rows} rows")
        for table in (*self.items.values(), *self.marks.values()):
            table.check(self.pages.num_rows)


class _About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a part holds besides arrays."""

    arrays: dict[str, ArrayEntry]
    num_bytes: int
    footer_hash: str
    split_pages: int
    whole_chunks: bool
    schema: bytes
    ids: IdRange | None
    num_bad_rows: int = 0
    bad_rows: tuple[BadRow, ...] = ()
    lists: ListBytes | None = None


def part_path(directory: Path, source: str, identity: tuple[str, int, str], reading: tuple[str, str, bool]) -> Path:
    """Where the part of one file lies in a catalog's folder.

    Args:
        directory: The catalog's folder.
        source: The source's name.
        identity: Path, size and footer hash of the file.
        reading: Column, transform_id, and whether bad rows are masked; the lengths follow from them.
    """
    key = msgspec.json.encode([PART_VERSION, *identity, *reading])
    return Path(f"{directory}/{PARTS_FOLDER}/{source}.{hashlib.sha256(key).hexdigest()[:16]}.part")


def save_part(path: Path, part: FilePart) -> None:
    """Write a part, whole or not at all if the process is killed; after a power failure it may be damaged.

    Raises:
        OSError: The folder is not writable or the disk is full; nothing stays.
    """
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    try:
        arrays = {name: [array] for name, array in part.pages.arrays()}
        more = {name: [array] for name, array in named_arrays(part.sizes, part.items, part.marks).items()}
        entries = write_arrays(unfinished, {**arrays, "tokens": [part.tokens], **more})
        about = _About(
            arrays=entries,
            num_bytes=part.num_bytes,
            footer_hash=part.footer_hash,
            split_pages=part.split_pages,
            whole_chunks=part.whole_chunks,
            schema=part.schema,
            ids=part.ids,
            num_bad_rows=part.num_bad_rows,
            bad_rows=part.bad_rows,
            lists=part.lists,
        )
        content = msgspec.msgpack.encode(about)
        with unfinished.open("ab") as file:
            file.write(content + _END.pack(zlib.crc32(content), len(content)))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def num_parts(directory: Path) -> int:
    """Number of parts in a catalog's folder: files that the next run need not scan again."""
    return sum(1 for _ in (directory / PARTS_FOLDER).glob("*.part"))


def load_part(path: Path) -> FilePart | None:
    """Read a part; None if there is none or it is damaged, which is logged."""
    try:
        content = memoryview(path.read_bytes())
        about = _about_in(content)
        for name, entry in about.arrays.items():
            if zlib.crc32(content[entry.offset : entry.offset + entry.num_bytes]) != entry.crc32:
                raise ValueError(f"{name} has another checksum")
        arrays = arrays_in(np.frombuffer(content, np.uint8), about.arrays, path)
        found = from_named_arrays(arrays)
        part = FilePart(
            num_bytes=about.num_bytes,
            footer_hash=about.footer_hash,
            split_pages=about.split_pages,
            whole_chunks=about.whole_chunks,
            schema=about.schema,
            pages=PageTable(**{name: arrays[name] for name in ARRAY_NAMES}),
            tokens=arrays["tokens"],
            ids=about.ids,
            num_bad_rows=about.num_bad_rows,
            bad_rows=about.bad_rows,
            lists=about.lists,
            sizes=found.sizes,
            items=found.items,
            marks=found.marks,
        )
        part.check()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, CatalogError, msgspec.DecodeError) as error:
        logger.warning("the part %s of an earlier run is damaged (%s); its file is scanned again", path, error)
        return None
    return part


_decode_about = msgspec.msgpack.Decoder(_About).decode


def _about_in(content: memoryview) -> _About:
    """The content at the end of a part."""
    if len(content) < _END.size:
        raise ValueError(f"it has {len(content)} bytes")
    checksum, num_bytes = _END.unpack(content[-_END.size :])
    encoded = content[max(0, len(content) - _END.size - num_bytes) : -_END.size]
    if zlib.crc32(encoded) != checksum:
        raise ValueError("its end has another checksum")
    return _decode_about(encoded)


def remove_parts(directory: Path, sources: frozenset[str] | None) -> None:
    """Remove the parts of some sources; None: only unfinished files of a killed run."""
    folder = directory / PARTS_FOLDER
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = PART_FILE.fullmatch(path.name)
        if match and (match["unfinished"] or (sources is not None and match["source"] in sources)):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
