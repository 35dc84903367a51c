"""Shared memory of both sides in one process: two mappings of the same memory, at different addresses."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.process_table import open_descriptors
from torchmix.constructor.arrays import FIELDS, RECENT_CALLS, BlockArrays, StepArrays, StepFacts, StepMemory
from torchmix.constructor.fields import StepTensors
from torchmix.errors import OpenFilesLimit
from torchmix.steps.worker import shared_arrays
from torchmix.steps.worker.messages import BlockReply, decode_reply, encode, open_files_named
from torchmix.steps.worker.shared_arrays import MappedArrays, SharedArrays

TOKENS = 3000


class Pair:
    """A worker that fills every array with the step's number, and its leader."""

    def __init__(self) -> None:
        self.worker, self.leader = SharedArrays(), MappedArrays()
        self.memory = StepMemory(self.worker.allocate)
        self.replies: list[BlockReply] = []

    def step(self, number: int, tokens: int = TOKENS) -> StepArrays:
        """Build a step there and take it here; what has been released before may be used for it."""
        self.worker.release(self.leader.take_released())
        ids, labels = self.memory.empty_together(tokens, [np.int32, np.int32])
        fields = {
            "tokens": ids.reshape(2, -1),
            "labels": labels.reshape(2, -1),
            "max_seqlen": np.array([number, number], np.int32),
        }
        for array in fields.values():
            array[:] = number
        facts = StepFacts(step=number, num_tokens_global=7, num_masked_tokens=2)
        built = BlockArrays(steps=[facts], fields=fields)
        reply, descriptors = self.worker.pack(built, b"headers")
        del built, fields, array, ids, labels
        decoded = decode_reply(encode(reply))
        assert isinstance(decoded, BlockReply)
        self.replies.append(decoded)
        with open_files_named():  # as the channel names it
            sent = [os.dup(descriptor) for descriptor in descriptors]
        [found] = (block.step(0) for block in [self.leader.unpack(decoded, sent)])
        for descriptor in descriptors:
            os.close(descriptor)
        return found


@pytest.fixture(autouse=True)
def headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header is its word, one for each step that has one."""
    monkeypatch.setattr(shared_arrays, "decode_headers", lambda data: [data] * (2 if data == b"two" else 1))


def forbidden(name: str) -> int:
    raise PermissionError(name)


@pytest.fixture(params=["memory", "no memory", "forbidden memory"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    if request.param == "no memory":  # as where the system has none without a name
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif request.param == "forbidden memory":  # as in some containers
        monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("this system has files alone")
    return Pair()


def test_a_step_arrives_as_it_was_built(pair: Pair) -> None:
    found = pair.step(5)
    assert (found.step, found.num_tokens_global, found.num_masked_tokens, found.header) == (5, 7, 2, b"headers")
    assert {name: (array.dtype, array.shape) for name, array in found.fields.items()} == {
        "tokens": (np.int32, (2, TOKENS // 2)),
        "labels": (np.int32, (2, TOKENS // 2)),
        "max_seqlen": (np.int32, (2,)),
    }
    for array in found.fields.values():
        assert (array == 5).all()
        array[0] = 6  # a trainer may write to what it is given
    assert [entry.form.name for entry in pair.replies[0].fields.shared] == ["tokens", "labels"]


def test_what_is_held_in_any_form_is_never_written_to(pair: Pair) -> None:
    first = pair.step(1)
    held = [
        torch.from_numpy(first.fields["tokens"]).view(-1)[10:20].view(5, 2)[1],
        memoryview(first.fields["labels"])[1:],
    ]
    del first
    for number in range(2, 12):
        pair.step(number)
    assert held[0].tolist() == [1, 1]
    assert set(np.asarray(held[1]).ravel().tolist()) == {1}


def test_memory_is_used_again_and_no_more_is_made(pair: Pair) -> None:
    for number in range(1, 30):
        found = pair.step(number)
        assert all((array == number).all() for array in found.fields.values())
    # One step is held while the next one is built.
    assert [len(reply.new) for reply in pair.replies] == [1, 1] + [0] * 27
    assert not any(reply.dropped for reply in pair.replies)


@pytest.fixture
def few_files() -> Iterator[None]:
    """Room for a few more open files, and no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = num_free = 0
    while num_free < 12:  # others may be open above the lowest free one
        num_free += not Path(f"/proc/self/fd/{limit}").exists()
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_more_held_steps_than_open_files_are_an_error_that_names_the_limit(pair: Pair) -> None:
    held = []
    with pytest.raises(OpenFilesLimit, match=r"as it may, \d+ \(`ulimit -n`\).* lower look_ahead"):
        for number in range(40):
            held.append(pair.step(number))
    assert len(held) > 1
    for number, step in enumerate(held):
        assert (step.fields["tokens"] == number).all()


def test_memory_of_other_sizes_is_let_go_on_both_sides(pair: Pair) -> None:
    for number in range(1, 4):
        pair.step(number)
    for number in range(4, 4 + RECENT_CALLS):
        pair.step(number, tokens=2 * TOKENS)
    pair.step(5000, tokens=3 * TOKENS)
    gc.collect()
    last = pair.step(5001, tokens=3 * TOKENS)
    assert all((array == 5001).all() for array in last.fields.values())
    dropped = [number for reply in pair.replies for number in reply.dropped]
    assert dropped == [0]
    assert not set(dropped) & set(pair.leader._memory_of_arena)


def test_neither_side_keeps_a_name_or_more_descriptors_than_steps(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_arrays.tempfile, "tempdir", str(tmp_path))
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    gc.collect()
    before = open_descriptors()
    kept = [pair.step(number) for number in range(20)]
    assert len(open_descriptors() - before) == 2 * 20
    assert not list(tmp_path.iterdir())
    assert [int(step.fields["tokens"][0, 0]) for step in kept] == list(range(20))
    pair.worker, pair.leader, pair.memory = SharedArrays(), MappedArrays(), StepMemory()
    kept.clear()
    gc.collect()
    assert open_descriptors() <= before


def test_tensors_share_the_memory(pair: Pair) -> None:
    found = pair.step(3)
    small = {name: np.zeros(1, np.int32) for name in FIELDS if name not in found.fields}
    tensors = StepTensors.from_arrays(
        StepArrays(step=3, num_tokens_global=7, fields={**found.fields, **small}, header=b"h")
    )
    assert tensors.tokens is not None
    found.fields["tokens"][1, 1] = 9
    assert tensors.tokens[1, 1] == 9


def test_a_block_has_an_arena_that_is_used_again_after_the_last_of_its_steps() -> None:
    worker, leader = SharedArrays(), MappedArrays()
    memory = StepMemory(worker.allocate)

    def block(value: int) -> list[StepArrays]:
        worker.release(leader.take_released())
        [ids] = memory.empty_together(2 * TOKENS, [np.int32])
        ids[:] = value
        fields = {"tokens": ids.reshape(2, -1), "max_seqlen": np.zeros(2, np.int32)}
        steps = [StepFacts(step=step, num_tokens_global=1) for step in range(2)]
        reply, descriptors = worker.pack(BlockArrays(steps=steps, fields=fields), b"two")
        assert len(reply.new) == len(descriptors) == (value in (1, 2)), "one descriptor a block"
        found = leader.unpack(reply, descriptors)
        return [found.step(number) for number in range(2)]

    first = block(1)
    del first[0]
    gc.collect()
    second = block(2)
    assert (first[0].fields["tokens"] == 1).all(), "a step of the first block is in use"
    del first, second
    gc.collect()
    [third, _] = block(3)
    assert (third.fields["tokens"] == 3).all()
