"""Ids that end a document inside a row, against a loop over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.plans import Piece, build_tensors, expanded, make_plan, random_plan, values_of
from torchmix.constructor.build import build, pieces_of_replica
from torchmix.constructor.spans import NO_RESET, cut_pieces, find_resets
from torchmix.planner.plan import StepPlan
from torchmix.recipe.structs import Packing

LENGTH = 48
RESET_IDS = np.array([2, NO_RESET, 3])
"""Sources a and c have values; b has none."""


def small_vocabulary(documents: Any) -> dict[tuple[int, int], list[int]]:
    """The same documents over five ids, so that every few tokens end one."""
    return {place: [token % 5 for token in document] for place, document in documents.items()}


def by_loops(plan: StepPlan, documents: Any, replica: int, packing: Packing) -> dict[str, Any]:
    """Labels, positions and segments of a replica, token by token."""
    shape = (plan.num_microbatches, plan.layout.micro_batch_size, LENGTH)
    labels, positions = np.full(shape, -100), np.zeros(shape, np.int64)
    segments: dict[tuple[int, int], list[tuple[int, int]]] = {}
    placement, masked = plan.placement, 0
    by_document = (packing.positions or packing.boundaries) == "document"
    for sample in np.flatnonzero(placement.dp_rank_of_sample == replica).tolist():
        place = int(placement.microbatch_of_sample[sample]), int(placement.slot_of_sample[sample])
        segments[place], used = [], 0
        for i in np.flatnonzero(plan.sample == sample).tolist():
            source = int(plan.pieces.source[i])
            document = documents[source, int(plan.pieces.row[i])]
            start, tokens, offset = int(plan.pieces.start[i]), int(plan.pieces.tokens[i]), int(plan.sample_offset[i])
            since, lengths = 0, [0]
            for k in range(tokens):
                at = (*place, offset + k)
                token, is_last = document[start + k], start + k + 1 == len(document)
                ends = token == RESET_IDS[source]
                if not is_last and not (ends and packing.reset_loss == "mask"):
                    labels[at] = document[start + k + 1]
                masked += bool(not is_last and ends and packing.reset_loss == "mask")
                positions[at] = since if by_document else offset + k
                since, lengths[-1] = since + 1, lengths[-1] + 1
                if ends and k + 1 < tokens:
                    since = 0
                    lengths.append(0)
            align_tokens = packing.align_tokens if packing.method == "best_fit" else 1
            padding = -tokens % align_tokens
            segments[place] += [(length, length) for length in lengths[:-1]]
            segments[place].append((lengths[-1], lengths[-1] + padding))
            used = offset + tokens + padding
        if used < LENGTH:
            segments[place].append((0, LENGTH - used))
        if packing.boundaries == "none":
            segments[place] = [(LENGTH, LENGTH)]
    sums: dict[str, list[list[int]]] = {"cu_seqlens": [], "cu_seqlens_padded": []}
    longest = []
    for microbatch in range(plan.num_microbatches):
        of_microbatch = [pair for slot in range(plan.layout.micro_batch_size) for pair in segments[microbatch, slot]]
        for column, name in enumerate(sums):
            sums[name].append([0, *np.cumsum([pair[column] for pair in of_microbatch]).tolist()])
        longest.append(max(padded for _, padded in of_microbatch))
    return {"labels": labels, "position_ids": positions, "max_seqlen": longest, "masked": masked, **sums}


@pytest.mark.slow
@pytest.mark.parametrize("reset_loss", ["mask", "keep"])
@pytest.mark.parametrize("positions", [None, "document", "sample"])
@pytest.mark.parametrize("boundaries", ["document", "none"])
@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_every_switch_resets_what_a_loop_over_tokens_resets(
    method: Any, boundaries: Any, positions: Any, reset_loss: Any
) -> None:
    packing = Packing(method=method, boundaries=boundaries, positions=positions, reset_loss=reset_loss, align_tokens=4)
    for seed in range(8):
        is_packed = method == "best_fit"
        plan, documents = random_plan(seed, is_packed=is_packed, align_tokens=4 if is_packed else 1)
        documents, loss_tokens, masked = small_vocabulary(documents), 0, 0
        for replica in range(plan.layout.dp):
            pieces = pieces_of_replica(plan, replica)
            values = values_of(pieces, documents, length=LENGTH)
            arrays = build(pieces, *values, length=LENGTH, packing=packing, reset_ids=RESET_IDS)
            tensors = build_tensors(pieces, *values, length=LENGTH, packing=packing, reset_ids=RESET_IDS)
            wanted = by_loops(plan, documents, replica, packing)
            assert arrays.fields["labels"].tolist() == wanted["labels"].tolist(), f"seed {seed}"
            assert expanded(tensors, "position_ids").tolist() == wanted["position_ids"].tolist(), f"seed {seed}"
            for name in ("cu_seqlens", "cu_seqlens_padded"):
                assert [getattr(m, name).tolist() for m in tensors.microbatches()] == wanted[name], f"seed {seed}"
            assert tensors.max_seqlen.tolist() == wanted["max_seqlen"]
            assert arrays.num_masked_tokens == wanted["masked"]
            masked += wanted["masked"]
            loss_tokens += int(expanded(tensors, "loss_mask").sum())
        assert masked > 0 or reset_loss == "keep"
        assert loss_tokens == plan.num_tokens_global - masked


def test_a_page_of_nothing_but_resets_is_a_segment_a_token() -> None:
    start, tokens = np.array([0, 4]), np.array([3, 4])
    values = np.full(8, 7, np.uint16)
    resets = find_resets([values], start, tokens, np.array([7, 7]))
    assert resets.tolist() == [0, 1, 2, 4, 5, 6, 7]
    parts = cut_pieces(start, tokens, np.array([4, 4]), resets)
    assert parts.piece.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert parts.start.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert parts.tokens.tolist() == [1] * 7
    assert parts.padded_tokens.tolist() == [1, 1, 2, 1, 1, 1, 1]


def test_an_id_that_the_type_of_the_values_cannot_hold_is_nowhere() -> None:
    start, tokens = np.array([0]), np.array([3])
    assert not len(find_resets([np.full(3, 255, np.uint8)], start, tokens, np.array([70_000])))


def test_a_piece_that_could_not_be_read_has_no_resets_in_it() -> None:
    documents = {(0, 7): [2, 2, 2, 2, 2, 9], (2, 0): [3, 3, 9, 9]}
    plan = make_plan(
        [
            Piece(sample=0, sample_offset=0, source=0, row=7, start=0, tokens=5),
            Piece(sample=0, sample_offset=8, source=2, row=0, start=0, tokens=4),
        ],
        documents,
        length=16,
        places=[(0, 0, 0)],
    )
    pieces = pieces_of_replica(plan, 0)
    values, successors = values_of(pieces, documents, length=16)
    values.flags.writeable = True
    values[3] = -1
    arrays = build(
        pieces, values, successors, length=16, packing=Packing(), reset_ids=RESET_IDS, masked={plan.sources[0]}
    )
    assert arrays.fields["cu_seqlens"].tolist() == [0, 5, 6, 7, 9]
    assert arrays.fields["labels"].ravel().tolist() == [*[-100] * 8, -100, -100, 9, -100, *[-100] * 4]
    assert arrays.num_masked_tokens == 5 + 2
