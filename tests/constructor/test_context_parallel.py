from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import EXPANDED, Piece, build_tensors, expanded, make_plan, random_plan, values_of
from torchmix.constructor.build import pieces_of_replica
from torchmix.constructor.fields import StepTensors, batch_of_role, check_context_parallel, cp_slices
from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import Role
from torchmix.recipe.structs import Packing


def random_step(seed: int, packing: Packing, *, micro_batch_size: int = 2) -> StepTensors:
    is_packed = packing.method == "best_fit"
    plan, documents = random_plan(
        seed,
        is_packed=is_packed,
        align_tokens=packing.align_tokens if is_packed else 1,
        micro_batch_size=micro_batch_size,
    )
    pieces = pieces_of_replica(plan, 0)
    return build_tensors(pieces, *values_of(pieces, documents, length=48), length=48, packing=packing)


def shares(step: StepTensors, cp: int, packing: Packing, *, length: int = 48) -> list[StepTensors]:
    slices = cp_slices(step, cp, length=length, packing=packing)
    return [batch_of_role(step, Role(stage="only", cp_rank=cp_rank), slices) for cp_rank in range(cp)]


def test_documents_and_the_tail_are_cut_one_by_one() -> None:
    documents = {(0, 0): list(range(100, 108)), (1, 0): [200, 201, 202]}
    pieces_of_plan = [
        Piece(sample=0, sample_offset=0, source=0, row=0, start=0, tokens=8),
        Piece(sample=0, sample_offset=8, source=1, row=0, start=0, tokens=3),
    ]
    plan = make_plan(pieces_of_plan, documents, length=16, places=[(0, 0, 0)])
    pieces = pieces_of_replica(plan, 0)
    packing = Packing(method="best_fit", boundaries="document", align_tokens=4)
    step = build_tensors(pieces, *values_of(pieces, documents, length=16), length=16, packing=packing)
    assert step.cu_seqlens_padded.tolist() == [0, 8, 12, 16]
    first, second = shares(step, 2, packing, length=16)
    assert first.tokens is not None and second.tokens is not None
    assert first.tokens.tolist() == [[[100, 101, 106, 107, *[200, 0], *[0, 0]]]]
    assert second.tokens.tolist() == [[[102, 103, 104, 105, *[201, 202], *[0, 0]]]]
    assert expanded(first, "position_ids").tolist() == [[[0, 1, 6, 7, *[0, 0], *[0, 0]]]]
    assert expanded(second, "labels").tolist() == [[[103, 104, 105, 106, *[202, 0], *[0, 0]]]]
    for share in (first, second):
        assert share.cu_seqlens.tolist() == [0, 8, 11, 11]
        assert share.cu_seqlens_padded.tolist() == [0, 8, 12, 16]


@pytest.mark.parametrize(("method", "boundaries"), [("concat", "document"), ("concat", "none"), ("best_fit", "none")])
def test_samples_are_cut_whole_where_documents_are_not_aligned_or_not_known(method: Any, boundaries: Any) -> None:
    packing = Packing(method=method, boundaries=boundaries, align_tokens=4)
    step = random_step(1, packing)
    second = shares(step, 2, packing)[1]
    assert step.tokens is not None and second.tokens is not None
    assert torch.equal(second.tokens, step.tokens[:, :, 12:36])


def index_by_formula(cu_seqlens: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """The tokens of a rank, as Transformer Engine picks them of packed documents, and Megatron of a whole sample."""
    chunk = np.diff(cu_seqlens) // (2 * cp)
    counts = np.stack([chunk, chunk], 1).ravel()
    start = np.stack([cu_seqlens[:-1] + cp_rank * chunk, cu_seqlens[:-1] + (2 * cp - 1 - cp_rank) * chunk], 1).ravel()
    return np.arange(counts.sum()) + np.repeat(start - (np.cumsum(counts) - counts), counts)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize(
    ("method", "boundaries"), [("best_fit", "document"), ("best_fit", "none"), ("concat", "document")]
)
def test_slices_partition_each_sample_and_follow_the_formula(
    method: Any, boundaries: Any, cp: int, micro_batch_size: int
) -> None:
    packing = Packing(method=method, boundaries=boundaries, align_tokens=2 * cp)
    by_document = (method, boundaries) == ("best_fit", "document")
    for seed in range(4):
        step = random_step(seed, packing, micro_batch_size=micro_batch_size)
        parts = shares(step, cp, packing)
        for index in range(step.num_microbatches):
            whole = step.microbatch(index)
            samples = np.arange(micro_batch_size + 1) * 48
            cu_seqlens = whole.cu_seqlens_padded.numpy().astype(np.int64) if by_document else samples
            index_of_rank = [index_by_formula(cu_seqlens, cp, cp_rank) for cp_rank in range(cp)]
            # Every token has one rank, and each sample gives every rank as many.
            assert sorted(np.concatenate(index_of_rank).tolist()) == list(range(micro_batch_size * 48))
            for name in EXPANDED:
                field = getattr(whole, name).reshape(-1)
                joined = torch.empty_like(field)
                for part, where in zip(parts, index_of_rank, strict=True):
                    sliced = getattr(part.microbatch(index), name)
                    assert sliced.shape == (micro_batch_size, 48 // cp)
                    assert (where // 48 == np.repeat(np.arange(micro_batch_size), 48 // cp)).all()
                    assert torch.equal(sliced.reshape(-1), field[torch.from_numpy(where)]), f"seed {seed}, {name}"
                    joined[torch.from_numpy(where)] = sliced.reshape(-1)
                assert torch.equal(joined, field)


@pytest.mark.parametrize(
    ("stage", "needed"),
    [
        ("only", set(EXPANDED)),
        ("first", {"tokens", "position_ids"}),
        ("middle", set()),
        ("last", {"labels", "loss_mask", "source_index"}),
    ],
)
def test_a_stage_gets_the_fields_it_needs_and_all_boundaries(stage: Any, needed: set[str]) -> None:
    packing = Packing(align_tokens=4)
    step = random_step(5, packing)
    for cp in (1, 2):
        slices = cp_slices(step, cp, length=48, packing=packing)
        share = batch_of_role(step, Role(stage=stage, cp_rank=cp - 1), slices)
        microbatch = share.microbatch(0)
        assert {name for name in EXPANDED if getattr(microbatch, name) is not None} == needed
        for name in ("cu_seqlens", "cu_seqlens_padded", "cu_seqlens_stop", "max_seqlen"):
            assert torch.equal(getattr(share, name), getattr(step, name))
        assert (share.step, share.num_tokens_global) == (step.step, step.num_tokens_global)


def test_without_context_parallelism_a_share_costs_no_memory() -> None:
    packing = Packing(align_tokens=4)
    step = random_step(5, packing)
    share = shares(step, 1, packing)[0]
    assert share.tokens is not None and step.tokens is not None
    assert share.tokens.data_ptr() == step.tokens.data_ptr()


def test_an_alignment_that_does_not_suit_names_one_that_does() -> None:
    check_context_parallel(4, length=48, packing=Packing(align_tokens=8))
    with pytest.raises(TopologyError, match="align_tokens is 12; set align_tokens: 24") as error:
        check_context_parallel(4, length=48, packing=Packing(align_tokens=12))
    assert "cp=4" in str(error.value)
    check_context_parallel(4, length=48, packing=Packing(align_tokens=12, boundaries="none"))
    check_context_parallel(4, length=48, packing=Packing(align_tokens=12, method="concat"))
    check_context_parallel(1, length=47, packing=Packing(align_tokens=1))


def test_a_length_that_does_not_suit_names_one_that_does() -> None:
    for packing in (Packing(method="concat"), Packing(align_tokens=6)):
        with pytest.raises(TopologyError, match=r"cp=3 .* batch.length is 50; set length: 54"):
            check_context_parallel(3, length=50, packing=packing)
