"""Loader processes of this machine: started, watched, started again, ended.

A loader that has ended, is stopped or stuck comes back at its endpoint, later each time that it does so again soon; all
end with this process, however it ends; nothing is left behind. Cost: a thread that looks four times a second.

A loader is a new interpreter, as a node worker is: not a fork, since this process may run threads, and not a process of
multiprocessing, which would import the user's script.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from torchmix.boards.board import own_board
from torchmix.errors import LoaderLost
from torchmix.parallel.children import ProcessBeat, ProcessWatch, start_interpreter
from torchmix.parallel.liveness.evidence import Patience, evidence_of_process, identity_of_process
from torchmix.service.endpoints import with_port
from torchmix.service.main import (
    LoaderSays,
    LoaderStart,
    LoaderStarted,
    decode_said,
    framed,
    remove_sockets,
    unframed,
)

logger = logging.getLogger(__name__)

LOADER = "torchmix.service.main"
LOOK_S = 0.25
END_S = 1.0
"""How long a loader that was told to end may take over its request, before it is killed."""
START_S = 120.0
FIRST_AGAIN_S = 0.5
MOST_AGAIN_S = 30.0
STEADY_S = 60.0
"""A loader that has lived so long is started again at once."""
TAIL_BYTES = 4096


class LoaderProcess:
    """One loader of this machine."""

    def __init__(self, start: LoaderStart, log: Path | None) -> None:
        """Start it; `log`: where its log lines go, instead of this process' stderr."""
        self.start, self._log = start, log
        self.began_s = time.monotonic()
        self._heard = bytearray()
        self._beat: ProcessBeat | None = None
        ours, theirs = socket.socketpair()
        self._end = ours
        # When the terminal interrupts all, whoever started it says when to end.
        ignored = {int(signal.SIGINT), *start.ignored_signals}
        for each in (start.bind, start.near):
            if each.startswith("ipc://"):
                Path(each.removeprefix("ipc://")).unlink(missing_ok=True)  # of the one before, which has ended
        try:
            with theirs, Path(os.devnull if log is None else log).open("ab") as file:
                self.process = start_interpreter(
                    LOADER, theirs, ignored_signals=ignored, cpu=start.cpu, log=None if log is None else file
                )
            ours.sendall(framed(start))
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._identity = identity_of_process(self.process.pid)
        self._watch = ProcessWatch(patience=Patience(poll_s=LOOK_S), now_s=self.began_s)

    def endpoint(self, is_over: threading.Event) -> str:
        """Where it listens; waits until it does, or is to end.

        Raises:
            TorchmixError: It cannot serve; as it was raised there.
            LoaderLost: It has ended, or is to.
        """
        while time.monotonic() < self.began_s + START_S and wait([self._end], LOOK_S) is not None:
            if is_over.is_set():
                self.close()
                raise LoaderLost(f"loader process {self.process.pid} was ended before it listened")
            for said in self._hear():
                if isinstance(said, LoaderStarted) and said.error is not None:
                    self.close()
                    raise said.error.error()
                if isinstance(said, LoaderStarted):
                    return said.endpoint
            if self.process.poll() is not None:
                break
        self.close()
        raise LoaderLost(f"loader process {self.process.pid} has ended before it listened{self.tail()}")

    def judge(self) -> str | None:
        """How it was lost; None while it is not."""
        for said in self._hear():
            if isinstance(said, ProcessBeat):
                self._beat = said
            elif said.error is not None:
                logger.warning("loader %d: %s", self.process.pid, said.error.text)
        evidence = "gone" if self.process.poll() is not None else evidence_of_process(self._identity)
        return self._watch.look(self._beat, evidence, now_s=time.monotonic())

    def _hear(self) -> list[LoaderSays]:
        """What it has said by now."""
        with suppress(OSError):
            while part := self._end.recv(1 << 16):
                self._heard += part
        said: list[LoaderSays] = []
        while (message := unframed(self._heard)) is not None:
            said.append(decode_said(message))
        return said

    def close(self) -> None:
        """End it, within seconds."""
        self._end.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # it is inside a call of a disk that does not answer
                self.process.wait(END_S)

    def how_lost(self, reason: str) -> str:
        """A verdict of `judge`, with what the kernel says of its end."""
        if reason != "has ended":
            return f"{reason}, and was killed"
        code = self.process.returncode
        return f"has ended {f'by signal {signal.Signals(-code).name}' if code < 0 else f'with exit code {code}'}"

    def tail(self) -> str:
        """Its last log lines, behind a line end; empty where they went to stderr."""
        if self._log is None:
            return ""
        with suppress(OSError):
            return "\n" + self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        return ""


class LoaderPool:
    """The loaders that this process has started."""

    def __init__(
        self,
        starts: Sequence[LoaderStart],
        *,
        logs: Path | None = None,
        near: ExitStack | None = None,
        is_over: threading.Event | None = None,
    ) -> None:
        """Start all and wait until they listen.

        Args:
            starts: What each is told.
            logs: A folder for their log lines; by default they go to stderr.
            near: Holds the folder of their `near`; closed with them.
            is_over: Set where nobody wants them any more, while they start.

        Raises:
            TorchmixError: One cannot serve.
            OSError: One cannot be started.
        """
        self._logs = [None if logs is None else logs / f"loader-{number}.log" for number in range(len(starts))]
        self._members: list[LoaderProcess] = []
        self._near = near or ExitStack()
        self._is_ending = threading.Event()
        self._again_s = [FIRST_AGAIN_S] * len(starts)
        self._due_s: list[float | None] = [None] * len(starts)
        try:
            for start, log in zip(starts, self._logs, strict=True):
                self._members.append(LoaderProcess(start, log))
            over = is_over or threading.Event()
            self.endpoints = tuple(member.endpoint(over) for member in self._members)
        except BaseException:
            self._end_all()
            raise
        self._starts = [
            msgspec.structs.replace(start, bind=endpoint)
            for start, endpoint in zip(starts, self.endpoints, strict=True)
        ]
        self.num_lost = 0
        self._thread = threading.Thread(target=self._watch, name="torchmix-loaders", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the loaders."""
        return [member.process.pid for member in self._members]

    def last_words(self) -> str:
        """The last log lines of all."""
        return "".join(member.tail() for member in self._members).strip()

    def close(self) -> None:
        """End all; may be called again."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end_all()

    def _end_all(self) -> None:
        for member in self._members:
            with suppress(OSError):
                member.process.terminate()
        for member in self._members:
            member.close()
            remove_sockets(member.start)  # of one that was killed
        self._near.close()

    def _watch(self) -> None:
        while not self._is_ending.wait(LOOK_S):
            for number in range(len(self._members)):
                try:
                    self._look_at(number)
                except OSError as error:
                    logger.warning("a loader cannot be started: %s", error)

    def _look_at(self, number: int) -> None:
        member, now = self._members[number], time.monotonic()
        if self._due_s[number] is None:
            reason = member.judge()
            if reason is None:
                return
            member.process.kill()
            member.close()
            self.num_lost += 1
            is_steady = now - member.began_s > STEADY_S
            self._again_s[number] = FIRST_AGAIN_S if is_steady else min(2 * self._again_s[number], MOST_AGAIN_S)
            self._due_s[number] = now + (0.0 if is_steady else self._again_s[number] / 2)
            text = f"loader {member.process.pid} at {member.start.bind} {member.how_lost(reason)}"
            logger.warning("%s", text)
            own_board.note(text)
        due_s = self._due_s[number]
        if due_s is not None and now >= due_s:
            self._members[number] = LoaderProcess(self._starts[number], self._logs[number])
            self._due_s[number] = None


def starts_of(start: LoaderStart, processes: int) -> list[LoaderStart]:
    """What several loaders are told: one after the other in ports or paths, and an even part of the cache each."""
    cache_bytes = start.cache_bytes // processes
    binds = [with_port(start.bind, number) for number in range(processes)]
    nears = [f"{start.near}/{number}" if start.near else "" for number in range(processes)]
    ports = [start.metrics_port + number if start.metrics_port else 0 for number in range(processes)]
    return [
        msgspec.structs.replace(start, bind=bind, near=near, cache_bytes=cache_bytes, metrics_port=port)
        for bind, near, port in zip(binds, nears, ports, strict=True)
    ]
