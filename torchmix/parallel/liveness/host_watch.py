"""The ranks of a host, looked at by the kernel alone: whoever is gone is found in a second, however large the job is.

In: the ranks of this host, and ways to read what they have written. Out: the loss of one that is gone, and the word
that a loss stands in the store. Must hold: a rank that said it is done, or that SIGTERM has ended, is no loss; the
store is asked once for each rank, and again only for one that is gone, or whose pulse has ended. Cost of a look: four
small reads of /proc.

The last rank of a host, the *lookout*, watches the next host, and so reads the store often. The others need not: the
thread that beats ends when its rank knows of a loss, and the kernel tells them that the lookout's has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchmix.parallel.liveness.evidence import RankIdentity, evidence_of_process, has_pulse
from torchmix.parallel.liveness.records import Beat, Loss
from torchmix.parallel.liveness.ring import loss_of_ended_rank, text_of_step

LOOK_S = 0.5
"""Between two looks, where requests to the store are further apart."""
STOPPED_LOOKS = 7
"""Looks in a row, half a second apart, at which a process is stopped before it is lost: looks, since time in which
this process was stopped itself does not count."""
ReadRank = Callable[[int], tuple[Beat | None, RankIdentity | None]]


class HostWatch:
    """One rank's eye on the next rank of its host and on the lookout, and before its end on all of them."""

    def __init__(
        self,
        rank: int,
        ranks_of_host: Iterable[int],
        *,
        read: ReadRank,
        is_ending: Callable[[int], bool],
        standing_loss: Callable[[], Loss | None],
    ) -> None:
        """Look at nobody yet.

        Args:
            rank: Whose eye it is.
            ranks_of_host: Those whose processes the kernel may know of here.
            read: The latest beat and the identity of a rank, None before it has opened its loader.
            is_ending: Whether a rank has said that SIGTERM ends it.
            standing_loss: The loss that a rank has written into the store.
        """
        others = sorted({*ranks_of_host} - {rank})
        self._others = [each for each in others if each > rank] + [each for each in others if each < rank]
        self._lookouts = [each for each in reversed(others) if each > rank]
        """The lookout, and who takes its place when it is done."""
        self._read, self._is_ending, self._standing_loss = read, is_ending, standing_loss
        self._identities: dict[int, RankIdentity] = {}
        self._stopped_looks = 0
        self._settled: set[int] = set()
        """Ranks that are done, or end."""

    @property
    def num_ranks(self) -> int:
        """How many there are of this host, with that whose eye it is."""
        return len(self._others) + 1

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

    def hear(self) -> Loss | None:
        """The loss that stands, if the lookout's pulse has ended.

        Raises:
            RuntimeError: The store is gone.
        """
        for rank in self._lookouts:
            if rank in self._settled:
                continue
            identity = self._identity(rank)
            if identity is None or not identity.pulse or evidence_of_process(identity) == "unknown":
                return None
            if has_pulse(identity):
                return None
            if (loss := self._standing_loss()) is not None:
                return loss
            beat, _ = self._read(rank)
            if beat is None or not (beat.is_done or self._is_ending(rank)):
                return None
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
