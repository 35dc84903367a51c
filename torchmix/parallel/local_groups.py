"""The groups of a whole world inside one process: ranks are threads, a broadcast is a queue.

Leaders meet to gather: a queue for each pair of them would take as many turns of the interpreter as there are pairs.

Invariants: as with gloo, a rank receives copies, in the order they were sent; a sender waits while its peers are more
than one exchange behind; a rank whose partner is silent for `timeout_s` gets an error instead of waiting for ever.

Cost: one copy per receiving rank. No torch, no sockets.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import RankLost
from torchmix.parallel.place_tree import ClientPlaceTree, Role

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
