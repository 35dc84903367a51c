"""The trial of images of every kind, at a small count: each kind, rule and layout once, read in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.image_matrix import KINDS, LAYOUTS, Matrix

RULES_HERE = ("anyres", "own", "tiles", "dynamic")


@pytest.mark.parametrize(("kind", "rule", "layout"), [*zip(KINDS, RULES_HERE, LAYOUTS, strict=True)])
def test_every_tensor_is_what_pillow_makes(kind: str, rule: str, layout: str, tmp_path: Path) -> None:
    assert Matrix(tmp_path).check((kind, rule, layout, "in_process")) > 10
