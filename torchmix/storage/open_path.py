"""A path or URI -> an open file.

In: where a file lies. Out: a `RandomAccessFile` to scan it by: a local file as it is, one of a store with large reads
ahead. Must hold: whatever keeps it from being opened or read is `SourceUnreadable`, and every error about what it holds
names source and place. Cost: one system call, or one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchmix.errors import SourceUnreadable, located
from torchmix.storage.random_access import LocalFile, RandomAccessFile
from torchmix.storage.read_ahead import ReadAhead
from torchmix.storage.store_file import StoreFile
from torchmix.storage.stores import is_uri


@contextmanager
def opened(path: str | Path, where: str) -> Iterator[RandomAccessFile]:
    """A file while it is scanned; `where` (source and place) is added to errors of the block.

    Raises:
        SourceUnreadable: It cannot be opened, or a read within the `with` block failed.
    """
    file: RandomAccessFile
    if isinstance(path, str) and is_uri(path):
        file = ReadAhead(StoreFile(path, where))
    else:
        try:
            file = LocalFile(path)
        except OSError as error:
            raise SourceUnreadable(
                f"cannot be opened: {error.strerror}; make it readable, or name another file", where
            ) from None
    try:
        with located(where):
            yield file
    except OSError as error:
        raise SourceUnreadable(f"cannot be read: {error.strerror or error}", where) from None
    finally:
        file.close()
