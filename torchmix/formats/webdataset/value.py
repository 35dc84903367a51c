"""Members of a sample -> the text, or bytes, that a source reads of it.

In: the column of the recipe. Out: which members it names, and the values in them. Must hold: `txt` is the member of
that suffix, `json.a.b` the value at the keys `a` and `b` of the member `json`, `jpg|png` the first of these members
that a sample has, and `*.jpg|*.png` all members whose suffix has one of these patterns, in the order of the file. Cost:
parsing the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec.structs import replace

from torchmix.errors import SourceUnreadable
from torchmix.formats.column import Kind
from torchmix.formats.placed import PLACED, PlacedValues
from torchmix.formats.webdataset.members import Member, TarSample

JSON = "json"
_PATTERN = frozenset("*?[")


class MemberValue(msgspec.Struct, frozen=True, kw_only=True):
    """What a column names."""

    suffixes: tuple[str, ...]
    """The member's; the first one that a sample has counts. Or patterns."""
    keys: tuple[str, ...] = ()
    """Keys that lead to the value in a member of JSON."""
    is_pattern: bool = False
    """Whether all members with such a suffix count."""
    placed: PlacedValues | None = None
    """Where images stand in a list of texts, in the member of JSON."""

    @classmethod
    def of(cls, column: str) -> MemberValue:
        """From the recipe's word, or a `placed_column` of it."""
        if PLACED in column:
            column, _, place = column.partition(PLACED)
            inner, prefix = cls.of(column), f"{JSON}."
            if not place.startswith(prefix) or not (inner.is_pattern or inner.keys):
                raise SourceUnreadable(f"images.place is {place!r}; it must be keys of the member json, as json.a.b")
            placed = PlacedValues(values=inner.keys, places=tuple(place.removeprefix(prefix).split(".")))
            return replace(inner, placed=placed)
        head, _, rest = column.partition(".")
        if head.lower() == JSON and rest:
            return cls(suffixes=(JSON,), keys=tuple(rest.split(".")))
        suffixes = tuple(suffix.strip().lstrip(".").lower() for suffix in column.split("|"))
        return cls(suffixes=suffixes, is_pattern=not _PATTERN.isdisjoint(column))

    def members(self, sample: TarSample) -> list[Member]:
        """The members of a sample, in the order of the file."""
        if self.is_pattern:
            named = sample.members.items()
            patterns = self.suffixes if self.placed is None else (*self.suffixes, JSON)
            return [member for name, member in named if any(fnmatchcase(name, each) for each in patterns)]
        return [sample.members[suffix] for suffix in self.suffixes if suffix in sample.members][:1]

    def values(self, content: bytes, kind: Kind) -> list[bytes | None]:
        """The values of a member with this content; [None] for a null.

        Args:
            content: Of the member.
            kind: What is wanted: a text, of `values` one or a list of them, of `json` anything.

        Raises:
            ValueError: It is no JSON, or holds no such thing at the keys.
        """
        if self.placed is not None and not self.is_pattern:
            row = _parsed(content)
            if kind == "json":
                return [json.dumps(self.placed.texts(row), ensure_ascii=False).encode("utf-8", "replace")]
            return [None if name is None else name.encode("utf-8", "replace") for name in self.placed.images(row)]
        if not self.keys and (kind != "json" or self.suffixes != (JSON,)):
            return [content]
        found = _parsed(content)
        for key in self.keys:
            if not isinstance(found, dict) or key not in found:
                raise ValueError(f"it has no key {key!r}")
            found = found[key]
        if kind == "json":
            return [None if found is None else json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")]
        several = found if kind == "values" and isinstance(found, list) else [found]
        for value in several:
            if value is not None and not isinstance(value, str):
                what = f"{'.'.join(self.keys)} {'holds' if several is found else 'is'} a {type(value).__name__}"
                raise ValueError(f"{what}, not a text")
        return [None if value is None else value.encode("utf-8", "replace") for value in several]

    def in_order(self, members: Sequence[Member], contents: list[bytes]) -> list[bytes]:
        """Contents of the members of a pattern, in the order of their places where they have some.

        Raises:
            ValueError: Places are missing, or as many as the images are not.
        """
        if self.placed is None:
            return contents
        row, images = None, []
        for member, content in zip(members, contents, strict=True):
            if member.name.rpartition("/")[2].partition(".")[2].lower() == JSON:
                row = _parsed(content)
            else:
                images.append(content)
        if row is None and images:
            raise ValueError("its sample has no member json with the places of its images")
        return self.placed.in_order(row, images) if row is not None else []


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
