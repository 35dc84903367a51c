"""StatefulDataLoader: what the user holds. Iterate, save, load, ask, close.

In: a stream of steps (on a leader: planned and read here; on a peer: received from its leader). Out: microbatches, in
order, for ever or until `max_steps`. Must hold: `state_dict()` is that of the last microbatch handed out, whatever has
been prepared ahead, and equal on all ranks; a second `iter()` continues; loading a state first stops what is running.
Cost: one queue operation per step on the training thread.

It subclasses torchdata's loader and runs the stream through it, in a worker process or in a thread of this one. Four
habits of the stock class are not taken over, because they lose or repeat data: its state is of 0 or of 1 workers and
not of both, a second `iter()` starts over, a live iterator survives `load_state_dict`, and its state runs ahead of a
thread that prefetches.

    stream --torchdata--> StepTensors --serve (exchange)--> this rank's StepTensors --Ahead--> microbatches
"""

from __future__ import annotations

import atexit
import logging
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec
import torch
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

from torchmix.constructor.fields import Microbatch, StepTensors
from torchmix.errors import LoaderClosed, RankLost, StateError
from torchmix.parallel.fan_out import FanOut
from torchmix.parallel.liveness import Liveness
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.planner.balance import check_divides
from torchmix.planner.plan import START_DIGEST
from torchmix.recipe import Recipe, recipe_fingerprint
from torchmix.stateful.ahead import Ahead
from torchmix.stateful.header import StepHeader, decode_header, stats_of
from torchmix.stateful.serve import ReceivedSteps, serve_steps
from torchmix.stateful.state import check_layout, decode_state, encode_state, start_state
from torchmix.stateful.stream import StepStream, state_bytes
from torchmix.stateful.worker_start import without_main_module

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""How long `close()` waits for the other ranks of the replica to stop too."""
PATIENCE_S = 30.0
"""How long a step may be waited for before a line in the log says so."""
_CHECK_S = 0.25


class StatefulDataLoader(TorchdataLoader):  # type: ignore[misc]  # torchdata ships no types
    """Microbatches of one rank; `torchmix.build_loader` makes one."""

    def __init__(
        self,
        stream: StepStream | ReceivedSteps,
        *,
        recipe: Recipe,
        tree: ClientPlaceTree,
        micro_batch_size: int,
        workers: int = 1,
        look_ahead: int = 2,
        fan_out: FanOut | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        """Wrap a stream; nothing starts before the first `next()`.

        Args:
            stream: `StepStream` on a leader, `ReceivedSteps` on a peer.
            recipe: The checked recipe.
            tree: The job's place tree, seen from this rank.
            micro_batch_size: Samples of a microbatch.
            workers: 1 to plan and read in a process of its own, 0 to do it in threads of this one.
                A peer has none.
            look_ahead: Finished steps that may wait, 1 or more.
            fan_out: The exchange with the other ranks; None in a job of one.
            liveness: Who tells of lost ranks; closed with the loader.
        """
        workers = workers if isinstance(stream, StepStream) else 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's call, nobody's fault
            super().__init__(
                stream,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=look_ahead if workers else None,
                # spawn: a fork of a process that runs threads, gloo or CUDA may deadlock.
                multiprocessing_context="spawn" if workers else None,
                collate_fn=_as_it_is,
                snapshot_every_n_steps=1,
                generator=torch.Generator(),  # its own: the trainer's random numbers stay what they are
            )
        self._tree = tree
        self._leader = tree.leader_of(tree.topology.rank)
        self._recipe = recipe
        self._fingerprint = recipe_fingerprint(recipe)
        self._layout = {"dp": tree.topology.dp, "micro_batch_size": micro_batch_size}
        self._num_microbatches = check_divides(recipe.batch.samples, **self._layout)
        self._look_ahead = look_ahead
        self._fan_out = fan_out
        self._liveness = liveness
        self._boundary = start_state(recipe=self._fingerprint, **self._layout)
        self._consumed = 0  # microbatches of the step at the boundary
        self._step: StepTensors | None = None
        self._header: StepHeader | None = None
        self._feed: Ahead[StepTensors] | None = None
        self._ended = False
        self._closed = False
        self._wait_s = self._total_wait_s = 0.0

    def __iter__(self) -> Iterator[Microbatch]:
        """Continue with the next microbatch."""
        self._check_open()
        while (microbatch := self._next()) is not None:
            yield microbatch

    def state_dict(self) -> dict[str, Any]:
        """The state after the last microbatch handed out: bytes at 'torchmix_state', equal on all ranks."""
        return {"torchmix_state": encode_state(msgspec.structs.replace(self._boundary, microbatch=self._consumed))}

    def load_state_dict(self, state_dict: dict[str, Any], *, from_step_start: bool = False) -> None:
        """Continue from a state; every rank of the job calls this with the same one.

        What has been prepared ahead is discarded. Iterators that are held stay valid and continue from there.

        Args:
            state_dict: From `state_dict()` of any rank.
            from_step_start: Go back to the start of the step that the state was saved in. Its consumed
                microbatches come again; needed to resume inside a step at another layout.

        Raises:
            StateError: Not a state, or of another version, recipe or (inside a step) layout. The loader
                stays where it was.
        """
        self._check_open()
        state = decode_state(state_bytes(state_dict), recipe=self._fingerprint)
        if from_step_start:
            state = msgspec.structs.replace(state, microbatch=0)
        check_layout(state, **self._layout)
        if not 0 <= state.microbatch < self._num_microbatches:
            raise StateError(
                f"the state has {state.microbatch} consumed microbatches, a step has {self._num_microbatches}"
            )
        self._stop_feed()
        self._boundary = msgspec.structs.replace(state, microbatch=0, **self._layout)
        self._consumed = state.microbatch
        self._step = self._header = None
        self._ended = False

    @property
    def order_digest(self) -> str:
        """16 hex digits over all steps consumed to their end: equal at every layout, also across resumes."""
        return (self._boundary.order_digest or START_DIGEST).hex()

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each step on this rank."""
        return self._num_microbatches

    def stats(self) -> dict[str, Any]:
        """Figures of the step that the last microbatch belongs to.

        `data_wait_s` (this step) and `total_data_wait_s`: time the caller waited for data. From its
        header, once there is one: `step`, `tokens_of_source`, `fill`, `balance_ratio` and
        `hash_order_ratio` (cost over its lower bound; 1 is best), `plan_s`, `read_s`, `build_s`, and the
        leader's reader since it started (`decode_amplification`, `bytes_read`, ...).
        """
        waits = {"data_wait_s": self._wait_s, "total_data_wait_s": self._total_wait_s}
        return {**(stats_of(self._header) if self._header is not None else {}), **waits}

    def close(self) -> None:
        """Stop threads, the worker process and the exchange. All ranks of a job close; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            self._stop_feed()
        finally:
            self._step = None
            atexit.unregister(self.close)
            if self._liveness is not None:
                self._liveness.close()
            if self._fan_out is not None:
                self._fan_out.close()

    def __enter__(self) -> StatefulDataLoader:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_calm = (
            error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
        )
        if is_calm or self._liveness is None:
            self.close()
            return
        # The other ranks do not close now: waiting for them here would only hide the error.
        assert error is not None
        self._liveness.post_abort(error)
        self._closed = True
        if self._feed is not None:
            self._feed.close(timeout_s=0)

    def _next(self) -> Microbatch | None:
        self._check_open()
        if self._step is None:
            if self._ended:
                return None
            began = time.perf_counter()
            self._step = self._take_step()
            self._wait_s = time.perf_counter() - began
            self._total_wait_s += self._wait_s
            if self._step is None:
                self._ended = True
                atexit.register(self.close)  # who has had all may leave without a word
                return None
            self._header = decode_header(self._step.header)
            if self._liveness is not None:
                self._liveness.note_step(self._step.step)
        step, header = self._step, self._header
        assert header is not None
        microbatch = step.microbatch(self._consumed)
        self._consumed += 1
        if microbatch.is_last_of_step:
            self._boundary = decode_state(header.next_state, recipe=self._fingerprint)
            self._consumed = 0
            self._step = None
        return microbatch

    def _take_step(self) -> StepTensors | None:
        """The next step of this rank's role; None at the end. Meanwhile, listen for lost ranks."""
        if self._feed is None:
            self._feed = Ahead(self._steps(), depth=self._look_ahead, name="torchmix-feed")
        waited_since = time.monotonic()
        while True:
            if self._liveness is not None:
                self._liveness.check()
            try:
                return self._feed.take(_CHECK_S)
            except TimeoutError:
                if time.monotonic() - waited_since > PATIENCE_S:
                    waited_since = time.monotonic()
                    logger.warning(
                        "rank %d has waited %.0f s for step %d from %s",
                        self._tree.topology.rank,
                        PATIENCE_S,
                        self._boundary.step,
                        "its own reader" if self._tree.is_leader else f"its leader, rank {self._leader}",
                    )
            except StopIteration:
                return None
            except Exception as error:
                cause = error if self._liveness is None else self._liveness.explain(error)
                if cause is error:
                    raise
                raise cause from error

    def _steps(self) -> Generator[StepTensors, None, None]:
        """In the feed's thread: steps from the boundary on, of this rank's role, pinned where CUDA is."""
        stream = self.dataset
        assert isinstance(stream, StepStream | ReceivedSteps)
        if isinstance(stream, StepStream):
            stream.load_state_dict({"torchmix_state": encode_state(self._boundary)})
        with without_main_module():
            whole = super().__iter__()
        steps: Iterator[StepTensors] = whole
        if isinstance(stream, StepStream):
            steps = serve_steps(whole, fan_out=self._fan_out, tree=self._tree, recipe=self._recipe)
        pin = torch.cuda.is_available()
        try:
            for step in steps:
                yield _pinned(step) if pin else step
        except GeneratorExit:
            if isinstance(stream, ReceivedSteps):
                stream.hear_out()
            raise
        finally:
            if isinstance(stream, StepStream):
                if isinstance(steps, Generator):
                    steps.close()  # ends the exchange, in this thread
                with suppress(AttributeError):
                    whole._shutdown_workers()
                stream.close()
            self._iterator = None

    def _stop_feed(self) -> None:
        if self._feed is None:
            return
        feed, self._feed = self._feed, None
        if not feed.close(CLOSE_S):
            raise RankLost(
                f"rank {self._tree.topology.rank}: the exchange did not end within {CLOSE_S:.0f} s; all ranks of a "
                f"replica must call close() or load_state_dict() at the same microbatch"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderClosed("this loader is closed; make another with torchmix.build_loader")


def _as_it_is(item: StepTensors) -> StepTensors:
    return item


def _pinned(step: StepTensors) -> StepTensors:
    pinned = {name: tensor.pin_memory() for name, tensor in step.to_tensors().items()}
    return StepTensors.from_tensors(pinned, header=step.header)
