"""Loader processes of this machine: each comes back at its endpoint, and all end with this process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from torchmix.boards.board import own_board
from torchmix.errors import LoaderLost
from torchmix.parallel.children import Child, ProcessBeat, text_of_loss
from torchmix.parallel.keeper import Keeper, Kind, Upkeep
from torchmix.service.endpoints import with_port
from torchmix.service.main import (
    LoaderSays,
    LoaderStart,
    decode_said,
    framed,
    remove_sockets,
    unframed,
)

logger = logging.getLogger(__name__)

LOADER = "torchmix.service.main"
START_S = 120.0
"""How long a loader may take until it listens."""


class LoaderSeat:
    """One loader of this machine, as a keeper keeps it.

    It is a new interpreter, as a node worker is: not a fork, since this process may run threads, and not a process of
    multiprocessing, which would import the user's script.
    """

    def __init__(self, told: LoaderStart) -> None:
        """Start nothing; `told` is what it is told, and whoever follows it."""
        self.told = told
        self._child: Child | None = None
        self._heard = bytearray()
        self._beat: ProcessBeat | None = None

    @property
    def pid(self) -> int:
        """The number of the process that was started last."""
        assert self._child is not None, "none was started"
        return self._child.pid

    @property
    def is_asked(self) -> bool:
        """Whether it owed somebody something a second ago."""
        return self._beat is not None and self._beat.is_asked

    def start(self) -> None:
        """See `Kept`."""
        for each in (self.told.bind, self.told.near):
            if each.startswith("ipc://"):
                Path(each.removeprefix("ipc://")).unlink(missing_ok=True)  # of one that was killed elsewhere
        self._heard.clear()
        self._beat, self._is_ready, self._began_s = None, False, time.monotonic()
        self._child = Child(LOADER, ignored_signals=self.told.ignored_signals, cpu=self.told.cpu)
        self._child.road.sendall(framed(self.told))
        self._child.road.setblocking(False)

    def look(self) -> bool:
        """See `Kept`."""
        assert self._child is not None, "none was started"
        evidence = self._child.evidence()  # before it is heard: of one that is gone all is heard
        for said in self._hear(self._child):
            if isinstance(said, ProcessBeat):
                self._beat = said
            elif said.error is not None:
                raise said.error.error()
            else:
                self._is_ready = True
                if said.endpoint != self.told.bind:  # the system has chosen a port
                    self.told = msgspec.structs.replace(self.told, bind=said.endpoint)
        reason = self._child.judge(self._beat, evidence)
        if reason is None and not self._is_ready and time.monotonic() - self._began_s > START_S:
            reason = f"does not listen after {START_S:.0f} s"
        if reason is not None:
            how = text_of_loss(reason, self._child.kill())
            before = "" if self._is_ready else ", before it listened"
            raise LoaderLost(f"loader {self._child.pid} at {self.told.bind} {how}{before}")
        return self._is_ready

    def ask_to_end(self) -> None:
        """See `Kept`."""
        if self._child is not None:
            with suppress(OSError):
                self._child.process.terminate()

    def end(self, patience_s: float) -> None:
        """See `Kept`."""
        if self._child is not None:
            self._child.end(patience_s)
            remove_sockets(self.told)  # of one that was killed

    def _hear(self, child: Child) -> list[LoaderSays]:
        """What it has said by now."""
        with suppress(OSError):
            while part := child.road.recv(1 << 16):
                self._heard += part
        said: list[LoaderSays] = []
        while (message := unframed(self._heard)) is not None:
            said.append(decode_said(message))
        return said


class LoaderPool:
    """The loaders that this process has started."""

    def __init__(
        self,
        starts: Sequence[LoaderStart],
        *,
        near: ExitStack | None = None,
        is_over: threading.Event | None = None,
    ) -> None:
        """Start all and wait until they listen.

        Args:
            starts: What each is told.
            near: Holds the folder of their `near`; closed with them.
            is_over: Set where nobody wants them any more, while they start.

        Raises:
            TorchmixError: One cannot serve.
            OSError: One cannot be started.
        """
        self._near = near or ExitStack()
        self._seats = [LoaderSeat(start) for start in starts]
        self._keeper = keeper_of_loaders()
        try:
            self._keeper.add(self._seats, check=lambda: check_wanted(is_over))
        except BaseException:
            self._near.close()
            raise
        self.endpoints = tuple(seat.told.bind for seat in self._seats)
        self._keeper.watch("torchmix-loaders")

    @property
    def pids(self) -> list[int]:
        """Process ids of the loaders."""
        return [seat.pid for seat in self._seats]

    @property
    def is_asked(self) -> bool:
        """Whether one of them owed somebody something a second ago."""
        return any(seat.is_asked for seat in self._seats)

    @property
    def num_lost(self) -> int:
        """Loaders that were lost since the start."""
        return self._keeper.num_lost

    def close(self) -> None:
        """End all; may be called again."""
        self._keeper.close()
        self._near.close()


def keeper_of_loaders() -> Keeper:
    """A keeper that logs and shows what it loses."""
    return Keeper(tell=_tell)


def _tell(kind: Kind, error: Exception | None, upkeep: Upkeep) -> None:
    if error is not None:
        text = f"a loader cannot be started: {error}" if kind == "unstarted" else str(error)
        logger.warning("%s", text)
        own_board.note(text)


def check_wanted(is_over: threading.Event | None) -> None:
    """Refuse to wait for loaders that nobody wants any more.

    Raises:
        LoaderLost: The event is set.
    """
    if is_over is not None and is_over.is_set():
        raise LoaderLost("loaders were ended before they listened")


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
