"""The native library for tests: built once for a run of tests where the tree has none; on and off within a process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from torchmix.native import load
from torchmix.native.build import FOLDER, LIBRARY, CannotBuild, build, is_of_these_sources


@cache
def built_library() -> load.NativeLibrary:
    """That of the tree, or one in a temporary folder; a test without a compiler is skipped, unless it is required."""
    path = FOLDER / LIBRARY
    if is_of_these_sources(path):
        return load.load(path)
    with tempfile.TemporaryDirectory() as folder:  # a library that is loaded needs its file no more
        try:
            build(Path(folder) / LIBRARY)
        except CannotBuild as error:
            if os.environ.get(load.VARIABLE) == "1":
                raise
            pytest.skip(str(error))
        return load.load(Path(folder) / LIBRARY)


def use_native(is_native: bool) -> None:
    """Use the library from here on in this process, or leave it alone."""
    load._found = built_library() if is_native else load.NativeLibrary(why_not="this test goes without")
    assert is_native == (load._found.library is not None), load._found.why_not


@contextmanager
def native_or_not(is_native: bool) -> Iterator[None]:
    """With the library, or with the reference alone, in all threads of this process."""
    before = load._found
    use_native(is_native)
    try:
        yield
    finally:
        load._found = before
