"""Folders that many tests begin with: made once by each process, and copied."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made_once(fill: Callable[..., None]) -> Callable[..., Path]:
    """A function that gives the folder that `fill(folder, *choices)` filled when it was first called with these.

    Who changes something copies the folder before.
    """

    @functools.cache
    def folder(*choices: Any) -> Path:
        path = Path(tempfile.mkdtemp(prefix="torchmix-tests-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        fill(path, *choices)
        return path

    return folder
