"""Placeholders in texts: each row against a document put together by hand."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from torchmix.errors import SourceUnreadable
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.documents.layout import DocumentLayout, ItemIds, ItemsOfKind, ItemsOfRows
from torchmix.transform.documents.row_parts import MarkedText

TOKEN, BEFORE, AFTER = 300, 301, 302
TEXTS = ["a<image>bc", None, "no image", "<image><image>", "two", "x<image>y<image>", "", ""]
COUNTS = [1, 2, 0, 2, 2, 2, 0, 1]
TOKENS = [3, 7, 7, 1, 4, 2, 5, 1, 1, 6]


def images(counts: list[int] = COUNTS, tokens: list[int] = TOKENS) -> ItemsOfRows:
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ItemsOfRows(kinds=(ItemsOfKind(first_item_of_row=first, tokens=np.array(tokens, np.int64), faults={}),))


def placeholders(**options: int | None) -> DocumentLayout:
    around = {"begin": None, "before": None, "after": None} | options
    image = ItemIds(kind="image", token=TOKEN, before=around["before"], after=around["after"])
    cutter = MarkedText({"image": "<image>"})
    return DocumentLayout(parts=BYTES, ends_parts=True, begin=around["begin"], end=256, items=(image,), cutter=cutter)


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
        first = held.kinds[0].first_item_of_row
        of_row = TOKENS[first[row] : first[row + 1]]
        ids, image_offsets = by_hand(text, of_row, begin, before, after)
        assert values[offsets[row] : offsets[row + 1]].tolist() == ids, text
        found_offsets += image_offsets
    assert [offsets.tolist() for offsets in laid.offset_of_item] == [found_offsets]
    part, _ = rule.encode(texts[3:6], held, 3, 3)
    assert part.tolist() == values[offsets[3] : offsets[6]].tolist()


def test_rows_at_fault_are_named() -> None:
    with pytest.raises(SourceUnreadable, match="row 5 has 1 markers '<image>' and 2 images"):
        placeholders().count(pa.array(["a<image>"]), images([2], [1, 1]), 0, 5)
    with pytest.raises(SourceUnreadable, match="row 0 has 1 markers '<image>' and 0 images"):
        placeholders().encode(pa.array(["a<image>"]), images([0], []), 0, 0)
    bad_item = ItemsOfKind(first_item_of_row=np.array([0, 0, 1]), tokens=np.array([0]), faults={0: "its header lies"})
    held = ItemsOfRows(kinds=(bad_item,))
    with pytest.raises(SourceUnreadable, match="row 1: its header lies"):
        placeholders().count(pa.array(["a", "b"]), held, 0, 0)
    of_images = ItemIds(kind="image", token=97, before=None, after=None)
    bad = replace(placeholders(), items=(of_images,), cutter=MarkedText({"image": "#"}))
    with pytest.raises(SourceUnreadable, match="the text of row 1 holds the id 97"):
        bad.encode(pa.array(["b", "cab"]), images([0, 0], []), 0, 0)


def test_items_of_two_kinds_stand_at_their_markers() -> None:
    texts = ["a<n>b<i>c<n>", "<i>x", None, "bare", "y<n>", "<i><n><i>"]
    counts = {"<i>": [1, 1, 1, 2, 1, 2], "<n>": [2, 1, 0, 1, 1, 1]}
    ids = {"<i>": ([], [300], []), "<n>": ([303], [301], [302])}
    tokens = {marker: list(range(1, 1 + sum(of))) for marker, of in counts.items()}
    layout = DocumentLayout(
        parts=BYTES,
        ends_parts=True,
        begin=None,
        end=256,
        items=(
            ItemIds(kind="image", token=300, before=None, after=None),
            ItemIds(kind="number", token=301, before=303, after=302),
        ),
        cutter=MarkedText({"image": "<i>", "number": "<n>"}),
    )
    firsts = {marker: np.concatenate([[0], np.cumsum(of)]) for marker, of in counts.items()}
    held = ItemsOfRows(
        kinds=tuple(
            ItemsOfKind(first_item_of_row=firsts[marker], tokens=np.array(tokens[marker]), faults={}) for marker in ids
        )
    )
    values, offsets = layout.encode(pa.array(texts), held, 0, 0)
    laid = layout.count(pa.array(texts), held, 0, 0)
    assert laid.tokens.tolist() == np.diff(offsets).tolist()
    number = dict.fromkeys(ids, 0)
    starts: dict[str, list[int]] = {marker: [] for marker in ids}
    for row, text in enumerate(texts):
        if text is None:
            for marker, of in counts.items():
                number[marker] += of[row]
                starts[marker] += [0] * of[row]
            continue
        whole = "".join(marker * counts[marker][row] for marker in ids if marker not in text) + text
        wanted: list[int] = []
        while whole:
            marker = whole[:3]
            if marker in ids:
                before, (token,), after = ids[marker]
                starts[marker].append(len(wanted) + len(before))
                wanted += [*before, *[token] * tokens[marker][number[marker]], *after]
                number[marker] += 1
                whole = whole[3:]
            else:
                wanted, whole = [*wanted, ord(whole[0])], whole[1:]
        assert values[offsets[row] : offsets[row + 1]].tolist() == [*wanted, 256], text
    assert [offsets.tolist() for offsets in laid.offset_of_item] == list(starts.values())
    part, _ = layout.encode(pa.array(texts[3:]), held, 3, 3)
    assert part.tolist() == values[offsets[3] :].tolist()
    with pytest.raises(SourceUnreadable, match="row 0 has 1 markers '<n>' and 2 numbers"):
        layout.count(pa.array(["<n>"]), held, 0, 0)
