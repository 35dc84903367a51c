"""Every tensor of every rank against an oracle that does not know torchmix, on files that are new in each run."""

from __future__ import annotations

import ast
import os
import secrets
from pathlib import Path

import pytest

from tests.support import oracle
from tests.support.loaders import run_job
from tests.support.oracle_job import ALIGN_TOKENS, LENGTH, assert_equal, expected_of_ranks, write_data, write_recipe
from torchmix.parallel.topology import Topology

STEPS = 2

LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "dp4": {"dp": 4},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "cp2 dp2": {"cp": 2, "dp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
}


@pytest.fixture(scope="module")
def seed() -> int:
    """From the environment variable TORCHMIX_TEST_SEED, else drawn; shown with the failure."""
    seed = int(os.environ.get("TORCHMIX_TEST_SEED", secrets.randbelow(2**31)))
    print(f"TORCHMIX_TEST_SEED={seed}")
    return seed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, seed: int) -> tuple[Path, dict[str, list[list[int]]]]:
    """Files of seven sources, in a folder, and their documents as the oracle reads them."""
    folder = tmp_path_factory.mktemp("data")
    return folder, write_data(folder, seed)


@pytest.fixture(scope="module", params=["concat", "best_fit"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["document", "none"])
def boundaries(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def recipe(data: tuple[Path, dict[str, list[list[int]]]], seed: int, method: str, boundaries: str) -> Path:
    return write_recipe(data[0], seed, method, boundaries)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_every_tensor_of_every_rank_is_what_the_plan_says(
    layout: str,
    micro_batch_size: int,
    method: str,
    boundaries: str,
    recipe: Path,
    data: tuple[Path, dict[str, list[list[int]]]],
    seed: int,
    tmp_path: Path,
) -> None:
    sizes = LAYOUTS[layout]
    job = oracle.Job(
        length=LENGTH,
        boundaries=boundaries,
        method=method,
        align_tokens=ALIGN_TOKENS,
        micro_batch_size=micro_batch_size,
        **sizes,
    )
    expected_of_rank = expected_of_ranks(recipe, data[1], job, steps=STEPS, folder=tmp_path)
    ranks = run_job(recipe, Topology(**sizes), steps=STEPS, micro_batch_size=micro_batch_size)
    assert len(ranks) == len(expected_of_rank) == job.world_size
    for rank, expected_microbatches in zip(ranks, expected_of_rank, strict=True):
        for found, expected in zip(rank.microbatches, expected_microbatches, strict=True):
            assert_equal(found, expected, f"TORCHMIX_TEST_SEED={seed}, step {expected['step']}")


def test_the_oracle_does_not_know_torchmix() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {module.split(".")[0] for module in modules}.isdisjoint({"torchmix", "tests", "torch"})
