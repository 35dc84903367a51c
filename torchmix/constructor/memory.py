"""Memory for the tensors of steps, reused once nothing refers to it.

In: sizes. Out: numpy arrays; tensors are made from them without a copy. Steps of a run have similar sizes, so after the
first few steps the system gives no more memory. When a ramp makes steps larger, memory of the earlier size is freed.
Reuse matters: a step's fields are 8 bytes a token, filling them takes about 1 ns a token, and the first touch of fresh
memory takes 0.1 to 0.8 ns a byte (kernels and virtual machines differ).

Must hold: an array's memory returns only when the array, every view of it and every tensor made from any of them are
gone. So memory that the trainer holds is never overwritten; holding it only makes the loader allocate more. Memory may
return from any thread. Cost: a few microseconds per array.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

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
