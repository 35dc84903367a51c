"""One stream for several model chunks: all see the same, it is kept as long as needed, and counted when all had it."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.microbatches import make_microbatch
from torchmix.constructor.fields import Microbatch
from torchmix.errors import PlanError
from torchmix.megatron_adapter.microbatches import SharedMicrobatches, item_of


def stream(microbatches_of_step: int, steps: int) -> Iterator[Microbatch]:
    for step in range(steps):
        for index in range(microbatches_of_step):
            yield make_microbatch(
                tokens_int32=torch.tensor([[step, index]], dtype=torch.int32),
                step=step,
                index=index,
                is_last_of_step=index + 1 == microbatches_of_step,
            )


class Shared:
    """Shared microbatches whose states are the number of the step that is done."""

    def __init__(self, *, num_microbatches: int = 4, steps: int = 3, **options: Any) -> None:
        self.pulled: list[tuple[int, int]] = []
        self.consumed: list[bytes] = []
        self.shared = SharedMicrobatches(
            stream(num_microbatches, steps),
            part="train",
            packed=options.pop("packed", True),
            on_microbatch=lambda microbatch: self.pulled.append((microbatch.step, microbatch.index)),
            state_of_step=lambda: b"after step %d" % self.pulled[-1][0],
            on_step_consumed=self.consumed.append,
            **options,
        )


def places(items: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(item["step"], item["index"]) for item in items]


def interleaved(num_microbatches: int, chunks: int, group: int) -> list[int]:
    """Chunks in the order in which Megatron's interleaved schedule runs them forward.

    Groups of microbatches go through all chunks one after another (`get_schedule_table` of core 0.16).
    """
    order = []
    for start in range(0, num_microbatches, group):
        size = min(group, num_microbatches - start)
        order += [chunk for chunk in range(chunks) for _ in range(size)]
    return order


@pytest.mark.parametrize(("chunks", "group"), [(1, 1), (2, 2), (2, 4), (3, 2), (4, 8)])
def test_chunks_of_an_interleaved_schedule_see_the_same(chunks: int, group: int) -> None:
    job = Shared(num_microbatches=8)
    iterators = [job.shared.new_iterator() for _ in range(chunks)]
    seen: list[list[dict[str, Any]]] = [[] for _ in range(chunks)]
    most_waiting = 0
    for _step in range(3):
        for chunk in interleaved(8, chunks, group):
            seen[chunk].append(next(iterators[chunk]))
            most_waiting = max(most_waiting, job.shared.num_waiting)
    expected = [(step, index) for step in range(3) for index in range(8)]
    assert [places(items) for items in seen] == [expected] * chunks
    assert most_waiting <= (group if chunks > 1 else 0)
    assert job.shared.num_waiting == 0
    assert job.consumed == [b"after step 0", b"after step 1", b"after step 2"]
    assert job.pulled == expected


def test_any_order_inside_a_step_gives_each_chunk_all() -> None:
    draw = random.Random(7)
    job = Shared()
    iterators = [job.shared.new_iterator() for _ in range(3)]
    seen: list[list[dict[str, Any]]] = [[], [], []]
    for _step in range(3):
        order = [chunk for chunk in range(3) for _ in range(4)]
        draw.shuffle(order)
        for chunk in order:
            seen[chunk].append(next(iterators[chunk]))
    assert places(seen[0]) == places(seen[1]) == places(seen[2])


def test_a_step_is_consumed_when_the_last_chunk_has_had_its_end() -> None:
    job = Shared(num_microbatches=2)
    first, second = job.shared.new_iterator(), job.shared.new_iterator()
    next(first), next(first), next(second)
    assert job.consumed == []
    next(second)
    assert job.consumed == [b"after step 0"]


def test_items_are_dicts_of_their_own_that_may_be_altered() -> None:
    job = Shared()
    first, second = job.shared.new_iterator(), job.shared.new_iterator()
    item = next(first)
    assert item["tokens"].tolist() == [[0, 0]]
    item["tokens"] = None
    assert next(second)["tokens"].tolist() == [[0, 0]]


def received() -> Microbatch:
    """A microbatch as a peer has it: all fields are views of one buffer."""
    buffer = torch.arange(160, dtype=torch.uint8)
    boundaries = buffer[144:152].view(torch.int32)
    return make_microbatch(
        tokens_int32=buffer[:16].view(torch.int32).view(2, 2),
        labels_int32=buffer[32:48].view(torch.int32).view(2, 2),
        spans=buffer[64:88].view(torch.int32).view(2, 3),
        cu_seqlens=boundaries,
        cu_seqlens_padded=boundaries,
    )


def test_what_a_peer_received_can_be_stored_in_a_checkpoint() -> None:
    microbatch, file = received(), io.BytesIO()
    item = item_of(microbatch, part="train", packed=True)
    torch.save([item], file)
    file.seek(0)
    [loaded] = torch.load(file, weights_only=True)
    assert loaded.keys() == item.keys()
    for name in ("tokens", "labels", "spans", "cu_seqlens"):
        held = getattr(microbatch, f"{name}_int32", None)
        held = getattr(microbatch, name) if held is None else held
        assert torch.equal(loaded[name], held), name
        assert loaded[name].dtype == torch.int32
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save([item["tokens"], item["tokens"].view(torch.float32)], io.BytesIO())


def test_tensors_are_not_copied() -> None:
    [microbatch] = stream(1, 1)
    item = item_of(microbatch, part="train", packed=True)
    assert item["tokens"] is microbatch.tokens_int32
    assert item["cu_seqlens"] is microbatch.cu_seqlens


def test_dense_microbatches_have_no_boundaries() -> None:
    item = next(Shared(packed=False).shared.new_iterator())
    assert item["cu_seqlens"] is None
    assert item["cu_seqlens_padded"] is None


def test_a_skipped_step_is_skipped_by_all_chunks_and_counts() -> None:
    job = Shared()
    iterators = [job.shared.new_iterator() for _ in range(2)]
    job.shared.skip_step()
    assert job.consumed == [b"after step 0"]
    assert [(next(it)["step"], job.shared.num_waiting) for it in iterators] == [(1, 1), (1, 0)]


@pytest.mark.parametrize("chunks", [1, 2])
def test_skipping_inside_a_step_is_refused(chunks: int) -> None:
    job = Shared()
    iterators = [job.shared.new_iterator() for _ in range(chunks)]
    next(iterators[0])
    with pytest.raises(PlanError, match="while a chunk was inside one"):
        job.shared.skip_step()


def test_the_first_microbatch_may_be_awaited_and_is_not_lost() -> None:
    job = Shared()
    job.shared.await_first()
    job.shared.await_first()
    assert job.pulled == [(0, 0)]
    iterators = [job.shared.new_iterator() for _ in range(2)]
    assert [places([next(iterator)]) for iterator in iterators] == [[(0, 0)], [(0, 0)]]


def test_a_step_whose_first_microbatch_was_awaited_may_be_skipped() -> None:
    job = Shared()
    job.shared.await_first()
    iterator = job.shared.new_iterator()
    job.shared.skip_step()
    assert (next(iterator)["step"], job.consumed) == (1, [b"after step 0"])


def test_a_chunk_that_comes_late_is_refused() -> None:
    job = Shared()
    next(job.shared.new_iterator())
    with pytest.raises(PlanError, match="after 1 microbatches were consumed"):
        job.shared.new_iterator()


def test_iterators_have_a_length_only_where_a_pass_has() -> None:
    with pytest.raises(TypeError, match="no len"):
        len(Shared().shared.new_iterator())  # type: ignore[arg-type]
    counted = Shared(num_steps=5).shared.new_iterator()
    assert len(counted) == 5  # type: ignore[arg-type]
    assert iter(counted) is counted


def test_the_end_of_the_data_is_the_end() -> None:
    iterator = Shared(num_microbatches=1, steps=1).shared.new_iterator()
    next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
