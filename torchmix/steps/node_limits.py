"""What the kernel lets this job use of a machine: processors and memory.

In: the process' affinity, and the limits of its control group. Out: numbers. Must hold: a limit that cannot be read is
no limit. Cost: some small files of /proc and /sys.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def processors(groups: Path = GROUPS) -> int:
    """Processors that this process may use, at least 1: of its affinity, and of its control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _folders(groups):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            count = min(count, max(1, math.ceil(int(quota) / int(period))))  # "max" is no number
    with suppress(OSError, ValueError, ZeroDivisionError):  # the first version of control groups
        quota_us = int((groups / "cpu" / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            period_us = int((groups / "cpu" / "cpu.cfs_period_us").read_text())
            count = min(count, max(1, math.ceil(quota_us / period_us)))
    return count


def memory_bytes(groups: Path = GROUPS) -> int:
    """Bytes of memory that this job may use: of the machine, and of its control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _folders(groups):
        with suppress(OSError, ValueError):
            limits.append(int((folder / "memory.max").read_text()))
    with suppress(OSError, ValueError):
        limits.append(int((groups / "memory" / "memory.limit_in_bytes").read_text()))
    return min(limits)


def _folders(groups: Path) -> list[Path]:
    """The control group of this process, and those around it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                own = groups / path.lstrip("/")
                return [own, *(parent for parent in own.parents if parent.is_relative_to(groups))]
    return [groups]
