"""Videos, as the seam asks for them: what is of videos alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import Column
from torchmix.errors import ItemUnreadable, OptionError
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
from torchmix.modalities.pictures import (
    fault_of_ratio,
    levels_of_words,
    patches_in_rows,
    picture_of_patches,
    png_image,
    resized_to_blocks,
)
from torchmix.modalities.videos.frames import frames_of
from torchmix.modalities.videos.packets import HEADER_VERSION, VideoHeader, container_of, decoder_id, read_header
from torchmix.recipe.videos import Videos

GRID = ("grid_time", "grid_height", "grid_width")
"""Columns of the catalog: patches in time, and rows and columns of patches in each."""
Pictures = Iterable[NDArray[np.uint8]]
"""Frames, uint8 [height, width, 3]."""
USUAL_TOKENS = 4_000.0
_SHOWN = 8
"""Frames of a preview."""


class VideoModality(Modality, frozen=True, kw_only=True):
    """The videos of a source; a unit is a patch of some frames."""

    words: Videos

    kind: ClassVar[str] = Videos.kind
    header_id: ClassVar[str] = f"videos-{HEADER_VERSION}"
    measured: ClassVar[tuple[str, ...]] = ("frames", "milliseconds", "width", "height")
    units: ClassVar[str] = "patches"
    segments: ClassVar[str | None] = "grid_time"
    unit_array: ClassVar[str] = "pixel_values_videos"
    unit_type: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)
    item_arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"video_grid_thw": GRID, "milliseconds": ("milliseconds",)}
    stand_in_name: ClassVar[str] = "grey frames"
    builds_differ: ClassVar[str] = "pixels of frames may differ by some levels"
    suffixes: ClassVar[str] = "mp4|m4v|mov|webm|mkv"
    column_words: ClassVar[str] = "video|clip|mp4|webm|mkv"
    shown_by: ClassVar[str] = "video"
    draft: ClassVar[DraftOfKind] = DraftOfKind(
        columns=("video", "videos", "clip", "mp4", "webm", "mkv", "mp4|webm|mkv", "video_path"),
        tokens=(("<|video_pad|>", "<|vision_start|>", "<|vision_end|>"), ("<video>",)),
        options=(("rate", "2"), ("patch", "14"), ("merge", "2")),
        note="videos by Qwen2-VL's rules of frames and sizes; docs/videos.md says more",
        module=(
            "watching:                   # the encoder of the videos: all ranks, each its part; docs/videos.md",
            "  items: video",
            "  sizes: patches",
            "  near_text: 5%             # how far above the least possible a rank's work may be, so fewer rows travel",
            "  # what a video costs: write the dimensions of your encoder",
            "  model: {layers: 32, hidden: 1280, ffn: 5120, heads: 16, patch: 14, merge: 2, out: 4096}",
        ),
    )

    def measure(self, read: ReadRange, num_bytes: int) -> Measures:
        """See `Modality`."""
        bounds = {"most_pixels": self.words.most_pixels, "most_seconds": self.words.most_seconds}
        header = read_header(read, num_bytes, **bounds)
        fault = fault_of_ratio(header.width, header.height)
        if fault:
            raise ItemUnreadable(fault)
        return tuple(header)

    def sizes(self, measures: Mapping[str, Column]) -> ItemSizes:
        """See `Modality`."""
        frames, milliseconds, width, height = (np.asarray(measures[key], np.int64) for key in self.measured)
        seen = self.seen(frames, milliseconds)
        to_width, to_height = resized_to_blocks(
            width,
            height,
            block=self.words.patch * self.words.merge,
            least=self.words.min_pixels,
            most=self.words.max_pixels,
        )
        time, rows = -(-seen // self.words.temporal_patch), to_height // self.words.patch
        columns = to_width // self.words.patch
        grid = {"grid_time": time, "grid_height": rows, "grid_width": columns, "patches": time * rows * columns}
        return ItemSizes(tokens=time * rows * columns // self.words.merge**2, columns=grid)

    def seen(self, frames: Int64Array, milliseconds: Int64Array) -> Int64Array:
        """How many frames of n videos are seen; as Qwen2-VL's processor of videos counts them.

        A video with fewer frames than a patch gives all that it has; the last one is repeated.
        """
        block = self.words.temporal_patch
        most = np.minimum(self.words.most_frames, frames) // block * block
        wanted = frames / (frames * 1000 / milliseconds) * self.words.rate  # in its order of operations
        found = np.minimum(np.minimum(np.maximum(wanted, self.words.least_frames), most), frames)
        whole = (found // block * block).astype(np.int64)
        return np.where(whole > 0, whole, np.minimum(frames, block))

    @property
    def rule_id(self) -> str:
        """See `Modality`."""
        words = self.words
        numbers = (words.rate, words.least_frames, words.most_frames, words.temporal_patch, words.patch, words.merge)
        return ":".join(map(str, (*numbers, words.min_pixels, words.max_pixels)))

    @property
    def bounds_id(self) -> str:
        """See `Modality`."""
        return f"{self.words.most_pixels}:{self.words.most_seconds}"

    @property
    def unit_values(self) -> int:
        """See `Modality`; three channels of a square, of each frame."""
        return 3 * self.words.temporal_patch * self.words.patch**2

    def grids(self, columns: Mapping[str, Column], items: Int64Array) -> ItemGrids:
        """See `Modality`."""
        time, rows, across = (np.asarray(columns[key][items], np.int64) for key in GRID)
        return ItemGrids(
            frames=time,
            rows=rows // self.words.merge,
            columns=across // self.words.merge,
            milliseconds=np.asarray(columns["milliseconds"][items], np.int64),
        )

    def tower_form(self) -> TowerForm:
        """See `Modality`; rows of patches."""
        split = (3, self.unit_values // 3)
        return TowerForm(
            split=split, order=(0, 1), shape=(self.unit_values,), levels=levels_of_words(self.words, "tensor")
        )

    def decode(self, content: bytes | memoryview, measures: Measures, alter: Alter | None = None) -> NDArray[np.uint8]:
        """See `Modality`; what is altered are the frames that are seen, uint8 [frames, height, width, 3], scaled."""
        held = memoryview(content)
        self.check_measures(self.measure(lambda at, count: bytes(held[at : at + count]), len(held)), measures)
        header = VideoHeader(*measures)
        seen, width, height = self._planned(measures)
        numbers = [number * header.frames // seen for number in range(seen)]
        frames: Pictures = frames_of(content, header, numbers, width=width, height=height)
        if alter is not None:
            whole = np.empty((seen, height, width, 3), np.uint8)
            for place, frame in enumerate(frames):
                whole[place] = frame
            frames = alter(whole)
        return self._patches(frames, seen, width, height)

    def _planned(self, measures: Measures) -> tuple[int, int, int]:
        """Frames that are seen, and the width and height that they are scaled to."""
        held = {name: np.array([value]) for name, value in zip(self.measured, measures, strict=True)}
        columns = self.sizes(held).columns
        seen = int(self.seen(held["frames"], held["milliseconds"])[0])
        width, height = (int(columns[key][0]) * self.words.patch for key in ("grid_width", "grid_height"))
        return seen, width, height

    def _patches(self, frames: Pictures, seen: int, width: int, height: int) -> NDArray[np.uint8]:
        """Patches in the order of Qwen2-VL's processor: by time, block and place; channels, then frames in each."""
        block, area = self.words.temporal_patch, self.words.patch**2
        time, patches = -(-seen // block), width * height // area
        found = np.empty((time, patches, 3, block, area), np.uint8)
        last = None
        for number, frame in enumerate(frames):
            last = patches_in_rows(frame, self.words.patch, self.words.merge).reshape(patches, 3, area)
            found[number // block, :, :, number % block] = last
        if last is not None and seen % block:
            found[-1, :, :, seen % block :] = last[:, :, None]
        return found.reshape(time * patches, self.unit_values)

    def stand_in(self, measures: Measures) -> NDArray[np.uint8]:
        """See `Modality`."""
        seen, width, height = self._planned(measures)
        grey = np.full((height, width, 3), 128, np.uint8)
        return self._patches((grey for _ in range(seen)), seen, width, height)

    def preview(self, content: bytes | memoryview) -> str:
        """See `Modality`; with some of its frames, where it decodes and Pillow is installed."""
        held, shown = memoryview(content), ""
        try:
            measures = self.measure(lambda at, count: bytes(held[at : at + count]), len(held))
            header = VideoHeader(*measures)
            numbers = sorted({number * header.frames // _SHOWN for number in range(_SHOWN)})
            scale = max(header.width, header.height) / 120
            sides = (max(1, round(header.width / scale)), max(1, round(header.height / scale)))
            shown = "".join(map(png_image, frames_of(content, header, numbers, width=sides[0], height=sides[1])))
        except ItemUnreadable:
            pass
        return shown + super().preview(content)

    def pictures(self, units: NDArray[Any], columns: Mapping[str, int]) -> list[NDArray[np.uint8]]:
        """See `Modality`; the first frame of some patches in time."""
        time, rows, across = (columns[key] for key in GRID)
        frames = units.reshape(time, rows * across, 3, self.words.temporal_patch, self.words.patch**2)[:, :, :, 0]
        some = sorted({number * time // _SHOWN for number in range(_SHOWN)})
        patches = (frames[number].reshape(rows * across, -1) for number in some)
        return [picture_of_patches(one, rows, across, self.words.patch, self.words.merge) for one in patches]

    @classmethod
    def build_id(cls) -> str:
        """See `Modality`."""
        return decoder_id()

    @classmethod
    def media_type(cls, content: bytes | memoryview) -> str:
        """See `Modality`."""
        return "video/mp4" if container_of(bytes(content[:64])) == "mov" else "video/webm"

    @classmethod
    def seems_item(cls, value: bytes) -> bool:
        """See `Modality`; pictures of HEIF and AVIF begin as an MP4 does."""
        is_picture = value[4:8] == b"ftyp" and value[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
        return container_of(value[:64]) is not None and not is_picture

    @classmethod
    def usual_tokens(cls, value: bytes) -> float:
        """See `Modality`."""
        modality = cls(words=Videos(column="-", token=0))
        try:
            measures = modality.measure(lambda at, count: value[at : at + count], len(value))
        except (ItemUnreadable, OptionError):
            return USUAL_TOKENS
        held = {name: np.array([one]) for name, one in zip(cls.measured, measures, strict=True)}
        return float(modality.sizes(held).tokens[0])
