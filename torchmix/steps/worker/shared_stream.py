"""A stream that several leaders of a node take their steps from: planned once, read once, built for each.

Each leader gets every step from its own state on, in order, whoever else asks, comes late or leaves; a step is planned
and read once for all who need it. A leader that has not come yet finds its steps waiting, a few of them at most; beyond
that it gets a stream of its own when it comes.

A thread of its own makes a step, so that steps which are built are handed over while the next one waits for a decision:
that decision may follow from the losses of a step that another leader has yet to take.

After the loss of a worker leaders come back at different blocks. The first to come says from where others may still
need steps, so the stream begins there: those steps are planned once more, and built for the others alone.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from torchmix.constructor.arrays import BlockArrays, StepMemory
from torchmix.errors import MemoryLimit
from torchmix.reader.page_cache import CacheRoom
from torchmix.steps.blocks import Consumer
from torchmix.steps.header import HeadersToSend
from torchmix.steps.local_steps import local_shared_blocks
from torchmix.steps.replica_steps import SharedBlock
from torchmix.steps.state import LoaderState, decode_state
from torchmix.steps.worker.messages import BlockRequest, Channel, EndReply, FailedReply, Start, encode, failed_reply
from torchmix.steps.worker.shared_arrays import SharedArrays

SKEW_BLOCKS = 2
"""Leaders compare each step before the next one is taken, so none has taken as many blocks more than another."""


class BuiltBlock(NamedTuple):
    """A block as one leader gets it."""

    arrays: BlockArrays
    headers: HeadersToSend
    """Most often those of all leaders."""


class Seat:
    """A leader's place at the stream."""

    def __init__(self, replica: int, next_step: int) -> None:
        self.replica = replica
        self.next_step = next_step
        """The first step that its leader still needs."""
        self.channel: Channel | None = None
        """To its leader; None before it has come."""
        self.has_left = False
        self.requests: deque[BlockRequest] = deque()
        self.built: deque[BuiltBlock] = deque()
        """Blocks that nobody has asked for yet."""
        self.arrays = SharedArrays()
        self.memory = StepMemory(self.arrays.allocate)


class SharedStream:
    """The steps of one part of a recipe, for the leaders of a node."""

    def __init__(self, start: Start, room: CacheRoom) -> None:
        """Take the first leader's settings; `join` follows, for it too. Decoded pages are kept in the room."""
        self._room = room
        self._settings = start.settings.of_node()
        leader = start.settings.leader
        self._first_rank = 0 if leader is None else leader - start.consumer
        """Global rank that leaders are numbered from: the first of their group, where others are apart."""
        self._resumes = bool(start.resumes_at)
        self._base = start.resumes_at or start.state
        first = self._first = self._decoded(self._base)
        self._last_step = first.step - 1
        self._seats = {consumer: Seat(replica, first.step) for consumer, replica in start.replica_of.items()}
        self._most_waiting = start.settings.options.look_ahead + SKEW_BLOCKS
        self._digest_before = {first.step: first.order_digest}
        """Order digest of the steps before a step, as far as it is known."""
        self._sizes: deque[int] = deque()
        """Steps of the blocks that it is known of."""
        self.num_signs = 0
        """Steps so far, made and given, and looks at what one waits for."""
        self.maker_id = 0
        """The system's number of the thread that makes the steps; 0 before the first one."""
        self._end: EndReply | FailedReply | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="torchmix-steps", daemon=True)

    @property
    def thread(self) -> threading.Thread:
        """The one that hands steps over; started with the first seat that is taken."""
        return self._thread

    @property
    def part(self) -> str:
        """Name of the part that is read."""
        return self._settings.part.name

    def figures(self) -> dict[str, str | int | float]:
        """What of it `torchmix top` shows."""
        seats = [seat for seat in self._seats.values() if seat.channel is not None and not seat.has_left]
        waiting = sum(len(built.arrays) for seat in seats for built in seat.built)
        return {
            "step": self._last_step,
            "leaders": len(seats),
            "steps_waiting": waiting,
            "is_asked": int(self.is_asked),
        }

    @property
    def is_asked(self) -> bool:
        """Whether a leader waits."""
        return any(seat.requests for seat in self._seats.values() if not seat.has_left)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there. One that has been left by all will not be used again."""
        return not any(seat.channel is not None and not seat.has_left for seat in self._seats.values())

    def join(self, start: Start, channel: Channel) -> Seat | None:
        """Take the place of a leader that begins; None if these are not its steps, or not any more."""
        seat = self._seats.get(start.consumer)
        if seat is None or seat.replica != start.settings.replica or seat.channel is not None or seat.has_left:
            return None
        if start.settings.of_node() != self._settings or bool(start.resumes_at) != self._resumes:
            return None
        with self._changed:
            if self._thread.ident is not None and self.is_empty:
                return None  # it ends
            if self._resumes:
                state = self._decoded(start.state)
                digest = self._digest_before.get(state.step, state.order_digest)
                if state.step < min(self._digest_before) or digest != state.order_digest:
                    return None
                seat.next_step = state.step
            elif start.state != self._base:
                return None
            seat.channel = channel
            self._changed.notify_all()
        if self._thread.ident is None:
            self._thread.start()
        return seat

    def ask(self, seat: Seat, request: BlockRequest) -> None:
        """Note a request of the seat's leader."""
        with self._changed:
            seat.requests.append(request)
            self._changed.notify_all()

    def leave(self, seat: Seat) -> None:
        """The seat's leader has gone, or needs no more."""
        with self._changed:
            seat.has_left = True
            self._changed.notify_all()

    def _decoded(self, state: bytes) -> LoaderState:
        return decode_state(state, recipe=self._settings.part)

    def _run(self) -> None:
        steps = local_shared_blocks(
            self._settings, self._first, consumers=self._consumers_of, is_stopped=self._is_over, room=self._room
        )
        making: Future[SharedBlock | None] | None = None
        with ThreadPoolExecutor(1, "torchmix-make", initializer=self._note_maker) as maker:
            try:
                while self._await_work(making):
                    try:
                        if making is not None and making.done():
                            done, making = making, None
                            self._take(done)
                        self._serve()
                        if making is None and self._is_behind():
                            making = maker.submit(next, steps, None)
                            making.add_done_callback(self._wake)
                    except Exception as error:  # the edge of a thread: leaders would wait for ever
                        self._end = failed_reply(error)
            finally:
                if making is not None:
                    wait([making])
                maker.submit(steps.close).result()

    def _take(self, making: Future[SharedBlock | None]) -> None:
        """Keep the step that was made, or how the steps end."""
        try:
            made = making.result()
        except MemoryError as error:
            self._end = failed_reply(
                MemoryLimit(
                    f"the worker of this node, process {os.getpid()}, may not allocate more memory "
                    f"({str(error) or 'no more'}): raise loaders.memory, or lower read.cache or look_ahead"
                )
            )
            return
        except Exception as error:  # the edge of a thread: carried to the leaders
            self._end = failed_reply(error)
            return
        if made is None:
            self._end = EndReply()
            return
        self._last_step = made.steps[-1]
        self.num_signs += 1
        with self._changed:
            self._digest_before |= {step + 1: one for step, one in zip(made.steps, made.order_digests, strict=True)}
            self._sizes.append(len(made.steps))
            if len(self._sizes) > 2 * self._most_waiting:
                for step in sorted(self._digest_before)[: self._sizes.popleft()]:
                    del self._digest_before[step]
            shared = HeadersToSend(())
            for consumer, block in made.arrays.items():
                headers = [facts.header for facts in block.steps]
                if not shared.are(headers):  # some are of what a leader alone could not read
                    shared = HeadersToSend(headers)
                self._keep(self._seats[consumer], BuiltBlock(block, shared))

    def _note_maker(self) -> None:
        self.maker_id = threading.get_native_id()

    def _wake(self, _: Future[SharedBlock | None]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _is_over(self) -> bool:
        """Asked while a step waits for a decision or a loader, and so a sign that it does."""
        self.num_signs += 1
        return self.is_empty

    def _await_work(self, making: Future[SharedBlock | None] | None) -> bool:
        """Wait for a request that can be answered, a step that is to be made, or one that is; False: nobody is left."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.is_empty or self._can_serve() or (making.done() if making is not None else self._is_behind())
                )
            )
            return not self.is_empty

    def _can_serve(self) -> bool:
        """Whether a request can be answered."""
        seats = (seat for seat in self._seats.values() if seat.requests and not seat.has_left)
        return any(seat.built or self._end is not None for seat in seats)

    def _is_behind(self) -> bool:
        """Whether a request waits for a step that is not made."""
        waits = any(seat.requests and not seat.built for seat in self._seats.values() if not seat.has_left)
        return waits and self._end is None

    def _consumers_of(self, step: int) -> dict[int, Consumer]:
        """Whom to build a step for."""
        with self._changed:
            return {
                consumer: Consumer(seat.replica, seat.memory, self._first_rank + consumer)
                for consumer, seat in self._seats.items()
                if not seat.has_left and seat.next_step <= step
            }

    def _keep(self, seat: Seat, built: BuiltBlock) -> None:
        if seat.has_left or built.arrays.steps[-1].step < seat.next_step:
            return
        seat.built.append(built)
        if seat.channel is None and len(seat.built) > self._most_waiting:
            seat.has_left = True  # it takes other steps, or none
            seat.built.clear()

    def _serve(self) -> None:
        """Answer what can be answered."""
        for seat in self._seats.values():
            while not seat.has_left and seat.requests:
                while seat.built and seat.built[0].arrays.steps[-1].step < seat.next_step:
                    seat.built.popleft()
                if not seat.built and self._end is None:
                    break
                assert seat.channel is not None
                seat.arrays.release(seat.requests.popleft().released)
                try:
                    if seat.built:
                        self._give(seat, seat.channel)
                    elif self._end is not None:
                        seat.channel.send(encode(self._end))
                        seat.requests.clear()
                except EOFError:
                    self.leave(seat)
                except Exception:
                    seat.built.clear()
                    seat.requests.appendleft(BlockRequest(released=[]))  # is answered by how the steps end
                    raise
            if seat.has_left:
                seat.built.clear()
                seat.requests.clear()

    def _give(self, seat: Seat, channel: Channel) -> None:
        block, headers = seat.built.popleft()
        first = max(0, seat.next_step - block.steps[0].step)
        block = block.part(first, len(block))
        reply, descriptors = seat.arrays.pack(block, headers.data(first))
        seat.next_step = block.steps[-1].step + 1
        self.num_signs += 1
        try:
            channel.send(encode(reply), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
