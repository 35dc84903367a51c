"""One writer of a catalog at a time, over processes and, where the file system supports it, over nodes.

In: the catalog's folder. Out: a context in which no other process writes it. Must hold: the lock ends with the process,
however it ends, so a killed job leaves nothing to clean. Readers take no lock: they see the last catalog that was
published. Cost: one system call where nobody else holds it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchmix.errors import CatalogError

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"


@contextmanager
def catalog_lock(directory: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Hold the catalog's lock; waits, with one log message, while another process or thread holds it.

    Args:
        directory: The catalog's folder; it is made, with its parents, if it is missing.
        is_shared: Others may hold the lock, too, who share it: they write files that only they know, and publish none.

    Raises:
        CatalogError: The folder cannot be made or written, or its file system has no locks.
    """
    path = directory / LOCK_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CatalogError(
            f"cannot write the catalog folder {directory}: {error.strerror}; name a writable one in the recipe's "
            "catalog key"
        ) from error
    try:
        _take(descriptor, path, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        # Names the holder to waiting processes. It outlives the holder, so nothing relies on it.
        with suppress(OSError):  # a full disk is named by what needs more of it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)  # also releases the lock


def _take(descriptor: int, path: Path, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise CatalogError(
                f"cannot lock {path}: {error.strerror}; put the catalog on a file system with flock"
            ) from error
    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
    logger.warning("waiting for %s, which is writing the catalog %s", holder, path.parent)
    fcntl.flock(descriptor, kind)
