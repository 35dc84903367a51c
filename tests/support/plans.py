"""Step plans for tests of what comes after planning: legal ones, drawn at random or written out, without a planner.

A plan's documents are lists of token ids, so a test can say from them alone what every tensor must hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchmix.constructor.build import BlockPieces, build
from torchmix.constructor.fields import StepTensors
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import BalanceReport, Placement
from torchmix.planner.pack import Pieces
from torchmix.planner.plan import ModulePlan, StepPlan
from torchmix.recipe.modules import BACKBONE

EXPANDED = ("tokens", "labels", "loss_mask", "position_ids", "source_index")
"""What a microbatch makes of what it holds, a value per token."""

Documents = Mapping[tuple[int, int], Sequence[int]]
"""Token ids by (source, row)."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One row of a plan."""

    sample: int
    sample_offset: int
    source: int
    row: int
    start: int
    tokens: int


def make_plan(
    pieces: Sequence[Piece],
    documents: Documents,
    *,
    length: int,
    places: Sequence[tuple[int, int, int]],
    step: int = 0,
) -> StepPlan:
    """A plan of pieces sorted by (sample, sample_offset); `places` is (dp_rank, microbatch, slot) of each sample."""
    columns = {name: np.array([getattr(piece, name) for piece in pieces], np.int64) for name in Piece.__annotations__}
    document_tokens = np.array([len(documents[piece.source, piece.row]) for piece in pieces], np.int64)
    ends_document = columns["start"] + columns["tokens"] == document_tokens
    dp_rank, microbatch, slot = (np.array(column, np.int64) for column in zip(*places, strict=True))
    first_of_sample = np.searchsorted(columns["sample"], columns["sample"])
    none = np.zeros(1, np.int64)
    module = ModulePlan(
        layout=Layout(dp=int(dp_rank.max()) + 1, micro_batch_size=int(slot.max()) + 1),
        placement=Placement(dp_rank_of_sample=dp_rank, microbatch_of_sample=microbatch, slot_of_sample=slot),
        balance=BalanceReport(cost=1, hash_order_cost=1, lower_bound=1),
    )
    return StepPlan(
        step=step,
        streams=("a", "b", "c"),
        sources=("a", "b", "c"),
        pieces=Pieces(
            stream=columns["source"],
            source=columns["source"],
            epoch=np.zeros_like(columns["row"]),
            row=columns["row"],
            start=columns["start"],
            tokens=columns["tokens"],
            drawn_step=np.zeros_like(columns["row"]),
            document_tokens=document_tokens,
        ),
        sample=columns["sample"],
        slot=np.arange(len(pieces)) - first_of_sample,
        sample_offset=columns["sample_offset"],
        modules={BACKBONE: module},
        length=length,
        capacity_tokens=len(places) * length,
        asked_tokens=none,
        drawn_tokens=none,
        delivered_tokens=none,
        pool_tokens=none,
        num_tokens_global=int(columns["tokens"].sum() - ends_document.sum()),
        order_digest=bytes(8),
        plan_digest=bytes(8),
    )


def random_plan(
    seed: int,
    *,
    is_packed: bool,
    align_tokens: int,
    length: int = 48,
    dp: int = 2,
    num_microbatches: int = 3,
    micro_batch_size: int = 2,
) -> tuple[StepPlan, dict[tuple[int, int], list[int]]]:
    """A random plan and its documents.

    With `is_packed` samples have padding (some have no piece), else pieces fill them without a gap. Pieces begin and
    end anywhere in their documents.
    """
    rng = np.random.default_rng(seed)
    num_samples = dp * num_microbatches * micro_batch_size
    pieces, documents = [], {}
    for sample in range(num_samples):
        stop = int(rng.integers(0, length + 1)) if is_packed else length
        offset = 0
        while offset < stop:
            tokens = int(min(rng.integers(1, 20), stop - offset))
            before, after = (int(rng.integers(0, 3)) if rng.random() < 0.5 else 0 for _ in range(2))
            place = (int(rng.integers(0, 3)), len(documents))
            documents[place] = rng.integers(0, 60_000, before + tokens + after).tolist()
            pieces.append(
                Piece(sample=sample, sample_offset=offset, source=place[0], row=place[1], start=before, tokens=tokens)
            )
            offset += -(-tokens // align_tokens) * align_tokens
    places = [
        (rank, microbatch, slot)
        for rank in range(dp)
        for microbatch in range(num_microbatches)
        for slot in range(micro_batch_size)
    ]
    shuffled = [places[i] for i in rng.permutation(num_samples)]
    return make_plan(pieces, documents, length=length, places=shuffled, step=seed), documents


def values_of(
    pieces: BlockPieces, documents: Documents, *, length: int, dtype: type = np.int32
) -> tuple[np.ndarray, np.ndarray]:
    """What a reader gives for the pieces: their tokens in place, with rubbish between, and the successors."""
    values = np.full(pieces.num_samples * length, 99, dtype)
    successors = np.zeros(len(pieces.row), np.int64)
    columns = (pieces.source, pieces.row, pieces.start, pieces.tokens, pieces.places(length))
    for i, (source, row, start, tokens, place) in enumerate(zip(*columns, strict=True)):
        document = [*documents[int(source), int(row)], 98]
        values[place : place + tokens] = document[start : start + tokens]
        successors[i] = document[start + tokens]
    values.flags.writeable = False
    return values, successors


def build_tensors(*arguments: Any, **options: Any) -> StepTensors:
    """`build`, as the trainer sees its arrays."""
    return StepTensors.from_arrays(build(*arguments, **options))


def expanded(step: StepTensors, name: str) -> torch.Tensor:
    """A field of `EXPANDED` of all microbatches, [M, B, T]."""
    return torch.stack([getattr(microbatch, name) for microbatch in step.microbatches()])
