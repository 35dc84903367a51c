"""A bound on the memory that a process which a rank has started may allocate.

In: the process, and bytes. Out: an allocation beyond them fails there, as a MemoryError that names what asked for it,
where the kernel would end some process of the machine. Must hold: what the process has when it begins to work, its
imports, is not counted; memory that it shares, as that of steps, and files that it maps are not either. Cost: a call.
"""

from __future__ import annotations

import re
from pathlib import Path

ENVIRONMENT = {"MIMALLOC_ARENA_EAGER_COMMIT": "0"}
"""Arrow's allocator takes address space by the gigabyte; with this, what it does not use yet does not count."""


def limit_memory(pid: int, num_bytes: int) -> bool:
    """Let a process of this user, started with `ENVIRONMENT`, allocate so many more bytes; whether that could be done.

    Elsewhere than on Linux it cannot.
    """
    try:
        import resource

        status = Path(f"/proc/{pid}/status").read_text()
        held = re.search(r"^VmData:\s+(\d+) kB$", status, re.MULTILINE)
        if held is None:
            return False
        limit = (int(held[1]) << 10) + num_bytes
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
    except (ImportError, AttributeError, OSError, ValueError):
        return False
    return True
