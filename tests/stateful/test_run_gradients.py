"""Runs of ranks do not change what is learned: gradients of a small attention model, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.stateful.test_runs_of_ranks import with_runs
from tests.support.loaders import Rank, run_job, write_job
from torchmix.constructor.fields import Microbatch, places_of_slice
from torchmix.parallel.topology import Topology

WIDTH, VOCABULARY, LENGTH = 8, 1 << 16, 64
LAYOUTS = {
    "fixed 1": (Topology(dp=8), ", sizes: [1]", 64),
    "fixed 2": (Topology(dp=4, cp=2), ", sizes: [2]", 40),
    "fixed 4": (Topology(dp=2, cp=4), ", sizes: [4]", 40),
    "dynamic": (Topology(dp=4, cp=2), "", 24),
}


def gradients(ranks: Sequence[Rank], step: int) -> list[torch.Tensor]:
    """The gradients of the mean loss of a global batch, summed over ranks; those that share a bin compute as one."""
    torch.manual_seed(0)
    shapes = ((VOCABULARY, WIDTH), (LENGTH, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, 97))
    weights = [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    of_ranks = [[one for one in rank.microbatches if one.step == step] for rank in ranks]
    for of_microbatch in zip(*of_ranks, strict=True):
        for place, one in enumerate(of_microbatch):
            if one.cp_ranks.start == place:
                loss = loss_of_bin(of_microbatch[place : one.cp_ranks.stop], weights)
                (loss / one.num_tokens_global).backward()
    return [weight.grad for weight in weights if weight.grad is not None]


def loss_of_bin(slices: Sequence[Microbatch], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the losses of a bin, from what the ranks of its run have."""
    embedding, positions, attention, head = weights
    padded, true = slices[0].cu_seqlens_padded.long(), slices[0].cu_seqlens.long()
    tokens, places, labels, masks, at = [], [], [], [], []
    for index, one in enumerate(slices):
        assert one.tokens is not None and one.labels is not None and one.loss_mask is not None
        assert one.position_ids is not None
        tokens.append(one.tokens[0])
        labels.append(one.labels[0])
        masks.append(one.loss_mask[0])
        at.append(one.position_ids[0])
        places.append(places_of_slice(padded, one.tokens.shape[1], index))
    place = torch.cat(places)
    document = torch.searchsorted(padded, place, right=True) - 1
    is_real = place - padded[document] < true.diff()[document]
    seen = (document[:, None] == document[None, :]) & (place[None, :] <= place[:, None]) & is_real[None, :]
    x = embedding[torch.cat(tokens)] + positions[torch.cat(at)]
    query, key, value = (x @ attention).chunk(3, dim=1)
    scores = (query @ key.T).masked_fill(~(seen | torch.eye(len(place), dtype=torch.bool)), -torch.inf)
    out = (x + scores.softmax(1) @ value) @ head
    losses = torch.nn.functional.cross_entropy(out, torch.cat(labels) % 97, reduction="none")
    return torch.dot(losses, torch.cat(masks).double())


@pytest.mark.slow
def test_gradients_of_one_rank_of_fixed_sizes_and_of_runs_are_equal(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    wanted = gradients(run_job(with_runs(recipe, "alone", rank_tokens=64), Topology(), steps=2), step=1)
    shared = set()
    for name, (topology, more, rank_tokens) in LAYOUTS.items():
        path = with_runs(recipe, name.replace(" ", "-"), rank_tokens=rank_tokens)
        price = f"60{more}" if more else "500"
        path.write_text(path.read_text().replace("per_exchanged: 60", f"per_exchanged: {price}"))
        ranks = run_job(path, topology, steps=2)
        sizes = {one.cp_size for rank in ranks for one in rank.microbatches}
        assert sizes == {int(name[-1])} if more else len(sizes) > 1
        shared |= sizes
        for found, expected in zip(gradients(ranks, step=1), wanted, strict=True):
            assert float(expected.abs().max()) > 1e-3
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-13), name
    assert shared >= {1, 2, 4}
