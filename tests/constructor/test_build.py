from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import EXPANDED, Piece, build_tensors, expanded, make_plan, random_plan, values_of
from torchmix.constructor.arrays import NO_LOSS, StepMemory
from torchmix.constructor.build import build, pieces_of_replica
from torchmix.constructor.fields import StepTensors
from torchmix.errors import CorruptPage
from torchmix.planner.plan import StepPlan
from torchmix.recipe.structs import Packing

# Documents by (source, row).
DOCUMENTS = {(0, 7): [10, 11, 12], (2, 0): [20, 21, 22, 23, 24, 25, 26], (1, 5): [30]}

ALIGNED = [
    Piece(sample=0, sample_offset=0, source=2, row=0, start=2, tokens=3),
    Piece(sample=0, sample_offset=4, source=0, row=7, start=0, tokens=3),
    Piece(sample=1, sample_offset=0, source=1, row=5, start=0, tokens=1),
    Piece(sample=2, sample_offset=0, source=2, row=0, start=5, tokens=2),
]


def build_replica(plan: StepPlan, documents: Any, replica: int = 0, *, length: int, packing: Packing) -> StepTensors:
    pieces = pieces_of_replica(plan, replica)
    return build_tensors(pieces, *values_of(pieces, documents, length=length), length=length, packing=packing)


def as_lists(tensors: StepTensors) -> dict[str, Any]:
    return {name: expanded(tensors, name).tolist() for name in EXPANDED}


def test_a_packed_step_holds_these_values() -> None:
    # One replica, microbatch 0 is samples 1 and 2, microbatch 1 is samples 3 (without a piece) and 0.
    plan = make_plan(ALIGNED, DOCUMENTS, length=12, places=[(0, 1, 1), (0, 0, 0), (0, 0, 1), (0, 1, 0)], step=4)
    packing = Packing(method="best_fit", boundaries="document", align_tokens=4)
    tensors = build_replica(plan, DOCUMENTS, length=12, packing=packing)
    pad = [0] * 8
    assert as_lists(tensors) == {
        "tokens": [
            [[30, 0, 0, 0, *pad], [25, 26, 0, 0, *pad]],
            [[0, 0, 0, 0, *pad], [22, 23, 24, 0, 10, 11, 12, 0, 0, 0, 0, 0]],
        ],
        "labels": [
            [[0, 0, 0, 0, *pad], [26, 0, 0, 0, *pad]],
            [[0, 0, 0, 0, *pad], [23, 24, 25, 0, 11, 12, 0, 0, 0, 0, 0, 0]],
        ],
        "loss_mask": [
            [[0, 0, 0, 0, *pad], [1, 0, 0, 0, *pad]],
            [[0, 0, 0, 0, *pad], [1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]],
        ],
        "position_ids": [
            [[0, 0, 0, 0, *pad], [0, 1, 0, 0, *pad]],
            [[0, 0, 0, 0, *pad], [0, 1, 2, 0, 0, 1, 2, 0, 0, 0, 0, 0]],
        ],
        "source_index": [
            [[1, *[-1] * 11], [2, 2, *[-1] * 10]],
            [[-1] * 12, [2, 2, 2, -1, 0, 0, 0, -1, -1, -1, -1, -1]],
        ],
    }
    assert tensors.cu_seqlens.tolist() == [0, 1, 1, 3, 3, *[0, 0, 3, 6, 6]]
    assert tensors.cu_seqlens_padded.tolist() == [0, 4, 12, 16, 24, *[0, 12, 16, 20, 24]]
    assert tensors.cu_seqlens_stop.tolist() == [5, 10]
    assert tensors.max_seqlen.tolist() == [8, 12]
    assert (tensors.step, tensors.num_tokens_global) == (4, 6)


def test_positions_count_through_the_gaps_of_a_sample_without_boundaries() -> None:
    plan = make_plan(ALIGNED, DOCUMENTS, length=12, places=[(0, 0, 0), (1, 0, 0), (2, 0, 0)])
    packing = Packing(method="best_fit", boundaries="none", align_tokens=4)
    tensors = build_replica(plan, DOCUMENTS, length=12, packing=packing)
    assert expanded(tensors, "position_ids").tolist() == [[[0, 1, 2, 0, 4, 5, 6, 0, 0, 0, 0, 0]]]
    assert tensors.cu_seqlens.tolist() == tensors.cu_seqlens_padded.tolist() == [0, 12]
    assert tensors.max_seqlen.tolist() == [12]


def test_a_document_that_is_cut_by_a_sample_keeps_its_label_across_the_cut() -> None:
    cut = [
        Piece(sample=0, sample_offset=0, source=0, row=7, start=0, tokens=3),
        Piece(sample=0, sample_offset=3, source=2, row=0, start=0, tokens=1),
        Piece(sample=1, sample_offset=0, source=2, row=0, start=1, tokens=4),
        Piece(sample=2, sample_offset=0, source=2, row=0, start=5, tokens=2),
        Piece(sample=2, sample_offset=2, source=1, row=5, start=0, tokens=1),
        Piece(sample=2, sample_offset=3, source=1, row=5, start=0, tokens=1),
    ]
    plan = make_plan(cut, DOCUMENTS, length=4, places=[(0, 0, 0), (0, 0, 1), (0, 0, 2)])
    # concat ignores align_tokens
    packing = Packing(method="concat", boundaries="document", align_tokens=8)
    tensors = build_replica(plan, DOCUMENTS, length=4, packing=packing)
    assert as_lists(tensors) == {
        "tokens": [[[10, 11, 12, 20], [21, 22, 23, 24], [25, 26, 30, 30]]],
        "labels": [[[11, 12, 0, 21], [22, 23, 24, 25], [26, 0, 0, 0]]],
        "loss_mask": [[[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0]]],
        "position_ids": [[[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 0]]],
        "source_index": [[[0, 0, 0, 2], [2, 2, 2, 2], [2, 2, 1, 1]]],
    }
    assert tensors.cu_seqlens.tolist() == [0, 3, 4, 8, 10, 11, 12]
    assert tensors.cu_seqlens_padded.tolist() == [0, 3, 4, 8, 10, 11, 12]
    assert tensors.max_seqlen.tolist() == [4]


def by_loops(plan: StepPlan, documents: Any, replica: int, *, length: int, packing: Packing) -> dict[str, Any]:
    """Every field of a replica, token by token."""
    num_microbatches, micro_batch_size = plan.num_microbatches, plan.layout.micro_batch_size
    shape = (num_microbatches, micro_batch_size, length)
    fields: dict[str, Any] = {
        name: np.zeros(shape, np.int64) for name in ("tokens", "labels", "loss_mask", "position_ids")
    }
    fields["source_index"] = np.full(shape, -1)
    segments: dict[tuple[int, int], list[tuple[int, int]]] = {}
    placement = plan.placement
    for sample in range(plan.num_samples):
        if placement.dp_rank_of_sample[sample] != replica:
            continue
        place = int(placement.microbatch_of_sample[sample]), int(placement.slot_of_sample[sample])
        segments[place] = []
        used = 0
        for i in np.flatnonzero(plan.sample == sample):
            document = documents[int(plan.pieces.source[i]), int(plan.pieces.row[i])]
            start, tokens, offset = int(plan.pieces.start[i]), int(plan.pieces.tokens[i]), int(plan.sample_offset[i])
            for k in range(tokens):
                at = (*place, offset + k)
                has_successor = start + k + 1 < len(document)
                fields["tokens"][at] = document[start + k]
                fields["labels"][at] = document[start + k + 1] if has_successor else 0
                fields["loss_mask"][at] = has_successor
                fields["position_ids"][at] = k if packing.boundaries == "document" else offset + k
                fields["source_index"][at] = plan.pieces.source[i]
            align_tokens = packing.align_tokens if packing.method == "best_fit" else 1
            padded = -(-tokens // align_tokens) * align_tokens
            segments[place].append((tokens, padded))
            used = offset + padded
        if used < length:
            segments[place].append((0, length - used))
        if packing.boundaries == "none":
            segments[place] = [(length, length)]
    for column, name in enumerate(("cu_seqlens", "cu_seqlens_padded")):
        fields[name] = []
        for microbatch in range(num_microbatches):
            sums = [0]
            for slot in range(micro_batch_size):
                for segment in segments[microbatch, slot]:
                    sums.append(sums[-1] + segment[column])
            fields[name].append(sums)
    fields["max_seqlen"] = [
        max(padded for slot in range(micro_batch_size) for _, padded in segments[microbatch, slot])
        for microbatch in range(num_microbatches)
    ]
    return fields


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("boundaries", ["document", "none"])
@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_every_field_equals_a_loop_over_tokens(method: Any, boundaries: Any, micro_batch_size: int) -> None:
    packing = Packing(method=method, boundaries=boundaries, align_tokens=4)
    align_tokens = 4 if method == "best_fit" else 1
    for seed in range(25):
        plan, documents = random_plan(
            seed, is_packed=method == "best_fit", align_tokens=align_tokens, micro_batch_size=micro_batch_size
        )
        loss_tokens = 0
        for replica in range(plan.layout.dp):
            tensors = build_replica(plan, documents, replica, length=48, packing=packing)
            expected = by_loops(plan, documents, replica, length=48, packing=packing)
            for name, values in as_lists(tensors).items():
                assert values == expected[name].tolist(), f"seed {seed}, replica {replica}, {name}"
            microbatches = [tensors.microbatch(index) for index in range(tensors.num_microbatches)]
            assert [m.cu_seqlens.tolist() for m in microbatches] == expected["cu_seqlens"], f"seed {seed}"
            assert [m.cu_seqlens_padded.tolist() for m in microbatches] == expected["cu_seqlens_padded"]
            assert [m.max_seqlen for m in microbatches] == expected["max_seqlen"]
            loss_tokens += int(expanded(tensors, "loss_mask").sum())
        assert loss_tokens == plan.num_tokens_global


def test_pieces_of_all_replicas_are_the_plan_in_the_order_of_consumption() -> None:
    plan, _ = random_plan(3, is_packed=True, align_tokens=8)
    rows = []
    for replica in range(plan.layout.dp):
        pieces = pieces_of_replica(plan, replica)
        assert pieces.num_samples == 6
        places = list(zip(pieces.sample.tolist(), pieces.sample_offset.tolist(), strict=True))
        assert places == sorted(places)
        rows += pieces.row.tolist()
    assert sorted(rows) == sorted(plan.pieces.row.tolist())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_token_ids_may_come_in_any_integer_type(dtype: type) -> None:
    plan = make_plan(ALIGNED, DOCUMENTS, length=12, places=[(0, 0, 0), (0, 0, 1), (0, 0, 2)])
    pieces = pieces_of_replica(plan, 0)
    values = values_of(pieces, DOCUMENTS, length=12, dtype=dtype)
    tensors = build_tensors(pieces, *values, length=12, packing=Packing(method="best_fit", align_tokens=4))
    assert tensors.tokens is not None
    assert tensors.tokens.dtype == torch.int32
    assert tensors.tokens[0, 0].tolist() == [22, 23, 24, 0, 10, 11, 12, 0, 0, 0, 0, 0]


def test_the_types_are_those_that_megatron_expects() -> None:
    plan = make_plan(ALIGNED, DOCUMENTS, length=12, places=[(0, 0, 0), (0, 0, 1), (0, 0, 2)])
    microbatch = build_replica(plan, DOCUMENTS, length=12, packing=Packing(align_tokens=4)).microbatch(0)
    names = (*EXPANDED, "cu_seqlens", "cu_seqlens_padded")
    assert {name: getattr(microbatch, name).dtype for name in names} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
        "source_index": torch.int32,
        "cu_seqlens": torch.int32,
        "cu_seqlens_padded": torch.int32,
    }


def test_what_is_kept_and_sent_has_eight_bytes_a_token_and_twelve_a_span() -> None:
    plan = make_plan(ALIGNED, DOCUMENTS, length=12, places=[(0, 0, 0), (0, 0, 1), (0, 0, 2)])
    tensors = build_replica(plan, DOCUMENTS, length=12, packing=Packing(align_tokens=4)).to_tensors()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "tokens": torch.int32,
        "labels": torch.int32,
        "spans": torch.int32,
        "spans_stop": torch.int64,
        "cu_seqlens": torch.int32,
        "cu_seqlens_padded": torch.int32,
        "cu_seqlens_stop": torch.int64,
        "max_seqlen": torch.int32,
        "counts": torch.int64,
    }


def test_a_label_that_is_not_there_is_one_that_torch_ignores() -> None:
    plan = make_plan(ALIGNED, DOCUMENTS, length=12, places=[(0, 0, 0), (0, 0, 1), (0, 0, 2)])
    tensors = build_replica(plan, DOCUMENTS, length=12, packing=Packing(align_tokens=4))
    assert tensors.labels is not None
    assert tensors.labels[0, 0].tolist() == [23, 24, 25, -100, 11, 12, *[-100] * 6]
    ignored = torch.nn.CrossEntropyLoss().ignore_index
    assert ignored == NO_LOSS


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32, np.int64])
def test_a_value_that_is_no_token_id_is_an_error_and_one_in_padding_is_not(dtype: type) -> None:
    plan = make_plan(ALIGNED, DOCUMENTS, length=12, places=[(0, 0, 0), (0, 0, 1), (0, 0, 2)])
    pieces = pieces_of_replica(plan, 0)
    values, successors = values_of(pieces, DOCUMENTS, length=12, dtype=dtype)
    values.flags.writeable = True
    wrong = np.iinfo(dtype).max if dtype in (np.uint32, np.int64) else -100
    packing = Packing(method="best_fit", align_tokens=4)
    values[7] = wrong
    build(pieces, values, successors, length=12, packing=packing)
    values[5] = wrong
    with pytest.raises(CorruptPage, match=rf"source 'a': row 7 has {wrong} as token 1 of its document"):
        build(pieces, values, successors, length=12, packing=packing)


def test_a_step_that_is_still_held_keeps_its_values_while_others_are_built_in_the_same_memory() -> None:
    packing, memory = Packing(align_tokens=4), StepMemory()

    def step(seed: int) -> StepTensors:
        plan, documents = random_plan(seed, is_packed=True, align_tokens=4)
        pieces = pieces_of_replica(plan, 0)
        return build_tensors(
            pieces, *values_of(pieces, documents, length=48), length=48, packing=packing, memory=memory
        )

    held = step(0).microbatch(1)
    before = as_lists(step(0)), held.tokens.tolist() if held.tokens is not None else []
    for seed in range(1, 6):
        step(seed)
    assert held.tokens is not None
    assert held.tokens.tolist() == before[1]
    assert as_lists(step(0)) == before[0]
