"""Where the arrays of steps lie: memory that leader and worker have both mapped.

In, at the worker: arrays that were built in memory of `SharedArrays.allocate`. Out, at the leader: the same, without a
copy. Must hold: memory is written to again only after the leader has said that nobody there refers to it, and nothing
but the two processes keeps it: it has no name, so none is left behind, whoever is killed. Steps are alike, so after the
first few no memory is made any more. Cost: nothing per token; each process keeps a descriptor for each step in flight.

On Linux the memory is no file, so the size of /dev/shm does not matter.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.constructor.arrays import StepArrays
from torchmix.constructor.memory import lend
from torchmix.stateful.worker.messages import InlineArray, Segment, SharedArray, StepReply


class SharedArrays:
    """The worker's side."""

    def __init__(self) -> None:
        self._segments: dict[int, tuple[int, int]] = {}
        """By number, the addresses at which it starts and stops."""
        self._num_segments = 0
        self._held: dict[int, NDArray[Any]] = {}
        """By segment, an array in it that the leader has."""
        self._new: list[tuple[Segment, int]] = []
        """Not told of yet, with their descriptors."""
        self._dropped: deque[int] = deque()

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory that can be shared; for `StepMemory`.

        Raises:
            OSError: There is none.
        """
        descriptor = _nameless_file()
        os.ftruncate(descriptor, num_bytes)
        memory = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        number, self._num_segments = self._num_segments, self._num_segments + 1
        address = _address(memory)
        self._segments[number] = address, address + num_bytes
        self._new.append((Segment(number=number, num_bytes=num_bytes), descriptor))
        weakref.finalize(memory, _forget, number, self._segments, self._dropped).atexit = False
        return memory

    def pack(self, step: StepArrays) -> tuple[StepReply, list[int]]:
        """A step as a message, and the descriptors that go with it, to be closed once they are sent.

        What lies in memory of `allocate` stays there, and is not used again until it is released.
        """
        shared, inline = [], []
        for name, array in step.fields.items():
            form = {"name": name, "dtype": array.dtype.str, "shape": array.shape}
            address = _address(array)
            number = next((n for n, (start, stop) in list(self._segments.items()) if start <= address < stop), None)
            if number is None:
                inline.append(InlineArray(**form, values=array.tobytes()))
            else:
                start_bytes = address - self._segments[number][0]
                shared.append(SharedArray(**form, segment=number, start_bytes=start_bytes))
                self._held[number] = array
        new, self._new = self._new, []
        reply = StepReply(
            step=step.step,
            num_tokens_global=step.num_tokens_global,
            header=step.header,
            shared=shared,
            inline=inline,
            new=[segment for segment, _ in new],
            dropped=[self._dropped.popleft() for _ in range(len(self._dropped))],
        )
        return reply, [descriptor for _, descriptor in new]

    def release(self, numbers: Sequence[int]) -> None:
        """The leader has no use for these segments any more."""
        for number in numbers:
            del self._held[number]


class MappedArrays:
    """The leader's side."""

    def __init__(self) -> None:
        self._memory_of_segment: dict[int, NDArray[np.uint8]] = {}
        # Appends and pops of a deque are atomic: the last view of an array may go in any thread.
        self._released: deque[int] = deque()

    def unpack(self, reply: StepReply, descriptors: Sequence[int]) -> StepArrays:
        """A step whose arrays lie where the worker has built them.

        Args:
            reply: From `pack`.
            descriptors: That came with it; closed here.
        """
        for segment, descriptor in zip(reply.new, descriptors, strict=True):
            memory = np.frombuffer(mmap.mmap(descriptor, segment.num_bytes), np.uint8)
            os.close(descriptor)
            self._memory_of_segment[segment.number] = memory
        for number in reply.dropped:
            del self._memory_of_segment[number]
        fields: dict[str, NDArray[Any]] = {}
        lent: dict[int, NDArray[np.uint8]] = {}
        for entry in reply.shared:
            if entry.segment not in lent:
                memory = self._memory_of_segment[entry.segment]
                give_back = functools.partial(_note, self._released, entry.segment)
                lent[entry.segment] = lend(memory, len(memory), np.uint8, give_back=give_back)
            dtype = np.dtype(entry.dtype)
            stop_bytes = entry.start_bytes + math.prod(entry.shape) * dtype.itemsize
            values = lent[entry.segment][entry.start_bytes : stop_bytes].view(dtype)
            fields[entry.name] = values.reshape(entry.shape)
        for small in reply.inline:
            # Writable, as all that the trainer gets.
            fields[small.name] = np.ndarray(small.shape, small.dtype, bytearray(small.values))
        return StepArrays(
            step=reply.step, num_tokens_global=reply.num_tokens_global, fields=fields, header=reply.header
        )

    def take_released(self) -> list[int]:
        """Segments to which nobody refers any more, each once."""
        return [self._released.popleft() for _ in range(len(self._released))]


def _forget(number: int, segments: dict[int, tuple[int, int]], dropped: deque[int]) -> None:
    del segments[number]
    dropped.append(number)


def _note(released: deque[int], number: int, _: NDArray[np.uint8]) -> None:
    released.append(number)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("torchmix")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
