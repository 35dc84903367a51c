"""Bytes of images that a rank got -> patches, in the process of the rank.

In: the arrays of modules of one rank, of which some hold files in the place of patches. Out: the arrays as they are
where the worker decodes. Must hold: the same bits, in the same order. A bad image is an error of this rank, or grey
where its source masks bad rows. Cost: that of decoding, in several threads of the loader's background.

    MODULE.file/content     uint8             files of the rank's images, end to end
    MODULE.item/file_bytes  int64 [n]         bytes of each
    MODULE.item/planned     int32 [n, 3]      width, height, and number among the images of the row
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.reader.images.patches import decode_threads
from torchmix.recipe.parts import Part
from torchmix.recipe.source.bad_rows import masked_sources
from torchmix.transform.images.make import ImageTransform, PlannedImage

CONTENT, FILE_BYTES, PLANNED = "file/content", "item/file_bytes", "item/planned"


class RankDecoder:
    """Decodes for one rank."""

    def __init__(self, part: Part) -> None:
        """Nothing is imported before the first image comes."""
        self._part = part
        self._masked = masked_sources(part.sources)
        self._names = sorted(part.sources)
        self._transforms: dict[str, ImageTransform] = {}
        self.images_decoded = 0

    def decoded(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The arrays of a rank's modules, with `unit/pixel_values` in the place of files.

        Raises:
            CorruptPage: An image cannot be read as it was indexed.
        """
        found = dict(arrays)
        for name in [name for name in arrays if name.endswith(f".{CONTENT}")]:
            module = name.removesuffix(CONTENT)
            content, file_bytes, planned = (found.pop(module + key) for key in (CONTENT, FILE_BYTES, PLANNED))
            source, row = found[f"{module}item/source"], found[f"{module}item/row"]
            found[f"{module}unit/pixel_values"] = self._patches(content, file_bytes, planned, source, row)
        return found

    def _patches(
        self,
        content: NDArray[Any],
        file_bytes: NDArray[Any],
        planned: NDArray[Any],
        source: NDArray[Any],
        row: NDArray[Any],
    ) -> NDArray[np.uint8]:
        stops = np.cumsum(file_bytes, dtype=np.int64).tolist()
        held = np.ascontiguousarray(content).data
        asked = [
            (
                PlannedImage(source=self._names[s], row=r, number=number, width=width, height=height),
                held[stop - count : stop],
            )
            for s, r, (width, height, number), stop, count in zip(
                source.tolist(), row.tolist(), planned.tolist(), stops, file_bytes.tolist(), strict=True
            )
        ]
        for name in {image.source for image, _ in asked} - self._transforms.keys():
            images = self._part.sources[name].images
            assert images is not None, "it has images"
            self._transforms[name] = ImageTransform.of(name, images)
        self.images_decoded += len(asked)
        with ThreadPoolExecutor(decode_threads(), "torchmix-images") as pool:
            made = list(pool.map(self._make, asked))
        width = next((one.patch_values for one in self._transforms.values()), None) or self._patch_values()
        return np.concatenate([np.zeros((0, width), np.uint8), *made])

    def _make(self, asked: tuple[PlannedImage, memoryview]) -> NDArray[np.uint8]:
        planned, content = asked
        is_masked = planned.source in self._masked
        return self._transforms[planned.source].patches_of(planned, content, is_masked=is_masked)

    def _patch_values(self) -> int:
        """Values of a patch, which all sources have alike."""
        return next(
            ImageTransform.of(name, source.images).patch_values
            for name, source in self._part.sources.items()
            if source.images is not None
        )
