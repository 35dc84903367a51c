"""A method of the user's: `module:function` of the recipe.

In: a name that can be imported where steps are planned, and what is to be shared out. Out: the bin of each item,
checked. Must hold: every item has one bin that exists, counts and cap are kept, and the function answers alike when it
is asked again; anything else is an error that names the function. Cost: that of the function; twice, the first time.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError, RecipeError

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


class OwnMethod:
    """Calls the user's function, and checks what it says."""

    def __init__(self, name: str, where: str) -> None:
        """Import the function; errors as those of `imported`."""
        self._name = name
        self._function = imported(name, where)
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
        found = self._asked(cost, memory, options)
        if not self._was_asked_twice:
            self._was_asked_twice = True
            if not np.array_equal(found, self._asked(cost, memory, options)):
                self._refuse("answers otherwise when it is asked again; it must depend on its arguments alone")
        return found

    def _asked(self, cost: Int64Array, memory: Int64Array, options: dict[str, int | None]) -> Int64Array:
        found = np.asarray(self._function(cost.copy(), memory.copy(), **options))
        num_bins = (options["num_buckets"] or 0) * (options["bins"] or 0)
        if found.shape != cost.shape or found.dtype.kind not in "iu":
            self._refuse(f"gives {found.dtype} {list(found.shape)}, not one whole number for each of {len(cost)} items")
        found = found.astype(np.int64)
        if len(found) and not 0 <= found.min() <= found.max() < num_bins:
            item = int(np.argmax((found < 0) | (found >= num_bins)))
            self._refuse(f"puts item {item} into bin {found[item]}; there are bins 0 to {num_bins - 1}")
        count = np.bincount(found, minlength=num_bins)
        each = options["items_per_bin"]
        if each is not None and (count != each).any():
            number = int(np.argmax(count != each))
            self._refuse(f"puts {count[number]} items into bin {number}; each has {each}")
        cap = options["cap"]
        if cap is not None:
            held = np.zeros(num_bins, np.int64)
            np.add.at(held, found, memory)
            if held.max(initial=0) > cap:
                self._refuse(f"puts {held.max()} bytes into bin {int(held.argmax())}; the cap is {cap}")
        return found

    def _refuse(self, what: str) -> None:
        raise PlanError(f"the method {self._name} {what}")
