"""What a rank needs to stand in another place of the job: its tree, its exchange and its stream of steps.

In: what all layouts of a loader share, a new topology, and the stream that has ended. Out: a `Seating`, from which the
loader goes on. Must hold: what is wrong on one rank is refused on all before any stream ends; all ranks mean the same
topology and step before groups are made; what a leader has read in its own process stays, if it leads again. Cost: that
of making groups, and of planning the next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from torchmix.constructor.context_parallel import check_context_parallel
from torchmix.errors import OptionError, StateError, TopologyError
from torchmix.parallel.agreement import agree, announcing_failures
from torchmix.parallel.fan_out import FanOut, open_fan_out
from torchmix.parallel.layout import Layout
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.modules.broadcast import tree_with_broadcast
from torchmix.parallel.modules.rank_places import check_scopes, layout_of
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import lengths_of, stages_of
from torchmix.recipe.source.resets import sources_with_resets
from torchmix.service.job.open_job import JobUse
from torchmix.stateful.serve import ReceivedSteps
from torchmix.stateful.stream import StepStream
from torchmix.steps.local_steps import HeldReader
from torchmix.steps.state import LoaderState

StreamOfLeader = Callable[[ClientPlaceTree, Layout, HeldReader], StepStream]
"""Makes the stream of a leader; all leaders call it together."""


class Seating(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A rank's place in the job, and where its steps come from."""

    tree: ClientPlaceTree
    layout: Layout
    fan_out: FanOut | None
    stream: StepStream | ReceivedSteps


class Reshard(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a call of `reshard` asks for."""

    topology: Topology | ClientPlaceTree
    at_step: int
    """The step that it begins with."""
    micro_batch_size: int
    """Samples of a microbatch from then on."""
    fan_out: FanOut | None = None
    """The new exchange, where the caller makes it."""


class SharedParts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a loader keeps at every layout."""

    part: Part
    stream_of_leader: StreamOfLeader
    store: Any = None
    """The job's, of torch; None outside of a job."""
    liveness: Liveness | None = None
    started: JobUse | None = None
    """Shared loaders that the job has started; left with the loader."""
    run: str = ""
    """What `torchmix top` calls the job; empty: it does not show it."""

    def seat(self, tree: ClientPlaceTree, layout: Layout, fan_out: FanOut | None, held: HeldReader) -> Seating:
        """This rank's place. A collective of all leaders."""
        stream: StepStream | ReceivedSteps
        if tree.is_leader:
            stream = self.stream_of_leader(tree, layout, held)
        else:
            assert fan_out is not None, "peers have a leader"
            held.close()
            stream = ReceivedSteps(fan_out, self.part)
        return Seating(tree=tree, layout=layout, fan_out=fan_out, stream=stream)

    def leave(self) -> None:
        """The loader closes."""
        if self.started is not None:
            self.started.leave()


def places_of(
    topology: Topology | ClientPlaceTree, micro_batch_size: int, part: Part
) -> tuple[ClientPlaceTree, Layout]:
    """The tree and the layout of a topology.

    Raises:
        TopologyError: Sizes do not divide, or `align_tokens` does not suit cp.
    """
    tree = topology if isinstance(topology, ClientPlaceTree) else ClientPlaceTree.from_topology(topology)
    tree = tree_with_broadcast(tree, part.balance.broadcast_at)
    layout = layout_of(tree, micro_batch_size=micro_batch_size, broadcast_at=part.balance.broadcast_at)
    check_scopes(part.modules, tree)
    for stage in stages_of(part.batch):
        layout.num_microbatches(stage.samples)
    for length in lengths_of(part.batch):
        check_context_parallel(
            tree.topology.cp,
            length=length,
            packing=part.packing,
            resetting=list(sources_with_resets(part.sources)),
        )
    return tree, layout


def facts_of_places(tree: ClientPlaceTree) -> dict[str, str]:
    """What all ranks must mean alike of their places."""
    sizes = tree.topology
    places = repr((tree.leader_of_rank, tree.replica_of_rank, tree.role_of_rank))
    return {
        "topology": f"tp {sizes.tp} x cp {sizes.cp} x pp {sizes.pp} x dp {sizes.dp}",
        "leaders, replicas and roles": hashlib.sha256(places.encode()).hexdigest()[:16],
    }


def at_layout(state: LoaderState, layout: Layout) -> LoaderState:
    """A state that is checked, as one of this layout."""
    return msgspec.structs.replace(state, dp=layout.dp, micro_batch_size=layout.micro_batch_size)


def agreed_places(
    shared: SharedParts, now: ClientPlaceTree, asked: Reshard, state: LoaderState
) -> tuple[ClientPlaceTree, Layout]:
    """Check what a reshard is asked for, on all ranks. A collective.

    Args:
        shared: Of the loader.
        now: The tree so far.
        asked: By the caller.
        state: Of the loader.

    Raises:
        OptionError, TopologyError, StateError: As `StatefulDataLoader.reshard` says.
        RecipeError: Another rank means something else.
        RankLost: Another rank is lost, or has failed here.
    """
    topology, at_step, fan_out = asked.topology, asked.at_step, asked.fan_out
    rank = now.topology.rank
    with announcing_failures(shared.store, rank=rank):
        if not isinstance(topology, Topology | ClientPlaceTree):
            raise OptionError(
                f"reshard: topology={topology!r} must be a torchmix.Topology or a torchmix.ClientPlaceTree"
            )
        if shared.part.dynamic is not None:
            raise OptionError("reshard: the recipe has a policy, whose groups are of this layout; resume instead")
        tree, layout = places_of(topology, asked.micro_batch_size, shared.part)
        if (tree.topology.world_size, tree.topology.rank) != (now.topology.world_size, rank):
            raise TopologyError(
                f"reshard: this is rank {rank} of {now.topology.world_size}, the topology is of rank "
                f"{tree.topology.rank} of {tree.topology.world_size}; a job of other ranks starts again from the state"
            )
        if state.microbatch or state.step != at_step:
            raise StateError(
                f"reshard: at_step={at_step}, and this loader is at step {state.step}, microbatch {state.microbatch}; "
                "call it on all ranks after the last microbatch of the step before"
            )
        if fan_out is None and shared.liveness is None and tree.topology.world_size > 1:
            raise OptionError("reshard: this loader was built with a fan_out of the caller's; give a new one")
    if shared.liveness is not None and fan_out is None:
        facts = {**facts_of_places(tree), "at_step": str(at_step), "micro_batch_size": str(asked.micro_batch_size)}
        agree(
            shared.store,
            rank=rank,
            world_size=tree.topology.world_size,
            facts=facts,
            check=shared.liveness.check,
            what="reshard",
        )
    return tree, layout


def reseat(
    shared: SharedParts,
    old: StepStream | ReceivedSteps,
    tree: ClientPlaceTree,
    layout: Layout,
    old_fan_out: FanOut | None,
    fan_out: FanOut | None,
    *,
    stop: Callable[[], None],
) -> Seating:
    """End the old stream by `stop`, and open the new exchange and stream. A collective; a failure ends the job."""
    try:
        old.keep_reader()
        stop()
        if old_fan_out is not None:
            old_fan_out.close()
        held = old.hand_over() if isinstance(old, StepStream) else HeldReader()
        if fan_out is None and tree.topology.world_size > 1:
            fan_out = open_fan_out(tree, pin=torch.cuda.is_available())
        return shared.seat(tree, layout, fan_out, held)
    except BaseException as error:
        if shared.liveness is not None:
            shared.liveness.post_abort(error)
        raise
