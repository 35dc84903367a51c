"""A module over all ranks, on real ranks: documents of one source are encoded where it is cheap, and their rows replace
embeddings of the backbone. Gradients are those of one rank."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.support.files import make_tokens_file, random_tokens
from tests.support.forks import TRAINING
from tests.support.processes import Processes
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

STEPS = 2
PROGRAM = ("-m", "tests.support.module_rank")
DEADLINE_S = 120.0
RECIPE = """\
version: 1
seed: 3
batch: {{samples: 8, length: 64}}
sources:
  query: {{path: query.parquet, tokens: input_ids}}
  web: {{path: web.parquet, tokens: input_ids}}
mixture: {{query: {share}%, web: {rest}%}}
packing: {{align_tokens: 4}}
modules:
  query: {{sources: [query], axis: {axis}, scope: {scope}, model: {{layers: 2, hidden: 8, ffn: 16, heads: 2}}}}
"""


def write_project(folder: Path, *, share: int, axis: str, scope: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("query", "web")):
        make_tokens_file(folder / f"{name}.parquet", random_tokens(seed, 400, mean_tokens=12.0 + 20 * seed))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(share=share, rest=100 - share, axis=axis, scope=scope), encoding="utf-8")
    index_recipe(load_recipe(path), folder)
    return path


def train(
    folder: Path, *, tp: int = 1, cp: int = 1, pp: int = 1, world_size: int, **recipe: object
) -> dict[str, np.ndarray]:
    """The gradients of a job, each summed as its layout asks for, and the items of each rank."""
    path = write_project(folder, **recipe)  # type: ignore[arg-type]
    with Processes(folder) as processes:
        arguments = (str(path), str(folder), *map(str, (tp, cp, pp, STEPS)))
        ranks = processes.start_ranks(*PROGRAM, *arguments, world_size=world_size, after=TRAINING)
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
    found = [dict(np.load(folder / f"{rank}.npz")) for rank in range(world_size)]

    def shards(name: str) -> list[np.ndarray]:
        return [sum(one[name] for one in found[tp_rank::tp] if one[name].size) for tp_rank in range(tp)]

    return {
        "items": np.array([int(one["items"]) for one in found]),
        "encoder": sum(one["encoder"] for one in found),
        "embedding": sum(one["embedding"] for one in found[::tp] if one["embedding"].size),
        "inner": np.concatenate(shards("inner"), axis=1),
        "outer": np.concatenate(shards("outer"), axis=0),
    }


@cache
def of_one_rank(folder: Path, share: int) -> dict[str, np.ndarray]:
    return train(folder / f"one-{share}", world_size=1, share=share, axis="WORLD", scope="step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.mark.system
@pytest.mark.parametrize(
    ("sizes", "share", "axis", "scope"),
    [
        ({"tp": 2}, 30, "WORLD", "step"),
        ({"pp": 2}, 30, "WORLD", "step"),
        ({"tp": 2}, 1, "WORLD", "step"),  # some ranks compute nothing, some get nothing
        ({"pp": 2}, 1, "WORLD", "step"),
        ({"cp": 2}, 30, "WORLD", "microbatch"),
        ({"cp": 2}, 30, "CP", "step"),
    ],
    ids=lambda value: str(value),
)
def test_gradients_are_those_of_one_rank(
    folder: Path, tmp_path: Path, sizes: dict[str, int], share: int, axis: str, scope: str
) -> None:
    expected = of_one_rank(folder, share)
    found = train(tmp_path, world_size=4, share=share, axis=axis, scope=scope, **sizes)
    for name in ("encoder", "embedding", "inner", "outer"):
        assert np.abs(expected[name]).max() > 1e-6
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-10 * np.abs(expected[name]).max())
    assert found["items"].sum() == expected["items"].sum() > 0
    if share == 1:
        assert (found["items"] == 0).any(), "a rank without items takes part"
