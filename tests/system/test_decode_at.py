"""Which process decodes images: the rank's, the worker's of a node, or loaders; the bits are the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.decode_log import site_folder
from tests.support.image_oracle import write_project
from tests.support.image_world import steps_of_ranks
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe

STEPS = 2


@pytest.mark.system
def test_images_are_decoded_where_the_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path, ["parquet", "paths"])
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    told = yaml.safe_load((tmp_path / "recipe.yaml").read_text(encoding="utf-8"))
    found, decoders = {}, {}
    for place, loaders in (("rank", "node"), ("worker", "job,processes=2"), ("loader", "job,processes=2")):
        log = tmp_path / place
        site = site_folder(tmp_path / f"site-{place}", log)
        paths = [str(site), str(Path(__file__).parents[2])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        told["modules"]["vision"]["decode_at"] = place
        recipe = tmp_path / f"{place}.yaml"
        recipe.write_text(yaml.safe_dump(told), encoding="utf-8")
        found[place] = steps_of_ranks(recipe, Topology(dp=2), STEPS, loaders=loaders)
        decoders[place] = [(path.name.split("-")[0], len(path.read_text().split())) for path in log.iterdir()]
    count = sum(len(step[0].modules["vision"].units) for rank in found["rank"] for step in rank)
    assert not decoders["rank"], "this process, whose decoder is not noted, decodes alone"
    for place in ("worker", "loader"):
        assert {role for role, _ in decoders[place]} == {place} and sum(num for _, num in decoders[place]) >= count
    assert len(decoders["worker"]) == 1
    for place in ("worker", "loader"):
        for rank, steps in enumerate(found[place]):
            for step, other in zip(steps, found["rank"][rank], strict=True):
                arrays, others = (each[0].modules["vision"].arrays for each in (step, other))
                assert set(arrays) == set(others) and all(torch.equal(arrays[name], others[name]) for name in arrays)
