"""Core's own LLaVA and MIMO models: what they make of a recipe's batches is the plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

import torchmix
from tests.support.forks import MEGATRON
from tests.support.image_oracle import write_project
from tests.support.image_sources import TOKEN
from tests.support.processes import Processes
from torchmix.constructor.fields import Microbatch
from torchmix.megatron_adapter.vision import images_of

DEADLINE_S = 240.0


def planned(folder: Path) -> list[Microbatch]:
    """The microbatches of a step with images; the recipe is `recipe.yaml`."""
    module = {"items": "image", "sizes": "patches", "axis": "DP", "near_text": "always"}
    write_project(folder, ["lists"], rule="tiles", modules={"vision": module})
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe |= {"batch": {"samples": 8, "length": 192}, "packing": {"overflow": "error", "boundaries": "none"}}
    words = {"merge": 1, "tower": "pictures", "mean": [0.5, 0.4, 0.3], "deviation": [0.2, 0.3, 0.4]}
    recipe["sources"]["s0"]["images"] |= words
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with torchmix.build_loader(folder / "recipe.yaml", micro_batch_size=2, loaders="in_process", max_steps=1) as loader:
        return list(loader)


@pytest.mark.system
@pytest.mark.slow
def test_the_sequences_of_the_model_are_the_plan_at_two_stages(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    with Processes(tmp_path) as processes:
        arguments = ("-m", "tests.support.megatron_llava_rank", str(tmp_path / "recipe.yaml"), str(tmp_path), "2")
        processes.wait_all(processes.start_ranks(*arguments, world_size=2, after=MEGATRON), deadline_s=DEADLINE_S)
    first, last = (dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2))
    tokens, labels, mask = (
        np.concatenate([getattr(one, name).numpy() for one in plan]) for name in ("tokens", "labels", "loss_mask")
    )
    assert np.array_equal(first["is_image"], tokens == TOKEN)
    trained = (mask == 1) & (tokens != TOKEN)
    assert np.array_equal(last["mask"], trained)
    assert np.array_equal(last["labels"][trained], labels[trained])
    tower = torchmix.open_tower(tmp_path / "recipe.yaml", "vision")
    wanted = [tower.of_units(images_of(one, "vision")["image_pixels"]).numpy() for one in plan]
    assert np.array_equal(first["pictures"], np.concatenate(wanted)) and len(first["pictures"]) > 10


@pytest.mark.system
@pytest.mark.slow
def test_the_batches_of_mimo_are_the_plan_on_each_rank(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    with Processes(tmp_path) as processes:
        arguments = ("-m", "tests.support.megatron_mimo_rank", str(tmp_path / "recipe.yaml"), str(tmp_path))
        processes.wait_all(processes.start_ranks(*arguments, world_size=2, after=MEGATRON), deadline_s=DEADLINE_S)
    tower = torchmix.open_tower(tmp_path / "recipe.yaml", "vision")
    wanted = np.concatenate([tower.of_units(images_of(one, "vision")["image_pixels"]).numpy() for one in plan])
    tokens, labels, mask = (
        np.concatenate([getattr(one, name).numpy() for one in plan]) for name in ("tokens", "labels", "loss_mask")
    )
    for rank in range(2):
        found = dict(np.load(tmp_path / f"{rank}.npz"))
        assert np.array_equal(found["pictures"], wanted) and len(wanted) > 10
        assert np.array_equal(found["embeddings"][tokens == TOKEN], found["rows"])
        assert np.array_equal(found["embeddings"][tokens != TOKEN], found["table"][tokens[tokens != TOKEN]])
        assert np.array_equal(found["mask"], mask) and mask[tokens == TOKEN].any()
        assert np.array_equal(found["labels"][mask == 1], labels[mask == 1])
    assert f"({int(mask.sum()):,} tokens)" in found["lines"][-1]
