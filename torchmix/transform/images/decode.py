"""Bytes of an image -> its pixels, turned and in RGB -> its patches, as a step delivers them."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import ItemTable
from torchmix.errors import CorruptPage, ImageUnreadable
from torchmix.recipe.structs import Images
from torchmix.transform.images.header import ImageHeader, header_of, import_pillow
from torchmix.transform.images.rules import SizeRule, rule_of

# --- The values of a column as they are: bytes for tokens.
#
# A row has as many tokens as its values have bytes together, a null none. So all that indexes and reads texts indexes
# and reads the images of a source, too: by page, by range, with checksums.

See = Callable[[int, list[bytes | None], bool], None]
"""Called while a file is scanned with each row and its values; True: they follow those that the row had before."""


class RawBytes:
    """Values as tokens; implements `tokenizer.Tokenizer`."""

    vocab_size = 256
    vocabulary = "raw bytes"

    def __init__(self, transform_id: str, see: See | None = None) -> None:
        """`see` is shown the values of each row that is counted."""
        self.transform_id = transform_id
        self._see = see

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; a row is its bytes."""
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        lengths = np.asarray(pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False), np.int64)
        content = b"".join(value or b"" for value in _bytes(texts))
        return np.frombuffer(content, np.uint8), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; a row is one value."""
        offsets = pa.array(np.arange(len(texts) + 1))
        return self.count_values(pa.LargeListArray.from_arrays(offsets, texts), first_row, goes_on=False)

    def count_values(self, lists: pa.LargeListArray, first_row: int, *, goes_on: bool) -> Int64Array:
        """Bytes of the values of each row, [rows].

        Args:
            lists: [rows] of strings or binaries, none of them null; its values may be.
            first_row: Row of the first list, in the file.
            goes_on: The first list holds one value that is not in the file, and the last values of the row before.
        """
        borders = lists.offsets.to_numpy().tolist()
        values = _bytes(lists.values)
        counts = np.zeros(len(borders) - 1, np.int64)
        for row, (start, stop) in enumerate(pairwise(borders)):
            of_row = values[start:stop]
            counts[row] = sum(len(value or b"") for value in of_row)
            if self._see is not None:
                is_rest = goes_on and not row
                self._see(first_row + row, of_row[1:] if is_rest else of_row, is_rest)
        return counts

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return f"{len(ids)} bytes"


def _bytes(texts: pa.Array) -> list[bytes | None]:
    binary = pa.large_binary() if pa.types.is_large_string(texts.type) else pa.binary()
    values: list[bytes | None] = texts.view(binary).to_pylist()
    return values


# --- Bytes of an image -> its pixels, turned and in RGB.
#
# A pure function of the bytes within one build of Pillow and its libraries; JPEG pixels differ by 1 or 2 levels
# between builds, so `decoder_id` names them. An image whose header lies is refused before it is decoded: more pixels
# than `most_pixels`, or another size than the decoder finds.
#
# Alpha is composited on white, or dropped. 16 bits are shifted to 8, where Pillow's own conversion saturates. CMYK,
# palettes and grey are converted by Pillow.

Alpha = Literal["white", "drop"]
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Orientation -> Pillow's number of the transposition that undoes it."""
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def decoder_id() -> str:
    """The build that decodes here: versions of Pillow and of its libraries."""
    import_pillow()
    from PIL import __version__, features

    libraries = {name: features.version(name) for name in ("libjpeg_turbo", "jpg", "zlib", "webp", "avif")}
    return ",".join([f"pillow {__version__}", *(f"{name} {found}" for name, found in libraries.items() if found)])


def decode_image(content: bytes | memoryview, *, most_pixels: int, alpha: Alpha = "white") -> Any:
    """Decode an image.

    Args:
        content: Its bytes.
        most_pixels: Refuse an image with more.
        alpha: What becomes of transparent pixels: they turn white, or keep their hidden color.

    Raises:
        ImageUnreadable: It is no image, is damaged or cut off, or is not as large as its header says.
    """
    image_module = import_pillow()
    header = header_of(content)
    check_pixels(header, most_pixels)
    try:
        opened = image_module.open(io.BytesIO(content))
        if opened.size != (header.stored_width, header.stored_height):
            raise ImageUnreadable(
                f"its header says {header.stored_width} x {header.stored_height} pixels, its decoder "
                f"{opened.width} x {opened.height}"
            )
        opened.load()
        image = _in_rgb(opened, alpha)
    except ImageUnreadable:
        raise
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they meet
        message = " ".join(str(error).split())
        raise ImageUnreadable(f"it does not decode ({type(error).__name__}: {message[:120]})") from None
    turn = None if header.kind == "tiff" else _TURNS.get(header.orientation)  # Pillow turns that kind itself
    return image if turn is None else image.transpose(turn)


def check_pixels(header: ImageHeader, most_pixels: int) -> None:
    """Raise ImageUnreadable for a header of too many pixels."""
    pixels = header.stored_width * header.stored_height
    if pixels > most_pixels:
        raise ImageUnreadable(
            f"its header says {header.stored_width} x {header.stored_height} = {pixels} pixels, more than most_pixels "
            f"{most_pixels}"
        )


def grey_image(width: int, height: int) -> Any:
    """What stands for an image that cannot be read: all pixels 128."""
    return import_pillow().new("RGB", (width, height), (128, 128, 128))


def _in_rgb(image: Any, alpha: Alpha) -> Any:
    image_module = import_pillow()
    mode = image.mode
    if mode.startswith("I;16") or mode == "I":
        levels = np.asarray(image).astype(np.int64)
        return image_module.fromarray(np.clip(levels >> 8, 0, 255).astype(np.uint8)).convert("RGB")
    if mode in _WITH_ALPHA or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        if alpha == "drop":
            return with_alpha.convert("RGB")
        white = image_module.new("RGBA", with_alpha.size, (255, 255, 255, 255))
        return image_module.alpha_composite(white, with_alpha).convert("RGB")
    return image if mode == "RGB" else image.convert("RGB")


# --- Bytes of an image -> its patches, as a step delivers them.
#
# Pure, and total: an image that cannot be read is an error that says why, or grey patches of the planned size.

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
