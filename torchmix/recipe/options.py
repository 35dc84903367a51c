"""Arguments of calls, checked in one way.

In: the call's name, an argument's name and its value. Out: the value as the call uses it. Must hold: a wrong value is
an OptionError that names call, argument, value and what is allowed; a NumPy integer is a number, a bool is not. Cost:
under a microsecond.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeVar

from torchmix.errors import OptionError
from torchmix.recipe.build import nearest

Word = TypeVar("Word", bound=str)


def whole_number(call: str, name: str, value: SupportsIndex, lowest: int, highest: int | None = None) -> int:
    """An argument that must be a whole number from `lowest` to `highest`, both included.

    Raises:
        OptionError: It is not.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # 2.7, "3"
        number = None
    if number is None or number < lowest or (highest is not None and number > highest):
        allowed = (
            f"a whole number of at least {lowest}"
            if highest is None
            else f"a whole number in {_range(lowest, highest)}"
        )
        raise OptionError(f"{call}: {name}={value!r} must be {allowed}")
    return number


def one_of(call: str, name: str, value: Any, words: Sequence[Word]) -> Word:
    """An argument that must be one of some words.

    Raises:
        OptionError: It is not; suggests the nearest.
    """
    for word in words:
        if isinstance(value, str) and value == word:
            return word
    raise OptionError(f"{call}: {name}={value!r} is not one of {', '.join(words)}{nearest(value, words)}")


def true_or_false(call: str, name: str, value: Any) -> bool:
    """An argument that must be True or False.

    Raises:
        OptionError: It is not.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{call}: {name}={value!r} must be True or False")
    return value


def _range(lowest: int, highest: int) -> str:
    return f"[{lowest}, 2**63)" if highest == 2**63 - 1 else f"[{lowest}, {highest}]"
