"""Heartbeats and the abort key: a rank that is killed, stopped or failed is named by all others, which then end.

In: the job's store, a rank and its world. Out: `check()` raises RankLost in whichever thread asks; if the process is
still there after a grace, because its main thread is stuck in a collective, it is ended with the reason on stderr.

    beat     each rank writes its beat every poll, and reads that of the next rank in the ring (see `ring.py`)
    abort    a rank that finds a lost one, or fails itself, writes the reason under one key; the first writer wins
    store    a store that does not answer means that its host is lost: rank 0, or the launcher
    ending   a rank that gets SIGTERM checks the ranks of its host once more before it ends (see `termination.py`)

Two threads, because a request to a store whose host is stopped never returns: the *pulse* talks to the store through a
connection of its own, the *guard* never touches it, measures the pulse and ends the process.

Invariants: no socket is opened for others; keys carry an id drawn for this job and its loaders, so restarts and later
loaders do not meet old keys; a rank that closed is not lost; a failure that may follow from another rank's loss waits
until that loss has had time to be found, so the cause is named and not its victims. Cost: 4 small requests a poll; in
large jobs polls are further apart, and ranks of a host are looked at by the kernel between them (`host_watch.py`).
"""

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
from torch._C._distributed_c10d import Store  # typed here alone

from torchmix.errors import RankLost
from torchmix.parallel.host_watch import LOOK_S, HostWatch
from torchmix.parallel.ring import (
    Beat,
    Loss,
    Patience,
    RankIdentity,
    RingWatch,
    Silence,
    at_size,
    identity_of_this_process,
    text_of_step,
)
from torchmix.parallel.termination import Termination

logger = logging.getLogger(__name__)

_beats = msgspec.json.Decoder(Beat)
_identities = msgspec.json.Decoder(RankIdentity)
_losses = msgspec.json.Decoder(Loss)
_encode = msgspec.json.encode

_NO_ABORT = "-"


class Liveness:
    """One rank's pulse and guard; opened with the first of its loaders, closed with the last."""

    def __init__(
        self,
        store: Store,
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
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._store_host = store_host
        given = Patience() if patience is None else patience
        self._patience = at_size(given, world_size)
        self._is_slowed = self._patience != given
        self._end_process = end_process
        self._hold_s = max(self._patience.silence_s, self._patience.remote_s) + 2 * self._patience.poll_s
        self._identity = identity_of_this_process()
        self._identity_of_rank: dict[int, RankIdentity] = {}
        self._num_users, self._num_beats, self._step = 1, 0, -1
        self._is_host_done = False
        self._failure: tuple[str, float] | None = None
        """Why this rank failed, and when (monotonic seconds) the others may read it."""
        self._lost: Loss | None = None
        self._lost_lock = threading.Lock()
        self._is_lost = threading.Event()
        self._is_closing = threading.Event()
        self._may_rest = threading.Event()
        self._is_closed = self._ends_by_signal = self._was_raised = False
        self._termination: Termination | None = None
        self._host_watch: HostWatch | None = None
        self._ring = RingWatch(rank=rank, world_size=world_size, patience=self._patience, now_s=time.monotonic())
        self._pulse = threading.Thread(target=self._run_pulse, name="torchmix-pulse", daemon=True)
        self._guard = threading.Thread(target=self._run_guard, name="torchmix-guard", daemon=True)
        if world_size == 1:
            self._is_closed = True
            return
        store.compare_set("abort", "", _NO_ABORT)
        self._beat(is_done=False)
        store.set(f"who/{rank}", _encode(self._identity).decode())  # after the beat: who is known has a beat
        if store_host >= 0:
            self._read(store_host)  # its name, for an error of a store that no longer answers
        self._pulse.start()
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
        self._step = step

    def listen_for_termination(self, ranks_of_host: Iterable[int]) -> None:
        """When SIGTERM comes, find out once more who is lost, and say it.

        Args:
            ranks_of_host: Those whose processes the kernel may know of here.
        """
        self._host_watch = HostWatch(
            self._rank, ranks_of_host, read=self._read, is_ending=lambda rank: self._store.check([f"ending/{rank}"])
        )
        self._termination = Termination(self._check_before_end)

    def check(self) -> None:
        """Return while no rank is known to be lost.

        Raises:
            RankLost: A rank was killed, stopped, or failed; `rank` is its global rank.
        """
        if self._lost is not None:
            raise self._error(self._lost)

    def post_abort(self, reason: str | BaseException) -> None:
        """Announce to all ranks that this one has failed; returns at once. The process ends after the grace.

        An exception that this rank caused is announced at the next poll. A RuntimeError, an OSError, a RankLost or a
        mere text may be the consequence of another rank's loss, and waits until that loss would have been found.
        """
        text = f"failed: {reason}" if isinstance(reason, str) else f"failed: {type(reason).__name__}: {reason}"
        is_own = isinstance(reason, BaseException) and not isinstance(reason, RuntimeError | OSError | RankLost)
        self._fail(text, hold_s=0.0 if is_own else self._hold_s)

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error of this rank: the RankLost behind it if there is one, else the error itself.

        Posts the error, and waits until it is announced or explained: a few seconds at most.
        """
        self.post_abort(error)
        if not self._is_closed:
            self._is_lost.wait(self._hold_s + 4 * self._patience.poll_s)
        if self._lost is None or self._lost.rank == self._rank:
            return error
        return self._error(self._lost)

    def close(self) -> None:
        """Say that this rank is done and stop watching, once all loaders have closed it.

        Nothing after a loss or `post_abort`: the process ends.
        """
        self._num_users -= 1
        if self._num_users > 0 or self._is_closed or self._lost is not None or self._failure is not None:
            return
        self._is_closed = True
        if self._termination is not None:
            self._termination.close()
        self._is_closing.set()
        self._pulse.join(self._patience.store_s)
        self._may_rest.set()
        self._guard.join(self._patience.store_s)
        if self._store_host != self._rank:
            atexit.unregister(self._at_exit)

    def _error(self, lost: Loss) -> RankLost:
        self._was_raised = True
        return RankLost(f"{lost.text}; restart the job from its last checkpoint", lost.rank)

    def _fail(self, text: str, *, hold_s: float) -> None:
        if not self._is_closed and self._failure is None:
            self._failure = (text, time.monotonic() + hold_s)

    def _run_pulse(self) -> None:
        try:
            while self._lost is None:
                self._poll()
                if self._rest():
                    self._beat(is_done=True)
                    break
            if self._lost is None or self._lost.rank != self._rank:
                self._store.add("farewells", 1)
        except (RuntimeError, msgspec.MsgspecError) as error:  # torch's store errors are RuntimeErrors
            if self._is_host_done or self._is_closing.is_set():
                logger.info("rank %d: the store is gone, its host had closed; lost ranks are not noticed", self._rank)
            else:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self._declare(self._loss_of_store(f"the connection is lost ({reason})"))

    def _rest(self) -> bool:
        """Wait for the next poll, looking at this host meanwhile; whether the loader is closing."""
        end_s = time.monotonic() + self._patience.poll_s
        while (left_s := end_s - time.monotonic()) > 0 and self._lost is None:
            if self._is_closing.wait(min(left_s, LOOK_S)):
                return True
            if left_s > LOOK_S and self._host_watch is not None and (loss := self._host_watch.look()) is not None:
                self._post(loss)
        return self._is_closing.is_set()

    def _poll(self) -> None:
        """One poll: beat, read the abort key, judge the next rank, announce an own failure."""
        store = self._store
        self._beat(is_done=False)
        abort = store.get("abort")
        if abort != _NO_ABORT.encode():
            self._declare(_losses.decode(abort))
            return
        if self._store_host not in (-1, self._rank) and not (self._is_slowed and self._num_beats % 4):
            host_beat, _ = self._read(self._store_host)
            self._is_host_done = host_beat is not None and host_beat.is_done
        target = self._ring.target
        if target is not None:
            loss = self._ring.look(*self._read(target), now_s=time.monotonic())
            if loss is not None:
                self._post(loss)
        if self._failure is not None and time.monotonic() >= self._failure[1]:
            text = f"rank {self._rank} ({self._identity}) {self._failure[0]}; {text_of_step(self._step)}"
            self._post(Loss(rank=self._rank, text=text))

    def _check_before_end(self, ends_by_signal: bool) -> None:
        """SIGTERM has come: announce a rank of this host that is gone, unless SIGTERM ended that one too."""
        self._ends_by_signal = ends_by_signal
        with contextlib.suppress(RuntimeError, msgspec.MsgspecError):
            self._store.set(f"ending/{self._rank}", "")
            abort = self._store.get("abort")
            if abort != _NO_ABORT.encode():
                self._declare(_losses.decode(abort))
                return
            loss = None if self._host_watch is None else self._host_watch.look_at_all()
            if loss is not None:
                self._post(loss)

    def _beat(self, *, is_done: bool) -> None:
        self._num_beats += 1
        beat = Beat(count=self._num_beats, step=self._step, is_done=is_done)
        self._store.set(f"beat/{self._rank}", _encode(beat).decode())

    def _read(self, rank: int) -> tuple[Beat | None, RankIdentity | None]:
        """Latest beat and identity of a rank, None before it has opened its loader. Never waits for a key."""
        if rank not in self._identity_of_rank:
            if not self._store.check([f"who/{rank}"]):
                return None, None
            self._identity_of_rank[rank] = _identities.decode(self._store.get(f"who/{rank}"))
        return _beats.decode(self._store.get(f"beat/{rank}")), self._identity_of_rank[rank]

    def _post(self, loss: Loss) -> None:
        """Write the loss unless another rank was first, and act on the one that stands."""
        self._declare(_losses.decode(self._store.compare_set("abort", _NO_ABORT, _encode(loss).decode())))

    def _declare(self, loss: Loss) -> None:
        """Note that a rank is lost, and write it to stderr at once, since this process may end at any moment now."""
        with self._lost_lock:
            if self._lost is not None:
                return
            self._lost = loss
        who = f"rank {loss.rank}" if loss.rank >= 0 else "the launcher"
        with contextlib.suppress(OSError):
            # Not sys.stderr: a stuck main thread may hold its lock.
            os.write(2, f"torchmix: {who} lost: {loss.text} [seen by rank {self._rank}]\n".encode())
        self._is_lost.set()

    def _loss_of_store(self, reason: str) -> Loss:
        who = "the launcher"
        if self._store_host >= 0:
            who = f"rank {self._store_host} ({self._identity_of_rank.get(self._store_host, 'host not known')})"
        return Loss(rank=self._store_host, text=f"{who}, which hosts the job's store, is gone or stopped: {reason}")

    def _run_guard(self) -> None:
        """Notice that the pulse is stuck in a request, and end the process after a loss; the store is not used."""
        tick_s = self._patience.poll_s / 2
        pulse = Silence(poll_s=tick_s, now_s=time.monotonic())
        end_s = 0.0
        while not self._may_rest.wait(tick_s):
            now_s = time.monotonic()
            if self._lost is None:
                silent_s = pulse.look(self._num_beats, now_s=now_s)
                if silent_s >= self._patience.store_s and self._pulse.is_alive():
                    self._declare(self._loss_of_store(f"it did not answer for {silent_s:.1f} s"))
            elif self._ends_by_signal:
                return
            elif end_s == 0.0:
                end_s = now_s + self._patience.grace_s
            elif now_s >= end_s:
                self._await_farewells(self._patience.grace_s)
                self._end_process(1)
                return

    def _await_farewells(self, limit_s: float) -> None:
        """On the rank that hosts the store: keep the store until the others have read the loss, at most `limit_s`."""
        if self._store_host != self._rank:
            return
        give_up_s = time.monotonic() + limit_s
        self._pulse.join(limit_s)  # then the connection is free
        with contextlib.suppress(RuntimeError, msgspec.MsgspecError):
            while not self._pulse.is_alive() and time.monotonic() < give_up_s:
                if self._lost is None and (abort := self._store.get("abort")) != _NO_ABORT.encode():
                    self._declare(_losses.decode(abort))
                missing = self._world_size - int(self._store.add("farewells", 0))
                if missing <= (0 if self._lost is None else 1):  # the lost rank adds none
                    return
                time.sleep(self._patience.poll_s / 10)

    def _at_exit(self) -> None:
        """At the interpreter's end: announce a loader that was not closed, and keep the store while others need it."""
        if os.getpid() != self._identity.pid:
            return  # a forked child, which is no rank
        if not self._is_closed:
            if (error := getattr(sys, "last_value", None)) is not None:  # what ended the main thread
                self.post_abort(error)
            # Others fail when this rank's connections close, but they wait longer than this before they say so.
            self._fail("ended without closing its loader", hold_s=3 * self._patience.poll_s)
            self._pulse.join(self._hold_s + 4 * self._patience.poll_s)  # it ends when the failure is announced
        self._await_farewells(self._patience.farewell_s if self._lost is None else self._patience.grace_s)
        if self._lost is not None and not self._is_closed:
            if not self._was_raised:  # nobody has seen the loss, and the exit code would be 0
                sys.stdout.flush()
                self._end_process(1)
            # Destructors may wait for the lost rank, and no thread of ours runs any more: the kernel ends them.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 2 * self._patience.grace_s)
