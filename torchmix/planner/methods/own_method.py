"""A method of the user's: `module:function` of the recipe.

In: a name that can be imported where steps are planned, and what is to be shared out. Out: the bin of each item,
checked. Must hold: every item has one bin that exists, counts and cap are kept, and the function answers alike when it
is asked again; anything else is an error that names the function. Cost: that of the function; twice, the first time.
"""

from __future__ import annotations

import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError, RecipeError, TorchmixError

Function = Callable[..., Any]


def imported(name: str, where: str) -> Function:
    """The function that `module:function` names.

    Raises:
        RecipeError: It cannot be imported here, or is no function.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(
            f"{name!r} cannot be imported: {error}; write module:function, of a module that every process finds "
            f"(PYTHONPATH, or an installed package)",
            where,
        ) from error
    if not callable(found):
        raise RecipeError(f"{name!r} is {type(found).__name__}, not a function", where)
    function: Function = found
    return function


@contextmanager
def errors_of(what: str, function: Function, step: int) -> Iterator[None]:
    """Whatever is raised inside of the `with` block is a PlanError that names the function and the step.

    Args:
        what: The kind of function and its name, as `the strategy module:function`.
        function: It, whose file the error points into.
        step: The step that it was asked about.

    Raises:
        PlanError: Anything was raised but KeyboardInterrupt.
    """
    try:
        yield
    except TorchmixError as error:
        raise PlanError(f"{what}, step {step}: {error}") from error
    except (Exception, SystemExit) as error:
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        inner = [frame for frame in frames if frame.filename == file] or frames
        place = f" at {inner[-1].filename}, line {inner[-1].lineno}" if inner else ""
        raise PlanError(
            f"{what}, step {step}: it raises {type(error).__name__}: {error}{place}; mend it there, or take it out of "
            f"the recipe. `torchmix plan RECIPE --steps {step + 1}` runs it without data"
        ) from error


class OwnMethod:
    """Calls the user's function, and checks what it says."""

    def __init__(self, name: str, where: str) -> None:
        """Import the function; errors as those of `imported`."""
        self._what = f"the method {name}"
        self._function = imported(name, where)
        self.step = 0
        """The step that it is asked about, for errors."""
        self._was_asked_twice = False

    def __call__(
        self,
        cost: Int64Array,
        memory: Int64Array,
        *,
        num_buckets: int,
        bins: int,
        items_per_bin: int | None,
        cap: int | None,
    ) -> Int64Array:
        """Bin of each item, in [0, num_buckets x bins); bucket k has bins k x bins to (k + 1) x bins - 1.

        Args:
            cost: int64 [n].
            memory: int64 [n] bytes of each item.
            num_buckets: Ranks, or other consumers.
            bins: Bins of a bucket.
            items_per_bin: Exactly so many items are in each bin; None: any number.
            cap: Most bytes of a bin; None: no bound.

        Raises:
            PlanError: The function breaks one of these rules, or does not answer alike twice.
        """
        options = {"num_buckets": num_buckets, "bins": bins, "items_per_bin": items_per_bin, "cap": cap}
        with errors_of(self._what, self._function, self.step):
            found = self._asked(cost, memory, options)
            if not self._was_asked_twice:
                self._was_asked_twice = True
                if not np.array_equal(found, self._asked(cost, memory, options)):
                    raise PlanError(
                        "it answers otherwise when it is asked again; it must depend on its arguments alone"
                    )
        return found

    def _asked(self, cost: Int64Array, memory: Int64Array, options: dict[str, int | None]) -> Int64Array:
        found = np.asarray(self._function(cost.copy(), memory.copy(), **options))
        num_bins = (options["num_buckets"] or 0) * (options["bins"] or 0)
        if found.shape != cost.shape or found.dtype.kind not in "iu":
            raise PlanError(
                f"it gives {found.dtype} {list(found.shape)}, not one whole number for each of {len(cost)} items"
            )
        found = found.astype(np.int64)
        if len(found) and not 0 <= found.min() <= found.max() < num_bins:
            item = int(np.argmax((found < 0) | (found >= num_bins)))
            raise PlanError(f"it puts item {item} into bin {found[item]}; there are bins 0 to {num_bins - 1}")
        count = np.bincount(found, minlength=num_bins)
        each = options["items_per_bin"]
        if each is not None and (count != each).any():
            number = int(np.argmax(count != each))
            raise PlanError(f"it puts {count[number]} items into bin {number}; each has {each}")
        cap = options["cap"]
        if cap is not None:
            held = np.zeros(num_bins, np.int64)
            np.add.at(held, found, memory)
            if held.max(initial=0) > cap:
                raise PlanError(f"it puts {held.max()} bytes into bin {int(held.argmax())}; the cap is {cap}")
        return found
