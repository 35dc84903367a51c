"""What travels from a leader to the ranks of its replica: an image reaches the rank that encodes it, alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.support.catalogs import open_catalog
from tests.support.image_oracle import check, write_project
from tests.support.image_world import records, steps_of_ranks
from torchmix.constructor.fields import ModuleBatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.groups import LocalGroups
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
    told = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    for source in told["sources"].values():  # patches are larger than files
        source["images"] |= {"min_pixels": 3072, "max_pixels": 4096}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    index_recipe(load_recipe(folder / "recipe.yaml"), folder)
    (folder / "texts.yaml").write_text(yaml.safe_dump(told | {"modules": {}}), encoding="utf-8")
    for place in ("worker", "rank"):
        told["modules"]["vision"]["decode_at"] = place
        (folder / f"{place}.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return folder


TOPOLOGIES = [Topology(tp=4), Topology(tp=2, cp=2), Topology(tp=2, pp=2)]


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_an_image_reaches_the_rank_that_encodes_it_alone(
    topology: Topology, project: Path, bytes_to_rank: Counter[int]
) -> None:
    steps_of_ranks(project / "texts.yaml", topology, STEPS)
    texts = dict(bytes_to_rank)
    found = {}
    for place in ("worker", "rank"):
        bytes_to_rank.clear()
        found[place] = steps_of_ranks(project / f"{place}.yaml", topology, STEPS)
        for rank in range(1, topology.world_size):
            batches = [step[0].modules["vision"] for step in found[place][rank]]
            pixels = sum(batch.arrays["pixel_values"].numel() for batch in batches)
            files = sum(file_bytes(project, batch) for batch in batches)
            assert pixels > files + 3 * ROADS
            wanted = files if place == "rank" else pixels
            assert wanted <= bytes_to_rank[rank] - texts[rank] <= wanted + ROADS, (place, rank)
    for first, second in zip(found["worker"], found["rank"], strict=True):
        for one, other in zip(first, second, strict=True):
            arrays, others = (step[0].modules["vision"].arrays for step in (one, other))
            assert set(arrays) == set(others) and all(torch.equal(arrays[name], others[name]) for name in arrays)


def file_bytes(project: Path, batch: ModuleBatch) -> int:
    """Bytes of the files of a batch's images, by the catalog."""
    recipe = load_recipe(project / "recipe.yaml")
    sources = open_catalog(recipe, project).sources
    tables = [sources[name].sizes.items["image"] for name in sorted(sources)]
    places = zip(*(batch.arrays[key].tolist() for key in ("source", "number")), strict=True)
    return sum(int(tables[source].sizes["bytes"][number]) for source, number in places)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["document", "sample"])
@pytest.mark.parametrize("boundaries", ["document", "none"])
@pytest.mark.parametrize("method", ["best_fit", "pad"])
def test_positions_in_three_dimensions_restart_where_positions_do(
    tmp_path: Path, method: str, boundaries: str, positions: str
) -> None:
    number = (boundaries, positions).count("document") + (method == "pad")
    topology = (Topology(cp=2), Topology(dp=2))[number % 2]  # so each layout meets each two of the three words
    packing = {"method": method, "overflow": "error", "boundaries": boundaries, "positions": positions}
    rows = write_project(tmp_path, ["parquet", "lists"], packing=packing)
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    found = records(tmp_path / "recipe.yaml", topology, 3, with_mrope=True)
    assert check(found, None, rows, "dynamic", positions_at=positions) > 20
