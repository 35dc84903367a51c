"""Where each stage of a pipeline has a leader, each reads the items that its own ranks compute, and no others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.image_sources import make_rows, write_source
from tests.support.image_world import steps_of_ranks
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.place_tree import ClientPlaceTree, LeaderChoice
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.steps import module_items

STEPS = 3


@pytest.mark.parametrize(
    ("axis", "loaders"),
    [("DP", "in_process"), ("WORLD", "in_process"), pytest.param("DP", "node", marks=pytest.mark.slow)],
)
def test_items_are_read_once_whoever_leads(
    axis: str, loaders: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in make_rows(4, 16) if row.image is not None]
    told = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 2, "length": 512},
        "sources": {"pairs": write_source(tmp_path, "pairs", "jsonl", [rows], "dynamic")},
        "mixture": {"pairs": 1},
        "modules": {"vision": {"items": "image", "sizes": "patches", "axis": axis}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(told))
    index_recipe(load_recipe(path), tmp_path)
    made, read = module_items.values_of_items, Counter[str]()

    def counted(plan: Any, module: Any, chosen: Any, *given: Any, **options: Any) -> Any:
        read[leaders] += len(chosen)
        read[f"of {leaders}"] += len(module.items.piece)
        return made(plan, module, chosen, *given, **options)

    monkeypatch.setattr(module_items, "values_of_items", counted)
    found: dict[str, list[Any]] = {}
    choices: tuple[LeaderChoice, ...] = ("replica", "stage")
    for leaders in choices:
        tree = ClientPlaceTree.from_topology(Topology(pp=2, tp=2), leaders=leaders)
        ranks = steps_of_ranks(path, tree, STEPS, loaders=loaders)  # type: ignore[arg-type]
        found[leaders] = [
            [one.modules["vision"].arrays | {"units": one.modules["vision"].units} for one in step]
            for rank in ranks
            for step in rank
        ]
    assert sum(len(arrays["units"]) for step in found["stage"] for arrays in step) > 0
    for one, other in zip(found["replica"], found["stage"], strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    if loaders == "in_process":  # else another process reads
        assert read["of replica"] == read["replica"] == read["stage"] > 0
