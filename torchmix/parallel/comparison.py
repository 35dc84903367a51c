"""What leaders tell each other of a step, before any rank has it.

In: the plan of a step as a leader has it, and what that leader could not read of its part. Out: seven integers, of
which all leaders get each other's, and what follows from them. Must hold: it follows for all leaders alike. Where one
of them could not read something, all gather once more, as many integers as there are sources. Cost: 56 bytes a leader.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanDiverged

GOES_ON, ENDS, FAILED = 0, 1, 2
"""What becomes of a leader's stream."""
_PLAN_WORDS = 4
_STATUS, _MASKED, _SOURCES = 4, 5, 6
_WORDS = 7


class Masked(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What reading took away from a step: of one replica, or of all."""

    num_tokens: int = 0
    """Tokens that the plan counts in the loss, and that have none."""
    bad_tokens: Int64Array | None = None
    """[S] tokens of each source that could not be read; None if all could."""


def words_of_plan(
    step: int, order_digest: bytes, plan_digest: bytes, first_microbatch: int, masked: Masked
) -> Int64Array:
    """The integers of a leader that has a step."""
    num_sources = 0 if masked.bad_tokens is None else len(masked.bad_tokens)
    digests = (int.from_bytes(order_digest, "big"), int.from_bytes(plan_digest, "big"))
    words = (step, *digests, first_microbatch, GOES_ON, masked.num_tokens, num_sources)
    return np.array(words, np.uint64).view(np.int64)


def words_of_status(status: int) -> Int64Array:
    """The integers of a leader that has no step."""
    words = np.zeros(_WORDS, np.int64)
    words[_STATUS] = status
    return words


def statuses(rows: Int64Array) -> Int64Array:
    """What becomes of the stream of each leader; `rows` are the words of all, in one order."""
    found: Int64Array = rows[:, _STATUS]
    return found


def check_plans(rows: Int64Array, ranks: Sequence[int], rank: int) -> None:
    """Compare the plans of all leaders that have one.

    Args:
        rows: The words of all leaders, in the order of `ranks`.
        ranks: Their global ranks.
        rank: The one that asks.

    Raises:
        PlanDiverged: They differ; the message has both values.
    """
    mine = rows[list(ranks).index(rank)]
    for other, row in zip(ranks, rows, strict=True):
        if row[_STATUS] == GOES_ON and (row != mine)[:_PLAN_WORDS].any():
            raise _diverged(rank, mine, other, row)


def num_masked_tokens(rows: Int64Array) -> int:
    """Tokens of all replicas that have no loss because of reading."""
    return int(rows[:, _MASKED].sum())


def sources_to_gather(rows: Int64Array) -> int:
    """How many integers leaders gather next, because one of them could not read something; 0: nothing."""
    going_on = rows[rows[:, _STATUS] == GOES_ON]
    is_over = (rows[:, _STATUS] == FAILED).any() or not len(going_on)
    if is_over or (going_on[:, :_PLAN_WORDS] != going_on[0, :_PLAN_WORDS]).any():
        return 0
    return int(going_on[:, _SOURCES].max())


def _diverged(rank: int, words: Int64Array, other: int, others: Int64Array) -> PlanDiverged:
    mine, theirs = (
        f"rank {who} step {step}, order digest {order:016x}, plan digest {plan:016x}, from microbatch {first}"
        for who, (step, order, plan, first) in (
            (rank, words.view(np.uint64)[:_PLAN_WORDS].tolist()),
            (other, others.view(np.uint64)[:_PLAN_WORDS].tolist()),
        )
    )
    return PlanDiverged(
        f"leaders planned differently: {mine}; {theirs}. Give all ranks the same recipe, catalog, state and version of "
        "torchmix"
    )
