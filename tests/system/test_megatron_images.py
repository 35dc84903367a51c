"""Images under megatron-core's own schedules on real ranks: losses and gradients are those of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.forks import MEGATRON
from tests.support.image_oracle import write_project
from tests.support.processes import Processes
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

STEPS = 2
PROGRAM = ("-m", "tests.support.megatron_image_rank")
DEADLINE_S = 240.0


def run(folder: Path, tp: int, pp: int, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses of each step, and the gradient of the encoder, both over the whole job."""
    out = folder / f"{tp}-{pp}-{world_size}"
    out.mkdir()
    with Processes(out) as processes:
        arguments = (str(folder / "recipe.yaml"), str(out), str(tp), str(pp), str(STEPS))
        ranks = processes.start_ranks(*PROGRAM, *arguments, world_size=world_size, after=MEGATRON)
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
    found = [dict(np.load(out / f"{rank}.npz")) for rank in range(world_size)]
    losses = sum(one["losses"] for one in found if one["place"][1] == pp - 1 and one["place"][2] == 0)
    return np.asarray(losses), np.asarray(sum(one["gradient"] for one in found))


@pytest.mark.system
def test_losses_and_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    write_project(tmp_path, ["lists", "parquet"])
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    losses, gradient = run(tmp_path, 1, 1, 1)
    assert (losses > 0).all() and np.abs(gradient).max() > 0
    for tp, pp, world_size in ((1, 1, 2), (1, 2, 2), (2, 1, 2)):
        other_losses, other_gradient = run(tmp_path, tp, pp, world_size)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-4, err_msg=f"tp {tp}, pp {pp}")
        np.testing.assert_allclose(other_gradient, gradient, rtol=2e-3, atol=1e-3 * np.abs(gradient).max())
