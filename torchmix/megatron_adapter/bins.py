"""Planned bins in the place of Megatron's own reading, gathering of lengths, planning and sending: `runs.py` says when.

The schedule of --hybrid-context-parallel asks the first TP rank alone. The others have the same microbatches from their
own loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

from torchmix.errors import RecipeError
from torchmix.megatron_adapter.microbatches import Item, iterator_of
from torchmix.megatron_adapter.runs import FLAGS, Way

ONE_STAGE = "hybrid_context_parallel_forward_backward"
"""The schedule of --hybrid-context-parallel, in `megatron.core.pipeline_parallel.schedules`."""
BY_WRAPPING = "wrap_data_iterator"
"""What dev calls for each step, in `megatron.training.training`."""


class _AsItIs:
    """Stands for `HybridCPDataLoaderWrapper`: the iterator has steps as they were planned."""

    def __init__(self, data_iterator: Any, *_: Any, **__: Any) -> None:
        self._data_iterator = data_iterator

    def __iter__(self) -> Any:
        return self._data_iterator


items_of_step: deque[Item] = deque()
"""On TP ranks that Megatron's schedule for one stage gives no iterator: what is left of the step that runs."""


def take_over(way: Way) -> None:
    """Let Megatron take planned bins.

    Raises:
        RecipeError: This version has no such functions.
    """
    from megatron.training import training

    if way == "microbatches":
        _check_has(training, BY_WRAPPING, "--dynamic-context-parallel")
        training.wrap_data_iterator = planned_step
        return
    from megatron.core.pipeline_parallel import schedules

    _check_has(schedules, ONE_STAGE, "--hybrid-context-parallel")
    _check_has(training, "HybridCPDataLoaderWrapper", "--hybrid-context-parallel")
    training.HybridCPDataLoaderWrapper = _AsItIs
    schedule = getattr(schedules, ONE_STAGE)
    if not hasattr(schedule, "__wrapped__"):
        setattr(schedules, ONE_STAGE, on_all_tp_ranks(schedule))


def _check_has(module: Any, name: str, flag: str) -> None:
    if not hasattr(module, name):
        raise RecipeError(
            f"{flag}: this Megatron has no {module.__name__}.{name}, so torchmix cannot hand it bins of several sizes; "
            f"use {FLAGS} of the version that has it, or packing.method: best_fit"
        )


def on_all_tp_ranks(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """The schedule, which asks the first TP rank of each group alone; the others take the same step beside it."""

    @wraps(schedule)
    def run(forward_step_func: Any, data_iterator: Any, *arguments: Any, **options: Any) -> Any:
        from megatron.core import parallel_state

        if parallel_state.get_tensor_model_parallel_rank() != 0:
            bins, _ = next(data_iterator)
            items_of_step.clear()
            items_of_step.extend(bins.values())
        return schedule(forward_step_func, data_iterator, *arguments, **options)

    return run


def planned_step(
    data_iterator: Any, config: Any, num_microbatches: int, *_: Any, **__: Any
) -> tuple[Any, int, int, int]:
    """What dev asks for each step: the iterator (or those of the chunks), how many microbatches follow in it, the
    tokens of the global batch, and the sum of the squares of its documents' tokens.

    Raises:
        StopIteration: The data have ended.
    """
    return data_iterator, *iterator_of(data_iterator).shared.sizes_of_step()


def group_of(size: int) -> Any:
    """Megatron's own group of so many ranks; of a rank alone it has one in dev, and elsewhere none."""
    from megatron.core import parallel_state

    named = getattr(parallel_state, "get_dynamic_data_context_parallel_groups", None)
    if named is not None:
        return named(group_size=size)
    return None if size == 1 else parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
