"""The parts of a recipe: what training, validation and test plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec
from msgspec.structs import replace

from torchmix.errors import OptionError, RecipeError
from torchmix.recipe.amounts import numerators, parse_fraction, parse_share
from torchmix.recipe.build import nearest
from torchmix.recipe.modules import DOCUMENT
from torchmix.recipe.ramp import last_samples, length_of_step, samples_of_step, stages_of
from torchmix.recipe.sources import PARTS, documents_of_split
from torchmix.recipe.streams import BASE, CHILD, Stream, members_of, streams_of
from torchmix.recipe.structs import (
    Balance,
    Batch,
    Cells,
    Change,
    Dynamic,
    Evaluation,
    Group,
    Module,
    Packing,
    Recipe,
    Selection,
    Share,
    Shuffle,
    Source,
)

# --- What `hold_out` says: which rows of a source a part has, and the mixture of what is held out.
#
# Bands of the parts of a recipe do not overlap and fill [0, 1), so a row is in exactly one part; `validation` has the
# lowest hashes and `test` the highest, so that each can grow without moving the other.

Band = tuple[str, str]
"""Bounds (start, stop) of hashes, as exact parts of all of them, `1/100`; the stop is not included. They are text since
a band is in a `Part`, and a part goes to workers in a message."""


def bands_of(recipe: Recipe, part: str) -> dict[str, Band]:
    """The hashes that a part has of each source from which some rows are held out; other sources are not in it."""
    held = recipe.hold_out or {}
    bands: dict[str, Band] = {}
    for name in sorted({name for sources in held.values() for name in sources}):
        low, high = (_part_held(held, which, name) for which in PARTS[1:])
        of_part = {"train": (low, 1 - high), "validation": (Fraction(0), low), "test": (1 - high, Fraction(1))}
        start, stop = of_part[part]
        if start < stop:
            bands[name] = (str(start), str(stop))
    return bands


def check_hold_out(recipe: Recipe) -> None:
    """Check what is held out, against the rest of a recipe.

    Raises:
        RecipeError: The first fault.
    """
    for part, sources in (recipe.hold_out or {}).items():
        where = f"hold_out.{part}"
        if part not in PARTS[1:]:
            raise RecipeError(f"{part!r} is not one of {', '.join(PARTS[1:])}{nearest(part, PARTS[1:])}", where)
        if recipe.split is not None:
            raise RecipeError("split cuts the rows of all sources; remove one of the two", where)
        if getattr(recipe, part) is not None:
            raise RecipeError(f"{part} has sources of its own here; remove one of the two", where)
        if not sources:
            raise RecipeError("names no source", where)
        for name, text in sources.items():
            if name not in recipe.sources:
                hint = nearest(name, recipe.sources)
                raise RecipeError(f"there is no such source{hint}; rows of sources are held out", f"{where}.{name}")
            if not 0 < parse_fraction(text, f"{where}.{name}") < 1:
                raise RecipeError(f"{text} is out of range; it must be above 0% and below 100%", f"{where}.{name}")
    for name in recipe.sources:
        if sum(_part_held(recipe.hold_out or {}, part, name) for part in PARTS[1:]) >= 1:
            raise RecipeError(f"all rows of {name!r} are held out; leave some for training", "hold_out")


def only(
    children: Mapping[str, Share | Group] | Collection[str], keep: Callable[[str], bool]
) -> dict[str, Share | Group] | tuple[str, ...]:
    """The children of a group without what is not kept; those that stay keep their ratios.

    Args:
        children: As a recipe has them.
        keep: Whether a name, which is no group's, stays.
    """
    if not isinstance(children, Mapping):
        return tuple(name for name in children if keep(name))
    left: dict[str, Share | Group] = {}
    for name, value in children.items():
        if isinstance(value, Group) and value.cells is not None:
            if (cells := _cells_only(value.cells, keep)) is not None:
                left[name] = value if cells == value.cells else msgspec.structs.replace(value, cells=cells)
        elif isinstance(value, Group):
            key = "children" if value.flat is None else "flat"
            inner = only(value.children or {} if value.flat is None else members_of(value), keep)
            if inner:
                left[name] = value if inner == getattr(value, key) else msgspec.structs.replace(value, **{key: inner})
        elif keep(name):
            left[name] = value
    return left if len(left) == len(children) else _as_ratios(left)


def _cells_only(cells: Cells, keep: Callable[[str], bool]) -> Cells | None:
    """Cells of what is kept; None where nothing is."""
    of = tuple(name for name in cells.of if keep(name))
    if not of:
        return None
    shares = dict(cells.shares)
    if BASE in shares and len(of) < len(cells.of):
        left: dict[str, Share | Group] = {name: share for name, share in shares[BASE].items() if name in of}
        shares[BASE] = {name: share for name, share in _as_ratios(left).items() if not isinstance(share, Group)}
    return Cells(of=of, shares=shares)


def _as_ratios(children: Mapping[str, Share | Group]) -> dict[str, Share | Group]:
    """Children with ratios in place of percentages, which would sum to 100% no more.

    Ratios are whole numbers, or exact parts as text where a number has more than 64 bits and fits in no message.
    """
    shares = {name: value.share if isinstance(value, Group) else value for name, value in children.items()}
    if any(share is None for share in shares.values()):  # a group that shares by sizes
        return dict(children)
    weights: Sequence[Share]
    weights, _ = numerators(parse_share(share, name) for name, share in shares.items() if share is not None)
    if max(weights, default=0) >= 1 << 63:
        total = sum(weights)
        weights = [f"{part.numerator}/{part.denominator}" for part in (Fraction(one, total) for one in weights)]
    return {
        name: msgspec.structs.replace(value, share=weight) if isinstance(value, Group) else weight
        for (name, value), weight in zip(children.items(), weights, strict=True)
    }


def _part_held(held: Mapping[str, Mapping[str, str]], part: str, source: str) -> Fraction:
    text = held.get(part, {}).get(source)
    return Fraction(0) if text is None else parse_fraction(text, f"hold_out.{part}.{source}")


# --- A recipe and the name of a part -> the part.
#
# A row is in at most one part of a `split`, and its place in the order of its source is the same in each part.


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a recipe, as it is planned."""

    name: str
    """`train`, `validation` or `test`."""
    seed: int
    """Seeds every permutation and hash."""
    batch: Batch
    """The size of a step; only `train` may have a ramp."""
    sources: dict[str, Source]
    """Sources by name, each with the documents that this part uses: where rows lie."""
    selections: dict[str, Selection]
    """Selections of rows of these sources."""
    bands: dict[str, Band]
    """The hashes of the rows that this part has, for sources from which rows are held out; see `parts.py`."""
    streams: dict[str, Stream]
    """By sorted name: what holds a share of the mixture, and the epochs that it may give."""
    mixture: dict[str, Share | Group]
    """Share of each stream or group."""
    counts_documents: bool
    """Whether shares count documents, not tokens."""
    schedule: tuple[Change, ...]
    """How the mixture changes over training; empty in the other parts."""
    dynamic: Dynamic | None
    """The policy that decides shares in training; None in the other parts."""
    deny: tuple[str, ...]
    """Files that name documents which are not given; the catalog has their rows."""
    packing: Packing
    """Documents to samples."""
    balance: Balance
    """Samples to ranks."""
    modules: dict[str, Module]
    """Parts of the model beside the backbone, by name."""
    shuffle: Shuffle
    """Order inside a source."""
    vocab_size: int | None
    """Size of the model's vocabulary, where it is known."""
    allows_starving: bool
    """Whether a stream may give less than a sample in the whole run."""
    one_pass: bool
    """Whether documents left when all sources have run out still make steps, the last one with padding."""


def part_of(recipe: Recipe, name: str, *, one_pass: bool = False) -> Part:
    """One part of a recipe.

    Args:
        recipe: A checked recipe.
        name: `train`, `validation` or `test`. The last two have the size of the global batch after the ramp, and no
            `max_epochs`.
        one_pass: Use each document once: every source ends after one epoch, and its share goes to the others.

    Raises:
        OptionError: `name` is none of these words.
        RecipeError: The recipe has no such part.
    """
    if name not in PARTS:
        raise OptionError(f"{name!r} is no part of a recipe{nearest(name, PARTS)}; parts are {', '.join(PARTS)}")
    content = _content(recipe, name)
    batch = recipe.batch
    if name != "train":
        batch = msgspec.structs.replace(batch, samples=last_samples(batch))
    part = Part(
        name=name,
        seed=recipe.seed,
        batch=batch,
        sources=content.sources,
        selections=content.selections,
        bands=bands_of(recipe, name),
        streams={},
        mixture=content.mixture,
        counts_documents=recipe.unit == "documents",
        schedule=recipe.schedule if name == "train" else (),
        dynamic=recipe.dynamic if name == "train" else None,
        deny=recipe.deny,
        packing=recipe.packing,
        balance=recipe.balance,
        modules=recipe.modules,
        shuffle=recipe.shuffle,
        vocab_size=recipe.vocab_size,
        allows_starving=recipe.starve == "allow",
        one_pass=one_pass,
    )
    streams = streams_of(part)
    if one_pass:
        streams = _with_epochs(streams, 1)
    elif name != "train":  # it bounds training: a run must not end because it was evaluated often
        streams = _with_epochs(streams, None)
    return replace(part, streams=streams)


BLOCK_TOKENS = 1 << 20
"""Most tokens of a block, unless it is one step."""


def steps_of_block(part: Part, step: int) -> int:
    """Steps that are planned and read at once from a step on, at most; blocks begin with one step and double."""
    # Runs of ranks differ from step to step. Decoding takes longer than all that blocks save, and its units more room.
    has_items = any(module.items != DOCUMENT for module in part.modules.values())
    if has_items or part.balance.context is not None:
        return 1
    return max(1, BLOCK_TOKENS // (samples_of_step(part.batch, step) * length_of_step(part.batch, step)))


def most_steps_of_block(part: Part) -> int:
    """As `steps_of_block`, of whichever step."""
    return max(steps_of_block(part, stage.from_step) for stage in stages_of(part.batch))


def has_part(recipe: Recipe, part: str) -> bool:
    """Whether a checked recipe has a part; every one has `train`."""
    if recipe.split is None:
        return part == "train" or getattr(recipe, part) is not None or part in (recipe.hold_out or {})
    return documents_of_split(recipe.split, part) is not None


def with_all_sources(recipe: Recipe) -> Recipe:
    """A recipe with the sources of all parts, to index them; its mixture does not cover them."""
    sources: dict[str, Source] = dict(recipe.sources)
    for part in (recipe.validation, recipe.test):
        sources |= {} if part is None else part.sources
    return msgspec.structs.replace(recipe, sources=sources)


def _with_epochs(streams: dict[str, Stream], max_epochs: int | None) -> dict[str, Stream]:
    """Streams that end after some epochs and give their shares to the others, or never."""
    choices: dict[str, Any] = {"max_epochs": max_epochs}
    if max_epochs is not None:
        choices["on_exhausted"] = "renormalise"
    return {name: replace(stream, **choices) for name, stream in streams.items()}


def _content(recipe: Recipe, part: str) -> Evaluation:
    if recipe.split is not None:
        documents = documents_of_split(recipe.split, part)
        if documents is None:
            raise RecipeError(f"split gives no documents to {part}; give it a weight above 0", "split")
        # All rows are the same as no `documents`, also in the fingerprint.
        cut = {name: msgspec.structs.replace(source, documents=documents) for name, source in recipe.sources.items()}
        return Evaluation(sources=cut, selections=recipe.selections, mixture=recipe.mixture)
    if part == "train":
        return Evaluation(sources=recipe.sources, selections=recipe.selections, mixture=recipe.mixture)
    if part in (recipe.hold_out or {}):
        return _held_out(recipe, part)
    content: Evaluation | None = getattr(recipe, part)
    if content is None:
        raise RecipeError(
            f"the recipe has no part {part}; give it sources under `{part}`, hold rows out with `hold_out`, or cut one "
            "off with `split`"
        )
    return content


def _held_out(recipe: Recipe, part: str) -> Evaluation:
    """What is held out for a part: its sources, selections of them, and the mixture at the start of training."""
    bands = bands_of(recipe, part)
    used: set[str] = set()

    def keep(name: str) -> bool:
        base = recipe.selections[name].source if name in recipe.selections else name.partition(CHILD)[0]
        used.update({base, name} if base in bands else ())
        return base in bands

    mixture = only(recipe.mixture, keep)
    if not isinstance(mixture, dict) or not mixture:
        raise RecipeError("no stream of the mixture has rows of these sources", f"hold_out.{part}")
    return Evaluation(
        sources={name: source for name, source in recipe.sources.items() if name in used},
        selections={name: one for name, one in recipe.selections.items() if name in used},
        mixture=mixture,
    )
