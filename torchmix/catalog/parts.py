"""One data file's share of the catalog: what stays of a scan until the whole catalog is published.

In: a scanned file, or one that the published catalog holds already. Out: `FilePart`, and the same from disk after a run
that was killed, so that no file is scanned twice. Must hold: a part on disk is for exactly one file, column and
transform, whole or not there; a damaged one counts as not there. Cost: 4 bytes a document and 61 a page, at most.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.page_table import ARRAY_NAMES, PageTable
from torchmix.errors import CatalogError

logger = logging.getLogger(__name__)

PARTS_FOLDER = "parts"
PART_VERSION = 2
PART_FILE = re.compile(r"(?P<source>.+)\.[0-9a-f]{16}\.npz(?P<unfinished>\.tmp)?")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FilePart:
    """One file of a source; rows, chunks and files of its table count from 0."""

    num_bytes: int
    """Size of the file."""
    footer_hash: str
    """With the size, the file's identity."""
    split_pages: int
    """Pages of the writer that begin inside a row."""
    whole_chunks: bool
    """Some page is all of a large chunk."""
    schema: bytes
    """What decoding must know beside the pages."""
    pages: PageTable
    """Where its pages lie."""
    tokens: NDArray[np.int32]
    """[rows] tokens of each document."""

    def check(self) -> None:
        """Check the arrays against each other.

        Raises:
            CatalogError: Naming what is broken.
        """
        self.pages.check()
        if self.tokens.dtype != np.int32 or len(self.tokens) != self.pages.num_rows:
            raise CatalogError(
                f"{len(self.tokens)} lengths of {self.tokens.dtype} for {self.pages.num_rows} rows, not one int32 each"
            )
        if len(self.tokens) and self.tokens.min() < 0:
            raise CatalogError(f"row {int(self.tokens.argmin())} has {self.tokens.min()} tokens")


class _About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a part holds beside arrays."""

    num_bytes: int
    footer_hash: str
    split_pages: int
    whole_chunks: bool
    schema: bytes


def part_path(directory: Path, source: str, identity: tuple[str, int, str], reading: tuple[str, str]) -> Path:
    """Where the part of one file lies in a catalog's folder.

    Args:
        directory: The catalog's folder.
        source: The source's name.
        identity: Path, size and footer hash of the file.
        reading: Column and transform_id, from which the lengths follow.
    """
    key = msgspec.json.encode([PART_VERSION, *identity, *reading])
    return directory / PARTS_FOLDER / f"{source}.{hashlib.sha256(key).hexdigest()[:16]}.npz"


def save_part(path: Path, part: FilePart) -> None:
    """Write a part, whole or not at all if the process is killed; after a power failure it may be damaged.

    Raises:
        OSError: The folder is not writable or the disk is full; nothing stays.
    """
    path.parent.mkdir(exist_ok=True)
    about = _About(
        num_bytes=part.num_bytes,
        footer_hash=part.footer_hash,
        split_pages=part.split_pages,
        whole_chunks=part.whole_chunks,
        schema=part.schema,
    )
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            content = np.frombuffer(msgspec.msgpack.encode(about), np.uint8)
            np.savez(file, about=content, tokens=part.tokens, **dict(part.pages.arrays()))  # type: ignore[arg-type]
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


_one_at_a_time = threading.Lock()
"""numpy evaluates an array's header as Python, which two threads of Python 3.11 may not do at once."""


def load_part(path: Path) -> FilePart | None:
    """Read a part; None if there is none or it is damaged, which is logged."""
    try:
        with _one_at_a_time, path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            about = msgspec.msgpack.decode(content["about"].tobytes(), type=_About)
            table = PageTable(**{name: content[name] for name in ARRAY_NAMES})
            part = FilePart(
                num_bytes=about.num_bytes,
                footer_hash=about.footer_hash,
                split_pages=about.split_pages,
                whole_chunks=about.whole_chunks,
                schema=about.schema,
                pages=table,
                tokens=content["tokens"],
            )
        part.check()
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, KeyError, CatalogError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("the part %s of an earlier run is damaged (%s); its file is scanned again", path, error)
        return None
    return part


def remove_parts(directory: Path, sources: frozenset[str] | None) -> None:
    """Remove the parts of some sources; with None only what a killed run left unfinished."""
    folder = directory / PARTS_FOLDER
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = PART_FILE.fullmatch(path.name)
        if match and (match["unfinished"] or (sources is not None and match["source"] in sources)):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
