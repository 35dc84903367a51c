"""Images, as the seam asks for them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import Column
from torchmix.errors import ItemUnreadable
from torchmix.modalities.images.decode import check_pixels, decode_image, decoder_id, grey_image
from torchmix.modalities.images.header import HEADER_VERSION, read_header
from torchmix.modalities.images.look import DRAFT, is_image, is_path, names_images, tokens_of
from torchmix.modalities.images.rules import SizeRule, rule_of
from torchmix.modalities.modality import DraftOfKind, ItemSizes, Measures, ReadRange
from torchmix.recipe.structs import Images

GRID = ("segments", "grid_height", "grid_width")
"""Columns of the catalog: pictures that an image becomes, and rows and columns of patches in each."""
_MEDIA = {b"\xff\xd8": "jpeg", b"\x89P": "png", b"GI": "gif", b"RI": "webp"}
"""By the first bytes of an image, what a browser calls it."""
_AVIF = (b"ftypavif", b"ftypavis")
"""The fifth byte to the twelfth of an AVIF image, or of a sequence of them."""


class ImageModality(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `modality.Modality`; a unit is a patch."""

    images: Images
    rule: SizeRule

    @property
    def kind(self) -> str:
        """See `Modality`."""
        return Images.kind

    @property
    def column_id(self) -> str:
        """See `Modality`."""
        way = "" if self.images.folder is None else "paths"
        placed = "" if self.images.place is None else f":{self.images.place}"
        return f"images-{HEADER_VERSION}:{self.images.most_pixels}:{way}:{self.rule.rule_id}{placed}"

    @property
    def sizes_id(self) -> str:
        """See `Modality`."""
        return f"sized-{HEADER_VERSION}:{self.rule.rule_id}"

    @property
    def decoder_id(self) -> str:
        """See `Modality`."""
        return f"{self.images.alpha}:{decoder_id()}"

    @property
    def measured(self) -> tuple[str, ...]:
        """See `Modality`."""
        return "width", "height"

    def measure(self, read: ReadRange, num_bytes: int) -> Measures:
        """See `Modality`; what a viewer shows, after turning."""
        header = read_header(read, num_bytes)
        check_pixels(header, self.images.most_pixels)
        fault = self.rule.fault(header.width, header.height)
        if fault:
            raise ItemUnreadable(fault)
        return header.width, header.height

    def sizes(self, measures: Mapping[str, Column]) -> ItemSizes:
        """See `Modality`."""
        found = self.rule.sizes(np.asarray(measures["width"]), np.asarray(measures["height"]))
        columns = {
            "grid_height": found.grid_height,
            "grid_width": found.grid_width,
            "patches": found.patches,
            "segments": found.segments,
        }
        return ItemSizes(tokens=found.tokens, columns=columns)

    @property
    def units(self) -> str:
        """See `Modality`."""
        return "patches"

    @property
    def segments(self) -> str:
        """See `Modality`."""
        return "segments"

    @property
    def unit_array(self) -> str:
        """See `Modality`."""
        return "pixel_values"

    @property
    def unit_values(self) -> int:
        """See `Modality`; three channels of a square."""
        return 3 * self.rule.patch**2

    @property
    def unit_type(self) -> np.dtype[Any]:
        """See `Modality`."""
        return np.dtype(np.uint8)

    @property
    def item_arrays(self) -> Mapping[str, tuple[str, ...]]:
        """See `Modality`."""
        return {"grid_thw": GRID}

    def grids(self, columns: Mapping[str, Column], items: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Modality`; an image of several segments has no grid, nor one whose tokens are no blocks of patches."""
        merge = int(getattr(self.rule, "merge", 1))
        segments, height, width = (np.asarray(columns[key][items], np.int64) for key in GRID)
        return height // merge * (segments == 1), width // merge * (segments == 1)

    def decode(self, content: bytes | memoryview, measures: Measures) -> NDArray[np.uint8]:
        """See `Modality`."""
        image: Any = decode_image(content, most_pixels=self.images.most_pixels, alpha=self.images.alpha)
        width, height = measures
        if image.size != measures:
            raise ItemUnreadable(
                f"it has {image.width} x {image.height} pixels, the index found {width} x {height}; the file was "
                "altered: put it back, or run torchmix index"
            )
        return self.rule.segments(image)

    def stand_in(self, measures: Measures) -> NDArray[np.uint8]:
        """See `Modality`."""
        return self.rule.segments(grey_image(*measures))

    @property
    def stand_in_name(self) -> str:
        """See `Modality`."""
        return "a grey image"

    def preview(self, content: bytes | memoryview) -> str:
        """See `Modality`."""
        is_avif = bytes(content[4:12]) in _AVIF
        media = "avif" if is_avif else _MEDIA.get(bytes(content[:2]), "octet-stream")
        return f'<img src="data:image/{media};base64,{base64.b64encode(content).decode("ascii")}">'


class ImageKind:
    """Implements `modality.KindOfItems`."""

    def modality(self, words: Images, where: str) -> ImageModality:
        """See `KindOfItems`."""
        return ImageModality(images=words, rule=rule_of(words, where))

    def arrays_of_nothing(self) -> dict[str, NDArray[Any]]:
        """See `KindOfItems`."""
        return {"item/grid_thw": np.zeros((0, len(GRID)), np.int32), "unit/pixel_values": np.zeros((0, 0), np.uint8)}

    def seems_item(self, value: bytes) -> bool:
        """See `KindOfItems`."""
        return is_image(value)

    def seems_path(self, value: str) -> bool:
        """See `KindOfItems`."""
        return is_path(value)

    def seems_column(self, path: str) -> bool:
        """See `KindOfItems`."""
        return names_images(path)

    def usual_tokens(self, value: bytes) -> float:
        """See `KindOfItems`."""
        return tokens_of(value)

    @property
    def draft(self) -> DraftOfKind:
        """See `KindOfItems`."""
        return DRAFT

    def build_id(self) -> str:
        """See `KindOfItems`."""
        return decoder_id()
