"""A member of a sample -> the text, or bytes, that a source reads of it.

In: the column of the recipe. Out: which member it names, and the value in it. Must hold: `txt` is the member of that
suffix, `json.a.b` the text at the keys `a` and `b` of the member `json`, and `jpg|png` the first of these members that
a sample has. Cost: parsing the JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torchmix.formats.webdataset.members import Member, TarSample

JSON = "json"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberValue:
    """What a column names."""

    suffixes: tuple[str, ...]
    """The member's; the first one that a sample has counts."""
    keys: tuple[str, ...] = ()
    """Keys that lead to the text in a member of JSON."""

    @classmethod
    def of(cls, column: str) -> MemberValue:
        """From the recipe's word."""
        head, _, rest = column.partition(".")
        if head.lower() == JSON and rest:
            return cls(suffixes=(JSON,), keys=tuple(rest.split(".")))
        return cls(suffixes=tuple(suffix.strip().lstrip(".").lower() for suffix in column.split("|")))

    def member(self, sample: TarSample) -> Member | None:
        """The member of a sample; None where it has none."""
        return next((sample.members[suffix] for suffix in self.suffixes if suffix in sample.members), None)

    def value(self, content: bytes) -> bytes | None:
        """The value of a member with this content; None for a null.

        Raises:
            ValueError: It is no JSON, or holds no text at the keys.
        """
        if not self.keys:
            return content
        try:
            found: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON ({error})") from None
        for key in self.keys:
            if not isinstance(found, dict) or key not in found:
                raise ValueError(f"it has no key {key!r}")
            found = found[key]
        if found is None:
            return None
        if not isinstance(found, str):
            raise ValueError(f"{'.'.join(self.keys)} is a {type(found).__name__}, not a text")
        return found.encode("utf-8", "replace")
