"""A reader that asks loaders gives what a reader of this process gives, whoever reads and however it is cut."""

from __future__ import annotations

import re
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.catalogs import World, make_world, random_world
from tests.support.chats import make_chats, write_chats
from tests.support.deadlines import LONG_S
from tests.support.files import random_tokens
from tests.support.fleets import fleet_reader, running, several
from tests.support.formats import format_world
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.reading import expected, pieces, random_pieces, read_with_successors, whole_documents
from tests.support.recipes import make_recipe
from torchmix.catalog.store import IdLimit
from torchmix.errors import LoaderLost, SourceUnreadable
from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.service import fleet_reader as module
from torchmix.service.members import FleetPatience
from torchmix.service.served import ServedCatalogs


def test_items_are_asked_of_the_loaders_of_their_source(tmp_path):
    catalog = random_world(tmp_path, 5).index()
    sounds = {f".{name}.sound": replace(one, name=f".{name}.sound") for name, one in catalog.sources.items()}
    columns = replace(catalog, sources=sounds)
    named = []
    for one in (catalog, columns):
        fleet = SimpleNamespace(members=SimpleNamespace(name_sources=named.append))
        module.FleetReader(one, fleet, is_joined=False)
    assert named == [list(catalog.sources)] * 2 and all(named)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [random_world, format_world], ids=["parquet", "formats"])
def test_tokens_are_those_of_the_files_and_of_the_reader_in_this_process(tmp_path, make, count):
    world = make(tmp_path, 5)
    catalog = world.index()
    here, rng = Reader(catalog, world.directory, cache_bytes=1 << 24), np.random.default_rng(3)
    asked = [*(random_pieces(world, rng, size) for size in (0, 1, 7, 300)), whole_documents(world)]
    with (
        several(world, catalog, tmp_path / "s", count) as loaders,
        fleet_reader(catalog, [one.endpoint for one in loaders]) as reader,
    ):
        for one in asked:
            found, ours = read_with_successors(reader, one), read_with_successors(here, one)
            np.testing.assert_array_equal(found, expected(world, one))
            assert found.dtype == ours.dtype
        stats = reader.stats()
        assert stats["loaders_ready"] == count
        assert stats["total_loader_reasked"] == stats["total_loader_duplicates"] == 0
    here.close()


def test_tokens_of_chats_have_the_labels_that_a_reader_in_this_process_gives(tmp_path):
    source = write_chats(tmp_path, "chats", "parquet", [make_chats(1, 60)])
    batch = {"samples": 2, "length": 64}
    recipe = {"version": 1, "seed": 1, "batch": batch, "sources": {"chats": source}, "mixture": {"chats": 1}}
    catalog = index_recipe(check_recipe(recipe), tmp_path)
    tokens = catalog.sources["chats"].sizes.tokens.astype(np.int64)
    asked = WantedPieces.end_to_end(source=0, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens)
    here = Reader(catalog, tmp_path, cache_bytes=1 << 20)
    with (
        several(SimpleNamespace(directory=tmp_path), catalog, tmp_path / "s", 2) as loaders,
        fleet_reader(catalog, [one.endpoint for one in loaders]) as reader,
    ):
        ours, found = (one.read(asked) for one in (here, reader))
        np.testing.assert_array_equal(found.values, ours.values)
        np.testing.assert_array_equal(found.unlabelled, ours.unlabelled)
        assert 0 < len(found.unlabelled) < tokens.sum()
    here.close()


def test_ids_of_megatron_files_come_in_their_own_type_and_are_checked_here(tmp_path):
    sequences = random_sequences(3, 300)
    write_dataset(tmp_path / "bin" / "one", sequences)
    keys = {"path": "bin/*.idx", "tokens": None}
    recipe = make_recipe({"bin": "100%"}, sources={"bin": keys})
    world = World(
        directory=tmp_path, recipe=recipe, documents={"bin": [np.asarray(one, np.int64) for one in sequences]}
    )
    catalog = world.index()
    with (
        several(world, catalog, tmp_path / "s", 2) as loaders,
        fleet_reader(catalog, [one.endpoint for one in loaders]) as reader,
    ):
        found = read_with_successors(reader, whole_documents(world))
        np.testing.assert_array_equal(found, expected(world, whole_documents(world)))
        assert found.dtype == np.uint16
        assert reader.stats()["bytes_received"] < 2 * (len(found) + 1)
        limit = IdLimit(1000, "vocab_size is 1000")
        strict = fleet_reader(catalog, [one.endpoint for one in loaders], ids=limit)
        with strict as checked, pytest.raises(SourceUnreadable, match="vocab_size is 1000"):
            read_with_successors(checked, whole_documents(world))


def test_a_piece_longer_than_a_request_comes_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_TOKENS", 100)
    monkeypatch.setattr(module, "TARGET_BYTES", 1000)
    world = make_world(tmp_path, {"web": [random_tokens(1, 50, mean_tokens=300), [list(range(5000))]]})
    catalog = world.index()
    with (
        several(world, catalog, tmp_path / "s", 2, window_bytes=4000) as loaders,
        fleet_reader(catalog, [one.endpoint for one in loaders]) as reader,
    ):
        for asked in (whole_documents(world), random_pieces(world, np.random.default_rng(2), 100)):
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        assert reader.stats()["total_loader_requests"] > 20
        assert reader.stats()["total_loader_busy"] == 0


def test_a_request_has_parts_and_no_more_than_its_most_bytes_whatever_comes_first():
    most, rng = module.TARGET_BYTES, np.random.default_rng(1)
    drawn = [rng.integers(4, rng.choice([9, 5000, most // 2], rng.integers(1, 40)), endpoint=True) for _ in range(300)]
    for sizes in ([most // 2], [most // 2, most // 6], [most // 2, 4, most // 2, 4, 4], *drawn):
        borders = module._borders(np.array(sizes), most)
        assert borders[0] == 0 and borders[-1] == len(sizes)
        stretches = [sum(sizes[start:stop]) for start, stop in pairwise(borders)]
        assert all(0 < size <= most for size in stretches), (sizes, borders)
        assert len(stretches) <= 1 + 2 * sum(sizes) // most


def test_pages_are_decoded_ahead_by_their_owners_and_dropped_once_no_client_needs_them(tmp_path):
    world = make_world(tmp_path, {"web": [random_tokens(1, 2000)]})
    catalog = world.index()
    pages = np.arange(catalog.sources["web"].pages.num_pages)
    with several(world, catalog, tmp_path / "s", 2) as loaders:
        endpoints = [one.endpoint for one in loaders]
        with fleet_reader(catalog, endpoints) as one, fleet_reader(catalog, endpoints) as other:
            one.warm(0, pages)
            other.warm(0, pages)
            until(lambda: sum(each.figures().get("pages_decoded", 0) for each in loaders) == len(pages))
            assert min(each.figures()["pages_decoded"] for each in loaders) > 0
            asked = whole_documents(world)
            np.testing.assert_array_equal(read_with_successors(one, asked), expected(world, asked))
            assert sum(each.figures()["cache_misses"] for each in loaders) == 0
            one.forget(0, pages)
            read_with_successors(one, asked)
            assert sum(each.figures()["cache_misses"] for each in loaders) == 0, "the other client may need them"
            other.forget(0, pages)
            until(lambda: each_is_empty(loaders, other, world))


def test_time_in_which_the_client_did_not_run_makes_no_loader_slow(tmp_path, monkeypatch):
    world = random_world(tmp_path, 5)
    catalog, asked = world.index(), whole_documents(world)
    read, may_read, turns = ServedCatalogs.read, threading.Event(), []

    def waits(self, fingerprint, arrays):
        assert may_read.wait(LONG_S)
        return read(self, fingerprint, arrays)

    monkeypatch.setattr(ServedCatalogs, "read", waits)
    monkeypatch.setattr("torchmix.service.fleet.SLOW_S", LONG_S)
    with (
        several(world, catalog, tmp_path / "s", 2) as loaders,
        fleet_reader(catalog, [one.endpoint for one in loaders]) as reader,
    ):
        members = reader._fleet.members
        turn = members.turn

        def late(timeout_s):
            """Requests are under way from the first turn on; the second one comes after a pause."""
            if len(turns) == 1:
                members.clock = lambda: time.monotonic() + 10 * LONG_S
            if len(turns) == 3:
                may_read.set()
            turns.append(timeout_s)
            return turn(timeout_s)

        monkeypatch.setattr(members, "turn", late)
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        stats = reader.stats()
    assert len(turns) > 3 and stats["total_loader_hedged"] == stats["total_loader_reasked"] == 0


def test_loaders_that_are_lost_are_named_with_their_ages_and_what_they_logged_last(tmp_path):
    world = random_world(tmp_path, 5)
    catalog, asked = world.index(), whole_documents(world)
    words = {"words": lambda: ("12:00:00 WARNING the disk is slow", "12:00:01 WARNING it is slower")}
    (tmp_path / "s").mkdir(mode=0o700)
    with ExitStack() as fleet:
        one = fleet.enter_context(running(catalog, world.directory, f"ipc://{tmp_path}/s/0", **words))
        other = fleet.enter_context(running(catalog, world.directory, f"ipc://{tmp_path}/s/1"))
        with fleet_reader(catalog, [one.endpoint, other.endpoint]) as reader:
            until(lambda: read_with_successors(reader, asked) is not None and knows_words(reader))
            fleet.close()
            reader._fleet.members.patience = FleetPatience(lost_s=0.0)
            with pytest.raises(LoaderLost) as lost:
                read_with_successors(reader, asked)
    said = str(lost.value)
    for endpoint in (one.endpoint, other.endpoint):
        assert re.search(re.escape(endpoint) + r": the connection has ended, last heard of \d+\.\d s ago", said)
    assert said.count(f"\n  {one.endpoint}: 12:00:0") == 2 and "it is slower" in said
    assert f"\n  {other.endpoint}" not in said


def knows_words(reader) -> bool:
    """Whether a loader has said what it logged."""
    return any(one.words for one in reader._fleet.members.all.values())


def each_is_empty(loaders, reader, world) -> bool:
    """Whether a piece of one page is the only thing that its loader still has."""
    read_with_successors(reader, pieces((0, 0, 0, 1)))
    return sum(each.figures()["cache_pages"] for each in loaders) <= 2


def until(is_so) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
