"""Errors about what lies on disk carry their place, which crosses processes with them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from torchmix.errors import CatalogError, CorruptPage, SourceUnreadable, located, where_of
from torchmix.formats.column import to_documents
from torchmix.parallel.wire import ErrorForm

NULLS = pa.array([[1], [2, None]], pa.list_(pa.int32()))


def test_the_edge_of_a_source_says_where_and_what_reads_a_format_says_which_row() -> None:
    with pytest.raises(SourceUnreadable) as caught, located(where_of("web", "a.parquet")):
        to_documents([NULLS], "tokens", 7)
    assert caught.value.row == 8
    assert caught.value.offset == -1
    assert caught.value.where == "source 'web': a.parquet"
    assert str(caught.value) == f"source 'web': a.parquet: {caught.value.message}"


def test_the_innermost_place_stands() -> None:
    with pytest.raises(CorruptPage) as caught, located("outside"), located("inside"):
        raise CorruptPage("it is cut off", offset=9)
    assert (caught.value.where, caught.value.offset) == ("inside", 9)


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="other"), located("here"):
        raise ValueError("other")


def test_a_place_crosses_processes() -> None:
    error = CatalogError("it is cut off", "source 'web': a.parquet", row=3, offset=9)
    again = ErrorForm.of(error).error()
    assert isinstance(again, CatalogError)
    assert (again.message, again.where, again.row, again.offset) == (error.message, error.where, 3, 9)
    assert str(again) == str(error)
