from __future__ import annotations

import pickle

import pytest
import torch

from tests.support.native import native_or_not
from tests.support.plans import EXPANDED
from torchmix.constructor.arrays import FIELDS
from torchmix.constructor.fields import StepTensors, expand_loss_mask, expand_position_ids, expand_source_index
from torchmix.constructor.spans import PADDING
from torchmix.errors import NativeError
from torchmix.native.load import num_calls

EXPANDED_OF_HELD = {"tokens": {"tokens", "position_ids"}, "labels": {"labels", "loss_mask", "source_index"}}


def make_step(**absent: None) -> StepTensors:
    values = {name: torch.arange(12, dtype=torch.int32).view(3, 2, 2) + i for i, name in enumerate(EXPANDED_OF_HELD)}
    return StepTensors(
        step=9,
        num_tokens_global=2**40,
        spans=torch.tensor([[0, 0, 1], [0, 7, 2], [1, 0, -1], [3, 5, 0], [0, 0, -1]], dtype=torch.int32),
        spans_stop=torch.tensor([1, 4, 5]),
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
    assert microbatches[1].labels_int32 is not None
    assert microbatches[1].labels_int32.tolist() == [[5, 6], [7, 8]]
    assert step.labels is not None
    step.labels[1] = 0
    assert microbatches[1].labels_int32.tolist() == [[0, 0], [0, 0]]


def test_what_a_model_takes_is_made_at_first_use_and_stays() -> None:
    step = make_step()
    assert step.labels is not None
    step.labels[1, 0, 1] = -100
    microbatch = step.microbatch(1)
    found = {name: getattr(microbatch, name) for name in EXPANDED}
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "tokens": [[4, 5], [6, 7]],
        "labels": [[5, 0], [7, 8]],
        "loss_mask": [[1, 0], [1, 1]],
        "position_ids": [[7, 0], [0, 5]],
        "source_index": [[2, -1], [-1, 0]],
    }
    found["labels"][0, 0] = 99  # a trainer may write to what it is given
    for name in EXPANDED:
        assert getattr(microbatch, name) is found[name]
    assert step.labels[1, 0, 0] == 5


@pytest.mark.parametrize("seed", range(20))
def test_the_library_makes_what_torch_makes(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    shape = torch.Size((1 + seed % 3, int(torch.randint(0, 90, (1,), generator=rng))))
    num_spans = int(torch.randint(1, 9, (1,), generator=rng))
    starts = torch.cat([torch.zeros(1), torch.rand(num_spans - 1, generator=rng).sort()[0] * shape.numel()]).int()
    positions = torch.randint(0, (100, 2**30)[seed % 2], (num_spans,), generator=rng, dtype=torch.int32)
    sources = torch.randint(PADDING, 4, (num_spans,), generator=rng, dtype=torch.int32)
    spans = torch.stack([starts, positions, sources], 1)
    labels = torch.randint(-100, 5, tuple(shape), generator=rng, dtype=torch.int32)
    made, before = [], num_calls().get("tm_expand", 0)
    for native in (True, False):
        with native_or_not(native):
            made.append(
                [expand_loss_mask(labels), expand_position_ids(spans, shape), expand_source_index(spans, shape)]
            )
    assert num_calls()["tm_expand"] == before + 3
    for natively, by_torch in zip(*made, strict=True):
        assert (natively.dtype, natively.shape) == (by_torch.dtype, by_torch.shape)
        assert torch.equal(natively, by_torch)


@pytest.mark.parametrize("starts", [(), (1, 2), (0, 3, 2), (0, 7), (0, -1), (0, 2**31 - 1)])
def test_spans_that_do_not_cover_a_microbatch_are_refused(starts: tuple[int, ...]) -> None:
    spans = torch.tensor([(start, 0, 0) for start in starts], dtype=torch.int32).view(-1, 3)
    with native_or_not(True):
        for expand in (expand_position_ids, expand_source_index):
            with pytest.raises(NativeError, match=r"no span has the place|spans do not follow each other"):
                expand(spans, torch.Size((2, 3)))


@pytest.mark.parametrize("held", ["tokens", "labels"])
def test_what_a_role_does_not_hold_is_none_in_its_microbatches(held: str) -> None:
    microbatch = make_step(**{held: None}).microbatch(0)
    assert {name for name in EXPANDED if getattr(microbatch, name) is None} == EXPANDED_OF_HELD[held]
    assert {name for name in EXPANDED if getattr(microbatch.to("meta"), name) is None} == EXPANDED_OF_HELD[held]


def test_a_microbatch_moves_what_it_holds_and_makes_the_rest_there() -> None:
    microbatch = make_step().microbatch(1)
    assert microbatch.tokens is not None
    moved = microbatch.to("meta", non_blocking=True)
    for name in (*EXPANDED, "spans", "cu_seqlens", "cu_seqlens_padded"):
        here, there = getattr(microbatch, name), getattr(moved, name)
        assert (there.device.type, there.dtype, there.shape) == ("meta", here.dtype, here.shape), name
    assert (moved.step, moved.index, moved.max_seqlen) == (9, 1, 2)
    assert microbatch.tokens.device.type == "cpu"


@pytest.mark.parametrize("index", [-1, 3])
def test_a_microbatch_that_is_not_there_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match="microbatches 0 to 2"):
        make_step().microbatch(index)


@pytest.mark.parametrize("absent", [{}, {"tokens": None}, dict.fromkeys(EXPANDED_OF_HELD)])
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
    for name in FIELDS:
        ours, theirs = getattr(arrived, name), getattr(step, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)), name
