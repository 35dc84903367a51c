"""The processes of this machine, from Linux' /proc, and the descriptors of this one.

Out: each process that has not ended, with its parent and session; the command line of one. Tests ask thousands of times
while a hundred processes run, so a process costs one small read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STAT_BYTES = 1 << 10
COMMAND_BYTES = 1 << 17


class Running(NamedTuple):
    """A process that has not ended."""

    pid: int
    parent: int
    session: int


def running() -> Iterator[Running]:
    """All processes, by ascending id; those without the ones that have ended and wait for their parents."""
    with os.scandir("/proc") as entries:
        pids = sorted(int(entry.name) for entry in entries if entry.name.isdigit())
    for pid in pids:
        # The second field is the name in parentheses, which may hold spaces.
        fields = _read(f"/proc/{pid}/stat", STAT_BYTES).rpartition(b") ")[2].split()
        if fields and fields[0] != b"Z":
            yield Running(pid, parent=int(fields[1]), session=int(fields[3]))


def command_of(pid: int) -> str:
    """The words of a command line, with spaces between them; empty if the process has ended."""
    return _read(f"/proc/{pid}/cmdline", COMMAND_BYTES).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def open_descriptors() -> set[tuple[int, int, int]]:
    """Number, device and inode of each open descriptor of this process.

    What tests before this one have left to the garbage collector may be closed at any time, so a test compares what is
    there beside what was there before, and no counts.
    """
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            stat = os.fstat(int(path.name))
            found.add((int(path.name), stat.st_dev, stat.st_ino))
    return found


def _read(path: str, num_bytes: int) -> bytes:
    """The beginning of a file of /proc; empty if the process has ended."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    return b""
