"""Images whose places in a list of texts stand beside them, as MMC4 has them.

In: the JSON of a row, the path of the texts or of the images, and the path of the places. Out: the texts with a null
for each image, or the images in the order of the document. Must hold: an image stands before the text whose number is
its place, and images of one place keep their order. Cost: parsing the row's JSON into Python objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

PLACED = "\0"
"""Between the path of values and that of places, in what stands for a column inside of this room."""
_Value = TypeVar("_Value")


def placed_column(column: str, place: str | None) -> str:
    """A column whose images have places; the column itself where `place` is None."""
    return column if place is None else f"{column}{PLACED}{place}"


class PlacedValues(msgspec.Struct, frozen=True, kw_only=True):
    """What such a column means."""

    values: tuple[str, ...]
    """Keys that lead to the texts, or to the images; lists on the way are walked through."""
    places: tuple[str, ...]

    @classmethod
    def of(cls, column: str) -> PlacedValues | None:
        """From the column; None where it has no places."""
        values, mark, places = column.partition(PLACED)
        return cls(values=tuple(values.split(".")), places=tuple(places.split("."))) if mark else None

    def texts(self, row: Any) -> list[str | None]:
        """The texts of a row, and None for each image.

        Raises:
            ValueError: The row holds something else.
        """
        texts = _walk(row, self.values)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{'.'.join(self.values)} is no list of texts")
        before: list[int] = [0] * len(texts)
        for place in self._places(row):
            if place >= len(texts):
                raise ValueError(f"an image has the place {place}, and there are {len(texts)} texts")
            before[place] += 1
        return [part for text, count in zip(texts, before, strict=True) for part in (*[None] * count, text)]

    def images(self, row: Any) -> list[str | None]:
        """The images of a row, in the order of the document; errors as `texts`."""
        images = _walk(row, self.values)
        if not isinstance(images, list) or not all(image is None or isinstance(image, str) for image in images):
            raise ValueError(f"{'.'.join(self.values)} is no list of texts")
        return self.in_order(row, images)

    def in_order(self, row: Any, images: Sequence[_Value]) -> list[_Value]:
        """Images of a row that lie elsewhere, in the order of the document; errors as `texts`."""
        places = self._places(row)
        if len(places) != len(images):
            raise ValueError(f"it has {len(images)} images and {len(places)} places")
        return [images[i] for i in sorted(range(len(images)), key=places.__getitem__)]

    def _places(self, row: Any) -> list[int]:
        places = _walk(row, self.places)
        if not isinstance(places, list) or not all(type(place) is int and place >= 0 for place in places):
            raise ValueError(f"{'.'.join(self.places)} is no list of numbers of texts")
        return places


def _walk(held: Any, path: Sequence[str]) -> Any:
    for depth, key in enumerate(path):
        if isinstance(held, list):
            return [_walk(one, path[depth:]) for one in held]
        if not isinstance(held, dict) or key not in held:
            raise ValueError(f"it has no key {'.'.join(path[: depth + 1])!r}")
        held = held[key]
    return held
