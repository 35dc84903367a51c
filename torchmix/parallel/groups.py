"""Groups of ranks: torchmix's own of gloo, the job's for runs of ranks, and those of a world inside one process.

Private gloo groups lie along the place tree: one per (leader, role), and one of all leaders.

The groups are torchmix's own, so that a background thread may use them while the training thread runs its collectives:
two threads on one group deadlock, two threads on two groups do not. They are gloo on the CPU whatever the job trains
with.

Invariants: every rank creates all groups in one order, its own or not, because `torch.distributed.new_group` derives
names from counts that must agree on all ranks. (Creation by members only, `use_local_synchronization=True`, is not safe
here: torch 2.13 names such a group after the number of groups that a rank is *in*, which is larger on a leader than on
its peers, and the rendezvous then waits for ever.) Each group is used by one thread at a time. Collectives carry
arrays, never objects.

Cost: creating the groups of others takes about 25 microseconds each, 0.1 s for 4,000; a group a rank is in costs a
rendezvous through the store and two threads. The timeout is long on purpose: one operation that times out breaks a gloo
group for good, while a training job may pause for hours; ranks that are gone are noticed by `liveness/`.

Known limit of torch 2.13: `torchrun --max-restarts` keeps one store over its attempts, and gloo then connects to
addresses of the attempt before. `--rdzv-backend c10d` with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 avoids it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from torchmix.errors import RankLost, TopologyError
from torchmix.parallel.agreement import told_by_all
from torchmix.parallel.place_tree import ClientPlaceTree, Role, powers_up_to
from torchmix.parallel.topology import Topology

TIMEOUT_S = 24 * 3600.0
_left: list[dist.ProcessGroup] = []
"""Groups in which a thread waits for ever."""


def whole_replicas(dp_rank: int) -> ClientPlaceTree:
    """The places of a job whose trainer tells its data loader nothing but a data-parallel rank. A collective.

    Every rank says its own, so tensor, context and pipeline parallelism need no number: all ranks of a replica receive
    the same, whole samples, and the trainer cuts them. In a process without torch.distributed there is one replica.

    Args:
        dp_rank: This rank's replica, from 0.

    Raises:
        TopologyError: A replica is missing, or some have more ranks than others.
        RankLost: A rank failed before it came here, or has not come within the timeout of the job's store.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ClientPlaceTree.from_replicas([dp_rank], rank=0)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    told = told_by_all(store, str(dp_rank), rank=rank, world_size=dist.get_world_size())
    return ClientPlaceTree.from_replicas([int(text) for text in told], rank=rank)


class GlooGroups:
    """This rank's ends of its private groups."""

    def __init__(
        self,
        tree: ClientPlaceTree,
        *,
        group_of_role: Mapping[Role, dist.ProcessGroup],
        leaders: dist.ProcessGroup | None,
    ) -> None:
        """Use `open_gloo_groups`."""
        self._tree = tree
        self._group_of_role = dict(group_of_role)
        self._leaders = leaders
        self._pending: list[dist.Work] = []

    def start_broadcast(self, role: Role, values: NDArray[Any]) -> None:
        """Leader: begin to send `values` to the ranks of a role that it serves; unchanged until `finish`."""
        self._begin(self._group_of_role[role], values)

    def start_send(self, role: Role, rank: int, values: NDArray[Any]) -> None:
        """Leader: begin to send `values` to one rank of a role that it serves; unchanged until `finish`."""
        try:
            work = dist.isend(torch.from_numpy(values), dst=rank, group=self._group_of_role[role])
        except RuntimeError as error:
            self._refuse(error, f"its peer, rank {rank},", rank)
        assert work is not None, "this rank is a member of its own groups"
        self._pending.append(work)

    def finish(self) -> None:
        """Leader: wait until all that was started is on its way and `values` may be reused.

        Raises:
            RankLost: A group is broken.
        """
        pending, self._pending = self._pending, []
        for work in pending:
            self._wait(work, "its peers", -1)

    def receive_into(self, values: NDArray[Any]) -> None:
        """Peer: fill `values` with the leader's next array, which must have its size.

        Raises:
            RankLost: The group is broken.
        """
        self._begin(self._group_of_role[self._tree.role], values)
        leader = self._tree.leader_of(self._tree.topology.rank)
        self._wait(self._pending.pop(), f"its leader, rank {leader},", leader)

    def receive_own_into(self, values: NDArray[Any]) -> None:
        """Peer: fill `values` with the leader's next array for this rank alone; as `receive_into`."""
        leader = self._tree.leader_of(self._tree.topology.rank)
        whom = f"its leader, rank {leader},"
        try:
            work = dist.irecv(torch.from_numpy(values), src=leader, group=self._group_of_role[self._tree.role])
        except RuntimeError as error:
            self._refuse(error, whom, leader)
        self._wait(work, whom, leader)

    def gather(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Leader: the values int64 [n] of all leaders, as int64 [leaders, n] in the order of `tree.leaders`.

        Raises:
            RankLost: The group is broken.
        """
        if self._leaders is None:
            return values[None]
        rows = [torch.empty(values.size, dtype=torch.int64) for _ in self._tree.leaders]
        try:
            work = dist.all_gather(rows, torch.from_numpy(values), group=self._leaders, async_op=True)
        except RuntimeError as error:
            self._refuse(error, "the other leaders", -1)
        self._wait(work, "the other leaders", -1)
        ranks = sorted(self._tree.leaders)  # torch numbers a group's ranks by their global rank
        return np.stack([rows[ranks.index(rank)].numpy() for rank in self._tree.leaders])

    def close(self, *, is_idle: bool = True) -> None:
        """Give the groups back; also after the job has destroyed its process groups, or after a failure.

        Args:
            is_idle: Whether no thread waits in one of them: its end would be waited for, so it stays as it is.
        """
        groups = [*self._group_of_role.values(), *([self._leaders] if self._leaders else [])]
        if not is_idle:
            _left.extend(groups)
        self._group_of_role, self._leaders = {}, None
        for group in groups:
            # ValueError and AssertionError: the job destroyed all groups before; RuntimeError: the group is broken.
            with contextlib.suppress(ValueError, AssertionError, RuntimeError):
                dist.destroy_process_group(group)

    def _begin(self, group: dist.ProcessGroup, values: NDArray[Any]) -> None:
        leader = self._tree.leader_of(self._tree.topology.rank)
        try:
            work = dist.broadcast(torch.from_numpy(values), src=leader, group=group, async_op=True)
        except RuntimeError as error:
            self._refuse(error, f"the ranks around leader rank {leader}", -1)
        assert work is not None, "this rank is a member of its own groups"
        self._pending.append(work)

    def _wait(self, work: dist.Work | None, whom: str, rank: int) -> None:
        assert work is not None, "this rank is a member of its own groups"
        try:
            work.wait()
        except RuntimeError as error:
            self._refuse(error, whom, rank)

    def _refuse(self, error: RuntimeError, whom: str, rank: int) -> None:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankLost(
            f"rank {self._tree.topology.rank} lost its connection to {whom} ({reason}); restart the job from its last "
            "checkpoint",
            rank,
        ) from error


def open_gloo_groups(tree: ClientPlaceTree, *, timeout_s: float = TIMEOUT_S) -> GlooGroups:
    """Create the groups of the whole job. A collective: every rank calls it, in the same order among its collectives.

    Args:
        tree: The place tree as this rank sees it; equal on all ranks, except for the rank itself.
        timeout_s: How long an operation may wait for another rank, in seconds.

    Raises:
        TopologyError: torch.distributed is not initialised, or has another world size or rank than the tree.
    """
    check_job(tree.topology)
    with _default_group_unbound():
        return _make_groups(tree, timedelta(seconds=timeout_s))


def _make_groups(tree: ClientPlaceTree, timeout: timedelta) -> GlooGroups:
    topology = tree.topology
    group_of_role: dict[Role, dist.ProcessGroup] = {}
    for leader in tree.leaders:
        for role in tree.roles(leader):
            peers = [rank for rank in tree.ranks_of_role(leader, role) if rank != leader]
            if not peers:
                continue
            group = dist.new_group(sorted([leader, *peers]), timeout=timeout, backend="gloo")
            if topology.rank in (leader, *peers):
                group_of_role[role] = group
    leaders = None
    if len(tree.leaders) > 1:
        group = dist.new_group(sorted(tree.leaders), timeout=timeout, backend="gloo")
        leaders = group if tree.is_leader else None
    return GlooGroups(tree, group_of_role=group_of_role, leaders=leaders)


@contextlib.contextmanager
def _default_group_unbound() -> Iterator[None]:
    """While inside, torch does not know which device the default group is bound to.

    `init_process_group("nccl", device_id=...)` binds it. Then `new_group` splits NCCL's communicator on the ranks
    outside of the new group, though it is gloo's, and they wait for its members, which do not split (torch 2.13).
    """
    default = dist.distributed_c10d._get_default_group()
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def check_job(topology: Topology) -> None:
    """Check that torch.distributed runs the job that a topology describes.

    Raises:
        TopologyError: It is not initialised, or has another world size or rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise TopologyError(
            f"the topology has {topology.world_size} ranks, but torch.distributed is not initialised in rank "
            f"{topology.rank}; call torch.distributed.init_process_group() first, in every rank"
        )
    if (dist.get_world_size(), dist.get_rank()) != (topology.world_size, topology.rank):
        raise TopologyError(
            f"the topology says rank {topology.rank} of {topology.world_size}, torch.distributed says rank "
            f"{dist.get_rank()} of {dist.get_world_size()}; build the topology from the same world"
        )


# --- Groups of the runs of ranks that share documents, for attention over a microbatch's own context parallelism.
#
# A run is some neighbours of DP x CP at one stage and one TP rank, aligned to their number. Groups are of the job's own
# backend, for its training thread. All ranks create all groups in one order, as is said above. Cost: less than
# twice as many groups as there are ranks of DP x CP, once for each stage and TP rank.


class ContextGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The ranks that share documents with this one."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of their slices."""
    index: int
    """The slice of this rank, in [0, len(ranks))."""
    group: dist.ProcessGroup | None
    """Their process group; None where this rank is alone."""

    @property
    def place_of_slice(self) -> tuple[int, ...]:
        """Where each slice is among what a collective of the group gathers: torch orders a group by global rank."""
        ordered = sorted(self.ranks)
        return tuple(ordered.index(rank) for rank in self.ranks)


class ContextGroups:
    """By `microbatch.cp_ranks`, the group of each run that this rank may be of."""

    def __init__(self, groups: Mapping[range, ContextGroup]) -> None:
        """Use `context_groups`."""
        self._groups = dict(groups)

    def __getitem__(self, cp_ranks: range) -> ContextGroup:
        """The group of a microbatch.

        Raises:
            TopologyError: No group was made for runs of this size.
        """
        if cp_ranks not in self._groups:
            sizes = sorted({len(run) for run in self._groups})
            raise TopologyError(
                f"ranks {cp_ranks.start} to {cp_ranks.stop - 1} of DP x CP share a microbatch, and there are groups "
                f"of {sizes} ranks alone; give context_groups the sizes of balance.context, or none"
            )
        return self._groups[cp_ranks]


def context_groups(tree: ClientPlaceTree | Topology, sizes: Sequence[int] | None = None) -> ContextGroups:
    """Make the groups of all runs of ranks. A collective: every rank of the job calls it, with the same arguments.

    Args:
        tree: The job's places, as this rank sees them.
        sizes: `balance.context.sizes` of the recipe; None: those of `auto`, the powers of two below dp x cp, and that
            number. Sizes above it are left out, as in the plan.

    Raises:
        TopologyError: A size does not divide the next one, or the job has several ranks and torch.distributed is not
            initialised.
    """
    topology = tree.topology if isinstance(tree, ClientPlaceTree) else tree
    num_ranks = topology.dp * topology.cp
    wanted = sorted({1, *(powers_up_to(num_ranks) if sizes is None else (size for size in sizes if size <= num_ranks))})
    if wanted[0] < 1:
        raise TopologyError(f"context_groups: sizes {list(sizes or ())} have one below 1")
    if topology.world_size > 1 and not dist.is_initialized():
        raise TopologyError("context_groups: initialise torch.distributed first, the job has several ranks")
    mine, place = topology.coordinates, topology.coordinates.dp * topology.cp + topology.coordinates.cp
    found: dict[range, ContextGroup] = {}
    for size in wanted:
        for first in range(0, num_ranks - size + 1, size):
            run = range(first, first + size)
            for stage in range(topology.pp):
                for tp in range(topology.tp):
                    ranks = tuple(
                        topology.rank_at(tp=tp, cp=at % topology.cp, dp=at // topology.cp, pp=stage) for at in run
                    )
                    group = dist.new_group(list(ranks)) if size > 1 else None
                    if place in run and (stage, tp) == (mine.pp, mine.tp):
                        found[run] = ContextGroup(ranks=ranks, index=place - first, group=group)
    return ContextGroups(found)


# --- The groups of a whole world inside one process: ranks are threads, a broadcast is a queue.
#
# Leaders meet to gather: a queue for each pair of them would take as many turns of the interpreter as there are pairs.
#
# Invariants: as with gloo, a rank receives copies, in the order they were sent; a sender waits while its peers are more
# than one exchange behind; a rank whose partner is silent for `timeout_s` gets an error instead of waiting for ever.
#
# Cost: one copy per receiving rank. No torch, no sockets.

ARRAYS_OF_AN_EXCHANGE = 3  # envelope, payload, and what is for a rank alone

_Lane = queue.Queue[NDArray[Any]]


class LeadersMeeting:
    """Where the leaders of a local world gather: each brings its values, and takes those of all."""

    def __init__(self, leaders: Sequence[int]) -> None:
        """`leaders`: their global ranks, in the order of what is gathered."""
        self._leaders = leaders
        self._rows: dict[int, NDArray[np.int64]] = {}
        self._all: NDArray[np.int64] | None = None
        """What the last meeting has gathered."""
        self._number = 0
        """The number of the meeting that has not gathered all yet."""
        self._changed = threading.Condition()

    def gather(self, rank: int, values: NDArray[np.int64], timeout_s: float) -> NDArray[np.int64]:
        """The values of all leaders.

        Raises:
            RankLost: A leader has not come; names one of those.
        """
        with self._changed:
            self._rows[rank] = values.copy()
            number = self._number
            if len(self._rows) == len(self._leaders):
                self._all = np.stack([self._rows.pop(leader) for leader in self._leaders])
                self._all.flags.writeable = False  # it is shared
                self._number += 1
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: self._number > number, timeout_s):
                missing = next(leader for leader in self._leaders if leader not in self._rows)
                raise RankLost(f"rank {missing} sent nothing to rank {rank} for {timeout_s} s", missing)
            assert self._all is not None, "a meeting has gathered it"
            # No later meeting can be over before this leader has come to it.
            return self._all


class LocalGroups:
    """What one thread of a local world may say to which others."""

    def __init__(
        self,
        tree: ClientPlaceTree,
        lanes: Mapping[tuple[int, int], _Lane],
        meeting: LeadersMeeting,
        *,
        timeout_s: float,
    ) -> None:
        """`tree` is this rank's; `lanes` from (sender, receiver) to a queue, and the meeting, are shared by all."""
        self._meeting = meeting
        self._tree = tree
        self._rank = tree.topology.rank
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._pending: list[tuple[int, NDArray[Any]]] = []

    def start_broadcast(self, role: Role, values: NDArray[Any]) -> None:
        """Leader: begin to send `values` to the ranks of a role that it serves."""
        for rank in self._tree.ranks_of_role(self._rank, role):
            if rank != self._rank:
                self._pending.append((rank, values.copy()))

    def start_send(self, role: Role, rank: int, values: NDArray[Any]) -> None:
        """Leader: begin to send `values` to one rank of a role that it serves."""
        self._pending.append((rank, values.copy()))

    def finish(self) -> None:
        """Leader: wait until all that was started has been taken."""
        for rank, values in self._pending:
            self._put(rank, values)
        self._pending.clear()

    def receive_into(self, values: NDArray[Any]) -> None:
        """Peer: fill `values` with the leader's next array, which must have its size."""
        taken = self._take(self._tree.leader_of(self._rank))
        values[...] = taken

    def receive_own_into(self, values: NDArray[Any]) -> None:
        """Peer: fill `values` with the leader's next array for this rank alone."""
        self.receive_into(values)

    def gather(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Leader: the values int64 [n] of all leaders, as int64 [leaders, n] in the order of `tree.leaders`."""
        return self._meeting.gather(self._rank, values, self._timeout_s)

    def close(self, *, is_idle: bool = True) -> None:
        """Nothing to give back; the queues go with the world."""

    def _put(self, rank: int, values: NDArray[Any]) -> None:
        try:
            self._lanes[self._rank, rank].put(values, timeout=self._timeout_s)
        except queue.Full:
            raise RankLost(f"rank {rank} took nothing from rank {self._rank} for {self._timeout_s} s", rank) from None

    def _take(self, rank: int) -> NDArray[Any]:
        try:
            return self._lanes[rank, self._rank].get(timeout=self._timeout_s)
        except queue.Empty:
            raise RankLost(f"rank {rank} sent nothing to rank {self._rank} for {self._timeout_s} s", rank) from None


def open_local_groups(tree: ClientPlaceTree, *, timeout_s: float = 60.0) -> list[LocalGroups]:
    """The groups of every rank of the tree's job, by global rank.

    Args:
        tree: The place tree as any rank sees it.
        timeout_s: Longest wait for another thread, in seconds.
    """
    pairs = {(tree.leader_of(rank), rank) for rank in range(tree.topology.world_size)}
    lanes: dict[tuple[int, int], _Lane] = {
        pair: queue.Queue(maxsize=ARRAYS_OF_AN_EXCHANGE) for pair in pairs if pair[0] != pair[1]
    }
    meeting = LeadersMeeting(tree.leaders)
    ranks = range(tree.topology.world_size)
    return [LocalGroups(tree.with_rank(rank), lanes, meeting, timeout_s=timeout_s) for rank in ranks]
