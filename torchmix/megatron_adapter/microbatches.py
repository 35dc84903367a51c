"""One stream of microbatches for every model chunk of a rank, and the images around Megatron's schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from torchmix.constructor.fields import Microbatch, ModuleBatch
from torchmix.errors import OptionError, PlanError
from torchmix.megatron_adapter.vision import images_of
from torchmix.parallel.routes import HeldRows, Routes, place_rows, route

# --- One stream of microbatches, given to every model chunk of a rank: what Megatron calls its data iterators.
#
# Every chunk sees the same microbatches in the same order; a microbatch is kept until the last chunk has had it, and
# no longer; a step counts as consumed when all chunks have had its last microbatch, and only then is its state handed
# on.
#
# Megatron's interleaved schedule lets a chunk run ahead of the next by some groups of microbatches of the same step,
# so at most a step is kept, as views into memory that exists anyway. Chunks ask in the thread that trains.
#
# Dicts, because Megatron's rerun state machine keeps a shallow copy of each until its step is done, and stores them in
# the checkpoint of a suspected fault, to be loaded `weights_only`. It replays those copies without asking here: what
# is counted here is what was consumed.
#
# Cost: some microseconds for each microbatch and chunk, and on peers a copy of the microbatch.

Item = dict[str, Any]
"""A microbatch as `item_of` makes it."""


def item_of(
    microbatch: Microbatch, *, part: str, packed: bool, tells_cp_size: bool = False, images: str | None = None
) -> Item:
    """A microbatch as a dict that Megatron may copy and store: tensors, numbers and texts.

    All tensors are int32: what a peer receives is one buffer, and `torch.save` refuses views of one memory as several
    types, and with them Megatron's checkpoint of a suspected fault.

    Args:
        microbatch: From a loader.
        part: `train`, `validation` or `test`.
        packed: Whether attention stops at the ends of documents. Else there are no boundaries in the dict.
        tells_cp_size: Whether it says how many ranks share the microbatch.
        images: The module whose images of this microbatch it has; None: none.
    """
    item = {
        "tokens": microbatch.tokens_int32,
        "labels": microbatch.labels_int32,
        "spans": microbatch.spans,
        "cu_seqlens": microbatch.cu_seqlens if packed else None,
        "cu_seqlens_padded": microbatch.cu_seqlens_padded if packed else None,
        "max_seqlen": microbatch.max_seqlen,
        "part": part,
        "step": microbatch.step,
        "index": microbatch.index,
        "is_last_of_step": microbatch.is_last_of_step,
    }
    if images is not None:
        item |= images_of(microbatch, images)
    return {**item, "cp_size": microbatch.cp_size} if tells_cp_size else item


class SharedMicrobatches:
    """A loader's microbatches, taken by one or more chunks."""

    def __init__(
        self,
        source: Iterator[Microbatch],
        *,
        part: str,
        packed: bool,
        on_microbatch: Callable[[Microbatch], None] | None = None,
        state_of_step: Callable[[], bytes] | None = None,
        on_step_consumed: Callable[[bytes], None] | None = None,
        num_steps: int | None = None,
        by_step: bool = False,
        num_ranks: int = 1,
        tells_cp_size: bool = False,
        sizes: Callable[[], tuple[int, int]] | None = None,
        images: str | None = None,
    ) -> None:
        """Share `source` among chunks; nothing is taken yet.

        Args:
            source: A running loader's iterator.
            part: The part of the recipe, for each item.
            packed: See `item_of`.
            on_microbatch: Called with each microbatch as it comes, before any chunk has it; may refuse it.
            state_of_step: The state after the step whose last microbatch has just come.
            on_step_consumed: Called with that state when all chunks have had the step.
            num_steps: What `len` of the iterators says; without it they have none.
            by_step: Iterators give a step at a time, as Megatron's schedule for runs of ranks takes it.
            num_ranks: Ranks of DP x CP.
            tells_cp_size: Whether each item says how many ranks share it.
            sizes: Tokens of the step whose first microbatch has come, and the sum of the squares of its documents'
                tokens; given where samples have runs of ranks.
            images: See `item_of`.
        """
        self._images = images
        self._by_step, self._sizes = by_step, sizes
        self.num_ranks, self._tells_cp_size = num_ranks, tells_cp_size
        self._source = source
        self._part = part
        self._packed = packed
        self._on_microbatch = on_microbatch
        self._state_of_step = state_of_step
        self._on_step_consumed = on_step_consumed
        self._num_steps = num_steps
        self._waiting: deque[tuple[Microbatch, bytes | None]] = deque()
        self._num_dropped = 0
        self._is_inside_step = False
        self._num_taken: list[int] = []
        """Microbatches that each chunk has had."""
        self.images_of_step: tuple[torch.Tensor, Routes] | None = None
        """Rows of the images of the step that runs, and where they belong; see `microbatches.py`."""

    def new_iterator(self) -> MicrobatchIterator:
        """An iterator for one more chunk.

        Raises:
            PlanError: The first microbatches are gone already.
        """
        if self._num_dropped:
            raise PlanError(f"a model chunk asks for its iterator after {self._num_dropped} microbatches were consumed")
        self._num_taken.append(0)
        iterator: type[MicrobatchIterator]
        if self._by_step:
            iterator = StepIterator if self._num_steps is None else CountedStepIterator
        else:
            iterator = MicrobatchIterator if self._num_steps is None else CountedIterator
        return iterator(self, len(self._num_taken) - 1)

    def next_microbatch(self) -> Microbatch:
        """The microbatch that comes next; between steps, when all chunks have had the same.

        Raises:
            PlanError: A chunk is inside a step.
            StopIteration: The source has ended.
        """
        if self._is_inside_step or len(set(self._num_taken)) > 1:
            raise PlanError("the images of a step were to be encoded while a chunk was inside one")
        if not self._waiting:
            self._fetch()
        return self._waiting[0][0]

    def sizes_of_step(self) -> tuple[int, int, int]:
        """Microbatches of the step that comes next, its tokens, and the sum of the squares of its documents' tokens.

        Raises:
            PlanError: A chunk is inside a step.
            StopIteration: The source has ended.
        """
        first = self.next_microbatch()
        assert self._sizes is not None, "only where samples have runs of ranks"
        return first.num_microbatches, *self._sizes()

    @property
    def num_steps(self) -> int:
        """Steps of one pass."""
        assert self._num_steps is not None, "only counted iterators ask"
        return self._num_steps

    @property
    def num_waiting(self) -> int:
        """Microbatches that some chunk has had and another has not."""
        return len(self._waiting)

    def take(self, chunk: int) -> Item:
        """The next microbatch of a chunk.

        Raises:
            StopIteration: The source has ended.
        """
        return self.take_with_run(chunk)[0]

    def take_with_run(self, chunk: int) -> tuple[Item, range]:
        """The same, and the ranks of DP x CP that share it."""
        place = self._num_taken[chunk] - self._num_dropped
        if place == len(self._waiting):
            self._fetch()
        microbatch, _ = self._waiting[place]
        self._num_taken[chunk] += 1
        self._drop_what_all_have_had()
        options: dict[str, Any] = {"packed": self._packed, "tells_cp_size": self._tells_cp_size}
        item = item_of(microbatch, part=self._part, images=self._images, **options)
        return item, microbatch.cp_ranks

    def await_first(self) -> None:
        """Wait until there is a microbatch; before any chunk has taken one.

        Planning from a late step, or an index that is missing, may take long. All ranks wait for it here; elsewhere
        they would wait in a collective of the training, which has a timeout.
        """
        if not self._waiting and not self._num_dropped:
            self._fetch()

    def skip_step(self) -> int:
        """Let every chunk pass over the next step; its number.

        Raises:
            PlanError: A chunk is inside a step.
        """
        if self._is_inside_step or len(set(self._num_taken)) > 1:
            raise PlanError("a step was to be skipped while a chunk was inside one")
        while True:
            last = [self.take(chunk) for chunk in range(len(self._num_taken))][-1]
            if last["is_last_of_step"]:
                return int(last["step"])

    def _fetch(self) -> None:
        microbatch = next(self._source)
        if self._on_microbatch is not None:
            self._on_microbatch(microbatch)
        is_end = microbatch.is_last_of_step and self._state_of_step is not None
        self._waiting.append((microbatch, self._state_of_step() if is_end and self._state_of_step else None))

    def _drop_what_all_have_had(self) -> None:
        slowest = min(self._num_taken)
        while self._num_dropped < slowest:
            microbatch, state = self._waiting.popleft()
            self._num_dropped += 1
            self._is_inside_step = not microbatch.is_last_of_step
            if state is not None and self._on_step_consumed is not None:
                self._on_step_consumed(state)


class MicrobatchIterator:
    """What one chunk holds. It has no length: Megatron takes a loader of length 0 for none at all."""

    def __init__(self, shared: SharedMicrobatches, chunk: int) -> None:
        self.shared = shared
        self.index = -1
        """Place in its step of the microbatch that was given last; -1 before the first."""
        self._chunk = chunk

    def __iter__(self) -> MicrobatchIterator:
        return self

    def __next__(self) -> Item:
        item = self.shared.take(self._chunk)
        self.index = int(item["index"])
        return item


Step = tuple[dict[int, Item], list[list[list[int]]]]
"""Bins of this rank by number, and for each microbatch the numbers of the bins of each rank of DP x CP: its own in its
run, and none elsewhere, where no rank looks."""


class StepIterator(MicrobatchIterator):
    """What one chunk holds where Megatron takes steps; it has no length."""

    def __next__(self) -> Step:  # type: ignore[override]
        bins: dict[int, Item] = {}
        groups: list[list[list[int]]] = []
        is_last = False
        while not is_last:
            item, run = self.shared.take_with_run(self._chunk)
            number, is_last = len(bins), bool(item["is_last_of_step"])
            bins[number] = item
            groups.append([[number] if rank in run else [] for rank in range(self.shared.num_ranks)])
        return bins, groups


class CountedIterator(MicrobatchIterator):
    """An iterator over whole passes, for `--full-validation`: Megatron asks how many steps a pass has."""

    def __len__(self) -> int:
        return self.shared.num_steps


class CountedStepIterator(StepIterator):
    """Likewise, of steps."""

    def __len__(self) -> int:
        return self.shared.num_steps


# --- The images of a step around Megatron's schedule: encoded once before it, their gradients given back once after
# it.
#
# Every rank calls the function, also one without images and one in the middle of a pipeline, since the exchanges are
# of the whole job; none is inside the schedule, where stages wait for each other. Cost: the rows of all images of the
# step are kept until it ends.
#
# Megatron's own multimodal scripts encode inside `forward_step`, each rank the images of its own microbatch. Here the
# planner has dealt the images of the step to all ranks by their cost.

Encode = Callable[[ModuleBatch], torch.Tensor]
"""Images of this rank -> their rows, [sum of `batch.rows`, width]; also of no images."""


def with_images(forward_backward: Callable[..., Any], encode: Encode, *, module: str) -> Callable[..., Any]:
    """What `get_forward_backward_func` returned, with the images of the step around it.

    Args:
        forward_backward: Called with the keyword `data_iterator`, as Megatron does.
        encode: The encoder, on the device that trains. Its gradients are those of this rank: sum them over all ranks.
        module: The recipe's name of the module of images.

    Raises:
        OptionError: The iterator is not one of torchmix.
        KeyError: The recipe has no such module.
    """

    @wraps(forward_backward)
    def run(*arguments: Any, **options: Any) -> Any:
        shared = iterator_of(options["data_iterator"]).shared
        batch = shared.next_microbatch().modules[module]
        if torch.cuda.is_available():
            batch = batch.to(torch.cuda.current_device(), non_blocking=True)
        trains = not options.get("forward_only", False)
        with torch.set_grad_enabled(trains):
            held = HeldRows(route(encode(batch), batch.routes))
        shared.images_of_step = held.rows, batch.routes
        try:
            result = forward_backward(*arguments, **options)
        finally:
            shared.images_of_step = None
        if trains:
            held.give_back()
        return result

    return run


def place_images(embeddings: torch.Tensor, data_iterator: Any) -> torch.Tensor:
    """Embeddings of the microbatch that the iterator gave last, with the rows of its images in their places.

    Args:
        embeddings: [tokens, rows, width], as Megatron's embedding gives them, not yet scattered over TP ranks.
        data_iterator: The data iterator of the chunk, as `forward_step` has it.

    Raises:
        OptionError: The iterator is not one of torchmix, or the step does not run inside `with_images`.
    """
    iterator = iterator_of(data_iterator)
    if iterator.shared.images_of_step is None:
        raise OptionError("place_images: the images of this step are not encoded; run the schedule by with_images")
    rows, routes = iterator.shared.images_of_step
    placed = place_rows(embeddings.transpose(0, 1).contiguous(), rows, routes, iterator.index)
    return placed.transpose(0, 1).contiguous()


def as_one_row(find: Callable[..., Any]) -> Callable[..., Any]:
    """What finds Megatron's schedule, for packed microbatches of several samples.

    Its pipeline stages agree on a shape from the length and the number of samples, and packed samples travel as one row
    that is as long as all of them.

    Args:
        find: Megatron's `get_forward_backward_func`.
    """
    if hasattr(find, "finds_schedule_of_rows"):
        return find

    @wraps(find)
    def find_schedule(*arguments: Any, **options: Any) -> Callable[..., Any]:
        schedule = find(*arguments, **options)

        @wraps(schedule)
        def run(*given: Any, **named: Any) -> Any:
            samples = named["micro_batch_size"]
            lengths = ("seq_length", "decoder_seq_length")
            longer = {name: samples * named[name] for name in lengths if named.get(name) is not None}
            return schedule(*given, **{**named, **longer, "micro_batch_size": 1})

        return run

    find_schedule.finds_schedule_of_rows = True  # type: ignore[attr-defined]
    return find_schedule


def iterator_of(data_iterator: Any) -> MicrobatchIterator:
    """The iterator of torchmix inside what Megatron has put around it; the first one of several chunks."""
    found = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    while not isinstance(found, MicrobatchIterator) and hasattr(found, "iterable"):
        found = found.iterable
    if not isinstance(found, MicrobatchIterator):
        raise OptionError(f"data_iterator is {type(found).__name__}, not torchmix's; take it from its provider")
    return found
