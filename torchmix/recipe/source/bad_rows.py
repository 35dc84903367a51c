"""What happens to rows that cannot be read, and how many there may be.

In: a source of a recipe. Out: whether bad rows are masked, and which part of the source may be bad. Must hold: nothing
is rounded. Cost: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from torchmix.recipe.shares import parse_fraction
from torchmix.recipe.structs import Source

DEFAULT_MAX_BAD = "0.1%"


def masks_bad_rows(source: Source) -> bool:
    """Whether rows that cannot be read are left out of training; else the first one is an error."""
    return source.bad_rows == "mask"


def masked_sources(sources: Mapping[str, Source]) -> frozenset[str]:
    """Names of the sources that mask bad rows."""
    return frozenset(name for name, source in sources.items() if masks_bad_rows(source))


def max_bad_of(source: Source) -> Fraction:
    """The part of a checked source that may be bad, in [0, 1]; 0 where the first bad row is an error."""
    if not masks_bad_rows(source):
        return Fraction(0)
    return parse_fraction(source.max_bad or DEFAULT_MAX_BAD, "max_bad")
