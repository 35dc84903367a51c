"""A loader stays up and fair whatever is sent to it, and says no by name."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from tests.support.catalogs import random_world
from tests.support.deadlines import LONG_S
from tests.support.fleets import PATIENT, fleet_of, fleet_reader, hello_of, running, several
from tests.support.loader_messages import EXAMPLES, damaged, example_arrays
from tests.support.processes import wait_until
from tests.support.reading import expected, random_pieces, read_with_successors
from torchmix.catalog.store import Catalog
from torchmix.errors import LoaderLost, OptionError, PlanError
from torchmix.service.client import LoaderLinks
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.keys import ClientKeys, client_keys, server_keys, write_keys
from torchmix.service.main import clients_within
from torchmix.service.messages import (
    MOST_BODY_BYTES,
    MOST_PAGES,
    BusyReply,
    FailureReply,
    LoaderPing,
    LoaderPong,
    LoaderRefusal,
    LoaderWelcome,
    PagesAhead,
    PieceReply,
    PieceRequest,
    encode,
    forms_of,
)
from torchmix.service.served import Asker
from torchmix.service.server import LoaderServer, new_pair


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return random_world(tmp_path_factory.mktemp("world"), 5)


@pytest.fixture(scope="module")
def catalog(world) -> Catalog:
    return world.index()


@pytest.fixture
def folder(tmp_path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


class Caller:
    """A client that says what the test likes."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        self.endpoint = endpoint
        self.links = LoaderLinks(keys)
        self.links.open(endpoint)
        self.next(lambda said: said.news == "connected")

    def next(self, is_it: Callable[[Any], bool]) -> Any:
        """The next thing that comes, which must be this."""
        for _ in range(int(LONG_S)):
            for said in self.links.wait(1.0):
                assert is_it(said), said
                return said
        raise AssertionError("nothing came")

    def ask(self, message: Any, arrays: Any = None) -> Any:
        """Say something and take the answer."""
        assert self.links.send(self.endpoint, message, arrays) is not None
        return self.next(lambda said: said.message is not None).message

    def request(self, tokens: int, *, number: int = 1) -> Any:
        """Ask for a piece of the longest document of source 2."""
        arrays = {
            "source": np.array([2], np.int32),
            "row": np.array([0]),
            "epoch": np.array([0]),
            "start": np.array([0]),
            "tokens": np.array([tokens]),
        }
        message = PieceRequest(number=number, patience_ms=600_000, forms=forms_of(arrays))
        return self.ask(message, arrays)


@pytest.fixture
def caller(world, catalog, folder) -> Iterator[Caller]:
    with several(world, catalog, folder / "s", 1, window_bytes=4096) as [server]:
        one = Caller(server.endpoint)
        try:
            yield one
        finally:
            one.links.close()


def test_a_client_says_hello_first_and_again_when_it_is_forgotten(caller, catalog):
    for refusal in (caller.request(1), caller.ask(LoaderPing(number=0))):
        assert isinstance(refusal, LoaderRefusal) and refusal.is_unknown
    assert isinstance(caller.ask(hello_of(catalog)), LoaderWelcome)
    assert isinstance(caller.request(1), PieceReply)


def test_more_than_twice_the_window_of_one_client_is_answered_busy(caller, catalog):
    assert caller.ask(hello_of(catalog)).window_bytes == 4096
    busy = caller.request(2048, number=2)
    assert isinstance(busy, BusyReply) and busy.number == 2
    for number in (3, 4, 5):  # what has left counts no more
        assert isinstance(caller.request(1900, number=number), PieceReply | FailureReply)
    pong = caller.ask(LoaderPing(number=8))
    assert isinstance(pong, LoaderPong)
    assert (pong.number, pong.owed, pong.figures["requests_busy"], pong.figures["requests_accepted"]) == (8, 0, 1, 3)


def test_a_row_that_does_not_exist_is_an_error_of_the_plan(caller, catalog):
    caller.ask(hello_of(catalog))
    reply = caller.request(1000)
    assert isinstance(reply, FailureReply)
    assert isinstance(reply.error.error(), PlanError)


HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    "piece",
    [
        (0, 0, -HUGE - 1, 0),
        (0, 0, HUGE, 1),
        (0, 0, -1, 1),
        (0, 0, 1 << 62, 0),
        (0, HUGE, 0, 1),
        (0, -1, 0, 1),
        (0, -HUGE - 1, 0, 0),
        (3, 0, 0, 1),
        (-1, 0, 0, 1),
        ((1 << 31) - 1, 0, 0, 1),
    ],
    ids=str,
)
def test_a_request_for_what_is_not_there_fails_alone(world, catalog, folder, piece):
    source, row, start, tokens = piece
    arrays = {
        "source": np.array([0, source], np.int32),
        "row": np.array([0, row]),
        "epoch": np.array([0, 0]),
        "start": np.array([0, start]),
        "tokens": np.array([0, tokens]),
    }
    with several(world, catalog, folder / "s", 1) as [server], fleet_reader(catalog, [server.endpoint]) as reader:
        foe = Caller(server.endpoint)
        foe.ask(hello_of(catalog))
        reply = foe.ask(PieceRequest(number=1, patience_ms=600_000, forms=forms_of(arrays)), arrays)
        assert isinstance(reply, FailureReply) and isinstance(reply.error.error(), PlanError)
        asked = random_pieces(world, np.random.default_rng(1), 50)
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        foe.links.close()


@pytest.mark.parametrize(
    ("source", "pages"), [(0, [-1]), (0, [1 << 40]), (99, []), (1 << 62, [0]), (0, range(MOST_PAGES + 1))], ids=range(5)
)
def test_pages_that_are_not_there_are_no_message(caller, catalog, source, pages):
    caller.ask(hello_of(catalog))
    arrays = {"page": np.array(pages, np.int64)}
    message = PagesAhead(source=source, is_over=False, forms=forms_of(arrays))
    assert caller.links.send(caller.endpoint, message, arrays) is not None
    pong = caller.ask(LoaderPing(number=1))
    assert pong.figures["requests_bad_messages"] == 1


def test_who_says_hello_again_owes_no_less(world, catalog, folder):
    with several(world, catalog, folder / "s", 1, window_bytes=4096) as [server]:
        asker = Asker(b"me", catalog.fingerprint, time.monotonic(), owed_bytes=8000)
        server._clients[b"me"] = asker
        server._greet(b"me", hello_of(catalog))
        assert server._clients[b"me"] is asker and asker.owed_bytes == 8000


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"catalog": "f" * 16}, r"the client has catalog f{16}, this loader serves [0-9a-f]{16} \(train\)"),
        ({"transforms": b"\0" * 8}, "the client's transforms from rows to tokens are 0{16}"),
        ({"masked": ("web",)}, r"the client masks bad rows of \['web'\], this loader of \[\]"),
    ],
    ids=["catalog", "transform", "masked"],
)
def test_another_catalog_or_transform_is_refused_by_name(world, catalog, folder, changes, says):
    with several(world, catalog, folder / "s", 1) as [server]:
        fleet = fleet_of(catalog, [server.endpoint], hello=hello_of(catalog, **changes))
        with pytest.raises(LoaderLost, match=says):
            fleet.members.join()
        fleet.close()


def test_frames_that_are_no_messages_are_dropped_and_a_good_client_is_served(world, catalog, folder):
    with several(world, catalog, folder / "s", 1) as [server]:
        context = zmq.Context()
        foe = context.socket(zmq.DEALER)
        foe.setsockopt(zmq.LINGER, 0)
        foe.connect(server.endpoint)
        chance = random.Random(7)
        for _ in range(3000):
            message = chance.choice(EXAMPLES)
            frames = encode(message, example_arrays(message))
            foe.send_multipart(damaged(frames, chance) if chance.random() < 0.9 else [chance.randbytes(99)])
        wait_until(lambda: server.figures()["requests_bad_messages"] > 1000, deadline_s=LONG_S, what="a look at them")
        foe.send_multipart([b"x", bytes(MOST_BODY_BYTES * 8)])  # the connection ends
        with fleet_reader(catalog, [server.endpoint]) as reader:
            asked = random_pieces(world, np.random.default_rng(1), 50)
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        foe.close(0)
        context.term()


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://eth0:0", "tcp://10.0.0.7:7700", "tcp://[::]:0"]
)
def test_an_address_beyond_this_machine_needs_keys(world, catalog, bind):
    with pytest.raises(OptionError, match="reached from other machines"):
        LoaderServer(None, bind=bind)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://localhost:7700", "tcp://[::1]:0"])
def test_loopback_needs_keys_since_every_user_reaches_it(bind):
    with pytest.raises(OptionError, match=r"reached by every user of this machine: .*leave --bind out"):
        LoaderServer(None, bind=bind)


def test_a_socket_that_others_reach_or_that_is_taken_is_refused(world, catalog, folder):
    taken = pytest.raises(OptionError, match="exists, and a loader may listen there")
    with several(world, catalog, folder / "s", 1) as [server], taken:
        LoaderServer(None, bind=server.endpoint)
    (folder / "open").mkdir(mode=0o755)
    with pytest.raises(OptionError, match="chmod 700"):
        LoaderServer(None, bind=f"ipc://{folder}/open/0")
    with pytest.raises(OptionError, match="at most 107 bytes"):
        LoaderServer(None, bind=f"ipc://{folder}/{'x' * 107}")


@pytest.fixture(scope="module")
def key_folders(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("keys")
    write_keys(place / "ours", new_pair, num_clients=2)
    write_keys(place / "theirs", new_pair, num_clients=1)
    return place


@pytest.mark.parametrize(
    ("server", "client", "public", "says"),
    [
        ("ours", "ours", "ours", None),
        ("ours", "theirs", "ours", "does not know the public key|handshake failed"),
        ("ours", "ours", "theirs", "handshake failed"),
        ("ours", None, None, "wants keys"),
        (None, "ours", "ours", "the loader has no keys"),
    ],
    ids=["good", "unknown client", "wrong server", "client without", "server without"],
)
def test_the_matrix_of_keys(world, catalog, key_folders, tmp_path, server, client, public, says):
    keys = None
    if client is not None:
        for name, place in (("client-0.secret", client), ("server.public", public)):
            (tmp_path / name).write_bytes((key_folders / place / name).read_bytes())
            (tmp_path / name).chmod(0o600)
        keys = client_keys(tmp_path)
    server_side = None if server is None else server_keys(key_folders / server)
    bind = "tcp://127.0.0.1:0" if server_side is not None else ""
    with running(catalog, world.directory, bind, keys=server_side) as loader:
        if says is None:
            with fleet_reader(catalog, [loader.endpoint], keys=keys) as reader:
                asked = random_pieces(world, np.random.default_rng(1), 50)
                np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
            return
        fleet = fleet_of(catalog, [loader.endpoint], keys=keys, patience=PATIENT)
        try:
            with pytest.raises(LoaderLost, match=says):
                fleet.members.join()
        finally:
            fleet.close()


def test_a_client_whose_key_is_added_later_is_let_in(world, catalog, key_folders, tmp_path):
    write_keys(tmp_path / "k", new_pair, num_clients=1)
    with running(catalog, world.directory, "tcp://127.0.0.1:0", keys=server_keys(tmp_path / "k")) as loader:
        newcomer = new_pair()
        (tmp_path / "k" / "client-new.public").write_text(newcomer.public)
        (tmp_path / "k" / "client-new.secret").write_text(f"{newcomer.public}\n{newcomer.secret}")
        (tmp_path / "k" / "client-new.secret").chmod(0o600)
        with fleet_reader(catalog, [loader.endpoint], keys=client_keys(tmp_path / "k" / "client-new.secret")) as reader:
            assert reader.stats()["loaders_ready"] == 1


def test_a_client_whose_key_is_removed_is_asked_no_more(world, catalog, tmp_path):
    keys = tmp_path / "k"
    write_keys(keys, new_pair, num_clients=2)
    with running(catalog, world.directory, "tcp://127.0.0.1:0", keys=server_keys(keys)) as loader:
        others = Caller(loader.endpoint, client_keys(keys / "client-0.secret"))
        ours = Caller(loader.endpoint, client_keys(keys / "client-1.secret"))
        with contextlib.closing(others.links), contextlib.closing(ours.links):
            for one in (others, ours):
                assert isinstance(one.ask(hello_of(catalog)), LoaderWelcome)
                assert isinstance(one.request(1), PieceReply)
            (keys / "client-1.public").unlink()
            answers = []
            began_s = time.monotonic()
            while not answers or not isinstance(answers[-1], LoaderRefusal):
                assert time.monotonic() - began_s < LONG_S
                answers.append(ours.request(1, number=2 + len(answers)))
            assert "was removed from the loader's keys" in answers[-1].reason and not answers[-1].is_unknown
            assert isinstance(others.request(1, number=2), PieceReply)
            # Whoever connects again is not let in.
            ours.links.shut(loader.endpoint)
            ours.links.open(loader.endpoint)
            assert "does not know the public key" in ours.next(lambda said: said.news == "denied").reason
            # What it says over a connection that it has kept is not looked at, and not answered.
            assert loader.figures()["clients"] == 1 and loader.figures()["requests_denied"] >= 2


def test_what_a_client_says_forges_no_line_of_a_log(caller, catalog, caplog):
    forged = "me\n12:00:00 CRITICAL all data is lost\x1b[2J\u202e"
    assert isinstance(caller.ask(hello_of(catalog, client=forged, catalog=forged)), LoaderRefusal)
    [text] = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert "\n" not in text and text.isprintable() and r"me\n12:00:00 CRITICAL" in text
    caller.ask(hello_of(catalog, client="x" * 4096, catalog="y" * 4096))
    assert len(caplog.records[-1].getMessage()) < 3000


@pytest.mark.parametrize("is_open", [False, True], ids=["a folder of this user", "a folder that others write"])
def test_a_node_asks_its_own_loaders_without_keys(world, catalog, key_folders, tmp_path, is_open):
    """Over a socket in a folder of this user alone; over TCP, where CURVE holds, if others could have put it there."""
    near = tmp_path / "near"
    near.mkdir(mode=0o700)
    theirs = client_keys(key_folders / "theirs")  # which the loader does not know
    ours = server_keys(key_folders / "ours")
    with running(catalog, world.directory, "tcp://127.0.0.1:0", keys=ours, near=f"ipc://{near}/0") as loader:
        if is_open:
            near.chmod(0o770)
        keys = replace(theirs, near_now=lambda: {loader.endpoint: f"ipc://{near}/0"})
        asked = random_pieces(world, np.random.default_rng(1), 50)
        if not is_open:
            with fleet_reader(catalog, [loader.endpoint], keys=keys) as reader:
                np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        else:
            fleet = fleet_of(catalog, [loader.endpoint], keys=keys)
            with contextlib.closing(fleet), pytest.raises(LoaderLost, match="handshake failed"):
                FleetReader(catalog, fleet)
        # Whoever comes over TCP needs a key all the same.
        fleet = fleet_of(catalog, [loader.endpoint], keys=theirs)
        with contextlib.closing(fleet), pytest.raises(LoaderLost, match="handshake failed"):
            FleetReader(catalog, fleet)


def test_one_client_too_many_is_refused_by_name(world, catalog, folder):
    asked = random_pieces(world, np.random.default_rng(1), 50)
    with (
        running(catalog, world.directory, f"ipc://{folder}/0", most_clients=1) as loader,
        fleet_reader(catalog, [loader.endpoint]) as reader,
    ):
        fleet = fleet_of(catalog, [loader.endpoint])
        with contextlib.closing(fleet), pytest.raises(LoaderLost, match=r"serves 1 clients, .*ulimit -n"):
            FleetReader(catalog, fleet)
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))


@pytest.mark.parametrize(("files", "clients"), [(1024, 512), (20_000, 18_976), (1 << 20, (1 << 20) - 1024), (1, 1)])
def test_a_loader_serves_as_many_clients_as_it_may_have_files(files, clients):
    assert clients_within(files) == clients


def test_a_loader_that_has_nothing_to_do_sleeps(world, catalog, folder):
    with several(world, catalog, folder / "s", 1) as [server], fleet_reader(catalog, [server.endpoint]) as reader:
        read_with_successors(reader, random_pieces(world, np.random.default_rng(1), 50))
        turns = server.num_turns
        time.sleep(0.5)
        assert server.num_turns - turns < 100
