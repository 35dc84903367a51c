"""The images of one file, found while the column that holds them is scanned.

In: the values of each row of the column: bytes of images, or paths of files. Out: an `ItemTable` of a file: sizes of
each image from its header. Must hold: a null and an empty value are no image; a bad one has the width 0 and a reason.
Cost: that of the headers; for paths a file is opened for each.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchmix.catalog.items import ItemTable
from torchmix.errors import CatalogError, ImageUnreadable, SourceUnreadable
from torchmix.storage.open_path import opened
from torchmix.storage.stores import place_of
from torchmix.transform.images.decode import check_pixels
from torchmix.transform.images.header import ImageHeader, header_of, read_header
from torchmix.transform.images.rule import SizeRule

IMAGE = "image"
"""The kind of items."""


class HeaderScan:
    """Takes the values of one file."""

    def __init__(self, *, folder: Path | str | None, rule: SizeRule, most_pixels: int, masks_bad: bool) -> None:
        """Nothing is seen yet.

        Args:
            folder: The values are paths relative to it; None: they are images.
            rule: Refuses some sizes.
            most_pixels: Of an image.
            masks_bad: Whether a bad image is noted; else it is an error.
        """
        self._folder = folder
        self._rule = rule
        self._most_pixels = most_pixels
        self._masks_bad = masks_bad
        self._found: dict[int, list[_FoundImage]] = {}
        """By row: its images."""
        self._bytes: dict[int, int] = {}
        """By row: bytes of its values so far, where there are any."""
        self._nulls: dict[int, dict[int, int]] = {}
        """By row: the numbers of its values that are null or empty, and how many images come before each."""
        self._num_values: dict[int, int] = {}
        """By row."""
        self._num_others: dict[int, int] = {}
        """By row: values of the other field."""
        self.faults: dict[int, str] = {}

    def see(self, row: int, values: list[bytes | None], goes_on: bool) -> None:
        """Look at the values of a row.

        Args:
            row: Of the file.
            values: Of the row; a null and an empty value are no image.
            goes_on: They follow those that the row had before.

        Raises:
            SourceUnreadable: One is no image, and bad ones are errors.
        """
        if not goes_on:
            for held in (self._found, self._bytes, self._num_values, self._nulls, self.faults):
                held.pop(row, None)
        first = self._num_values.get(row, 0)
        self._num_values[row] = first + len(values)
        for number, value in enumerate(values, first):
            if not value:
                self._nulls.setdefault(row, {})[number] = len(self._found.get(row, ()))
                continue
            offset = self._bytes.get(row, 0)
            self._bytes[row] = offset + len(value)
            found = self._found.setdefault(row, [])
            try:
                header, num_bytes = self._header(value)
                check_pixels(header, self._most_pixels)
                fault = self._rule.fault(header.width, header.height)
                if fault:
                    raise ImageUnreadable(fault)
                found.append(_FoundImage(header.width, header.height, offset, len(value), num_bytes))
            except (ImageUnreadable, SourceUnreadable) as error:
                reason = self._reason(len(found), len(values) > 1 or goes_on, value, error)
                if not self._masks_bad:
                    raise SourceUnreadable(f"row {row}: {reason}", row=row) from None
                self.faults.setdefault(row, reason)
                found.append(_FoundImage(0, 0, offset, len(value), 0))

    @property
    def has_nulls(self) -> bool:
        """Whether a value was null or empty."""
        return bool(self._nulls)

    def see_other_field(self, row: int, values: list[bytes | None], goes_on: bool) -> None:
        """Look at the values of a row in the other field of its structs, once all rows of the column were seen.

        Args:
            row: Of the file.
            values: Paths where the column holds bytes, bytes where it holds paths; one for each value of the column.
            goes_on: They follow those that the row had before.

        Raises:
            SourceUnreadable: An image is in the other field alone, and bad ones are errors.
        """
        first = self._num_others.get(row, 0) if goes_on else 0
        self._num_others[row] = first + len(values)
        nulls = self._nulls.get(row, {})
        for number, value in enumerate(values, first):
            if not value or number not in nulls:
                continue
            which = f"its image {number}" if self._num_values[row] > 1 else "its image"
            if self._folder is None:
                path = value.decode("utf-8", "replace")[:200]
                what = f"has no bytes, only the path {path!r}; name the folder of such paths by images.folder, or put "
                reason = f"{which} {what}the images into the file"
            else:
                what = "has no path, only bytes; images.folder says that images are read by their paths"
                reason = f"{which} {what}: remove it, or write the paths"
            if not self._masks_bad:
                raise SourceUnreadable(f"row {row}: {reason}", row=row)
            self.faults.setdefault(row, reason)
            # A bad image, so that the markers of its row are as many; it has no bytes to read.
            found, place = self._found.setdefault(row, []), nulls[number]
            offset = found[place].offset if place < len(found) else self._bytes.get(row, 0)
            found.insert(place, _FoundImage(0, 0, offset, 0, 0))
            self._nulls[row] = nulls = {k: before + (k > number) for k, before in nulls.items()}

    def _reason(self, number: int, is_one_of_several: bool, value: bytes, error: CatalogError) -> str:
        which = f"its image {number}" if is_one_of_several else "its image"
        return (
            f"{which} {value.decode('utf-8', 'replace')[:200]!r}: {error.message}"
            if self._folder is not None
            else f"{which}: {error.message}"
        )

    def _header(self, value: bytes) -> tuple[ImageHeader, int]:
        if self._folder is None:
            return header_of(value), len(value)
        path = image_path(self._folder, value)
        with opened(path, "") as file:
            return read_header(file.read, file.num_bytes), file.num_bytes

    def table(self, num_rows: int) -> ItemTable:
        """The images of the file's rows, in the order of their values; an image begins with its value."""
        rows = sorted(row for row, found in self._found.items() if found)
        counts = np.zeros(num_rows, np.int64)
        counts[rows] = [len(self._found[row]) for row in rows]
        columns = np.array([each for row in rows for each in self._found[row]], np.int64).reshape(
            -1, len(_FoundImage._fields)
        )
        return ItemTable(
            first_item_of_row=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
            offset=columns[:, 2].astype(np.int32),
            tokens=columns[:, 3].astype(np.int32),
            sizes={
                "bytes": columns[:, 4].astype(np.int64),
                "height": columns[:, 1].astype(np.int32),
                "width": columns[:, 0].astype(np.int32),
            },
        )


class _FoundImage(NamedTuple):
    """One image; a bad one has the width 0."""

    width: int
    height: int
    offset: int
    """Bytes of the row's values before its own."""
    value_bytes: int
    image_bytes: int


def image_path(folder: Path | str, value: bytes) -> str:
    """Where the image lies that a value names.

    Raises:
        SourceUnreadable: The value is no path.
    """
    try:
        return place_of(Path(folder), value.decode("utf-8"))
    except UnicodeDecodeError:
        raise SourceUnreadable("the path is not UTF-8") from None
