"""A stream of a worker, without the worker: what it shows of its own progress."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.deadlines import LONG_S
from tests.support.loaders import write_job
from tests.support.processes import wait_until
from torchmix.parallel.place_tree import Layout
from torchmix.reader.page_cache import CacheRoom
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps.replica_steps import StreamOptions, StreamSettings
from torchmix.steps.state import encode_state, start_state
from torchmix.steps.worker.messages import (
    BlockReply,
    BlockRequest,
    Channel,
    FailedReply,
    Start,
    decode_reply,
    error_of,
)
from torchmix.steps.worker.shared_stream import SharedStream


def test_each_step_is_a_sign_of_life(tmp_path: Path) -> None:
    part = part_of(load_recipe(write_job(tmp_path)), "train")
    settings = StreamSettings(
        part=part,
        base=str(tmp_path),
        catalog_folder=str(tmp_path / "catalog"),
        cache_bytes=1 << 20,
        replica=0,
        layout=Layout(),
        options=StreamOptions(max_steps=3, look_ahead=1),
    )
    state = encode_state(start_state(Layout(), recipe=recipe_fingerprint(part)))
    start = Start(settings=settings, state=state, consumer=0, replica_of={0: 0})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leader, stream = Channel(ours), SharedStream(start, CacheRoom())
        seat = stream.join(start, Channel(theirs))
        assert seat is not None
        signs = [stream.num_signs]
        for _ in range(2):  # blocks of one step and of two
            stream.ask(seat, BlockRequest(released=[]))
            _take(leader)
            signs.append(stream.num_signs)
        stream.leave(seat)
        stream.thread.join()
    assert sorted(set(signs)) == signs, "it grows with each"


def test_a_step_that_is_built_is_handed_over_while_the_next_one_waits_for_a_decision(tmp_path: Path) -> None:
    policy = "dynamic: {policy: odm, every: 1 steps, lag: 1 steps, decisions: ./log}\n"
    part = part_of(load_recipe(write_job(tmp_path, extra=policy)), "train")
    settings = StreamSettings(
        part=part,
        base=str(tmp_path),
        catalog_folder=str(tmp_path / "catalog"),
        cache_bytes=1 << 20,
        replica=0,
        layout=Layout(),
        decisions=str(tmp_path / "log"),
    )
    state = replace(start_state(Layout(), recipe=recipe_fingerprint(part)), log_branch="0" * 16)
    starts = [
        Start(settings=settings, state=encode_state(state), consumer=n, replica_of={0: 0, 1: 0}) for n in range(2)
    ]
    with ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in starts]
        stream = SharedStream(starts[0], CacheRoom())
        seats = [stream.join(one, Channel(pair[1])) for one, pair in zip(starts, pairs, strict=True)]
        first, second = seats
        assert first is not None and second is not None
        stack.callback(stream.thread.join)
        stack.callback(stream.leave, second)
        stack.callback(stream.leave, first)
        stream.ask(first, BlockRequest(released=[]))
        _take(Channel(pairs[0][0]))
        stream.ask(first, BlockRequest(released=[]))  # step 1, whose shares follow from the losses of step 0
        before = stream.num_signs
        wait_until(lambda: stream.num_signs > before, deadline_s=LONG_S, what="no step waits for a decision")
        stream.ask(second, BlockRequest(released=[]))
        assert _take(Channel(pairs[1][0])) == 0


@pytest.mark.parametrize("where", ["_keep", "_give"])
def test_a_fault_while_steps_are_handed_over_comes_to_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of its own")

    monkeypatch.setattr(SharedStream, where, fail)
    part = part_of(load_recipe(write_job(tmp_path)), "train")
    folder = str(tmp_path / "catalog")
    settings = StreamSettings(
        part=part, base=str(tmp_path), catalog_folder=folder, cache_bytes=1 << 20, replica=0, layout=Layout()
    )
    state = encode_state(start_state(Layout(), recipe=recipe_fingerprint(part)))
    start = Start(settings=settings, state=state, consumer=0, replica_of={0: 0})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = SharedStream(start, CacheRoom())
        seat = stream.join(start, Channel(theirs))
        assert seat is not None
        stream.ask(seat, BlockRequest(released=[]))
        message, _ = Channel(ours).receive(timeout_s=LONG_S)
        reply = decode_reply(message)
        stream.leave(seat)
        stream.thread.join()
    assert isinstance(reply, FailedReply) and "a fault of its own" in str(error_of(reply))


def _take(leader: Channel) -> int:
    """The first step of the block that comes."""
    message, descriptors = leader.receive(timeout_s=LONG_S)
    for descriptor in descriptors:
        os.close(descriptor)
    reply = decode_reply(message)
    assert isinstance(reply, BlockReply)
    return reply.steps[0].step
