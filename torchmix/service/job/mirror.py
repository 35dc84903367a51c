"""The registrations of one node's folder, in the folders of all nodes of a job: what loaders that come and go need.

In: the job's store, and a folder. Out: on the first node, the store has what the folder has; on the others, the folder
has what the store has. Must hold: no secret is in it; a folder is of this user alone, and is removed at the end. Cost:
a thread, and one small value that each node reads from the store once a second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec

from torchmix.boards.socket_folders import socket_folder
from torchmix.service.endpoints import Registration, register, registered, registration_path
from torchmix.service.job.roster import JobStore, text_of, value_of

logger = logging.getLogger(__name__)

LOOK_S = 0.5
_decode = msgspec.json.Decoder(list[Registration]).decode


class FolderMirror:
    """A folder of registrations that follows another one, or that others follow."""

    def __init__(self) -> None:
        """Make the folder."""
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(socket_folder())
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._told: list[Registration] | None = None

    def tell(self, store: JobStore, key: str) -> None:
        """Write what the folder has into the store, now and whenever it changes."""
        self._write(store, key)
        self._begin(lambda: self._write(store, key))

    def follow(self, store: JobStore, key: str, check: Callable[[], None]) -> None:
        """Have what the store has, as soon as there is something, and from then on.

        Args:
            store: A connection of its own.
            key: Where another node writes.
            check: Raises while this waits, if a rank is lost.
        """
        self._take(value_of(store, key, _decode, check))
        self._begin(lambda: self._take(_decode(store.get(key))))

    def close(self) -> None:
        """Remove the folder; may be called again."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_S)  # the store may not answer any more
        self._stack.close()

    def _begin(self, look: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=[look], name="torchmix-mirror", daemon=True)
        self._thread.start()

    def _run(self, look: Callable[[], None]) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                look()
            except (OSError, RuntimeError, msgspec.MsgspecError) as error:  # the store ends with its job
                logger.debug("loaders are not followed: %s", error)

    def _write(self, store: JobStore, key: str) -> None:
        now = registered(self.folder)
        if now != self._told:
            store.set(key, text_of(now))
            self._told = now

    def _take(self, now: list[Registration]) -> None:
        if now == self._told or self._is_over.is_set():
            return
        for one in now:
            register(self.folder, one.endpoint, one.sources, one.public)
        paths = {registration_path(self.folder, one.endpoint) for one in now}
        for one in registered(self.folder):
            path = registration_path(self.folder, one.endpoint)
            if path not in paths:
                with suppress(FileNotFoundError):
                    path.unlink()
        self._told = now
