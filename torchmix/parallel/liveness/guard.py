"""Heartbeats and the abort key: a rank that is killed, stopped or failed is named by all others, which then end.

In: the job's store, a rank and its world. Out: `check()` raises RankLost in whichever thread asks; if the process is
still there after a grace, because its main thread is stuck in a collective, it is ended with the reason on stderr.

    beat     each rank beats, and looks at the beat of the next rank in the ring (see `ring.py`)
    abort    a rank that finds a lost one, or fails itself, writes the reason under one key; the first writer wins
    store    a store that does not answer means that its host is lost: rank 0, or the launcher
    ending   a rank that gets SIGTERM checks the ranks of its host once more before it ends (see `termination.py`)

Two threads, because a request to a store whose host is stopped never returns: the *pulse* talks to the store through a
connection of its own, the *guard* never touches it, measures the pulse and ends the process.

Invariants: no socket is opened for others; keys carry an id drawn for this job and its loaders, so restarts and later
loaders do not meet old keys; a rank that closed is not lost; a failure that may follow from another rank's loss waits
until that loss has had time to be found, so the cause is named and not its victims. Cost: that of the pulse.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from torchmix.errors import RankLost
from torchmix.parallel.liveness.host_watch import HostWatch
from torchmix.parallel.liveness.known_loss import KnownLoss
from torchmix.parallel.liveness.patience import Patience
from torchmix.parallel.liveness.pulse import Pulse
from torchmix.parallel.liveness.records import Loss, Records, RecordStore
from torchmix.parallel.liveness.ring import Silence
from torchmix.parallel.liveness.termination import Termination


class Liveness:
    """One rank's pulse and guard; opened with the first of its loaders, closed with the last."""

    def __init__(
        self,
        store: RecordStore,
        *,
        rank: int,
        world_size: int,
        store_host: int = -1,
        patience: Patience | None = None,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Use `open_liveness`.

        Args:
            store: A connection that nobody else uses, under a prefix of its own.
            rank: Global rank.
            world_size: Ranks of the job.
            store_host: The rank that hosts the store, -1 if it is none of them.
            patience: Other limits than the default.
            end_process: Stands in for `os._exit` in tests.
        """
        self._rank, self._world_size, self._store_host = rank, world_size, store_host
        self._patience = Patience() if patience is None else patience
        self._end_process = end_process
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
            store_host=store_host,
            patience=self._patience,
        )
        if store_host >= 0:
            self._records.identity(store_host)  # its name, for an error of a store that no longer answers
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

        Nothing after a loss or `post_abort`: the process ends.
        """
        self._num_users -= 1
        if self._num_users > 0 or self._is_closed or self._pulse is None:
            return
        if self._known.loss is not None or self._pulse.failure is not None:
            return
        self._is_closed = True
        if self._termination is not None:
            self._termination.close()
        self._pulse.is_closing.set()
        self._pulse.thread.join(self._patience.store_s)
        self._may_rest.set()
        self._guard.join(self._patience.store_s)
        if self._store_host != self._rank:
            atexit.unregister(self._at_exit)

    def _error(self, lost: Loss) -> RankLost:
        self._was_raised = True
        return RankLost(f"{lost.text}; restart the job from its last checkpoint", lost.rank)

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
            elif self._ends_by_signal:
                return
            elif end_s == 0.0:
                end_s = now_s + self._patience.grace_s
            elif now_s >= end_s:
                self._await_farewells(pulse, self._patience.grace_s)
                self._end_process(1)
                return

    def _await_farewells(self, pulse: Pulse, limit_s: float) -> None:
        """On the rank that hosts the store: keep the store until the others have read the loss, at most `limit_s`."""
        if self._store_host != self._rank:
            return
        give_up_s = time.monotonic() + limit_s
        pulse.thread.join(limit_s)  # then the connection is free
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
        self._await_farewells(pulse, self._patience.farewell_s if self._known.loss is None else self._patience.grace_s)
        if self._known.loss is not None and not self._is_closed:
            if not self._was_raised:  # nobody has seen the loss, and the exit code would be 0
                sys.stdout.flush()
                self._end_process(1)
            # Destructors may wait for the lost rank, and no thread of ours runs any more: the kernel ends them.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 2 * self._patience.grace_s)
