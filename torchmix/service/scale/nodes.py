"""Loaders of the nodes of a job that follow its run: the first node decides, and each starts and ends its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from torchmix.boards.socket_folders import socket_folder
from torchmix.errors import TorchmixError
from torchmix.service.endpoints import Registration, Registry, registered
from torchmix.service.roster import LOOK_S, JobStore, text_of, value_of
from torchmix.service.scale.partition import SourceLoad
from torchmix.service.scale.rule import RunNote, ScaleBounds, ScaleDecision
from torchmix.service.scale.scaling import LoaderSeats, ScaledLoaders, SeatedLoaders

# --- The keys of the job's store, where more than one node has loaders:
#
#     PREFIX/decision   the last decision, of all nodes: whoever has missed one before it has missed nothing
#     PREFIX/of/NODE    the loaders of a node that take requests now
#     PREFIX/news       a count that grows with each of them, so that a node where nothing is new reads a number alone
#
# No secret is among them. A node that is lost says nothing more, its loaders end with it, and requests go to others; if
# it is the first one, the others keep what they have. Cost: a thread, and a request to the store each half second.

logger = logging.getLogger(__name__)

_decode_decision = msgspec.json.Decoder(ScaleDecision).decode
_decode_loaders = msgspec.json.Decoder(list[Registration]).decode


class ScaledNode:
    """The loaders of this node, and the way to those of the other nodes."""

    def __init__(
        self,
        seats: LoaderSeats,
        folder: Path,
        bounds: ScaleBounds,
        *,
        node: int = 0,
        loads_of: Callable[[int, int, RunNote], Sequence[SourceLoad]] | None,
        store: JobStore,
        prefix: str,
        is_over: threading.Event,
        check: Callable[[], None] = lambda: None,
        check_reached: Callable[[list[str]], None] = lambda endpoints: None,
    ) -> None:
        """Start the loaders that a run needs at its first step, and wait for those of the other nodes. A collective.

        Args:
            seats: Where they run.
            folder: Where they register; of this node alone.
            bounds: How many there may be, on how many nodes.
            node: Which of these this is.
            loads_of: Of the first node: what steps cost, as `ScaleRule` takes it.
            store: A connection of its own to the job's store; None where there is one node.
            prefix: Of the keys there.
            is_over: Set by `close`.
            check: Raises while this waits, if a rank is lost.
            check_reached: Raises if other nodes do not reach some endpoints.

        Raises:
            OptionError: The bounds do not hold the sources; or the loaders listen where other nodes do not reach them.
            TorchmixError: A loader cannot start.
        """
        self._folder, self._node, self._nodes, self._is_over = folder, node, bounds.nodes, is_over
        self._store, self._prefix = store, prefix
        self._loaders: ScaledLoaders | SeatedLoaders | None = None
        self._thread: threading.Thread | None = None
        self._stack = ExitStack()
        self._others: Registry | None = None
        self._told: list[Registration] | None = None
        self._untold: ScaleDecision | None = None
        self._num_heard = -1
        self._heard: ScaleDecision | None = None
        try:
            if store is not None:
                self._others = Registry(self._stack.enter_context(socket_folder()))
            if loads_of is not None:
                self._loaders = ScaledLoaders(seats, loads_of, bounds, folder, clock=time.monotonic, tell=self._decided)
            else:
                self._loaders = SeatedLoaders(seats, bounds, node=node, clock=time.monotonic)
                value_of(store, f"{prefix}/decision", _decode_decision, check)
                self._follow(must=True)
            if store is not None:
                check_reached([one.endpoint for one in registered(folder)])
                self._tell_own()
                for key in self._keys_of_others():
                    value_of(store, key, _decode_loaders, check)
                self._hear()
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._run, name="torchmix-scale", daemon=True)
        self._thread.start()

    @property
    def folders(self) -> tuple[str, ...]:
        """Where clients of this node find all loaders; the first is where the run writes its progress."""
        return (str(self._folder), *([] if self._others is None else [str(self._others.folder)]))

    def look(self) -> None:
        """Follow the run and the other nodes."""
        assert self._loaders is not None
        if self._store is not None and self._store.add(f"{self._prefix}/news", 0) != self._num_heard:
            self._hear()
        self._loaders.look()
        if self._store is not None:
            self._tell_decided()
            self._tell_own()

    def close(self) -> None:
        """End the loaders of this node; may be called again."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_S)  # the store may not answer any more
        if self._loaders is not None:
            self._loaders.close()
        if self._others is not None:
            self._others.close()
        self._stack.close()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                self.look()
            except (OSError, RuntimeError, msgspec.MsgspecError, TorchmixError) as error:  # the store ends with its job
                logger.debug("loaders are not followed: %s", error)

    def _hear(self) -> None:
        """Take what the other nodes have told."""
        assert self._others is not None
        num_heard = self._store.add(f"{self._prefix}/news", 0)  # before what is read: what comes meanwhile is news
        self._follow()
        found = [one for key in self._keys_of_others() for one in _decode_loaders(self._store.get(key))]
        if not self._is_over.is_set():
            self._others.hold(found)
        self._num_heard = num_heard

    def _follow(self, *, must: bool = False) -> None:
        """Carry out what the first node has decided."""
        if not isinstance(self._loaders, SeatedLoaders):
            return
        decision = _decode_decision(self._store.get(f"{self._prefix}/decision"))
        if decision != self._heard and not self._is_over.is_set():
            self._heard = decision
            self._loaders.apply(decision, must=must)

    def _decided(self, decision: ScaleDecision) -> None:
        """Tell the other nodes, which are to start theirs meanwhile."""
        if self._store is None:
            return
        self._untold = decision
        try:
            self._tell_decided()
        except (OSError, RuntimeError) as error:  # told at the next look
            logger.debug("loaders of other nodes do not follow: %s", error)

    def _tell_decided(self) -> None:
        if self._untold is not None:
            self._tell("decision", self._untold)
            self._untold = None

    def _tell_own(self) -> None:
        """Tell the other nodes of the loaders of this one, if they are others than before."""
        now = [msgspec.structs.replace(one, near="") for one in registered(self._folder)]
        if now != self._told:
            self._tell(f"of/{self._node}", now)
            self._told = now

    def _tell(self, key: str, value: object) -> None:
        self._store.set(f"{self._prefix}/{key}", text_of(value))
        self._store.add(f"{self._prefix}/news", 1)

    def _keys_of_others(self) -> Iterator[str]:
        return (f"{self._prefix}/of/{node}" for node in range(self._nodes) if node != self._node)
