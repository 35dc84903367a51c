"""Gradients of encoder and embedding in float64: the same at every layout and balance, and at one rank.

Rows travel by the loop of sends that `route` is compared with in tests/system/test_modules.py, so that autograd sees
the whole job in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.support.image_oracle import write_project
from tests.support.image_record import exchanged
from tests.support.image_sources import TOKEN
from tests.support.image_world import steps_of_ranks
from torchmix.constructor.fields import Microbatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel import Routes, Topology, place_rows
from torchmix.recipe.load import load_recipe

STEPS = 4
WIDTH = 5
Exchange = Callable[[list[torch.Tensor], list[Routes], int], torch.Tensor]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few documents with images, some of them side by side, among many without."""
    folder = tmp_path_factory.mktemp("gradients")
    rows = write_project(folder, ["lists"])["s0"]
    assert any("<image><image>" in row.marked for row in rows.values())
    lines = [json.dumps({"text": f"plain {i} " + "word " * (i % 9)}) for i in range(200)]
    (folder / "plain.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    told = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    told["sources"]["plain"] = {"path": "plain.jsonl", "text": "text", "tokenizer": "bytes"}
    told |= {"mixture": {"s0": "20%", "plain": "80%"}, "batch": {"samples": 4, "length": 128}}
    (folder / "lpt.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    told["modules"]["vision"] |= {"method": "none"}
    told["balance"] = {"method": "none"}
    (folder / "none.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    index_recipe(load_recipe(folder / "lpt.yaml"), folder)
    return folder


def gradients(
    recipe: Path, topology: Topology, *, masks: bool = False, exchange: Exchange = exchanged
) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Gradients of a small encoder and of the embedding over some steps, and the rows that each rank got in each.

    With `masks` the loss leaves out every token of an image whose row in the source is even.
    """
    draw = np.random.default_rng(7)
    encoder = torch.from_numpy(draw.normal(size=(48, WIDTH))).requires_grad_()
    embedding = torch.from_numpy(draw.normal(size=(TOKEN + 1, WIDTH))).requires_grad_()
    ranks = steps_of_ranks(recipe, topology, STEPS)
    received: list[list[int]] = []
    for step in zip(*ranks, strict=True):
        rows = [_encoded(of_rank[0], encoder) for of_rank in step]
        routes = [of_rank[0].modules["vision"].routes for of_rank in step]
        total = torch.zeros((), dtype=torch.float64)
        received.append([])
        for rank, of_rank in enumerate(step):
            place = topology.with_rank(rank).coordinates
            came = exchange(rows, routes, rank)
            received[-1].append(len(came))
            for microbatch in of_rank if place.tp == 0 and place.pp == 0 else ():
                assert microbatch.tokens is not None
                tokens = microbatch.tokens.reshape(-1).long()
                embedded = place_rows(embedding[tokens][None], came, routes[rank], microbatch.index)[0]
                assert microbatch.position_ids is not None
                counts = (tokens != 0) * (2 + torch.cos(microbatch.position_ids.reshape(-1).double()))
                if masks:
                    counts = counts * ((tokens != TOKEN) | (embedded.detach().sum(1) > 0)).double()
                total = total + (torch.tanh(embedded).pow(2).sum(1) * counts).sum() / microbatch.num_tokens_global
        total.backward()
    assert encoder.grad is not None and embedding.grad is not None
    return encoder.grad.numpy(), embedding.grad.numpy(), received


def _encoded(microbatch: Microbatch, encoder: torch.Tensor) -> torch.Tensor:
    """A row for each block of four patches; a block knows the others of its image."""
    batch = microbatch.modules["vision"]
    pixels = batch.arrays["pixel_values"].double() / 255
    blocks = torch.sin(pixels.reshape(-1, 4, 48).mean(1) @ encoder)
    image = torch.repeat_interleave(torch.arange(len(batch.rows)), batch.rows)
    means = torch.zeros(len(batch.rows), WIDTH, dtype=torch.float64).index_add(0, image, blocks)
    return blocks + (means / batch.rows[:, None])[image]


def same(some: np.ndarray, others: np.ndarray) -> bool:
    return bool(np.abs(some - others).max() <= 1e-10 * np.abs(others).max())


@pytest.fixture(scope="module")
def of_one_rank(project: Path) -> dict[bool, tuple[np.ndarray, np.ndarray]]:
    """The gradients, with and without masks."""
    return {masks: gradients(project / "lpt.yaml", Topology(), masks=masks)[:2] for masks in (False, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "recipe", "masks"),
    [
        (Topology(dp=4), "lpt.yaml", True),
        (Topology(dp=4), "none.yaml", False),
        (Topology(tp=2, dp=2), "lpt.yaml", False),
        (Topology(cp=2, dp=2), "lpt.yaml", True),
        (Topology(pp=2, dp=2), "none.yaml", True),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_rank(
    project: Path, of_one_rank: dict[bool, tuple[np.ndarray, np.ndarray]], topology: Topology, recipe: str, masks: bool
) -> None:
    encoder, embedding = of_one_rank[masks]
    assert min(np.abs(encoder).max(), np.abs(embedding).max()) > 1e-6
    assert not same(encoder, of_one_rank[not masks][0])
    found = gradients(project / recipe, topology, masks=masks)
    assert same(found[0], encoder) and same(found[1], embedding)
    if topology.dp == 4:
        assert any(0 in of_step and max(of_step) > 0 for of_step in found[2]), "a rank has only text in some step"


def test_rows_in_another_order_give_other_gradients(
    project: Path, of_one_rank: dict[bool, tuple[np.ndarray, np.ndarray]]
) -> None:
    encoder, _ = of_one_rank[False]

    def reversed_order(rows: list[torch.Tensor], routes: list[Routes], rank: int) -> torch.Tensor:
        return exchanged(rows, routes, rank).flip(0)

    other, _, _ = gradients(project / "lpt.yaml", Topology(dp=4), exchange=reversed_order)
    assert not same(other, encoder)
