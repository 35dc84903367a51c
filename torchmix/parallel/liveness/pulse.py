"""The part of a rank that talks to the store: it beats, looks at the next rank, and reads whether one is lost.

In: the records of the job, and a `KnownLoss`. Out: a loss declared there, found by this rank or by another one. Must
hold: who is watched from another host beats fast, and who watches another host looks fast; the thread ends when the
rank is done or a loss is known, and not before, since other ranks of the host draw that conclusion. Cost: 4 small
requests a round in a small job; in a large one as `patience.py` says, and some reads of /proc twice a second.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec

from torchmix.parallel.liveness.evidence import RankIdentity, identity_of_this_process
from torchmix.parallel.liveness.host_watch import LOOK_S, HostWatch
from torchmix.parallel.liveness.known_loss import KnownLoss
from torchmix.parallel.liveness.patience import LONGEST_SILENCE_POLLS, Patience, is_large, pace_at_size
from torchmix.parallel.liveness.records import Beat, Loss, Records
from torchmix.parallel.liveness.ring import RingWatch, text_of_step

logger = logging.getLogger(__name__)

GOLDEN = 0.6180339887498949
"""Whole multiples of it, less their whole parts, are spread evenly, however many there are."""


class Pulse:
    """One of a rank; a thread of its own from the beginning."""

    def __init__(
        self, records: Records, known: KnownLoss, *, rank: int, world_size: int, store_host: int, patience: Patience
    ) -> None:
        """Begin to beat.

        Args:
            records: Over a connection that nobody else waits for.
            known: Where losses are declared.
            rank: Global rank.
            world_size: Ranks of the job, 2 or more.
            store_host: The rank that hosts the store, -1 if it is none of them.
            patience: Limits.

        Raises:
            RuntimeError: The store is gone.
        """
        self._records, self._known = records, known
        self._rank, self._world_size, self._store_host = rank, world_size, store_host
        self._patience = patience
        self._is_large = is_large(patience.poll_s, world_size=world_size)
        self.num_rounds = self.num_beats = self._num_looks = 0
        self.step = -1
        """The step that was delivered last."""
        self.failure: tuple[str, float] | None = None
        """Why this rank failed, and when (monotonic seconds) the others may read it."""
        self.host_watch: HostWatch | None = None
        self.is_closing = threading.Event()
        self.ring = RingWatch(rank=rank, world_size=world_size, patience=patience, now_s=time.monotonic())
        self.pace = pace_at_size(patience.poll_s, world_size=world_size, ranks_of_host=1)
        self._is_host_done = False
        self._beat_due_s = self._look_due_s = 0.0
        self._beat_every_s = self._look_every_s = self.pace.fast_s
        self._beat_phase = rank * GOLDEN % 1
        self._look_phase = (self._beat_phase + 0.5) % 1
        self.identity = identity_of_this_process()
        self._beat(every_s=self.pace.fast_s)
        self.thread = threading.Thread(target=self._run, name="torchmix-pulse", daemon=True)
        self.thread.start()
        self.identity = msgspec.structs.replace(self.identity, pulse=self.thread.native_id or 0)
        records.write_identity(rank, self.identity)

    @property
    def time_of_a_loss_s(self) -> float:
        """In which the loss of another rank is found and told."""
        longest_s = max(self._patience.silence_s, self._patience.remote_s, LONGEST_SILENCE_POLLS * self.pace.fast_s)
        return longest_s + 2 * self.pace.fast_s

    @property
    def pause_s(self) -> float:
        """Until the next round, from the end of one."""
        due_s = min(self._beat_due_s, self._look_due_s) - time.monotonic()
        return max(0.0, min(due_s, LOOK_S))

    def round(self) -> None:
        """Beat and look if it is time to, and announce a failure of this rank.

        Raises:
            RuntimeError: The store is gone.
            MsgspecError: What stands there was not written by a rank.
        """
        self.num_rounds += 1
        now_s = time.monotonic()
        if now_s >= min(self._beat_due_s, self._look_due_s):
            beat_every_s, look_every_s = self._choose_pace()
            if now_s >= self._beat_due_s:
                self._beat(every_s=beat_every_s)
                # At a new pace a part of a pause comes first, so that ranks which open together spread.
                self._beat_due_s = now_s + beat_every_s * (
                    1.0 if beat_every_s == self._beat_every_s else self._beat_phase
                )
                self._beat_every_s = beat_every_s
            if now_s >= self._look_due_s:
                self._look()
                self._look_due_s = now_s + look_every_s * (
                    1.0 if look_every_s == self._look_every_s else self._look_phase
                )
                self._look_every_s = look_every_s
        if self._is_large and self.host_watch is not None and self._known.loss is None:
            if (loss := self.host_watch.look()) is not None:
                self.post(loss)
            elif (loss := self.host_watch.hear()) is not None:
                self._known.declare(loss)
        if self._known.loss is None and self.failure is not None and now_s >= self.failure[1]:
            text = f"rank {self._rank} ({self.identity}) {self.failure[0]}; {text_of_step(self.step)}"
            self.post(Loss(rank=self._rank, text=text))

    def post(self, loss: Loss) -> None:
        """Write the loss unless another rank was first, and act on the one that stands."""
        self._known.declare(self._records.write_loss(loss))

    def loss_of_store(self, reason: str) -> Loss:
        """The loss that a silent store means."""
        who = "the launcher"
        if self._store_host >= 0:
            who = f"rank {self._store_host} ({self._records.known_identity(self._store_host) or 'host not known'})"
        return Loss(rank=self._store_host, text=f"{who}, which hosts the job's store, is gone or stopped: {reason}")

    def _run(self) -> None:
        try:
            while self._known.loss is None:
                self.round()
                if self._known.loss is None and self.is_closing.wait(self.pause_s):
                    self._beat(every_s=0.0, is_done=True)
                    break
            if self._known.loss is None or self._known.loss.rank != self._rank:
                self._records.count_farewells(1)
        except (RuntimeError, msgspec.MsgspecError) as error:  # torch's store errors are RuntimeErrors
            if self._is_host_done or self.is_closing.is_set():
                logger.info("rank %d: the store is gone, its host had closed; lost ranks are not noticed", self._rank)
            else:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self._known.declare(self.loss_of_store(f"the connection is lost ({reason})"))

    def _choose_pace(self) -> tuple[float, float]:
        """Seconds between beats and between looks, by where the ranks before and after this one are.

        A neighbour that has not opened its loader counts as one on another host.
        """
        poll_s = self._patience.poll_s
        if not self._is_large:
            return poll_s, poll_s
        is_seen = self._is_seen(self._records.identity((self._rank - 1) % self._world_size))
        sees = self.ring.target is not None and self._is_seen(self._records.identity(self.ring.target))
        num_here = self.host_watch.num_ranks if self.host_watch is not None and (is_seen or sees) else 1
        self.pace = pace_at_size(poll_s, world_size=self._world_size, ranks_of_host=num_here)
        fast_s, slow_s = self.pace.fast_s, self.pace.slow_s
        return slow_s if is_seen else fast_s, slow_s if sees else fast_s

    def _is_seen(self, other: RankIdentity | None) -> bool:
        return other is not None and self.identity.sees(other) and other.sees(self.identity)

    def _look(self) -> None:
        """Read the abort key, and judge the next rank."""
        self._num_looks += 1
        if (loss := self._records.loss()) is not None:
            self._known.declare(loss)
            return
        is_fast = self._look_every_s <= self.pace.fast_s
        if self._store_host not in (-1, self._rank) and not (self._is_large and is_fast and self._num_looks % 4):
            host_beat, _ = self._records.read(self._store_host)
            self._is_host_done = host_beat is not None and host_beat.is_done
        if (target := self.ring.target) is not None:
            beat, identity = self._records.read(target)
            loss = self.ring.look(beat, identity, now_s=time.monotonic(), every_s=self._look_every_s)
            if loss is not None:
                self.post(loss)

    def _beat(self, *, every_s: float, is_done: bool = False) -> None:
        self.num_beats += 1
        beat = Beat(count=self.num_beats, step=self.step, is_done=is_done, every_s=every_s)
        self._records.write_beat(self._rank, beat)
