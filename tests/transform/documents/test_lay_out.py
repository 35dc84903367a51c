"""Placeholders in texts: each row against a document put together by hand."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from torchmix.errors import SourceUnreadable
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.documents.layout import DocumentLayout, ItemsOfRows
from torchmix.transform.documents.row_parts import MarkedText

TOKEN, BEFORE, AFTER = 300, 301, 302
TEXTS = ["a<image>bc", None, "no image", "<image><image>", "two", "x<image>y<image>", "", ""]
COUNTS = [1, 2, 0, 2, 2, 2, 0, 1]
TOKENS = [3, 7, 7, 1, 4, 2, 5, 1, 1, 6]


def images(counts: list[int] = COUNTS, tokens: list[int] = TOKENS, **options: object) -> ItemsOfRows:
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ItemsOfRows(first_item_of_row=first, tokens=np.array(tokens, np.int64), faults=dict(**options))


def placeholders(**options: int | None) -> DocumentLayout:
    around = {"begin": None, "end": 256, "before": None, "after": None} | options
    return DocumentLayout(
        parts=BYTES, ends_parts=True, token=TOKEN, kind="image", cutter=MarkedText("<image>"), **around
    )


def by_hand(text: str | None, tokens: list[int], begin: int | None, before: int | None, after: int | None):
    """Ids of a document, and the offsets of its images."""
    if text is None:
        return [], [0] * len(tokens)
    parts = text.split("<image>") if "<image>" in text else [""] * len(tokens) + [text]
    ids, offsets = [] if begin is None else [begin], []
    for number, part in enumerate(parts):
        ids += part.encode()
        if number < len(tokens):
            ids += [] if before is None else [before]
            offsets.append(len(ids))
            ids += [TOKEN] * tokens[number] + ([] if after is None else [after])
    return [*ids, 256], offsets


@pytest.mark.parametrize("begin, before, after", [(None, None, None), (299, BEFORE, AFTER), (None, BEFORE, None)])
def test_each_image_has_its_places(begin: int | None, before: int | None, after: int | None) -> None:
    rule = placeholders(begin=begin, before=before, after=after)
    texts, held = pa.array(TEXTS), images()
    values, offsets = rule.encode(texts, held, 0, 0)
    laid = rule.count(texts, held, 0, 0)
    assert np.array_equal(np.diff(offsets), laid.tokens) and not len(laid.row_of_run)
    found_offsets = []
    for row, text in enumerate(TEXTS):
        of_row = TOKENS[held.first_item_of_row[row] : held.first_item_of_row[row + 1]]
        ids, image_offsets = by_hand(text, of_row, begin, before, after)
        assert values[offsets[row] : offsets[row + 1]].tolist() == ids, text
        found_offsets += image_offsets
    assert laid.offset_of_item.tolist() == found_offsets
    part, _ = rule.encode(texts[3:6], held, 3, 3)
    assert part.tolist() == values[offsets[3] : offsets[6]].tolist()


def test_rows_at_fault_are_named() -> None:
    with pytest.raises(SourceUnreadable, match="row 5 has 1 markers '<image>' and 2 images"):
        placeholders().count(pa.array(["a<image>"]), images([2], [1, 1]), 0, 5)
    with pytest.raises(SourceUnreadable, match="row 0 has 1 markers '<image>' and 0 images"):
        placeholders().encode(pa.array(["a<image>"]), images([0], []), 0, 0)
    held = ItemsOfRows(first_item_of_row=np.array([0, 0, 1]), tokens=np.array([0]), faults={0: "its header lies"})
    with pytest.raises(SourceUnreadable, match="row 1: its header lies"):
        placeholders().count(pa.array(["a", "b"]), held, 0, 0)
    bad = replace(placeholders(), token=97, cutter=MarkedText("#"))
    with pytest.raises(SourceUnreadable, match="the text of row 1 holds the id 97"):
        bad.encode(pa.array(["b", "cab"]), images([0, 0], []), 0, 0)
