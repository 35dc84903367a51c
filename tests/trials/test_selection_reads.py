"""One small round of the trial on every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.selection_reads import LAYOUTS, SHARES, try_order, try_reads


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", SHARES)
def test_a_selection_is_shuffled_as_well_as_a_file_of_its_rows(share: float, layout: str) -> None:
    found = try_order(3, share, layout, num_rows=1 << 18)
    assert found["pairs_of_file"] > 1000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_epoch_decodes_each_page_with_a_kept_row_once(layout: str, tmp_path: Path) -> None:
    found = try_reads(3, 0.1, layout, tmp_path, num_rows=16_000)
    assert found["pages_with_kept_rows"] == found["pages_decoded"]
