"""Leader to peers: one exchange per global batch and leader; each rank gets the batch of its role."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.errors import RankLost, TooManyBadRows, TopologyError, WireError
from torchmix.parallel.agreement import (
    ENDS,
    FAILED,
    Given,
    Masked,
    ToCompare,
    diverged,
    num_compared,
    num_masked_tokens,
    sources_to_gather,
    statuses,
    words_of_given,
    words_of_rows,
    words_of_status,
    words_of_steps,
)
from torchmix.parallel.groups import TIMEOUT_S, GlooGroups, LocalGroups, open_gloo_groups, open_local_groups
from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology
from torchmix.parallel.wire import (
    DTYPES,
    ENVELOPE_FIELDS,
    KIND_DATA,
    KIND_END,
    KIND_FAILED,
    MAX_DESCRIPTION_BYTES,
    MAX_PAYLOAD_BYTES,
    STAGES,
    Block,
    Envelope,
    ErrorForm,
    decode_envelope,
    decode_payload,
    encode_envelope,
    encode_payload,
)

# --- The batch of a role, and what single ranks of it get beside that, as tensors and as bytes of the wire.
#
# What came is checked before memory is taken for it. Cost: one copy at the leader.

_DTYPE_OF_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPE_OF_NAME.items()}

OWN = "own.sizes"
"""Name of an array of a batch: int64 [ranks, 2], bytes of the description and of the whole payload that follow for each
rank alone; 0 and 0 for the leader itself."""


class RoleBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The data of one global batch that the ranks of one role receive."""

    header: bytes
    """The caller's own message, opaque here."""
    tensors: dict[str, torch.Tensor]
    """CPU tensors of any shape, with dtypes of `array_form.DTYPES`; their order is kept."""
    own: Mapping[int, dict[str, torch.Tensor]] = msgspec.field(default_factory=dict)
    """Tensors for one rank alone, by global rank: for each rank of the role but the leader, or for none."""


def blocks_of(tensors: Mapping[str, torch.Tensor]) -> list[Block]:
    """Tensors as they travel."""
    return [_block_of(name, tensor) for name, tensor in tensors.items()]


def tensors_of(blocks: Sequence[Block], payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arrays that came, as views of the torch buffer, so that they know whether it is pinned."""
    return {block.name: _tensor_of(block, payload) for block in blocks}


def own_payloads(
    batch: RoleBatch, ranks: Sequence[int]
) -> tuple[dict[str, torch.Tensor], dict[int, NDArray[np.uint8]]]:
    """What ranks get alone: the array that announces it, beside the batch's, and the payload of each.

    Args:
        batch: The batch of the role.
        ranks: Those of the role, the leader perhaps among them.
    """
    if not batch.own:
        return {}, {}
    sizes = np.zeros((len(ranks), 2), np.int64)
    payloads = {}
    for number, rank in enumerate(ranks):
        if rank in batch.own:
            described, payloads[rank] = encode_payload(b"", blocks_of(batch.own[rank]))
            sizes[number] = described, payloads[rank].size
    return {OWN: torch.from_numpy(sizes)}, payloads


def own_size(tensors: dict[str, torch.Tensor], envelope: Envelope, *, place: int, num_ranks: int) -> Envelope | None:
    """Take the announcement out of a batch that came: what follows for the rank at `place` of its role, if anything.

    Raises:
        WireError: It is none, with `rank` the leader's.
    """
    sizes = tensors.pop(OWN, None)
    if sizes is None:
        return None
    is_form = sizes.dtype == torch.int64 and tuple(sizes.shape) == (num_ranks, 2)
    described, total = sizes[place].tolist() if is_form else (-1, -1)
    if not (0 < described <= total <= MAX_PAYLOAD_BYTES and described <= MAX_DESCRIPTION_BYTES):
        raise WireError(
            f"what came from leader rank {envelope.leader} announces {tuple(sizes.shape)} sizes of arrays for single "
            f"ranks, {described} and {total} for this one, of {num_ranks}",
            envelope.leader,
        )
    return replace(envelope, description_bytes=described, header_bytes=0, payload_bytes=total)


def own_tensors(envelope: Envelope, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arrays that came for this rank alone."""
    return tensors_of(decode_payload(envelope, payload.numpy())[1], payload)


def _block_of(name: str, tensor: torch.Tensor) -> Block:
    assert tensor.device.type == "cpu", f"tensor {name!r} is on {tensor.device}; the exchange runs on the CPU"
    assert tensor.dtype in _NAME_OF_DTYPE, f"tensor {name!r} is {tensor.dtype}; the wire carries {DTYPES}"
    flat = tensor.detach().contiguous().view(-1)
    # An empty array of numpy may have a stride of 0, and then has no view of another dtype.
    values = flat.view(torch.uint8).numpy() if len(flat) else np.zeros(0, np.uint8)
    return Block(name=name, dtype=_NAME_OF_DTYPE[tensor.dtype], shape=tuple(tensor.shape), values=values)


def _tensor_of(block: Block, payload: torch.Tensor) -> torch.Tensor:
    start = block.values.ctypes.data - payload.data_ptr() if block.values.size else 0
    flat = payload[start : start + block.values.size].view(_DTYPE_OF_NAME[block.dtype])
    return flat.view(block.shape)


# --- Leader to peers: one exchange per global batch and leader; each rank gets the batch of its role.
#
# In, at a leader: a `RoleBatch` per role, with a header of bytes and named tensors. Out, at each peer: the batch of its
# role; the tensors are views into one buffer, which can be pinned. Leaders also compare their plans.
#
# Everything runs in the caller's thread, which is the loader's background thread. So an exchange is never on the path
# between pipeline stages, where a collective per microbatch would deadlock. `wire.py` describes the bytes; there is no
# pickle and no object collective.
#
# Invariants: leaders send and peers receive the same number of times; a role without peers is not sent; TP peers get
# identical bytes, and beside these what is for one of them alone. A stream of exchanges ends with `send_end` on all
# leaders before another stream begins, or with `send_failure` on one of them: an error has its place in the stream,
# and all ranks raise it after the same steps. A broken group is a `RankLost`, a foreign exchange is a `WireError` that
# names the sender.
#
# Cost: one copy per role at the leader, one broadcast of 96 bytes and one of the payload per role, all roles at once;
# one message to each rank that gets something alone.

_JOB_ERRORS = {TooManyBadRows.__name__}
"""Errors that all leaders, and so their peers, raise at the same step."""
_decode_error = msgspec.msgpack.Decoder(ErrorForm).decode


class FanOut:
    """One rank's end of the exchanges between a leader and its peers."""

    def __init__(
        self,
        tree: ClientPlaceTree,
        groups: GlooGroups | LocalGroups | None,
        *,
        pin: bool = False,
        world: str = "",
        group: ClientPlaceTree | None = None,
    ) -> None:
        """Use `open_fan_out`, `local_world` or `apart`.

        Args:
            tree: The place tree as this rank sees it.
            groups: None where this rank has nobody to talk to, or not yet.
            pin: Receive into pinned memory.
            world: See `self.world`.
            group: The ranks that `groups` are of, where those of other groups are apart; None: all.
        """
        self.world = world
        """A name that no other world inside a process has, equal on all of its ranks; empty between processes."""
        self._tree = tree
        self._groups = groups
        self._group = tree if group is None else group
        self._first = tree.topology.rank - self._group.topology.rank
        """The global rank of the first one of the group."""
        self._pin = pin
        self._num_exchanges = 0
        self._buffer_of_role: dict[Role, NDArray[np.uint8]] = {}
        self.roles_to_send: tuple[Role, ...] = ()
        """Leader: the roles that have ranks besides the leader; `send` needs a batch for each. Empty on a peer."""
        if tree.is_leader:
            rank = tree.topology.rank
            self.roles_to_send = tuple(
                role for role in tree.roles(rank) if any(peer != rank for peer in tree.ranks_of_role(rank, role))
            )

    def send(self, batches: Mapping[Role, RoleBatch]) -> None:
        """Leader: give every peer its part of the next global batch; returns when the tensors may be reused.

        Args:
            batches: One of at most 16 GiB for each of `roles_to_send`; other roles are ignored.

        Raises:
            RankLost: A peer is gone.
        """
        assert self._tree.is_leader, "peers receive"
        for role in self.roles_to_send:
            batch = batches[role]
            told, payloads = own_payloads(batch, self._tree.ranks_of_role(self._tree.topology.rank, role))
            self._start_payload(role, KIND_DATA, batch.header, blocks_of(batch.tensors | told))
            for rank, payload in payloads.items():
                self._open_groups.start_send(role, rank - self._first, payload)
        self._finish()

    def send_end(self) -> None:
        """Leader: announce the end of this stream to every peer, and wait until all leaders end their streams.

        Leaders prepare steps ahead, so a leader that closes may be some steps behind another one, which still waits
        for it in `compare`. This method answers such calls, without a step, until no leader makes one.

        Raises:
            RankLost: A rank is gone.
        """
        assert self._tree.is_leader, "peers receive"
        for role in self.roles_to_send:
            self._start(role, KIND_END)
        self._finish()
        if len(self._group.leaders) > 1:
            ending = words_of_status(ENDS)
            while True:
                rows = self._open_groups.gather(ending)
                if (statuses(rows) == FAILED).any() or (statuses(rows) == ENDS).all():
                    return
                count = num_compared(rows)
                if not count:
                    all_given = self._open_groups.gather(words_of_given(Given()))
                    self._open_groups.gather(words_of_rows(Given(), all_given))
                elif num_sources := sources_to_gather(rows, count):
                    self._open_groups.gather(np.zeros(num_sources, np.int64))

    def send_failure(self, error: BaseException) -> None:
        """Leader: announce to all peers and all other leaders that an error of this rank ends this stream.

        They raise a `RankLost` in the place of the next step, so earlier steps are still used. The exchange is at rest
        afterwards, as after `send_end`.

        Raises:
            RankLost: A rank is gone.
        """
        assert self._tree.is_leader, "peers receive"
        self.tell_peers(error)
        if len(self._group.leaders) > 1:
            self._open_groups.gather(words_of_status(FAILED))

    def tell_peers(self, error: BaseException) -> None:
        """Leader: announce to the peers that no step follows, because of an error that all leaders raise.

        Raises:
            RankLost: A peer is gone.
        """
        reason = msgspec.msgpack.encode(ErrorForm.of(error))
        for role in self.roles_to_send:
            self._start_payload(role, KIND_FAILED, reason, [])
        self._finish()

    def receive(self) -> RoleBatch | None:
        """Peer: this rank's part of the next global batch, or None once when the leader has ended the stream.

        Raises:
            RankLost: The leader is gone, or it failed.
            TooManyBadRows: All leaders raised it.
            WireError: The received bytes are not the exchange that this rank waits for.
        """
        assert not self._tree.is_leader, "leaders send"
        values = np.empty(ENVELOPE_FIELDS, dtype=np.int64)
        self._open_groups.receive_into(values)
        envelope = decode_envelope(
            values,
            sequence=self._num_exchanges,
            leader=self._tree.leader_of(self._tree.topology.rank),
            replica=self._tree.replica,
            role=self._tree.role,
        )
        self._num_exchanges += 1
        if envelope.kind == KIND_END:
            return None
        payload = self._received_payload(envelope.payload_bytes)
        header, blocks = decode_payload(envelope, payload.numpy())
        if envelope.kind == KIND_FAILED:
            raise _failure(header, envelope.leader)
        tensors = tensors_of(blocks, payload)
        rank, ranks = self._tree.topology.rank, self._tree.ranks_of_role(envelope.leader, self._tree.role)
        follows = own_size(tensors, envelope, place=ranks.index(rank), num_ranks=len(ranks))
        if follows is None:
            return RoleBatch(header=header, tensors=tensors)
        own = own_tensors(follows, self._received_payload(follows.payload_bytes, is_own=True))
        return RoleBatch(header=header, tensors=tensors, own={rank: own})

    def drain(self) -> int:
        """Peer: receive and drop exchanges until the leader ends the stream; returns how many were dropped.

        Closing needs this: a leader in the middle of `send` cannot end before its peers have taken the rest.
        """
        num_dropped = 0
        while self.receive() is not None:
            num_dropped += 1
        return num_dropped

    def compare(self, steps: Sequence[ToCompare], given: Callable[[], Given] = Given) -> list[Masked]:
        """Leader: check that all leaders have equal plans, and sum their masked tokens. A collective.

        A leader that is ending its stream takes part through `send_end` and is not compared. All leaders raise the same
        error at the same step, and their peers receive it: the exchange is at rest.

        Args:
            steps: The next steps, one or more; other leaders may have more of them, or fewer.
            given: What they were planned by; it is asked where leaders differ alone.

        Returns:
            Masked tokens of all replicas, of the first of these steps: of one or more. The others are to be compared
            again.

        Raises:
            PlanDiverged: The plans of the first step differ; the message names the step, the ranks, both values, and
                what of `given` differs.
            RankLost: A leader is gone, or failed.
        """
        assert self._tree.is_leader, "peers plan nothing"
        if not self._tree.is_first_leader:  # another leader has read the same tokens
            steps = [replace(told, masked=Masked()) for told in steps]
        leaders = [rank + self._first for rank in self._group.leaders]  # nothing is heard of the others
        if len(leaders) == 1:
            return [told.masked for told in steps]
        rows = self._open_groups.gather(words_of_steps(steps))
        for rank, status in zip(leaders, statuses(rows).tolist(), strict=True):
            if status == FAILED:
                text = f"rank {rank}, a leader as this rank, failed at step {steps[0].step}: see its own error"
                failed = RankLost(text, rank)
                self.tell_peers(failed)
                raise failed
        count = num_compared(rows)
        if not count:
            own = given()
            all_given = self._open_groups.gather(words_of_given(own))
            all_rows = self._open_groups.gather(words_of_rows(own, all_given))
            error = diverged(rows, all_given, all_rows, leaders, self._tree.topology.rank, own.streams)
            self.tell_peers(error)
            raise error
        bad_tokens = None
        if num_sources := sources_to_gather(rows, count):
            mine = steps[0].masked.bad_tokens
            bad_tokens = self._open_groups.gather(np.zeros(num_sources, np.int64) if mine is None else mine).sum(axis=0)
        return [Masked(num_tokens=num_tokens, bad_tokens=bad_tokens) for num_tokens in num_masked_tokens(rows)[:count]]

    def close(self, *, is_idle: bool = True) -> None:
        """Release the groups. Other ranks that still use them see broken groups.

        Args:
            is_idle: Whether no thread is inside an exchange, as one that waits for a rank that is stopped.
        """
        if self._groups is not None:
            self._groups.close(is_idle=is_idle)

    @property
    def is_apart(self) -> bool:
        """Whether there are ranks of which nothing is heard."""
        return self._group is not self._tree

    @property
    def group_ranks(self) -> int:
        """Ranks that talk to each other: those of the job, or of this rank's group where it is apart."""
        return self._group.topology.world_size

    @property
    def is_to_open(self) -> bool:
        """Whether this rank's group is apart, and its process groups are still to be made."""
        return self.is_apart and self._groups is None and self.group_ranks > 1

    @property
    def tree(self) -> ClientPlaceTree:
        """The place tree, seen from this rank."""
        return self._tree

    def _received_payload(self, num_bytes: int, *, is_own: bool = False) -> torch.Tensor:
        payload = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin)
        (self._open_groups.receive_own_into if is_own else self._open_groups.receive_into)(payload.numpy())
        return payload

    @property
    def _open_groups(self) -> GlooGroups | LocalGroups:
        assert self._groups is not None, "a job of one rank has nobody to talk to"
        return self._groups

    def _start(
        self, role: Role, kind: int, *, description_bytes: int = 0, header_bytes: int = 0, payload_bytes: int = 0
    ) -> None:
        envelope = Envelope(
            kind=kind,
            sequence=self._num_exchanges,
            leader=self._tree.topology.rank,
            replica=self._tree.replica,
            stage=STAGES.index(role.stage),
            cp_rank=role.cp_rank,
            description_bytes=description_bytes,
            header_bytes=header_bytes,
            payload_bytes=payload_bytes,
        )
        self._open_groups.start_broadcast(role, encode_envelope(envelope))

    def _start_payload(self, role: Role, kind: int, header: bytes, blocks: list[Block]) -> None:
        size, payload = encode_payload(header, blocks, buffer=self._buffer_of_role.get(role))
        if payload.size > self._buffer_of_role.get(role, payload[:0]).size:
            self._buffer_of_role[role] = payload
        self._start(role, kind, description_bytes=size, header_bytes=len(header), payload_bytes=payload.size)
        self._open_groups.start_broadcast(role, payload)

    def _finish(self) -> None:
        self._num_exchanges += 1
        if self.roles_to_send:
            self._open_groups.finish()


def open_fan_out(
    tree: ClientPlaceTree, *, group_ranks: int | None = None, pin: bool = False, timeout_s: float = TIMEOUT_S
) -> FanOut:
    """This process' end of the exchanges. A collective of all ranks that torch.distributed has, if it has several.

    Args:
        tree: The place tree as this rank sees it.
        group_ranks: Ranks of torch.distributed, where others are apart; None: it has those of the tree.
        pin: Receive into pinned memory; needs CUDA.
        timeout_s: Seconds that an exchange may wait for another rank. It is long, since liveness notices lost ranks.

    Raises:
        TopologyError: There are several ranks and torch.distributed is not initialised, or disagrees with the tree.
    """
    group = None if group_ranks is None else tree.group_of(group_ranks)
    within = tree if group is None else group
    groups = open_gloo_groups(within, timeout_s=timeout_s) if within.topology.world_size > 1 else None
    return FanOut(tree, groups, pin=pin, group=group)


def local_world(
    topology: Topology | ClientPlaceTree, *, group_ranks: int | None = None, timeout_s: float = 60.0
) -> list[FanOut]:
    """The ends of all ranks of a job inside this process, by global rank: one thread each, same code, same bytes.

    Args:
        topology: The job, as any rank sees it; a topology gets its default place tree.
        group_ranks: So many neighbours are a group, and the groups are `apart`; None: all ranks talk to each other.
        timeout_s: Longest wait of one thread for another, in seconds.
    """
    tree = ClientPlaceTree.from_topology(topology) if isinstance(topology, Topology) else topology
    world_size = tree.topology.world_size
    found: list[FanOut] = []
    for first in range(0, world_size, group_ranks or world_size):
        seen = tree.with_rank(first)
        group = None if group_ranks is None else seen.group_of(group_ranks)
        world = secrets.token_hex(8)
        for rank, groups in enumerate(open_local_groups(group or tree, timeout_s=timeout_s)):
            own = None if group is None else group.with_rank(rank)
            found.append(FanOut(tree.with_rank(first + rank), groups, world=world, group=own))
    return found


def apart(topology: Topology | ClientPlaceTree) -> FanOut:
    """The exchange of ranks with others that share no torch.distributed with them, as those of torchft: there is none.

    The ranks of torch.distributed, or this process alone where it does not run, are a group: whole replicas, whose
    leaders serve their peers and compare their plans as in any job. Each group plans the same steps from the same
    state, and nothing compares their plans: give all of them the same recipe and catalog. The loader must be elastic.
    It watches the ranks of its group; which groups take part is the trainer's to know.

    Args:
        topology: The ranks of all groups as they are now, from `Topology.among`.

    Raises:
        TopologyError: The groups are no whole replicas, or torch.distributed means another rank.
    """
    tree = ClientPlaceTree.from_topology(topology) if isinstance(topology, Topology) else topology
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)
    group = tree.group_of(ranks)
    if group.topology.rank != rank:
        raise TopologyError(
            f"apart: the topology says rank {tree.topology.rank} of {tree.topology.world_size}, so rank "
            f"{group.topology.rank} of its group of {ranks}; torch.distributed says rank {rank}. Make the topology by "
            f"Topology.among, from that of one group"
        )
    return FanOut(tree, None, group=group)


def _failure(header: bytes, leader: int) -> Exception:
    """The error to raise at a peer whose leader has failed."""
    try:
        form = _decode_error(header)
    except msgspec.DecodeError as error:
        raise WireError(f"rank {leader} failed, and what it says of that is damaged ({error})") from error
    if form.kind in _JOB_ERRORS:
        return form.error()
    return RankLost(f"rank {leader}, which leads this rank, failed: {form.kind}: {form.text}", leader)
