"""The bounds of the order over random recipes, as one JSON.

    python -m tests.trials.order_bounds --seed 1 --count 200 --out bounds.json

In: a seed and a number of recipes. Out: for each recipe how far it went and the worst of each bound as a part of what
is allowed; an AssertionError names the recipe that breaks one. Must hold, at every step: the tokens drawn from a source
are within half a sample (half its longest document, if that is shorter), and less than one token, of its share of all
asked; pool and draw are within C + L + sum of min(L, longest); no token of an epoch is lost or repeated; each state
leads a new planner to the same next step. Documents have 0 tokens to 1000 samples. A run goes on where it stopped.
Cost: a fifth of a second a recipe.
"""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from tests.support.given import given_tokens
from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.trial import continued, trial_parser
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import SourceExhausted
from torchmix.mixture.order import SourceOrder
from torchmix.planner.cursor import Cursor
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import Planner
from torchmix.recipe.sources import rows_of
from torchmix.recipe.structs import Recipe, Shuffle
from torchmix.steps.history import cursor_of_state
from torchmix.steps.state import decode_state, encode_state, state_of_cursor

FINGERPRINT = "0123456789abcdef"
Span = tuple[int, int]


def random_lengths(draw: random.Random, length: int) -> list[int]:
    """Tokens of the documents of one source: a kind of its own, or lengths of all sizes; one row is never empty."""
    count = draw.choice([1, 3, 20, 60])
    kind = draw.choice(["short", "about", "long", "all", "huge"])
    if kind == "short":
        tokens = [draw.randint(0, max(1, length // 4)) for _ in range(count)]
    elif kind == "about":
        tokens = [draw.choice([length - 1, length, length + 1, length // 2 + 1]) for _ in range(count)]
    elif kind == "long":
        tokens = [draw.randint(length, 20 * length) for _ in range(count)]
    elif kind == "huge":
        tokens = [draw.randint(1, 1000 * length) for _ in range(min(count, 3))]
    else:
        tokens = [int(1000 ** draw.random() * length / 30) for _ in range(count)]
    tokens[draw.randrange(len(tokens))] = draw.randint(1, length)
    return tokens


def random_job(draw: random.Random) -> tuple[Recipe, dict[str, SourceSizes], bool]:
    """A recipe, the sizes of its sources, and whether it is a single pass."""
    length, samples = draw.choice([16, 64, 256]), draw.choice([1, 2, 8, 32])
    names = [f"s{i}" for i in range(draw.choice([1, 2, 3, 6, 12]))]
    weights = [draw.randint(1, 100) if draw.random() < 0.8 else 0.01 for _ in names]
    percents = [round(100 * weight / sum(weights), 4) for weight in weights]
    percents[0] = round(100 - sum(percents[1:]), 4)
    sizes = {}
    for name in names:
        tokens = random_lengths(draw, length)
        cuts = sorted(draw.randint(0, len(tokens)) for _ in range(draw.randint(0, 6)))
        sizes[name] = SourceSizes(
            first_row_of_page=np.array([0, *cuts, len(tokens)], np.int64),
            tokens=np.array(tokens, np.int32),
            window_pages=draw.choice([1, 2, 64]),
        )
    one_pass = draw.random() < 0.2
    keys: dict[str, dict[str, Any]] = {}
    for name in names:
        if one_pass or draw.random() < 0.2:
            keys[name] = {"max_epochs": 1 if one_pass else draw.randint(1, 4), "on_exhausted": "renormalise"}
        if len(sizes[name].tokens) >= 20 and draw.random() < 0.3 and sizes[name].tokens[5:].any():
            keys.setdefault(name, {})["documents"] = ("20%", "100%")
    ramp: Any = samples
    if draw.random() < 0.4:
        ramp = [(0, samples), (3, 4 * samples), (7, samples), (12, max(1, samples // 2))]
    packing = {
        "method": draw.choice(["best_fit", "best_fit", "concat"]),
        "overflow": draw.choice(["split", "split", "split", "truncate"]),
        "align_tokens": draw.choice([1, 4, 16]),
    }
    shares = {name: f"{percent:.4f}%" for name, percent in zip(names, percents, strict=True)}
    recipe = make_recipe(
        shares, samples=ramp, length=length, seed=draw.randrange(2**31), packing=packing, sources=keys, balance="none"
    )
    shuffle = Shuffle(method=draw.choice(["page", "page", "row", "none"]))
    return msgspec.structs.replace(recipe, shuffle=shuffle), sizes, one_pass


def resumed(cursor: Cursor, planner: Planner, recipe: Recipe, sizes: dict[str, SourceSizes]) -> tuple[Planner, Cursor]:
    """A new planner, and the cursor by way of its state's bytes."""
    other = make_planner(recipe, sizes, one_pass=planner.part.one_pass)
    data = encode_state(state_of_cursor(cursor, planner, recipe=FINGERPRINT, catalog=FINGERPRINT))
    again = cursor_of_state(decode_state(data, recipe=FINGERPRINT), other, catalog=FINGERPRINT)
    assert again is not None
    return other, again


def add_spans(pieces: Pieces, into: dict[int, dict[tuple[int, int], list[Span]]]) -> None:
    """Add to source -> (epoch, row) -> spans."""
    columns = (pieces.source, pieces.epoch, pieces.row, pieces.start, pieces.tokens)
    for source, epoch, row, start, tokens in zip(*(column.tolist() for column in columns), strict=True):
        into[source].setdefault((epoch, row), []).append((start, start + tokens))


def counted_tokens(recipe: Recipe, name: str, sizes: SourceSizes) -> list[int]:
    """Tokens that each row of a source counts for."""
    start, stop = rows_of(recipe.sources[name], sizes.num_documents)
    row = np.arange(sizes.num_documents)
    tokens = np.where((row >= start) & (row < stop), sizes.tokens, 0)
    if recipe.packing.overflow == "truncate":
        tokens = np.minimum(tokens, recipe.batch.length)
    return tokens.tolist()


def try_recipe(seed: int, number: int, *, steps: int = 40) -> dict[str, float]:
    """Plan a random recipe, check every step, and say how near to the bounds it came."""
    recipe, sizes, one_pass = random_job(random.Random(f"{seed} {number}"))
    planner = make_planner(recipe, sizes, one_pass=one_pass)
    length = recipe.batch.length
    counted = {name: counted_tokens(recipe, name, sizes[name]) for name in planner.sources}
    largest = np.array([min(length, max(counted[name])) for name in planner.sources])
    shares = planner.shares((), step=0)
    cursor, asked, drawn = planner.start(), np.zeros(len(shares), np.int64), np.zeros(len(shares), np.int64)
    delivered: dict[int, dict[tuple[int, int], list[Span]]] = defaultdict(dict)
    worst = {"drawn": 0.0, "in_pool_and_draw": 0.0}
    capacities = [0]
    while cursor.step < steps:
        other, again = resumed(cursor, planner, recipe, sizes)
        try:
            plan, after = planner.step(cursor)
        except SourceExhausted:
            break
        assert other.step(again)[0].order_digest == plan.order_digest, "a resume differs"
        asked, drawn = asked + plan.asked_tokens, drawn + plan.drawn_tokens
        before = np.zeros_like(drawn)
        np.add.at(before, cursor.pool.source, cursor.pool.tokens)
        assert np.array_equal(before + plan.drawn_tokens, plan.delivered_tokens + plan.pool_tokens)
        if not after.decisions:
            assert np.array_equal(asked - drawn, after.position.debt)
            whole = [(a << 32) + r for a, r in zip(asked.tolist(), after.position.residue.tolist(), strict=True)]
            of_all = {divmod(each, share) for each, share in zip(whole, shares.tolist(), strict=True) if share}
            assert len(of_all) == 1 and next(iter(of_all))[1] == 0, "a source was not asked its share of all"
        assert np.all(2 * np.abs(after.position.debt) <= largest), (after.position.debt, largest)
        worst["drawn"] = max(worst["drawn"], float((2 * np.abs(after.position.debt) / largest).max()))
        capacities.append(plan.capacity_tokens)
        most = max(capacities) + length + int(largest.sum())
        all_tokens = int(before.sum() + plan.drawn_tokens.sum())
        assert all_tokens <= most, (all_tokens, most)
        worst["in_pool_and_draw"] = max(worst["in_pool_and_draw"], all_tokens / most)
        if recipe.packing.method == "best_fit":
            assert plan.pieces.tokens.max() <= length and not np.any(plan.pieces.start % length)
        add_spans(plan.pieces, delivered)
        cursor = after
    add_spans(cursor.pool, delivered)
    for s, name in enumerate(planner.sources):
        at = tuple(int(getattr(cursor.position, each)[s]) for each in ("epoch", "window", "offset"))
        order = SourceOrder(name, sizes[name], seed=recipe.seed, method=recipe.shuffle.method)
        if at[0] and at[0] == planner.max_epochs[s]:
            at = (at[0] - 1, order.num_windows - 1, 1 << 62)  # all of its last epoch
        given = given_tokens(order, counted[name], length, at)
        assert sorted(given) == sorted(delivered[s]), name
        for place, spans in delivered[s].items():
            spans.sort()
            assert spans[0][0] == 0 and spans[-1][1] == given[place], (name, place)
            assert all(one[1] == other[0] for one, other in pairwise(spans)), (name, place)
    return {"steps": cursor.step, **worst}


def main() -> None:
    continued(trial_parser(__doc__, count=200).parse_args(), try_recipe)


if __name__ == "__main__":
    main()
