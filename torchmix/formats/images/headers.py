"""The images of one file, found while the column that holds them is scanned.

In: values of the column by row: bytes of images, or paths of files. Out: an `ItemTable` of a file: sizes of each image
from its header. Must hold: a null and an empty value are no image; a bad one has the width 0 and a reason. Cost: that
of the headers; for paths a file is opened for each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchmix.catalog.items import ItemTable
from torchmix.errors import ImageUnreadable, SourceUnreadable
from torchmix.storage.open_path import opened
from torchmix.storage.stores import place_of
from torchmix.transform.images.decode import check_pixels
from torchmix.transform.images.header import ImageHeader, header_of, read_header
from torchmix.transform.images.rule import SizeRule

IMAGE = "image"
"""The kind of items."""


class HeaderScan:
    """Takes the values of one file."""

    def __init__(
        self, *, where: str, folder: Path | str | None, rule: SizeRule, most_pixels: int, masks_bad: bool
    ) -> None:
        """Nothing is seen yet.

        Args:
            where: Begins every message.
            folder: The values are paths relative to it; None: they are images.
            rule: Refuses some sizes.
            most_pixels: Of an image.
            masks_bad: Whether a bad image is noted; else it is an error.
        """
        self._where = where
        self._folder = folder
        self._rule = rule
        self._most_pixels = most_pixels
        self._masks_bad = masks_bad
        self._found: dict[int, tuple[int, int, int, int]] = {}
        """By row: width, height, bytes of the value, bytes of the image."""
        self.faults: dict[int, str] = {}

    def see(self, row: int, value: bytes) -> None:
        """Look at the value of a row.

        Raises:
            SourceUnreadable: It is no image, and bad ones are errors.
        """
        if not value:
            return
        try:
            header, num_bytes = self._header(value)
            check_pixels(header, self._most_pixels)
            fault = self._rule.fault(header.width, header.height)
            if fault:
                raise ImageUnreadable(fault)
            self._found[row] = header.width, header.height, len(value), num_bytes
        except (ImageUnreadable, SourceUnreadable) as error:
            named = value.decode("utf-8", "replace")[:200] if self._folder is not None else ""
            reason = f"its image {named!r}: {error}" if named else f"its image: {error}"
            if not self._masks_bad:
                raise SourceUnreadable(f"{self._where}: row {row}: {reason}") from None
            self.faults[row] = reason
            self._found[row] = 0, 0, len(value), 0

    def _header(self, value: bytes) -> tuple[ImageHeader, int]:
        if self._folder is None:
            return header_of(value), len(value)
        path = image_path(self._folder, value)
        with opened(path, "it") as file:
            return read_header(file.read, file.num_bytes), file.num_bytes

    def table(self, num_rows: int) -> ItemTable:
        """The images of the file's rows; an image begins with its value."""
        rows = np.array(sorted(self._found), np.int64)
        columns = np.array([self._found[row] for row in rows.tolist()], np.int64).reshape(-1, 4)
        return ItemTable(
            first_item_of_row=np.searchsorted(rows, np.arange(num_rows + 1)).astype(np.int64),
            offset=np.zeros(len(rows), np.int32),
            tokens=columns[:, 2].astype(np.int32),
            sizes={
                "bytes": columns[:, 3].astype(np.int64),
                "height": columns[:, 1].astype(np.int32),
                "width": columns[:, 0].astype(np.int32),
            },
        )


def image_path(folder: Path | str, value: bytes) -> str:
    """Where the image lies that a value names.

    Raises:
        SourceUnreadable: The value is no path.
    """
    try:
        return place_of(Path(folder), value.decode("utf-8"))
    except UnicodeDecodeError:
        raise SourceUnreadable("the path is not UTF-8") from None
