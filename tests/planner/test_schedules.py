"""Trees and schedules in the plan: what is drawn follows the integral of the shares, by an oracle in fractions."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.book_shares import mean_shares
from tests.support.mixtures import SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.errors import SourceExhausted
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe

LENGTH = 256
REST = {"share": "50%", "children": {"gaps": 1, "one": 2, "tiny": 3}}
TREE = {
    "long": {"share": "1/4", "children": {"books": 3, "web": 1}},
    "short": {"share": "3/4", "children": {"code": "50%", "rest": REST}},
}
START = {
    "books": Fraction(3, 16),
    "web": Fraction(1, 16),
    "code": Fraction(3, 8),
    "gaps": Fraction(1, 16),
    "one": Fraction(1, 8),
    "tiny": Fraction(3, 16),
}
SUDDEN = {
    "books": Fraction(3, 8),
    "web": Fraction(1, 8),
    "code": Fraction(1, 4),
    "gaps": Fraction(1, 24),
    "one": Fraction(1, 12),
    "tiny": Fraction(1, 8),
}
AFTER = {**{name: Fraction(0) for name in START}, "web": Fraction(1, 2), "code": Fraction(1, 2)}
CHANGES = [
    {"from": "9000 tokens", "set": {"long": "50%"}},
    {"from": "20 steps", "to": "100K tokens", "mixture": {"web": 1, "code": 1}},
]


def scheduled(samples: Any = ((0, 8), (12, 16)), packing: dict[str, Any] | None = None) -> Recipe:
    recipe = make_recipe(SHARES, samples=samples, length=LENGTH, packing=packing)
    return check_recipe({**msgspec.to_builtins(recipe), "mixture": TREE, "schedule": CHANGES})


def tokens_before(step: int) -> int:
    return LENGTH * (8 * min(step, 12) + 16 * max(0, step - 12))


def share_at(name: str, token: Fraction) -> Fraction:
    begin, end = tokens_before(20), 100_000
    if token < 9000:
        return START[name]
    if token < begin:
        return SUDDEN[name]
    part = min(Fraction(1), (token - begin) / (end - begin))
    return SUDDEN[name] + (AFTER[name] - SUDDEN[name]) * part


def mean_share(name: str, step: int) -> Fraction:
    """The mean over the tokens of a step: between borders it is a line, whose mean is the value in the middle."""
    first, last = tokens_before(step), tokens_before(step + 1)
    cuts = sorted({first, last, *(t for t in (9000, tokens_before(20), 100_000) if first < t < last)})
    total = Fraction(0)
    for left, right in pairwise(cuts):
        total += share_at(name, Fraction(left + right, 2)) * (right - left)
    return total / (last - first)


@pytest.mark.parametrize(
    "packing", [{"method": "concat"}, {"method": "best_fit"}, {"method": "best_fit", "align_tokens": 32}]
)
def test_drawn_tokens_follow_the_integral_of_the_schedule(packing: dict[str, Any]) -> None:
    planner = make_planner(scheduled(packing=packing), SIZES)
    plans, _ = plan_steps(planner, 40)
    names = planner.sources
    expected, drawn = dict.fromkeys(names, Fraction(0)), np.zeros(len(names), np.int64)
    asked = np.zeros(len(names), np.int64)
    for plan in plans:
        asked += plan.asked_tokens
        drawn += plan.drawn_tokens
        for s, name in enumerate(names):
            expected[name] += mean_share(name, plan.step) * int(plan.asked_tokens.sum())
            most = min(LENGTH, SIZES[name].longest_tokens) / 2
            # Whole tokens are asked of each source: so many may lie between the sum and its parts.
            assert abs(drawn[s] - expected[name]) <= most + len(names) + 1, (plan.step, name)
    assert drawn[names.index("one")] > 0 and plans[-1].asked_tokens[names.index("one")] == 0


def test_the_order_is_the_same_after_a_resume_at_any_step_and_before_the_first_change() -> None:
    planner = make_planner(scheduled(), SIZES)
    plans, cursors = plan_steps(planner, 30)
    for at in (1, 4, 5, 19, 20, 21, 28):
        again, _ = plan_steps(make_planner(scheduled(), SIZES), 30 - at, cursors[at])
        assert [plan.order_digest for plan in again] == [plan.order_digest for plan in plans[at:]]
    constant = check_recipe({**msgspec.to_builtins(scheduled()), "schedule": []})
    others, _ = plan_steps(make_planner(constant, SIZES), 6)
    same = [plan.order_digest == other.order_digest for plan, other in zip(plans, others, strict=False)]
    assert same == [True] * 4 + [False] * 2, "step 4 holds token 9000"


def test_what_runs_out_gives_to_its_siblings_in_every_stage() -> None:
    plain = msgspec.to_builtins(scheduled())
    for name in ("tiny", "one"):
        plain["sources"][name] |= {"max_epochs": 2, "on_exhausted": "renormalise"}
    planner = make_planner(check_recipe(plain), SIZES)
    _, cursors = plan_steps(planner, 19)
    gone = {decision.name for decision in cursors[-1].decisions}
    assert gone == {"tiny", "one"}
    shares = planner.shares(cursors[-1].decisions, step=19) / 2**32
    wanted = dict(SUDDEN, gaps=SUDDEN["gaps"] + SUDDEN["one"] + SUDDEN["tiny"], one=Fraction(0), tiny=Fraction(0))
    assert shares.tolist() == pytest.approx([float(wanted[name]) for name in planner.sources], abs=1e-9)


def test_one_pass_gives_all_and_ends_also_where_shares_are_zero_for_a_time() -> None:
    plain = msgspec.to_builtins(scheduled())
    plain["schedule"] = [{"from": "0 steps", "mixture": {"tiny": 1}}, {"from": "1 steps", "mixture": TREE}]
    for source in plain["sources"].values():
        source |= {"max_epochs": 1, "on_exhausted": "renormalise"}
    planner = make_planner(check_recipe(plain), SIZES, one_pass=True)
    cursor, delivered = planner.start(), np.zeros(len(planner.sources), np.int64)
    with pytest.raises(SourceExhausted):
        while True:
            plan, cursor = planner.step(cursor)
            delivered += plan.delivered_tokens
    assert delivered.tolist() == [int(SIZES[name].tokens.sum()) for name in planner.sources]


def test_random_trees_and_schedules_keep_every_source_to_its_own_order() -> None:
    rng = random.Random(8)
    constant, _ = plan_steps(make_planner(make_recipe(SHARES, length=LENGTH), SIZES), 60)
    for _ in range(6):
        weights = {name: rng.randint(1, 9) for name in SHARES}
        changes = [
            {"from": f"{step} steps", "mixture": {name: rng.randint(0, 5) or (name == "web") * 1 for name in SHARES}}
            for step in sorted(rng.sample(range(1, 25), 3))
        ]
        plain = msgspec.to_builtins(make_recipe(SHARES, length=LENGTH)) | {"mixture": weights, "schedule": changes}
        planner = make_planner(check_recipe(plain), SIZES)
        _, cursors = plan_steps(planner, 25)
        given, reference = _rows(planner, cursors), _rows(make_planner(make_recipe(SHARES, length=LENGTH), SIZES), None)
        for name, rows in given.items():
            assert rows == reference[name][: len(rows)], f"{name} comes in its own order whatever its share"
    assert constant


def _rows(planner: Planner, cursors: Any) -> dict[str, list[tuple[int, int]]]:
    """First documents of each source, by its order alone; of cursors, those of the first epoch that are passed."""
    found: dict[str, list[tuple[int, int]]] = {}
    for s, name in enumerate(planner.sources):
        order = planner.orders[s]
        rows = [(0, row) for row in order.window(0, 0).rows.tolist()]
        if cursors is not None:
            at = cursors[-1].position
            stop = len(rows) if (at.epoch[s], at.window[s]) > (0, 0) else int(at.offset[s])
            rows = rows[: min(stop, len(rows))]
        found[name] = rows
    return found


def cosine_recipe(**more: Any) -> tuple[Recipe, dict[str, Any]]:
    """A recipe with a cosine ramp over steps 3 to 30, and what the book reads of it, in tokens."""
    mixture = {"web": 3, "code": 1, "books": 2, "gaps": 1, "one": 1, "tiny": 1}
    after = {"web": 1, "code": 7}
    change = {"from": "3 steps", "to": "30 steps", "shape": "cosine", "mixture": after}
    plain = msgspec.to_builtins(make_recipe(SHARES, samples=8, length=LENGTH))
    later = {**dict.fromkeys(mixture, 0), **after}
    places = {"from": f"{3 * 8 * LENGTH} tokens", "to": f"{30 * 8 * LENGTH} tokens", "shape": "cosine"}
    book = {"mixture": mixture, "schedule": [{**places, "mixture": later}]}
    return check_recipe({**plain, "mixture": mixture, "schedule": [change], **more}), book


def test_a_step_of_a_cosine_ramp_has_the_shares_of_the_book() -> None:
    recipe, book = cosine_recipe()
    planner = make_planner(recipe, SIZES)
    for step in (0, 2, 3, 4, 11, 16, 28, 29, 30, 44):
        exact = mean_shares(book, step * 8 * LENGTH, (step + 1) * 8 * LENGTH, set(), None)
        shares = planner.shares((), step=step)
        assert all(abs(int(shares[s]) - exact[name] * 2**32) <= 2 for s, name in enumerate(planner.sources)), step


def test_a_policy_is_bounded_by_the_share_of_the_cosine_at_the_end_of_a_step() -> None:
    recipe, _ = cosine_recipe(dynamic={"policy": "exp3"})
    recipe = msgspec.structs.replace(recipe, mixture={"web": 3, "code": 1}, schedule=recipe.schedule)
    recipe = msgspec.structs.replace(recipe, sources={name: recipe.sources[name] for name in ("web", "code")})
    planner = make_planner(recipe, {name: SIZES[name] for name in ("web", "code")})
    for step in (2, 3, 10, 29, 31):
        part = min(1.0, max(0.0, (step + 1 - 3) / 27))
        way = (1 - math.cos(math.pi * part)) / 2
        found = {name: float(share) for name, share in planner.shares_of_step.in_group(step).items()}
        assert found == pytest.approx({"web": 3 / 4 - 5 / 8 * way, "code": 1 / 4 + 5 / 8 * way})
