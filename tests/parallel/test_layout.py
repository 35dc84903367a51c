"""A layout divides the samples of a step, or says which sizes would."""

from __future__ import annotations

import pytest

from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import Layout


def test_each_rank_has_its_microbatches_of_a_step() -> None:
    layout = Layout(dp=8, micro_batch_size=3)
    assert (layout.row_samples, layout.num_microbatches(96), str(layout)) == (24, 4, "dp 8 x micro_batch_size 3")
    assert Layout().num_microbatches(5) == 5


def test_sizes_that_do_not_divide_are_named_with_those_that_would() -> None:
    with pytest.raises(
        TopologyError, match=r"100 samples does not divide by dp 8 x micro_batch_size 3 = 24.* 96 or 120"
    ):
        Layout(dp=8, micro_batch_size=3).num_microbatches(100)


def test_masked_samples_fill_the_last_microbatch_of_an_elastic_layout() -> None:
    layout = Layout(dp=3, micro_batch_size=2, elastic=True)
    assert [layout.num_microbatches(samples) for samples in (1, 6, 7, 16)] == [1, 1, 2, 3]
    assert [layout.num_places(samples) for samples in (1, 6, 7, 16)] == [6, 6, 12, 18]
    assert layout == Layout(dp=3, micro_batch_size=2)  # a state of the one goes on at the other
