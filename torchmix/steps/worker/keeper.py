"""Whoever starts the worker of a node, watches it, and puts another in its place."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import cast

import msgspec

from torchmix.boards.board import own_board
from torchmix.errors import TorchmixError, WorkerLost
from torchmix.parallel.children import (
    END_S,
    ENDED,
    ENVIRONMENT,
    LOOK_S,
    Child,
    ProcessBeat,
    limit_memory,
    text_of_end,
)
from torchmix.parallel.keeper import Again, Keeper, Kind, Upkeep
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.loaders import limits_of_node
from torchmix.recipe.structs import Loaders
from torchmix.steps.memory_budget import processors
from torchmix.steps.worker.messages import (
    AddMember,
    Channel,
    NewWorker,
    NodeLost,
    decode_beat,
    encode,
    open_files_named,
)

# --- What ended a worker process, in words.


def lost_with(pid: int, code: int, reason: str = ENDED) -> WorkerLost:
    """The error for a worker that is lost.

    Args:
        pid: The number of its process.
        code: The exit code, negative for a signal.
        reason: How it was lost, where that was not by its own end.
    """
    if reason != ENDED:
        return WorkerLost(
            f"the worker process {pid}, which reads for this node, {reason}. A disk or a network that does not answer "
            f"may be behind it; restart from the last checkpoint"
        )
    if code >= 0:
        advice = ". What it printed last says why; restart from the last checkpoint"
    elif -code == signal.SIGBUS:
        advice = (
            ": a file that it had mapped into memory was cut, or the disk failed under it. Run torchmix check, which "
            "names changed files; then restart from the last checkpoint"
        )
    else:
        advice = (
            ". If the machine ran out of memory, lower look_ahead or the recipe's read.cache; then restart from the "
            "last checkpoint"
        )
    return WorkerLost(f"the worker process {pid}, which reads for this node, was ended {text_of_end(code)}{advice}")


# --- Whoever starts the worker of a node, watches it, and puts another in its place.
#
# A worker that is gone, stopped or stuck is replaced, and named in one line of the log; the third within a minute is
# an error at every member; when the keeper ends or is killed, so does the worker. Cost: a thread that looks four times
# a second.

logger = logging.getLogger(__name__)

WORKER = "torchmix.steps.worker.main"
FAREWELL_S = 10.0
"""How long the worker stays for members that have not closed yet."""
MOST_LOSSES = 3
"""Within a minute, the last of which is an error."""
WINDOW_S = 60.0
AT_ONCE = Again(first_s=0.0, steady_s=WINDOW_S, most_losses=MOST_LOSSES)
"""Ranks wait for the worker; whoever cannot start another counts that as a loss, too."""


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the workers of a node run."""

    ignored_signals: tuple[int, ...] = ()
    """Signals that do not end them, from their first moment on."""
    spares: int = 0
    """Processes that wait, with their imports done."""
    cpu: int = 0
    """Processors that a worker's threads may use; 0: all."""
    memory_bytes: int = 0
    """What a worker may allocate beyond its imports; 0: it is not bounded."""


def options_of(means: Loaders, ignored_signals: Collection[int]) -> NodeOptions:
    """How workers run by the recipe's `loaders`."""
    means = limits_of_node(means)
    return NodeOptions(
        ignored_signals=tuple(sorted(ignored_signals)),
        spares=means.spares,
        cpu=means.cpu or processors(),
        memory_bytes=0 if means.memory is None else parse_bytes(means.memory, where="loaders.memory"),
    )


class _Worker:
    """A worker process, and the road of its keeper to it."""

    def __init__(self, options: NodeOptions) -> None:
        with open_files_named():
            self.child = Child(
                WORKER,
                ignored_signals=options.ignored_signals,
                cpu=options.cpu,
                environment=ENVIRONMENT if options.memory_bytes else None,
            )
        self.channel = Channel(self.child.road)
        self._memory_bytes = options.memory_bytes
        self._beat: ProcessBeat | None = None

    def judge(self) -> str | None:
        """How it was lost; None while it is not."""
        evidence = self.child.evidence()
        with suppress(TimeoutError, EOFError):
            while True:
                self._beat = decode_beat(self.channel.receive(0)[0])
        if self._beat is not None and self._memory_bytes:  # its imports are done
            limit_memory(self.child.pid, self._memory_bytes)
            self._memory_bytes = 0
        return self.child.judge(self._beat, evidence)

    def end(self, patience_s: float) -> None:
        """End it, within seconds."""
        self.channel.close()
        self.child.end(patience_s)


class WorkerSeat:
    """The worker that works and those that wait to take its place, as a keeper keeps them."""

    def __init__(self, options: NodeOptions) -> None:
        """Start nothing."""
        self._options = options
        self._works: _Worker | None = None
        self._spares: list[_Worker] = []
        self.was_spare = False
        """Whether the one that works had waited."""
        self.lost = ""
        """The one before it, and how it was lost."""

    @property
    def worker(self) -> _Worker:
        """The one that was started last."""
        assert self._works is not None, "none was started"
        return self._works

    def start(self) -> None:
        """See `Kept`."""
        for gone in [one for one in self._spares if one.child.evidence() == "gone"]:
            self._spares.remove(gone)
            gone.end(END_S)
        self.was_spare = bool(self._spares)
        self._works = self._spares.pop(0) if self._spares else _Worker(self._options)
        self.worker.child.watch_anew()

    def fill(self) -> None:
        """Start as many spares as there are to be."""
        while len(self._spares) < self._options.spares:
            self._spares.append(_Worker(self._options))

    def look(self) -> bool:
        """See `Kept`: it is introduced at once, and takes what it is asked once its imports are done."""
        reason = self.worker.judge()
        if reason is not None:
            pid = self.worker.child.pid
            self.lost = f"the node worker {pid} {reason}"
            raise lost_with(pid, self.worker.child.kill(), reason)
        return True

    def ask_to_end(self) -> None:
        """See `Kept`; spares are told, too."""
        for one in (self._works, *self._spares):
            if one is not None:
                one.channel.shut_down()

    def end(self, patience_s: float) -> None:
        """See `Kept`."""
        if self._works is not None:
            self._works.end(patience_s)

    def end_spares(self, patience_s: float) -> None:
        """End those that wait."""
        for one in self._spares:
            one.end(patience_s)
        self._spares.clear()


class NodeKeeper:
    """The worker of a node, and those that wait to take its place."""

    def __init__(self, options: NodeOptions) -> None:
        """Start a worker.

        Raises:
            OSError: It cannot be started.
            OpenFilesLimit: This process has as many open files as it may.
        """
        self.options = options
        self._members: list[Channel] = []
        self._lock = threading.Lock()
        self._generation = 0
        self._last_loss: WorkerLost | None = None
        self._lost = ""
        """Why there is no worker, and none will be."""
        self._process = os.getpid()
        self._is_ending = threading.Event()
        self._seat = WorkerSeat(options)
        self._keeper = Keeper(AT_ONCE, tell=self._hear_of)
        self._keeper.add([self._seat])
        try:
            self._seat.fill()
        except BaseException:
            self._end_workers(END_S)
            raise
        self._thread = threading.Thread(target=self._run, name="torchmix-node", daemon=True)
        self._thread.start()
        atexit.register(self.end, farewell_s=0.0)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._seat.worker.child.pid

    @property
    def is_of_this_process(self) -> bool:
        """Whether this is no copy in a fork, which has neither thread nor worker."""
        return os.getpid() == self._process

    @property
    def has_ended(self) -> bool:
        """Whether the worker was ended, or is about to be."""
        return self._is_ending.is_set()

    def admit(self, member: Channel) -> None:
        """Give a leader a road to the worker, and to those after it.

        Args:
            member: This process' end of a road to the leader; of the keeper from now on.
        """
        with self._lock:
            if not self._members:  # a worker that was started early may have waited long
                self._seat.worker.child.watch_anew()
            self._members.append(member)
            self._introduce(member)

    def part(self) -> bool:
        """Leave all leaders that have a road here, whether they live or not; whether there still is a worker."""
        with self._lock:
            for member in self._members:
                member.shut_down()  # it is heard of, as of one that has left
        return not self._lost

    def end(self, farewell_s: float = FAREWELL_S, *, patience_s: float | None = None) -> None:
        """End the worker, once its members have left it. A fork of the process does nothing.

        Args:
            farewell_s: How long members that have not left are waited for.
            patience_s: How long the worker may take to end by itself; None: `END_S`.
        """
        if os.getpid() != self._process:
            return
        atexit.unregister(self.end)
        give_up_s = time.monotonic() + farewell_s
        while self._members and time.monotonic() < give_up_s and not self._lost:
            time.sleep(LOOK_S / 10)
        self._is_ending.set()
        self._thread.join()
        self._end_workers(END_S if patience_s is None else patience_s)
        with self._lock:
            for member in self._members:
                member.close()
            self._members.clear()

    def _end_workers(self, patience_s: float) -> None:
        self._keeper.close(patience_s)
        self._seat.end_spares(patience_s)

    def _run(self) -> None:
        while not self._is_ending.is_set():
            with self._lock:
                members = {member.fileno(): member for member in self._members}
            for ready in wait([*members], LOOK_S):
                self._hear(members[cast(int, ready)])
            if self._is_ending.is_set() or self._lost or not self._members:  # nobody waits for the worker
                self._is_ending.wait(LOOK_S)
                continue
            with self._lock:
                self._keeper.look()

    def _hear(self, member: Channel) -> None:
        """A member that says something has left: it has nothing to say."""
        with suppress(EOFError, TimeoutError):
            member.receive(0)
        with self._lock:
            self._members.remove(member)
            member.close()

    def _hear_of(self, kind: Kind, error: Exception | None, upkeep: Upkeep) -> None:
        """The keeper says what has become of the worker; while it looks, nobody comes or leaves."""
        if isinstance(error, WorkerLost):
            self._last_loss = error
        if kind == "again":
            self._go_on()
        elif kind == "over" and error is self._last_loss:
            self._give_up(f"{error}. It is the third of this node in {upkeep.losses_within_s:.0f} s")
        elif kind == "over":
            self._give_up(f"{self._last_loss}; another could not be started: {error}")

    def _go_on(self) -> None:
        """Another works in the place of the one that was lost."""
        self._generation += 1
        try:
            for member in self._members:
                self._introduce(member)
        except TorchmixError as failure:  # this process has as many open files as it may
            self._give_up(f"{self._last_loss}; another cannot be reached: {failure}")
            return
        kind = "a spare" if self._seat.was_spare else "a new one"
        text = (
            f"{self._seat.lost}: {kind}, process {self.pid}, takes its place for {len(self._members)} leaders; "
            f"{self._generation} lost since the start"
        )
        logger.warning("%s", text)
        own_board.note(text)
        with suppress(OSError, TorchmixError):
            self._seat.fill()

    def _give_up(self, text: str) -> None:
        self._lost = text
        own_board.note(text)
        for member in self._members:
            with suppress(EOFError):
                member.send(encode(NodeLost(text=text)))

    def _introduce(self, member: Channel) -> None:
        """Connect a member with the worker."""
        if self._lost:
            with suppress(EOFError):
                member.send(encode(NodeLost(text=self._lost)))
            return
        with open_files_named():
            ours, theirs = socket.socketpair()
        with ours, theirs, suppress(EOFError):  # whoever has gone is noticed elsewhere
            self._seat.worker.channel.send(encode(AddMember()), [theirs.fileno()])
            member.send(encode(NewWorker(generation=self._generation, pid=self.pid)), [ours.fileno()])


# --- A keeper that was started before it was known who needs it: at most one waits in a process, and nobody else's.

_waiting_lock = threading.Lock()
_waiting: list[tuple[NodeOptions, NodeKeeper]] = []
"""At most one."""
_taken: list[tuple[NodeOptions, NodeKeeper]] = []
"""Those that leaders of this process have a hold on."""


def start_ahead(options: NodeOptions) -> None:
    """Start a worker that `keeper_of` will find, unless one with these options waits.

    Raises:
        OSError: It cannot be started.
    """
    with _waiting_lock:
        if not any(waiting == options and keeper.is_of_this_process for waiting, keeper in _waiting):
            _end_waiting()
            _waiting.append((options, NodeKeeper(options)))


def keeper_of(options: NodeOptions) -> NodeKeeper:
    """The keeper that waits, if it has these options, or a new one.

    Raises:
        OSError: A worker cannot be started.
    """
    with _waiting_lock:
        for waiting, keeper in _waiting:
            if waiting == options and keeper.is_of_this_process:
                _waiting.clear()
                break
        else:
            _end_waiting()
            keeper = NodeKeeper(options)
        _taken.append((options, keeper))
        return keeper


def keep_waiting(keeper: NodeKeeper) -> None:
    """Let a keeper that serves nobody any more wait for `keeper_of`."""
    with _waiting_lock:
        _end_waiting()
        _taken[:] = [entry for entry in _taken if entry[1] is not keeper]
        _waiting.append((keeper.options, keeper))


def is_kept(options: NodeOptions) -> bool:
    """Whether this process keeps a worker with these options, which another loader of it will share."""
    with _waiting_lock:
        _taken[:] = [entry for entry in _taken if entry[1].is_of_this_process and not entry[1].has_ended]
        return any(of_options == options for of_options, _ in _taken)


@contextmanager
def taking_what_waits() -> Iterator[None]:
    """Whoever runs inside may take the worker that waits; afterwards none waits, also where it has failed."""
    try:
        yield
    finally:
        end_waiting()


def end_waiting() -> None:
    """End the worker that waits, if one does: it is not needed here."""
    with _waiting_lock:
        _end_waiting()


def _end_waiting() -> None:
    for waiting, keeper in _waiting:
        if keeper.is_of_this_process:
            logger.info("the worker that was started early, process %d, %s, is not needed here", keeper.pid, waiting)
            keeper.end(farewell_s=0.0, patience_s=0.0)  # nobody has asked it for anything
    _waiting.clear()
