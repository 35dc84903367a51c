"""The trial of encoded files against transformers' processors, at a small count."""

from __future__ import annotations

import importlib.util

import pytest

from tests.trials.drawn_files import KINDS, try_batch
from tests.trials.image_processors import NOT_INSTALLED


@pytest.mark.parametrize("kind", ["image", "sound", "video"])
def test_files_become_what_transformers_makes_of_them(kind: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip(NOT_INSTALLED)
    for package in {"image": ("PIL",), "sound": ("soundfile", "soxr"), "video": ("av",)}[kind]:
        pytest.importorskip(package)
    found = try_batch(2, KINDS.index(kind), files=12)
    assert found["kind"] == kind and found["values"] > 10_000
    assert found["different"] == 0, found["what"]
