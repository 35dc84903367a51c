"""The path of a step from the replica's leader to this rank, and what another place of the rank needs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from msgspec.structs import replace
from torch.utils.data import IterableDataset

from torchmix.constructor.arrays import StepFacts, StepMemory
from torchmix.constructor.fields import (
    BlockTensors,
    StepTensors,
    batch_of_role,
    cp_slices,
    modules_by_sharing,
    tensors_for_ranks,
)
from torchmix.errors import OptionError, RankLost, StateError, TooManyBadRows, TopologyError, TorchmixError
from torchmix.parallel.agreement import MOST_COMPARED, Given, Masked, ToCompare, agree, announcing_failures
from torchmix.parallel.fan_out import FanOut, RoleBatch, open_fan_out
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.place_tree import (
    ClientPlaceTree,
    Layout,
    Role,
    places_in_replica,
)
from torchmix.parallel.topology import Topology
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step
from torchmix.service.open_job import JobUse
from torchmix.stateful.arguments import check_topology, facts_of_places, places_of
from torchmix.stateful.reports import Reports
from torchmix.stateful.stream import StepStream
from torchmix.steps.bad_tokens import BadTokens, masked_of
from torchmix.steps.edits import RowFacts
from torchmix.steps.header import StepHeader, decode_header, encode_header
from torchmix.steps.local_steps import HeldReader
from torchmix.steps.module_items import CONTENT, RankDecoder
from torchmix.steps.replica_steps import StreamOptions
from torchmix.steps.state import LoaderState

# --- The path of a step from the replica's leader to this rank.
#
# Leaders compare their plans, and sum the tokens that they could not read, before any rank can consume the step; a
# leader ends the exchange when it stops, and a peer receives up to that end, so that neither waits for the other; an
# error of a leader is no end: its peers and the other leaders get the error in the place of the missing step. Cost:
# one exchange per step and role, in the background.
#
# These are generators for a thread of the loader; closing them runs their `finally` in that thread.


def serve_steps(
    blocks: Iterator[BlockTensors],
    *,
    fan_out: FanOut | None,
    tree: ClientPlaceTree,
    part: Part,
    directory: Path,
    bad_tokens: Mapping[str, int],
    check_ranks: Callable[[], None] | None = None,
) -> Generator[BlockTensors, None, None]:
    """On a leader: give each role of the replica its batch, and yield the leader's own.

    Where a rank is alone, blocks pass as they are. Where it serves no other rank and takes whole samples, so do the
    fields of its role, once all leaders have compared their steps; others get steps one by one.

    Args:
        blocks: Steps of this leader's replica.
        fan_out: The exchange with the other ranks; None in a job of one rank.
        tree: The job's place tree, seen from this rank.
        part: The part of the recipe that is read.
        directory: The recipe's folder.
        bad_tokens: Tokens of each source that could not be read before the first of these steps.
        check_ranks: Raises a RankLost once a rank is known to be lost; None: nothing watches.

    Raises:
        PlanDiverged: Another leader has another plan for the same step.
        RankLost: A rank was lost, or another leader failed.
        TooManyBadRows: All replicas together could not read more of a source than its `max_bad` allows.
    """
    counts = BadTokens(bad_tokens)
    is_at_rest = True  # no exchange is half done
    memory = StepMemory()
    packing, decoder = part.packing, RankDecoder(part, directory)
    cp = 1 if part.balance.broadcast_at == "CP" else tree.topology.cp  # else the trainer cuts
    has_peers = fan_out is not None and bool(fan_out.roles_to_send)
    try:
        for block in blocks:
            if fan_out is None:
                yield from _settled_block(block, counts, tree, decoder)
                continue
            if not has_peers and cp == 1 and block.is_of_text:
                is_at_rest = False  # while steps are compared nothing else is done, so what fails fails everywhere
                yield from _compared_block(block.of_role(tree.role), counts, fan_out)
                is_at_rest = True
                continue
            for step in map(block.step, range(len(block))):
                header: StepHeader = step.header
                length = length_of_step(part.batch, header.step)
                slices = cp_slices(step, cp, length=length, packing=packing)
                masked = masked_of(header, step.num_masked_tokens)
                own = batch_of_role(step, tree.role, slices, memory=memory)
                if step.modules:
                    own = replace(own, modules=_decoded(decoder, _own_modules(step.modules, tree)))
                batches = {role: batch_of_role(step, role, slices, memory=memory) for role in fan_out.roles_to_send}
                modules = {role: _modules_of_role(step, tree, role) for role in batches}
                is_at_rest = False
                [masked] = fan_out.compare([_to_compare(header, masked)], partial(_given, header))
                masked = _of_all(fan_out, header, masked)
                try:
                    header = counts.settle(header, masked)
                except TooManyBadRows as error:  # all leaders raise it at this step
                    fan_out.tell_peers(error)
                    raise
                data = encode_header(header) if batches else b""
                fan_out.send(
                    {role: _message(_settled(batch, header), data, *modules[role]) for role, batch in batches.items()}
                )
                is_at_rest = True
                yield BlockTensors.of(_settled(own, header))
    except GeneratorExit:
        if fan_out is not None:
            end_exchange(fan_out, check_ranks)
        raise
    except Exception as error:
        if fan_out is not None and is_at_rest:
            with suppress(RankLost):  # this rank's own error matters more
                fan_out.send_failure(error)
        raise
    if fan_out is not None:
        fan_out.send_end()


def _to_compare(header: StepHeader, masked: Masked) -> ToCompare:
    return ToCompare(
        step=header.step,
        order_digest=header.order_digest,
        plan_digest=header.plan_digest,
        first_microbatch=header.first_microbatch,
        masked=masked,
    )


def _of_all(fan_out: FanOut, header: StepHeader, masked: Masked) -> Masked:
    """What is masked of a step by all replicas: where others are apart, by what the index knows of their rows."""
    return Masked(num_tokens=header.num_unlabelled) if fan_out.is_apart else masked


def _given(header: StepHeader) -> Given:
    """What a step was planned by."""
    state = header.after.state
    rows = tuple(int(fingerprint, 16) for fingerprint in state.rows.fingerprints)
    return Given(
        recipe=state.recipe,
        catalog=state.catalog,
        denied=state.rows.denied,
        log=state.log_branch,
        streams=state.rows.streams,
        rows=rows,
    )


def _compared_block(block: BlockTensors, counts: BadTokens, fan_out: FanOut) -> Generator[BlockTensors, None, None]:
    """The block of a leader without peers, in as many parts as leaders compare it in; errors as those of `compare`."""
    told = [_to_compare(facts.header, masked_of(facts.header, facts.num_masked_tokens)) for facts in block.steps]
    first, given = 0, partial(_given, block.steps[0].header)
    while first < len(block):
        settled: list[StepFacts] = []
        for number, masked in enumerate(fan_out.compare(told[first : first + MOST_COMPARED], given), first):
            facts = block.steps[number]
            of_all = _of_all(fan_out, facts.header, masked)
            settled.append(_settled(facts, counts.settle(facts.header, of_all)))
        yield block.with_steps(settled, first)
        first += len(settled)


_Settled = TypeVar("_Settled", StepFacts, StepTensors)


def _settled(step: _Settled, header: StepHeader) -> _Settled:
    """A step, or a batch of it, with the sums over all leaders."""
    if not header.bad_tokens and not header.num_masked_tokens:
        return step
    num_tokens_global = step.num_tokens_global - header.num_masked_tokens
    return replace(step, num_tokens_global=num_tokens_global, num_masked_tokens=0, header=header)


def end_exchange(fan_out: FanOut, check_ranks: Callable[[], None] | None) -> None:
    """Tell peers and other leaders that a leader is closed before its data ends.

    After a loss that is a failure: a peer that has not noticed the loss itself would take an end for that of the data,
    and its trainer might save what it has as the last checkpoint.
    """
    try:
        if check_ranks is not None:
            check_ranks()
    except RankLost as error:
        with suppress(RankLost):  # the loss is known already
            fan_out.send_failure(error)
    else:
        fan_out.send_end()


def _settled_block(
    block: BlockTensors, counts: BadTokens, tree: ClientPlaceTree, decoder: RankDecoder
) -> Generator[BlockTensors, None, None]:
    """The block of a rank that has no other: with the sums of what could not be read, and modules decoded."""
    is_plain = not any(facts.modules or facts.num_masked_tokens or facts.header.bad_tokens for facts in block.steps)
    if is_plain and counts.is_empty:
        yield block
        return
    settled: list[StepFacts] = []
    for facts in block.steps:
        try:
            header = counts.settle(facts.header, masked_of(facts.header, facts.num_masked_tokens))
            modules: Mapping[str, Any] = facts.modules
            if modules:
                tensors = {name: torch.from_numpy(array) for name, array in modules.items()}
                modules = _decoded(decoder, _own_modules(tensors, tree))
        except TorchmixError:  # it belongs in the place of its step
            if settled:
                yield block.with_steps(settled)
            raise
        settled.append(replace(_settled(facts, header), modules=modules))
    yield block.with_steps(settled)


def _own_modules(modules: Mapping[str, torch.Tensor], tree: ClientPlaceTree) -> Tensors:
    """What the leader itself computes."""
    return tensors_for_ranks(modules, [places_in_replica(tree)[tree.topology.rank]])


Tensors = dict[str, torch.Tensor]


def _modules_of_role(step: StepTensors, tree: ClientPlaceTree, role: Role) -> tuple[Tensors, dict[int, Tensors]]:
    """What ranks of a role compute of modules: arrays for all of them, and for each rank but the leader its own.

    What one rank alone computes goes to it alone, so that pixels reach the ranks that encode them and no other.
    """
    if not step.modules:
        return {}, {}
    rank, places = tree.topology.rank, places_in_replica(tree)
    ranks = tree.ranks_of_role(rank, role)
    peers = [other for other in ranks if other != rank]
    if len(ranks) == 1:
        return tensors_for_ranks(step.modules, [places[ranks[0]]]), {}
    joint, single = modules_by_sharing(step.modules, [places[other] for other in ranks])
    shared = tensors_for_ranks(joint, [places[other] for other in ranks])
    return shared, {other: tensors_for_ranks(single, [places[other]]) for other in peers} if single else {}


def _decoded(decoder: RankDecoder, modules: Tensors) -> Tensors:
    """What this rank computes, with patches where the leader gave files."""
    files = {name for name in modules if name.endswith(f".{CONTENT}")}
    if not files:
        return modules
    arrays = decoder.decoded({name: tensor.numpy() for name, tensor in modules.items()})
    return {name: modules[name] if name in modules else torch.from_numpy(array) for name, array in arrays.items()}


def _message(batch: StepTensors, header: bytes, modules: Tensors, own: dict[int, Tensors]) -> RoleBatch:
    return RoleBatch(header=header, tensors=replace(batch, modules=modules).to_tensors(), own=own)


class ReceivedSteps(IterableDataset[StepTensors]):
    """On a peer: the steps that its leader sends, as a dataset."""

    def __init__(self, fan_out: FanOut, part: Part, directory: Path) -> None:
        """`part` is what the leader reads, whose items this rank may decode; `directory` is the recipe's folder."""
        super().__init__()
        self._fan_out, self._decoder = fan_out, RankDecoder(part, directory)
        self._ended = False
        self.rows: RowFacts | None = None
        """A peer knows of no rows."""

    def __iter__(self) -> Iterator[StepTensors]:
        self._ended = False
        while (batch := self._fan_out.receive()) is not None:
            step = StepTensors.from_tensors(batch.tensors, header=decode_header(batch.header))
            tree = self._fan_out.tree
            leader = tree.leader_of(tree.topology.rank)
            mine = tree.ranks_of_role(leader, tree.role).index(tree.topology.rank)
            modules = tensors_for_ranks(step.modules, [mine]) | batch.own.get(tree.topology.rank, {})
            modules = _decoded(self._decoder, modules)
            yield replace(step, modules=modules) if modules else step
        self._ended = True

    @property
    def workers_lost(self) -> int:
        """None: a peer has no worker."""
        return 0

    def keep_reader(self, is_kept: bool = True) -> None:
        """Do nothing: a peer reads nothing."""

    def hand_over(self, *, keeps_worker: bool = False) -> HeldReader:
        """What has been read: nothing."""
        return HeldReader()

    def release(self) -> None:
        """Do nothing: a peer holds nothing but the exchange, which is the loader's."""

    def hear_out(self) -> None:
        """Discard the steps that the leader still sends, up to the end of the stream."""
        if not self._ended:
            self._fan_out.drain()
            self._ended = True


# --- What a rank needs to stand in another place of the job: its tree, its exchange and its stream of steps.
#
# What is wrong on one rank is refused on all before any stream ends; all ranks mean the same topology and step before
# groups are made; what a leader has read in its own process stays, if it leads again.

StreamOfLeader = Callable[[ClientPlaceTree, Layout, HeldReader], StepStream]
"""Makes the stream of a leader; all leaders call it together."""


class Seating(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A rank's place in the job, and where its steps come from."""

    shared: SharedParts
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
    """What a loader keeps at every layout of the same ranks."""

    part: Part
    directory: Path
    """The recipe's folder."""
    options: StreamOptions
    stream_of_leader: StreamOfLeader
    store: Any = None
    """The job's, of torch; None outside of a job."""
    liveness: Liveness | None = None
    started: JobUse | None = None
    """Shared loaders that the job has started; left with the loader."""
    reports: Reports | None = None
    """Takes losses to the part's policy; None without one."""
    accept_edit: str | None = None
    """The edit that is accepted where `load_state_dict` is given no code."""
    among_others: AmongOthers | None = None
    """How this rank comes to be among others; None unless the loader is elastic."""
    run: str = ""
    """What `torchmix top` calls the job; empty: it does not show it."""

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may come and go."""
        return self.among_others is not None

    def seat(self, tree: ClientPlaceTree, layout: Layout, fan_out: FanOut | None, held: HeldReader) -> Seating:
        """This rank's place. A collective of all leaders."""
        stream: StepStream | ReceivedSteps
        if tree.is_leader:
            stream = self.stream_of_leader(tree, layout, held)
        else:
            assert fan_out is not None, "peers have a leader"
            held.close()
            stream = ReceivedSteps(fan_out, self.part, self.directory)
        return Seating(shared=self, tree=tree, layout=layout, fan_out=fan_out, stream=stream)

    def leave(self) -> None:
        """The loader closes."""
        if self.started is not None:
            self.started.leave()


AmongOthers = Callable[[Reshard, Callable[[ClientPlaceTree, Layout], HeldReader]], Seating]
"""Gives this rank its place among other ranks; what is called with the new places first leaves those of before, and
returns what is read already. A collective of the new ranks."""


def at_layout(state: LoaderState, layout: Layout) -> LoaderState:
    """A state that is checked, as one of this layout."""
    return msgspec.structs.replace(state, dp=layout.dp, micro_batch_size=layout.micro_batch_size)


def check_border(state: LoaderState, at_step: int, whose: str) -> None:
    """Raise StateError unless a state is before the first microbatch of a step."""
    if state.microbatch or state.step != at_step:
        raise StateError(
            f"reshard: at_step={at_step}, and {whose} is at step {state.step}, microbatch {state.microbatch}; "
            "call it on all ranks after the last microbatch of the step before"
        )


def agreed_places(
    shared: SharedParts, now: ClientPlaceTree, asked: Reshard, state: LoaderState
) -> tuple[ClientPlaceTree, Layout]:
    """Check what a reshard is asked for, on all ranks. A collective.

    Args:
        shared: What the leaders of the loader share.
        now: The tree so far.
        asked: By the caller.
        state: The state of the loader.

    Raises:
        OptionError, TopologyError, StateError: As `StatefulDataLoader.reshard` says.
        RecipeError: Another rank means something else.
        RankLost: Another rank is lost, or has failed here.
    """
    topology, at_step, fan_out = asked.topology, asked.at_step, asked.fan_out
    rank = now.topology.rank
    with announcing_failures(shared.store, rank=rank):
        check_topology("reshard", topology)
        if shared.part.dynamic is not None:
            raise OptionError("reshard: the recipe has a policy, whose groups are of this layout; resume instead")
        tree, layout = places_of(topology, asked.micro_batch_size, shared.part, elastic=shared.is_elastic)
        if (tree.topology.world_size, tree.topology.rank) != (now.topology.world_size, rank):
            raise TopologyError(
                f"reshard: this is rank {rank} of {now.topology.world_size}, the topology is of rank "
                f"{tree.topology.rank} of {tree.topology.world_size}; an elastic loader goes on among other ranks by "
                f"reshard(..., state_dict=), and any job of other ranks starts again from the state"
            )
        check_border(state, at_step, "this loader")
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
        held = old.hand_over()
        if fan_out is None and tree.topology.world_size > 1:
            fan_out = open_fan_out(tree, pin=torch.cuda.is_available())
        return shared.seat(tree, layout, fan_out, held)
    except BaseException as error:
        if shared.liveness is not None:
            shared.liveness.post_abort(error)
        raise
