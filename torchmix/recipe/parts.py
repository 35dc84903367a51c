"""The parts of a recipe: what training, validation and test plan.

In: a checked recipe. Out: one of its parts, `Part`, which is all that planning needs; or one recipe with the sources of
all parts, to index them together. Must hold: a row is in at most one part of a `split`, and its place in the order of
its source is the same in each part. Cost: none.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from torchmix.errors import OptionError, RecipeError
from torchmix.recipe.balance.structs import Balance, Module
from torchmix.recipe.build import nearest
from torchmix.recipe.held_out import Band, bands_of, only
from torchmix.recipe.ramp import last_samples
from torchmix.recipe.source.documents import PARTS, documents_of_split
from torchmix.recipe.streams import CHILD, Stream, streams_of
from torchmix.recipe.structs import (
    Batch,
    Change,
    Dynamic,
    Evaluation,
    Group,
    Packing,
    Recipe,
    Selection,
    Share,
    Shuffle,
    Source,
)


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
    """The hashes of the rows that this part has, for sources from which rows are held out; see `held_out.py`."""
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
