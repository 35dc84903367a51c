"""A recipe's part -> the exact share of each source, selection and child at the start, and the stages that follow.

In: a checked recipe. Out: shares that sum to 1, and trees. Must hold: as `groups.py` and `changes.py`; a source has a
share above 0 at some time. Cost: microseconds a source and change.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from torchmix.errors import RecipeError, key_path
from torchmix.recipe.mixture.cells import check_cells
from torchmix.recipe.mixture.changes import Stage, stages_of_schedule
from torchmix.recipe.mixture.flats import check_flats
from torchmix.recipe.mixture.groups import tree_of
from torchmix.recipe.mixture.tree import Node, stream_shares, with_sizes
from torchmix.recipe.parts import Part
from torchmix.recipe.streams import Stream, possible_names, streams_of
from torchmix.recipe.structs import Evaluation, Recipe

Mixed = Recipe | Evaluation | Part
"""Anything with sources and a mixture of them."""


def tree_of_part(part: Mixed, where: str = "") -> Node:
    """The tree at the start of a recipe, or of its validation or test part; `where` is the part's path of keys.

    Raises:
        RecipeError: As `tree_of`.
    """
    has_schedule = not isinstance(part, Evaluation) and bool(part.schedule)
    if not part.sources:
        raise RecipeError("names no source", key_path(where, "sources"))
    check_flats(part, where)
    check_cells(part, where)
    place = key_path(where, "mixture")
    return tree_of(part.mixture, streams_of(part), place, may_lack=has_schedule, known=possible_names(part))


def parse_shares(part: Mixed, where: str = "", *, tokens: Mapping[str, int] | None = None) -> dict[str, Fraction]:
    """Exact share of trained tokens of each source, selection and child, at the start.

    Args:
        part: A recipe, an evaluation of it, or a part.
        where: Path of keys of the part, for errors.
        tokens: Tokens of each of them, for groups that share by sizes; None: one token each.

    Returns:
        Name -> share in [0, 1], in the order of names; the sum is 1. A schedule raises a share of 0 later.

    Raises:
        RecipeError: As `tree_of` and `stages_of_schedule`; or a source that never has a share.
    """
    trees = trees_of(part, where, tokens=tokens)
    streams = streams_of(part)
    shares_of_tree = [_all_shares(streams, tree) for tree in trees]
    for name, stream in streams.items():
        if not stream.is_cell and not any(shares[name] for shares in shares_of_tree):
            mixture = key_path(where, "mixture")
            raise RecipeError(f"the share of {name!r} is never above 0; remove the source instead", f"{mixture}.{name}")
    return shares_of_tree[0]


def trees_of(part: Mixed, where: str = "", *, tokens: Mapping[str, int] | None = None) -> list[Node]:
    """The tree at the start, and that after each change; with weights by `tokens` where groups share by sizes.

    Few rows are held out of a small cell, maybe none; so cells of other parts than training come as near to their
    shares as they can.

    Raises:
        RecipeError: As `tree_of`, `stages_of_schedule` and `with_sizes`.
    """
    sizes = dict.fromkeys(streams_of(part), 1) if tokens is None else tokens
    nearest_cells = isinstance(part, Evaluation) or (isinstance(part, Part) and part.name != "train")
    trees = [(tree_of_part(part, where), key_path(where, "mixture"))]
    trees += [(stage.tree, f"schedule[{number}].mixture") for number, stage in enumerate(stages_of_part(part, where))]
    return [with_sizes(tree, sizes, place, nearest_cells=nearest_cells) for tree, place in trees]


def stages_of_part(part: Mixed, where: str = "") -> tuple[Stage, ...]:
    """The stages of training; validation and test have none."""
    if isinstance(part, Evaluation) or not part.schedule:
        return ()
    return stages_of_schedule(tree_of_part(part, where), part.schedule, part.batch, streams_of(part))


def _all_shares(streams: Mapping[str, Stream], tree: Node) -> dict[str, Fraction]:
    found = stream_shares(tree)
    return {name: found.get(name, Fraction(0)) for name in streams}
