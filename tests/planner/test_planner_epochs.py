"""Many steps: nothing lost or repeated, shares kept at every step, and what happens where a source ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from tests.support.given import given_tokens
from tests.support.mixtures import PACKINGS, SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import SourceExhausted
from torchmix.mixture.draw import draw
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.shares import SHARE_ONE, integer_shares
from torchmix.planner.cursor import Cursor, Decision
from torchmix.planner.pack import Pieces
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.recipe.changes import parse_shares
from torchmix.recipe.structs import Recipe

Span = tuple[int, int]
"""Half-open range of a document's tokens."""


def spans_of(pieces: Pieces, names: tuple[str, ...], into: dict[str, dict[tuple[int, int], list[Span]]]) -> None:
    """Add to name -> (epoch, row) -> spans."""
    columns = (pieces.source, pieces.epoch, pieces.row, pieces.start, pieces.tokens)
    for source, epoch, row, start, tokens in zip(*(column.tolist() for column in columns), strict=True):
        into[names[source]].setdefault((epoch, row), []).append((start, start + tokens))


def counted_tokens(sizes: SourceSizes, packing: str, length: int = 256) -> list[int]:
    """Tokens that each document gives under the packing's overflow rule."""
    if packing.endswith("truncate"):
        return np.minimum(sizes.tokens, length).tolist()
    if packing.endswith("drop"):
        return np.where(sizes.tokens > length, 0, sizes.tokens).tolist()
    return sizes.tokens.tolist()


def align_of(packing: str) -> int:
    return 1 if packing.startswith("concat") else int(str(PACKINGS[packing].get("align_tokens", 8)))


def aligned_tokens(pieces: Pieces, align: int) -> int:
    return int((-(-pieces.tokens // align) * align).sum())


def check_whole(spans: list[Span], tokens: int, what: object) -> None:
    """The spans tile [0, tokens): nothing lost, nothing twice."""
    spans = sorted(spans)
    assert spans[0][0] == 0 and spans[-1][1] == tokens, (what, spans, tokens)
    assert all(one[1] == other[0] for one, other in pairwise(spans)), (what, spans)


EPOCH_SIZES = {
    "books": synthetic_sizes(9, shortest=200, longest=3000, rows_per_page=2, window_pages=2, salt=1),
    "gaps": synthetic_sizes(120, shortest=0, longest=200, rows_per_page=7, window_pages=4, salt=3),
    "one": SIZES["one"],
    "web": synthetic_sizes(90, shortest=5, longest=1500, rows_per_page=10, window_pages=4, salt=5),
}
EPOCH_SHARES = {"books": "32%", "gaps": "30%", "one": "3%", "web": "35%"}


@pytest.mark.parametrize("packing", PACKINGS)
def test_over_whole_epochs_the_delivered_spans_are_the_catalog(packing):
    planner = make_planner(make_recipe(EPOCH_SHARES, samples=8, length=256, packing=PACKINGS[packing]), EPOCH_SIZES)
    plans, cursors = plan_steps(planner, 60)
    delivered: dict[str, dict[tuple[int, int], list[Span]]] = defaultdict(dict)
    for plan in plans:
        spans_of(plan.pieces, plan.sources, delivered)
    pooled = {(int(s), int(e)) for s, e in zip(cursors[-1].pool.source, cursors[-1].pool.epoch, strict=True)}
    for s, name in enumerate(planner.sources):
        tokens = counted_tokens(EPOCH_SIZES[name], packing)
        whole_epochs = [e for e in range(int(cursors[-1].position.epoch[s])) if (s, e) not in pooled]
        assert whole_epochs, f"{name} has not given an epoch: the test is too short"
        for epoch in whole_epochs:
            rows = sorted(row for e, row in delivered[name] if e == epoch)
            assert rows == [row for row, count in enumerate(tokens) if count]
            for row in rows:
                check_whole(delivered[name][epoch, row], tokens[row], (name, epoch, row))


@pytest.mark.parametrize("packing", PACKINGS)
def test_delivered_and_deferred_documents_are_a_prefix_of_each_source_s_own_order(packing):
    # Also what proves that a source moves no other: each order is made here from its own name and sizes alone.
    planner = make_planner(make_recipe(SHARES, samples=16, length=256, packing=PACKINGS[packing]), SIZES)
    plans, cursors = plan_steps(planner, 40)
    seen: dict[str, dict[tuple[int, int], list[Span]]] = defaultdict(dict)
    for step, plan in enumerate(plans):
        spans_of(plan.pieces, plan.sources, seen)
        if step not in (0, 7, 39):
            continue
        so_far = {name: {at: list(spans) for at, spans in documents.items()} for name, documents in seen.items()}
        with_pool: dict[str, dict[tuple[int, int], list[Span]]] = defaultdict(dict, so_far)
        spans_of(cursors[step + 1].pool, plan.sources, with_pool)
        for s, name in enumerate(planner.sources):
            tokens = counted_tokens(SIZES[name], packing)
            order = SourceOrder(name, SIZES[name], seed=7)
            position = cursors[step + 1].position
            at = (int(position.epoch[s]), int(position.window[s]), int(position.offset[s]))
            taken = given_tokens(order, tokens, 256, at)
            assert sorted(with_pool[name]) == sorted(taken), (name, step)
            for document, spans in with_pool[name].items():
                check_whole(spans, taken[document], (name, document))


@pytest.mark.parametrize("packing", PACKINGS)
def test_accounts_of_a_plan_balance_and_shares_are_kept_at_every_step(packing):
    recipe = make_recipe(SHARES, samples=16, length=256, packing=PACKINGS[packing])
    planner = make_planner(recipe, SIZES)
    shares = integer_shares(parse_shares(recipe))
    longest = np.array([min(256, max(counted_tokens(SIZES[name], packing))) for name in planner.sources])
    align = align_of(packing)
    plans, cursors = plan_steps(planner, 120)
    asked, drawn = np.zeros(len(shares), np.int64), np.zeros(len(shares), np.int64)
    pool, pool_aligned = np.zeros(len(shares), np.int64), 0
    for plan, cursor in zip(plans, cursors[1:], strict=True):
        assert plan.capacity_tokens == 16 * 256
        assert np.array_equal(pool + plan.drawn_tokens, plan.delivered_tokens + plan.pool_tokens)
        asked, drawn, pool = asked + plan.asked_tokens, drawn + plan.drawn_tokens, plan.pool_tokens
        assert np.all(2 * np.abs(asked - drawn) <= longest), plan.step
        exact = [Fraction(int(asked.sum()) * int(share), SHARE_ONE) for share in shares]
        # Each source is charged whole tokens; what is left over, of all of them, is less than one each.
        assert all(abs(a - e) < len(shares) for a, e in zip(asked.tolist(), exact, strict=True)), plan.step
        # Without alignment what is missing is asked, topped up a sample's worth at a time; with it, less.
        missing = plan.capacity_tokens - pool_aligned
        assert align > 1 or int(plan.asked_tokens.sum()) >= missing - len(shares)
        pool_aligned = aligned_tokens(cursor.pool, align)
        assert aligned_tokens(plan.pieces, align) + pool_aligned >= plan.capacity_tokens
    assert abs(int(drawn[planner.sources.index("tiny")]) - float(asked.sum()) * 1e-5) <= 40 / 2 + 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_step_asks_by_what_was_drawn_so_far_takes_back_what_alignment_bloats_and_tops_up(packing):
    recipe = make_recipe(SHARES, samples=16, length=256, packing=PACKINGS[packing])
    planner, align = make_planner(recipe, SIZES), align_of(packing)
    shares, endless = integer_shares(parse_shares(recipe)), np.full(len(SIZES), 1 << 40)
    plans, cursors = plan_steps(planner, 40)
    several_draws, raw, aligned = 0, 1, 1
    for plan, before, after in zip(plans, cursors, cursors[1:], strict=False):
        have, position = aligned_tokens(before.pool, align), before.position
        asked, least = np.zeros(len(SIZES), np.int64), 0
        while have < 16 * 256:
            need = max(16 * 256 - have, least)
            ask = max(1, -(-need * raw // aligned))
            while True:
                made = draw(planner.orders, shares, position, ask, max_epochs=endless)
                tokens = int(made.stretches.tokens.sum())
                units = int((-(-made.stretches.tokens // align) * align).sum())
                if units - max(tokens, need) <= 16 * 256 // 4 or not 1 <= need * tokens // units < ask:
                    break
                ask = need * tokens // units
            asked, position = asked + made.asked, made.position
            raw, aligned, have = raw + tokens, aligned + units, have + units
            several_draws += least > 0
            least = 256
        assert (after.drawn.raw, after.drawn.aligned) == (raw, aligned)
        assert np.array_equal(plan.asked_tokens, asked)
        for name in position.__struct_fields__:
            assert np.array_equal(getattr(after.position, name), getattr(position, name)), plan.step
    assert several_draws > 0


@pytest.mark.parametrize(("packing", "samples"), [("best_fit", 16), ("best_fit truncate", 16), ("best_fit", 2)])
def test_a_small_pool_is_gone_in_one_step_and_no_length_starves(packing, samples):
    # Two samples of 256: documents of up to 3000 tokens make pools of several batches.
    planner = make_planner(make_recipe(SHARES, samples=samples, length=256, packing=PACKINGS[packing]), SIZES)
    plans, cursors = plan_steps(planner, 200)
    align = align_of(packing)
    most_surplus = steps_with_pool = most_age = 0
    for plan, before, after in zip(plans, cursors, cursors[1:], strict=False):
        if aligned_tokens(before.pool, align) * 2 <= plan.capacity_tokens:
            assert np.all(after.pool.drawn_step == plan.step), plan.step
        placed = aligned_tokens(plan.pieces, align) + aligned_tokens(after.pool, align)
        most_surplus = max(most_surplus, placed - plan.capacity_tokens)
        most_age = max(most_age, int((plan.step - plan.pieces.drawn_step).max()))
        steps_with_pool += len(before.pool) > 0
    assert steps_with_pool > 100
    assert 1 <= most_age <= 1 - (-2 * most_surplus // (samples * 256)), (most_age, most_surplus)


def exhausting_recipe(packing: str = "best_fit", **on_exhausted: str) -> Recipe:
    sources = {name: {"max_epochs": 2, "on_exhausted": how} for name, how in on_exhausted.items()}
    return make_recipe(EPOCH_SHARES, samples=8, length=256, packing=PACKINGS[packing], sources=sources)


def plan_to_the_end(planner: Planner) -> tuple[list[StepPlan], list[Cursor], SourceExhausted]:
    plans, cursors = [], [planner.start()]
    for _ in range(1000):
        try:
            plan, cursor = planner.step(cursors[-1])
        except SourceExhausted as error:
            return plans, cursors, error
        plans.append(plan)
        cursors.append(cursor)
    raise AssertionError("no source has run out")


def test_a_source_that_must_not_run_out_stops_the_run_by_name_and_never_gives_too_much():
    plans, _, error = plan_to_the_end(make_planner(exhausting_recipe(gaps="error"), EPOCH_SIZES))
    assert "'gaps' has given its max_epochs (2)" in str(error) and f"step {len(plans)} " in str(error)
    gaps = plans[0].sources.index("gaps")
    given = Counter(
        (epoch, row)
        for plan in plans
        for source, epoch, row in zip(
            plan.pieces.source.tolist(), plan.pieces.epoch.tolist(), plan.pieces.row.tolist(), strict=True
        )
        if source == gaps
    )
    assert max(epoch for epoch, _ in given) == 1 and set(given.values()) == {1}


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_source_that_runs_out_gives_its_share_to_the_others_as_a_decision(packing):
    planner = make_planner(exhausting_recipe(packing, gaps="renormalise", one="renormalise"), EPOCH_SIZES)
    plans, cursors = plan_steps(planner, 60)
    decisions = cursors[-1].decisions
    assert sorted(decision.name for decision in decisions) == ["gaps", "one"]
    assert [decision.step for decision in decisions] == sorted(decision.step for decision in decisions)
    for decision in decisions:
        s = planner.sources.index(decision.name)
        assert not cursors[decision.step].decisions.count(decision)
        assert decision in cursors[decision.step + 1].decisions
        # Two epochs were drawn, whole, and nothing is asked or drawn later.
        tokens = sum(counted_tokens(EPOCH_SIZES[decision.name], packing))
        assert sum(int(plan.drawn_tokens[s]) for plan in plans) == 2 * tokens
        for plan in plans[decision.step + 1 :]:
            assert plan.drawn_tokens[s] == 0 and plan.asked_tokens[s] == 0
        assert int(cursors[-1].position.epoch[s]) == 2 and int(cursors[-1].position.debt[s]) == 0
    shares = planner.shares(decisions, step=60)
    by_name = dict(zip(planner.sources, shares.tolist(), strict=True))
    assert sum(by_name.values()) == SHARE_ONE and by_name["gaps"] == by_name["one"] == 0
    assert abs(by_name["books"] / by_name["web"] - 32 / 35) < 1e-9
    # The rate of those that are left, over the last 30 steps, is that of their new shares.
    assert max(decision.step for decision in decisions) < 30
    late = sum(plan.asked_tokens for plan in plans[30:])
    for name in ("books", "web"):
        assert abs(late[planner.sources.index(name)] - by_name[name] / SHARE_ONE * late.sum()) <= 2


def test_decisions_in_a_cursor_are_all_that_a_resumed_run_needs_to_know_of_them():
    recipe = exhausting_recipe(gaps="renormalise", one="renormalise")
    plans, cursors = plan_steps(make_planner(recipe, EPOCH_SIZES), 41)
    for start in range(0, 40, 3):
        again, _ = plan_steps(make_planner(recipe, EPOCH_SIZES, dp=2), 2, cursors[start])
        assert [plan.order_digest for plan in again] == [plan.order_digest for plan in plans[start : start + 2]]
    assert len(cursors[-1].decisions) == 2


def test_one_planner_serves_cursors_before_and_after_a_decision():
    planner = make_planner(exhausting_recipe(gaps="renormalise"), EPOCH_SIZES)
    plans, cursors = plan_steps(planner, 40)
    [decision] = cursors[-1].decisions
    for step in (39, 0, decision.step + 1, decision.step, 39, 1):
        assert planner.step(cursors[step])[0].order_digest == plans[step].order_digest
    assert isinstance(decision, Decision)


@pytest.mark.parametrize("packing", PACKINGS)
def test_when_all_sources_have_run_out_every_full_batch_was_given(packing):
    everyone = dict.fromkeys(EPOCH_SHARES, "renormalise")
    plans, cursors, error = plan_to_the_end(make_planner(exhausting_recipe(packing, **everyone), EPOCH_SIZES))
    assert "every source" in str(error) and f"max_steps={len(plans)}" in str(error)
    left = int(cursors[-1].pool.tokens.sum())
    for s, name in enumerate(sorted(EPOCH_SIZES)):
        left += 2 * sum(counted_tokens(EPOCH_SIZES[name], packing)) - sum(int(plan.drawn_tokens[s]) for plan in plans)
    # What could not be given is less than a batch: with alignment, 8 samples of 256 tokens.
    assert 0 <= left < 8 * 256, left


def test_a_single_source_gives_as_many_steps_as_it_has_batches():
    for num_documents in range(40, 60):
        sizes = {"a": synthetic_sizes(num_documents, shortest=1, longest=300, salt=num_documents)}
        recipe = make_recipe(
            {"a": "100%"},
            samples=4,
            length=64,
            packing={"method": "concat"},
            sources={"a": {"max_epochs": 1, "on_exhausted": "renormalise"}},
        )
        plans, _, _ = plan_to_the_end(make_planner(recipe, sizes))
        assert len(plans) == int(sizes["a"].tokens.sum()) // 256


def test_documents_longer_than_the_whole_batch_are_delivered_whole():
    sizes = {
        "long": SourceSizes(
            first_row_of_page=np.arange(6), tokens=np.array([5000, 1, 9000, 300, 7000], np.int32), window_pages=2
        )
    }
    for packing in ("best_fit", "concat"):
        planner = make_planner(make_recipe({"long": "100%"}, samples=4, length=256, packing=PACKINGS[packing]), sizes)
        plans, cursors = plan_steps(planner, 80)
        delivered: dict[str, dict[tuple[int, int], list[Span]]] = defaultdict(dict)
        for plan in plans:
            spans_of(plan.pieces, plan.sources, delivered)
        done = [
            at for at, spans in delivered["long"].items() if sum(b - a for a, b in spans) == sizes["long"].tokens[at[1]]
        ]
        assert len(done) >= 5
        for at in done:
            check_whole(delivered["long"][at], int(sizes["long"].tokens[at[1]]), at)
        assert int(cursors[-1].pool.tokens.sum()) < 2 * 9000
