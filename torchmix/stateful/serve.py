"""A step's road from the replica's leader to this rank.

In: on a leader, steps of the whole replica; on a peer, the exchange. Out: steps of this rank's role. Must hold: leaders
compare their plans before any rank can consume the step; a leader ends the exchange when it stops, and a peer hears it
out, so that neither waits for the other; an error of a leader is no end: its peers and the other leaders get it in the
place of the step that is missing. Cost: one exchange per step and role, in the background.

These are generators for a thread of the loader; closing them runs their `finally` there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress

from torch.utils.data import IterableDataset

from torchmix.constructor.context_parallel import cp_slices, share_of
from torchmix.constructor.fields import StepTensors
from torchmix.constructor.memory import StepMemory
from torchmix.errors import RankLost
from torchmix.parallel.fan_out import FanOut, Share
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.recipe.structs import Recipe
from torchmix.steps.header import decode_header


def serve_steps(
    steps: Iterator[StepTensors], *, fan_out: FanOut | None, tree: ClientPlaceTree, recipe: Recipe
) -> Generator[StepTensors, None, None]:
    """On a leader: give each role of the replica its share, and yield the leader's own.

    Raises:
        PlanDiverged: Another leader holds another plan of the same step.
        RankLost: A rank went away, or another leader failed.
    """
    is_at_rest = True  # no exchange is half done
    memory = StepMemory()
    length, packing = recipe.batch.length, recipe.packing
    try:
        for step in steps:
            slices = cp_slices(step, tree.topology.cp, length=length, packing=packing)
            if fan_out is not None:
                header = decode_header(step.header)
                roles = fan_out.roles_to_send
                shares = {role: _message(share_of(step, role, slices, memory=memory)) for role in roles}
                is_at_rest = False
                fan_out.compare(
                    step.step,
                    header.order_digest,
                    header.plan_digest,
                    first_microbatch=header.first_microbatch,
                )
                fan_out.send(shares)
                is_at_rest = True
            yield share_of(step, tree.role, slices, memory=memory)
    except GeneratorExit:
        if fan_out is not None:
            fan_out.send_end()
        raise
    except Exception as error:
        if fan_out is not None and is_at_rest:
            with suppress(RankLost):  # this rank's own error is what to tell
                fan_out.send_failure(error)
        raise
    if fan_out is not None:
        fan_out.send_end()


def _message(share: StepTensors) -> Share:
    return Share(header=share.header, tensors=share.to_tensors())


class ReceivedSteps(IterableDataset[StepTensors]):
    """On a peer: the steps that its leader sends, as a dataset."""

    def __init__(self, fan_out: FanOut) -> None:
        super().__init__()
        self._fan_out = fan_out
        self._ended = False

    def __iter__(self) -> Iterator[StepTensors]:
        self._ended = False
        while (share := self._fan_out.receive()) is not None:
            yield StepTensors.from_tensors(share.tensors, header=share.header)
        self._ended = True

    def hear_out(self) -> None:
        """Discard what the leader still sends, up to its end."""
        if not self._ended:
            self._fan_out.drain()
            self._ended = True
