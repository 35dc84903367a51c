"""Trial: valid messages that lie, and floods, at a loader that an honest client asks meanwhile.

    python -m tests.trials.loader_meaning --seed 1 --count 100000 --flood-mib 1024 --out meaning.json

A lie is a message whose frames are right and one of whose fields is not: out of its bounds, huge, negative, out of
order, repeated, of another request or another client. Lie i follows from the seed and i alone, so a trial that was
stopped goes on where it was. The foe has a key of a client, as the honest one has. Each answer to the honest client is
compared with the files. The note has what became of the lies, and of each flood the longest wait of the honest client,
the most memory of the loader, and how often the loader ended; it never ends by a signal.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from tests.support.catalogs import World, random_world
from tests.support.fleets import fleet_of, hello_of
from tests.support.loader_messages import EXAMPLES, example_arrays
from tests.support.reading import random_pieces, read_with_successors
from torchmix.catalog.store import Catalog
from torchmix.errors import WireError
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.keys import client_keys, write_keys
from torchmix.service.main import LoaderStart
from torchmix.service.members import FleetPatience
from torchmix.service.messages import (
    FailureReply,
    LoaderPing,
    LoaderPong,
    PagesAhead,
    PieceReply,
    PieceRequest,
    decode_of_loader,
    encode,
    forms_of,
)
from torchmix.service.pool import LoaderPool, starts_of
from torchmix.service.server import new_pair

BATCH = 100
"""Lies of one connection."""
ANSWER_S = 300.0
EDGES = (-(1 << 63), -(1 << 31), -1, 0, 1, (1 << 31) - 1, 1 << 40, 1 << 62, (1 << 63) - 1)
NEAR_ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


class Siege:
    """A loader process, an honest client in a thread, and ways to come to the loader as a foe."""

    def __init__(self, folder: Path, seed: int, stack: ExitStack) -> None:
        self.world: World = random_world(folder / "world", seed)
        self.catalog: Catalog = self.world.index()
        self.seed, self.recipe_seed = seed, self.world.recipe.seed
        write_keys(folder / "keys", new_pair, num_clients=2)
        near = folder / "near"
        near.mkdir(mode=0o700)
        start = LoaderStart(
            parts=self._parts(),
            base=str(self.world.directory),
            catalog_folder=str(self.world.directory / self.world.recipe.catalog),
            cache_bytes=1 << 24,
            bind="tcp://127.0.0.1:0",
            keys=str(folder / "keys"),
            near=f"ipc://{near}",
        )
        self.pool = LoaderPool(starts_of(start, 1))
        stack.callback(self.pool.close)
        [self.endpoint] = self.pool.endpoints
        self.near = str(near / "0")
        self._keys = client_keys(folder / "keys" / "client-1.secret")
        own = client_keys(folder / "keys" / "client-0.secret")
        patience = FleetPatience(silence_s=60.0, join_s=60.0, lost_s=ANSWER_S)
        fleet = fleet_of(self.catalog, [self.endpoint], keys=own, patience=patience, seed=self.recipe_seed)
        self._client = FleetReader(self.catalog, fleet)
        self._here = Reader(self.catalog, self.world.directory, cache_bytes=1 << 24, seed=self.recipe_seed)
        self.here = Reader(self.catalog, self.world.directory, cache_bytes=1 << 24, seed=self.recipe_seed)
        self.num_right, self.worst_s, self.memory = 0, 0.0, 0
        self.fault = ""
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._ask, self._measure)]
        for each in self._threads:
            each.start()
        stack.callback(self._end)

    def _parts(self) -> dict[str, Any]:
        from torchmix.recipe.parts import part_of

        return {"train": part_of(self.world.recipe, "train")}

    def _end(self) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()
        self._client.close()
        self._here.close()
        self.here.close()

    def _ask(self) -> None:
        chance = np.random.default_rng([self.seed, 7])
        while not self._is_over.is_set():
            asked = random_pieces(self.world, chance, 40)
            began_s = time.monotonic()
            try:
                found = read_with_successors(self._client, asked)
                self.worst_s = max(self.worst_s, time.monotonic() - began_s)
                assert np.array_equal(found, read_with_successors(self._here, asked)), "wrong tokens"
            except Exception as error:  # whatever the honest client meets is what the trial is about
                self.fault = f"{type(error).__name__}: {error}"
                return
            self.num_right += 1

    def _measure(self) -> None:
        while not self._is_over.wait(0.02):
            with suppress(OSError, ValueError, IndexError):
                words = Path(f"/proc/{self.pool.pids[0]}/statm").read_text().split()
                self.memory = max(self.memory, (int(words[1]) - int(words[2])) * 4096)

    def wait_for_answers(self, count: int = 3) -> None:
        """Until the honest client has got some more."""
        until, limit_s = self.num_right + count, time.monotonic() + ANSWER_S
        while self.num_right < until and not self.fault:
            assert time.monotonic() < limit_s, "the honest client waits for ever"
            time.sleep(0.01)

    @contextmanager
    def noted(self, note: dict[str, Any]) -> Iterator[None]:
        """What the honest client and the loader make of something."""
        self.wait_for_answers()
        self.worst_s, self.memory, lost, right = 0.0, 0, self.pool.num_lost, self.num_right
        try:
            yield
        finally:
            self.wait_for_answers()
            note["worst_wait_s"] = round(max(self.worst_s, note.get("worst_wait_s", 0.0)), 3)
            note["most_memory_mib"] = max(self.memory >> 20, note.get("most_memory_mib", 0))
            note["loader_ended"] = note.get("loader_ended", 0) + self.pool.num_lost - lost
            note["honest_answers"] = note.get("honest_answers", 0) + self.num_right - right
            if self.fault:
                note["honest_client_failed"] = self.fault

    @contextmanager
    def foe(self, *, hello: Any = None, **options: int | bytes) -> Iterator[Any]:
        """A connection of the foe's, with a hello."""
        context = zmq.Context()
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.SNDTIMEO, 1000)
        link.setsockopt_string(zmq.CURVE_SERVERKEY, self._keys.server)
        link.setsockopt_string(zmq.CURVE_PUBLICKEY, self._keys.own.public)
        link.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.own.secret)
        for name, value in options.items():
            link.setsockopt(getattr(zmq, name), value)
        link.connect(self.endpoint)
        if hello is None:
            hello = self.hello()
        if hello:
            link.send_multipart(encode(hello))
        try:
            yield link
        finally:
            link.close(0)
            context.term()

    def hello(self, **changes: Any) -> Any:
        """What an honest client says first."""
        from torchmix.service.served import transforms_digest

        digest = transforms_digest(self.catalog, self.recipe_seed)
        return hello_of(self.catalog, **{"transforms": digest, **changes})

    def pieces(self, chance: random.Random, count: int) -> dict[str, Any]:
        """Pieces that exist."""
        rng = np.random.default_rng(chance.getrandbits(63))
        source, row, start, tokens = random_pieces(self.world, rng, count)[:4]
        return {
            "source": np.ascontiguousarray(source, np.int32),
            "row": np.ascontiguousarray(row, np.int64),
            "epoch": np.zeros(len(row), np.int64),
            "start": np.ascontiguousarray(start, np.int64),
            "tokens": np.ascontiguousarray(tokens, np.int64),
        }


def lie(siege: Siege, number: int) -> tuple[str, Any, dict[str, Any], bool]:
    """Lie `number`: its kind, the message with its arrays, and whether it asks for what there is."""
    chance = random.Random(f"{siege.seed} {number}")
    arrays = siege.pieces(chance, chance.randint(1, 30))
    kind = chance.choice(("row", "source", "start", "tokens", "epoch", "sum", "order", "repeated", "apart", "hello"))
    kind = chance.choice((kind, kind, kind, "ahead", "number", "of a loader"))
    at, edge, is_true = chance.randrange(len(arrays["row"])), chance.choice(EDGES), False
    fields: dict[str, Any] = {"number": number, "patience_ms": 600_000}
    match kind:
        case "row" | "start" | "tokens" | "epoch":
            arrays[kind][at if chance.random() < 0.8 else slice(None)] = edge + chance.choice((0, 0, 1, -1)) * (
                abs(edge) < 1 << 62
            )
        case "source":
            arrays["source"][at] = np.clip(edge, -(1 << 31), (1 << 31) - 1)
        case "sum":
            arrays["start"][at], arrays["tokens"][at] = chance.choice(
                (((1 << 63) - 1, 1), (-(1 << 63), 0), ((1 << 62), 0), (-1, 1), (1, (1 << 62) - 1), ((1 << 31) - 1, 3))
            )
        case "order":
            arrays, is_true = {name: column[::-1].copy() for name, column in arrays.items()}, True
        case "repeated":
            arrays, is_true = {name: np.repeat(column, 30) for name, column in arrays.items()}, True
        case "apart":  # every other token of a row
            tokens = siege.catalog.sources[list(siege.catalog.sources)[int(arrays["source"][at])]].sizes.tokens
            start = np.arange(0, int(tokens[int(arrays["row"][at])]), 2)[:20_000]
            arrays = {name: np.repeat(column[at : at + 1], len(start)) for name, column in arrays.items()}
            arrays["start"], arrays["tokens"] = start, np.ones(len(start), np.int64)
            is_true = len(start) > 0
        case "number":
            fields |= {"number": chance.choice((0, 1, 1 << 62)), "patience_ms": chance.choice((0, 1 << 62))}
        case "hello":
            return (
                kind,
                siege.hello(
                    **chance.choice(
                        (
                            {"catalog": "f" * 16},
                            {"transforms": b"\0" * 8},
                            {"masked": ("web", "web")},
                            {"client": "CRITICAL\n" * 400},
                            {},
                        )
                    )
                ),
                {},
                False,
            )
        case "ahead":
            pages = {"page": np.array([chance.choice(EDGES) for _ in range(chance.randint(0, 50))], np.int64)}
            if chance.random() < 0.5:
                pages = {"page": np.arange(chance.randint(1, 50))}
            source = chance.choice((0, 1, 1 << 31, 1 << 62))
            return (
                kind,
                PagesAhead(source=source, is_over=chance.random() < 0.5, forms=forms_of(pages)),
                pages,
                False,
            )
        case _:
            message = chance.choice(EXAMPLES)
            return kind, message, example_arrays(message), False
    return kind, PieceRequest(forms=forms_of(arrays), **fields), arrays, is_true


def tell_lies(siege: Siege, begin: int, stop: int, counts: Counter[str]) -> None:
    """Tell some lies over one connection, and look at what comes back."""
    asked: dict[int, dict[str, Any]] = {}
    with siege.foe() as link:
        for number in range(begin, stop):
            kind, message, arrays, is_true = lie(siege, number)
            counts[f"told: {kind}"] += 1
            if is_true and message.number not in asked:
                asked[message.number] = arrays
            link.send_multipart(encode(message, arrays))
            link.send_multipart(encode(siege.hello()))
        link.send_multipart(encode(LoaderPing(number=1 << 61)))
        limit_s, found = time.monotonic() + ANSWER_S, None
        while time.monotonic() < limit_s:
            if not link.poll(1000):
                link.send_multipart(encode(LoaderPing(number=1 << 61)))
                continue
            try:
                found, given = decode_of_loader(link.recv_multipart())
            except WireError as error:
                counts[f"unreadable: {error}"] += 1
                continue
            if isinstance(found, LoaderPong) and found.number == 1 << 61 and not found.owed:
                return
            if isinstance(found, FailureReply):
                counts[f"answered: {found.error.kind}"] += 1
            elif not isinstance(found, LoaderPong):
                counts[f"answered: {type(found).__name__}"] += 1
            if isinstance(found, PieceReply) and found.number in asked:
                pieces = asked.pop(found.number)
                ours = siege.here.read(WantedPieces.end_to_end(**pieces))
                assert np.array_equal(given["ids"], ours.values), "what is asked for twice or out of order is right"
    raise AssertionError(f"no answer to a ping after lies {begin} to {stop}")


def pings_unread(siege: Siege, _: int) -> None:
    """A hello and 3,000 pings, of which nothing is read; then the connection ends."""
    for pause_s in (0.0, 0.0, 0.0, 0.5, 3.0):
        siege.wait_for_answers(1)
        with siege.foe(RCVHWM=1, RCVBUF=4096) as link, suppress(zmq.Again):
            for number in range(3000):
                link.send_multipart(encode(LoaderPing(number=number)))
            time.sleep(pause_s)


def pings_of_zmtp(siege: Siege, _: int) -> None:
    """Frames and PINGs of ZeroMQ's own between them, faster than they are taken; then the connection ends."""
    for _ in range(5):
        siege.wait_for_answers(1)  # so that a loader listens
        with socket.socket(socket.AF_UNIX) as link, suppress(OSError):
            link.settimeout(2.0)
            link.connect(siege.near)
            body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
            link.sendall(NEAR_ZMTP + bytes([4, len(body)]) + body)
            link.recv(64)
            frame = b"\x00\x01a"
            for _ in range(20):
                link.sendall(frame * 300 + (frame + b"\x04\x07\x04PING\x00\x00") * 500)


def endless_message(siege: Siege, mib: int) -> None:
    """One message of many frames."""
    frame = bytes(1 << 20)
    with siege.foe() as link, suppress(zmq.Again):
        for k in range(mib):
            link.send(frame, zmq.SNDMORE if k < mib - 1 else 0, copy=False)
        _until_sent(siege, link)


def frames_before_hello(siege: Siege, mib: int) -> None:
    """Messages of 1 MiB that are none, before any hello."""
    frame = bytes(1 << 20)
    with siege.foe(hello=False) as link, suppress(zmq.Again):
        for _ in range(mib):
            link.send_multipart([b"x", frame], copy=False)
        _until_sent(siege, link)


def small_frames(siege: Siege, mib: int) -> None:
    """Messages of 1 byte."""
    with siege.foe(SNDHWM=0) as link, suppress(zmq.Again):
        for _ in range(mib * 500):
            link.send(b"x")
        _until_sent(siege, link)


def pages_ahead(siege: Siege, mib: int) -> None:
    """Pages of one source, over and over."""
    pages = {"page": np.zeros(1 << 17, np.int64)}
    message = PagesAhead(source=0, is_over=False, forms=forms_of(pages))
    with siege.foe() as link, suppress(zmq.Again):
        for _ in range(mib):
            link.send_multipart(encode(message, pages), copy=False)
        _until_sent(siege, link)


def replies_unread(siege: Siege, mib: int) -> None:
    """Requests of which no reply is read."""
    sizes = [(int(source.sizes.tokens.max()), s) for s, source in enumerate(siege.catalog.sources.values())]
    tokens, s = max(sizes)
    row = int(list(siege.catalog.sources.values())[s].sizes.tokens.argmax())
    count = (1 << 21) // (4 * tokens + 40)
    arrays = {
        "source": np.full(count, s, np.int32),
        "row": np.full(count, row),
        "epoch": np.zeros(count, np.int64),
        "start": np.zeros(count, np.int64),
        "tokens": np.full(count, tokens),
    }
    with siege.foe(RCVHWM=1, RCVBUF=4096) as link, suppress(zmq.Again):
        for number in range(mib):
            fields = {"number": number, "patience_ms": 600_000}
            link.send_multipart(encode(PieceRequest(forms=forms_of(arrays), **fields), arrays))
        time.sleep(5.0)


def connections(siege: Siege, mib: int) -> None:
    """Connections that say nothing, and that say hello and no more."""
    host, port = siege.endpoint.removeprefix("tcp://").rsplit(":", 1)
    with ExitStack() as stack:
        for _ in range(min(300, 10 * mib)):
            with suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), 5.0))
        for _ in range(min(100, mib)):
            stack.enter_context(siege.foe())
        time.sleep(3.0)


def endless_messages(siege: Siege, mib: int) -> None:
    """Messages of many frames over many connections, each within its own bound."""
    frame = bytes(1 << 20)
    with ExitStack() as stack, suppress(zmq.Again):
        links = [stack.enter_context(siege.foe()) for _ in range(max(2, mib // 25))]
        for link in links:
            for k in range(24):
                link.send(frame, zmq.SNDMORE if k < 23 else 0, copy=False)
        for link in links:
            link.send(frame, zmq.SNDMORE, copy=False)
        _until_sent(siege, links[0])


def one_identity(siege: Siege, _: int) -> None:
    """Two connections that say they are the same client, each with requests; and hellos over and over."""
    asked = siege.pieces(random.Random(siege.seed), 5)
    for _ in range(20):
        with siege.foe(ROUTING_ID=b"client") as one, siege.foe(ROUTING_ID=b"client") as other:
            for number in range(50):
                for link in (one, other):
                    message = PieceRequest(number=number, patience_ms=600_000, forms=forms_of(asked))
                    link.send_multipart(encode(message, asked))
                    link.send_multipart(encode(siege.hello()))


Floods = tuple[Callable[[Siege, int], None], ...]
FLOODS: Floods = (
    pings_unread,
    pings_of_zmtp,
    connections,
    frames_before_hello,
    small_frames,
    pages_ahead,
    replies_unread,
    endless_message,
    endless_messages,
    one_identity,
)


def _until_sent(siege: Siege, link: Any) -> None:
    """Wait until what was sent has gone, or the loader has ended the connection."""
    monitor = link.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    limit_s, received = time.monotonic() + 30.0, -1
    while time.monotonic() < limit_s and not monitor.poll(500):
        now = siege.memory
        if now == received:
            break
        received = now
    link.disable_monitor()
    monitor.close(0)


def run(folder: Path, seed: int, count: int, *, flood_mib: int, out: Path, floods: Floods = FLOODS) -> dict[str, Any]:
    """Lies up to `count`, then the floods that were not yet; the note, which is written after each."""
    note: dict[str, Any] = {"seed": seed, "done": 0, "flood_mib": flood_mib, "counts": {}, "lies": {}, "floods": {}}
    if out.exists():
        note = json.loads(out.read_text())
        assert note["seed"] == seed, f"{out} is of seed {note['seed']}"
    signals = _Signals()
    package = logging.getLogger("torchmix")
    package.addHandler(signals)
    try:
        with ExitStack() as stack:
            siege = Siege(folder, seed, stack)
            counts: Counter[str] = Counter(note["counts"])
            while note["done"] < count and not siege.fault:
                stop = min(count, note["done"] + 10 * BATCH)
                with siege.noted(note["lies"]):
                    for begin in range(note["done"], stop, BATCH):
                        tell_lies(siege, begin, min(stop, begin + BATCH), counts)
                note["done"], note["counts"] = stop, dict(counts)
                _write(out, note)
            for flood in floods:
                if flood.__name__ not in note["floods"]:
                    found: dict[str, Any] = {}
                    with siege.noted(found):
                        flood(siege, flood_mib)
                    note["floods"][flood.__name__] = found | {"by_signal": signals.take()}
                    _write(out, note)
    finally:
        package.removeHandler(signals)
    return note


class _Signals(logging.Handler):
    """Loaders that ended by a signal."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "has ended by signal" in text:
            self._seen.append(text.rsplit(" ", 1)[1])

    def take(self) -> list[str]:
        """Those since the last call."""
        found, self._seen = self._seen, []
        return found


def _write(out: Path, note: dict[str, Any]) -> None:
    new = out.with_suffix(".new")
    new.write_text(json.dumps(note, indent=1))
    new.replace(out)


def main(words: list[str] | None = None) -> int:
    """Run the trial; 1 where the honest client was failed or the loader ended by a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--flood-mib", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="these floods alone")
    arguments = parser.parse_args(words)
    floods = tuple(each for each in FLOODS if not arguments.only or each.__name__ in arguments.only)
    with tempfile.TemporaryDirectory() as folder:
        note = run(
            Path(folder),
            arguments.seed,
            arguments.count,
            flood_mib=arguments.flood_mib,
            out=arguments.out,
            floods=floods,
        )
    has_failed = "honest_client_failed" in json.dumps(note) or any(one["by_signal"] for one in note["floods"].values())
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
