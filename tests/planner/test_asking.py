"""Alignment of short documents: how much is asked, and how little of it is left over."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.mixtures import make_planner, plan_steps
from tests.support.native import native_or_not
from tests.support.recipes import make_recipe
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture import draw as draw_module
from torchmix.planner import drawing
from torchmix.planner.drawing import MOST_ALIGNED, DrawnTokens, ask_less
from torchmix.planner.pack import aligned
from torchmix.planner.planner import Planner


def geometric(seed: int, count: int, mean: int) -> SourceSizes:
    tokens = np.random.default_rng(seed).geometric(1 / mean, count).astype(np.int32)
    first_row = np.append(np.arange(0, count, 40), count).astype(np.int64)
    return SourceSizes(first_row_of_page=first_row, tokens=tokens, window_pages=16)


def planner_of(samples: int, align: int, mean: int) -> Planner:
    sizes = {name: geometric(seed, 6000, mean) for seed, name in enumerate("abc")}
    packing = {"method": "best_fit", "align_tokens": align}
    return make_planner(
        make_recipe({"a": "50%", "b": "40%", "c": "10%"}, samples=samples, length=1024, packing=packing), sizes
    )


@pytest.mark.parametrize(("samples", "align", "mean"), [(8, 32, 9), (32, 128, 9), (8, 512, 2), (64, 32, 9)])
def test_alignment_adds_at_most_a_quarter_of_a_batch_to_the_pool(samples: int, align: int, mean: int) -> None:
    planner = planner_of(samples, align, mean)
    plans, cursors = plan_steps(planner, 25)
    for plan, cursor in zip(plans, cursors[1:], strict=True):
        in_pool = int(aligned(cursor.pool.tokens, align).sum())
        assert in_pool <= plan.capacity_tokens / 4 + 1024, (plan.step, in_pool / plan.capacity_tokens)
        placed = int(aligned(plan.pieces.tokens, align).sum())
        assert placed >= 0.9 * plan.capacity_tokens


def test_only_a_draw_that_counts_is_asked_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spied(orders: object, shares: object, position: object, tokens: int, **options: object) -> object:
        asked.append(tokens)
        return draw_module.draw(orders, shares, position, tokens, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(drawing, "draw", spied)
    planner = planner_of(8, 128, 9)
    with native_or_not(False):
        plan, cursor = planner.step(planner.start())
    assert asked[0] == 8 * 1024 > 4 * asked[1], "the first draw is taken back: nothing was known of lengths"
    assert int(plan.asked_tokens.sum()) < asked[0] / 4
    assert cursor.drawn.raw == 1 + int(plan.drawn_tokens.sum())
    assert cursor.drawn.aligned > 5 * cursor.drawn.raw


def test_totals_are_halved_together_and_never_ask_for_nothing() -> None:
    totals = DrawnTokens().plus(MOST_ALIGNED // 8, MOST_ALIGNED - 1)
    assert (totals.raw, totals.aligned) == (MOST_ALIGNED // 8 + 1, MOST_ALIGNED)
    halved = totals.plus(3, 9)
    assert (halved.raw, halved.aligned) == ((MOST_ALIGNED // 8 + 4) // 2, (MOST_ALIGNED + 9) // 2)
    huge = DrawnTokens().plus(1 << 20, 1 << 45)
    assert huge.aligned <= MOST_ALIGNED and huge.raw >= 1
    assert DrawnTokens(raw=1, aligned=1 << 30).to_ask(5) == 1
    assert DrawnTokens(raw=3, aligned=7).to_ask(10) == 5


def test_a_draw_counts_if_alignment_adds_little_or_asking_less_gives_nothing() -> None:
    def after(ask: int, *, need: int, raw: int, aligned_tokens: int) -> int | None:
        return ask_less(ask, need_tokens=need, raw_tokens=raw, aligned_tokens=aligned_tokens, capacity_tokens=400)

    assert after(300, need=300, raw=300, aligned_tokens=400) is None
    assert after(300, need=300, raw=300, aligned_tokens=401) == 224
    assert after(300, need=300, raw=380, aligned_tokens=480) is None, "what a long piece brings is not alignment"
    assert after(300, need=300, raw=0, aligned_tokens=0) is None
    assert after(1, need=300, raw=1, aligned_tokens=512) is None, "less than one token"
    assert after(200, need=300, raw=500, aligned_tokens=700) is None, "not less than was asked"
