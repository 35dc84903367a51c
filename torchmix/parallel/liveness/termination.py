"""SIGTERM: find out who is lost, then end as the signal says.

A program that handles SIGTERM itself, before or after this, does so undisturbed, and decides alone what becomes of the
process; a fork does nothing of this. Cost: a thread that waits, and two sockets.

Torchrun sends SIGTERM to all ranks a moment after one of them has died: too early for a heartbeat to be missed. Python
runs a handler of a signal in the main thread, between two instructions, and the main thread of a rank that has lost
another waits inside a collective. But Python writes the number of each signal that it handles to the wakeup descriptor
at once, and a thread can read it there. So a handler is set where there is none, for that alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the writer to a socket, as Linux passes them."""
LOOK_S = 2.0
"""Limit of the check before the end: a store whose server has died may not answer."""
_current: Termination | None = None
"""The one of this process that listens."""


class Termination:
    """Listens for SIGTERM from its beginning to `close`; one at a time."""

    def __init__(self, look: Callable[[bool], None]) -> None:
        """Begin to listen; in any thread but the main one nothing is done.

        Args:
            look: Called once, in a thread, with whether the process ends of the signal then, since nobody handles it.
        """
        global _current
        self._look = look
        self._thread: threading.Thread | None = None
        if threading.current_thread() is not threading.main_thread() or _current is not None:
            logger.info("SIGTERM is not listened for: not the main thread, or another part of the process does")
            return
        if signal.getsignal(signal.SIGTERM) in (None, signal.SIG_IGN):
            return  # handled outside of Python, or ignored
        self._process = os.getpid()
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        if hasattr(socket, "SO_PASSCRED"):
            self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._thread = threading.Thread(target=self._run, name="torchmix-sigterm", daemon=True)
        self._thread.start()
        self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        _current = self

    def close(self) -> None:
        """Stop listening and restore the handler; outside of the main thread, only drop what was to be done."""
        global _current
        self._look = _ignored
        if self._thread is None or threading.current_thread() is not threading.main_thread():
            return
        self._restore()
        _current = None
        self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._thread = None
        self._ours.close()
        self._theirs.close()

    def _restore(self) -> None:
        """Take back handler and descriptor, unless somebody has set others since."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (now := signal.set_wakeup_fd(self._before)) != self._theirs.fileno():
            signal.set_wakeup_fd(now)

    def _run(self) -> None:
        has_looked = False
        while True:
            numbers, ancillary, _, _ = self._ours.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
            if not numbers:
                return
            if any(_CREDENTIALS.unpack(data)[0] != self._process for _, _, data in ancillary):
                continue  # a fork that has not started its program yet
            if self._before >= 0:
                with suppress(OSError):
                    os.write(self._before, numbers)  # the earlier listener gets it too
            if signal.SIGTERM in numbers and not has_looked:
                has_looked = True
                ends = signal.getsignal(signal.SIGTERM) == self._on_sigterm
                looking = threading.Thread(target=self._look, args=(ends,), name="torchmix-last-look", daemon=True)
                looking.start()
                looking.join(LOOK_S)
                if ends:
                    die_of_sigterm()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: wait for the other one, which ends the process."""
        if os.getpid() == self._process and self._thread is not None:
            with suppress(OSError):
                self._theirs.send(bytes([number]))  # the wakeup descriptor may be another's by now
            self._thread.join(LOOK_S + 1)
        die_of_sigterm()


def die_of_sigterm() -> None:
    """End this process by SIGTERM, from any thread, whatever the main thread waits for."""
    set_handler = ctypes.pythonapi.PyOS_setsig  # signal.signal works in the main thread alone
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_handler(signal.SIGTERM, None)  # the default
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    os._exit(128 + signal.SIGTERM)  # all threads block the signal


def _ignored(ends: bool) -> None:
    pass


_mask_before_fork: dict[int, set[signal.Signals]] = {}
"""By thread, the signals that it blocked."""


def _before_fork() -> None:
    """Block the signal: one that comes to a fork before Python is ready in it would be lost."""
    if _current is not None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _mask_before_fork[threading.get_ident()] = {signal.Signals(number) for number in blocked}


def _after_fork_here() -> None:
    if (blocked := _mask_before_fork.pop(threading.get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _after_fork_there() -> None:
    """Restore the handler in a fork, which does nothing of this."""
    global _current
    if _current is not None:
        _current._restore()
        _current = None
    _after_fork_here()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_here, after_in_child=_after_fork_there)
