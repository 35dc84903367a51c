"""Heartbeats and the abort key: a rank that is killed, stopped or failed is named by all others, which then end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from torchmix.errors import RankLost
from torchmix.parallel.liveness.evidence import (
    LONGEST_SILENCE_POLLS,
    Beat,
    Loss,
    Patience,
    RankIdentity,
    Records,
    RecordStore,
    evidence_of_process,
    has_pulse,
    identity_of_this_process,
    is_large,
    pace_at_size,
)
from torchmix.parallel.liveness.ring import RingWatch, Silence, loss_of_ended_rank, text_of_step
from torchmix.parallel.liveness.termination import Termination

# --- The loss that this process knows of: the first one, said at once and kept.
#
# It is on stderr before anybody acts on it, since the process may end at any moment after. Cost: one line.


class KnownLoss:
    """One of a process."""

    def __init__(self, rank: int) -> None:
        """`rank` is that of this process."""
        self._rank = rank
        self._lock = threading.Lock()
        self._is_known = threading.Event()
        self.loss: Loss | None = None
        """None while no rank is known to be lost."""

    def declare(self, loss: Loss) -> None:
        """Note that a rank is lost, if none was before."""
        with self._lock:
            if self.loss is not None:
                return
            self.loss = loss
        who = f"rank {loss.rank}" if loss.rank >= 0 else "the launcher"
        with contextlib.suppress(OSError):
            # Not sys.stderr: a stuck main thread may hold its lock.
            os.write(2, f"torchmix: {who} lost: {loss.text} [seen by rank {self._rank}]\n".encode())
        self._is_known.set()

    def wait(self, timeout_s: float) -> None:
        """Until there is one."""
        self._is_known.wait(timeout_s)


# --- The ranks of a host, looked at by the kernel alone: whoever is gone is found in a second, however large the job
# is.
#
# A rank that said it is done, or that SIGTERM has ended, is no loss; the store is asked once for each rank, and again
# only for one that is gone, or whose pulse has ended. Cost of a look: four small reads of /proc.
#
# The last rank of a host, the *lookout*, watches the next host, and so reads the store often. The others need not: the
# thread that beats ends when its rank knows of a loss, and the kernel tells them that the lookout's has ended.

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


# --- The part of a rank that talks to the store: it beats, looks at the next rank, and reads whether one is lost.
#
# Who is watched from another host beats fast, and who watches another host looks fast; the thread ends when the rank
# is done or a loss is known, and not before, since other ranks of the host draw that conclusion. Cost: 4 small
# requests a round in a small job; in a large one as `evidence.py` says, and some reads of /proc twice a second.

logger = logging.getLogger(__name__)

GOLDEN = 0.6180339887498949
"""Whole multiples of it, less their whole parts, are spread evenly, however many there are."""


class Pulse:
    """One of a rank; a thread of its own from the beginning."""

    def __init__(
        self, records: Records, known: KnownLoss, *, rank: int, world_size: int, store_rank: int, patience: Patience
    ) -> None:
        """Begin to beat.

        Args:
            records: Over a connection that nobody else waits for.
            known: Where losses are declared.
            rank: Global rank.
            world_size: Ranks of the job, 2 or more.
            store_rank: The rank that serves the store, -1 if it is none of them.
            patience: Limits.

        Raises:
            RuntimeError: The store is gone.
        """
        self._records, self._known = records, known
        self._rank, self._world_size, self._store_rank = rank, world_size, store_rank
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
        self._is_store_done = False
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
        if self._store_rank >= 0:
            who = f"rank {self._store_rank} ({self._records.known_identity(self._store_rank) or 'host not known'})"
        return Loss(rank=self._store_rank, text=f"{who}, which serves the job's store, is gone or stopped: {reason}")

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
            if self._is_store_done or self.is_closing.is_set():
                logger.info(
                    "rank %d: the store is gone, the rank that served it had closed; lost ranks are not noticed",
                    self._rank,
                )
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
        if self._store_rank not in (-1, self._rank) and not (self._is_large and is_fast and self._num_looks % 4):
            store_beat, _ = self._records.read(self._store_rank)
            self._is_store_done = store_beat is not None and store_beat.is_done
        if (target := self.ring.target) is not None:
            beat, identity = self._records.read(target)
            loss = self.ring.look(beat, identity, now_s=time.monotonic(), every_s=self._look_every_s)
            if loss is not None:
                self.post(loss)

    def _beat(self, *, every_s: float, is_done: bool = False) -> None:
        self.num_beats += 1
        beat = Beat(count=self.num_beats, step=self.step, is_done=is_done, every_s=every_s)
        self._records.write_beat(self._rank, beat)


# --- Heartbeats and the abort key: a rank that is killed, stopped or failed is named by all others, which then end.
#
#     beat     each rank beats, and looks at the beat of the next rank in the ring (see `ring.py`)
#     abort    a rank that finds a lost one, or fails itself, writes the reason under one key; the first writer wins
#     store    a store that does not answer means that who serves it is lost: rank 0, or the launcher
#     ending   a rank that gets SIGTERM checks the ranks of its host once more before it ends (see `termination.py`)
#
# Two threads, because a request to a store whose server is stopped never returns: the *pulse* talks to the store
# through a connection of its own, the *guard* never touches it, measures the pulse and ends the process.
#
# Invariants: no socket is opened for others; keys carry an id drawn for this job and its loaders, so restarts and
# later loaders do not meet old keys; a rank that closed is not lost; a failure that may follow from another rank's
# loss waits until that loss has had time to be found, so the cause is named and not its victims. Cost: that of the
# pulse.


class Liveness:
    """One rank's pulse and guard; opened with the first of its loaders, closed with the last."""

    def __init__(
        self,
        store: RecordStore,
        *,
        rank: int,
        world_size: int,
        store_rank: int = -1,
        patience: Patience | None = None,
        is_elastic: bool = False,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Use `open_liveness`.

        Args:
            store: A connection that nobody else uses, under a prefix of its own.
            rank: Global rank.
            world_size: Ranks of the job.
            store_rank: The rank that serves the store, -1 if it is none of them.
            patience: Other limits than the default.
            is_elastic: A loss ends no process, and does not keep this rank from leaving.
            end_process: Stands in for `os._exit` in tests.
        """
        self._rank, self._world_size, self._store_rank = rank, world_size, store_rank
        self._patience = Patience() if patience is None else patience
        self._end_process = end_process
        self.is_elastic = is_elastic
        self._process = os.getpid()
        self._num_users = 1
        self._known = KnownLoss(rank)
        self._may_rest = threading.Event()
        self._is_closed = self._ends_by_signal = self._was_raised = False
        self._termination: Termination | None = None
        self._pulse: Pulse | None = None
        if world_size == 1:
            self._is_closed = True
            return
        self._records = Records(store)
        self._pulse = Pulse(
            self._records,
            self._known,
            rank=rank,
            world_size=world_size,
            store_rank=store_rank,
            patience=self._patience,
        )
        if store_rank >= 0:
            self._records.identity(store_rank)  # its name, for an error of a store that no longer answers
        self._guard = threading.Thread(target=self._run_guard, args=[self._pulse], name="torchmix-guard", daemon=True)
        self._guard.start()
        atexit.register(self._at_exit)

    def join(self) -> Liveness:
        """One more loader of this rank uses it, and will close it; loaders then share their losses."""
        self._num_users += 1
        return self

    @property
    def is_closed(self) -> bool:
        """Whether the last of its loaders has closed it."""
        return self._is_closed

    def note_step(self, step: int) -> None:
        """Say which step was delivered last; others name it if this rank is lost."""
        if self._pulse is not None:
            self._pulse.step = step

    def listen_for_termination(self, ranks_of_host: Iterable[int]) -> None:
        """Look at this host by the kernel; when SIGTERM comes, find out once more who is lost, and say it.

        Args:
            ranks_of_host: Those whose processes the kernel may know of here.
        """
        if self._pulse is None:
            return
        records = self._records
        self._pulse.host_watch = HostWatch(
            self._rank,
            ranks_of_host,
            read=records.read,
            is_ending=records.is_ending,
            standing_loss=records.loss,
        )
        self._termination = Termination(self._check_before_end)

    def check(self) -> None:
        """Return while no rank is known to be lost.

        Raises:
            RankLost: A rank was killed, stopped, or failed; `rank` is its global rank.
        """
        if self._known.loss is not None:
            raise self._error(self._known.loss)

    def post_abort(self, reason: str | BaseException) -> None:
        """Announce to all ranks that this one has failed; returns at once. The process ends after the grace.

        An exception that this rank caused is announced within half a second. A RuntimeError, an OSError, a RankLost or
        a mere text may be the consequence of another rank's loss, and waits until that loss would have been found.
        """
        text = f"failed: {reason}" if isinstance(reason, str) else f"failed: {type(reason).__name__}: {reason}"
        is_own = isinstance(reason, BaseException) and not isinstance(reason, RuntimeError | OSError | RankLost)
        if self._pulse is not None:
            self._fail(self._pulse, text, hold_s=0.0 if is_own else self._pulse.time_of_a_loss_s)

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error of this rank: the RankLost behind it if there is one, else the error itself.

        Posts the error, and waits until it is announced or explained: a few seconds at most.
        """
        self.post_abort(error)
        if self._pulse is not None and not self._is_closed:
            self._known.wait(self._time_to_tell_s(self._pulse))
        lost = self._known.loss
        if lost is None or lost.rank == self._rank:
            return error
        return self._error(lost)

    def close(self) -> None:
        """Say that this rank is done and stop watching, once all loaders have closed it.

        Nothing after a loss or `post_abort`: the process ends, unless ranks may come and go.
        """
        self._num_users -= 1
        if self._num_users > 0 or self._is_closed or self._pulse is None:
            return
        is_broken = self._known.loss is not None or self._pulse.failure is not None
        if is_broken and not self.is_elastic:
            return
        self._is_closed = True
        if self._termination is not None:
            self._termination.close()
        self._pulse.is_closing.set()
        self._pulse.thread.join(self._patience.grace_s if is_broken else self._patience.store_s)
        self._may_rest.set()
        self._guard.join(self._patience.store_s)
        if self._store_rank != self._rank or self.is_elastic:
            atexit.unregister(self._at_exit)

    def _error(self, lost: Loss) -> RankLost:
        self._was_raised = True
        what = "meet the others again, or restart the job" if self.is_elastic else "restart the job"
        return RankLost(f"{lost.text}; {what} from its last checkpoint", lost.rank)

    def _fail(self, pulse: Pulse, text: str, *, hold_s: float) -> None:
        if not self._is_closed and pulse.failure is None:
            pulse.failure = (text, time.monotonic() + hold_s)

    def _time_to_tell_s(self, pulse: Pulse) -> float:
        """In which a failure of this rank is announced, or explained by another one's loss."""
        return pulse.time_of_a_loss_s + 4 * self._patience.poll_s

    def _check_before_end(self, ends_by_signal: bool) -> None:
        """SIGTERM has come: announce a rank of this host that is gone, unless SIGTERM ended that one too."""
        self._ends_by_signal = ends_by_signal
        assert self._pulse is not None
        with contextlib.suppress(RuntimeError, msgspec.MsgspecError):
            self._records.say_that_it_ends(self._rank)
            if (loss := self._records.loss()) is not None:
                self._known.declare(loss)
                return
            host_watch = self._pulse.host_watch
            if host_watch is not None and (loss := host_watch.look_at_all()) is not None:
                self._pulse.post(loss)

    def _run_guard(self, pulse: Pulse) -> None:
        """Notice that the pulse is stuck in a request, and end the process after a loss; the store is not used."""
        tick_s = self._patience.poll_s / 2
        silence = Silence(poll_s=tick_s, now_s=time.monotonic())
        end_s = 0.0
        while not self._may_rest.wait(tick_s):
            now_s = time.monotonic()
            if self._known.loss is None:
                silent_s = silence.look(pulse.num_rounds, now_s=now_s)
                if silent_s >= self._patience.store_s and pulse.thread.is_alive():
                    self._known.declare(pulse.loss_of_store(f"it did not answer for {silent_s:.1f} s"))
            elif self._ends_by_signal or self.is_elastic:
                return
            elif end_s == 0.0:
                end_s = now_s + self._patience.grace_s
            elif now_s >= end_s:
                self._await_farewells(pulse)
                self._end_process(1)
                return

    def _await_farewells(self, pulse: Pulse) -> None:
        """On the rank that serves the store: keep the store until the others have closed or read the loss."""
        if self._store_rank != self._rank:
            return
        give_up_s = time.monotonic() + self._patience.farewell_s
        pulse.thread.join(self._patience.farewell_s)  # then the connection is free
        with contextlib.suppress(RuntimeError, msgspec.MsgspecError):
            while not pulse.thread.is_alive() and time.monotonic() < give_up_s:
                if self._known.loss is None and (loss := self._records.loss()) is not None:
                    self._known.declare(loss)
                missing = self._world_size - self._records.count_farewells(0)
                if missing <= (0 if self._known.loss is None else 1):  # the lost rank adds none
                    return
                time.sleep(self._patience.poll_s / 10)

    def _at_exit(self) -> None:
        """At the interpreter's end: announce a loader that was not closed, and keep the store while others need it."""
        pulse = self._pulse
        if os.getpid() != self._process or pulse is None:
            return  # a forked child is no rank
        if not self._is_closed:
            if (error := getattr(sys, "last_value", None)) is not None:  # what ended the main thread
                self.post_abort(error)
            # Others fail when this rank's connections close, but they wait longer than this before they say so.
            self._fail(pulse, "ended without closing its loader", hold_s=3 * self._patience.poll_s)
            pulse.thread.join(self._time_to_tell_s(pulse))  # it ends when the failure is announced
        self._await_farewells(pulse)
        if self._known.loss is not None and not self._is_closed:
            if not self._was_raised:  # nobody has seen the loss, and the exit code would be 0
                sys.stdout.flush()
                self._end_process(1)
            # Destructors may wait for the lost rank, and no thread of ours runs any more: the kernel ends them.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 2 * self._patience.grace_s)
