"""Images as documents of their patches: what a loader gives that decodes for others.

In: an open catalog of sources with images, and pieces of such documents: source, number of the image, first value and
values. Out: the values of patches, as the step delivers them. Must hold: pure, as the transform is; a bad image is an
error, or grey where its source masks bad rows. Cost: that of decoding, in several threads; an image is asked for in
parts of a message's size, so the last ones are kept. A `StepReader` of these documents is what `ImageReader` asks where
loaders decode.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.page_table import PageTable
from torchmix.catalog.settings import name_of_images
from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.store import Catalog, SourceCatalog, catalog_fingerprint
from torchmix.errors import LoaderClosed, PlanError
from torchmix.formats.images.headers import IMAGE
from torchmix.reader.images.image_reader import ImageReader
from torchmix.reader.pieces.piece_copy import Scratch, Tokens
from torchmix.reader.protocol import StepImages
from torchmix.transform.images.decode import decoder_id
from torchmix.transform.images.make import ImageTransform, PlannedImage

logger = logging.getLogger(__name__)

KEPT_BYTES = 128 << 20
"""Patches of the last images."""
MOST_THREADS = 8


def decode_threads() -> int:
    """Threads that decode in one process; Pillow works without Python's lock."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def patch_catalog(catalog: Catalog) -> Catalog:
    """The images of a catalog's sources as sources of patches: a row is an image, a token a value of a patch.

    The transform of such a source names the build that decodes, so loaders and clients of two builds refuse each other.
    """
    sources: dict[str, SourceCatalog] = {}
    for name in sorted(catalog.sources):
        texts = catalog.sources[name]
        if texts.images is not None:
            values = ImageTransform.of(name, texts.images).patch_values
            sources[name_of_images(name)] = _as_patches(texts, values)
    return Catalog(directory=catalog.directory, sources=sources, fingerprint=catalog_fingerprint(sources.values()))


def _as_patches(texts: SourceCatalog, patch_values: int) -> SourceCatalog:
    """One source; each image is a page."""
    table = texts.sizes.items[IMAGE]
    tokens = (np.asarray(table.sizes["patches"], np.int64) * patch_values).astype(np.int32)
    count = len(tokens)
    borders = np.array([0, count], np.int64)
    numbers = np.concatenate([np.arange(count), [0]]).astype(np.uint32)
    none = np.zeros(0, np.uint32)
    pages = PageTable(
        page_start=np.zeros(count + 1, np.uint32),
        page_row=numbers,
        tail_bytes=none,
        page_crc=none,
        chunk_page=borders,
        chunk_row=borders,
        chunk_offset=np.zeros(1, np.int64),
        chunk_bytes=np.array([int(tokens.sum(dtype=np.int64))], np.int64),
        file_of_chunk=np.zeros(1, np.int32),
        companion_offset=np.full(1, -1, np.int64),
        companion_bytes=np.zeros(1, np.int64),
        companion_crc=none,
        kind=np.zeros(1, np.int8),
    )
    name = name_of_images(texts.name)
    alpha = "" if texts.images is None else texts.images.alpha
    return replace(
        texts,
        name=name,
        transform_id=f"patches-1:{texts.transform_id}:{alpha}:{decoder_id()}",
        pages=pages,
        sizes=SourceSizes(first_row_of_page=pages.first_row, tokens=tokens, window_pages=1),
        fingerprint=f"patches of {texts.fingerprint}",
        num_documents=count,
    )


class PatchReader:
    """Decodes images of files that this process reads; has the methods of a `StepReader`, for one thread at a time."""

    def __init__(self, catalog: Catalog, directory: Path, *, masked: Collection[str], cache_bytes: int) -> None:
        """Open the columns of images; arguments as those of `ImageReader`.

        Args:
            catalog: The sources, of texts.
            directory: The recipe's folder.
            masked: Names of sources whose bad images become grey.
            cache_bytes: Pages of images kept.
        """
        self._names = sorted(name for name, source in catalog.sources.items() if source.images is not None)
        self._images = ImageReader(catalog, directory, cache_bytes=cache_bytes)
        self._masked = frozenset(masked)
        self._kept: OrderedDict[tuple[int, int], NDArray[np.uint8]] = OrderedDict()
        self._kept_bytes = self._num_decoded = self._bytes_served = 0
        self._pool = ThreadPoolExecutor(decode_threads(), "torchmix-images")
        self._is_closed = False

    @property
    def images(self) -> StepImages | None:
        """None: they are its documents."""
        return None

    def read(
        self,
        source: NDArray[np.integer[Any]],
        rows: Int64Array,
        starts: Int64Array,
        tokens: Int64Array,
        *,
        places: Int64Array,
        num_places: int,
        epochs: Int64Array | None = None,
        scratch: Scratch | None = None,
    ) -> Tokens:
        """Values of patches, uint8; arguments and errors as those of `Reader.read`.

        Raises:
            PlanError: There is no such image, or it has fewer values.
            CorruptPage: An image cannot be read as it was indexed.
        """
        if self._is_closed:
            raise LoaderClosed("the reader was used after close(); make a new one")
        out = np.zeros(num_places, np.uint8)
        successors = np.zeros(len(rows), np.int64)
        patches = self._patches(sorted(set(zip(source.tolist(), rows.tolist(), strict=True))))
        for k, (s, row, start, count, place) in enumerate(
            zip(source.tolist(), rows.tolist(), starts.tolist(), tokens.tolist(), places.tolist(), strict=True)
        ):
            values = patches[s, row]
            if not 0 <= start <= start + count <= len(values):
                raise PlanError(f"image {row} of {self._names[s]!r} has {len(values)} values, not [{start}, +{count})")
            out[place : place + count] = values[start : start + count]
            successors[k] = values[start + count] if start + count < len(values) else 0
        self._bytes_served += int(tokens.sum())
        return Tokens(values=out, successors=successors)

    def _patches(self, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], NDArray[np.uint8]]:
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        for s in sorted({s for s, _ in wanted}):
            name = self._names[s]
            table = self._images.table(name)
            items = np.array([item for of, item in wanted if of == s and (s, item) not in found], np.int64)
            if not len(items):
                continue
            if items.min() < 0 or items.max() >= len(table.tokens):
                raise PlanError(f"{name!r} has {len(table.tokens)} images, not {items.min()} to {items.max()}")
            planned = [PlannedImage.of(name, table, int(item)) for item in items.tolist()]
            transform, is_masked = self._images.transform(name), name in self._masked
            for item, made in zip(
                items.tolist(),
                self._pool.map(
                    lambda pair, make=transform, grey=is_masked: make.patches_of(*pair, is_masked=grey),
                    zip(planned, self._images.read(name, items), strict=True),
                ),
                strict=True,
            ):
                found[s, item] = made.reshape(-1)
        self._num_decoded += sum(key not in self._kept for key in found)
        self._keep(found)
        return found

    def _keep(self, found: dict[tuple[int, int], NDArray[np.uint8]]) -> None:
        """Keep what was asked for last."""
        for key, values in found.items():
            if key not in self._kept:
                self._kept_bytes += values.nbytes
            self._kept[key] = values
            self._kept.move_to_end(key)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, values = self._kept.popitem(last=False)
            self._kept_bytes -= values.nbytes

    def pages_at_once(self, source: int) -> int:
        """Nothing is decoded ahead."""
        return 1

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """Do nothing: images are read when they are asked for."""

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """Do nothing: the last images are kept anyway."""

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """Do nothing, as `hold`."""

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """Do nothing: images have no windows."""

    def stats(self) -> dict[str, int | float]:
        """Figures since the reader was made."""
        return {"bytes_served": self._bytes_served, "images_decoded": self._num_decoded}

    def close(self) -> None:
        """Give back all that it holds; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.shutdown(cancel_futures=True)
            self._images.close()
            self._kept.clear()
