"""The steps of a replica: what they read, and how often it is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.catalogs import World, random_world
from tests.support.files import make_tokens_file, random_tokens
from tests.support.mixtures import plan_steps
from torchmix.catalog.store import Catalog
from torchmix.constructor.arrays import StepArrays, StepMemory
from torchmix.errors import CorruptPage
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.place_tree import Layout
from torchmix.parallel.topology import Topology
from torchmix.planner.planner import open_planner
from torchmix.reader.piece_copy import fill_from, write_padding
from torchmix.reader.protocol import Filled, Filling, StepReader, Tokens, WantedPieces
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful.open import build_loader
from torchmix.steps.blocks import Consumer
from torchmix.steps.local_steps import local_blocks
from torchmix.steps.replica_steps import StreamOptions, StreamSettings, shared_blocks
from torchmix.steps.state import LoaderState, start_state

RECIPE = """\
version: 1
seed: 5
batch: {samples: 4, length: 64}
sources:
%s
mixture: {%s}
packing: {method: %s}
read: {cache: 1}
"""


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_books_of_many_sources_are_decoded_once_with_no_cache(tmp_path: Path, method: str) -> None:
    """Each of 8 sources has a book open nearly always, and each book has a page of its own."""
    names = [f"books{i}" for i in range(8)]
    for i, name in enumerate(names):
        books = [document for document in random_tokens(i, 12, mean_tokens=4000, empty=0.0) if len(document) > 500]
        make_tokens_file(tmp_path / f"{name}.parquet", books, page_bytes=100, codec="none")
    sources = "\n".join(f"  {name}: {{path: {name}.parquet, tokens: input_ids}}" for name in names)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % (sources, ", ".join(f"{name}: 12.5%" for name in names), method))
    index_recipe(load_recipe(recipe), tmp_path)
    with build_loader(recipe, topology=Topology(), loaders="in_process", max_steps=300) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert stats["bytes_served"] > 200 * 4 * 2 * 64
    assert stats["decode_amplification"] < 1.6, "what is open at the end was decoded whole"


class ReaderOfMemory:
    """Gives the documents of a world, and records its calls."""

    images = None

    def __init__(self, world: World) -> None:
        self._documents = [world.documents[name] for name in sorted(world.documents)]
        self.calls: set[str] = set()

    def read(self, pieces: WantedPieces) -> Tokens:
        self.calls.add("read")
        values, successors = np.zeros(pieces.num_places, np.int64), np.zeros(len(pieces), np.int64)
        columns = (pieces.source, pieces.row, pieces.start, pieces.tokens, pieces.places)
        for k, (s, row, start, count, place) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            document = self._documents[s][row]
            values[place : place + count] = document[start : start + count]
            successors[k] = document[start + count] if start + count < len(document) else 0
        return Tokens(values=values, successors=successors)

    def fill(self, pieces: WantedPieces, outs: Sequence[Filling], *, pads: bool = True) -> Filled:
        if pads:
            write_padding(pieces, outs)
        columns = (pieces.source, pieces.row, pieces.start + pieces.tokens)
        ends = zip(*(one.tolist() for one in columns), strict=True)
        goes_on = np.array([stop < len(self._documents[s][row]) for s, row, stop in ends], np.bool_)
        return Filled(blank=fill_from(pieces, self.read(pieces), goes_on, outs))

    def pages_at_once(self, source: int) -> int:
        return 1 + source % 2

    def warm(self, source: int, page_ids: NDArray[np.int64]) -> None:
        self.calls.add("warm")

    def hold(self, source: Any, rows: Any, starts: Any) -> None:
        self.calls.add("hold")

    def forget(self, source: int, page_ids: NDArray[np.int64]) -> None:
        self.calls.add("forget")

    def expect(self, stream: int, pages: Any) -> None:
        self.calls.add("expect")

    def end_window(self, source: int, page_ids: NDArray[np.int64] | None) -> None:
        self.calls.add("end_window")

    def stats(self) -> dict[str, int | float]:
        return {}

    def close(self) -> None:
        self.calls.add("close")


def steps_of(
    settings: StreamSettings, state: LoaderState, catalog: Catalog, reader: StepReader
) -> Iterator[StepArrays]:
    """The steps of the settings' replica, by a reader."""
    one = {0: Consumer(settings.replica, StepMemory())}
    blocks = shared_blocks(settings, state, catalog=catalog, reader=reader, consumers=lambda _: one)
    return (block.arrays[0].step(number) for block in blocks for number in range(len(block.steps)))


def test_the_steps_are_those_of_any_reader_that_is_handed_in(tmp_path: Path) -> None:
    world = random_world(tmp_path, 5, samples=4, length=64)
    catalog, part = world.index(), part_of(world.recipe, "train")
    settings = StreamSettings(
        part=part,
        base=str(tmp_path),
        catalog_folder=str(tmp_path / world.recipe.catalog),
        cache_bytes=1 << 20,
        replica=0,
        layout=Layout(),
        options=StreamOptions(max_steps=40),
    )
    state = start_state(Layout(), recipe=recipe_fingerprint(part))
    blocks = list(local_blocks(settings, state))
    files = [block.step(number).fields for block in blocks for number in range(len(block))]
    for path in tmp_path.rglob("*.parquet"):
        path.unlink()
    reader = ReaderOfMemory(world)
    steps = steps_of(settings, state, catalog, reader)
    for expected, step in zip(files, islice(steps, 40), strict=True):
        for name, array in expected.items():
            np.testing.assert_array_equal(step.fields[name], array)
    assert {"read", "hold"} <= reader.calls
    assert "close" not in reader.calls, "whoever has opened it closes it"


def test_a_piece_that_cannot_be_read_is_an_error_in_the_place_of_its_step(tmp_path: Path) -> None:
    world = random_world(tmp_path, 5, samples=4, length=64)
    catalog, part = world.index(), part_of(world.recipe, "train")
    settings = StreamSettings(
        part=part,
        base=str(tmp_path),
        catalog_folder=str(tmp_path / world.recipe.catalog),
        cache_bytes=1 << 20,
        replica=0,
        layout=Layout(),
        options=StreamOptions(max_steps=40),
    )
    state = start_state(Layout(), recipe=recipe_fingerprint(part))
    plans, _ = plan_steps(open_planner(part, catalog), 10)
    broken = {(int(s), int(row)) for s, row in zip(plans[9].pieces.source, plans[9].pieces.row, strict=True)}
    for plan in plans[:9]:
        broken -= {(int(s), int(row)) for s, row in zip(plan.pieces.source, plan.pieces.row, strict=True)}
    assert broken

    class Broken(ReaderOfMemory):
        def read(self, pieces: WantedPieces) -> Tokens:
            sizes.append(len(pieces))
            if broken & {*zip(pieces.source.tolist(), pieces.row.tolist(), strict=True)}:
                raise CorruptPage("page 7 does not decode")
            return super().read(pieces)

    sizes: list[int] = []
    steps = steps_of(settings, state, catalog, Broken(world))
    assert [step.step for step in islice(steps, 9)] == list(range(9))
    with pytest.raises(CorruptPage):
        next(steps)
    assert len(sizes) < 3 + 9, "steps were read several at a time before"
