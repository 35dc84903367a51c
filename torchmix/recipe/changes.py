"""The recipe's `schedule` and `dynamic` -> the trees that follow each other, and who decides shares."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fractions import Fraction

import msgspec
from msgspec.structs import replace

from torchmix.errors import RecipeError, key_path
from torchmix.recipe.amounts import parse_share
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.streams import Stream, possible_names, streams_of
from torchmix.recipe.structs import Batch, Change, EpochPlace, Evaluation, Recipe
from torchmix.recipe.tree import (
    SEPARATOR,
    Node,
    check_cells,
    check_flats,
    stream_shares,
    tree_of,
    walk,
    with_shares,
    with_sizes,
)

# --- The recipe's `schedule` -> the trees that follow each other, and where each holds.
#
# Places are exact integers, rise, and do not overlap; a place in steps counts the tokens of all steps before it, with
# the batch's ramp. Cost: microseconds a change.

_PLACE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([KMBT]?)\s*(tokens?|steps?)\s*", re.ASCII)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
SHAPES = ("line", "cosine")
"""How a ramp reaches its shares. The functions are in the other half of the table, in `mixture/shares.py`."""
MOST_TOKENS = 10**18
"""Most tokens of a run; bounds the integers in the arithmetic of shares."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A tree, and where it begins to hold."""

    start_token: int
    """Where the shares begin to change; 0 of a stage that begins at an epoch."""
    stop_token: int
    """Where the shares of the tree are reached; equal to `start_token` where they hold at once."""
    tree: Node
    epoch: EpochPlace | None = None
    """The epoch at which it begins; None: at `start_token`."""
    ramp_steps: int = 0
    """Steps from the epoch at which it begins until its shares are reached."""
    ramp_tokens: int = 0
    """Tokens of the run from there, in place of steps."""
    shape: str = "line"
    """One of SHAPES: how a ramp reaches the shares."""


def stages_of_part(part: Mixed, where: str = "") -> tuple[Stage, ...]:
    """The stages of training that follow its start; validation and test have none.

    Raises:
        RecipeError: A place is malformed, or not after the one before; a change changes nothing, or names a child that
            does not exist.
    """
    if isinstance(part, Evaluation) or not part.schedule:
        return ()
    stages: list[Stage] = []
    tree, at, batch, streams = tree_of_part(part, where), 0, part.batch, streams_of(part)
    for number, change in enumerate(part.schedule):
        place = f"schedule[{number}]"
        _check_shape(change, place)
        if isinstance(change.start, EpochPlace):
            tree = _changed(tree, change, streams, place)
            stages.append(replace(_at_epoch(change.start, change.to, tree, streams, place), shape=change.shape))
            continue
        begin = _tokens(change.start, batch, f"{place}.from")
        end = begin if change.to is None else _tokens(change.to, batch, f"{place}.to")
        if begin < at:
            raise RecipeError(f"{change.start} is before {at:,} tokens, where the change before ends", f"{place}.from")
        if end < begin or (change.to is not None and end == begin):
            raise RecipeError(
                f"{change.to} is not after {change.start}; leave `to` out for a sudden change", f"{place}.to"
            )
        tree, at = _changed(tree, change, streams, place), end
        stages.append(Stage(start_token=begin, stop_token=end, tree=tree, shape=change.shape))
    return tuple(stages)


def _check_shape(change: Change, place: str) -> None:
    if change.shape not in SHAPES:
        message = f"{change.shape!r} is not one of {', '.join(SHAPES)}{nearest(change.shape, SHAPES)}"
        raise RecipeError(message, f"{place}.shape")
    if change.to is None and change.shape != SHAPES[0]:
        raise RecipeError("is of a ramp, and without `to` the shares hold at once; remove it", f"{place}.shape")


def _changed(tree: Node, change: Change, sources: Collection[str], place: str) -> Node:
    given = [name for name in ("set", "mixture", "file") if getattr(change, name) is not None]
    if len(given) != 1:
        said = f"gives {' and '.join(given)}" if given else "changes nothing"
        raise RecipeError(f"{said}; give one of set, mixture and file", place)
    if change.mixture is not None:
        return tree_of(change.mixture, sources, f"{place}.mixture", may_lack=True)
    if change.file is not None:
        raise RecipeError("a file is read with the recipe that names it; write its mixture here", f"{place}.file")
    changes: dict[str, Fraction] = {}
    for path, share in (change.set or {}).items():
        where = f"{place}.set.{path}"
        if not isinstance(share, str):
            raise RecipeError(f"{share} is a number; a share that is set is text, as 20% or 1/5", where)
        changes[path] = parse_share(share, where)
    if not changes:
        raise RecipeError("sets nothing", f"{place}.set")
    try:
        return with_shares(tree, changes)
    except RecipeError as error:
        raise RecipeError(error.message, f"{place}.set") from None


def _at_epoch(start: EpochPlace, to: str | None, tree: Node, streams: Mapping[str, Stream], where: str) -> Stage:
    """A stage that begins at an epoch, and may end in a ramp of some length."""
    stream = streams.get(start.of)
    if stream is None:
        message = f"no stream has the name {start.of!r}{nearest(start.of, streams)}; streams are {listed(streams)}"
        raise RecipeError(message, f"{where}.from.of")
    if start.epochs < 1:
        raise RecipeError(f"{start.epochs} is out of range; it must be at least 1", f"{where}.from.epochs")
    if stream.max_epochs is not None and start.epochs > stream.max_epochs:
        message = f"{start.of!r} has max_epochs {stream.max_epochs}, so its epoch {start.epochs} never ends"
        raise RecipeError(message, f"{where}.from.epochs")
    steps, tokens = (0, 0) if to is None else _count(to, f"{where}.to")
    return Stage(start_token=0, stop_token=0, tree=tree, epoch=start, ramp_steps=steps, ramp_tokens=tokens)


def _tokens(text: str, batch: Batch, where: str) -> int:
    steps, tokens = _count(text, where)
    tokens += tokens_before(batch, steps)
    if tokens > MOST_TOKENS:
        raise RecipeError(f"{text!r} is beyond 10^18 tokens", where)
    return tokens


def _count(text: str, where: str) -> tuple[int, int]:
    """Steps and tokens that a text says; one of the two is 0."""
    match = _PLACE.fullmatch(text)
    if match is None:
        raise RecipeError(f"{text!r} is no place of a run; write 5000 steps, or 12T tokens (K, M, B, T)", where)
    count = Fraction(match[1]) * _UNITS[match[2]]
    if count.denominator != 1:
        raise RecipeError(f"{text!r} is no whole number of {match[3]}", where)
    if count > MOST_TOKENS:
        raise RecipeError(f"{text!r} is beyond 10^18 tokens", where)
    return (int(count), 0) if match[3].startswith("step") else (0, int(count))


# --- A recipe's part -> the exact share of each source, selection and child at the start, and the stages that follow.
#
# Cost: microseconds a source and change.

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
        RecipeError: As `tree_of` and `stages_of_part`; or a source that never has a share.
    """
    trees = trees_of(part, where, tokens=tokens)
    streams = streams_of(part)
    shares_of_tree = [_all_shares(streams, tree) for tree in trees]
    for name, stream in streams.items():
        if not stream.is_cell and not any(shares[name] for shares in shares_of_tree):
            mixture = key_path(where, "mixture")
            raise RecipeError(f"the share of {name!r} is never above 0; remove the source instead", f"{mixture}.{name}")
    return shares_of_tree[0]


def trees_of(part: Mixed, where: str = "", *, tokens: Mapping[str, int] | None) -> list[Node]:
    """The tree at the start, and that after each change; with weights by `tokens` where groups share by sizes.

    Few rows are held out of a small cell, maybe none; so cells of other parts than training come as near to their
    shares as they can.

    Raises:
        RecipeError: As `tree_of`, `stages_of_part` and `with_sizes`.
    """
    sizes = dict.fromkeys(streams_of(part), 1) if tokens is None else tokens
    nearest_cells = isinstance(part, Evaluation) or (isinstance(part, Part) and part.name != "train")
    trees = [(tree_of_part(part, where), key_path(where, "mixture"))]
    trees += [(stage.tree, f"schedule[{number}].mixture") for number, stage in enumerate(stages_of_part(part, where))]
    return [with_sizes(tree, sizes, place, nearest_cells=nearest_cells) for tree, place in trees]


def _all_shares(streams: Mapping[str, Stream], tree: Node) -> dict[str, Fraction]:
    found = stream_shares(tree)
    return {name: found.get(name, Fraction(0)) for name in streams}


# --- The recipe's `dynamic`: which group a policy decides, how often, and from when its decisions hold.
#
# The group is in the mixture, and its children have shares that a policy can change; a decision concerns this group
# alone, and the group's own share follows the schedule. Cost: microseconds a source.

_STEPS = re.compile(r"\s*(\d{1,12})\s*steps?\s*", re.ASCII)
_MULTIPLE = re.compile(r"\s*(\d{1,9}\.?\d{0,9}|\.\d{1,9})\s*x\s*", re.ASCII)
POLICIES = ("ado", "odm", "exp3", "file")
"""The built-in policies. Their classes are in the other half of the table, in `mixture/policies.py`."""


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
    if dynamic.policy not in POLICIES and not re.fullmatch(r"[\w.]+:\w+", dynamic.policy):
        raise RecipeError(
            f"{dynamic.policy!r} is no policy{nearest(dynamic.policy, POLICIES)}; use {', '.join(POLICIES)} or "
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
        shares: The share of each child. A tree without this group, or with other children in it, stays as it is.
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
