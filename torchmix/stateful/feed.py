"""The feed: all processing of a step before the trainer asks for it, in a thread of its own."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchmix.constructor.fields import BlockTensors, StepTensors
from torchmix.errors import RankLost
from torchmix.parallel.fan_out import FanOut
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.recipe.parts import Part
from torchmix.stateful.serve import ReceivedSteps, serve_steps
from torchmix.stateful.stream import StepStream
from torchmix.steps.ahead import Ahead

Item = TypeVar("Item")

# --- Wait for a step, or for the end of the stream; log long waits, and notice lost ranks meanwhile.
#
# A lost rank ends the wait with a RankLost that names it; every long wait is logged. Cost: one check of a flag per
# quarter second.

logger = logging.getLogger(__name__)


CLOSE_S = 300.0
"""Seconds to wait for the other ranks to stop too."""
LET_GO_S = 5.0
"""The same for those whom this rank leaves to go on among others: they need not leave, too."""
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


def await_end(items: Ahead[Item], *, rank: int, in_job: bool, liveness: Liveness | None, limit_s: float) -> None:
    """End the preparing thread, and wait for its end.

    Args:
        items: The items that the thread prepares.
        rank: This rank, for the log.
        in_job: Whether other ranks must stop too.
        liveness: Reports lost ranks; None if nothing does.
        limit_s: How long the others may take.

    Raises:
        RankLost: A rank was lost, or the others did not stop within `limit_s`.
    """
    began_s, told_s = time.monotonic(), 0.0
    while not items.close(_CHECK_S):
        if liveness is not None:
            liveness.check()
        waited_s = time.monotonic() - began_s
        if waited_s < min(told_s + PATIENCE_S, limit_s):
            continue
        told_s = waited_s
        if not in_job:
            logger.warning("rank %d has waited %.0f s for the step that is being read, to stop", rank, waited_s)
            continue
        text = (
            f"rank {rank} has waited {waited_s:.0f} s for the others, to stop: all ranks must call close() or "
            f"load_state_dict() at the same microbatch"
        )
        if waited_s >= limit_s:
            raise RankLost(text)
        logger.warning("%s", text)


# --- The feed: all processing of a step before the trainer asks for it, in a thread of its own.
#
# Closing the feed, in the thread that ran it, ends the exchange and then the stream with its worker; the feed holds no
# reference to the loader, so an unused loader can be collected. Cost: pinning copies a step once.


def feed_of_rank(
    start: Callable[[], Iterator[Any]],
    stream: StepStream | ReceivedSteps,
    *,
    fan_out: FanOut | None,
    tree: ClientPlaceTree,
    part: Part,
    directory: Path,
    bad_tokens: Mapping[str, int],
    check_ranks: Callable[[], None] | None = None,
) -> Generator[BlockTensors, None, None]:
    """Steps of this rank's role, in blocks.

    Args:
        start: Makes torch's iterator over the stream; called once, in the thread that asks for the first step.
        stream: What that iterator reads: `StepStream` on a leader, `ReceivedSteps` on a peer.
        fan_out: The exchange with the other ranks; None in a job of one rank.
        tree: The job's place tree, seen from this rank.
        part: The part of the recipe that is read.
        directory: The recipe's folder.
        bad_tokens: Tokens of each source that could not be read before the first step.
        check_ranks: Raises a RankLost once a rank is known to be lost; None: nothing watches.
    """
    whole = start()
    del start  # it holds the loader
    is_leader = isinstance(stream, StepStream)
    served = None
    if is_leader:
        served = serve_steps(
            whole,
            fan_out=fan_out,
            tree=tree,
            part=part,
            directory=directory,
            bad_tokens=bad_tokens,
            check_ranks=check_ranks,
        )
    pin = torch.cuda.is_available()
    try:
        for item in whole if served is None else served:
            block = BlockTensors.of(item) if isinstance(item, StepTensors) else item
            yield block.pinned() if pin else block
    except GeneratorExit:
        if isinstance(stream, ReceivedSteps):
            stream.hear_out()
        raise
    finally:
        if served is not None:
            served.close()  # ends the exchange
        if isinstance(stream, StepStream):
            stream.close()


def end_feed(feed: Ahead[BlockTensors]) -> bool:
    """Ask a feed to end; returns whether it has ended."""
    atexit.unregister(feed.close)
    return feed.close(0.0)


def end_with(owner: object, feed: Ahead[BlockTensors], *, is_waited_for: bool) -> weakref.finalize[..., Any]:
    """End a feed when its owner is collected, if nobody has closed it; `detach` what this returns to prevent that.

    The thread that collects the owner must not wait, except at the interpreter's exit: a thread that still runs there
    may abort the process. In a larger job liveness informs the other ranks.
    """
    last_resort = weakref.finalize(owner, _abandon, feed, is_waited_for=is_waited_for)
    last_resort.atexit = False
    if is_waited_for:
        atexit.register(feed.close, PATIENCE_S)
    return last_resort


def _abandon(feed: Ahead[BlockTensors], *, is_waited_for: bool) -> None:
    """End the feed of a loader that was collected, possibly during the interpreter's exit."""
    if not end_feed(feed) and is_waited_for:
        atexit.register(feed.close, PATIENCE_S)
