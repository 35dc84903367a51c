"""Token ids of sources against the vocabulary of the model.

In: the recipe's `vocab_size`, the catalog, and the rows of the model's embedding where they are known. Out: the
contradictions, each with both values; and the bound for ids that the index has not read. Must hold: the same for
`check` and for a start. Cost: none; the catalog has the smallest and largest id of each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchmix.catalog.manifest import MOST_ID
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.errors import RecipeError


class IdLimit(NamedTuple):
    """The bound that all ids of a model are below."""

    size: int
    """At most 2^31."""
    reason: str
    """Where the bound comes from, for example `vocab_size is 50257`."""


class Misfit(NamedTuple):
    """Two numbers that contradict each other."""

    where: str
    """Path of keys in the recipe."""
    message: str
    """Both numbers, and what to do."""


ANY_MODEL = IdLimit(MOST_ID + 1, f"ids go from 0 to {MOST_ID}")


def id_limit(vocab_size: int | None, padded_vocab_size: int | None = None) -> IdLimit:
    """The bound of ids: `vocab_size`, else the rows of the model's embedding, else the range of 32 bits."""
    if vocab_size is not None:
        return IdLimit(vocab_size, f"vocab_size is {vocab_size}")
    if padded_vocab_size is not None and padded_vocab_size <= MOST_ID:
        return IdLimit(padded_vocab_size, f"the model's padded vocabulary has {padded_vocab_size}")
    return ANY_MODEL


def vocabulary_misfits(
    vocab_size: int | None, catalog: Catalog | None, *, padded_vocab_size: int | None = None
) -> Iterator[Misfit]:
    """The sources that a model with this vocabulary cannot be trained on.

    Args:
        vocab_size: The recipe's `vocab_size`, if it has one.
        catalog: The recipe's sources; None where they are not indexed yet.
        padded_vocab_size: Rows of the model's embedding; None where they are not known.
    """
    if vocab_size is not None and padded_vocab_size is not None and vocab_size > padded_vocab_size:
        yield Misfit(
            "vocab_size",
            f"{vocab_size} ids, but the model's padded vocabulary has {padded_vocab_size}: its embedding lacks some of "
            "them; give the model the vocabulary of the data",
        )
    if catalog is None:
        return
    limit = id_limit(vocab_size, padded_vocab_size)
    for name, source in catalog.sources.items():
        yield from _ids_outside(source, limit)
        if source.vocab_size is not None and source.vocab_size > limit.size:
            yield Misfit(
                f"sources.{name}.tokenizer",
                f"{source.tokenizer} has ids up to {source.vocab_size - 1}, but {limit.reason}; name the tokenizer of "
                "the model, or give the model all of its ids",
            )


def check_vocabulary(vocab_size: int | None, catalog: Catalog, *, padded_vocab_size: int | None = None) -> None:
    """Raise an error if `vocabulary_misfits` finds anything.

    Raises:
        RecipeError: Some numbers contradict each other; names all of them.
    """
    found = list(vocabulary_misfits(vocab_size, catalog, padded_vocab_size=padded_vocab_size))
    if found:
        first, others = found[0], found[1:]
        raise RecipeError("\n  ".join([first.message, *(f"{one.where}: {one.message}" for one in others)]), first.where)


def _ids_outside(source: SourceCatalog, limit: IdLimit) -> Iterator[Misfit]:
    """The file with the smallest id, if that is below 0, and the one with the largest, if that is too large."""
    seen = [(file.ids, file.path) for file in source.files if file.ids is not None]
    if not seen:
        return
    lowest, highest = min(seen, key=lambda one: one[0].smallest), max(seen, key=lambda one: one[0].largest)
    for token, path, is_outside in (
        (lowest[0].smallest, lowest[1], lowest[0].smallest < 0),
        (highest[0].largest, highest[1], highest[0].largest >= limit.size),
    ):
        if is_outside:
            yield Misfit(
                f"sources.{source.name}",
                f"{path} holds the token {token}, but {limit.reason}; the ids are of another vocabulary, or the column "
                "holds something else",
            )
