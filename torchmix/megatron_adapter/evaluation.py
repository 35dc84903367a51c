"""Validation and test: parts of the recipe, read again from where Megatron's own count of samples says.

It is a pure function of that count, so nothing of it is in a checkpoint; every rank does the same at the same
microbatch.

    --eval-iters N       resumes from evaluation to evaluation, and repeats sources without end, whatever `max_epochs`
    --full-validation    one pass over every document of validation, from its beginning at each evaluation
    --multiple-validation-sets    likewise, of each source of validation by itself
    test                 from the beginning, as many steps as Megatron asks for

A pass ends for all ranks at once, but the next one must not begin only when a rank asks for it: a later pipeline stage
asks after it has got activations, and the first stage gets no data before all stages listen. So each rank goes back to
the beginning as soon as it has had the last microbatch, in a thread, because that may wait for ranks that are behind.

Cost: threads and some steps of memory for each part; the pages that it keeps are an eighth of the recipe's cache. To
count the steps of a pass, rank 0 plans it once, at the start: about 1 ms a step of 1,000 documents.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from torchmix.catalog.in_store import fetch_catalog
from torchmix.catalog.store import open_part
from torchmix.constructor.fields import Microbatch
from torchmix.errors import RecipeError, SourceExhausted
from torchmix.parallel.agreement import times_met
from torchmix.planner.planner import open_planner
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Read, Recipe
from torchmix.stateful.loader import StatefulDataLoader

CACHE_SHARE = 8
"""The cache of a part that only evaluates is this fraction of the recipe's."""


def recipe_of_evaluation(recipe: Recipe, *, samples: int, length: int, num_sets: int = 1) -> Recipe:
    """The recipe with the global batch of evaluations and a smaller cache.

    Args:
        recipe: The checked recipe, with all its parts.
        samples: Samples of a global batch of validation or test.
        length: Tokens of a sample, `--seq-length`: that of training now, where it grows.
        num_sets: Loaders that share the cache.
    """
    cache_bytes = parse_bytes(recipe.read.cache, where="read.cache")
    return msgspec.structs.replace(
        recipe,
        batch=msgspec.structs.replace(recipe.batch, samples=samples, length=length),
        read=Read(cache=max(1, cache_bytes // (CACHE_SHARE * num_sets))),
    )


def recipe_of_set(recipe: Recipe, name: str) -> Recipe:
    """The recipe that trains on what one source of validation has; its only part is `train`.

    Args:
        recipe: The recipe of evaluations, with all its parts.
        name: The source.

    Raises:
        RecipeError: Its rows are held out, so they are no source of their own.
    """
    part = part_of(recipe, "validation")
    if name in part.bands or part.selections:
        message = (
            "rows that are held out, and selections, are validated together with the others of their part; leave "
            "Megatron's flag for several validation sets out, or give each set a source under `validation`"
        )
        raise RecipeError(message, "hold_out.validation" if name in part.bands else "validation")
    return msgspec.structs.replace(
        recipe,
        batch=part.batch,
        sources={name: msgspec.structs.replace(part.sources[name], max_epochs=None, on_exhausted="error")},
        mixture={name: "100%"},
        split=None,
        validation=None,
        test=None,
    )


def fails_in_full_validation(training: Any) -> bool:
    """Whether Megatron itself fails in `--full-validation` without several sets.

    Its `evaluate_and_print_results` makes a tensor of a number, lists that, which gives the number, and takes the first
    of it. All versions from core 0.16 to August 2026 do.

    Args:
        training: The module `megatron.training.training`.
    """
    function = getattr(training, "evaluate_and_print_results", None)
    if function is None:
        return False
    return "eval_iters[0] if not args.multiple_validation_sets" in inspect.getsource(inspect.unwrap(function))


def first_step(consumed: int, *, samples: int) -> int:
    """The step of validation to continue with; a step that was begun with another batch size is not repeated.

    Args:
        consumed: Megatron's `consumed_valid_samples`.
        samples: Samples of a global batch of validation.
    """
    return -(-consumed // samples)


def steps_of_pass(recipe: Recipe, part: str, folder: Path) -> int:
    """Steps of one pass over a part; planned, and not read.

    Args:
        recipe: The checked recipe, with the global batch of evaluations.
        part: `validation` or `test`.
        folder: The folder of the recipe.

    Raises:
        RecipeError: The part has no documents.
    """
    once = part_of(recipe, part, one_pass=True)
    catalog = open_part(fetch_catalog(folder, recipe.catalog), once)
    planner = open_planner(once, catalog)
    cursor = planner.start()
    try:
        while True:
            cursor = planner.skip(cursor)
    except SourceExhausted:
        if not cursor.step:
            raise RecipeError("has no documents to evaluate", part) from None
        return cursor.step


def from_rank_0(count: Callable[[], int]) -> int:
    """A number that rank 0 works out and all ranks use. A collective.

    Args:
        count: Called on rank 0 alone.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return count()
    store = dist.distributed_c10d._get_default_store()
    key = f"torchmix/evaluation/{times_met(store, 'evaluation', dist.get_rank())}"
    if dist.get_rank() == 0:
        store.set(key, str(count()))
    return int(store.get(key))


class Passes:
    """One pass over a part, again and again; an iterator without end."""

    def __init__(self, loader: StatefulDataLoader, *, num_steps: int) -> None:
        """Begin.

        Args:
            loader: Gives the part, and ends after `num_steps`. From now on others only close it.
            num_steps: Steps of a pass, at least 1.
        """
        self._loader = loader
        self._num_steps = num_steps
        self._start = loader.state_dict()
        self._microbatches: Iterator[Microbatch] = iter(loader)
        self._rewinding: threading.Thread | None = None
        self._error: BaseException | None = None

    def __iter__(self) -> Passes:
        return self

    def __next__(self) -> Microbatch:
        self.settle()
        if self._error is not None:
            raise self._error
        microbatch = next(self._microbatches)
        if microbatch.is_last_of_step and microbatch.step == self._num_steps - 1:
            self._rewinding = threading.Thread(target=self._rewind, name="torchmix-rewind", daemon=True)
            self._rewinding.start()
        return microbatch

    def settle(self) -> None:
        """Wait until the loader stands at the beginning of a pass, if it is on its way there."""
        if self._rewinding is not None:
            self._rewinding.join()
            self._rewinding = None

    def _rewind(self) -> None:
        try:
            self._loader.load_state_dict(self._start)
        except BaseException as error:  # the edge of a thread: raised where the next microbatch is asked for
            self._error = error
