"""The numpy arrays of a replica's steps, and the memory that they lie in."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.reader.protocol import NO_LABEL

# --- A flat array, filled range by range with a ramp in each.
#
# The result equals a loop over the ranges; native code does the work; no temporary array is as large as the output,
# since the first touch of fresh memory costs more than all the work (see `arrays.py`). So values are made in blocks,
# in the narrowest integers that hold them and in the processor's cache, and widened into place. Cost: 0.4 ns a value
# beyond writing it for a slope of 0, 0.8 for 1, and 20 to 60 ns a range.

BLOCK = 1 << 15
"""Values made at a time: 64 to 128 KiB, twice that with a slope, fit the cache of one core."""


def fill_ramps(start: NDArray[np.int64], value: NDArray[Any], *, slope: int, out: NDArray[Any]) -> None:
    """Write out[start[i] + k] = value[i] + slope * k, up to the next start.

    Positions that restart at each document, the source number of each document, and the index of a rank's slice are
    ramps.

    Args:
        start: [n] places in out, ascending.
        value: [n] first value of each ramp, 0 or more.
        slope: Difference between neighbouring values, 0 or 1.
        out: Integers, written in place; nothing is written before start[0].
    """
    if not len(start):
        return
    # A ramp is a constant, plus the place in the block if its slope is 1. Ramps are cut at the borders of blocks.
    borders = np.arange(int(start[0]) // BLOCK * BLOCK, len(out), BLOCK)
    cut = np.searchsorted(start, borders[1:])
    edges = np.insert(start, cut, borders[1:])
    count = np.diff(edges, append=len(out))
    level = value - start if slope else value
    level = np.insert(level, cut, level[cut - 1])
    highest = int((level + edges + count - 1 if slope else level).max())
    narrow = next(dtype for dtype in (np.uint16, np.uint32, np.uint64) if highest <= np.iinfo(dtype).max)
    if slope:
        level += edges // BLOCK * BLOCK
    level = level.astype(narrow)  # a negative level wraps around, and adding the place wraps back
    place = np.arange(BLOCK, dtype=narrow)
    edge_of_border = [0, *(cut + np.arange(len(cut))).tolist(), len(edges)]
    for block, border in enumerate(borders.tolist()):
        here = slice(edge_of_border[block], edge_of_border[block + 1])
        values = np.repeat(level[here], count[here])
        stop = min(border + BLOCK, len(out))
        if slope:
            values += place[stop - border - len(values) : stop - border]
        out[stop - len(values) : stop] = values


# --- Memory for the tensors of steps, reused once nothing refers to it.
#
# An array's memory returns only when the array, every view of it and every tensor made from any of them are gone. So
# memory that the trainer holds is never overwritten; holding it only makes the loader allocate more. Memory may return
# from any thread. Cost: a few microseconds per array.

Scalar = TypeVar("Scalar", bound=np.generic)

ALIGN_BYTES = 64
"""Bytes of a cache line."""
KEPT_ARRAYS = 64
"""Maximum number of free arrays kept per size; memory that returns beyond it is freed."""
RECENT_CALLS = 1 << 7
"""A size without a request in this many calls, about 10 to 100 steps, is freed when a new size is requested."""


class _Lease:
    """The owner of lent memory for numpy: all views keep it alive, and it is collected with the last one.

    An array cannot play this part: a view of a view refers to the owner of the memory and skips the array in between.
    """

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.__array_interface__ = memory.__array_interface__


def lend(
    memory: NDArray[np.uint8],
    count: int,
    dtype: type[Scalar] | np.dtype[Scalar],
    *,
    give_back: Callable[[NDArray[np.uint8]], object],
) -> NDArray[Scalar]:
    """A writable one-dimensional array over the beginning of some memory.

    Args:
        memory: Large enough, and aligned for its values.
        count: Values of the array.
        dtype: Any fixed-size dtype.
        give_back: Called with the memory, from any thread, once nothing refers to the array any more.
    """
    lease = _Lease(memory)
    # The callback holds the memory, so the memory outlives its views. At exit nothing is left to reuse it.
    weakref.finalize(lease, give_back, memory).atexit = False
    lent: NDArray[Any] = np.asarray(lease)[: count * np.dtype(dtype).itemsize].view(dtype)
    return lent


def _of_this_process(num_bytes: int) -> NDArray[np.uint8]:
    return np.empty(num_bytes, np.uint8)


class StepMemory:
    """Lends arrays and takes their memory back by itself. One per stream of steps."""

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]] = _of_this_process) -> None:
        """Start without memory.

        Args:
            allocate: Makes memory of the given number of bytes, aligned for any dtype.
        """
        self._allocate = allocate
        # Appends and pops of a deque are atomic, so returning memory may also interrupt `empty` in its own thread.
        self._free_of_size: dict[int, deque[NDArray[np.uint8]]] = {}
        self._asked: dict[int, int] = {}
        """Number of the last call that requested each size."""
        self._num_calls = 0

    def empty(self, count: int, dtype: type[Scalar] | np.dtype[Scalar]) -> NDArray[Scalar]:
        """A writable one-dimensional array whose values are arbitrary.

        Args:
            count: Values of the array.
            dtype: Any fixed-size dtype.
        """
        num_bytes = max(1, count * np.dtype(dtype).itemsize)
        if num_bytes not in self._free_of_size:
            self._let_go()
            self._free_of_size[num_bytes] = deque(maxlen=KEPT_ARRAYS)
        self._num_calls += 1
        self._asked[num_bytes] = self._num_calls
        free = self._free_of_size[num_bytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = self._allocate(num_bytes)
        return lend(memory, count, dtype, give_back=free.append)

    def empty_together(self, count: int, dtypes: Sequence[type[np.generic]]) -> list[NDArray[Any]]:
        """Arrays of `count` arbitrary values each, in one block of memory that returns when all of them are gone.

        Args:
            count: Values of each array.
            dtypes: Dtype of each array; each array starts at a multiple of 64 bytes in the block.
        """
        num_bytes = [count * np.dtype(dtype).itemsize for dtype in dtypes]
        starts = [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in num_bytes)]
        block = self.empty(starts[-1], np.uint8)
        return [
            block[start : start + size].view(dtype)
            for start, size, dtype in zip(starts[:-1], num_bytes, dtypes, strict=True)
        ]

    def _let_go(self) -> None:
        """Forget sizes of steps long ago; lent memory of these sizes is freed when it returns."""
        old = [size for size, call in self._asked.items() if self._num_calls - call >= RECENT_CALLS]
        for size in old:
            del self._free_of_size[size], self._asked[size]


# --- The numpy arrays of one step of one replica. `build` fills them, here or in a process without torch.
#
# In and out: arrays by name; `StepTensors.from_arrays` makes tensors of them. Must hold: all fields are present, in
# these dtypes and shapes; for a leader of middle stages, all but tokens and labels. Cost: no copies; 8 bytes a token,
# and 12 bytes a span.
#
#     tokens             int32 [M, B, T]  id of the token; 0 in padding
#     labels             int32 [M, B, T]  the next token of its document, also across a split; NO_LOSS where there is
#     none
#     spans              int32 [K, 3]     described in `spans.py`; positions and sources follow from them
#     spans_stop         int64 [M]        where each microbatch's part of `spans` ends
#     cu_seqlens         int32            described in `spans.py`: where attention stops
#     cu_seqlens_padded  int32
#     cu_seqlens_stop    int64 [M]        where each microbatch's part of the two ends
#     max_seqlen         int32 [M]        the longest padded length of a segment
#
# M is the microbatches of the step, B the micro_batch_size, T the tokens of a sample, or a rank's slice of them.
#
# With runs of ranks each rank has tokens of its own number in each microbatch. Then tokens and labels are [N], M counts
# the slices of all ranks of the replica, by CP slice, then by microbatch, and there are two fields more:
#
#     tokens_stop        int64 [M]        where the tokens of each slice end
#     runs               int32 [M, 2]     first rank and ranks of the run that shares the slice's bin

SEQUENCE_DTYPES: dict[str, type[np.generic]] = {"tokens": np.int32, "labels": np.int32}
"""Fields with a value per token; a rank gets the fields that its stage needs, cut to its CP slice."""
SEQUENCE_FIELDS = tuple(SEQUENCE_DTYPES)
SPAN_FIELDS = ("spans", "spans_stop")
"""Where positions restart, and sources change, on the rank's CP slice."""
BOUNDARY_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "cu_seqlens_stop", "max_seqlen")
"""Fields that every rank gets whole."""
FIELDS = SEQUENCE_FIELDS + SPAN_FIELDS + BOUNDARY_FIELDS
RUN_FIELDS = ("tokens_stop", "runs")
"""Fields of a step with runs of ranks, beside `FIELDS`."""
STOP_OF_FIELD = {"spans": "spans_stop", "cu_seqlens": "cu_seqlens_stop", "cu_seqlens_padded": "cu_seqlens_stop"}
"""Fields without an entry for each microbatch, and the field that says where those of each end."""

NO_LOSS = NO_LABEL
"""The label where there is no loss."""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a replica's step has beside the fields."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Planned tokens with a label, over the global batch of all replicas."""
    num_masked_tokens: int = 0
    """Tokens of this replica that `num_tokens_global` counts and that lost their label to bad rows."""
    bad_tokens: NDArray[np.int64] | None = None
    """[S] tokens of each source in blank pieces, which could not be read; None if all pieces could be read. This array
    does not leave the process that builds the step."""
    modules: Mapping[str, NDArray[Any]] = {}
    """Writable arrays by `MODULE.ARRAY`, see `modules.py`; empty for a recipe without modules."""
    rows: Mapping[str, NDArray[Any]] = {}
    """Writable arrays by `NAME:PART`, see `build.py`; empty where no map gives more than ids."""
    header: Any = None
    """The loader's header, opaque here."""


class StepArrays(StepFacts, frozen=True, kw_only=True, eq=False):
    """All fields of a replica's step."""

    fields: Mapping[str, NDArray[Any]]
    """Writable arrays by name, one for each of `FIELDS`, and with runs of ranks of `RUN_FIELDS`."""


class BlockArrays(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """K consecutive steps of a replica, of as many microbatches each, whose fields lie end to end.

    A step with runs of ranks is a block of its own.
    """

    steps: Sequence[StepFacts]
    """[K]."""
    fields: Mapping[str, NDArray[Any]]
    """As in `StepArrays`, of all K x M microbatches."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_microbatches(self) -> int:
        """M, microbatches of a step."""
        return len(self.fields["max_seqlen"]) // len(self.steps)

    def step(self, number: int) -> StepArrays:
        """One step; its fields are views."""
        facts, fields = self.steps[number], self.part(number, number + 1).fields
        return StepArrays(**{name: getattr(facts, name) for name in StepFacts.__struct_fields__}, fields=fields)

    def part(self, start: int, stop: int) -> BlockArrays:
        """Some of the steps, half-open; their fields are views."""
        if (start, stop) == (0, len(self.steps)):
            return self
        count = self.num_microbatches
        return BlockArrays(steps=self.steps[start:stop], fields=cut_fields(self.fields, start * count, stop * count))


def cut_fields(fields: Mapping[str, NDArray[Any]], first: int, stop: int) -> dict[str, NDArray[Any]]:
    """The fields of some consecutive microbatches, as views; stops are counted from the first of them."""
    found: dict[str, NDArray[Any]] = {}
    for name, field in fields.items():
        if name in STOP_OF_FIELD:
            stops = fields[STOP_OF_FIELD[name]]
            found[name] = field[int(stops[first - 1]) if first else 0 : int(stops[stop - 1])]
        else:
            found[name] = field[first:stop]
    for name in set(STOP_OF_FIELD.values()) & found.keys() if first else ():
        found[name] = found[name] - fields[name][first - 1]
    return found


def copy_of_block(block: BlockArrays, memory: StepMemory | None) -> BlockArrays:
    """The same steps for another who holds them, with sequence fields in memory of its own; None: without them."""
    names = list(SEQUENCE_FIELDS)
    fields = {name: field.copy() for name, field in block.fields.items() if name not in names}
    if memory is None:
        return BlockArrays(steps=block.steps, fields=fields)
    copies = memory.empty_together(block.fields[names[0]].size, list(SEQUENCE_DTYPES.values()))
    for name, copy in zip(names, copies, strict=True):
        fields[name] = copy.reshape(block.fields[name].shape)
        fields[name][:] = block.fields[name]
    return BlockArrays(steps=block.steps, fields={name: fields[name] for name in block.fields})
