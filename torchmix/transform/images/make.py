"""Bytes of an image -> its patches, as a step delivers them.

In: the bytes, and the size that the index found. Out: uint8 patches, and their grid. Must hold: pure, and total: an
image that cannot be read is an error that says why, or grey patches of the planned size. Cost: that of decoding and of
resizing, some 60 ms for a photograph of two megapixels.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.items import ItemTable
from torchmix.errors import CorruptPage, ImageUnreadable
from torchmix.recipe.source.image_structs import Images
from torchmix.transform.images.decode import decode_image, grey_image
from torchmix.transform.images.open_rule import rule_of
from torchmix.transform.images.rule import SizeRule

logger = logging.getLogger(__name__)


class PlannedImage(msgspec.Struct, frozen=True, kw_only=True):
    """What the index knows of an image, and what messages call it."""

    source: str
    row: int
    number: int
    """Its place among the images of its row."""
    width: int
    height: int

    @classmethod
    def of(cls, source: str, table: ItemTable, item: int) -> PlannedImage:
        """An image of a source by its number in the table."""
        row = int(np.searchsorted(table.first_item_of_row, item, side="right")) - 1
        number = item - int(table.first_item_of_row[row])
        width, height = (int(table.sizes[key][item]) for key in ("width", "height"))
        return cls(source=source, row=row, number=number, width=width, height=height)


class ImageTransform(msgspec.Struct, frozen=True, kw_only=True):
    """What a source makes of its images. Safe to share between threads."""

    images: Images
    rule: SizeRule

    @classmethod
    def of(cls, source: str, images: Images) -> ImageTransform:
        """The transform of a source of a checked recipe."""
        return cls(images=images, rule=rule_of(images, f"sources.{source}.images"))

    @property
    def patch_values(self) -> int:
        """Values of a patch: three channels of a square."""
        return 3 * self.rule.patch**2

    def patches(self, content: bytes | memoryview, *, width: int, height: int) -> NDArray[np.uint8]:
        """The patches of an image, [patches, patch_values].

        Args:
            content: Its bytes.
            width, height: As the index found them, after turning.

        Raises:
            ImageUnreadable: It does not decode, or has another size.
        """
        image: Any = decode_image(content, most_pixels=self.images.most_pixels, alpha=self.images.alpha)
        if image.size != (width, height):
            raise ImageUnreadable(
                f"it has {image.width} x {image.height} pixels, the index found {width} x {height}; the file was "
                "altered: put it back, or run torchmix index"
            )
        return self.rule.segments(image)

    def grey_patches(self, *, width: int, height: int) -> NDArray[np.uint8]:
        """What stands for an image of a size that cannot be read."""
        return self.rule.segments(grey_image(width, height))

    def patches_of(self, planned: PlannedImage, content: bytes | memoryview, *, is_masked: bool) -> NDArray[np.uint8]:
        """The patches of an image; grey ones, with a warning, where it cannot be read and its source masks bad rows.

        Raises:
            CorruptPage: It cannot be read as it was indexed, and its source does not mask.
        """
        try:
            return self.patches(content, width=planned.width, height=planned.height)
        except ImageUnreadable as error:
            what = f"source {planned.source!r}: image {planned.number} of row {planned.row}: {error}"
            if not is_masked:
                raise CorruptPage(what) from None
            logger.warning("%s - it comes as a grey image, as bad_rows: mask says", what)
            return self.grey_patches(width=planned.width, height=planned.height)
