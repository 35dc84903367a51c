"""A loader bounds what a connection may send, and serves the others meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.support.catalogs import random_world
from tests.support.deadlines import LONG_S
from tests.support.fleets import fleet_reader, running
from tests.support.reading import expected, random_pieces, read_with_successors
from torchmix.service import connections
from torchmix.service.keys import client_keys, server_keys, write_keys
from torchmix.service.server import new_pair


def test_a_message_that_does_not_end_ends_its_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "MOST_UNHEARD_BYTES", 1 << 20)
    monkeypatch.setattr(connections, "LOOK_S", 0.0)
    world = random_world(tmp_path / "world", 5)
    catalog = world.index()
    asked = random_pieces(world, np.random.default_rng(1), 50)
    write_keys(tmp_path / "keys", new_pair, num_clients=1)
    keys = client_keys(tmp_path / "keys")
    with (
        running(catalog, world.directory, "tcp://127.0.0.1:0", keys=server_keys(tmp_path / "keys")) as loader,
        fleet_reader(catalog, [loader.endpoint], keys=keys) as reader,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as foe,
    ):
        for option, value in (
            (zmq.CURVE_SERVERKEY, keys.server),
            (zmq.CURVE_PUBLICKEY, keys.own.public),
            (zmq.CURVE_SECRETKEY, keys.own.secret),
        ):
            foe.setsockopt_string(option, value)
        foe.setsockopt(zmq.LINGER, 0)
        ended = foe.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        foe.connect(loader.endpoint)
        frame = bytes(1 << 20)
        for _ in range(99):
            foe.send(frame, zmq.SNDMORE, copy=False)
        foe.send(frame, copy=False)
        assert ended.poll(LONG_S * 1000), "the connection ends"
        foe.disable_monitor()
        ended.close(0)
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        assert reader.stats()["total_loader_reasked"] == 0, "the connection of another client stays"
    assert "a client's connection is ended: it has sent" in caplog.text
