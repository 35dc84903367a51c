"""The path of a step from the replica's leader to this rank.

In: on a leader, steps of the whole replica; on a peer, the exchange. Out: steps of this rank's role. Must hold: leaders
compare their plans, and sum the tokens that they could not read, before any rank can consume the step; a leader ends
the exchange when it stops, and a peer receives up to that end, so that neither waits for the other; an error of a
leader is no end: its peers and the other leaders get the error in the place of the missing step. Cost: one exchange per
step and role, in the background.

These are generators for a thread of the loader; closing them runs their `finally` in that thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress

import torch
from msgspec.structs import replace
from torch.utils.data import IterableDataset

from torchmix.constructor.context_parallel import cp_slices, share_of
from torchmix.constructor.fields import StepTensors
from torchmix.constructor.memory import StepMemory
from torchmix.constructor.modules.batch import modules_by_sharing, share_of_ranks
from torchmix.errors import RankLost, TooManyBadRows
from torchmix.parallel.fan_out import FanOut
from torchmix.parallel.modules.rank_places import places_in_replica
from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.shares.share import Share
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step
from torchmix.steps.bad_tokens import BadTokens, masked_of
from torchmix.steps.edits.word import RowFacts
from torchmix.steps.header import StepHeader, decode_header, encode
from torchmix.steps.images.at_rank import CONTENT, RankDecoder
from torchmix.steps.state import LoaderState


def serve_steps(
    steps: Iterator[StepTensors],
    *,
    fan_out: FanOut | None,
    tree: ClientPlaceTree,
    part: Part,
    bad_tokens: Mapping[str, int],
) -> Generator[StepTensors, None, None]:
    """On a leader: give each role of the replica its share, and yield the leader's own.

    Args:
        steps: Steps of this leader's replica.
        fan_out: The exchange with the other ranks; None in a job of one rank.
        tree: The job's place tree, seen from this rank.
        part: The part of the recipe that is read.
        bad_tokens: Tokens of each source that could not be read before the first of these steps.

    Raises:
        PlanDiverged: Another leader has another plan for the same step.
        RankLost: A rank was lost, or another leader failed.
        TooManyBadRows: All replicas together could not read more of a source than its `max_bad` allows.
    """
    counts = BadTokens(bad_tokens)
    is_at_rest = True  # no exchange is half done
    memory = StepMemory()
    packing, decoder = part.packing, RankDecoder(part)
    try:
        for step in steps:
            header = decode_header(step.header)
            length = length_of_step(part.batch, header.step)
            slices = cp_slices(step, tree.topology.cp, length=length, packing=packing)
            masked = masked_of(header, step.num_masked_tokens)
            own = share_of(step, tree.role, slices, memory=memory)
            if step.modules:
                places = places_in_replica(tree)
                own = replace(
                    own, modules=_decoded(decoder, share_of_ranks(step.modules, [places[tree.topology.rank]]))
                )
            if fan_out is None:
                yield _settled(own, counts.settle(header, masked))
                continue
            shares = {role: share_of(step, role, slices, memory=memory) for role in fan_out.roles_to_send}
            modules = {role: _modules_of_role(step, tree, role) for role in shares}
            is_at_rest = False
            masked = fan_out.compare(
                step.step,
                header.order_digest,
                header.plan_digest,
                first_microbatch=header.first_microbatch,
                masked=masked,
            )
            try:
                header = counts.settle(header, masked)
            except TooManyBadRows as error:  # all leaders raise it at this step
                fan_out.tell_peers(error)
                raise
            fan_out.send({role: _message(_settled(share, header), *modules[role]) for role, share in shares.items()})
            is_at_rest = True
            yield _settled(own, header)
    except GeneratorExit:
        if fan_out is not None:
            fan_out.send_end()
        raise
    except Exception as error:
        if fan_out is not None and is_at_rest:
            with suppress(RankLost):  # this rank's own error matters more
                fan_out.send_failure(error)
        raise
    if fan_out is not None:
        fan_out.send_end()


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
        return share_of_ranks(step.modules, [places[ranks[0]]]), {}
    joint, single = modules_by_sharing(step.modules, [places[other] for other in ranks])
    shared = share_of_ranks(joint, [places[other] for other in ranks])
    return shared, {other: share_of_ranks(single, [places[other]]) for other in peers} if single else {}


def _decoded(decoder: RankDecoder, modules: Tensors) -> Tensors:
    """What this rank computes, with patches where the leader gave files."""
    files = {name for name in modules if name.endswith(f".{CONTENT}")}
    if not files:
        return modules
    arrays = decoder.decoded({name: tensor.numpy() for name, tensor in modules.items()})
    return {name: modules[name] if name in modules else torch.from_numpy(array) for name, array in arrays.items()}


def _settled(share: StepTensors, header: StepHeader) -> StepTensors:
    """A share with the sums over all leaders."""
    if not header.bad_tokens and not header.num_masked_tokens:
        return share
    num_tokens_global = share.num_tokens_global - header.num_masked_tokens
    return replace(share, num_tokens_global=num_tokens_global, num_masked_tokens=0, header=encode(header))


def _message(share: StepTensors, modules: Tensors, own: dict[int, Tensors]) -> Share:
    return Share(header=share.header, tensors=replace(share, modules=modules).to_tensors(), own=own)


class ReceivedSteps(IterableDataset[StepTensors]):
    """On a peer: the steps that its leader sends, as a dataset."""

    def __init__(self, fan_out: FanOut, part: Part) -> None:
        """`part` is what the leader reads, whose images this rank may have to decode."""
        super().__init__()
        self._fan_out, self._decoder = fan_out, RankDecoder(part)
        self._ended = False
        self.rows: RowFacts | None = None
        """A peer knows of no rows."""

    def __iter__(self) -> Iterator[StepTensors]:
        self._ended = False
        while (share := self._fan_out.receive()) is not None:
            step = StepTensors.from_tensors(share.tensors, header=share.header)
            tree = self._fan_out.tree
            leader = tree.leader_of(tree.topology.rank)
            mine = tree.ranks_of_role(leader, tree.role).index(tree.topology.rank)
            modules = share_of_ranks(step.modules, [mine]) | share.own.get(tree.topology.rank, {})
            modules = _decoded(self._decoder, modules)
            yield replace(step, modules=modules) if modules else step
        self._ended = True

    @property
    def workers_lost(self) -> int:
        """None: a peer has no worker."""
        return 0

    def check_state(self, state: LoaderState) -> None:
        """Accept any state: leaders compare it with the catalog."""

    def keep_reader(self) -> None:
        """Do nothing: a peer reads nothing."""

    def release(self) -> None:
        """Do nothing: a peer holds nothing but the exchange, which is the loader's."""

    def hear_out(self) -> None:
        """Discard the steps that the leader still sends, up to the end of the stream."""
        if not self._ended:
            self._fan_out.drain()
            self._ended = True
