"""Private gloo groups along the place tree: one per (leader, role), and one of all leaders.

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
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from torchmix.errors import RankLost, TopologyError
from torchmix.parallel.agreement import told_by_all
from torchmix.parallel.place_tree import ClientPlaceTree, Role
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
