"""The ledger of mixtures: trees, flats, selections, cells, ramps and run-outs over random recipes, as one JSON.

    python -m tests.trials.mixing --seed 1 --count 200 --out mixing.json

In: a seed and a number of recipes. Out: for each recipe how far it went; an AssertionError names the recipe that breaks
a promise. Must hold, of every stream: in each whole epoch every token of its rows comes once, and none of other rows;
what was asked of it in each step is its share of all that was asked, where the share is the mean of the schedule over
the step's tokens, worked out here from the recipe's text in fractions; what it gave is within half a piece of what was
asked; a state leads a new planner to the same next step. All of this holds together: ramps of shares and of the batch,
changes at an epoch, borders inside of a step, samples that become longer, cells, and streams that run out; with
`--everything`, in each recipe. A run goes on where it stopped. Cost: half a second a recipe.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from fractions import Fraction
from functools import partial
from typing import Any

from tests.support.book_shares import mean_shares
from tests.support.ledger import Given, check_ledger, note
from tests.support.random_mixtures import random_plain, with_cells
from tests.support.trial import continued, trial_parser
from torchmix.errors import SourceExhausted
from torchmix.planner.cursor import gone_by
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.ramp import length_of_step
from torchmix.steps.history import cursor_of_state
from torchmix.steps.state import decode_state, encode_state, state_of_cursor

FINGERPRINT = "0123456789abcdef"


def try_recipe(seed: int, number: int, *, steps: int = 40, everything: bool = False) -> dict[str, Any]:
    """Check one recipe; what it was, and how far it went. `everything` as in `random_plain`."""
    draw = random.Random(f"{seed}/{number}")
    plain, sizes, views, rows = random_plain(draw, everything=everything)
    without_cells = dict(plain)
    if draw.random() < 0.4:
        more_sizes, more_views = dict(sizes), dict(views)
        group, of_cells = with_cells(draw, more := copy.deepcopy(plain), more_sizes, more_views)
        if group:
            plain, sizes, views, rows = more, more_sizes, more_views, {**rows, **of_cells}
            without_cells = {**plain, "mixture": {**plain["mixture"], "talk": group}}
            if "schedule" in plain:
                [change] = plain["schedule"]
                without_cells["schedule"] = [{**change, "mixture": {**change["mixture"], "talk": group}}]
    part = part_of(check_recipe(plain), "train")
    prints = {name: f"{number:016x}" for number, name in enumerate([*sizes, *views])}

    def planner_of() -> Planner:
        return Planner(part, sizes, views=views, fingerprints=prints)

    planner = planner_of()
    assert list(planner.streams) == sorted(rows)
    cuts = part.packing.overflow == "truncate"

    def counted(source: str, row: int, step: int) -> int:
        tokens = int(sizes[source].tokens[row])
        return min(tokens, length_of_step(part.batch, step)) if cuts else tokens

    longest = {
        name: max(int(sizes[source].tokens[row]) for source, held in of_stream.items() for row in held)
        for name, of_stream in rows.items()
    }
    given: Given = defaultdict(dict)
    cursor, asked, drawn = planner.start(), dict.fromkeys(rows, 0), dict.fromkeys(rows, 0)
    consumed = resumed = 0
    begun: int | None = None
    on_ramp = borders_inside = 0
    place = plain["schedule"][0]["from"] if "schedule" in plain else ""
    at_epoch = place["of"] if isinstance(place, dict) else None
    for step in range(steps):
        before = gone_by(cursor.decisions)
        if begun is None and at_epoch is not None and cursor.position.epoch[planner.streams.index(at_epoch)] >= 1:
            begun = consumed
        try:
            plan, after = planner.step(cursor)
        except SourceExhausted:
            break
        if draw.random() < 0.15:
            state = decode_state(
                encode_state(state_of_cursor(cursor, planner, recipe=FINGERPRINT, catalog=FINGERPRINT)),
                recipe=FINGERPRINT,
            )
            other = planner_of()
            again = cursor_of_state(state, other, catalog=FINGERPRINT)
            assert again is not None and other.step(again)[0].order_digest == plan.order_digest, f"step {step}"
            resumed += 1
        note(plan.pieces, planner, given)
        all_asked, gone = int(plan.asked_tokens.sum()), gone_by(after.decisions)
        shares = mean_shares(without_cells, consumed, consumed + plan.capacity_tokens, set(before), begun)
        length = plan.capacity_tokens // plan.num_samples
        for s, name in enumerate(planner.streams):
            asked[name] += int(plan.asked_tokens[s])
            drawn[name] += int(plan.drawn_tokens[s])
            if gone == before:
                share = shares.get(name, Fraction(0))
                off = abs(int(plan.asked_tokens[s]) - share * all_asked)
                # Each stream is charged whole tokens: what is left over of all of them is less than one each.
                most = 1 + share * len(rows) + Fraction(len(rows) * all_asked, 2**32)
                assert off <= most, f"step {step}: {name} is off by {float(off)}"
            if name not in gone:
                assert 2 * abs(asked[name] - drawn[name]) <= min(length, longest[name]), f"step {step}: {name}"
        on_ramp += any(low < consumed + plan.capacity_tokens and consumed < high for low, high in ramps_of(plain))
        places = {place for ramp in ramps_of(plain) for place in ramp}
        borders_inside += any(consumed < place < consumed + plan.capacity_tokens for place in places)
        consumed += plan.capacity_tokens
        cursor = after
    note(cursor.pool, planner, given)
    epochs = dict(zip(planner.streams, cursor.position.epoch.tolist(), strict=True))
    whole = check_ledger(given, epochs, rows, counted)
    samples = plain["batch"]["samples"]
    stages = samples if isinstance(samples, list) else [{"from_step": 0, "samples": samples}]
    kinds = {
        "flats": sum(each.is_flat for each in part.streams.values()),
        "cells": sum(each.is_cell for each in part.streams.values()),
        "views": len(views),
        "lengths": len({stage.get("length", 0) for stage in stages if stage["from_step"] < cursor.step}),
        "at_epoch": int(begun is not None),
        "batches": len({stage["samples"] for stage in stages if stage["from_step"] < cursor.step}),
        "on_ramp": on_ramp,
        "borders_inside": borders_inside,
    }
    return {"steps": cursor.step, "epochs": whole, "resumed": resumed, "gone": len(gone_by(cursor.decisions)), **kinds}


def ramps_of(plain: dict[str, Any]) -> list[tuple[int, int]]:
    """Tokens between which the shares move; none of a change at an epoch."""
    starts = [change for change in plain.get("schedule", ()) if isinstance(change["from"], str)]
    return [(int(one["from"].split()[0]), int(one.get("to", one["from"]).split()[0])) for one in starts]


def main() -> None:
    parser = trial_parser(__doc__, count=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--everything", action="store_true", help="ramps, longer samples and run-outs in each recipe")
    asked = parser.parse_args()
    try_one = partial(try_recipe, steps=asked.steps, everything=asked.everything)
    continued(asked, try_one, label=" everything" if asked.everything else "")


if __name__ == "__main__":
    main()
