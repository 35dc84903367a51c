"""The feed: all processing of a step before the trainer asks for it, in a thread of its own.

In: torch's loader over the stream. On a leader the stream makes steps here or in a worker; on a peer it gives the steps
that the leader sends. Out: steps of this rank's role, pinned where CUDA is present. Must hold: closing the feed, in the
thread that ran it, ends the exchange and then the stream with its worker; the feed holds no reference to the loader, so
an unused loader can be collected. Cost: pinning copies a step once.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch

from torchmix.constructor.fields import StepTensors
from torchmix.parallel.fan_out import FanOut
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.recipe.parts import Part
from torchmix.stateful.ahead import Ahead
from torchmix.stateful.serve import ReceivedSteps, serve_steps
from torchmix.stateful.stream import StepStream
from torchmix.stateful.waiting import PATIENCE_S


def feed_of_rank(
    start: Callable[[], Iterator[StepTensors]],
    stream: StepStream | ReceivedSteps,
    *,
    fan_out: FanOut | None,
    tree: ClientPlaceTree,
    part: Part,
    bad_tokens: Mapping[str, int],
) -> Generator[StepTensors, None, None]:
    """Steps of this rank's role.

    Args:
        start: Makes torch's iterator over the stream; called once, in the thread that asks for the first step.
        stream: What that iterator reads: `StepStream` on a leader, `ReceivedSteps` on a peer.
        fan_out: The exchange with the other ranks; None in a job of one rank.
        tree: The job's place tree, seen from this rank.
        part: The part of the recipe that is read.
        bad_tokens: Tokens of each source that could not be read before the first step.
    """
    whole = start()
    del start  # it holds the loader
    is_leader = isinstance(stream, StepStream)
    served = None
    if is_leader:
        served = serve_steps(whole, fan_out=fan_out, tree=tree, part=part, bad_tokens=bad_tokens)
    pin = torch.cuda.is_available()
    try:
        for step in whole if served is None else served:
            yield _pinned(step) if pin else step
    except GeneratorExit:
        if isinstance(stream, ReceivedSteps):
            stream.hear_out()
        raise
    finally:
        if served is not None:
            served.close()  # ends the exchange
        if isinstance(stream, StepStream):
            stream.close()


def _pinned(step: StepTensors) -> StepTensors:
    pinned = {name: tensor.pin_memory() for name, tensor in step.to_tensors().items()}
    return StepTensors.from_tensors(pinned, header=step.header)


def end_feed(feed: Ahead[StepTensors]) -> bool:
    """Ask a feed to end; returns whether it has ended."""
    atexit.unregister(feed.close)
    return feed.close(0.0)


def end_with(owner: object, feed: Ahead[StepTensors], *, is_waited_for: bool) -> weakref.finalize[..., Any]:
    """End a feed when its owner is collected, if nobody has closed it; `detach` what this returns to prevent that.

    The thread that collects the owner must not wait, except at the interpreter's exit: a thread that still runs there
    may abort the process. In a larger job liveness informs the other ranks.
    """
    last_resort = weakref.finalize(owner, _abandon, feed, is_waited_for=is_waited_for)
    last_resort.atexit = False
    if is_waited_for:
        atexit.register(feed.close, PATIENCE_S)
    return last_resort


def _abandon(feed: Ahead[StepTensors], *, is_waited_for: bool) -> None:
    """End the feed of a loader that was collected, possibly during the interpreter's exit."""
    if not end_feed(feed) and is_waited_for:
        atexit.register(feed.close, PATIENCE_S)
