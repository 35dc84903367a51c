"""Whoever starts the worker of a node, watches it, and puts another in its place."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait
from typing import cast

import msgspec

from torchmix.boards.board import own_board
from torchmix.errors import WorkerLost
from torchmix.parallel.children import ENVIRONMENT, ProcessBeat, ProcessWatch, limit_memory, start_interpreter
from torchmix.parallel.liveness.evidence import Patience, evidence_of_process, identity_of_process
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


def lost_with(pid: int, code: int, reason: str = "has ended") -> WorkerLost:
    """The error for a worker that is lost.

    Args:
        pid: Of its process.
        code: The exit code, negative for a signal.
        reason: How it was lost, where that was not by its own end.
    """
    if reason != "has ended":
        return WorkerLost(
            f"the worker process {pid}, which reads for this node, {reason}. A disk or a network that does not answer "
            f"may be behind it; restart from the last checkpoint"
        )
    how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
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
    return WorkerLost(f"the worker process {pid}, which reads for this node, was ended {how}{advice}")


# --- Whoever starts the worker of a node, watches it, and puts another in its place.
#
# A worker that is gone, stopped or stuck is replaced, and named in one line of the log; the third within a minute is
# an error at every member; when the host ends or is killed, so does the worker. Cost: a thread that looks four times a
# second.

logger = logging.getLogger(__name__)

WORKER = "torchmix.steps.worker.main"
LOOK_S = 0.25
END_S = 1.0
"""How long a process that was told to end may take over its step, before it is killed. It leaves nothing behind, and
whoever has interrupted a run does not wait for a worker that is stopped."""
FAREWELL_S = 10.0
"""How long the worker stays for members that have not closed yet."""
MOST_LOSSES = 3
"""Within a minute, the last of which is an error."""
WINDOW_S = 60.0


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


class _Child:
    """A worker process, and the host's road to it."""

    def __init__(self, options: NodeOptions) -> None:
        with open_files_named():
            ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            # When the terminal interrupts all of a job, it is the host that says when to end.
            ignored = {signal.SIGINT, *options.ignored_signals}
            with open_files_named():
                environment = ENVIRONMENT if options.memory_bytes else None
                self.process = start_interpreter(
                    WORKER, theirs, ignored_signals=ignored, cpu=options.cpu, environment=environment
                )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self._memory_bytes = options.memory_bytes
        self.identity = identity_of_process(self.process.pid)
        self.beat: ProcessBeat | None = None
        self.watch = _new_watch()

    @property
    def pid(self) -> int:
        return self.process.pid

    def judge(self) -> str | None:
        """How it was lost; None while it is not."""
        with suppress(TimeoutError, EOFError):
            while True:
                self.beat = decode_beat(self.channel.receive(0)[0])
        if self.beat is not None and self._memory_bytes:  # its imports are done
            limit_memory(self.pid, self._memory_bytes)
            self._memory_bytes = 0
        evidence = "gone" if self.process.poll() is not None else evidence_of_process(self.identity)
        return self.watch.look(self.beat, evidence, now_s=time.monotonic())

    def end(self, patience_s: float) -> int:
        """End it, within seconds; its exit code, negative for the signal that has ended it or is to end it."""
        self.channel.close()
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # it is inside a call of a disk that does not answer
            return -signal.SIGKILL


def _new_watch() -> ProcessWatch:
    """A watch that begins now."""
    return ProcessWatch(patience=Patience(poll_s=LOOK_S), now_s=time.monotonic())


class NodeHost:
    """The worker of a node, and those that wait to take its place."""

    def __init__(self, options: NodeOptions) -> None:
        """Start a worker.

        Raises:
            OSError: It cannot be started.
            OpenFilesLimit: This process has as many open files as it may.
        """
        self._options = options
        self._members: list[Channel] = []
        self._lock = threading.Lock()
        self._losses_s: deque[float] = deque(maxlen=MOST_LOSSES)
        self._generation = 0
        self._child = _Child(options)
        self._spares = [_Child(options) for _ in range(options.spares)]
        self._lost = ""
        self._process = os.getpid()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmix-node", daemon=True)
        self._thread.start()
        atexit.register(self.end, farewell_s=0.0)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._child.pid

    @property
    def is_of_this_process(self) -> bool:
        """Whether this is no copy in a fork, which has neither thread nor worker."""
        return os.getpid() == self._process

    def admit(self, member: Channel) -> None:
        """Give a leader a road to the worker, and to those after it.

        Args:
            member: This process' end of a road to the leader; the host's from now on.
        """
        with self._lock:
            if not self._members:  # a worker that was started early may have waited long
                self._child.watch = _new_watch()
            self._members.append(member)
            self._introduce(member)

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
        for child in (self._child, *self._spares):
            child.channel.shut_down()
        for child in (self._child, *self._spares):
            child.end(END_S if patience_s is None else patience_s)
        with self._lock:
            for member in self._members:
                member.close()
            self._members.clear()

    def _run(self) -> None:
        while not self._is_ending.is_set():
            with self._lock:
                members = {member.fileno(): member for member in self._members}
            for ready in wait([*members], LOOK_S):
                self._hear(members[cast(int, ready)])
            if self._is_ending.is_set() or self._lost or not self._members:  # nobody waits for the worker
                self._is_ending.wait(LOOK_S)
                continue
            reason = self._child.judge()
            if reason is not None:
                self._replace(reason)

    def _hear(self, member: Channel) -> None:
        """A member that says something has left: it has nothing to say."""
        with suppress(EOFError, TimeoutError):
            member.receive(0)
        with self._lock:
            self._members.remove(member)
            member.close()

    def _replace(self, reason: str) -> None:
        lost, now_s = self._child, time.monotonic()
        lost.process.kill()
        error = lost_with(lost.pid, lost.end(END_S), reason)
        self._losses_s.append(now_s)
        self._generation += 1
        with self._lock:
            if len(self._losses_s) == MOST_LOSSES and now_s - self._losses_s[0] < WINDOW_S:
                self._give_up(f"{error}. It is the third of this node in {now_s - self._losses_s[0]:.0f} s")
                return
            try:
                spare = next((one for one in self._spares if one.process.poll() is None), None)
                if spare is not None:
                    self._spares.remove(spare)
                self._child = spare or _Child(self._options)
            except (OSError, WorkerLost) as failure:
                self._give_up(f"{error}; another could not be started: {failure}")
                return
            self._child.watch = _new_watch()
            for member in list(self._members):
                self._introduce(member)
        kind = "a spare" if spare is not None else "a new one"
        text = (
            f"the node worker {lost.pid} {reason}: {kind}, process {self._child.pid}, goes on in its place for "
            f"{len(self._members)} leaders; {self._generation} lost since the start"
        )
        logger.warning("%s", text)
        own_board.note(text)
        if spare is not None:
            with suppress(OSError, WorkerLost):
                self._spares.append(_Child(self._options))

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
            self._child.channel.send(encode(AddMember()), [theirs.fileno()])
            member.send(encode(NewWorker(generation=self._generation, pid=self._child.pid)), [ours.fileno()])
