"""Wait for a step, or for the end of all; say so in the log when it lasts, and notice lost ranks meanwhile.

In: what a thread prepares ahead. Out: its next item, or that it has ended. Must hold: a rank that was lost ends the
wait as a RankLost that names it; nothing is waited for without a word. Cost: one look at a flag per quarter second.
"""

from __future__ import annotations

import logging
import time
from typing import TypeVar

from torchmix.errors import RankLost
from torchmix.parallel.liveness import Liveness
from torchmix.stateful.ahead import Ahead

logger = logging.getLogger(__name__)
Item = TypeVar("Item")

CLOSE_S = 300.0
"""How long the other ranks are waited for, to stop too."""
PATIENCE_S = 30.0
"""How long a step, or the end of one, may be waited for before a line in the log says so."""
_CHECK_S = 0.25


def await_item(items: Ahead[Item], *, who: str, liveness: Liveness | None) -> Item | None:
    """The next item; None at the end.

    Args:
        items: What is prepared.
        who: Text for the log, with one `%.0f` for the seconds waited.
        liveness: Who tells of lost ranks; None in a job of one.

    Raises:
        RankLost: A rank was lost.
        Exception: What the thread that prepares has raised, unless a lost rank explains it.
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
    """End what is prepared, and wait for it.

    Args:
        items: What is prepared.
        rank: This rank, for the log.
        in_job: Whether other ranks must stop too.
        liveness: Who tells of lost ranks; None if nobody does.

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
