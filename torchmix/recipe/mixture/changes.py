"""The recipe's `schedule` -> the trees that follow each other, and where each holds.

In: changes, as the recipe has them, and the tree at the start. Out: the tree after each change, with the tokens of the
run at which it begins and holds, or the epoch of a stream at which it begins. Must hold: places are exact integers,
rise, and do not overlap; a place in steps counts the tokens of all steps before it, with the batch's ramp. Cost:
microseconds a change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fractions import Fraction

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.mixture.groups import tree_of
from torchmix.recipe.mixture.tree import Node, with_shares
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.shares import parse_share
from torchmix.recipe.streams import Stream
from torchmix.recipe.structs import Batch, Change, EpochPlace

_PLACE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([KMBT]?)\s*(tokens?|steps?)\s*", re.ASCII)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
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


def stages_of_schedule(
    start: Node, schedule: Collection[Change], batch: Batch, streams: Mapping[str, Stream], where: str = "schedule"
) -> tuple[Stage, ...]:
    """The stages that follow the start.

    Args:
        start: The tree at token 0.
        schedule: The recipe's.
        batch: The recipe's, for places in steps.
        streams: The part's.
        where: Path of keys, for errors.

    Raises:
        RecipeError: A place is malformed, or not after the one before; a change changes nothing, or names a child that
            does not exist.
    """
    stages: list[Stage] = []
    tree, at = start, 0
    for number, change in enumerate(schedule):
        place = f"{where}[{number}]"
        if isinstance(change.start, EpochPlace):
            tree = _changed(tree, change, streams, place)
            stages.append(_at_epoch(change.start, change.to, tree, streams, place))
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
        stages.append(Stage(start_token=begin, stop_token=end, tree=tree))
    return tuple(stages)


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
