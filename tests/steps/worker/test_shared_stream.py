"""A stream of a worker, without the worker: what it shows of its own progress."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.support.loaders import write_job
from torchmix.parallel.place_tree import Layout
from torchmix.reader.page_cache import CacheRoom
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.state import encode_state, start_state
from torchmix.steps.worker.messages import Channel, Start, StepReply, StepRequest, decode_reply
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
        max_steps=3,
    )
    state = encode_state(start_state(Layout(), recipe=recipe_fingerprint(part)))
    start = Start(settings=settings, state=state, consumer=0, replica_of={0: 0}, look_ahead=1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leader, stream = Channel(ours), SharedStream(start, CacheRoom())
        seat = stream.join(start, Channel(theirs))
        assert seat is not None
        signs = [stream.num_signs]
        for _ in range(3):
            stream.ask(seat, StepRequest(released=[]))
            message, descriptors = leader.receive()
            assert isinstance(decode_reply(message), StepReply)
            for descriptor in descriptors:
                os.close(descriptor)
            signs.append(stream.num_signs)
        stream.leave(seat)
        stream.thread.join()
    assert sorted(set(signs)) == signs, "it grows with each"
