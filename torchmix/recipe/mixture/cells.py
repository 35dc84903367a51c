"""What the cells of a group may be, and where each lies among its properties.

In: `cells` of groups of a mixture. Out: a `Grid` for the tree, or the first fault with its path of keys. Must hold: a
cell is a stream of its own, named GROUP/BASE/VALUE/..., with the values by sorted property, so the order of keys means
nothing; the shares of each property are exact and sum to 1. Cost: microseconds a cell.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

from torchmix.errors import RecipeError, key_path
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.mixture.tree import Grid
from torchmix.recipe.shares import weights_of
from torchmix.recipe.streams import BASE, CHILD, HasMixture, cells_in, cells_of, possible_names, row_sets_of
from torchmix.recipe.structs import MAX_NAME_BYTES, Cells, Group

MOST_CELLS = 4096
"""Most cells of a group: each is a stream, with some windows in memory."""


def grid_of(name: str, cells: Cells, where: str) -> Grid:
    """The cells of a group and their properties.

    Args:
        name: The group's.
        cells: As the recipe has them; `check_cells` has passed them.
        where: Path of keys of `cells`.

    Raises:
        RecipeError: Shares are malformed, or do not sum to 100 %.
    """
    properties = tuple(sorted(cells.shares))
    shares = tuple(_shares_of(cells, each, f"{where}.shares.{each}") for each in properties)
    values = {}
    for cell in cells_in(name, cells):
        of_property = dict(cell.values) | {BASE: cell.base}
        values[cell.name] = tuple(of_property[each] for each in properties)
    return Grid(properties=properties, shares=shares, values=values)


def check_cells(part: HasMixture, where: str = "") -> None:
    """Check all cells of a mixture and of its changes.

    Args:
        part: A recipe, an evaluation of it, or a part.
        where: Path of keys of the part.

    Raises:
        RecipeError: Cells of nothing, of what does not exist, or of too many values; no property, or one without
            values; a group with other keys beside them, with a name that is taken, or with other cells elsewhere.
    """
    found: dict[str, list[list[str]]] = {}
    for path, name, cells in cells_of(part):
        place = key_path(where, path)
        if CHILD in name or name in {*part.sources, *part.selections}:
            reason = f"a {CHILD!r} separates a source from its child" if CHILD in name else "a source has that name"
            raise RecipeError(f"{name!r} cannot name a group of cells: {reason}", place)
        _check_properties(cells, f"{place}.cells.shares")
        _check_of(part, cells, f"{place}.cells.of")
        for cell in cells_in(name, cells):
            if len(cell.name.encode()) > MAX_NAME_BYTES:
                message = f"the cell {cell.name!r} has a name of more than {MAX_NAME_BYTES} bytes; shorten its parts"
                raise RecipeError(message, f"{place}.cells.shares")
        key = [sorted(cells.of), sorted(cells.shares)]
        if found.setdefault(name, key) != key:
            message = f"the group {name!r} has cells of other sources or properties elsewhere; give it another name"
            raise RecipeError(message, place)


def check_keys_beside_cells(value: Group, where: str) -> None:
    """Refuse what a group of cells cannot have beside them; `where` is the group's path of keys."""
    for key in ("children", "flat", "proportional", "max_epochs", "on_exhausted"):
        if getattr(value, key) != getattr(Group(), key):
            message = "a group of cells has no such key; sources and selections have bounds on epochs"
            raise RecipeError(message, f"{where}.{key}")


def _check_of(part: HasMixture, cells: Cells, where: str) -> None:
    if not cells.of:
        raise RecipeError("names no source", where)
    row_sets = row_sets_of(part)
    known = {*part.sources, *part.selections, *(name for name, one in row_sets.items() if one.cell is None)}
    with_rows = {one.cell.base for one in row_sets.values() if one.cell is not None}
    for number, name in enumerate(cells.of):
        if name not in with_rows:
            names = sorted({*known, *possible_names(part)})
            message = f"there is no source {name!r}{nearest(name, names)}; sources are {listed(names)}"
            raise RecipeError(message, f"{where}[{number}]")
        if name in cells.of[:number]:
            raise RecipeError(f"the source {name!r} stands there twice", f"{where}[{number}]")


def _check_properties(cells: Cells, where: str) -> None:
    if not set(cells.shares) - {BASE}:
        message = "name a property of the rows, as `lang`; shares of sources alone stand under `children`"
        raise RecipeError(message, where)
    for name, values in cells.shares.items():
        if not values:
            raise RecipeError("names no value", f"{where}.{name}")
        for value in values:
            if not value or not value.isprintable() or len(value.encode()) > MAX_NAME_BYTES:
                message = f"{value!r} is no value with a share: printable text of at most {MAX_NAME_BYTES} bytes"
                raise RecipeError(message, f"{where}.{name}")
    if BASE in cells.shares and set(cells.shares[BASE]) != set(cells.of):
        message = f"has {listed(sorted(cells.shares[BASE]))}, and the cells are of {listed(sorted(cells.of))}"
        raise RecipeError(message, f"{where}.{BASE}")
    count = len(cells.of) * prod(len(values) for name, values in cells.shares.items() if name != BASE)
    if count > MOST_CELLS:
        raise RecipeError(f"{count} cells, at most {MOST_CELLS}; leave a property or values out", where)


def _shares_of(cells: Cells, name: str, where: str) -> dict[str, Fraction]:
    weights = weights_of(cells.shares[name], where)
    for value, weight in weights.items():
        if not weight:
            raise RecipeError("has the share 0; leave it out, and its rows are in no cell", f"{where}.{value}")
    total = sum(weights.values(), Fraction(0))
    return {value: weights[value] / total for value in sorted(weights)}
