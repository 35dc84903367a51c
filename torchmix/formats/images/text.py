"""Texts with places for their images, as a source.

In: the format's own source of texts, and the sizes of the images of each file. Out: `FileScan` with the images as
items: where each begins in its document, its tokens, patches and bytes; later the ids of any row. Must hold: what
encodes a row later has the tokens that the scan counted, since both take the tokens of each image from its size alone.
Cost: that of the texts, and 40 bytes an image in the catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.bad_rows import BadRows
from torchmix.catalog.items import ItemTable
from torchmix.errors import CatalogError, SourceUnreadable, where_of
from torchmix.formats.images.headers import IMAGE
from torchmix.formats.source import Documents, FileScan, FormatSource, PageRun
from torchmix.storage.random_access import RandomAccessFile
from torchmix.transform.images.placeholders import ImagesOfRows, Placeholders
from torchmix.transform.images.rule import SizeRule
from torchmix.transform.row_encoder import EncodedRows, RowEncoder, RowsToEncode
from torchmix.transform.tokenizer import Ids, Tokenizer

TableOfFile = Callable[[str], tuple[ItemTable, Mapping[int, str]]]
"""Path of a file -> the images in it, and what is wrong with the bad ones, by number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTexts:
    """Implements `source.FormatSource`."""

    name: str
    placeholders: Placeholders
    rule: SizeRule
    make: Callable[[Tokenizer], FormatSource]
    """Tokenizer -> the format's own source of the texts."""
    tables: TableOfFile | None = None
    """Needed for a scan."""
    items: ItemTable | None = None
    """Images of the source as they were indexed; needed to read."""

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return self._inner().format

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        return f"{self.placeholders.transform_id}:{self.rule.rule_id}"

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return self.placeholders.vocab_size

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`; None while a file is scanned, which counts the tokens itself."""
        return None if self.items is None else ImageTextEncoder(self.placeholders, self.items)

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `FormatSource.fingerprint`."""
        return self._inner().fingerprint(file, path)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `FormatSource.check`; images are not looked at."""
        self._inner().check(path, bad)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `FormatSource.scan`.

        Raises:
            CatalogError: The images of the file are not indexed, or are of other rows.
        """
        if self.tables is None:
            raise SourceUnreadable(
                f"source {self.name!r} has images, which an index of shards does not find; run torchmix index"
            )
        table, faults = self.tables(str(path))
        sizes = self.rule.sizes(np.maximum(table.sizes["width"], 1), np.maximum(table.sizes["height"], 1))
        is_bad = np.asarray(table.sizes["width"]) == 0
        tokens = np.where(is_bad, 0, sizes.tokens)
        named = {int(image): faults.get(int(image), "its image is bad") for image in np.flatnonzero(is_bad)}
        images = ImagesOfRows(
            first_item_of_row=np.asarray(table.first_item_of_row, np.int64), tokens=tokens, faults=named
        )
        counted = _Counted(self.placeholders, images)
        scan = self._inner(counted).scan(path, progress, bad)
        if scan.num_rows != len(images.first_item_of_row) - 1:
            raise CatalogError(
                f"it has {scan.num_rows} rows of text and {len(images.first_item_of_row) - 1} of images; run torchmix "
                "index again",
                where_of(self.name, path),
            )
        items = ItemTable(
            first_item_of_row=images.first_item_of_row,
            offset=counted.offset_of_image.astype(np.int32),
            tokens=tokens.astype(np.int32),
            sizes={
                "bytes": np.asarray(table.sizes["bytes"]),
                "grid_height": np.where(is_bad, 0, sizes.grid_height).astype(np.int32),
                "grid_width": np.where(is_bad, 0, sizes.grid_width).astype(np.int32),
                "height": np.asarray(table.sizes["height"]),
                "patches": np.where(is_bad, 0, sizes.patches).astype(np.int32),
                "segments": np.where(is_bad, 0, sizes.segments).astype(np.int32),
                "width": np.asarray(table.sizes["width"]),
            },
        )
        return replace(scan, items={IMAGE: items})

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return self._inner().properties(path, columns)

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        return self._inner().decode(runs)

    def _inner(self, tokenizer: Tokenizer | None = None) -> FormatSource:
        return self.make(tokenizer or self.placeholders.parts)


@dataclass(frozen=True, slots=True, eq=False)
class ImageTextEncoder:
    """Texts of a source -> ids, with places for its images; implements `RowEncoder`."""

    placeholders: Placeholders
    items: ItemTable

    @property
    def takes(self) -> Literal["text", "tokens"]:
        """See `RowEncoder`."""
        return "text"

    @property
    def is_mapped(self) -> bool:
        """See `RowEncoder`; the number of a row leads to its images."""
        return True

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """See `RowEncoder`."""
        first = np.asarray(self.items.first_item_of_row[asked.row], np.int64)
        counts = np.asarray(self.items.first_item_of_row[asked.row + 1], np.int64) - first
        stops = np.cumsum(counts)
        image = np.arange(stops[-1] if len(stops) else 0) + np.repeat(first - (stops - counts), counts)
        images = ImagesOfRows(
            first_item_of_row=np.concatenate([np.zeros(1, np.int64), stops]),
            tokens=np.asarray(self.items.tokens[image], np.int64),
            faults={},
        )
        values, offsets = self.placeholders.encode(asked.rows, images, 0, asked.first_row)
        return EncodedRows(values=values, offsets=offsets)


class _Counted:
    """Counts the tokens of a file's texts, and notes where images begin; implements `Tokenizer`."""

    def __init__(self, placeholders: Placeholders, images: ImagesOfRows) -> None:
        self._placeholders = placeholders
        self._images = images
        self.transform_id = placeholders.transform_id
        self.vocab_size = placeholders.vocab_size
        self.vocabulary = placeholders.parts.vocabulary
        self.offset_of_image = np.zeros(len(images.tokens), np.int64)

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, Int64Array]:
        """See `Tokenizer`."""
        return self._placeholders.encode(texts, self._images, first_row, first_row)

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `Tokenizer`; `first_row` is the row of the file."""
        tokens, offsets = self._placeholders.count(texts, self._images, first_row, first_row)
        first = int(self._images.first_item_of_row[first_row]) if len(texts) else 0
        self.offset_of_image[first : first + len(offsets)] = offsets
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._placeholders.parts.decode(ids)


def with_images(source: FormatSource, items: Mapping[str, Any]) -> FormatSource:
    """A source that is to be read, with the images that the catalog has of it."""
    return replace(source, items=items[IMAGE]) if isinstance(source, ImageTexts) else source
