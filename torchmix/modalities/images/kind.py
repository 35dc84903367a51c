"""Images, as the seam asks for them: what is of images alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import Column
from torchmix.errors import ItemUnreadable, OptionError
from torchmix.modalities.images.decode import check_pixels, decode_image, decoder_id, grey_image
from torchmix.modalities.images.header import HEADER_VERSION, header_of, import_pillow, read_header
from torchmix.modalities.images.rules import MOST_SIDE, SizeRule, rule_of
from torchmix.modalities.modality import (
    Alter,
    DraftOfKind,
    ItemGrids,
    ItemSizes,
    Measures,
    Modality,
    ReadRange,
    TowerForm,
)
from torchmix.modalities.pictures import levels_of_words, picture_of_patches, png_image
from torchmix.recipe.images import MAX_PIXELS, MIN_PIXELS
from torchmix.recipe.structs import Images

GRID = ("segments", "grid_height", "grid_width")
"""Columns of the catalog: pictures that an image becomes, and rows and columns of patches in each."""
TOKEN_PIXELS = 28 * 28
"""Pixels that become a token by the default rule."""
_BEGINS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_AVIF = (b"ftypavif", b"ftypavis")
"""The fifth byte to the twelfth of an AVIF image, or of a sequence of them."""
_MEDIA = {b"\xff\xd8": "jpeg", b"\x89P": "png", b"GI": "gif", b"RI": "webp"}
"""By the first bytes of an image, what a browser calls it."""


class ImageModality(Modality, frozen=True, kw_only=True):
    """The images of a source; a unit is a patch."""

    words: Images
    rule: SizeRule

    kind: ClassVar[str] = Images.kind
    header_id: ClassVar[str] = f"images-{HEADER_VERSION}"
    measured: ClassVar[tuple[str, ...]] = ("width", "height")
    measured_in: ClassVar[str] = "pixels"
    units: ClassVar[str] = "patches"
    segments: ClassVar[str | None] = "segments"
    unit_array: ClassVar[str] = "pixel_values"
    unit_type: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)
    item_arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"grid_thw": GRID}
    stand_in_name: ClassVar[str] = "a grey image"
    builds_differ: ClassVar[str] = "pixels of JPEG may differ by 1 or 2 levels"
    suffixes: ClassVar[str] = "jpe?g|png|webp|avif|gif|bmp|tiff?"
    column_words: ClassVar[str] = "image|img|picture|photo"
    draft: ClassVar[DraftOfKind] = DraftOfKind(
        columns=("image", "images", "img", "jpg", "jpg|png", "png", "jpeg", "picture", "pixel_values", "image_path"),
        tokens=(
            ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),  # Qwen
            ("<IMG_CONTEXT>", "<img>", "</img>"),  # InternVL
            ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),  # Gemma
            ("<image>",),  # LLaVA
        ),
        options=(("patch", "14"), ("merge", "2")),
        note="images by Qwen2-VL's rule of sizes; docs/images.md has others",
        module=(
            "vision:                     # the encoder of the images: all ranks, each its part; docs/images.md",
            "  items: image",
            "  sizes: patches",
            "  near_text: 5%             # how far above the least possible a rank's work may be, so fewer rows travel",
            "  # what an image costs: write the dimensions of your encoder",
            "  model: {layers: 32, hidden: 1280, ffn: 5120, heads: 16, patch: 14, merge: 2, out: 4096}",
        ),
    )

    @classmethod
    def of(cls, words: Images, where: str) -> ImageModality:
        """See `Modality`."""
        return cls(words=words, rule=rule_of(words, where))

    def measure(self, read: ReadRange, num_bytes: int) -> Measures:
        """See `Modality`; what a viewer shows, after turning."""
        header = read_header(read, num_bytes)
        check_pixels(header, self.words.most_pixels)
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
    def rule_id(self) -> str:
        """See `Modality`."""
        return self.rule.rule_id

    @property
    def bounds_id(self) -> str:
        """See `Modality`."""
        return str(self.words.most_pixels)

    @property
    def decoding_id(self) -> str:
        """See `Modality`."""
        words, plain = self.words, Images(column="-", token=0)
        fit = "" if words.fixed is None else f"{words.fixed.fit} {words.fixed.shortest}"
        values = [(getattr(words, key), getattr(plain, key)) for key in ("resize", "filter", "fill")]
        altered = [str(value) for value, usual in values if value != usual]
        return ":".join(filter(None, (words.alpha, *altered, fit)))

    @property
    def unit_values(self) -> int:
        """See `Modality`; three channels of a square."""
        return 3 * self.rule.patch**2

    def grids(self, columns: Mapping[str, Column], items: Int64Array) -> ItemGrids:
        """See `Modality`; an image of several segments has no grid, nor one whose tokens are no blocks of patches."""
        merge = int(getattr(self.rule, "merge", 1))
        segments, height, width = (np.asarray(columns[key][items], np.int64) for key in GRID)
        is_one = segments == 1
        return ItemGrids(frames=segments * is_one, rows=height // merge * is_one, columns=width // merge * is_one)

    def tower_form(self) -> TowerForm:
        """See `Modality`; rows of patches, or whole pictures."""
        words, patch = self.words, self.rule.patch
        levels = levels_of_words(words, words.resize)
        picture = self.rule.picture if words.tower == "pictures" else None
        if picture is None:
            shape, area = (self.unit_values * words.frames,), patch**2
            return TowerForm(split=(3, area), order=(0, 1), shape=shape, levels=levels, repeat=words.frames)
        merge = int(getattr(self.rule, "merge", 1))
        rows, columns = (side // (patch * merge) for side in picture)
        return TowerForm(
            split=(rows, columns, merge, merge, 3, patch, patch),
            order=(4, 0, 2, 5, 1, 3, 6),
            shape=(3, rows * merge * patch, columns * merge * patch),
            levels=levels,
            channel_axis=4,
            padded=(3, *picture),
        )

    def decode(self, content: bytes | memoryview, measures: Measures, alter: Alter | None = None) -> NDArray[np.uint8]:
        """See `Modality`; what is altered are the pixels, uint8 [height, width, 3], before a size rule sees them."""
        image: Any = decode_image(content, most_pixels=self.words.most_pixels, alpha=self.words.alpha)
        self.check_measures(image.size, measures)
        if alter is not None:
            image = import_pillow().fromarray(alter(np.array(image)))
        return self.rule.segments(image)

    def may_become(self, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """See `Modality`; any size of which the size rule makes as many tokens and patches."""
        if before == after:
            return True
        if len(after) != 3 or after[2] != 3 or not all(1 <= side <= MOST_SIDE for side in after[:2]):
            return False
        if self.rule.fault(after[1], after[0]):
            return False
        sides = np.array([before[:2], after[:2]], np.int64)
        sizes = self.sizes({"height": sides[:, 0], "width": sides[:, 1]})
        return all(one == other for one, other in (sizes.tokens, *sizes.columns.values()))

    def stand_in(self, measures: Measures) -> NDArray[np.uint8]:
        """See `Modality`."""
        return self.rule.segments(grey_image(*measures))

    def pictures(self, units: NDArray[Any], columns: Mapping[str, int]) -> list[NDArray[np.uint8]]:
        """See `Modality`; each of its segments, such as tiles."""
        segments, rows, across = (columns[key] for key in GRID)
        merge = int(getattr(self.rule, "merge", 1))
        each = units.reshape(segments, rows * across, -1)
        return [picture_of_patches(one, rows, across, self.rule.patch, merge) for one in each]

    def preview(self, content: bytes | memoryview) -> str:
        """See `Modality`; what browsers do not show comes as PNG, where it decodes."""
        if not self.media_type(content).endswith("octet-stream"):
            return super().preview(content)
        try:
            image = decode_image(content, most_pixels=self.words.most_pixels, alpha=self.words.alpha)
        except (ItemUnreadable, OptionError):
            return super().preview(content)
        return png_image(np.asarray(image))

    @classmethod
    def build_id(cls) -> str:
        """See `Modality`."""
        return decoder_id()

    @classmethod
    def media_type(cls, content: bytes | memoryview) -> str:
        """See `Modality`."""
        is_avif = bytes(content[4:12]) in _AVIF
        return f"image/{'avif' if is_avif else _MEDIA.get(bytes(content[:2]), 'octet-stream')}"

    @classmethod
    def seems_item(cls, value: bytes) -> bool:
        """See `Modality`."""
        return value.startswith(_BEGINS) or (value[:4], value[8:12]) == (b"RIFF", b"WEBP") or value[4:12] in _AVIF

    @classmethod
    def usual_tokens(cls, value: bytes) -> float:
        """See `Modality`."""
        try:
            header = header_of(value)
        except ItemUnreadable:
            return MIN_PIXELS / TOKEN_PIXELS
        return min(MAX_PIXELS, max(MIN_PIXELS, header.width * header.height)) / TOKEN_PIXELS
