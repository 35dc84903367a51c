"""Modules that compute documents: what they get, and what the samples beside them get, whoever reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pairs.columns import DEFAULTS
from tests.pairs.runner import run_row
from torchmix.errors import OptionError


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"mode": "node", "layout": "leaders"},  # two leaders of a replica share what a worker has read
        {"mode": "job", "layout": "dp"},  # loaders are asked for a step while the one before it is built
        {"mode": "in_process", "reset_id": "given"},  # steps of a block are built one by one
    ],
    ids=lambda values: " ".join(values.values()),
)
def test_documents_of_a_module_and_of_samples_are_those_of_the_files(values: dict[str, Any], tmp_path: Path) -> None:
    verdict = run_row({**DEFAULTS, "module": "document", **values}, tmp_path)
    assert verdict.items == verdict.spans and verdict.tokens


def test_a_part_without_images_has_no_items(tmp_path: Path) -> None:
    images = {"rows": "images", "tokenizer": "bytes", "image_rule": "dynamic", "image_place": "bytes"}
    row = {**DEFAULTS, **images, "module": "image", "parts": "own", "life": "validation"}
    assert run_row(row, tmp_path).images == 0


def test_files_of_several_kinds_that_nobody_would_open_are_named_by_kind(tmp_path: Path) -> None:
    kinds = {"rows": "images", "item_kind": "all", "image_rule": "dynamic", "image_place": "folder"}
    with pytest.raises(OptionError, match=r"files of images \(source main\), sounds \(source main\), videos \(source"):
        run_row({**DEFAULTS, **kinds, "tokenizer": "bytes", "mode": "remote"}, tmp_path)
