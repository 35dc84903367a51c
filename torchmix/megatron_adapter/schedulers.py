"""Megatron's own schedulers of documents of any length, to be compared with a plan: what each rank would pay.

They are called as they are installed, with the lengths of a step, and their groups are judged by the recipe's cost.
Cost: their own, which is seconds a step for hundreds of ranks; importing Megatron takes as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import OptionError, RecipeError
from torchmix.lazy_names import imported
from torchmix.planner.contexts import RunCosts, shortest_run

Groups = Sequence[Sequence[Sequence[int]]]
"""By microbatch and rank: numbers of samples."""
Samples = list[tuple[int, int]]
"""Number and tokens of each."""


class RivalStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step as a scheduler of Megatron places it."""

    load_of_ranks: Int64Array
    """int64 [microbatches, P] what each rank pays."""
    padded_tokens: int
    """Tokens with padding, of all samples."""
    exchanged_tokens: int
    """Tokens that ranks get from others of their run, of all ranks."""


class _Ranks(msgspec.Struct, frozen=True):
    """Stands for a process group; the schedulers ask for its size alone."""

    count: int

    def size(self) -> int:
        return self.count


def _balanced(scheduler: Any, samples: Samples, costs: RunCosts) -> Groups:
    found: Groups = scheduler(costs.rank_tokens, _Ranks(costs.num_ranks)).get_groups_and_subsamples(samples, None)[1]
    return found


def _packing(scheduler: Any, samples: Samples, costs: RunCosts) -> Groups:
    cp = shortest_run(np.array([tokens for _, tokens in samples]), costs)
    multiple = costs.microbatches_of if costs.microbatches_of > 1 else None
    made = scheduler(costs.rank_tokens, cp, costs.num_ranks // cp, multiple)
    found: Groups = made.get_groups_and_subsamples(samples)
    return found


SCHEDULERS: dict[str, tuple[str, str, Callable[[Any, Samples, RunCosts], Groups]]] = {
    "BalancedCPScheduler": ("megatron.core.pipeline_parallel.hybrid_cp_schedule", "BalancedCPScheduler", _balanced),
    "default_dynamic_cp": ("megatron.core.datasets.data_schedule", "DefaultDynamicCPScheduler", _packing),
    "dp_balanced": ("megatron.core.datasets.data_schedule", "DpBalancedScheduler", _packing),
}
"""By Megatron's names: the module, the class, and how it is called."""


def installed_schedulers() -> tuple[str, ...]:
    """Those of SCHEDULERS that the installed Megatron has; none without Megatron."""
    return tuple(name for name in SCHEDULERS if class_of(name) is not None)


def class_of(name: str) -> Any:
    """The class of one of SCHEDULERS; None where it cannot be imported."""
    module, scheduler, _ = SCHEDULERS[name]
    try:
        return imported(f"{module}:{scheduler}", "megatron")
    except RecipeError:
        return None


def place_as_megatron(name: str, tokens: Int64Array, costs: RunCosts) -> RivalStep:
    """A step as one of SCHEDULERS places it, by the cost of `costs`.

    Args:
        name: A key of SCHEDULERS.
        tokens: int64 [n] of each sample, by number.
        costs: Of the layout.

    Raises:
        OptionError: The installed Megatron lacks it, or it fails on these lengths.
    """
    scheduler = class_of(name)
    if scheduler is None:
        raise OptionError(f"the installed Megatron has no {name}")
    try:
        groups = SCHEDULERS[name][2](scheduler, list(enumerate(tokens.tolist())), costs)
    except Exception as error:
        raise OptionError(f"Megatron's {name} fails: {type(error).__name__}: {error}") from error
    return judged(groups, tokens, costs)


def judged(groups: Groups, tokens: Int64Array, costs: RunCosts) -> RivalStep:
    """What ranks pay by a recipe's cost for samples that groups of microbatches and ranks list.

    Raises:
        OptionError: A sample is missing, or comes in two microbatches.
    """
    loads = np.zeros((len(groups), costs.num_ranks), np.int64)
    padded = exchanged = 0
    seen: Counter[int] = Counter()
    for row, ranks in enumerate(groups):
        sizes = Counter(sample for samples in ranks for sample in samples)
        seen.update(sizes.keys())
        load_of: dict[int, int] = {}
        for size in set(sizes.values()):
            mine = np.array([sample for sample, count in sizes.items() if count == size])
            load_of |= dict(zip(mine.tolist(), costs.of_rank(tokens[mine], size).tolist(), strict=True))
            of_size = costs.padded(tokens[mine], size)
            padded += int(of_size.sum())
            exchanged += int((of_size // size * (size - 1)).sum()) * size
        for rank, samples in enumerate(ranks):
            loads[row, rank] = sum(load_of[sample] for sample in samples)
    if seen != dict.fromkeys(range(len(tokens)), 1):
        raise OptionError(
            f"it places {len(seen)} of {len(tokens)} samples, {max(seen.values(), default=0)} times at most"
        )
    return RivalStep(load_of_ranks=loads, padded_tokens=padded, exchanged_tokens=exchanged)
