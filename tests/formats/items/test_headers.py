"""Sizes of the images of a column, row by row, also where a row goes on in another page."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.support.image_sources import make_rows
from torchmix.errors import SourceUnreadable
from torchmix.formats.column import look_at_rows, to_documents
from torchmix.formats.items import HeaderScan
from torchmix.modalities.images.header import header_of
from torchmix.modalities.images.kind import ImageModality
from torchmix.modalities.images.rules import DynamicRule
from torchmix.recipe.structs import Images
from torchmix.transform.bytes_tokenizer import RawBytes

IMAGES = [row.images[0] for row in make_rows(2, 12) if row.images]


def header_scan(*, masks_bad: bool = False, **words: Any) -> HeaderScan:
    rule = DynamicRule(patch=4, merge=2, min_pixels=64, max_pixels=1024)
    images = Images(column="image", token=7, most_pixels=10**6, **words)
    return HeaderScan(folder=None, modality=ImageModality(words=images, rule=rule), masks_bad=masks_bad)


def test_a_row_that_goes_on_in_the_next_page_has_all_its_images() -> None:
    headers = header_scan()
    raw = RawBytes("raw", headers.see)
    a, b, c, d = IMAGES[:4]
    for _ in range(2):  # a column chunk may be looked at again from its beginning
        first = pa.array([[a], [b, None, c]], pa.list_(pa.binary()))
        counts, _ = look_at_rows(first, "values", 0, raw, None)
        assert counts.tolist() == [len(a), len(b) + len(c)]
        # As the Parquet scan gives it: a value that is not in the file, then the end of row 1.
        second = pa.array([[b"", d], [], [a, b]], pa.list_(pa.binary()))
        counts, _ = look_at_rows(second, "values", 1, raw, None, num_opening=1)
        assert counts.tolist() == [1 + len(d), 0, len(a) + len(b)]
    table = headers.table(4)
    assert np.asarray(table.first_run_of_row).tolist() == [0, 1, 4, 4, 6]
    assert np.asarray(table.offset).tolist() == [0, 0, len(b), len(b) + len(c), 0, len(a)]
    held = [a, b, c, d, a, b]
    assert np.asarray(table.tokens).tolist() == [len(image) for image in held]
    assert table.sizes["width"].tolist() == [header_of(image).width for image in held]


def test_a_file_whose_rows_have_no_image_has_an_empty_table() -> None:
    headers = header_scan()
    look_at_rows(pa.array([[], None, [None]], pa.list_(pa.binary())), "values", 0, RawBytes("raw", headers.see), None)
    table = headers.table(3)
    table.check(3)
    assert sorted(table.sizes) == ["bytes", "height", "width"]
    assert all(len(column) == 0 and column.dtype.kind == "i" for column in (table.tokens, *table.sizes.values()))


def test_a_document_of_values_is_their_bytes_end_to_end() -> None:
    structs = pa.struct([("bytes", pa.large_binary())])
    array = pa.array([[{"bytes": b"ab"}, None, {"bytes": b"c"}], None, [], [{"bytes": b"d"}]], pa.list_(structs))
    documents = to_documents([array, array.slice(2)], "values", 0)
    assert documents.values.tobytes() == b"abcdd"
    assert documents.offsets.tolist() == [0, 3, 3, 3, 4, 4, 5]


def test_a_row_of_too_many_items_or_tokens_is_bad() -> None:
    a, b, c, d = IMAGES[:4]
    rows = pa.array([[a], [b, c, d], [], [a, b]], pa.list_(pa.binary()))
    sizes = header_scan()
    look_at_rows(rows, "values", 0, RawBytes("raw", sizes.see), None)
    table = sizes.table(4)
    tokens = ImageModality.sizes(sizes._modality, table.sizes).tokens  # type: ignore[arg-type]
    of_rows = [int(tokens[start:stop].sum()) for start, stop in pairwise(np.asarray(table.first_run_of_row).tolist())]
    for words, bad in (
        ({"most_items": 2}, {1: "it has 3 images, more than most_items 2"}),
        ({"most_items": 3, "most_item_tokens": max(of_rows)}, {}),
        (
            {"most_item_tokens": max(of_rows) - 1},
            {
                row: f"it has {count} tokens of images, more than most_item_tokens {max(of_rows) - 1}"
                for row, count in enumerate(of_rows)
                if count == max(of_rows)
            },
        ),
    ):
        masked = header_scan(masks_bad=True, **words)
        look_at_rows(rows, "values", 0, RawBytes("raw", masked.see), None)
        masked.check_limits(masked.table(4))
        assert masked.faults == bad
        strict = header_scan(**words)
        look_at_rows(rows, "values", 0, RawBytes("raw", strict.see), None)
        if bad:
            with pytest.raises(SourceUnreadable, match=f"row {min(bad)}: it has"):
                strict.check_limits(strict.table(4))
        assert words == {"most_items": 3, "most_item_tokens": max(of_rows)} or bad
