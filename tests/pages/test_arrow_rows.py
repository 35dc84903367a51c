"""Arrow arrays of rows, from plain arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from torchmix.pages import text_rows, token_rows

TEXTS = ["", "a", None, "naïve 日本語", None, "\x00\xff"]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_lists_lie_in_the_memory_they_were_made_of(dtype: type) -> None:
    values = np.array([3, 1, 2, 200], dtype)
    rows = token_rows(values, np.array([0, 1, 1, 4], np.int64))
    rows.validate(full=True)
    assert rows.to_pylist() == [[3], [], [1, 2, 200]]
    assert rows.values.buffers()[1].address == values.ctypes.data
    assert rows.values.type == pa.from_numpy_dtype(dtype)


@pytest.mark.parametrize("texts", [[], [None], [""], TEXTS, TEXTS * 20])
def test_texts_lie_in_the_memory_they_were_made_of(texts: list[str | None]) -> None:
    content = [(text or "").encode() for text in texts]
    values = np.frombuffer(b"".join(content), np.uint8)
    offsets = np.cumsum([0, *map(len, content)])
    rows = text_rows(values, offsets, np.array([text is not None for text in texts], np.bool_))
    rows.validate(full=True)
    assert rows.to_pylist() == texts
    assert rows.null_count == sum(text is None for text in texts)
    assert not len(values) or rows.buffers()[2].address == values.ctypes.data
