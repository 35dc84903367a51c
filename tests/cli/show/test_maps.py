"""Rows that go through a map, as the commands show and check them."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.files import make_text_file, random_texts
from tests.support.maps import write_functions
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

RECIPE = """
version: 1
seed: 3
batch: {samples: 2, length: 64}
sources:
  web: {path: web.parquet, text: text, map: "NAME:drawn"}
mixture: {web: 100%}
packing: {method: concat}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    make_text_file(tmp_path / "web.parquet", random_texts(1, 12, mean_words=12))
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("NAME", write_functions(tmp_path)))
    assert main(["index", str(tmp_path / "recipe.yaml")]) == 0
    return tmp_path / "recipe.yaml"


def test_a_step_is_shown_with_the_ids_that_a_random_map_gives_in_its_epoch(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 12
    with build_loader(recipe, topology=Topology(), loaders="in_process") as loader:
        handed = [microbatch.tokens.flatten().tolist() for microbatch in islice(loader, 2 * steps)][-2:]
    capsys.readouterr()
    assert main(["show", str(recipe), "--step", str(steps - 1), "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    of_microbatch: dict[int, list[int]] = {}
    epochs = set()
    for sample in shown["samples"]:
        for piece in sample["pieces"]:
            epochs.add(piece["epoch"])
            of_microbatch.setdefault(sample["microbatch"], []).extend(piece["ids"])
    assert epochs and min(epochs) > 0
    assert [of_microbatch[0], of_microbatch[1]] == handed


def test_another_version_of_a_map_is_a_finding_of_its_key(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = recipe.read_text().split('map: "')[1].split(":")[0]
    module = recipe.parent / f"{name}.py"
    module.write_text(module.read_text() + "\ndrawn.version = 2\n")
    sys.modules.pop(name)
    assert main(["check", str(recipe)]) != 0
    assert "sources.web.map: the map or its tokenizer is another than when the source was indexed" in (
        " ".join(capsys.readouterr().out.split())
    )
