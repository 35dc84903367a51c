"""The process that keeps a job's loaders on Ray, as the ranks of the job see it."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

import msgspec

from torchmix.errors import LoaderLost
from torchmix.parallel.children import start_interpreter
from torchmix.recipe.structs import Autoscale
from torchmix.service.main import LoaderStart, framed, receive
from torchmix.service.ray.main import RayStart, decode_ray_listens
from torchmix.service.roster import FolderMirror, JobStore, Nodes, text_of, value_of

# --- The process that keeps a job's loaders on Ray, as the job's first rank sees it: started, watched, ended.
#
# A process that is lost is started again, and starts other loaders; it ends with this one. Cost: a thread that sleeps.

logger = logging.getLogger(__name__)

KEEPER = "torchmix.service.ray.main"
END_S = 60.0
"""How long it may take to end its loaders, before it is killed and Ray ends them."""
FIRST_AGAIN_S, MOST_AGAIN_S = 1.0, 60.0


class RayKeeper:
    """The process, in a thread's sight."""

    def __init__(self, start: RayStart) -> None:
        """Start it, and wait until the loaders listen.

        Args:
            start: The message that the process reads first.

        Raises:
            TorchmixError: There is no cluster, no profile or no room; or ray is not installed.
            OSError: It cannot be started.
        """
        self._start = start
        self._is_ending = threading.Event()
        self.num_lost = 0
        self._end, self.process = self._started()
        try:
            self._listens()
        except BaseException:
            self._stop()
            raise
        self._thread = threading.Thread(target=self._watch, name="torchmix-ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it with its loaders; may be called again."""
        self._is_ending.set()
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _started(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        ignored = {int(signal.SIGINT), *self._start.loader.ignored_signals}
        try:
            with theirs:
                process = start_interpreter(KEEPER, theirs, ignored_signals=ignored)
            ours.sendall(framed(self._start))
        except BaseException:
            ours.close()
            raise
        return ours, process

    def _listens(self) -> None:
        """Wait until the loaders listen."""
        try:
            said = decode_ray_listens(receive(self._end))
        except (EOFError, OSError) as error:
            raise LoaderLost(f"the process {self.process.pid}, which starts loaders on Ray, has ended") from error
        if said.error is not None:
            raise said.error.error()

    def _stop(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._end.close()

    def _watch(self) -> None:
        again_s = FIRST_AGAIN_S
        while not self._is_ending.is_set():
            if not wait([self._end], 1.0) or self._is_ending.is_set():
                continue
            self.process.kill()
            code = self.process.wait()
            self.num_lost += 1
            logger.warning("process %d, which keeps loaders on Ray, has ended with %d", self.process.pid, code)
            while not self._is_ending.wait(again_s):
                again_s = min(2 * again_s, MOST_AGAIN_S)
                if self._start_again():
                    break

    def _start_again(self) -> bool:
        """Start another process, and wait until its loaders listen; False where none could be started."""
        try:
            end, process = self._started()
        except OSError as error:
            logger.warning("the process that keeps loaders on Ray cannot be started again: %s", error)
            return False
        self._end.close()
        self._end, self.process = end, process
        if self._is_ending.is_set():  # `close` may have ended the one before
            self._stop()
            return True
        try:
            self._listens()
        except Exception as error:
            logger.warning("loaders on Ray cannot be started again: %s", error)
        return True


# --- The loaders of a job on a Ray cluster: kept by the first rank, known on every node.
#
# The first rank of a node has its folder, and the first rank of the job the process that keeps the loaders; all end
# with these ranks; secrets are written nowhere. Cost: the start of actors, once for all parts of a recipe that are
# open together.


class RayMeans(msgspec.Struct, frozen=True, kw_only=True):
    """How many loaders there may be on a cluster; see `RayStart`."""

    address: str
    processes: int | Literal["auto"]
    autoscale: Autoscale | None
    cpu: int | None
    memory_bytes: int | None


class RayLoaders:
    """What a rank holds of them: a folder, the process that keeps them, or nothing."""

    def __init__(self, mirror: FolderMirror | None, keeper: RayKeeper | None) -> None:
        """Made by `open_ray_loaders`."""
        self.mirror, self.keeper = mirror, keeper

    def close(self) -> None:
        """End them; may be called again."""
        if self.keeper is not None:
            self.keeper.close()
        if self.mirror is not None:
            self.mirror.close()


def open_ray_loaders(
    start: LoaderStart,
    means: RayMeans,
    nodes: Nodes,
    *,
    store: JobStore,
    own_store: Callable[[], JobStore],
    prefix: str,
    rank: int,
    check: Callable[[], None],
) -> tuple[RayLoaders, Path]:
    """Start the loaders of a job on a cluster. A collective.

    Args:
        start: What they serve.
        means: How many there may be.
        nodes: Of the job; public keys of all ranks.
        store: The job's; None where all ranks are in this process.
        own_store: Makes another connection to it.
        prefix: Of the keys of this round.
        rank: Global rank.
        check: Raises while this waits, if a rank is lost.

    Returns:
        What this rank holds, and the folder where its node finds the loaders.

    Raises:
        TorchmixError: On the first rank: there is no cluster, no profile or no room, or ray is not installed.
        OSError: A process cannot be started.
    """
    host = nodes.host_of[rank] if nodes.host_of else rank
    held = RayLoaders(FolderMirror() if rank == host else None, None)
    roster = f"{prefix}/roster"
    try:
        if held.mirror is not None and rank == 0:
            told = RayStart(
                loader=msgspec.structs.replace(start, allowed=nodes.clients),
                folder=str(held.mirror.folder),
                address=means.address,
                processes=means.processes,
                autoscale=means.autoscale,
                cpu=means.cpu,
                memory_bytes=means.memory_bytes,
            )
            held.keeper = RayKeeper(told)
            if store is not None:
                held.mirror.tell(own_store(), roster)
        elif held.mirror is not None:
            held.mirror.follow(own_store(), roster, check)
        if store is None:
            assert held.mirror is not None
            return held, held.mirror.folder
        if held.mirror is not None:
            store.set(f"{prefix}/folder/{rank}", text_of(str(held.mirror.folder)))
        return held, Path(value_of(store, f"{prefix}/folder/{host}", msgspec.json.Decoder(str).decode, check))
    except BaseException:
        held.close()
        raise
