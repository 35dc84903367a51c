"""StatefulDataLoader: what the user holds. Iterate, save, load, ask, close."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import msgspec
import torch
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

from torchmix.boards.board import own_board
from torchmix.constructor.fields import BlockTensors, Microbatch
from torchmix.errors import LengthUnknown, LoaderClosed, OptionError, RankLost, StateError
from torchmix.native.load import is_native
from torchmix.parallel.fan_out import FanOut
from torchmix.parallel.place_tree import ClientPlaceTree, Layout
from torchmix.parallel.topology import Topology
from torchmix.planner.plan import START_DIGEST
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import samples_of_step, stages_of
from torchmix.stateful.feed import CLOSE_S, LET_GO_S, await_end, await_item, end_feed, end_with, feed_of_rank, who_waits
from torchmix.stateful.serve import Reshard, Seating, agreed_places, at_layout, check_border, reseat
from torchmix.stateful.stream import StepStream, state_bytes
from torchmix.steps.ahead import Ahead, StopSignal
from torchmix.steps.edits import state_for
from torchmix.steps.header import Awaited, StepHeader, check_arrival, stats_of
from torchmix.steps.local_steps import HeldReader
from torchmix.steps.state import LoaderState, StateToAsk, encode_state, read_state, start_state

logger = logging.getLogger(__name__)

# --- The step that is being consumed, and the iterator over microbatches that the user holds.
#
# The iterator stays valid: it continues when the loader continues, after an end, an error or a loaded state.


class StepInUse(msgspec.Struct, eq=False):
    """A step that is being consumed. A microbatch changes only this object of the loader."""

    block: BlockTensors
    number: int
    """The step's number in the block."""
    header: StepHeader
    num_used: int
    """Microbatches handed out, including those before a state that was loaded inside the step."""

    def state_within(self, before: LoaderState) -> LoaderState:
        """The state after the microbatches handed out; `before`: the one that the step began with."""
        if self.num_used <= before.microbatch:
            return before
        return msgspec.structs.replace(before, microbatch=self.num_used, plan_digest=self.header.plan_digest)


class Microbatches:
    """An iterator over what a loader gives next."""

    def __init__(self, take: Callable[[], Microbatch | None]) -> None:
        """`take` gives the next microbatch, or None at the end."""
        self._take = take

    def __iter__(self) -> Microbatches:
        return self

    def __next__(self) -> Microbatch:
        microbatch = self._take()
        if microbatch is None:
            raise StopIteration
        return microbatch


# --- What a trainer shows of its steps to `torchmix top`, and how long it has waited for them.
#
# A loader that is closed shows nothing any more; two loaders of a process have a name each. Cost: a write twice a
# second.


class ShownSteps:
    """What one loader shows."""

    def __init__(self, part: Part, tree: ClientPlaceTree, *, run: str) -> None:
        """Show that the process trains; `run`: of `run_name`, empty for a loader that shows nothing."""
        self._rank = tree.topology.rank
        self._name = part.name if int(os.environ.get("RANK", self._rank)) == self._rank else f"{part.name} {self._rank}"
        self._total_tokens = 0
        self.wait_s = self.total_wait_s = 0.0
        if run:
            facts = {"world_size": tree.topology.world_size, "rank": int(os.environ.get("RANK", self._rank))}
            own_board.open("trainer", run=run, facts=facts)
            own_board.show(self._name, lambda: {"step": -1}, is_now=True)
        self._is_shown = bool(run)

    def waited(self, seconds: float) -> None:
        """The trainer has waited for a step, or for the end."""
        self.wait_s = seconds
        self.total_wait_s += seconds

    def step(self, header: StepHeader, *, workers_lost: int) -> None:
        """A step is handed out."""
        self._total_tokens += header.report.delivered_tokens
        if self._is_shown:
            own_board.show(
                self._name,
                lambda: {
                    "step": header.step,
                    "total_tokens": self._total_tokens,
                    "total_data_wait_s": self.total_wait_s,
                    "workers_lost": workers_lost,
                    "plan_s": header.report.plan_s,
                    "read_s": header.report.read_s,
                    "build_s": header.report.build_s,
                    **header.report.reading,
                },
            )

    def close(self) -> None:
        """Show nothing any more."""
        if self._is_shown:
            own_board.withdraw(self._name)
            self._is_shown = False


# --- StatefulDataLoader: what the user holds. Iterate, save, load, ask, close.
#
# `state_dict()` is the state after the last microbatch handed out, whatever has been prepared ahead, and it is equal
# on all ranks; a second `iter()` continues; loading a state first stops the running stream. Cost: one queue operation
# per step on the training thread.
#
# The class is a subclass of torchdata's loader and runs the stream through it, in a thread of this process; the stream
# may make its steps in another process. Four behaviours of torchdata's class are overridden, because they lose or
# repeat data: its state differs between 0 workers and 1, a second `iter()` starts over, a live iterator survives
# `load_state_dict`, and its state runs ahead of a thread that prefetches.
#
#     stream --torchdata--> BlockTensors --serve (exchange)--> this rank's BlockTensors --Ahead--> microbatches
#       \_________________________________ feed.py __________________________________/


class StatefulDataLoader(TorchdataLoader):  # type: ignore[misc]  # torchdata ships no types
    """Microbatches of one rank; `torchmix.build_loader` makes one."""

    # Accelerate would give the dataset to a loader of its own, whose batches are steps and not microbatches; it leaves
    # a loader alone that says it was prepared. Its checkpoints have the state of one that says the other.
    _is_accelerate_prepared = use_stateful_dataloader = True

    def __init__(self, seating: Seating) -> None:
        """Wrap the stream of this rank's place in the job; nothing starts before the first `iter()`."""
        self._process = os.getpid()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata makes the call
            super().__init__(
                seating.stream,
                batch_size=None,
                num_workers=0,  # the stream has its own worker: torch's would load torch, and copy each step
                collate_fn=_as_it_is,
                snapshot_every_n_steps=1,
                generator=torch.Generator(),  # a generator of its own leaves the trainer's random numbers alone
            )
        self._sit(seating)
        shared = seating.shared
        self._part, self._options, self._has_branch = shared.part, shared.options, False
        self._go_on_from(start_state(seating.layout, recipe=shared.part, step=shared.options.start_step))
        self._step: StepInUse | None = None
        self._header: StepHeader | None = None
        self._feed: Ahead[BlockTensors] | None = None
        self._block: BlockTensors | None = None
        """What was taken from the feed last, if steps of it are still to come."""
        self._number = 0
        """Its next step."""
        self._ended = self._closed = False
        self._shown = ShownSteps(shared.part, seating.tree, run=shared.run)

    @property
    def num_workers(self) -> int:
        """0: the recipe's `loaders` says which processes read, and no worker of torch's does."""
        return 0

    @num_workers.setter
    def num_workers(self, value: int) -> None:
        if value:
            raise OptionError(f"num_workers={value}: `loaders` of the recipe says which processes read; leave it at 0")

    @property
    def pin_memory(self) -> bool:
        """False: the loader pins its tensors itself, where CUDA is present."""
        return False

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        if value:
            raise OptionError("pin_memory=True: the loader pins its tensors itself, where CUDA is present; leave it")

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse a copy, and with it pickling, as for a process that is spawned: two would give the same data.

        Raises:
            OptionError: Always.
        """
        raise OptionError(
            "a loader is not copied or pickled, since both would give the same samples; "
            "call build_loader where one is needed, and load state_dict() there"
        )

    def __iter__(self) -> Iterator[Microbatch]:
        """Continue with the next microbatch; prefetching begins with this call, not with the first `next`.

        A later pipeline stage waits for the first stage's activations before it asks for data, and the
        first stage's data comes with an exchange in which all stages take part.
        """
        self._check_open()
        self._start_feed()
        return Microbatches(self._next)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last microbatch handed out: bytes at 'torchmix_state', equal on all ranks."""
        return {"torchmix_state": encode_state(self._now())}

    def load_state_dict(
        self, state_dict: dict[str, Any], *, from_step_start: bool = False, accept_edit: str | None = None
    ) -> None:
        """Continue from a state; every rank of the job calls this with the same one.

        Prefetched steps are discarded. Existing iterators stay valid and continue from the state.

        Args:
            state_dict: From `state_dict()` of any rank.
            from_step_start: Go back to the start of the step that the state was saved in. Its consumed microbatches
                come again. A state inside a step needs this to resume at another layout.
            accept_edit: The code that a refusal of an edited recipe names: shares, a schedule, sources that come or go;
                None: that of `build_loader`.

        Raises:
            StateError: The value is no state, or it belongs to another version, recipe, catalog (only leaders check
                the catalog) or (inside a step) layout. The loader keeps its position.
        """
        self._check_open()
        state = read_state(state_bytes(state_dict))
        if self._reports is not None and state.log_branch and state.recipe != recipe_fingerprint(self._part):
            self._reports.check_children(state)  # before a word is given
        state = state_for(
            state,
            self._part,
            layout=self._layout,
            rows=self.dataset.rows,
            from_step_start=from_step_start,
            accept_edit=self._shared.accept_edit if accept_edit is None else accept_edit,
        )
        was_running = self._feed is not None
        self._stop_feed()
        self._go_on_from(at_layout(state, self._layout))
        self._step = self._header = None
        self._ended = self._has_branch = False
        if was_running:
            self._start_feed()

    def report(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """Tell the recipe's policy what a step has shown; without a policy it does nothing.

        Every rank of the last pipeline stage calls it after each step, before the state is saved. It is a collective of
        these ranks, which returns when the step is in the log of decisions.

        Args:
            step: `microbatch.step`; each step once, in order.
            losses: By source, stream or child: the sum of the losses of its tokens on this rank (nats), and their
                number. Where all ranks are threads of one process, those of the whole job.

        Raises:
            OptionError: Another step than the next one, a name that is no source, or a value that is no pair.
            PlanError: The policy failed, and the recipe says `on_error: stop`.
        """
        if self._reports is not None:
            self._reports.report(step, losses)

    def reshard(
        self,
        topology: Topology | ClientPlaceTree,
        at_step: int,
        *,
        micro_batch_size: int | None = None,
        fan_out: FanOut | None = None,
        state_dict: dict[str, Any] | None = None,
    ) -> None:
        """Go on at another layout, as a job that resumes there would; all ranks call it between two steps.

        An elastic loader goes on among other ranks, too, from a state in memory: those that are left after a loss, or
        with some that have come, make a new default group of torch.distributed, and then each of them calls this, or
        `build_loader` and `load_state_dict` with the same state where it is new. The ranks of before are not needed.

        Args:
            topology: The new sizes, of the same ranks unless `state_dict` is given.
            at_step: The first step at the new layout: the next one, or that of the state.
            micro_batch_size: Samples of a microbatch from then on; None: as many as before.
            fan_out: The new exchange, for a loader that was built with a `fan_out`.
            state_dict: Of any of the ranks, between two steps; the new ranks need not be those of before.

        Raises:
            StateError, TopologyError, OptionError, RecipeError: A value does not fit, or is not that of rank 0.
            RankLost: A rank is lost.
        """
        self._check_open()
        size = micro_batch_size or self._layout.micro_batch_size
        asked = Reshard(topology=topology, at_step=at_step, micro_batch_size=size, fan_out=fan_out)
        was_running = self._feed is not None
        if state_dict is None and self._fan_out is not None and self._fan_out.is_apart:
            state_dict = self.state_dict()  # a group may have other ranks, and nobody else hears of it
        if state_dict is not None:
            state = self._go_among_others(asked, read_state(state_bytes(state_dict)))
        else:
            state = self._now()
            places = agreed_places(self._shared, self._tree, asked, state)
            self._sit(reseat(self._shared, self.dataset, *places, self._fan_out, fan_out, stop=self._stop_feed))
        self._go_on_from(at_layout(state, self._layout))
        if was_running:
            self._start_feed()

    def _go_among_others(self, asked: Reshard, state: LoaderState) -> LoaderState:
        """Leave the ranks of before, and take a place among those of `asked`; returns the state as it is checked."""
        if self._shared.among_others is None:
            text = "reshard: state_dict is of ranks that come and go; pass elastic=True to build_loader"
            raise OptionError(text)
        checked = [state]

        def leave(tree: ClientPlaceTree, layout: Layout) -> HeldReader:
            checked[0] = state_for(state, self._part, layout=layout, rows=self.dataset.rows)
            check_border(state, asked.at_step, "the state")
            return self._let_go(keeps_worker=True)

        self._sit(self._shared.among_others(asked, leave))
        self._header, self._ended, self._has_branch = None, False, False
        self._shown = ShownSteps(self._part, self._tree, run=self._shared.run)
        return checked[0]

    def _sit(self, seating: Seating) -> None:
        object.__setattr__(self, "dataset", seating.stream)  # torch's class would refuse a second one
        self._tree, self._layout, self._fan_out = seating.tree, seating.layout, seating.fan_out
        self._shared = shared = seating.shared
        self._liveness, self._reports = shared.liveness, shared.reports
        cp, replica = seating.tree.topology.cp, seating.tree.replica
        self._cp_ranks = range(replica * cp, (replica + 1) * cp)

    def _let_go(self, *, keeps_worker: bool) -> HeldReader:
        """Leave the other ranks, also where some of them are lost; what this process has read is returned."""
        stream, feed = self.dataset, self._feed
        self._step = self._block = None
        self._shown.close()
        stream.keep_reader()
        try:
            self._stop_feed(limit_s=LET_GO_S if keeps_worker else CLOSE_S)
        except RankLost as error:
            logger.info("the exchange with the other ranks is left as it is: %s", error)
        # Where a rank is lost, those that it broke off with close their groups, and so free those that wait for them.
        is_idle = feed is None or feed.close(LET_GO_S)
        stream.keep_reader(is_idle)
        if self._fan_out is not None:
            self._fan_out.close(is_idle=is_idle)
            del feed
            gc.collect()  # an error's traceback would keep the groups, and so their connections, open
        held: HeldReader = stream.hand_over(keeps_worker=keeps_worker)
        self._shared.leave()
        for part in (self._reports, self._liveness):
            if part is not None:
                part.close()
        return held

    @property
    def order_digest(self) -> str:
        """16 hex digits over all completely consumed steps: equal at every layout, also across resumes.

        Empty until a step is consumed, if the loader begins at a step number and not at a full state.
        """
        return (self._awaited.order_digest or (b"" if self._awaited.step else START_DIGEST)).hex()

    def __len__(self) -> int:
        """Microbatches, on each rank, of all steps from `start_step` to `max_steps`, wherever a state began.

        Raises:
            LengthUnknown: There is no `max_steps`, or the loader gives every document once, or its documents have runs
                of ranks, so each step has as many microbatches as its plan says.
        """
        if self._part.balance.context is not None:
            text = "with balance.context each step has as many microbatches as its plan says; ask num_microbatches"
            raise LengthUnknown(text)
        first, stop_before = self._options.start_step, self._options.max_steps
        if stop_before is None or self._part.one_pass:
            text = "this loader ends when it is stopped, or its data ends; len() needs max_steps, and no one_pass"
            raise LengthUnknown(text)
        stages = stages_of(self._part.batch)
        stops = [*(stage.from_step for stage in stages[1:]), stop_before]
        return sum(
            max(0, min(stop, stop_before) - max(stage.from_step, first)) * self._layout.num_microbatches(stage.samples)
            for stage, stop in zip(stages, stops, strict=True)
        )

    def __bool__(self) -> bool:
        return True  # `if loader:` tests for a loader, not for its length

    @property
    def num_microbatches(self) -> int:
        """Microbatches, on each rank, of the step that is being consumed; at a boundary, of the next step.

        With runs of ranks it waits for that step, which has as many as its plan says; 0 where no step follows.
        """
        if self._part.balance.context is not None:
            self._check_open()
            return self._step.block.num_microbatches if self._has_step() and self._step is not None else 0
        return self._layout.num_microbatches(samples_of_step(self._part.batch, self._awaited.step))

    def stats(self) -> dict[str, Any]:
        """Figures of the step that the last microbatch belongs to.

        `data_wait_s` (this step) and `total_data_wait_s` are seconds that the caller waited for data; `workers_lost`
        counts the workers of this leader's node that were lost and replaced, 0 on a peer; `native` is 1 where this
        process uses the native library. After the first step the header adds `step`, `tokens_of_source`,
        `delivered_tokens` (their sum), `squared_tokens` (the sum of squares over pieces, in which attention grows),
        `fill`, `balance_ratio`, `hash_order_ratio` (cost over its lower bound; 1 is best), `plan_s`, `read_s`,
        `build_s`, and the totals of the leader's reader since it started.
        """
        waits = {"data_wait_s": self._shown.wait_s, "total_data_wait_s": self._shown.total_wait_s}
        own = {**waits, "workers_lost": self.dataset.workers_lost, "native": int(is_native())}
        return {**(stats_of(self._header) if self._header is not None else {}), **own}

    def close(self) -> None:
        """Stop threads, the worker process and the exchange. All ranks of a job close; closing twice is fine."""
        # A generator that stays suspended in a `with` ends with the interpreter: threads are gone by then, and names
        # of modules may be None. A fork of the process is no part of the job, and may end in its own way.
        if self._closed or sys is None or sys.is_finalizing() or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._go_on_from(self._now())  # a state may be asked for behind the end of a `with`
        if self._shared.is_elastic:
            self._let_go(keeps_worker=False).close()
            return
        self._step = self._block = None
        self._shown.close()
        try:
            self._stop_feed()
        except BaseException as error:
            if self._liveness is not None:
                self._liveness.post_abort(error)
            raise
        self.dataset.release()
        self._shared.leave()
        if self._reports is not None:
            self._reports.close()
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
        if is_calm or self._liveness is None or os.getpid() != self._process:
            self.close()
            return
        # The other ranks do not close now, so waiting for them here would only hide the error.
        assert error is not None
        self._liveness.post_abort(error)
        self._closed = True
        if self._feed is not None:
            self._feed.close(timeout_s=0)

    def _now(self) -> LoaderState:
        """The state after the last microbatch handed out."""
        before = self._state.state
        return before if self._step is None else self._step.state_within(before)

    def _go_on_from(self, state: LoaderState) -> None:
        self._state = StateToAsk.of(state)
        """Before the step that is being consumed, or as it was loaded inside that step."""
        self._awaited = Awaited.by(state)
        """The step of that state."""

    def _has_step(self) -> bool:
        """Wait for the step that comes next, if none is being consumed; False at the end."""
        if self._step is None:
            if self._ended:
                return False
            began = time.perf_counter()
            self._start_feed()
            if self._reports is not None:
                self._reports.check_reported(self._awaited.step)
            if self._block is None:
                assert self._feed is not None
                who = who_waits(self._tree, self._awaited.step)
                self._block, self._number = await_item(self._feed, who=who, liveness=self._liveness), 0
            self._shown.waited(time.perf_counter() - began)
            block, number = self._block, self._number
            if block is None:
                self._ended = True
                atexit.register(self.close)  # a script that has consumed all data may exit without close()
                return False
            header: StepHeader = block.steps[number].header
            check_arrival(header, self._awaited)
            self._number += 1
            if self._number == len(block):
                self._block = None
            self._step = StepInUse(block, number, header, num_used=self._awaited.microbatch)
            self._shown.step(header, workers_lost=self.dataset.workers_lost)
            if self._liveness is not None:
                self._liveness.note_step(header.step)
        return True

    def _next(self) -> Microbatch | None:
        step = self._step
        if step is None or os.getpid() != self._process:  # None, too, once the loader is closed
            self._check_open()
            if not self._has_step():
                return None
            step = self._step
            assert step is not None, "it is there"
        if step.num_used >= step.block.num_microbatches:
            raise StateError(
                f"the state has {step.num_used} consumed microbatches of step {step.header.step}, which has "
                f"{step.block.num_microbatches}: the state is damaged, use another checkpoint"
            )
        if self._header is not step.header:  # torch's class takes a call for each attribute that is set
            self._header = step.header
        microbatch = step.block.microbatch(step.number, step.num_used, self._cp_ranks)
        step.num_used += 1
        if microbatch.is_last_of_step:
            self._state, self._awaited, self._step = step.header.after, Awaited.after(step.header), None
        return microbatch

    def _start_feed(self) -> None:
        if self._feed is not None or self._ended:
            return
        if self._reports is not None and not self._has_branch:
            self._go_on_from(self._reports.begin(self._state.state))
            self._has_branch = True
        stream = self.dataset
        stop = StopSignal()
        if isinstance(stream, StepStream):
            stream.gives_blocks = True
            stream.go_on_from(self._now())
            stream.stop_when(stop)
        bad, part = self._state.state.bad_tokens, self._part
        steps = feed_of_rank(
            self._start_torch,
            stream,
            fan_out=self._fan_out,
            tree=self._tree,
            part=part,
            directory=self._shared.directory,
            bad_tokens=bad,
            check_ranks=None if self._liveness is None else self._liveness.check,
        )
        depth = self._options.look_ahead + 1
        self._feed = Ahead(steps, depth=depth, name="torchmix-feed", on_close=stop.set, size_of=len)
        self._last_resort = end_with(self, self._feed, is_waited_for=self._fan_out is None)

    def _start_torch(self) -> Any:
        """torchdata's iterator over the stream. The iterator and the loader hold no reference to each other."""
        iterator = super().__iter__()
        self._iterator = None
        return iterator

    def _stop_feed(self, *, limit_s: float = CLOSE_S) -> None:
        """End the feed, and complete its exchange with the other ranks, who may take so long."""
        self._block = None
        if self._feed is None:
            return
        feed, self._feed = self._feed, None
        self._last_resort.detach()
        end_feed(feed)
        rank, in_job = self._tree.topology.rank, self._fan_out is not None
        await_end(feed, rank=rank, in_job=in_job, liveness=self._liveness, limit_s=limit_s)

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            text = f"this loader is one of process {self._process}, of which this process, {os.getpid()}, is a fork"
            raise LoaderClosed(f"{text}: its threads did not come along; call build_loader behind the fork")
        if self._closed:
            raise LoaderClosed("this loader is closed; make another with torchmix.build_loader")


def _as_it_is(item: Any) -> Any:
    return item
