"""Who reads a page changes no token, and what is read here loses nothing with the loaders."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from tests.service.test_fleet_reader import until
from tests.support.catalogs import World, random_world
from tests.support.chats import make_chats, write_chats
from tests.support.files import make_tokens_file, random_tokens
from tests.support.fleets import fleet_of, several
from tests.support.formats import format_world
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.reading import Pieces, expected, pieces, random_pieces, read_with_successors, whole_documents
from tests.support.recipes import make_recipe
from torchmix.catalog.store import Catalog
from torchmix.errors import LoaderLost, SourceUnreadable
from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.members import FleetPatience
from torchmix.service.open_fleet import FleetSettings, open_fleet_reader
from torchmix.service.routed_reader import NUM_PARTS, NodeFraction, NodeRoom, RoutedReader
from torchmix.service.served import ServedCatalogs


class FixedFraction(NodeFraction):
    """A fraction that a test sets."""

    def __init__(self, fraction: float) -> None:
        super().__init__(1)
        self.fraction = fraction

    def look(self) -> float:
        return self.fraction


def files_of(world: World, catalog: Catalog, opened: list[Reader] | None = None) -> Callable[[], Reader]:
    """Opens the files of a world, and notes it."""

    def read_here() -> Reader:
        reader = Reader(catalog, world.directory, cache_bytes=1 << 24)
        if opened is not None:
            opened.append(reader)
        return reader

    return read_here


def joined(catalog: Catalog, endpoint: str) -> FleetReader:
    """Asks a loader that answers; when it has gone, nobody waits for another."""
    fleet = fleet_of(catalog, [endpoint])
    reader = FleetReader(catalog, fleet)
    fleet.members.patience = FleetPatience(lost_s=0.0)
    return reader


@contextmanager
def node_first(
    world: World, catalog: Catalog, endpoints: list[str], fraction: FixedFraction, join_s: float = 0.0
) -> Iterator[RoutedReader]:
    fleet = fleet_of(catalog, endpoints, patience=FleetPatience(lost_s=0.0, join_s=join_s))
    there = FleetReader(catalog, fleet, is_joined=False)
    reader = RoutedReader(catalog, there, files_of(world, catalog), node_fraction=fraction)
    try:
        yield reader
    finally:
        reader.close()


def ready(reader: RoutedReader, count: int) -> Callable[[], bool]:
    return lambda: reader._there.look() == count


@pytest.mark.parametrize("make", [random_world, format_world], ids=["parquet", "formats"])
def test_tokens_are_those_of_the_files_whoever_reads_them_and_the_share_says_who(tmp_path, make) -> None:
    world, fraction = make(tmp_path, 5), FixedFraction(1.0)
    catalog, rng = world.index(), np.random.default_rng(3)
    with (
        several(world, catalog, tmp_path / "s", 2) as loaders,
        node_first(world, catalog, [one.endpoint for one in loaders], fraction) as reader,
    ):
        until(ready(reader, 2))
        near, seen = [], []
        for fraction.fraction in (1.0, 0.7, 0.3, 0.0, 0.5):
            before = reader.stats()
            for asked in (*(random_pieces(world, rng, size) for size in (0, 1, 300)), whole_documents(world)):
                np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
            after = reader.stats()
            here, there = (after[name] - before[name] for name in ("total_node_tokens", "total_loader_tokens"))
            near.append(here / (here + there))
            seen.append(after["total_loader_requests"] - before["total_loader_requests"])
        assert near[0] == 1.0 and near[3] == 0.0 and seen[0] == 0 < seen[1]
        assert near[0] > near[1] > near[2] > near[3] < near[4] < near[1]
        assert after["total_loader_losses"] == 0 and after["node_fraction"] == 0.5
        assert after["bytes_served"] > 0


def test_tokens_without_a_label_are_those_of_a_reader_of_files_whoever_reads_them(tmp_path) -> None:
    source = write_chats(tmp_path, "chats", "parquet", [make_chats(1, 60)])
    batch = {"samples": 2, "length": 64}
    recipe = {"version": 1, "seed": 1, "batch": batch, "sources": {"chats": source}, "mixture": {"chats": 1}}
    catalog = index_recipe(check_recipe(recipe), tmp_path)
    world = SimpleNamespace(directory=tmp_path)
    tokens = catalog.sources["chats"].sizes.tokens.astype(np.int64)
    asked = WantedPieces.end_to_end(source=0, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens)
    here, fraction = Reader(catalog, tmp_path, cache_bytes=1 << 20), FixedFraction(1.0)
    wanted = here.read(asked)
    with (
        closing(here),
        several(world, catalog, tmp_path / "s", 1) as [loader],
        node_first(world, catalog, [loader.endpoint], fraction) as reader,
    ):
        until(ready(reader, 1))
        far = reader._there.runs_of_pieces(asked) >> np.uint64(11)
        fractions = [1.0, float(np.median(np.unique(far))) * 2.0**-53, 0.0]
        for fraction.fraction in fractions:
            found = reader.read(asked)
            np.testing.assert_array_equal(found.values, wanted.values)
            np.testing.assert_array_equal(found.successors, wanted.successors)
            np.testing.assert_array_equal(np.sort(found.unlabelled), np.sort(wanted.unlabelled))
        assert len(np.unique(far)) > 1, "some pages are on either side"
        assert reader.stats()["total_loader_tokens"] > 0 and len(wanted.unlabelled)


def test_pages_to_come_are_decoded_by_whom_they_are_asked_of(tmp_path) -> None:
    world, fraction = random_world(tmp_path, 5), FixedFraction(0.5)
    catalog = world.index()
    with (
        several(world, catalog, tmp_path / "s", 1) as [loader],
        node_first(world, catalog, [loader.endpoint], fraction) as reader,
    ):
        until(ready(reader, 1))
        reader.read(pieces().wanted())  # it looks for loaders
        with_pages = [
            (number, np.arange(source.pages.num_pages)) for number, source in enumerate(catalog.sources.values())
        ]
        for number, pages in with_pages:
            reader.warm(number, pages)
        total = sum(len(pages) for _, pages in with_pages)
        until(lambda: loader.figures().get("pages_decoded", 0) + reader.stats()["pages_decoded"] == total)
        assert 0 < reader.stats()["pages_decoded"] < total
        asked = whole_documents(world)
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        assert reader.stats()["cache_misses"] == loader.figures()["cache_misses"] == 0
        for number, pages in with_pages:
            reader.forget(number, pages)
        until(lambda: loader.figures()["cache_pages"] == 0 == reader.stats()["cache_pages"] or tick(reader, world))


@pytest.mark.parametrize("part", [1.0, 0.5, 0.1, 0.0])
def test_a_node_reads_the_pages_that_its_memory_holds_and_keeps_them(tmp_path, part) -> None:
    world = random_world(tmp_path, 5)
    catalog, asked = world.index(), whole_documents(world)
    pages = [(s, np.arange(source.pages.num_pages)) for s, source in enumerate(catalog.sources.values())]
    with closing(Reader(catalog, world.directory, cache_bytes=0)) as files:
        sizes = [np.array(files.planned_bytes(*one)) for one in pages]
    room = NodeRoom(int(part * sum(one.sum() for one in sizes)))
    with several(world, catalog, tmp_path / "s", 1) as [loader], ExitStack() as stack:
        reader = stack.enter_context(
            closing(
                RoutedReader(
                    catalog,
                    FleetReader(catalog, fleet_of(catalog, [loader.endpoint])),
                    lambda: Reader(catalog, world.directory, cache_bytes=room.room_bytes),
                    node_fraction=FixedFraction(1.0),
                    room=room,
                )
            )
        )
        for s, some in pages:
            reader.expect(s, [(s, None if s % 2 else some)])
        near = [(reader._there.runs_of_pages(*one) >> np.uint64(54)) < room.part * NUM_PARTS for one in pages]
        assert room.held_bytes == sum(one[mine].sum() for one, mine in zip(sizes, near, strict=True))
        for _ in range(2):
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
            stats = reader.stats()
            assert stats["cache_bytes"] <= room.held_bytes <= room.room_bytes
        assert stats["pages_decoded"] == sum(mine.sum() for mine in near), "a page that is read here is decoded once"
        assert stats["node_fraction"] == room.part and (stats["total_loader_tokens"] > 0) == (part < 1)
        if part == 0.5:
            room.room_bytes = 1  # as if others needed more
            reader.expect(0, [pages[0]])
            reader.read(pieces().wanted())
            assert reader.stats()["cache_bytes"] == 0, "pages that loaders are asked for from now on make room"


def test_pages_of_mapped_files_take_no_memory_of_the_node(tmp_path) -> None:
    sequences, lists = random_sequences(1, 50), random_tokens(2, 50)
    write_dataset(tmp_path / "mapped", sequences)
    make_tokens_file(tmp_path / "web.parquet", lists)
    sources = {"mapped": {"path": "mapped.idx", "tokens": None}, "web": {"path": "web.parquet"}}
    recipe = make_recipe(dict.fromkeys(sources, "50%"), sources=sources)
    documents = {"mapped": sequences, "web": [np.array(one or [], np.int64) for one in lists]}
    world = World(directory=tmp_path, recipe=recipe, documents=documents)
    catalog, asked = world.index(), whole_documents(world)
    with several(world, catalog, tmp_path / "s", 1) as [loader], ExitStack() as stack:
        there = FleetReader(catalog, fleet_of(catalog, [loader.endpoint]))
        files = files_of(world, catalog)
        reader = stack.enter_context(
            closing(RoutedReader(catalog, there, files, node_fraction=FixedFraction(1.0), room=NodeRoom(0)))
        )
        for s in range(2):
            reader.expect(s, [(s, None)])
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        of_mapped, of_web = (sum(map(len, documents[name])) for name in ("mapped", "web"))
        stats = reader.stats()
        assert (stats["total_node_tokens"], stats["total_loader_tokens"]) == (of_mapped, of_web)


def test_until_windows_are_known_the_pages_of_each_call_are_counted(tmp_path) -> None:
    world, rng = random_world(tmp_path, 5), np.random.default_rng(3)
    catalog, room = world.index(), NodeRoom(3000)
    with several(world, catalog, tmp_path / "s", 1) as [loader], ExitStack() as stack:
        there = FleetReader(catalog, fleet_of(catalog, [loader.endpoint]))
        files = files_of(world, catalog)
        reader = stack.enter_context(
            closing(RoutedReader(catalog, there, files, node_fraction=FixedFraction(1.0), room=room))
        )
        both = there.pages_of_pieces(pieces((0, 0, 0, 1), (1, 0, 0, 1)).wanted())
        assert [(s, some.tolist()) for s, some in both] == [(0, [0]), (1, [0])]
        for size in (0, 1, 300, 2):
            asked = random_pieces(world, rng, size)
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
            pages = there.pages_of_pieces(asked.wanted())
            needed = sum(sum(reader._files.planned_bytes(*one)) for one in pages)
            assert room.needed_bytes == needed and (room.part < 1) == (needed > 3000)
        reader.expect(0, [(0, np.arange(1))])
        assert room.needed_bytes == sum(reader._files.planned_bytes(0, np.arange(1))), "a call is not counted any more"


def test_sources_that_are_left_to_loaders_are_read_here_where_none_answers(tmp_path) -> None:
    world = random_world(tmp_path, 5)
    catalog, asked = world.index(), whole_documents(world)
    names = list(catalog.sources)
    theirs = asked.source == names.index("web")
    with ExitStack() as stack, ExitStack() as fleet:
        [loader] = fleet.enter_context(several(world, catalog, tmp_path / "s", 1))
        there = joined(catalog, loader.endpoint)
        files, words = files_of(world, catalog), {"here": [names[0]], "away": ["web"]}
        assert names[0] != "web"
        reader = stack.enter_context(
            closing(RoutedReader(catalog, there, files, node_fraction=FixedFraction(0.5), **words))
        )
        with closing(
            RoutedReader(catalog, joined(catalog, loader.endpoint), files, node_fraction=FixedFraction(0.5), away=names)
        ) as far:
            np.testing.assert_array_equal(read_with_successors(far, asked), expected(world, asked))
            assert far.stats()["node_fraction"] == 0.0, "all is left to loaders"
        for is_lost in (False, True):
            for chosen in (theirs, asked.source == 0):
                before = reader.stats()
                some = Pieces(*(column[chosen] for column in asked))
                np.testing.assert_array_equal(read_with_successors(reader, some), expected(world, some))
                here = reader.stats()["total_node_tokens"] - before["total_node_tokens"]
                assert here == (0 if chosen is theirs and not is_lost else some.tokens.sum())
            fleet.close()


def tick(reader: RoutedReader, world: World) -> bool:
    """Let the loader's figures follow."""
    read_with_successors(reader, random_pieces(world, np.random.default_rng(1), 0))
    return False


def test_without_loaders_it_reads_alone_says_so_once_and_asks_them_when_they_are_back(tmp_path, caplog) -> None:
    world, fraction = random_world(tmp_path, 5), FixedFraction(0.5)
    catalog, rng = world.index(), np.random.default_rng(3)
    endpoint = f"ipc://{tmp_path}/s/0"

    def read() -> None:
        asked = random_pieces(world, rng, 200)
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))

    def said() -> list[str]:
        found = [line for line in caplog.messages if "eads alone" in line]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING), node_first(world, catalog, [endpoint], fraction) as reader:
        for _ in range(3):
            read()
        assert len(found := said()) == 1 and endpoint in found[0] and "processors of this node are busy" in found[0]
        for losses in (1, 2):
            before = reader.stats()["total_loader_tokens"]
            (tmp_path / "s" / "0").unlink(missing_ok=True)
            with several(world, catalog, tmp_path / "s", 1):
                until(ready(reader, 1))
                read()
                assert reader.stats()["total_loader_tokens"] > before
            for _ in range(3):
                read()
            assert len(said()) == 1
            assert reader.stats()["total_loader_losses"] == losses


def test_loaders_that_come_are_not_missed_at_a_start(tmp_path, caplog) -> None:
    world, endpoint = random_world(tmp_path, 5), f"ipc://{tmp_path}/s/0"
    catalog, asked = world.index(), whole_documents(world)
    with (
        caplog.at_level(logging.WARNING),
        node_first(world, catalog, [endpoint], FixedFraction(0.5), join_s=1000.0) as reader,
    ):
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        assert reader.stats()["node_fraction"] == 1.0, "it reads all as long as none is there"
        assert "eads alone" not in caplog.text
        members = reader._there._fleet.members
        members.clock = lambda: time.monotonic() + 1001.0
        read_with_successors(reader, asked)
        assert "eads alone" in caplog.text


def test_loaders_that_end_while_they_are_asked_cost_no_token(tmp_path, monkeypatch) -> None:
    world, fraction = random_world(tmp_path, 5), FixedFraction(0.2)
    catalog, rng = world.index(), np.random.default_rng(3)
    with ExitStack() as stack, ExitStack() as fleet:
        [loader] = fleet.enter_context(several(world, catalog, tmp_path / "s", 1))
        reader = stack.enter_context(node_first(world, catalog, [loader.endpoint], fraction))
        until(ready(reader, 1))
        read = ServedCatalogs.read

        def ends(self, fingerprint, arrays):
            loader.stop()
            return read(self, fingerprint, arrays)

        monkeypatch.setattr(ServedCatalogs, "read", ends)
        for _ in range(3):
            asked = random_pieces(world, rng, 300)
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        stats = reader.stats()
        assert stats["total_loader_losses"] == 1 and stats["total_loader_tokens"] == 0


def test_what_loaders_cannot_read_is_tried_here(tmp_path, monkeypatch, caplog) -> None:
    world = random_world(tmp_path, 5)
    catalog, asked = world.index(), whole_documents(world)

    def fails(self, fingerprint, arrays):
        raise SourceUnreadable("input/output error", "web")

    monkeypatch.setattr(ServedCatalogs, "read", fails)
    with (
        several(world, catalog, tmp_path / "s", 1) as [loader],
        node_first(world, catalog, [loader.endpoint], FixedFraction(0.5)) as reader,
    ):
        until(ready(reader, 1))
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        assert reader.stats()["total_loader_tokens"] == 0 < reader.stats()["total_loader_failed"]
    assert "tries itself" in caplog.text


def test_settings_that_name_processors_give_a_reader_of_both(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torchmix.service.open_fleet.NodeFraction", lambda cpu: FixedFraction(cpu / 4))
    world = random_world(tmp_path, 5)
    catalog, asked = world.index(), whole_documents(world)
    with several(world, catalog, tmp_path / "s", 1) as [loader]:
        reader = open_fleet_reader(
            FleetSettings(endpoints=(loader.endpoint,), lost_s=0.0, node_cpu=2),
            catalog,
            world.directory,
            seed=0,
            masked=frozenset(),
            ids=None,
            cache_bytes=1 << 24,
            read_here=lambda: Reader(catalog, world.directory, cache_bytes=1 << 24),
        )
        with closing(reader):
            assert isinstance(reader, RoutedReader)
            until(ready(reader, 1))
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
            stats = reader.stats()
            assert stats["node_fraction"] == 0.5
            assert stats["total_node_tokens"] > 0 and stats["total_loader_tokens"] > 0


def test_files_are_opened_when_the_loss_of_the_last_loader_is_final(tmp_path, caplog) -> None:
    world = random_world(tmp_path, 5)
    catalog, rng, opened = world.index(), np.random.default_rng(3), list[Reader]()
    books = whole_documents(world)
    begun = np.flatnonzero(books.tokens > 4)[:3]
    held = books.source[begun].astype(np.int64), books.rows[begun], np.full(3, 2)
    with ExitStack() as stack, ExitStack() as fleet:
        [loader] = fleet.enter_context(several(world, catalog, tmp_path / "s", 1))
        there = joined(catalog, loader.endpoint)
        reader = stack.enter_context(closing(RoutedReader(catalog, there, files_of(world, catalog, opened))))
        for count in (0, 100, 100):
            asked = random_pieces(world, rng, count)
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        reader.hold(*held)
        reader.warm(0, np.arange(1))
        reader.forget(0, np.arange(1))
        reader.end_window(0, None)
        assert not opened and reader.stats()["total_node_tokens"] == 0 < reader.stats()["total_loader_tokens"]
        fleet.close()
        for _ in range(3):
            np.testing.assert_array_equal(read_with_successors(reader, books), expected(world, books))
            assert opened[0].stats()["open_document_bytes"] > 0, "what is held is told to the files, too"
        stats = reader.stats()
        assert len(opened) == 1 == stats["total_loader_losses"] and stats["total_node_tokens"] == 3 * books.tokens.sum()
        assert len([line for line in caplog.messages if "reads in their place" in line]) == 1
        with several(world, catalog, tmp_path / "t", 1):
            np.testing.assert_array_equal(read_with_successors(reader, books), expected(world, books))
        assert reader.stats()["total_loader_tokens"] == stats["total_loader_tokens"], "it is final"


def test_sources_of_this_process_are_asked_of_no_loader_and_its_files_stand_in_for_all(tmp_path) -> None:
    world = random_world(tmp_path, 5)
    catalog, opened, asked = world.index(), list[Reader](), whole_documents(world)
    names = list(catalog.sources)
    mine = asked.source == names.index("web")
    assert 0 < mine.sum() < len(mine)
    with ExitStack() as stack, ExitStack() as fleet:
        [loader] = fleet.enter_context(several(world, catalog, tmp_path / "s", 1))
        there = joined(catalog, loader.endpoint)
        files = files_of(world, catalog, opened)
        reader = stack.enter_context(closing(RoutedReader(catalog, there, files, here=["web"])))
        assert len(opened) == 1, "a file that cannot be opened is an error of the start"
        for chosen in (mine, ~mine, mine | True):
            some = Pieces(*(column[chosen] for column in asked))
            np.testing.assert_array_equal(read_with_successors(reader, some), expected(world, some))
        stats = reader.stats()
        assert stats["total_node_tokens"] == 2 * asked.tokens[mine].sum()
        assert stats["total_loader_tokens"] == 2 * asked.tokens[~mine].sum()
        fleet.close()
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        assert len(opened) == 1


@pytest.mark.parametrize("is_mine", [True, False])
def test_after_a_final_loss_an_error_names_it_unless_the_source_was_always_read_here(
    tmp_path, monkeypatch, is_mine
) -> None:
    world = random_world(tmp_path, 5)
    catalog, asked = world.index(), whole_documents(world)
    lost = LoaderLost("no loader answers at nowhere")
    with closing(RoutedReader(catalog, lost, files_of(world, catalog), here=["web"])) as reader:

        def fails(self, pieces, *, scratch=None):
            raise SourceUnreadable("input/output error", "web")

        monkeypatch.setattr(Reader, "read", fails)
        chosen = (asked.source == list(catalog.sources).index("web")) == is_mine
        some = Pieces(*(column[chosen] for column in asked))
        words = "^web: input" if is_mine else "nowhere. This process cannot read in their place: .*input/output error"
        with pytest.raises(SourceUnreadable if is_mine else LoaderLost, match=words):
            reader.read(some.wanted())


def test_where_files_are_not_seen_the_loss_ends_the_job_and_nothing_stays_open(tmp_path) -> None:
    catalog, closed = random_world(tmp_path, 5).index(), list[str]()

    def unseen() -> Reader:
        raise SourceUnreadable("no such file", "web")

    items = SimpleNamespace(close=lambda: closed.append("items"))
    with pytest.raises(LoaderLost, match=r"at nowhere. This process cannot read in their place: .*no such file"):
        RoutedReader(catalog, LoaderLost("no loader answers at nowhere"), unseen, items=items)
    assert closed == ["items"]
