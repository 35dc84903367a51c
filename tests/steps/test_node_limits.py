"""What the kernel lets a job use, from files as it writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmix.steps.memory_budget import memory_bytes, processors

OURS = Path("/proc/self/cgroup").read_text() if Path("/proc/self/cgroup").exists() else ""


def group_of(folder: Path) -> Path:
    """Where this process' control group would lie, below a folder."""
    path = next((line.split(":", 2)[2] for line in OURS.splitlines() if line.startswith("0:")), "/")
    own = folder / path.lstrip("/")
    own.mkdir(parents=True, exist_ok=True)
    return own


def test_without_limits_all_is_there(tmp_path: Path) -> None:
    assert processors(tmp_path) == len(os.sched_getaffinity(0))
    assert memory_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("quota", "expected"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_a_quota_of_processors_is_rounded_up(tmp_path: Path, quota: str, expected: int | None) -> None:
    (group_of(tmp_path) / "cpu.max").write_text(f"{quota}\n")
    assert processors(tmp_path) == (expected or len(os.sched_getaffinity(0)))


def test_the_smallest_limit_around_a_process_counts(tmp_path: Path) -> None:
    own = group_of(tmp_path)
    (own / "memory.max").write_text("max\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert memory_bytes(tmp_path) == 2**30


def test_the_first_version_of_control_groups_has_limits_too(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("4096000\n")
    assert processors(tmp_path) == 1
    assert memory_bytes(tmp_path) == 4096000
