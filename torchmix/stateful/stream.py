"""StepStream: the steps of one replica as a torch dataset, made in this process or in a worker process.

The steps are the same in either process.

It is a torch IterableDataset with `state_dict` and `load_state_dict`, so a plain torchdata loader can run and resume it
too.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torchmix.catalog.store import Catalog
from torchmix.constructor.arrays import BlockArrays
from torchmix.constructor.fields import BlockTensors, StepTensors
from torchmix.errors import OptionError, StateError
from torchmix.steps.ahead import StopSignal
from torchmix.steps.edits import RowFacts, state_for
from torchmix.steps.history import RunHistory
from torchmix.steps.local_steps import HeldReader, local_blocks
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.state import LoaderState, StateToAsk, encode_state, read_state, start_state
from torchmix.steps.worker.client import NodeHold, worker_blocks


class StepStream(IterableDataset[StepTensors | BlockTensors]):
    """The steps of one replica, endless unless `max_steps` says otherwise."""

    def __init__(
        self,
        settings: StreamSettings,
        *,
        catalog: Catalog | None = None,
        node: NodeHold | None = None,
        consumer: int = 0,
        held: HeldReader | None = None,
        rows: RowFacts | None = None,
        history: RunHistory | None = None,
    ) -> None:
        """Keep the settings; nothing is opened yet.

        Args:
            settings: The settings that decide the steps.
            catalog: The part's catalog if it is open already, for the first `iter()` if that is in this process.
            node: The worker that makes the steps, let go by `release`; None to make them in this process.
            consumer: This leader's global rank, by which the worker knows it.
            rows: What the part's streams have, to compare states with.
            held: What an earlier stream of this process has read, for steps that are made here.
            history: Where beginnings and edits of the run are kept; None: nowhere.
        """
        super().__init__()
        self._settings = settings
        self._catalog = catalog
        self._node = node
        self._consumer = consumer
        self.rows = rows
        """What the part's streams have by the catalog; None: not looked at."""
        self._held, self._history = held or HeldReader(), history
        self._held.is_kept = False
        self._release = None if node is None else weakref.finalize(self, node.leave, farewell_s=0.0)
        if self._release is not None:
            self._release.atexit = False  # the keeper has its own end
        self._state = StateToAsk.of(
            start_state(settings.layout, recipe=settings.part, step=settings.options.start_step)
        )
        """After the last step given, or as it was loaded."""
        self._running: Generator[StepTensors | BlockTensors, None, None] | None = None
        self.gives_blocks = False
        """Whether an item is a block of steps, as the loader takes them; else a step."""
        self._stop: StopSignal | None = None

    def stop_when(self, stop: StopSignal) -> None:
        """End the next `iter()` once the signal is set, also during a wait for the worker or a far start's plan."""
        self._stop = stop

    def state_dict(self) -> dict[str, Any]:
        """The state at the boundary after the last step given, as bytes."""
        return {"torchmix_state": encode_state(self._state.state)}

    def load_state_dict(
        self, state_dict: dict[str, Any], *, from_step_start: bool = False, accept_edit: str | None = None
    ) -> None:
        """Continue from a boundary with the next `iter()`; arguments and errors as those of the loader's."""
        state = state_for(
            read_state(state_bytes(state_dict)),
            self._settings.part,
            layout=self._settings.layout,
            rows=self.rows,
            from_step_start=from_step_start,
            accept_edit=accept_edit,
        )
        self.go_on_from(state)

    def go_on_from(self, state: LoaderState) -> None:
        """Continue from a checked state; where the run begins or is edited is kept in its history."""
        self._state = StateToAsk.of(state)
        if self._history is not None:
            self._history.keep(state, catalog=self._settings.catalog)

    def __iter__(self) -> Iterator[StepTensors | BlockTensors]:
        """Steps from the state on.

        Raises:
            OptionError: This is one of several torch workers. Each of them would give every step.
        """
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise OptionError(f"StepStream: num_workers={worker.num_workers} would give each step as often; use 0 or 1")
        self.close()
        self._running = self._steps()
        if worker is not None:
            # torch's worker does not close its dataset. A thread with an open request to a store at the interpreter's
            # exit could crash the process.
            Finalize(None, self.close, exitpriority=1)
        return self._running

    @property
    def workers_lost(self) -> int:
        """Workers of the node that were lost and replaced, as far as this rank has noticed."""
        return 0 if self._node is None else self._node.num_lost

    def keep_reader(self, is_kept: bool = True) -> None:
        """Let what is read in this process outlive the running iterator, for `hand_over`; or end with it."""
        self._held.is_kept = is_kept

    def hand_over(self, *, keeps_worker: bool = False) -> HeldReader:
        """Release this stream, and return what it has read in this process, if that outlives it."""
        held, self._held = self._held, HeldReader()
        self.release(keeps_worker=keeps_worker)
        if not held.is_kept:
            held.close()
        return held

    def release(self, *, keeps_worker: bool = False) -> None:
        """Let go of the node's worker, which ends with the last loader that it serves. May be called again.

        Args:
            keeps_worker: A worker of this process waits for who comes next; see `steps/worker/keeper.py`.
        """
        self._held.close()
        if self._node is not None and self._release is not None and self._release.detach() is not None:
            self._node.leave(keeps_worker=keeps_worker)

    def close(self) -> None:
        """End the running iterator, with its files and threads. No other thread may be inside the iterator."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _steps(self) -> Generator[StepTensors | BlockTensors, None, None]:
        made = self._made()
        try:
            for arrays in made:
                block = BlockTensors.from_arrays(arrays)
                if self.gives_blocks:
                    self._state = arrays.steps[-1].header.after
                    yield block
                    continue
                for number, facts in enumerate(arrays.steps):
                    self._state = facts.header.after
                    yield block.step(number)
        finally:
            made.close()

    def _made(self) -> Generator[BlockArrays, None, None]:
        state, stop = self._state.state, self._stop or StopSignal()
        if self._node is not None:
            return worker_blocks(self._settings, state, node=self._node, consumer=self._consumer, stop=stop)
        catalog, self._catalog = self._catalog, None
        return local_blocks(self._settings, state, catalog=catalog, is_stopped=stop.is_set, held=self._held)


def state_bytes(state_dict: dict[str, Any]) -> bytes:
    """The bytes in what `state_dict()` returned.

    Raises:
        StateError: The value is something else.
    """
    expected = "expected the dict that state_dict() returned, with bytes at 'torchmix_state'"
    if not isinstance(state_dict, dict) or "torchmix_state" not in state_dict:
        found = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise StateError(f"{expected}; got {found}")
    data = state_dict["torchmix_state"]
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise StateError(f"{expected}; got {type(data).__name__} there: make bytes of it, as it was saved")
    return bytes(data)
