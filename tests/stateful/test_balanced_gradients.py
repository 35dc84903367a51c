"""Where a sample is computed does not matter to the gradient of a step, if its loss is weighted by tokens.

Every method of balance places the same samples in other microbatches and on other ranks. The summed gradient over the
tokens of the step is that of hash order to rounding; the mean of the microbatches' means is not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.loaders import run_job, write_job
from torchmix.parallel.topology import Topology

STEPS, DP, WIDTH, VOCAB = 2, 4, 8, 512
METHODS = ("rows", "lpt", "karmarkar_karp", "zigzag")


def gradients(folder: Path, method: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[int, ...]]]:
    """By step: the gradient by tokens, that of the mean of means, and the tokens of each microbatch in turn."""
    job = write_job(folder, samples=16, length=64)
    text = job.read_text(encoding="utf-8")
    assert text.count("balance: {method: rows") == 1
    job.write_text(text.replace("balance: {method: rows", f"balance: {{method: {method}"), encoding="utf-8")
    ranks = run_job(job, Topology(dp=DP), steps=STEPS, micro_batch_size=1)
    torch.manual_seed(3)
    embedding = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    head = torch.randn(WIDTH, VOCAB, dtype=torch.float64, requires_grad=True)
    by_tokens, by_means, tokens = [], [], []
    for step in range(STEPS):
        microbatches = [one for rank in ranks for one in rank.microbatches if one.step == step]
        sums, means, total = torch.zeros_like(head), torch.zeros_like(head), 0.0
        for one in microbatches:
            # A sum over all earlier tokens of the sample: what is learnt of a token depends on its sample alone.
            hidden = torch.tanh(embedding[one.tokens % VOCAB].cumsum(1) / WIDTH)
            loss = cross_entropy((hidden @ head).flatten(0, 1), one.labels.flatten() % VOCAB, reduction="none")
            [gradient] = torch.autograd.grad((loss * one.loss_mask.flatten()).sum(), head)
            weight = float(one.loss_mask.sum())
            sums, means, total = sums + gradient, means + gradient / max(weight, 1), total + weight
        by_tokens.append(sums / total)
        by_means.append(means / len(microbatches))
        tokens.append(tuple(int(one.loss_mask.sum()) for one in microbatches))
    return by_tokens, by_means, tokens


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_hash_order_by_tokens_and_are_not_by_means(tmp_path: Path, method: str) -> None:
    hashed, hashed_means, hashed_tokens = gradients(tmp_path / "none", "none")
    balanced, _, tokens = gradients(tmp_path / method, method)
    assert tokens != hashed_tokens, "the samples are elsewhere"
    assert [sorted(one) for one in tokens] == [sorted(one) for one in hashed_tokens]
    for step in range(STEPS):
        assert relative(balanced[step], hashed[step]) < 1e-10
        assert relative(hashed_means[step], hashed[step]) > 1e-4, "the mean of means weights tokens by their microbatch"
