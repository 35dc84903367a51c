"""Images of sources -> their bytes.

In: an open catalog of sources with images, and numbers of images. Out: the bytes of each. Must hold: what is read is
what was indexed, by the same checks as texts; each image of a call is read once. Cost: that of the pages that hold the
images; for paths a file is opened for each image. It belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.items import ItemTable
from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.settings import name_of_images
from torchmix.catalog.store import Catalog, SourceCatalog, catalog_fingerprint, open_source
from torchmix.errors import CatalogMissing, CatalogStale, RecipeError
from torchmix.formats.images.headers import IMAGE, image_path
from torchmix.reader.protocol import StepReader
from torchmix.reader.reader import Reader
from torchmix.storage.open_path import opened
from torchmix.storage.stores import place_of
from torchmix.transform.images.make import ImageTransform

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
