"""The parts of a recipe: what training, validation and test read.

In: a checked recipe. Out: the recipe of one part, which needs nothing of the others; or one with the sources of all
parts, to index them together. Must hold: a row is in at most one part of a `split`, and its place in the order of its
source is the same in each. Cost: none.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchmix.errors import OptionError, RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.documents import PARTS, documents_of_split
from torchmix.recipe.ramp import last_samples
from torchmix.recipe.structs import Part, Recipe, Source


def recipe_of_part(recipe: Recipe, part: str, one_pass: bool = False) -> Recipe:
    """The recipe of one part alone.

    Args:
        recipe: A checked recipe.
        part: `train`, `validation` or `test`. The last two have the size of the global batch after the ramp, and no
            `max_epochs`.
        one_pass: Each document once: every source ends after one epoch, and its share goes to the others.

    Returns:
        A recipe without `split`, `validation` and `test`. The train part of a recipe without `split` is the recipe
        itself, less its other parts.

    Raises:
        OptionError: Another word than these.
        RecipeError: The recipe has no such part.
    """
    if part not in PARTS:
        raise OptionError(f"{part!r} is no part of a recipe{nearest(part, PARTS)}; parts are {', '.join(PARTS)}")
    content = _content(recipe, part)
    sources = content.sources
    if one_pass:
        sources = _with_epochs(sources, 1)
    elif part != "train":
        sources = _with_epochs(sources, None)  # it bounds training: a run must not end because it was evaluated often
    batch = recipe.batch
    if part != "train":
        batch = msgspec.structs.replace(batch, samples=last_samples(batch))
    return msgspec.structs.replace(
        recipe,
        batch=batch,
        sources=sources,
        mixture=content.mixture,
        schedule=recipe.schedule if part == "train" else (),
        split=None,
        validation=None,
        test=None,
    )


def has_part(recipe: Recipe, part: str) -> bool:
    """Whether a checked recipe has a part; every one has `train`."""
    if recipe.split is None:
        return part == "train" or getattr(recipe, part) is not None
    return documents_of_split(recipe.split, part) is not None


def with_all_sources(recipe: Recipe) -> Recipe:
    """A recipe whose sources are those of all parts, to index them; its mixture is no mixture of them."""
    sources: dict[str, Source] = dict(recipe.sources)
    for part in (recipe.validation, recipe.test):
        sources |= {} if part is None else part.sources
    return msgspec.structs.replace(recipe, sources=sources)


def _with_epochs(sources: dict[str, Source], max_epochs: int | None) -> dict[str, Source]:
    """Sources that end after some epochs and give their shares to the others, or never."""
    choices: dict[str, Any] = {"max_epochs": max_epochs}
    if max_epochs is not None:
        choices["on_exhausted"] = "renormalise"
    return {name: msgspec.structs.replace(source, **choices) for name, source in sources.items()}


def _content(recipe: Recipe, part: str) -> Part:
    if recipe.split is not None:
        documents = documents_of_split(recipe.split, part)
        if documents is None:
            raise RecipeError(f"split gives no documents to {part}; give it a weight above 0", "split")
        # All rows are the same as no `documents`, also in the fingerprint.
        cut = {name: msgspec.structs.replace(source, documents=documents) for name, source in recipe.sources.items()}
        return Part(sources=cut, mixture=recipe.mixture)
    if part == "train":
        return Part(sources=recipe.sources, mixture=recipe.mixture)
    content: Part | None = getattr(recipe, part)
    if content is None:
        raise RecipeError(f"the recipe has no part {part}; give it sources under `{part}`, or cut one off with `split`")
    return content
