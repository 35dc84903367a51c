"""A size rule of the user's: `module:function` of the recipe.

In: a function `f(width, height) -> ((grid_height, grid_width), tokens)`, of integers. Out: a size rule that resizes an
image to its grid. Must hold: the function is pure; its name and its attribute `version`, if it has one, are part of the
rule's id. Cost: a call for each distinct size.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import RecipeError
from torchmix.transform.images.rule import ImageSizes, patches_in_rows

SizeFunction = Callable[[int, int], tuple[tuple[int, int], int]]


class OwnRule(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the user's; implements `rule.SizeRule`."""

    name: str
    """As the recipe writes it."""
    function: SizeFunction
    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of a block; the order of patches follows from it."""

    @property
    def rule_id(self) -> str:
        """See `rule.SizeRule`."""
        return f"own-1:{self.patch}:{self.merge}:{self.name}:{getattr(self.function, 'version', '')}"

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """See `rule.SizeRule`.

        Raises:
            RecipeError: The function fails, or gives something else than a grid and tokens.
        """
        known: dict[tuple[int, int], tuple[int, int, int]] = {}
        rows = np.zeros((len(width), 3), np.int64)
        for i, size in enumerate(zip(width.tolist(), height.tolist(), strict=True)):
            if size not in known:
                known[size] = self._ask(*size)
            rows[i] = known[size]
        return ImageSizes(
            segments=np.ones(len(width), np.int64), grid_height=rows[:, 0], grid_width=rows[:, 1], tokens=rows[:, 2]
        )

    def _ask(self, width: int, height: int) -> tuple[int, int, int]:
        try:
            (rows, columns), tokens = self.function(width, height)
            found = int(rows), int(columns), int(tokens)
        except Exception as error:
            raise RecipeError(
                f"{self.name}({width}, {height}) failed: {type(error).__name__}: {error}; it must return "
                "((rows, columns) of patches, tokens)"
            ) from error
        if min(found) < 1 or found[0] % self.merge or found[1] % self.merge:
            raise RecipeError(
                f"{self.name}({width}, {height}) gives the grid {found[:2]} and {found[2]} tokens; all must be at "
                f"least 1, and the grid a multiple of merge {self.merge}"
            )
        return found

    def segments(self, image: Any) -> NDArray[np.uint8]:
        """See `rule.SizeRule`."""
        rows, columns, _ = self._ask(image.width, image.height)
        resized = image.resize((columns * self.patch, rows * self.patch), resample=3)
        return patches_in_rows(np.asarray(resized), self.patch, self.merge)

    def fault(self, width: int, height: int) -> str:
        """See `rule.SizeRule`; nothing is refused."""
        return ""


def import_function(name: str, where: str) -> Any:
    """The function that `module:function` names.

    Raises:
        RecipeError: There is no such module or function.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"{name!r} cannot be imported: {error}; write module:function", where) from error
    if not callable(found):
        raise RecipeError(f"{name!r} is no function", where)
    return found
