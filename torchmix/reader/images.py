"""Images of sources -> their bytes, or their patches where a loader decodes for others."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.page_table import PageTable
from torchmix.catalog.settings import name_of_images
from torchmix.catalog.sizes import ItemTable, SourceSizes
from torchmix.catalog.store import Catalog, SourceCatalog, catalog_fingerprint, open_source
from torchmix.errors import CatalogMissing, CatalogStale, LoaderClosed, PlanError, RecipeError
from torchmix.formats.images import IMAGE, image_path
from torchmix.reader.piece_copy import Scratch, Tokens
from torchmix.reader.protocol import StepImages, StepReader
from torchmix.reader.reader import Reader
from torchmix.storage.store_file import opened
from torchmix.storage.stores import place_of
from torchmix.transform.images.decode import ImageTransform, PlannedImage, decoder_id

# --- Images of sources -> their bytes.
#
# What is read is what was indexed, by the same checks as texts; each image of a call is read once.

CACHE_BYTES = 256 << 20


class ImageReader:
    """Reads images of the sources of a catalog; implements `StepImages`."""

    def __init__(
        self,
        catalog: Catalog,
        directory: Path,
        *,
        cache_bytes: int = CACHE_BYTES,
        open_columns: Callable[[Catalog], StepReader] | None = None,
        patches: StepReader | None = None,
    ) -> None:
        """Open the columns of images; no file of data is opened yet.

        Args:
            catalog: The sources, open; at least one has images.
            directory: The recipe's folder.
            cache_bytes: Pages of images kept.
            open_columns: What reads the columns of images, in the place of a reader of their files.
            patches: What gives patches of images that others decode, a `StepReader` of `patches.patch_catalog`; then
                no bytes of images are read here.

        Raises:
            CatalogMissing, CatalogStale: The images are not indexed as the texts are.
            RecipeError: Sources have patches of different sizes.
        """
        self._texts = {name: source for name, source in catalog.sources.items() if source.images is not None}
        self._columns = image_columns(catalog)
        self._patches = patches
        self._reader: StepReader
        if patches is not None:
            self._reader = patches
        elif open_columns is None:
            self._reader = Reader(self._columns, directory, cache_bytes=cache_bytes, seed=0)
        else:
            self._reader = open_columns(self._columns)
        self._number_of = {name: i for i, name in enumerate(self._columns.sources)}
        self._shift = {
            name: _shifts(source, self._columns.sources[name_of_images(name)]) for name, source in self._texts.items()
        }
        self._folder: dict[str, str | None] = {}
        self._transforms: dict[str, ImageTransform] = {}
        for name, source in self._texts.items():
            assert source.images is not None, "chosen for it"
            folder = source.images.folder
            self._folder[name] = None if folder is None else place_of(directory, folder)
            self._transforms[name] = ImageTransform.of(name, source.images)
        sizes = {name: transform.rule.patch for name, transform in self._transforms.items()}
        if len(set(sizes.values())) > 1:
            raise RecipeError(f"sources have patches of different sizes, {sizes}; a model has one", "sources")
        self.images_read = 0
        """Images given out."""
        self.bytes_read = 0
        """Their bytes."""

    @property
    def patch_values(self) -> int:
        """See `StepImages`."""
        return next(iter(self._transforms.values())).patch_values

    def table(self, source: str) -> ItemTable:
        """See `StepImages`."""
        return self._texts[source].sizes.items[IMAGE]

    def transform(self, source: str) -> ImageTransform:
        """See `StepImages`."""
        return self._transforms[source]

    def merge(self, source: str) -> int:
        """See `StepImages`."""
        return int(getattr(self._transforms[source].rule, "merge", 1))

    def read(self, source: str, images: Int64Array) -> list[memoryview]:
        """The bytes of some images of a source.

        Args:
            source: Its name.
            images: [n] their numbers in the catalog of the texts.

        Raises:
            SourceChanged, SourceUnreadable, CorruptPage: As `Reader.read`.
        """
        name = name_of_images(source)
        first, shift = self._shift[source]
        item = images + shift[np.searchsorted(first, images, side="right") - 1]
        table = self._columns.sources[name].sizes.items[IMAGE]
        row = np.searchsorted(np.asarray(table.first_item_of_row), item, side="right") - 1
        count = np.asarray(table.tokens[item], np.int64)
        places = np.cumsum(count) - count
        read = self._reader.read(
            np.full(len(item), self._number_of[name], np.int32),
            row.astype(np.int64),
            np.asarray(table.offset[item], np.int64),
            count,
            places=places,
            num_places=int(count.sum()),
        )
        content = memoryview(np.ascontiguousarray(read.values, np.uint8).tobytes())
        values = [content[start : start + n] for start, n in zip(places.tolist(), count.tolist(), strict=True)]
        folder = self._folder[source]
        if folder is not None:
            values = [_content(source, folder, bytes(value)) for value in values]
        self.images_read += len(values)
        self.bytes_read += sum(map(len, values))
        return values

    @property
    def gives_patches(self) -> bool:
        """See `StepImages`."""
        return self._patches is not None

    def read_patches(self, source: str, images: Int64Array) -> list[NDArray[np.uint8]]:
        """See `StepImages`."""
        assert self._patches is not None, "loaders decode"
        width = self._transforms[source].patch_values
        count = np.asarray(self.table(source).sizes["patches"], np.int64)[images] * width
        places = np.cumsum(count) - count
        number = self._number_of[name_of_images(source)]
        read = self._patches.read(
            np.full(len(images), number, np.int32),
            images,
            np.zeros(len(images), np.int64),
            count,
            places=places,
            num_places=int(count.sum()),
        )
        values = read.values.astype(np.uint8)  # a copy: the reader's memory is used again
        self.images_read += len(images)
        self.bytes_read += len(values)
        return [
            values[start : start + n].reshape(-1, width)
            for start, n in zip(places.tolist(), count.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Give back all that it holds."""
        self._reader.close()


def image_columns(catalog: Catalog) -> Catalog:
    """The columns of images of a catalog's sources, as sources of bytes.

    Raises:
        CatalogMissing: A column is not indexed.
    """
    folder = catalog.directory
    names = [name_of_images(name) for name, source in catalog.sources.items() if source.images is not None]
    manifest = read_manifest(folder)
    sources: dict[str, SourceCatalog] = {}
    for name in sorted(names):
        if name not in manifest.sources:
            raise CatalogMissing(f"the catalog at {folder} lacks {name!r}; run torchmix index")
        sources[name] = open_source(folder, name, manifest.sources[name])
    return Catalog(directory=folder, sources=sources, fingerprint=catalog_fingerprint(sources.values()))


def _shifts(texts: SourceCatalog, column: SourceCatalog) -> tuple[Int64Array, Int64Array]:
    """What to add to numbers of images of the texts to get those of the column: first image of each file, and sum."""
    file_of_path = {file.path: file for file in column.files}
    first_of_texts = np.asarray(texts.sizes.items[IMAGE].first_item_of_row)
    first_of_column = np.asarray(column.sizes.items[IMAGE].first_item_of_row)
    first: list[int] = []
    shift: list[int] = []
    for file in texts.files:
        other = file_of_path.get(file.path)
        if other is None or (other.footer_hash, other.num_rows) != (file.footer_hash, file.num_rows):
            raise CatalogStale(
                f"source {texts.name!r}: the images of {file.path} are not indexed as its texts are; run torchmix index"
            )
        first.append(int(first_of_texts[file.first_row]))
        shift.append(int(first_of_column[other.first_row]) - first[-1])
    return np.array(first, np.int64), np.array(shift, np.int64)


def _content(source: str, folder: str, value: bytes) -> memoryview:
    path = image_path(folder, value)
    with opened(path, f"source {source!r}: the image {path}") as file:
        return memoryview(file.read(0, file.num_bytes))


def open_images(catalog: Catalog, directory: Path) -> ImageReader | None:
    """A reader of the images of a catalog's sources; None where no source has any. As `ImageReader`."""
    if all(source.images is None for source in catalog.sources.values()):
        return None
    return ImageReader(catalog, directory)


# --- Images as documents of their patches: what a loader gives that decodes for others.
#
# Pure, as the transform is; a bad image is an error, or grey where its source masks bad rows.

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
