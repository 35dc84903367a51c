"""What goes wrong with reads and disks in processes that a test starts: errors of a disk, slow reads, a full disk.

In: `ReadFaults`, which all interpreters that are started meanwhile find in their environment. Out: a line in a file for
each fault that was met. Faults follow from the seed and the number of reads of a process.

    eio       share of reads that fail with EIO, one to three times each, and then succeed
    slow      share of reads that take SLOW_S longer
    lasting   the read from which on every one fails, in the first process alone; -1: none
    full      files for ids of open documents, which lie in no memory, meet a full disk
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

VARIABLE = "READ_FAULTS"
SLOW_S = 0.5
MOST_TRIES = 3
"""How often a read fails at most before it succeeds; it is tried four times."""
SPARED_READS = 4
"""After a read that has failed: what is tried again may be more than one read, as of a footer and a page."""
HOOK = "from tests.support.read_faults import install\n\ninstall()\n"


@dataclass(frozen=True, kw_only=True)
class ReadFaults:
    """What goes wrong, and where that is noted."""

    folder: str
    """New."""
    seed: str
    eio: float = 0.0
    slow: float = 0.0
    lasting: int = -1
    full: bool = False

    @contextmanager
    def in_children(self) -> Iterator[None]:
        """In all interpreters that are started meanwhile."""
        folder = Path(self.folder)
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HOOK)
        variables = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), VARIABLE: json.dumps(asdict(self))}
        with mock.patch.dict(os.environ, variables):
            yield

    def met(self) -> dict[str, int]:
        """How many of each kind were met."""
        path = Path(self.folder) / "met"
        names = path.read_text().split() if path.exists() else []
        return {name: names.count(name) for name in sorted(set(names))}


class _Disk:
    """The faults of a process."""

    def __init__(self, faults: ReadFaults) -> None:
        self._faults = faults
        self._draw = random.Random(faults.seed)
        self._lock = threading.Lock()
        self._num_reads = 0
        self._to_fail: dict[int, int] = {}
        """By thread, how often its reads still fail; below 0, how many are spared after that."""
        self._lasts = faults.lasting >= 0 and not (Path(faults.folder) / "lasting").exists()

    def before_read(self) -> None:
        """Raise, or wait, or neither."""
        thread = threading.get_ident()
        with self._lock:
            self._num_reads += 1
            if self._lasts and self._num_reads > self._faults.lasting:
                (Path(self._faults.folder) / "lasting").touch()
                self._fail("lasting")
            left = self._to_fail.get(thread, -SPARED_READS)
            if left > -SPARED_READS:
                self._to_fail[thread] = left - 1
                if left > 0:
                    self._fail("")
                return
            found = self._draw.random()
            if found < self._faults.eio:
                self._to_fail[thread] = self._draw.randrange(MOST_TRIES)
                self._fail("eio")
        if self._faults.eio <= found < self._faults.eio + self._faults.slow:
            self._note("slow")
            time.sleep(SLOW_S)

    def full_file(self, **_: Any) -> Any:
        """A file on a disk without room, in the place of `tempfile.TemporaryFile`."""
        self._note("full")
        return Path("/dev/full").open("w+b")

    def _fail(self, name: str) -> None:
        self._note(name)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _note(self, name: str) -> None:
        if name:
            with (Path(self._faults.folder) / "met").open("a") as file:
                file.write(f"{name}\n")


def install() -> None:
    """In a new interpreter that has the variable: let go wrong what it says."""
    import tempfile

    from torchmix.reader import open_documents
    from torchmix.storage.random_access import LocalFile

    faults = ReadFaults(**json.loads(os.environ[VARIABLE]))
    disk, read = _Disk(faults), LocalFile.read

    def faulty_read(self: LocalFile, offset: int, num_bytes: int) -> bytes:
        disk.before_read()
        return read(self, offset, num_bytes)

    LocalFile.read = faulty_read  # type: ignore[method-assign]
    if faults.full:
        open_documents.MEMORY_BYTES = 0
        tempfile.TemporaryFile = disk.full_file  # type: ignore[assignment]
