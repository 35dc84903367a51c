"""Random recipes folded by the native library, by the reference, and by both in turn, bit for bit, as one JSON.

    python -m tests.trials.folds --seed 1 --count 300 --out folds.json

In: a seed and a number of recipes. Out: for each recipe its packing, how far it went, and what ended the native calls;
an AssertionError names the first value that differs. Recipes have trees, flats, selections, cells, ramps of shares and
batches, growing samples, bounds of epochs, denied rows, every packing, single passes, shares of documents, and lengths
of no token to a thousand samples. Must hold, at every step: samples, pieces drawn, sums, plan and state are equal; also
of a planner that changes between both ways at random steps, inside runs of steps too, and begins again from the bytes
of a state. A trial goes on where it stopped. Cost: a second a recipe.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from tests.support.native import native_or_not
from tests.support.random_mixtures import LENGTH, random_plain, with_cells
from tests.support.random_projects import random_balance
from tests.support.trial import continued, trial_parser
from tests.trials.order_bounds import random_job
from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.store import View
from torchmix.errors import PlanError, RecipeError, SourceExhausted
from torchmix.native.load import num_calls
from torchmix.parallel.place_tree import Layout
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import stages_of
from torchmix.recipe.structs import Recipe
from torchmix.steps.history import cursor_of_state
from torchmix.steps.state import decode_state, encode_state, state_of_cursor

FINGERPRINT = "0123456789abcdef"
STEPS = 60
Made = tuple[Part, dict[str, SourceSizes], dict[str, View]]


def random_part(draw: random.Random) -> Made:
    """A part over sizes alone."""
    if draw.random() < 0.35:
        recipe, sizes, one_pass = random_job(draw)
        packing = msgspec.structs.replace(recipe.packing, method=draw.choice(["best_fit", "concat", "pad"]))
        recipe = check_recipe(msgspec.structs.replace(recipe, packing=packing))
        return msgspec.structs.replace(part_of(recipe, "train"), one_pass=one_pass), sizes, {}
    plain, sizes, views, _ = random_plain(draw, everything=draw.random() < 0.3)
    if draw.random() < 0.4:
        more, more_sizes, more_views = copy.deepcopy(plain), dict(sizes), dict(views)
        if with_cells(draw, more, more_sizes, more_views)[0]:
            plain, sizes, views = more, more_sizes, more_views
    packing = plain["packing"]
    packing["method"] = draw.choice(["best_fit", "best_fit", "concat", "pad", "whole"])
    packing["align_tokens"] = draw.choice([1, 8, LENGTH])
    if packing["method"] == "best_fit" and draw.random() < 0.5:
        for source in plain["sources"].values():
            if "from" not in source and draw.random() < 0.5:
                source["packing"] = {"method": "concat"}
    if draw.random() < 0.2:
        packing["overflow"] = "drop"
    if draw.random() < 0.2 and (packing["method"], packing["overflow"]) != ("pad", "split"):
        plain["unit"] = "documents"
    plain["balance"] = random_balance(draw)
    if packing["method"] == "whole":
        del packing["align_tokens"]
        plain["balance"] = {"context": {"rank_tokens": 1 << 20}, "cost": {"per_token": 10, "per_pair": 1}}
        if isinstance(plain["batch"]["samples"], list):
            for stage in plain["batch"]["samples"]:
                stage.pop("length", None)
    return part_of(with_rules(draw, plain), "train"), sizes, views


def with_rules(draw: random.Random, plain: dict[str, Any]) -> Recipe:
    """Some sources have a rule of their own for long documents, where the recipe allows these rules."""
    other = copy.deepcopy(plain)
    for source in other["sources"].values():
        if "from" not in source and draw.random() < 0.3:
            own = {"overflow": draw.choice(["split", "truncate", "drop"])}
            if draw.random() < 0.7:
                own["max_length"] = draw.choice([LENGTH // 4 // 8 * 8, LENGTH, 2 * LENGTH])
            source["packing"] = {**source.get("packing", {}), **own}
    try:
        return check_recipe(other)
    except RecipeError as error:
        assert ".packing" in error.where, error
        return check_recipe(plain)


def random_denied(draw: random.Random, sizes: dict[str, SourceSizes]) -> dict[str, Any]:
    """Some rows of some sources."""
    if draw.random() < 0.7:
        return {}
    names = draw.sample(sorted(sizes), draw.randint(1, len(sizes)))
    return {
        name: np.array(sorted(draw.sample(range(rows), draw.randint(1, max(1, rows // 3)))), np.int64)
        for name in names
        if (rows := sizes[name].num_documents) > 3
    }


def facts(planner: Planner, cursor: Cursor) -> tuple[list[Any], Cursor]:
    """All that a step gives, as values that compare, and the cursor after it."""
    packed, drawn, asked, after = planner.fold(cursor)
    plan, following = planner.step(cursor)
    assert following.order_digest == after.order_digest == plan.order_digest
    found: list[Any] = [plan.plan_digest, plan.num_tokens_global, plan.capacity_tokens, repr(plan.balance)]
    found += [getattr(plan.placement, name).tolist() for name in plan.placement.__struct_fields__]
    found += [array.tolist() for array in (asked, packed.sample, packed.slot, packed.sample_offset)]
    sums = (plan.asked_tokens, plan.drawn_tokens, plan.delivered_tokens, plan.pool_tokens)
    found += [array.tolist() for array in sums]
    for pieces in (packed.pieces, packed.pool, drawn, after.pool, plan.pieces):
        found += [getattr(pieces, name).tolist() for name in pieces.__struct_fields__]
    state = state_of_cursor(after, planner, recipe=FINGERPRINT, catalog=FINGERPRINT)
    return [*found, encode_state(state)], after


def resumed(planner: Planner, cursor: Cursor, make: Callable[[], Planner]) -> tuple[Planner, Cursor]:
    """A new planner, and the cursor by way of its state's bytes."""
    data = encode_state(state_of_cursor(cursor, planner, recipe=FINGERPRINT, catalog=FINGERPRINT))
    other = make()
    again = cursor_of_state(decode_state(data, recipe=FINGERPRINT), other, catalog=FINGERPRINT)
    assert again is not None
    return other, again


def try_recipe(seed: int, number: int, *, steps: int = STEPS) -> dict[str, Any]:
    """Fold one recipe in three ways."""
    draw = random.Random(f"folds {seed}/{number}")
    try:
        part, sizes, views = random_part(draw)
    except RecipeError as error:  # shares of cells that contradict each other
        return {"refused": type(error).__name__}
    denied = random_denied(draw, sizes)
    prints = {name: f"{place:016x}" for place, name in enumerate([*sizes, *views])}
    width = 2 if part.balance.context is None and all(s.samples % 2 == 0 for s in stages_of(part.batch)) else 1
    layout = None if part.balance.context else Layout(dp=width, pp=draw.choice([1, 2]))

    def make() -> Planner:
        return Planner(part, sizes, layout, views=views, fingerprints=prints, denied=denied)

    about = {"packing": part.packing.method, "streams": len(part.streams), "denied": len(denied)}
    try:
        planners = [make(), make(), make()]
    except (PlanError, RecipeError) as error:  # nothing is left of a stream, or no cells give the shares
        return {**about, "refused": type(error).__name__}
    cursors = [planner.start() for planner in planners]
    before = num_calls().get("tm_fold", 0)
    kinds: Counter[str] = Counter()
    is_native, end = draw.random() < 0.5, ""
    for _ in range(steps):
        if draw.random() < 0.3:
            is_native = not is_native
            kinds["changed"] += 1
        if draw.random() < 0.1:
            planners[2], cursors[2] = resumed(planners[2], cursors[2], make)
            kinds["resumed"] += 1
        ways, found = (False, True, is_native), list[list[Any]]()
        for way in range(3):
            with native_or_not(ways[way]):
                try:
                    values, cursors[way] = facts(planners[way], cursors[way])
                except (SourceExhausted, PlanError) as error:
                    values = [str(error)]
                found.append(values)
        for place, each in enumerate(zip(*found, strict=True)):
            assert each[0] == each[1] == each[2], (f"step {cursors[0].step - 1}, value {place}", *each)
        if len(found[0]) == 1:
            end = found[0][0][:60]
            break
        kinds["ran out"] += sum(one.step == cursors[0].step - 1 for one in cursors[0].decisions)
    calls = num_calls().get("tm_fold", 0) - before
    assert calls or cursors[0].step == 0, "the native library was not called"
    return {**about, "steps": cursors[0].step, "calls": calls, "end": end, **kinds}


def main() -> None:
    """Try recipes."""
    continued(trial_parser(__doc__, count=300).parse_args(), try_recipe)


if __name__ == "__main__":
    main()
