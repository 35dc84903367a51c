"""Images on real ranks, against the oracle of `tests/support/image_oracle.py`.

Other layouts, rules and loaders are tried in one process: tests/trials/image_matrix.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.decode_log import decoded, site_folder
from tests.support.image_oracle import check, write_project
from tests.support.processes import Processes
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

STEPS = 3
DEADLINE_S = 120.0


@pytest.mark.system
@pytest.mark.parametrize(
    ("containers", "rule", "sizes", "loaders"),
    [
        (["parquet", "webdataset", "jsonl", "struct"], "dynamic", (1, 1, 1, 4), "node"),
        (["webdataset", "parquet"], "tiles", (2, 1, 1, 2), "in_process"),
        (["lists", "members", "structs", "paths"], "dynamic", (1, 2, 1, 2), "node"),
        (["obelics", "interleaved", "parquet"], "tiles", (1, 1, 2, 2), "in_process"),
    ],
)
def test_every_tensor_is_what_pillow_makes(
    tmp_path: Path, containers: list[str], rule: str, sizes: tuple[int, int, int, int], loaders: str
) -> None:
    tp, cp, pp, dp = sizes
    rows = write_project(tmp_path, containers, rule=rule)
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    site = site_folder(tmp_path / "site", tmp_path / "decoded")
    paths = [str(site), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    world_size = tp * cp * pp * dp
    with Processes(tmp_path) as processes:
        numbers = map(str, (tp, cp, pp, STEPS))
        arguments = (str(tmp_path / "recipe.yaml"), str(tmp_path), *numbers, loaders, str(tmp_path / "decoded"))
        arguments += (str(int(rule == "dynamic")),)
        ranks = processes.start_ranks(
            "-m",
            "tests.support.image_rank",
            *arguments,
            world_size=world_size,
            environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(world_size)]
    assert min(len(one["images"]) for one in found) > 0
    check(found, decoded(tmp_path / "decoded"), rows, rule)
