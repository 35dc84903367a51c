"""The index of one data file: the result of its scan, kept until the whole catalog is published.

An index on disk belongs to exactly one file, column and transform, and is whole or missing; a damaged one counts as
missing. Cost: 4 bytes a document and 61 a page, at most.
"""

from __future__ import annotations

import hashlib
import logging
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.array_files import ArrayEntry, arrays_in, put_whole, read_end, with_end, write_arrays
from torchmix.catalog.manifest import FileFacts, facts_of
from torchmix.catalog.page_table import ARRAY_NAMES, PageTable
from torchmix.catalog.sizes import Column, TokenRuns, from_named_arrays, named_arrays
from torchmix.errors import CatalogError

logger = logging.getLogger(__name__)

INDEX_FOLDER = "files"
INDEX_VERSION = 1
INDEX_FILE = re.compile(r"(?P<source>.+)\.[0-9a-f]{16}\.index(?P<unfinished>\.tmp)?")


class FileIndex(FileFacts, frozen=True, kw_only=True, eq=False):
    """One file of a source; rows, chunks and files of its table count from 0."""

    schema: bytes
    """What decoding needs to know besides the pages."""
    pages: PageTable
    """Where its pages lie."""
    tokens: NDArray[np.int32]
    """[rows] tokens of each document."""
    sizes: Mapping[str, Column] = msgspec.field(default_factory=dict)
    """[rows] other sizes of each document, by name."""
    items: Mapping[str, TokenRuns] = msgspec.field(default_factory=dict)
    """Items inside the documents, by kind."""
    marks: Mapping[str, TokenRuns] = msgspec.field(default_factory=dict)
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


class _About(FileFacts, frozen=True, kw_only=True):
    """What an index holds besides arrays."""

    arrays: dict[str, ArrayEntry]
    schema: bytes


def file_index_path(
    directory: Path, source: str, identity: tuple[str, int, str], reading: tuple[str, str, bool]
) -> Path:
    """Where the index of one file lies in a catalog's folder.

    Args:
        directory: The catalog's folder.
        source: The source's name.
        identity: Path, size and footer hash of the file.
        reading: Column, transform_id, and whether bad rows are masked; the lengths follow from them.
    """
    key = msgspec.json.encode([INDEX_VERSION, *identity, *reading])
    return Path(f"{directory}/{INDEX_FOLDER}/{source}.{hashlib.sha256(key).hexdigest()[:16]}.index")


def save_file_index(path: Path, index: FileIndex) -> None:
    """Write an index, whole or not at all if the process is killed; after a power failure it may be damaged.

    Raises:
        OSError: The folder is not writable or the disk is full; nothing stays.
    """
    path.parent.mkdir(exist_ok=True)
    with put_whole(path, path.name + ".tmp") as unfinished:
        arrays = {name: [array] for name, array in index.pages.arrays()}
        more = {name: [array] for name, array in named_arrays(index.sizes, index.items, index.marks).items()}
        entries = write_arrays(unfinished, {**arrays, "tokens": [index.tokens], **more})
        content = msgspec.msgpack.encode(_About(arrays=entries, schema=index.schema, **facts_of(index)))
        with unfinished.open("ab") as file:
            file.write(with_end(content))


def num_file_indexes(directory: Path) -> int:
    """Number of indexes in a catalog's folder: files that the next run need not scan again."""
    return sum(1 for _ in (directory / INDEX_FOLDER).glob("*.index"))


_decode_about = msgspec.msgpack.Decoder(_About).decode


def load_file_index(path: Path) -> FileIndex | None:
    """Read an index; None if there is none or it is damaged, which is logged."""
    try:
        content = memoryview(path.read_bytes())
        end = read_end(lambda offset, num_bytes: content[offset : offset + num_bytes], len(content))
        about = _decode_about(end)
        for name, entry in about.arrays.items():
            if zlib.crc32(content[entry.offset : entry.offset + entry.num_bytes]) != entry.crc32:
                raise ValueError(f"{name} has another checksum")
        arrays = arrays_in(np.frombuffer(content, np.uint8), about.arrays, path)
        found = from_named_arrays(arrays)
        index = FileIndex(
            **facts_of(about),
            schema=about.schema,
            pages=PageTable(**{name: arrays[name] for name in ARRAY_NAMES}),
            tokens=arrays["tokens"],
            sizes=found.sizes,
            items=found.items,
            marks=found.marks,
        )
        index.check()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, CatalogError, msgspec.DecodeError) as error:
        logger.warning("the index %s of an earlier run is damaged (%s); its file is scanned again", path, error)
        return None
    return index


def remove_file_indexes(directory: Path, sources: frozenset[str] | None) -> None:
    """Remove the indexes of some sources; None: only unfinished files of a killed run."""
    folder = directory / INDEX_FOLDER
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = INDEX_FILE.fullmatch(path.name)
        if match and (match["unfinished"] or (sources is not None and match["source"] in sources)):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
