from __future__ import annotations

import pickle

import pytest
import torch

from torchmix.constructor.arrays import SEQUENCE_FIELDS
from torchmix.constructor.fields import StepTensors


def make_step(**absent: None) -> StepTensors:
    values = {name: torch.arange(12).view(3, 2, 2) + i for i, name in enumerate(SEQUENCE_FIELDS)}
    return StepTensors(
        step=9,
        num_tokens_global=2**40,
        cu_seqlens=torch.tensor([0, 2, 0, 1, 2, 0], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor([0, 4, 0, 2, 4, 0], dtype=torch.int32),
        cu_seqlens_stop=torch.tensor([2, 5, 6]),
        max_seqlen=torch.tensor([4, 2, 0], dtype=torch.int32),
        header=b"opaque",
        **{**values, **absent},
    )


def test_microbatches_are_views_in_order() -> None:
    step = make_step()
    microbatches = [step.microbatch(index) for index in range(step.num_microbatches)]
    assert [m.index for m in microbatches] == [0, 1, 2]
    assert [m.is_last_of_step for m in microbatches] == [False, False, True]
    assert {(m.step, m.num_tokens_global) for m in microbatches} == {(9, 2**40)}
    assert [m.cu_seqlens.tolist() for m in microbatches] == [[0, 2], [0, 1, 2], [0]]
    assert [m.cu_seqlens_padded.tolist() for m in microbatches] == [[0, 4], [0, 2, 4], [0]]
    assert [m.max_seqlen for m in microbatches] == [4, 2, 0]
    assert microbatches[1].labels is not None
    assert microbatches[1].labels.tolist() == [[5, 6], [7, 8]]
    assert step.labels is not None
    step.labels[1] = 0
    assert microbatches[1].labels.tolist() == [[0, 0], [0, 0]]


def test_a_field_that_a_role_does_not_need_is_none_in_its_microbatches() -> None:
    microbatch = make_step(tokens=None, source_index=None).microbatch(0)
    assert microbatch.tokens is None
    assert microbatch.source_index is None
    assert microbatch.loss_mask is not None


@pytest.mark.parametrize("index", [-1, 3])
def test_a_microbatch_that_is_not_there_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match="microbatches 0 to 2"):
        make_step().microbatch(index)


@pytest.mark.parametrize("absent", [{}, {"tokens": None, "position_ids": None}, dict.fromkeys(SEQUENCE_FIELDS)])
def test_a_step_survives_the_road_of_plain_tensors(absent: dict[str, None]) -> None:
    step = make_step(**absent)
    tensors = step.to_tensors()
    assert set(tensors).isdisjoint(absent)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    arrived = StepTensors.from_tensors(tensors, header=step.header)
    assert_equal(arrived, step)


def test_a_step_survives_the_queue_of_a_worker() -> None:
    step = make_step(tokens=None)
    assert_equal(pickle.loads(pickle.dumps(step)), step)


def assert_equal(arrived: StepTensors, step: StepTensors) -> None:
    assert (arrived.step, arrived.num_tokens_global, arrived.header) == (step.step, step.num_tokens_global, step.header)
    for name in (*SEQUENCE_FIELDS, "cu_seqlens", "cu_seqlens_padded", "cu_seqlens_stop", "max_seqlen"):
        ours, theirs = getattr(arrived, name), getattr(step, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)), name
