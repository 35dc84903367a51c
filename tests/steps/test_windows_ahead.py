"""Reading ahead: pages of the next window, each once, and none that no row is used of or that comes after the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.catalogs import open_catalog
from tests.support.loaders import write_job
from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.errors import SourceExhausted
from torchmix.parallel.topology import Topology
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.sources import rows_of
from torchmix.stateful.open import build_loader
from torchmix.steps.windows_ahead import WindowsAhead, _Present, _Window

SIZES = synthetic_sizes(6_000, shortest=5, longest=60, rows_per_page=10, window_pages=100)


class Notes:
    """Stands in for a reader: notes which pages it is asked for."""

    def __init__(self, at_once: int = 1) -> None:
        self.warmed: list[int] = []
        self.forgotten: list[int] = []
        self.calls: list[int] = []
        self.at_once = at_once
        self.expected: dict[int, list[tuple[int, np.ndarray | None]]] = {}

    def pages_at_once(self, source: int) -> int:
        return self.at_once

    def warm(self, source: int, pages: np.ndarray) -> None:
        self.warmed += pages.tolist()
        self.calls.append(len(pages))

    def forget(self, source: int, pages: np.ndarray) -> None:
        self.forgotten += pages.tolist()

    def end_window(self, source: int, pages: np.ndarray | None) -> None:
        pass

    def expect(self, stream: int, pages: list[tuple[int, np.ndarray | None]]) -> None:
        self.expected[stream] = pages


Followed = tuple[Planner, Cursor, Notes]


def follow(
    documents: tuple[str, str] | None, *, max_epochs: int | None = None, steps: int = 10**6, at_once: int = 1
) -> Followed:
    """Follow the steps of one source to their end, or for so many steps."""
    source: dict[str, Any] = {"documents": documents, "max_epochs": max_epochs, "on_exhausted": "renormalise"}
    planner = make_planner(
        make_recipe({"web": "100%"}, samples=2, sources={"web": source}), {"web": SIZES}, one_pass=True
    )
    notes = Notes(at_once)
    windows, cursor = WindowsAhead(planner, notes), planner.start()  # type: ignore[arg-type]
    for _ in range(steps):
        try:
            cursor = planner.skip(cursor)
        except SourceExhausted:
            break
        windows.follow(cursor)
    return planner, cursor, notes


@pytest.mark.parametrize("documents", [None, ("0%", "97%"), ("97%", "100%"), ("50%", "51%")])
def test_used_pages_are_decoded_ahead_once_an_epoch_and_others_never(
    documents: tuple[str, str] | None,
) -> None:
    planner, cursor, notes = follow(documents, max_epochs=2)
    assert cursor.position.epoch.tolist() == [2]
    start, stop = rows_of(planner.part.sources["web"], SIZES.num_documents)
    used = np.arange(start // 10, -(-stop // 10))
    pages, counts = np.unique(notes.warmed, return_counts=True)
    assert np.isin(pages, used).all()
    assert counts.max(initial=0) <= 2, "no page more often than there are epochs: none after the last"
    assert len(notes.warmed) >= 1.7 * len(used) - 40, "nearly all come ahead of need"
    assert np.isin(notes.forgotten, used).all()


def test_a_window_is_decoded_as_fast_as_the_one_before_is_consumed() -> None:
    planner, cursor, notes = follow(("90%", "100%"), steps=10)
    place = (int(cursor.position.epoch[0]), int(cursor.position.window[0]))
    order = planner.orders[0]
    [(_, following)] = order.pages_by_source(*order.following(*place))
    warmed = [page for page in following.tolist() if page in notes.warmed]
    part = cursor.position.offset[0] / order.num_pieces(*place)
    assert abs(len(warmed) - part * len(following)) <= 1


@pytest.mark.parametrize("documents", [None, ("90%", "100%"), ("50%", "50.5%")])
def test_the_pages_of_the_present_and_the_next_window_are_named_before_they_are_needed(
    documents: tuple[str, str] | None,
) -> None:
    planner, cursor, notes = follow(documents, steps=11)
    order, place = planner.orders[0], (int(cursor.position.epoch[0]), int(cursor.position.window[0]))
    if order.num_windows == 1:
        assert notes.expected == {0: [(0, None)]}, "any page"
        return
    both = [order.pages_by_source(*one)[0][1] for one in (place, order.following(*place))]
    [(source, pages)] = notes.expected[0]
    assert source == 0 and pages.tolist() == sorted({*both[0].tolist(), *both[1].tolist()})


def test_pages_that_cost_less_together_are_decoded_together_and_never_later() -> None:
    for steps in (1, 6, 40, 110):
        planner, cursor, alone = follow(None, steps=steps)
        _, _, together = follow(None, steps=steps, at_once=20)
        place = (int(cursor.position.epoch[0]), int(cursor.position.window[0]))
        order = planner.orders[0]
        [(_, following)] = order.pages_by_source(*order.following(*place))
        num_alone, num_together = (np.isin(following, notes.warmed).sum() for notes in (alone, together))
        assert num_alone <= num_together <= num_alone + 2 * 20
        assert 4 * len(together.calls) <= len(alone.calls) + 8


def test_sources_alike_do_not_all_decode_pages_in_the_same_step() -> None:
    names = [f"s{number}" for number in range(8)]
    recipe = make_recipe(dict.fromkeys(names, "12.5%"), samples=8, sources={name: {} for name in names})
    planner = make_planner(recipe, dict.fromkeys(names, SIZES))
    notes = Notes(at_once=4)
    windows, cursor = WindowsAhead(planner, notes), planner.start()  # type: ignore[arg-type]
    counts, begun = [], []
    for _ in range(120):
        before, so_far = cursor.position.window, len(notes.warmed)
        cursor = planner.skip(cursor)
        windows.follow(cursor)
        counts.append(len(notes.warmed) - so_far)
        begun.append(bool((cursor.position.window != before).any()))
    within = [count for count, begins in zip(counts, begun, strict=True) if not begins]
    assert 8 < np.mean(counts) < 11, "less than half of what all of them decode at once"
    assert max(within) <= 16
    assert np.std(within) < 3


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_a_pass_over_a_part_decodes_its_pages_once(tmp_path: Path, method: str) -> None:
    job = write_job(tmp_path, method=method, samples=16, length=256, extra="split: [80, 20]")
    recipe = part_of(load_recipe(job), "validation")
    num_pages = 0
    for name, source in open_catalog(recipe, tmp_path).sources.items():
        start, stop = rows_of(recipe.sources[name], source.num_documents)
        first_row = source.pages.first_row
        num_pages += int(((first_row[1:] > start) & (first_row[:-1] < stop)).sum())
    with build_loader(job, topology=Topology(), loaders="in_process", part="validation", one_pass=True) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert num_pages > 20
    assert stats["pages_decoded"] == num_pages


def test_pages_of_the_present_and_the_next_window_are_not_let_go() -> None:
    present = _Present(_Window((0, 3), np.array([2, 5, 9])), _Window((1, 0), np.array([0, 4])))
    assert present.less_needed(np.array([0, 1, 5, 7])).tolist() == [1, 7]
    assert present.less_needed(np.array([4, 9])).tolist() == []
