"""What is wrong with the ids of a recipe's data: none that the model has, or of two vocabularies.

In: the recipe, its folder, and its catalog if there is one that fits. Out: findings. Must hold: whatever a start would
refuse is found here. Cost: opening the tokenizers, where there are two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchmix.catalog.store import Catalog
from torchmix.catalog.vocabulary import vocabulary_misfits
from torchmix.cli.check.findings import Finding, Level
from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.recipe.structs import Recipe
from torchmix.transform.open_tokenizer import Tokenizers


def vocabulary_findings(
    recipe: Recipe, directory: Path, catalog: Catalog | None, padded_vocab_size: int | None
) -> Iterator[Finding]:
    """Compare ids of sources with the model's, and tokenizers with each other.

    Args:
        recipe: A checked recipe, with the sources of all parts.
        directory: Its folder.
        catalog: Its catalog; None if there is none that fits.
        padded_vocab_size: Rows of the model's embedding, if they are known.
    """
    for where, message in vocabulary_misfits(recipe.vocab_size, catalog, padded_vocab_size=padded_vocab_size):
        yield Finding(level=Level.FINDING, where=where, message=message)
    yield from _two_vocabularies(recipe, directory)


def _two_vocabularies(recipe: Recipe, directory: Path) -> Iterator[Finding]:
    """One id, two meanings: nothing in tokens could tell it."""
    named = {name: source.tokenizer for name, source in sorted(recipe.sources.items()) if source.tokenizer is not None}
    if len(set(named.values())) < 2:
        return
    tokenizers, first_of = Tokenizers(directory), dict[str, str]()
    for name, tokenizer in named.items():
        with suppress(SourceUnreadable, RecipeError):  # told with the files
            first_of.setdefault(tokenizers.open(name, tokenizer).vocabulary, name)
    if len(first_of) > 1:
        first, second = list(first_of.values())[:2]
        message = (
            f"{named[second]} gives text other ids than {named[first]} of sources.{first}: a recipe is for one model, "
            "which has one vocabulary; name the same tokenizer for both"
        )
        yield Finding(level=Level.FINDING, where=f"sources.{second}.tokenizer", message=message)
