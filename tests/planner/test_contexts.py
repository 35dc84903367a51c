"""`packing.method: whole` and `balance.context`: documents of any length in runs of ranks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.book_contexts import BookRuns, placed_in_runs
from tests.support.mixtures import SHARES, SIZES, forecast_of, make_planner, plan_steps
from tests.support.native import native_or_not
from tests.support.recipes import make_recipe
from torchmix.array_types import Int64Array
from torchmix.errors import PlanError, RecipeError, SourceExhausted, StateError, TopologyError
from torchmix.planner.balance import cost_model
from torchmix.planner.contexts import (
    ContextPlan,
    RunCosts,
    check_runs,
    exchange_of,
    most_of_token,
    place_in_contexts,
    sizes_of_layout,
)
from torchmix.planner.entering import check_cursor
from torchmix.planner.plans import DEFERRED, SampleRuns, cursor_after, placement_of, plan_raw, summary_buffer
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.ramp import samples_of_step
from torchmix.recipe.structs import Balance, Batch, Context, FittedCost, Model, Module, Packing, RampStage, Recipe

LENGTH, SAMPLES = 256, 16
CAPACITY = LENGTH * SAMPLES


def recipe_of(*, overflow: Any = "split", samples: Any = SAMPLES, seed: int = 7, **context: Any) -> Recipe:
    plain = make_recipe(SHARES, samples=samples, length=LENGTH, seed=seed)
    balance = Balance(context=Context(**{"rank_tokens": 64, **context}), cost=FittedCost(per_token=1000, per_pair=3))
    return check_recipe(replace(plain, packing=Packing(method="whole", overflow=overflow), balance=balance))


def costs_of(num_ranks: int, sizes: tuple[int, ...] | None = None, **options: int) -> RunCosts:
    numbers = {
        "per_token": 1000,
        "per_pair": 3,
        "per_exchanged": 8,
        "per_microbatch": 0,
        "rank_tokens": 64,
        "align": 1,
        "microbatches_of": 1,
        **options,
    }
    return RunCosts(**numbers, sizes=sizes_of_layout(sizes, num_ranks), num_ranks=num_ranks)


def check_bins(plan: ContextPlan, tokens: Int64Array, costs: RunCosts) -> None:
    """Runs are aligned and cover all ranks once; bins keep their bounds; each sample is in one bin."""
    ranks: Counter[tuple[int, int]] = Counter()
    of_bin = zip(plan.microbatch_of_bin, plan.first_rank_of_bin, plan.size_of_bin, strict=True)
    for number, (microbatch, first, size) in enumerate(of_bin):
        assert size in costs.sizes and first % size == 0
        ranks.update((int(microbatch), rank) for rank in range(first, first + size))
        mine = tokens[plan.bin_of_sample == number]
        padded, load = costs.padded(mine, int(size)), costs.of_rank(mine, int(size))
        assert plan.tokens_of_bin[number] == padded.sum() <= costs.rank_tokens * size
        assert plan.load_of_bin[number] == load.sum()
        assert np.array_equal(plan.padded_tokens[plan.bin_of_sample == number], padded)
        assert not (padded % (costs.align * (2 * size if size > 1 else 1))).any() and (padded >= mine).all()
    assert ranks == dict.fromkeys(itertools.product(range(plan.num_microbatches), range(costs.num_ranks)), 1)
    places = list(zip(plan.microbatch_of_bin.tolist(), plan.first_rank_of_bin.tolist(), strict=True))
    assert places == sorted(places)


def random_case(seed: int) -> tuple[list[int], RunCosts, BookRuns]:
    """Tokens of samples with a long tail, and a layout with runs that hold them."""
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 64])
    fixed = max(size for size in range(1, num_ranks + 1) if num_ranks % size == 0 and size <= rng.randint(1, 8))
    sizes = sizes_of_layout(rng.choice([None, None, (fixed,)]), num_ranks)
    numbers = {
        "per_token": rng.choice([1, 7, 1000]),
        "per_pair": rng.choice([0, 1, 3]),
        "per_exchanged": rng.choice([0, 1, 8]),
        "per_microbatch": rng.choice([0, 0, 5000]),
        "rank_tokens": rng.choice([8, 16, 33, 64]),
        "align": rng.choice([1, 1, 2, 4]),
        "stages": rng.choice([1, 1, 2, 4]),
        "microbatches_of": rng.choice([1, 1, 2, 4]),
    }
    costs = RunCosts(**numbers, sizes=sizes, num_ranks=num_ranks)
    book = BookRuns(**numbers, sizes=sizes, ranks=num_ranks)
    most = max(n for n in range(1, 64 * num_ranks + 1) if book.fits(n, sizes[-1]))
    mean = rng.randint(1, 9)
    return [min(most, max(1, int(mean * rng.paretovariate(0.8)))) for _ in range(rng.randint(1, 48))], costs, book


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 150, 50))
def test_the_schedule_is_that_of_the_book(first: int) -> None:
    num_microbatches, num_sizes = set(), set()
    for seed in range(first, first + 50):
        tokens, costs, book = random_case(seed)
        lengths = np.array(tokens, np.int64)
        plan, report = place_in_contexts(lengths, costs)
        check_bins(plan, lengths, costs)
        wanted = placed_in_runs(book, tokens)
        bins = (plan.microbatch_of_bin, plan.first_rank_of_bin, plan.size_of_bin)
        assert list(zip(*(column.tolist() for column in bins), strict=True)) == wanted.bins, seed
        assert plan.bin_of_sample.tolist() == wanted.bin_of_sample and plan.padded_tokens.tolist() == wanted.padded
        found = (report.cost, report.hash_order_cost, report.lower_bound)
        assert found == (wanted.cost, wanted.by_number_cost, wanted.lower_bound), seed
        assert report.lower_bound <= report.cost <= report.hash_order_cost
        assert plan.num_microbatches % costs.microbatches_of == 0
        num_microbatches.add(plan.num_microbatches)
        num_sizes.add(len(set(plan.size_of_bin.tolist())))
    assert max(num_microbatches) > 5 and max(num_sizes) > 1


@pytest.mark.parametrize("native", [True, False])
def test_runs_in_which_a_step_would_exceed_62_bits_are_left_out(native: bool) -> None:
    """600 samples of one token: in 64 ranks each, all of them together cost 2^62 or more, and nobody would do that."""
    numbers = {"per_token": 1 << 40, "per_pair": 1, "per_exchanged": 1 << 40, "per_microbatch": 0, "rank_tokens": 64}
    tokens = [1] * 600 + [3000]
    costs = RunCosts(**numbers, align=1, sizes=sizes_of_layout(None, 64), num_ranks=64)
    assert 600 * 64 * int(costs.of_rank(np.array([1]), 64)[0]) >= 1 << 62
    with native_or_not(native):
        plan, report = place_in_contexts(np.array(tokens), costs)
    check_bins(plan, np.array(tokens), costs)
    wanted = placed_in_runs(BookRuns(**numbers, align=1, sizes=costs.sizes, ranks=64), tokens)
    assert plan.bin_of_sample.tolist() == wanted.bin_of_sample
    found = (report.cost, report.hash_order_cost, report.lower_bound)
    assert found == (wanted.cost, wanted.by_number_cost, wanted.lower_bound)


def test_costs_are_refused_for_what_samples_can_cost_and_for_no_more() -> None:
    """A batch of 16 million tokens, of a model of 405 billion parameters, on 1,024 ranks in 16 stages."""
    large = cost_model(Model(layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8), boundaries="document")
    batch = Batch(samples=64, length=1 << 18)
    costs = RunCosts(
        per_token=large.per_token,
        per_pair=large.per_pair,
        per_exchanged=exchange_of(large),
        per_microbatch=0,
        rank_tokens=32768,
        align=1,
        sizes=sizes_of_layout(None, 1024),
        num_ranks=1024,
        stages=16,
    )
    check_runs(costs, batch)
    with pytest.raises(RecipeError, match=r"balance.context: a batch of \d+ tokens could cost \d+, which exceeds 62"):
        check_runs(replace(costs, per_token=1 << 40), batch)
    tokens = np.array([1] * 5000 + [1 << 18] * 60)
    assert place_in_contexts(tokens, costs)[1].ratio < 3  # a stage waits for its dearest document


@pytest.mark.parametrize("seed", range(60))
def test_no_sample_costs_more_than_is_checked_before_the_run(seed: int) -> None:
    tokens, costs, _ = random_case(seed)
    most = max(tokens)
    of_token, every = most_of_token(costs, most), np.arange(1, most + 1)
    work = np.full(most, np.iinfo(np.int64).max)
    for size in costs.sizes:
        load = costs.of_rank(every, size)
        assert (load * (costs.stages + 1) <= every * of_token).all(), "a rank after the other, in each stage"
        assert int(load.max()) * size <= most * of_token, "the longest alone"
        holds = costs.padded(every, size) <= costs.rank_tokens * size
        work = np.where(holds, np.minimum(work, load * size), work)
    assert (work <= every * of_token).all(), "all ranks together"


def least_cost(tokens: list[int], costs: RunCosts) -> int:
    """The cheapest schedule, by trying every division into bins, sizes of these and microbatches."""
    loads = {(n, s): int(costs.of_rank(np.array([n]), s)[0]) for n in set(tokens) for s in costs.sizes}
    takes = {(n, s): int(costs.padded(np.array([n]), s)[0]) for n in set(tokens) for s in costs.sizes}

    def divisions(items: list[int]) -> Any:
        if not items:
            yield []
            return
        for rest in divisions(items[1:]):
            yield [[items[0]], *rest]
            for at in range(len(rest)):
                yield [*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]]

    best: int | None = None
    for rows in divisions(list(range(len(tokens)))):
        cost = 0
        for row in rows:
            cheapest: int | None = None
            for bins in divisions(row):
                for sizes in itertools.product(costs.sizes, repeat=len(bins)):
                    if sum(sizes) > costs.num_ranks:
                        continue
                    pairs = list(zip(bins, sizes, strict=True))
                    if any(sum(takes[tokens[i], s] for i in b) > costs.rank_tokens * s for b, s in pairs):
                        continue
                    largest = max(sum(loads[tokens[i], s] for i in b) for b, s in pairs)
                    cheapest = largest if cheapest is None else min(cheapest, largest)
            if cheapest is None:
                break
            cost += cheapest + costs.per_microbatch
        else:
            best = cost if best is None else min(best, cost)
    assert best is not None
    return best


def test_no_schedule_is_below_the_bound_and_the_planned_one_is_near_the_best() -> None:
    rng, ratios = random.Random(3), []
    for _ in range(60):
        num_ranks = rng.choice([1, 2, 4])
        costs = costs_of(num_ranks, per_microbatch=rng.choice([0, 900]), rank_tokens=64)
        tokens = [rng.choice([2, 9, 20, 44, 60, 64 * num_ranks]) for _ in range(rng.randint(1, 5))]
        _, report = place_in_contexts(np.array(tokens, np.int64), costs)
        best = least_cost(tokens, costs)
        assert report.lower_bound <= best <= report.cost
        ratios.append(report.cost / best)
    assert max(ratios) < 1.35 and float(np.mean(ratios)) < 1.05


def lengths_of(kind: str, total: int, rng: np.random.Generator) -> Int64Array:
    """A log-normal tail; fine-tuning up to 256K; 90 % short. Together at least `total` tokens."""
    count, most = total // 64, 262_144
    normal = {"tail": (6.7, 1.5), "tuning": (7.5, 1.3), "short": (6.7, 0.7)}[kind]
    lengths = np.exp(rng.normal(*normal, count))
    long = np.exp(rng.uniform(np.log(8192 if kind == "short" else 65536), np.log(most), count))
    lengths = np.where(rng.random(count) < {"tail": 0.0, "tuning": 0.02, "short": 0.1}[kind], long, lengths)
    found = np.clip(lengths.astype(np.int64), 1, most)
    return found[: int(np.searchsorted(np.cumsum(found), total)) + 1]


@pytest.mark.parametrize("kind", ["tail", "tuning", "short"])
@pytest.mark.parametrize("num_ranks", [16, 32, 64])
def test_a_schedule_is_within_four_percent_of_the_bound(kind: str, num_ranks: int) -> None:
    per_token = 32 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    costs = costs_of(num_ranks, per_token=per_token, per_pair=32, per_exchanged=per_token // 128, rank_tokens=32768)
    tokens = lengths_of(kind, num_ranks * 32768 * 8 * 9 // 10, np.random.default_rng(num_ranks))
    plan, report = place_in_contexts(tokens, costs)
    check_bins(plan, tokens, costs)
    assert report.ratio < 1.04 < report.hash_order_ratio
    assert plan.padded_tokens.sum() < 1.001 * tokens.sum()


def test_no_fixed_size_is_cheaper() -> None:
    num_equal = 0
    for seed in range(200):
        tokens, costs, _ = random_case(seed)
        lengths = np.array(tokens, np.int64)
        cost = place_in_contexts(lengths, costs)[1].cost
        for size in costs.sizes:
            if costs.num_ranks % size == 0 and costs.padded(lengths, size).max() <= costs.rank_tokens * size:
                fixed = place_in_contexts(lengths, replace(costs, sizes=(size,)))[1].cost
                assert cost <= fixed, (seed, size)
                num_equal += cost == fixed and len(costs.sizes) > 1
    assert num_equal > 20


def test_a_step_has_a_multiple_of_microbatches() -> None:
    tokens = np.array([90, 5, 7, 64, 30, 2, 81, 16] * 9, np.int64)
    found = []
    for multiple in (1, 4, 6):
        costs = costs_of(8, microbatches_of=multiple)
        plan, report = place_in_contexts(tokens, costs)
        check_bins(plan, tokens, costs)
        assert plan.num_microbatches % multiple == 0
        found.append(report.cost)
    assert found == sorted(found), "a multiple is no cheaper"
    few, _ = place_in_contexts(np.array([5, 7], np.int64), costs_of(2, microbatches_of=4))
    held = np.bincount(few.microbatch_of_sample, minlength=4)
    assert few.num_microbatches == 4 and sorted(held.tolist()) in ([0, 0, 0, 2], [0, 0, 1, 1])
    assert few.tokens_of_bin[few.microbatch_of_bin == int(held.argmin())].tolist() == [0, 0], "declared, and empty"


def test_a_fixed_size_is_one_of_the_recipe() -> None:
    tokens = np.array([90, 5, 7, 64, 30, 2, 81, 16], np.int64)
    costs = costs_of(8, (2,))
    plan, _ = place_in_contexts(tokens, costs)
    check_bins(plan, tokens, costs)
    assert set(plan.size_of_bin.tolist()) == {2}


def test_no_rank_is_without_a_bin_where_there_are_fewer_documents_than_ranks() -> None:
    costs = costs_of(16)
    plan, _ = place_in_contexts(np.array([1, 1, 1], np.int64), costs)
    check_bins(plan, np.array([1, 1, 1]), costs)
    assert np.count_nonzero(plan.tokens_of_bin == 0) >= 1 and plan.num_microbatches == 1


def test_a_step_is_the_shortest_prefix_that_reaches_the_batch() -> None:
    plans, cursors = plan_steps(make_planner(recipe_of(), SIZES, dp=8), 80)
    for plan, before, after in zip(plans, cursors, cursors[1:], strict=False):
        tokens = plan.pieces.tokens
        assert CAPACITY <= tokens.sum() < CAPACITY + LENGTH
        assert plan.sample.tolist() == list(range(len(tokens))) and not plan.slot.any() and not plan.sample_offset.any()
        assert tokens.max() <= plan.length == LENGTH
        # What waits is no older than what is given, and of the oldest that are given one was needed.
        given, waits = plan.pieces.drawn_step, after.pool.drawn_step
        assert not len(waits) or waits.min() >= given.max()
        assert len(before.pool) == 0 or given.min() == before.pool.drawn_step.min()
    assert max(len(cursor.pool) for cursor in cursors) > 3


def test_a_piece_waits_at_most_as_long_as_the_overdraw_says() -> None:
    shares = dict.fromkeys(SHARES, "25%")
    assert len(shares) == 4 or len(SHARES) != 4
    for samples in (1, 2, SAMPLES):
        plans, cursors = plan_steps(make_planner(recipe_of(samples=samples), SIZES, dp=8), 120)
        capacity = samples * LENGTH
        at_hand = [
            int(plan.pieces.tokens.sum() + after.pool.tokens.sum())
            for plan, after in zip(plans, cursors[1:], strict=True)
        ]
        overdraw = max(at_hand) - capacity
        oldest = max(int((plan.step - plan.pieces.drawn_step).max()) for plan in plans)
        assert oldest <= -(-overdraw // capacity)
    result = forecast_of(part_of(recipe_of(samples=1), "train"), SIZES, num_steps=60)
    assert result.overdraw_tokens > 0


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_one_pass_gives_each_document_once(overflow: str) -> None:
    planner = make_planner(part_of(recipe_of(overflow=overflow), "train", one_pass=True), SIZES, dp=8)
    found: Counter[tuple[str, int]] = Counter()
    cursor, sums = planner.start(), []
    for _ in range(2000):
        try:
            plan, cursor = planner.step(cursor)
        except SourceExhausted:
            break
        sums.append(int(plan.pieces.tokens.sum()))
        for source, row, tokens in zip(plan.pieces.source, plan.pieces.row, plan.pieces.tokens, strict=True):
            found[plan.sources[source], int(row)] += int(tokens)
    counted = {"split": lambda n: n, "truncate": lambda n: min(n, LENGTH), "drop": lambda n: n if n <= LENGTH else 0}
    expected = {
        (name, row): counted[overflow](int(tokens))
        for name, one in SIZES.items()
        for row, tokens in enumerate(one.tokens)
    }
    assert dict(found) == {place: tokens for place, tokens in expected.items() if tokens}
    assert min(sums[:-1]) >= CAPACITY and 0 < sums[-1] < CAPACITY + LENGTH


def test_the_order_depends_on_no_layout_and_no_run_and_not_on_where_a_run_was_resumed() -> None:
    plans, cursors = plan_steps(make_planner(recipe_of(), SIZES, dp=8), 30)
    other = recipe_of(rank_tokens=40, align=2, sizes=(1, 4, 16))
    assert recipe_fingerprint(other) == recipe_fingerprint(recipe_of())
    again, _ = plan_steps(make_planner(other, SIZES, dp=2, cp=8, pp=2), 20, cursors[10])
    assert [plan.order_digest for plan in plans[10:]] == [plan.order_digest for plan in again]
    assert all(a.plan_digest != b.plan_digest for a, b in zip(plans[10:], again, strict=True))
    same, _ = plan_steps(make_planner(recipe_of(), SIZES, dp=8), 20, cursors[10])
    assert [plan.plan_digest for plan in plans[10:]] == [plan.plan_digest for plan in same]
    best = make_recipe(SHARES, samples=SAMPLES, length=LENGTH)
    assert recipe_fingerprint(best) != recipe_fingerprint(recipe_of())


def test_a_batch_may_grow_and_so_may_its_length() -> None:
    ramp = ((0, 4), (5, 16), (12, 8, 2 * LENGTH))
    recipe = recipe_of(samples=ramp)
    assert isinstance(recipe.batch.samples, tuple) and isinstance(recipe.batch.samples[0], RampStage)
    plans, cursors = plan_steps(make_planner(recipe, SIZES, dp=8), 30)
    for plan in plans:
        length = LENGTH if plan.step < 12 else 2 * LENGTH
        capacity = samples_of_step(recipe.batch, plan.step) * length
        assert capacity <= plan.pieces.tokens.sum() < capacity + length and plan.length == length
    planner = make_planner(recipe, SIZES, dp=8)
    for cursor in cursors:
        check_cursor(cursor, planner)
    assert max(int(plan.pieces.tokens.max()) for plan in plans[12:]) > LENGTH


def test_cursors_are_within_their_bounds_and_others_are_refused() -> None:
    planner = make_planner(recipe_of(), SIZES, dp=8)
    _, cursors = plan_steps(planner, 40)
    for cursor in cursors:
        check_cursor(cursor, planner)
    last = next(cursor for cursor in cursors if len(cursor.pool))
    cut = replace(last.pool, start=last.pool.start + 1, tokens=last.pool.tokens - 1)
    cut = cut.take(cut.tokens > 0)
    with pytest.raises(StateError, match="the start of piece 0"):
        check_cursor(replace(last, pool=cut), planner)


def test_a_layout_that_cannot_hold_a_document_is_refused_by_name() -> None:
    with pytest.raises(TopologyError, match=r"a document of 256 tokens does not fit .* write rank_tokens: 128"):
        make_planner(recipe_of(), SIZES, dp=2)
    with pytest.raises(TopologyError, match=r"do not divide the 9 ranks"):
        make_planner(recipe_of(sizes=(4, 8)), SIZES, dp=9)
    with pytest.raises(TopologyError, match="micro_batch_size 2"):
        make_planner(recipe_of(), SIZES, dp=8, micro_batch_size=2)
    make_planner(recipe_of(), SIZES, dp=2, cp=2)
    assert make_planner(recipe_of(), SIZES, dp=7).layout.dp == 7, "the batch need not divide by the ranks"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"balance": Balance(method="none")}, r"packing.method: needs balance.context"),
    ({"packing": Packing(method="pad")}, r"balance.context: is of packing.method: whole"),
    ({"packing": Packing(method="whole", boundaries="none")}, r"packing.boundaries"),
    ({"packing": Packing(method="whole", positions="sample")}, r"packing.positions"),
    ({"modules": {"m": Module()}}, r"modules: modules are placed beside"),
    ({"context": Context(rank_tokens=0)}, r"balance.context.rank_tokens: 0 is out of range"),
    ({"context": Context(rank_tokens=64, align=0)}, r"balance.context.align"),
    ({"context": Context(rank_tokens=64, microbatches_of=0)}, r"microbatches_of: 0 .* must be in \[1, 1048576\]"),
    ({"context": Context(rank_tokens=64, sizes=(4, 2))}, r"balance.context.sizes: \[4, 2\] are no sizes"),
    ({"context": Context(rank_tokens=64, sizes=(4, 4))}, r"balance.context.sizes: \[4, 4\] has a size twice"),
    ({"context": Context(rank_tokens=64, sizes=(1, 2))}, r"a document of 256 tokens fits no run: 2 ranks hold 128"),
    ({"keys": {"method": "lpt"}}, r"balance.method: places samples of one length"),
    ({"keys": {"group_size": 2}}, r"balance.group_size: places samples of one length"),
    ({"keys": {"cost": None}}, r"balance.model: needs the model's dimensions"),
    ({"source": {"reset_id": 3}}, r"sources.\w+.reset_id: packing.method: whole slices"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_does_not_go_with_it_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    recipe = recipe_of()
    balance = recipe.balance
    if "context" in changes:
        changes = {"balance": replace(balance, context=changes["context"])}
    elif "keys" in changes:
        changes = {"balance": replace(balance, **changes["keys"])}
    elif "source" in changes:
        name = min(recipe.sources)
        changes = {"sources": {**recipe.sources, name: replace(recipe.sources[name], **changes["source"])}}
    with pytest.raises(RecipeError, match=message):
        check_recipe(replace(recipe, **changes))


def test_plans_by_hand_equal_those_that_they_are_taken_from() -> None:
    planner = make_planner(recipe_of(), SIZES, dp=8)
    cursor = planner.start()
    for _ in range(3):
        made, following = planner.step(cursor)
        assert made.contexts is not None
        held = made.contexts.bin_of_sample
        runs = SampleRuns(
            microbatch=made.contexts.microbatch_of_sample,
            first_rank=made.contexts.first_rank_of_bin[held],
            size=made.contexts.size_of_bin[held],
        )
        summary = summary_buffer(planner, cursor)
        sample = summary.columns["sample"]
        again = plan_raw(summary, sample, {"backbone": runs})
        assert (again.order_digest, again.balance.cost) == (made.order_digest, made.balance.cost)
        assert cursor_after(summary, again, sample).order_digest == following.order_digest
        assert len(cursor_after(summary, again, sample).pool) == len(following.pool)
        cursor = following


def test_plans_by_hand_keep_the_rules_of_runs() -> None:
    planner = make_planner(recipe_of(), SIZES, dp=8)
    summary = summary_buffer(planner, planner.start())
    sample = summary.columns["sample"].copy()
    count = int((sample != DEFERRED).sum())
    one = SampleRuns(microbatch=np.arange(count), first_rank=np.zeros(count, np.int64), size=np.full(count, 8))
    assert plan_raw(summary, sample, {"backbone": one}).num_microbatches == count
    fewer = sample.copy()
    fewer[fewer == count - 1] = DEFERRED
    less = SampleRuns(microbatch=one.microbatch[:-1], first_rank=one.first_rank[:-1], size=one.size[:-1])
    plan = plan_raw(summary, fewer, {"backbone": less})
    assert len(plan.pieces) == count - 1 and plan.order_digest != summary.after.order_digest
    with pytest.raises(PlanError, match=r"plan_raw, step 0: .* each is a sample"):
        plan_raw(summary, np.where(sample > 0, sample - 1, sample), {"backbone": one})
    with pytest.raises(PlanError, match=r"backbone needs SampleRuns, not Placement"):
        plan_raw(summary, sample, {"backbone": placement_of(one.first_rank, one.microbatch)})
    with pytest.raises(PlanError, match=r"runs cover each of 8 ranks once"):
        size = np.where(np.arange(count) % 2 == 1, 4, 8)
        plan_raw(summary, sample, {"backbone": replace(one, microbatch=one.microbatch // 2, size=size)})
