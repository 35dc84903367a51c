"""The recipe's `dynamic`: which group a policy decides, how often, and from when its decisions hold.

In: a checked recipe or part. Out: numbers, and the tree with decided shares in it. Must hold: the group is in the
mixture, and its children have shares that a policy can change; a decision concerns this group alone, and the group's
own share follows the schedule. Cost: microseconds a source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

import msgspec
from msgspec.structs import replace

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.mixture.shares_of_part import tree_of_part
from torchmix.recipe.mixture.tree import SEPARATOR, Node, walk
from torchmix.recipe.parts import Part
from torchmix.recipe.structs import EpochPlace, Recipe

_STEPS = re.compile(r"\s*(\d{1,12})\s*steps?\s*", re.ASCII)
_MULTIPLE = re.compile(r"\s*(\d{1,9}\.?\d{0,9}|\.\d{1,9})\s*x\s*", re.ASCII)
BUILT_IN = ("ado", "odm", "exp3", "file")


class Deciding(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe's `dynamic`, as numbers."""

    path: tuple[str, ...]
    """Names of the groups down to the one whose children are decided; empty for the whole mixture."""
    children: tuple[str, ...]
    """Its children at the start, sorted."""
    every_steps: int
    """1 or more."""
    lag_steps: int
    """1 or more: a decision after step s holds from step s + lag on."""
    lowest: Fraction
    highest: Fraction

    def step_of(self, step: int) -> int | None:
        """The step after which it was decided what holds from `step` on; None where nothing begins at `step`."""
        decided = step - self.lag_steps
        return decided if decided >= 0 and (decided + 1) % self.every_steps == 0 else None


def dynamic_of(part: Recipe | Part) -> Deciding | None:
    """What a part's policy decides; None where it has none.

    Raises:
        RecipeError: A value is malformed or out of its range; `at` names no group; the group has fewer than two
            children, or shares by sizes; a child has no share to change.
    """
    dynamic = part.dynamic
    if dynamic is None:
        return None
    path = tuple(filter(None, (dynamic.at or "").split(SEPARATOR)))
    root = tree_of_part(part)
    node = _node(root, path)
    if node is None:
        groups = [place for place, below in walk(root) if below.children]
        has = f"its groups are {', '.join(groups)}" if groups else "it has no groups; leave `at` out"
        raise RecipeError(
            f"the mixture has no group {dynamic.at!r}{nearest(SEPARATOR.join(path), groups)}; {has}", "dynamic.at"
        )
    what = f"the group {dynamic.at!r}" if path else "the mixture"
    if len(node.children) < 2:
        raise RecipeError(f"{what} has fewer than two children, so no share of it can change", "dynamic.at")
    if node.shares_by_size:
        raise RecipeError(f"the children of {what} share by their sizes; give them shares", "dynamic.at")
    without = [child.name for child in node.children if not child.weight]
    if without:
        raise RecipeError(f"{', '.join(without)} of {what} has no share, so a policy cannot change it", "dynamic.at")
    if dynamic.policy not in BUILT_IN and not re.fullmatch(r"[\w.]+:\w+", dynamic.policy):
        raise RecipeError(
            f"{dynamic.policy!r} is no policy{nearest(dynamic.policy, BUILT_IN)}; use {', '.join(BUILT_IN)} or "
            f"module:Class",
            "dynamic.policy",
        )
    lowest, highest = (_multiple(text) for text in dynamic.within)
    for number, change in enumerate(part.schedule):
        if isinstance(change.start, EpochPlace):
            message = "with `dynamic`, changes begin at steps or tokens: bounds of a share must be known before the run"
            raise RecipeError(message, f"schedule[{number}].from")
    if lowest > 1 or highest < 1:
        raise RecipeError("the schedule's own share, 1x, is not within these bounds", "dynamic.within")
    return Deciding(
        path=path,
        children=tuple(child.name for child in node.children),
        every_steps=_steps(dynamic.every, "dynamic.every"),
        lag_steps=_steps(dynamic.lag, "dynamic.lag"),
        lowest=lowest,
        highest=highest,
    )


def with_decided(root: Node, path: tuple[str, ...], shares: Mapping[str, int]) -> Node:
    """The tree where the children of a group have decided shares.

    Args:
        root: A tree of the schedule.
        path: See `Deciding.path`.
        shares: Of each child. A tree without this group, or with other children in it, stays as it is.
    """
    if path:
        children = tuple(with_decided(c, path[1:], shares) if c.name == path[0] else c for c in root.children)
        return replace(root, children=children)
    if {child.name for child in root.children} != set(shares) or root.shares_by_size:
        return root
    total = sum((child.weight for child in root.children), Fraction(0))
    whole = sum(shares.values())
    weight = {name: total * share / whole for name, share in shares.items()}
    return replace(root, children=tuple(replace(child, weight=weight[child.name]) for child in root.children))


def shares_in_group(root: Node, path: tuple[str, ...]) -> dict[str, Fraction]:
    """Share of each child in the group at a path, by name; empty where the tree has no such group."""
    node = _node(root, path)
    total = sum((child.weight for child in node.children), Fraction(0)) if node is not None else Fraction(0)
    return {child.name: child.weight / total for child in node.children} if node is not None and total else {}


def _node(root: Node, path: tuple[str, ...]) -> Node | None:
    for name in path:
        found = [child for child in root.children if child.name == name and child.children]
        if not found:
            return None
        root = found[0]
    return root


def _steps(text: str, where: str) -> int:
    match = _STEPS.fullmatch(text)
    if match is None or not int(match[1]):
        raise RecipeError(f"{text!r} is no number of steps of 1 or more, as `50 steps`", where)
    return int(match[1])


def _multiple(text: str) -> Fraction:
    match = _MULTIPLE.fullmatch(text)
    if match is None:
        raise RecipeError(f"{text!r} is no multiple, as `0.5x`", "dynamic.within")
    return Fraction(match[1])
