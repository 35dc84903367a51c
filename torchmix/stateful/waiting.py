"""Wait for a step, or for the end of the stream; log long waits, and notice lost ranks meanwhile.

In: the items that a thread prepares ahead. Out: the next item, or the end. Must hold: a lost rank ends the wait with a
RankLost that names it; every long wait is logged. Cost: one check of a flag per quarter second.
"""

from __future__ import annotations

import logging
import time
from typing import TypeVar

from torchmix.errors import RankLost
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.stateful.ahead import Ahead

logger = logging.getLogger(__name__)
Item = TypeVar("Item")

CLOSE_S = 300.0
"""Seconds to wait for the other ranks to stop too."""
PATIENCE_S = 30.0
"""Seconds of waiting for a step, or for its end, before a line in the log."""
_CHECK_S = 0.25


def who_waits(tree: ClientPlaceTree, step: int) -> str:
    """Who waits for a step, from whom; with a place for the seconds."""
    rank = tree.topology.rank
    giver = "its own reader" if tree.is_leader else f"its leader, rank {tree.leader_of(rank)}"
    return f"rank {rank} has waited %.0f s for step {step} from {giver}"


def await_item(items: Ahead[Item], *, who: str, liveness: Liveness | None) -> Item | None:
    """The next item; None at the end.

    Args:
        items: The items that a thread prepares.
        who: Text for the log, with one `%.0f` for the seconds waited.
        liveness: Reports lost ranks; None in a job of one rank.

    Raises:
        RankLost: A rank was lost.
        Exception: The error of the preparing thread, unless a lost rank explains it.
    """
    waited_since = time.monotonic()
    while True:
        if liveness is not None:
            liveness.check()
        try:
            return items.take(_CHECK_S)
        except TimeoutError:
            if time.monotonic() - waited_since > PATIENCE_S:
                waited_since = time.monotonic()
                logger.warning(who, PATIENCE_S)
        except StopIteration:
            return None
        except Exception as error:
            cause = error if liveness is None else liveness.explain(error)
            if cause is error:
                raise
            raise cause from error


def await_end(items: Ahead[Item], *, rank: int, in_job: bool, liveness: Liveness | None) -> None:
    """End the preparing thread, and wait for its end.

    Args:
        items: The items that the thread prepares.
        rank: This rank, for the log.
        in_job: Whether other ranks must stop too.
        liveness: Reports lost ranks; None if nothing does.

    Raises:
        RankLost: A rank was lost, or the others did not stop within `CLOSE_S`.
    """
    waited_s = 0.0
    while not items.close(PATIENCE_S):
        waited_s += PATIENCE_S
        if not in_job:
            logger.warning("rank %d has waited %.0f s for the step that is being read, to stop", rank, waited_s)
            continue
        text = (
            f"rank {rank} has waited {waited_s:.0f} s for the others, to stop: all ranks must call close() or "
            f"load_state_dict() at the same microbatch"
        )
        if waited_s >= CLOSE_S:
            raise RankLost(text)
        logger.warning("%s", text)
        if liveness is not None:
            liveness.check()
