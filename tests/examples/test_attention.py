"""Attention inside documents: against dense attention document by document, cut by CP, and bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.example import example_module

attention = example_module("attention")

LENGTH = 64
HEADS = 4
HEAD_DIM = 16


def packed(seed: int, *, samples: int, align: int) -> Tensor:
    """[documents + 1] boundaries of random documents, of which none crosses a sample; one of them is empty."""
    generator = torch.Generator().manual_seed(seed)
    cuts = [0]
    for sample in range(samples):
        while cuts[-1] < (sample + 1) * LENGTH:
            room = (sample + 1) * LENGTH - cuts[-1]
            tokens = int(torch.randint(1, 4, (), generator=generator)) * align
            cuts.append(cuts[-1] + min(tokens, room))
    return torch.tensor([*cuts, cuts[-1]], dtype=torch.int32)


def random_tokens(seed: int, tokens: int, heads: int = HEADS) -> Tensor:
    return torch.randn(tokens, heads, HEAD_DIM, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor) -> Tensor:
    """Causal attention over each document on its own."""
    parts = []
    for start, stop in pairwise(boundaries.tolist()):
        q, k, v = (part[start:stop].transpose(0, 1) for part in (query, key, value))
        scores = q @ k.transpose(1, 2) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_attention_over_each_document_on_its_own(seed: int) -> None:
    boundaries = packed(seed, samples=3, align=7)
    query, key, value = (random_tokens(10 * seed + i, 3 * LENGTH) for i in range(3))
    out = attention.document_attention(query, key, value, boundaries, length=LENGTH)
    torch.testing.assert_close(out, one_by_one(query, key, value, boundaries))


def test_its_gradients_equal_those_of_attention_over_each_document_on_its_own() -> None:
    boundaries = packed(5, samples=2, align=5)
    inputs = [random_tokens(i, 2 * LENGTH) for i in range(3)]
    weights = random_tokens(3, 2 * LENGTH).detach().flatten(1)
    out = attention.document_attention(*inputs, boundaries, length=LENGTH)
    expected = torch.autograd.grad((one_by_one(*inputs, boundaries) * weights).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((out * weights).sum(), inputs), expected)


def test_fewer_key_heads_serve_several_query_heads() -> None:
    boundaries = packed(6, samples=1, align=8)
    query, key, value = random_tokens(0, LENGTH), random_tokens(1, LENGTH, 2), random_tokens(2, LENGTH, 2)
    out = attention.document_attention(query, key, value, boundaries, length=LENGTH)
    expected = one_by_one(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), boundaries)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("slices", ["document", "sample"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_slices_of_all_context_parallel_ranks_give_the_whole(cp_size: int, slices: str) -> None:
    samples = 3
    boundaries = packed(7, samples=samples, align=2 * cp_size if slices == "document" else 5)
    inputs = [random_tokens(i, samples * LENGTH) for i in range(3)]
    cut = boundaries.long() if slices == "document" else torch.arange(0, samples * LENGTH + 1, LENGTH)
    held = [attention.positions_of_rank(cut, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    assert sorted(torch.cat(held).tolist()) == list(range(samples * LENGTH))

    gathered = torch.cat(held)
    query, key, value = inputs
    out = torch.zeros(samples * LENGTH, HEADS * HEAD_DIM)
    for rank in range(cp_size):
        part = attention.document_attention(
            query[held[rank]],
            key[gathered],
            value[gathered],
            boundaries,
            length=LENGTH,
            slices=slices,
            cp_size=cp_size,
            cp_rank=rank,
        )
        out = out.index_copy(0, held[rank], part)
    expected = one_by_one(query, key, value, boundaries)
    torch.testing.assert_close(out, expected)
    weights = random_tokens(3, samples * LENGTH).detach().flatten(1)
    torch.testing.assert_close(
        torch.autograd.grad((out * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs)
    )


@pytest.mark.parametrize("length", [64, 2048])
def test_editing_one_document_leaves_every_bit_of_the_others(length: int) -> None:
    # 2048 keys span several blocks of torch's kernel, so that rows see blocks in which every key is masked.
    boundaries = torch.tensor([0, length // 4, length // 2 + 8, length], dtype=torch.int32)
    inputs = [random_tokens(i, length) for i in range(3)]
    edited = [tensor.detach().clone() for tensor in inputs]
    second = slice(length // 4, length // 2 + 8)
    for tensor in edited:
        tensor[second] = tensor[second] * 100 + 1
    for tensor in edited:
        tensor.requires_grad_()
    results = []
    for query, key, value in (inputs, edited):
        out = attention.document_attention(query, key, value, boundaries, length=length)
        results.append((out, *torch.autograd.grad(functional.gelu(out).sum(), (query, key, value))))
    others = torch.ones(length, dtype=torch.bool)
    others[second] = False
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[second], after[second])


def test_a_missing_packing_is_refused() -> None:
    groups = type("Groups", (), {"cp": None})
    config = type("Config", (), {"attention_dropout": 0.0})
    module = attention.DocumentAttention(config, 1, None, "self", length=8, slices="sample", pg_collection=groups)
    tokens = random_tokens(0, 8)
    with pytest.raises(ValueError, match="where documents end"):
        module(tokens, tokens, tokens, None)


def test_attention_dropout_is_refused() -> None:
    config = type("Config", (), {"attention_dropout": 0.1})
    with pytest.raises(ValueError, match="attention_dropout"):
        attention.DocumentAttention(config, 1, None, "self", length=8, slices="sample")
