"""The ranks of a host, looked at by the kernel alone: whoever is gone is found in a second, however large the job is.

In: the ranks of this host, and a way to read their beats and identities. Out: the loss of one that is gone. Must hold:
a rank that said it is done, or that SIGTERM has ended, is no loss; the store is asked once for each rank, and again
only for one that is gone. Cost of a look: four small reads of /proc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchmix.parallel.ring import (
    Beat,
    Loss,
    RankIdentity,
    evidence_of_process,
    loss_of_ended_rank,
    text_of_step,
)

LOOK_S = 0.5
"""Between two looks, where polls of the store are further apart."""
STOPPED_LOOKS = 7
"""Looks in a row, half a second apart, at which a process is stopped before it is lost: looks, since time in which
this process was stopped itself does not count."""
ReadRank = Callable[[int], tuple[Beat | None, RankIdentity | None]]


class HostWatch:
    """One rank's eye on the next rank of its host, and before its end on all of them."""

    def __init__(
        self, rank: int, ranks_of_host: Iterable[int], *, read: ReadRank, is_ending: Callable[[int], bool]
    ) -> None:
        """Look at nobody yet.

        Args:
            rank: Whose eye it is.
            ranks_of_host: Those whose processes the kernel may know of here.
            read: The latest beat and the identity of a rank, None before it has opened its loader.
            is_ending: Whether a rank has said that SIGTERM ends it.
        """
        others = sorted({*ranks_of_host} - {rank})
        self._others = [each for each in others if each > rank] + [each for each in others if each < rank]
        self._read, self._is_ending = read, is_ending
        self._identities: dict[int, RankIdentity] = {}
        self._stopped_looks = 0
        self._settled: set[int] = set()
        """Ranks that are done, or end."""

    def look(self) -> Loss | None:
        """Look at the next rank that is not done; its loss if it is gone, or was stopped at the last looks.

        Raises:
            RuntimeError: The store is gone.
        """
        for rank in self._others:
            if rank in self._settled:
                continue
            identity = self._identity(rank)
            evidence = "unknown" if identity is None else evidence_of_process(identity)
            self._stopped_looks = self._stopped_looks + 1 if evidence == "stopped" else 0
            if identity is not None and self._stopped_looks >= STOPPED_LOOKS:
                beat, _ = self._read(rank)
                step = text_of_step(beat.step if beat is not None else -1)
                return Loss(rank=rank, text=f"rank {rank} ({identity}) is stopped: {step}")
            if identity is None or evidence != "gone":
                return None
            loss = self._loss_of(rank, identity)
            if loss is not None:
                return loss
            self._settled.add(rank)
        return None

    def look_at_all(self) -> Loss | None:
        """The loss of a rank of the host that is gone.

        Raises:
            RuntimeError: The store is gone.
        """
        for rank in self._others:
            identity = self._identity(rank)
            if identity is not None and evidence_of_process(identity) == "gone":
                loss = self._loss_of(rank, identity)
                if loss is not None:
                    return loss
        return None

    def _identity(self, rank: int) -> RankIdentity | None:
        if rank not in self._identities:
            _, identity = self._read(rank)
            if identity is None:
                return None
            self._identities[rank] = identity
        return self._identities[rank]

    def _loss_of(self, rank: int, identity: RankIdentity) -> Loss | None:
        beat, _ = self._read(rank)  # read after its end, so it is its last one
        if beat is None or beat.is_done or self._is_ending(rank):
            return None
        return loss_of_ended_rank(rank, identity, beat)
