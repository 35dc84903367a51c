"""The folder that loaders of a node listen in is nobody's leftover before they listen."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torchmix.boards.socket_folders import left_folders
from torchmix.service.job.open_job import NEAR_PREFIX


def test_a_run_that_starts_meanwhile_leaves_the_folder(tmp_path: Path) -> None:
    near = Path(tempfile.mkdtemp(prefix=NEAR_PREFIX, dir=tmp_path))
    assert left_folders(tmp_path) == [] and near.exists()
