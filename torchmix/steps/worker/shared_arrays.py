"""Where the arrays of steps lie: arenas, memory that leader and worker have both mapped.

In, at the worker: arrays that were built in memory of `SharedArrays.allocate`. Out, at the leader: the same, without a
copy. Must hold: memory is written to again only after the leader has said that nobody there refers to it, and nothing
but the two processes keeps it: it has no name, so none is left behind, whoever is killed. Blocks become alike, so no
memory is made any more then. Cost: nothing per token; each process keeps a descriptor for each block in flight.

On Linux the memory is no file, so the size of /dev/shm does not matter.
"""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.constructor.arrays import BlockArrays, StepFacts, lend
from torchmix.parallel.wire import ArrayForm
from torchmix.steps.header import decode_headers
from torchmix.steps.worker.messages import (
    LIMIT_ERRNOS,
    Arena,
    BlockReply,
    InlineArray,
    PackedArrays,
    PackedStep,
    SharedArray,
    open_files_named,
)

NOTHING = PackedArrays()


class SharedArrays:
    """The worker's side."""

    def __init__(self) -> None:
        self._arenas: dict[int, tuple[int, int]] = {}
        """By number, the addresses at which it starts and stops."""
        self._num_arenas = 0
        self._held: dict[int, list[NDArray[Any]]] = {}
        """By arena, an array of each block in it that the leader has."""
        # Appends and pops of a deque are atomic: a step is packed in one thread while the next is built in another.
        self._new: deque[tuple[Arena, int]] = deque()
        """Not told of yet, with their descriptors."""
        self._dropped: deque[int] = deque()

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory that can be shared; for `StepMemory`.

        Raises:
            OpenFilesLimit: This process has as many open files as it may.
            OSError: There is none.
        """
        with open_files_named():
            descriptor = _nameless_file()
            os.ftruncate(descriptor, num_bytes)
            memory = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        number, self._num_arenas = self._num_arenas, self._num_arenas + 1
        address = _address(memory)
        self._arenas[number] = address, address + num_bytes
        self._new.append((Arena(number=number, num_bytes=num_bytes), descriptor))
        weakref.finalize(memory, _forget, number, self._arenas, self._dropped).atexit = False
        return memory

    def pack(self, block: BlockArrays, headers: bytes) -> tuple[BlockReply, list[int]]:
        """A block as a message, and the descriptors that go with it, to be closed once they are sent.

        What lies in memory of `allocate` stays there, and is not used again until it is released.
        """
        held: dict[int, NDArray[Any]] = {}
        fields = self._packed(block.fields, held)
        steps = [
            PackedStep(
                step=facts.step,
                num_tokens_global=facts.num_tokens_global,
                num_masked_tokens=facts.num_masked_tokens,
                modules=self._packed(facts.modules, held),
                rows=self._packed(facts.rows, held),
            )
            for facts in block.steps
        ]
        for number, array in held.items():
            self._held.setdefault(number, []).append(array)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]  # first: it is told of as new before
        new = [self._new.popleft() for _ in range(len(self._new))]
        reply = BlockReply(
            fields=fields, steps=steps, headers=headers, new=[arena for arena, _ in new], dropped=dropped
        )
        return reply, [descriptor for _, descriptor in new]

    def _packed(self, arrays: Mapping[str, NDArray[Any]], held: dict[int, NDArray[Any]]) -> PackedArrays:
        """Some arrays; notes one of each arena in `held`."""
        if not arrays:
            return NOTHING
        shared, inline = [], []
        for name, array in arrays.items():
            form = ArrayForm.of(name, array.dtype.name, array.shape)
            address = _address(array)
            number = next((n for n, (start, stop) in list(self._arenas.items()) if start <= address < stop), None)
            if number is None:
                inline.append(InlineArray(form=form, values=array.tobytes()))
            else:
                start_bytes = address - self._arenas[number][0]
                shared.append(SharedArray(form=form, arena=number, start_bytes=start_bytes))
                held[number] = array
        return PackedArrays(shared=shared, inline=inline)

    def release(self, numbers: Sequence[int]) -> None:
        """The leader has no use for these arenas any more, each for one of the blocks in it."""
        for number in numbers:
            self._held[number].pop()
            if not self._held[number]:
                del self._held[number]


class MappedArrays:
    """The leader's side."""

    def __init__(self) -> None:
        self._memory_of_arena: dict[int, NDArray[np.uint8]] = {}
        # Appends and pops of a deque are atomic: the last view of an array may go in any thread.
        self._released: deque[int] = deque()

    def unpack(self, reply: BlockReply, descriptors: Sequence[int]) -> BlockArrays:
        """A block whose arrays lie where the worker has built them, with its headers.

        Args:
            reply: From `pack`.
            descriptors: That came with it; closed here.

        Raises:
            OpenFilesLimit: This process has as many open files as it may.
        """
        for arena, descriptor in zip(reply.new, descriptors, strict=True):
            with open_files_named():
                memory = np.frombuffer(mmap.mmap(descriptor, arena.num_bytes), np.uint8)
            os.close(descriptor)
            self._memory_of_arena[arena.number] = memory
        for number in reply.dropped:
            del self._memory_of_arena[number]
        lent: dict[int, NDArray[np.uint8]] = {}
        headers = decode_headers(reply.headers)
        return BlockArrays(
            fields=self._unpacked(reply.fields, lent),
            steps=[
                StepFacts(
                    step=step.step,
                    num_tokens_global=step.num_tokens_global,
                    num_masked_tokens=step.num_masked_tokens,
                    modules=self._unpacked(step.modules, lent),
                    rows=self._unpacked(step.rows, lent),
                    header=header,
                )
                for step, header in zip(reply.steps, headers, strict=True)
            ],
        )

    def _unpacked(self, packed: PackedArrays, lent: dict[int, NDArray[np.uint8]]) -> dict[str, NDArray[Any]]:
        """Arrays by name; `lent` has the arenas of this block that are in use already."""
        found: dict[str, NDArray[Any]] = {}
        for entry in packed.shared:
            if entry.arena not in lent:
                memory = self._memory_of_arena[entry.arena]
                give_back = functools.partial(_note, self._released, entry.arena)
                lent[entry.arena] = lend(memory, len(memory), np.uint8, give_back=give_back)
            form = entry.form
            values = lent[entry.arena][entry.start_bytes : entry.start_bytes + form.num_bytes]
            found[form.name] = values.view(form.dtype).reshape(form.shape)
        for small in packed.inline:
            # Writable, as all that the trainer gets.
            found[small.form.name] = np.ndarray(small.form.shape, small.form.dtype, bytearray(small.values))
        return found

    def take_released(self) -> list[int]:
        """Arenas to which nobody refers any more, each once."""
        return [self._released.popleft() for _ in range(len(self._released))]


def _forget(number: int, arenas: dict[int, tuple[int, int]], dropped: deque[int]) -> None:
    del arenas[number]
    dropped.append(number)


def _note(released: deque[int], number: int, _: NDArray[np.uint8]) -> None:
    released.append(number)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _nameless_file() -> int:
    """A descriptor of memory on Linux, elsewhere of a file that was removed already."""
    try:
        return os.memfd_create("torchmix")
    except (AttributeError, OSError) as error:  # not this system, or it is forbidden here
        if getattr(error, "errno", None) in LIMIT_ERRNOS:
            raise
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
