"""A road to a loader on which bytes are lost, late, repeated or altered: a proxy of TCP in threads.

In: the loader's address, of TCP or a socket. Out: an address of its own, and a fault that holds from now on. Everything
ends with `close`.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

FAULTS = ("none", "cut", "delay", "flip", "repeat", "drop", "reorder")


class FaultyRoad:
    """Passes bytes on between clients and one loader."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self._target = endpoint
        self._draw = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.fault = "none"
        self._ends: list[socket.socket] = []
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """End all connections; clients may come again."""
        for end in list(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End for good."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            try:
                theirs = _connected(self._target)
            except OSError:
                ours.close()
                continue
            self._ends += [ours, theirs]
            for one, other in ((ours, theirs), (theirs, ours)):
                thread = threading.Thread(target=self._pass_on, args=(one, other), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while content := one.recv(1 << 16):
                fault = self.fault
                if fault == "cut":
                    break
                if fault == "delay":
                    time.sleep(self._draw.random() * 0.1)
                if fault == "drop":
                    continue
                if fault == "flip":
                    altered = bytearray(content)
                    altered[self._draw.randrange(len(altered))] ^= 1 << self._draw.randrange(8)
                    content = bytes(altered)
                if fault == "reorder" and not held:
                    held = content
                    continue
                content, held = (content + held if fault == "reorder" else held + content), b""
                other.sendall(content * 2 if fault == "repeat" else content)
        for end in (one, other):
            with contextlib.suppress(OSError):  # an end that has gone cannot be shut down, and is closed all the same
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _connected(endpoint: str) -> socket.socket:
    kind, _, place = endpoint.partition("://")
    if kind == "ipc":
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(5)
        try:
            found.connect(place)
        except OSError:
            found.close()
            raise
        return found
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)), 5)
