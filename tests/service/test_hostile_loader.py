"""A loader that lies: an honest client gets the right tokens from others or from files, and names the loader."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.catalogs import World, random_world
from tests.support.deadlines import LONG_S
from tests.support.fleets import PATIENT, fleet_of, several
from tests.support.reading import Pieces, expected, pieces, read_with_successors
from torchmix.catalog.store import Catalog
from torchmix.errors import CorruptPage, LoaderLost, SourceUnreadable
from torchmix.parallel.wire import ErrorForm
from torchmix.reader.reader import Reader
from torchmix.service import fleet as module
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.messages import (
    BusyReply,
    FailureReply,
    LoaderPong,
    LoaderRefusal,
    LoaderWelcome,
    PieceReply,
    decode_of_loader,
    encode,
    forms_of,
)
from torchmix.service.routed_reader import NodeFraction, NodeRoom, RoutedReader
from torchmix.service.served import PartToServe, ServedCatalogs
from torchmix.service.server import LoaderServer

Frames = tuple[bytes, memoryview]
Trick = Callable[["Liar", PieceReply, dict[str, Any], Frames], list[Frames]]
"""From a reply to what is said instead of it."""


class Liar(LoaderServer):
    """A loader that says something else than an honest one would."""

    def __init__(self, trick: Trick, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.trick = trick
        self.held: list[tuple[PieceReply, dict[str, Any], Frames]] = []

    def _send(self, sender: bytes, frames: Frames) -> Any:
        message, arrays = decode_of_loader(frames)
        said = [frames]
        if isinstance(message, PieceReply):
            said = self.trick(self, message, arrays, frames)
        elif isinstance(message, LoaderPong) and self.trick is silent_and_owes_nothing:
            said = [encode(replace(message, owed=0))]
        elif isinstance(message, LoaderWelcome) and self.trick is one_at_a_time:
            said = [encode(replace(message, window_bytes=0))]
        tracker = None
        for one in said:
            tracker = super()._send(sender, one)
        return tracker


def again(message: PieceReply, arrays: dict[str, Any], **changes: Any) -> Frames:
    return encode(replace(message, forms=forms_of(arrays), **changes), arrays)


def swapped(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    liar.held.append((message, arrays, frames))
    if len(liar.held) < 2:
        return []
    (one, ours, _), (other, theirs, _) = liar.held[-2:]
    return [again(one, ours, number=other.number), again(other, theirs, number=one.number)]


def of_an_earlier_request(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    liar.held.append((message, arrays, frames))
    first, of_first, _ = liar.held[0]
    return [again(first, of_first, number=message.number)] if len(liar.held) > 1 else [frames]


def repeated(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    liar.held.append((message, arrays, frames))
    return [each for _, _, each in liar.held[-3:]]


def of_another_number(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [again(message, arrays, number=message.number + 7)]


def shorter(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [again(message, {**arrays, "ids": arrays["ids"][:-1]})]


def of_floats(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [again(message, {**arrays, "ids": arrays["ids"].astype(np.float32)})]


def of_other_lengths(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [again(message, {**arrays, "ids.lengths": arrays["ids.lengths"][::-1] + 1})]


def with_more(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [again(message, {**arrays, "row/x": arrays["ids"], "row/x.lengths": arrays["ids.lengths"] - 9})]


def damaged(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [(frames[0], memoryview(bytes(frames[1]) + b"x"))]


def failing(kind: str, *arguments: Any) -> Trick:
    def fail(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
        error = ErrorForm(kind=kind, text="it says so", arguments=arguments)
        return [encode(FailureReply(number=message.number, error=error))]

    fail.__name__ = f"failing by {kind}"
    return fail


def unknown(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [encode(LoaderRefusal(reason="who are you", is_unknown=True))]


def busy(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [encode(BusyReply(number=message.number))]


def silent(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return []


def silent_and_owes_nothing(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return []


def one_at_a_time(liar: Liar, message: PieceReply, arrays: dict[str, Any], frames: Frames) -> list[Frames]:
    return [frames]


NAMED: tuple[Trick, ...] = (
    swapped,
    of_an_earlier_request,
    shorter,
    of_floats,
    of_other_lengths,
    with_more,
    failing("MemoryError"),
    failing("PlanError", "row 3 of another catalog"),
    failing("RankLost", "rank 3", 3),
    failing("CorruptPage", 1, 2, 3, 4, 5, 6, 7),
    failing("LoaderClosed"),
    failing("SystemExit"),
)
"""Those that a client names the loader for."""
OTHERS: tuple[Trick, ...] = (
    repeated,
    of_another_number,
    damaged,
    unknown,
    busy,
    silent,
    silent_and_owes_nothing,
    one_at_a_time,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return random_world(tmp_path_factory.mktemp("world"), 5)


@pytest.fixture(scope="module")
def catalog(world: World) -> Catalog:
    return world.index()


@contextlib.contextmanager
def lying(trick: Trick, catalog: Catalog, world: World, bind: str) -> Iterator[Liar]:
    served = ServedCatalogs({"train": PartToServe(catalog=catalog)}, world.directory, cache_bytes=1 << 24)
    server = Liar(trick, served, bind=bind)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(LONG_S)
        served.close()


def of_equal_lengths(world: World) -> list[Pieces]:
    """Requests that no length tells apart."""
    documents = world.documents["web"]
    rows = [row for row, document in enumerate(documents) if len(document) >= 8]
    source = sorted(world.documents).index("web")
    return [pieces(*[(source, row, 0, 8) for row in rows[start::9]]) for start in range(3)]  # of all pages


@contextlib.contextmanager
def asking(
    trick: Trick,
    world: World,
    catalog: Catalog,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_honest: int,
    reply_s: float | None = None,
) -> Iterator[tuple[FleetReader, str]]:
    """`reply_s` is how long replies are waited for: a moment, since some tricks are that none comes."""
    if not num_honest:
        monkeypatch.setattr(module, "MOST_ASKED", 4)
    monkeypatch.setattr(module, "BUSY_S", 0.001)
    monkeypatch.setattr("torchmix.service.fleet_reader.TARGET_BYTES", 300)  # many requests
    monkeypatch.setattr("torchmix.service.members.PING_S", 0.01)
    monkeypatch.setattr(module, "PING_S", 0.01)
    folder.chmod(0o700)
    patience = replace(PATIENT, reply_s=reply_s or (0.5 if num_honest else 0.1))
    with (
        lying(trick, catalog, world, f"ipc://{folder}/liar") as liar,
        several(world, catalog, folder / "s", num_honest) as honest,
    ):
        fleet = fleet_of(catalog, [liar.endpoint, *(one.endpoint for one in honest)], patience=patience)
        with contextlib.closing(FleetReader(catalog, fleet)) as reader:
            yield reader, liar.endpoint


@pytest.mark.slow
@pytest.mark.parametrize("trick", [*NAMED, *OTHERS], ids=lambda trick: trick.__name__)
def test_an_honest_loader_beside_it_is_asked(
    trick: Trick,
    world: World,
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with asking(trick, world, catalog, tmp_path, monkeypatch, num_honest=1) as (reader, liar):
        for asked in of_equal_lengths(world):
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        stats = reader.stats()
    if trick in NAMED:
        assert stats["total_loader_failed"] > 0
        assert f"loader {liar} cannot answer a request" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("trick", [*NAMED, *OTHERS], ids=lambda trick: trick.__name__)
def test_files_are_read_where_it_is_alone(
    trick: Trick, world: World, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trick is busy:
        return  # a loader may be busy for as long as it likes
    with asking(trick, world, catalog, tmp_path, monkeypatch, num_honest=0) as (there, _):
        reader = RoutedReader(catalog, there, lambda: Reader(catalog, world.directory, cache_bytes=1 << 24))
        for asked in of_equal_lengths(world):
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        reader.close()


@pytest.mark.parametrize(
    "trick", [swapped, of_an_earlier_request, shorter, unknown, failing("PlanError", "x")], ids=lambda one: one.__name__
)
def test_a_node_without_room_tries_itself_what_a_loader_lies_about(
    trick: Trick, world: World, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> Reader:
        return Reader(catalog, world.directory, cache_bytes=0)

    with asking(trick, world, catalog, tmp_path, monkeypatch, num_honest=0) as (there, _):
        reader = RoutedReader(catalog, there, opened, node_fraction=NodeFraction(1), room=NodeRoom(0))
        with contextlib.closing(reader):
            for asked in of_equal_lengths(world):
                np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
            stats = reader.stats()
    assert stats["total_node_tokens"] > 0 and stats["cache_bytes"] == 0


def test_the_loader_is_named_where_files_are_not_seen(
    world: World, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen() -> Reader:
        raise SourceUnreadable("no such file")

    trick = failing("MemoryError")
    with asking(trick, world, catalog, tmp_path, monkeypatch, num_honest=0, reply_s=LONG_S) as (there, liar):
        reader = RoutedReader(catalog, there, unseen)
        with pytest.raises(LoaderLost, match=f"{liar}: RuntimeError: MemoryError: it says so.*no such file"):
            read_with_successors(reader, of_equal_lengths(world)[0])


@pytest.mark.parametrize("num_honest", [0, 1])
def test_damage_that_one_loader_tells_of_is_raised_where_no_other_reads(
    num_honest: int, world: World, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trick = failing("CorruptPage", "a page is damaged", "source 'web': /data/web.parquet")
    with asking(trick, world, catalog, tmp_path, monkeypatch, num_honest=num_honest, reply_s=LONG_S) as (reader, _):
        asked = of_equal_lengths(world)[0]
        if num_honest:
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        else:
            with pytest.raises(CorruptPage, match="a page is damaged"):
                read_with_successors(reader, asked)
