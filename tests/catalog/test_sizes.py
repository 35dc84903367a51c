from __future__ import annotations

import numpy as np
import pytest

from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import CatalogError


def sizes(first_row_of_page: list[int], tokens: list[int], window_pages: int = 4) -> SourceSizes:
    return SourceSizes(
        first_row_of_page=np.array(first_row_of_page, np.int64),
        tokens=np.array(tokens, np.int32),
        window_pages=window_pages,
    )


def test_pages_that_tile_the_rows_pass_also_with_an_empty_page_and_an_empty_document():
    good = sizes([0, 2, 2, 3], [5, 0, 7])
    good.check()
    assert (good.num_pages, good.num_documents) == (3, 3)


@pytest.mark.parametrize(
    ("first", "tokens", "window_pages", "says"),
    [
        ([0, 2], [5, 6, 7], 1, "rows 0 to 2"),
        ([1, 3], [5, 6, 7], 1, "rows 1 to 3"),
        ([0, 2, 1, 3], [5, 6, 7], 1, "page 1 starts at row 2"),
        ([0, 3], [5, -6, 7], 1, "row 1 has -6 tokens"),
        ([0, 3], [5, 6, 7], 0, "window_pages is 0"),
        ([0], [], 1, "P >= 1"),
    ],
)
def test_a_broken_invariant_is_named_with_its_value(first, tokens, window_pages, says):
    with pytest.raises(CatalogError, match=says):
        sizes(first, tokens, window_pages).check()


def test_a_narrow_offset_type_is_refused():
    narrow = SourceSizes(first_row_of_page=np.array([0, 1], np.int32), tokens=np.array([1], np.int32), window_pages=1)
    with pytest.raises(CatalogError, match="int32"):
        narrow.check()
