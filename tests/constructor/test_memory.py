from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from torchmix.constructor.arrays import KEPT_ARRAYS, RECENT_CALLS, StepMemory


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_the_array_is_gone() -> None:
    memory = StepMemory()
    first = memory.empty(1000, np.int64)
    place = address(first)
    del first
    assert address(memory.empty(2000, np.int32)) == place, "8000 bytes are 8000 bytes, whatever they hold"


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array[3:7],
        lambda array: array[3:7][1:2].reshape(1, 1),
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array[4:]).view(2, -1)[1],
        lambda array: torch.from_numpy(array).numpy()[2:],
        lambda array: memoryview(array)[5:],
    ],
)
def test_memory_does_not_come_back_while_anything_refers_to_it(keep: object) -> None:
    memory = StepMemory()
    array = memory.empty(10, np.int64)
    place = address(array)
    kept = keep(array)  # type: ignore[operator]
    del array
    other = memory.empty(10, np.int64)
    assert address(other) != place
    del kept
    assert address(memory.empty(10, np.int64)) == place


def test_arrays_that_live_together_do_not_overlap() -> None:
    memory = StepMemory()
    arrays = [memory.empty(5, np.float32) for _ in range(10)]
    for i, array in enumerate(arrays):
        array[:] = i
    assert [array.tolist() for array in arrays] == [[i] * 5 for i in range(10)]


def test_an_array_may_be_empty() -> None:
    assert StepMemory().empty(0, np.int64).tolist() == []


def test_no_more_memory_waits_than_is_sensible() -> None:
    memory = StepMemory()
    arrays = [memory.empty(8, np.uint8) for _ in range(KEPT_ARRAYS + 20)]
    del arrays
    assert len(memory._free_of_size[8]) == KEPT_ARRAYS


def test_sizes_of_earlier_stages_of_a_ramp_are_let_go() -> None:
    memory = StepMemory()
    held = []
    for stage in range(1, 21):
        for _ in range(RECENT_CALLS):
            array = memory.empty(stage * 1000, np.int64)
        held.append(array)
    del array
    assert sorted(memory._free_of_size) == [19 * 8000, 20 * 8000], "the stage before may still be on its way"
    for stage, array in enumerate(held, 1):
        array[:] = stage  # what is lent stays good
    assert [int(array.sum()) for array in held] == [1000 * stage**2 for stage in range(1, 21)]
    held.clear()
    assert sorted(memory._free_of_size) == [19 * 8000, 20 * 8000]


def test_memory_may_be_given_back_by_another_thread() -> None:
    memory = StepMemory()
    held = [memory.empty(100, np.int64)]
    place = address(held[0])
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert address(memory.empty(100, np.int64)) == place


def test_arrays_in_one_piece_of_memory_lie_apart_and_come_back_together() -> None:
    memory = StepMemory()
    arrays = memory.empty_together(5, [np.int64, np.float32, np.int32])
    assert [array.dtype for array in arrays] == [np.int64, np.float32, np.int32]
    place = address(arrays[0])
    assert [address(array) - place for array in arrays] == [0, 64, 128]
    for i, array in enumerate(arrays):
        array[:] = i
    assert [array.tolist() for array in arrays] == [[i] * 5 for i in range(3)]
    last = arrays.pop()
    del array, arrays
    assert address(memory.empty_together(5, [np.int64, np.float32, np.int32])[0]) != place
    del last
    assert address(memory.empty_together(5, [np.int64, np.float32, np.int32])[0]) == place
