"""`packing.method: pad`: each document, or piece of a long one, has a sample of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.loaders import run_job, same_microbatches, write_job
from tests.support.mixtures import SHARES, SIZES, forecast_of, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.errors import RecipeError, SourceExhausted, StateError
from torchmix.parallel.topology import Topology
from torchmix.planner.entering import check_cursor
from torchmix.planner.planner import Planner
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe

LENGTH = 256


def recipe_of(**packing: Any) -> Recipe:
    return make_recipe(SHARES, samples=16, length=LENGTH, packing={"method": "pad", **packing})


def test_a_step_has_one_piece_in_each_sample_and_defers_none() -> None:
    plans, cursors = plan_steps(make_planner(recipe_of(), SIZES, dp=4), 60)
    for plan, cursor in zip(plans, cursors[1:], strict=True):
        assert plan.sample.tolist() == list(range(16))
        assert not plan.slot.any() and not plan.sample_offset.any() and not len(cursor.pool)
        assert plan.pieces.tokens.min() > 0 and plan.pieces.tokens.max() <= LENGTH
        assert np.array_equal(plan.drawn_tokens, plan.delivered_tokens)
    long = [int(start) for plan in plans for start in plan.pieces.start if start]
    assert long and not any(start % LENGTH for start in long), "long documents are cut at multiples of a sample"
    given = sum(plan.delivered_tokens for plan in plans)
    shares = np.array([float(SHARES[name].rstrip("%")) / 100 for name in sorted(SHARES)])
    assert np.abs(given - shares * given.sum()).max() <= len(shares) * LENGTH


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_one_pass_gives_each_document_once(overflow: str) -> None:
    planner = make_planner(part_of(recipe_of(overflow=overflow), "train", one_pass=True), SIZES)
    found: Counter[tuple[str, int]] = Counter()
    cursor, sizes = planner.start(), []
    for _ in range(2000):
        try:
            plan, cursor = planner.step(cursor)
        except SourceExhausted:
            break
        sizes.append(len(plan.pieces))
        for source, row, tokens in zip(plan.pieces.source, plan.pieces.row, plan.pieces.tokens, strict=True):
            found[plan.sources[source], int(row)] += int(tokens)
    counted = {"split": lambda n: n, "truncate": lambda n: min(n, LENGTH), "drop": lambda n: n if n <= LENGTH else 0}
    expected = {
        (name, row): counted[overflow](int(tokens))
        for name, one in SIZES.items()
        for row, tokens in enumerate(one.tokens)
    }
    assert dict(found) == {place: tokens for place, tokens in expected.items() if tokens}
    assert set(sizes[:-1]) == {16} and 0 < sizes[-1] <= 16


def test_a_stream_that_runs_out_leaves_its_share_to_the_others() -> None:
    recipe = make_recipe(
        SHARES,
        samples=16,
        length=LENGTH,
        packing={"method": "pad"},
        sources={"one": {"max_epochs": 2, "on_exhausted": "renormalise"}},
    )
    planner = make_planner(recipe, SIZES)
    plans, cursors = plan_steps(planner, 120)
    [decision] = cursors[-1].decisions
    assert decision.name == "one"
    s = planner.streams.index("one")
    assert sum(int(plan.delivered_tokens[s]) for plan in plans) == 140
    assert {len(plan.pieces) for plan in plans} == {16}


def test_steps_do_not_depend_on_layout_or_on_where_a_run_was_resumed() -> None:
    plans, cursors = plan_steps(make_planner(recipe_of(), SIZES), 30)
    others, _ = plan_steps(make_planner(recipe_of(), SIZES, dp=8, micro_batch_size=2), 20, cursors[10])
    assert [plan.order_digest for plan in plans[10:]] == [plan.order_digest for plan in others]


def test_the_fingerprint_says_pad_and_alignment_does_not_alter_the_order() -> None:
    assert recipe_fingerprint(recipe_of()) == recipe_fingerprint(recipe_of(align_tokens=32))
    best = make_recipe(SHARES, samples=16, length=LENGTH)
    assert recipe_fingerprint(recipe_of()) != recipe_fingerprint(best)
    with pytest.raises(RecipeError, match="does not divide"):
        recipe_of(align_tokens=24)


def test_shares_may_count_documents_that_are_not_cut() -> None:
    recipe = msgspec.structs.replace(recipe_of(overflow="truncate"), unit="documents")
    planner = make_planner(check_recipe(recipe), SIZES)
    plans, cursors = plan_steps(planner, 60)
    given = sum(np.bincount(plan.pieces.stream, minlength=len(SHARES)) for plan in plans)
    shares = np.array([float(SHARES[name].rstrip("%")) / 100 for name in sorted(SHARES)])
    assert np.abs(given - shares * given.sum()).max() <= len(shares)
    for cursor in cursors:
        check_cursor(cursor, planner)
    with pytest.raises(RecipeError, match="write truncate, drop or error"):
        check_recipe(msgspec.structs.replace(recipe_of(), unit="documents"))


def test_cursors_are_within_their_bounds_and_others_are_refused() -> None:
    planner = make_planner(recipe_of(), SIZES)
    plans, cursors = plan_steps(planner, 40)
    for cursor in cursors:
        check_cursor(cursor, planner)
    last = cursors[-1]
    too_much = replace(last.position, debt=last.position.debt + 4 * LENGTH * len(SHARES) + 1)
    with pytest.raises(StateError, match="debt of stream"):
        check_cursor(replace(last, position=too_much), planner)
    with pytest.raises(StateError, match="pool"):
        check_cursor(replace(last, pool=plans[-1].pieces.take(np.arange(3))), planner)


def test_a_forecast_tells_of_the_room_that_is_left() -> None:
    result = forecast_of(part_of(recipe_of(), "train"), SIZES, num_steps=20)
    assert result.num_low_fills == 20 and result.fill < 0.7


def test_no_stream_of_empty_documents_alone_is_waited_for() -> None:
    planner: Planner = make_planner(
        make_recipe({"gaps": "100%"}, samples=8, length=LENGTH, packing={"method": "pad"}), SIZES
    )
    plans, _ = plan_steps(planner, 5)
    assert all(plan.pieces.tokens.min() > 0 and len(plan.pieces) == 8 for plan in plans)


@pytest.mark.parametrize("layout", [Topology(dp=2), Topology(tp=2, dp=2), Topology(cp=2)])
def test_loaders_give_the_same_samples_at_every_layout(layout: Topology, tmp_path: Path) -> None:
    recipe = write_job(tmp_path, method="pad")
    alone = run_job(recipe, Topology(), steps=6)[0]
    for microbatch in alone.microbatches:
        starts = microbatch.cu_seqlens_padded.tolist()
        assert len(starts) in (2, 3) and (starts[0], starts[-1]) == (0, 64), "a document, and the padding behind it"
    ranks = run_job(recipe, layout, steps=3)
    assert ranks[0].digests == alone.digests[:3]
    again = run_job(recipe, Topology(), steps=3, state=ranks[0].state)[0]
    assert again.digests == alone.digests[3:]
    assert same_microbatches(again.microbatches, [one for one in alone.microbatches if one.step >= 3])
