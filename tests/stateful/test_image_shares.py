"""What travels from a leader to the ranks of its replica: an image's bytes reach the rank that encodes it, alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.image_oracle import write_project
from tests.support.image_world import steps_of_ranks
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.local_groups import LocalGroups
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe

STEPS = 4
ROADS = 3 * 1024 * STEPS
"""Bytes of routes and sizes of images that a rank gets beside pixels, generously."""


@pytest.fixture
def bytes_to_rank(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that each rank is sent of steps, by whichever leader."""
    counts: Counter[int] = Counter()
    put = LocalGroups._put

    def counted(groups: LocalGroups, rank: int, values: np.ndarray) -> None:
        if values.dtype == np.uint8:
            counts[rank] += values.nbytes
        put(groups, rank, values)

    monkeypatch.setattr(LocalGroups, "_put", counted)
    return counts


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_project(folder, ["parquet", "webdataset"])
    index_recipe(load_recipe(folder / "recipe.yaml"), folder)
    told = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    (folder / "texts.yaml").write_text(yaml.safe_dump(told | {"modules": {}}), encoding="utf-8")
    return folder / "recipe.yaml"


def pixel_bytes(steps: list[list[Any]]) -> int:
    """Bytes of the pixels that a rank encodes."""
    return sum(step[0].modules["vision"].arrays["pixel_values"].numel() for step in steps)


@pytest.mark.parametrize("topology", [Topology(tp=4), Topology(tp=2, cp=2), Topology(tp=2, pp=2)], ids=str)
def test_an_image_reaches_the_rank_that_encodes_it_alone(
    topology: Topology, project: Path, bytes_to_rank: Counter[int]
) -> None:
    steps_of_ranks(project.with_name("texts.yaml"), topology, STEPS)
    texts = dict(bytes_to_rank)
    bytes_to_rank.clear()
    mine = {rank: pixel_bytes(steps) for rank, steps in enumerate(steps_of_ranks(project, topology, STEPS))}
    assert min(mine.values()) > 3 * ROADS
    for rank in range(1, topology.world_size):
        assert mine[rank] <= bytes_to_rank[rank] - texts[rank] <= mine[rank] + ROADS, rank
