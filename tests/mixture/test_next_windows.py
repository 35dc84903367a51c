"""Windows made ahead: the same order, and borders of many sources in one step spread over the steps before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.mixtures import make_planner
from tests.support.native import native_or_not
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.mixture.draw import A_STEP, NextWindows
from torchmix.mixture.order import StreamOrder
from torchmix.planner.folding import Folding
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner

NUM_SOURCES = 50


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, int]]]:
    """Every window that is made, by name and place."""
    windows: list[tuple[str, int, int]] = []
    make = StreamOrder._make

    def noted(self: StreamOrder, epoch: int, window: int) -> object:
        windows.append((self.name, epoch, window))
        return make(self, epoch, window)

    monkeypatch.setattr(StreamOrder, "_make", noted)
    yield windows


def planner_of(num_windows: int, *, shuffle_pages: int = 20, longest: int = 400, **sources: object) -> Planner:
    """Equal sources of equal documents, which all reach their borders together."""
    names = [f"s{s:02d}" for s in range(NUM_SOURCES)]
    sizes = {
        name: synthetic_sizes(
            200, shortest=longest, longest=longest, rows_per_page=200 // shuffle_pages, window_pages=20 // num_windows
        )
        for name in names
    }
    keys = dict.fromkeys(names, sources) if sources else None
    return make_planner(make_recipe(dict.fromkeys(names, "2%"), samples=64, length=512, sources=keys), sizes)


def plans(planner: Planner, made: list[tuple[str, int, int]], steps: int) -> tuple[list[StepPlan], list[int]]:
    """The plans, and the windows that each step made."""
    found, counts, cursor = [], [], planner.start()
    for _ in range(steps):
        before = len(made)
        plan, cursor = planner.step(cursor)
        found.append(plan)
        counts.append(len(made) - before)
    return found, counts


@pytest.mark.slow
@pytest.mark.parametrize(("num_windows", "is_native"), [(1, True), (2, True), (2, False)])
def test_borders_of_all_sources_in_one_step_are_spread_over_the_steps_before(
    num_windows: int, is_native: bool, made: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with native_or_not(is_native):
        ahead, counts = plans(planner_of(num_windows), made, 260)
        places = list(made)
        made.clear()
        monkeypatch.setattr(NextWindows, "follow", lambda *_: None)
        monkeypatch.setattr(Folding, "_make_due", lambda *_: None)
        plain, plain_counts = plans(planner_of(num_windows), made, 260)
    assert [one.order_digest for one in ahead] == [one.order_digest for one in plain]
    assert max(plain_counts[1:]) > 20, "the sources do not reach their borders together: the test says nothing"
    assert max(counts[1:]) <= A_STEP
    assert len(places) == len(set(places)), "a window was made twice"
    assert abs(len(places) - len(made)) <= NUM_SOURCES
    assert is_native or set(made) <= set(places)  # a native fold is some steps ahead of what is asked for


def test_at_most_two_windows_are_kept_and_none_beyond_the_last_epoch(made: list[tuple[str, int, int]]) -> None:
    planner = planner_of(2, max_epochs=2, on_exhausted="renormalise")
    cursor = planner.start()
    for _ in range(230):
        cursor = planner.skip(cursor)
        for order in planner.orders:
            kept = [one[0] for one in (order._last, order._ahead) if one is not None]
            assert len(kept) == len(set(kept)) <= 2
    assert max(epoch for _, epoch, _ in made) == 1
    assert max(cursor.position.epoch.tolist()) >= 1


def test_a_planner_that_is_asked_for_any_step_gives_the_same(made: list[tuple[str, int, int]]) -> None:
    planner, other = planner_of(2), planner_of(2)
    cursors = [planner.start()]
    for _ in range(90):
        cursors.append(planner.skip(cursors[-1]))
    for step in (80, 3, 60, 61, 62, 0, 89):
        assert other.skip(cursors[step]).order_digest == cursors[step + 1].order_digest
