"""Samples that become longer and shorter, with every packing and overflow: what was given, and states at every step."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from tests.support.ledger import Given, check_ledger, note
from tests.support.mixtures import make_planner, plan_steps
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.recipe.parts import part_of
from torchmix.recipe.ramp import length_of_step
from torchmix.recipe.structs import Recipe
from torchmix.steps.history import cursor_of_state
from torchmix.steps.state import decode_state, encode_state, state_of_cursor

LENGTH = 16
STAGES = [(0, 4), (3, 4, 32), (9, 2, 96), (17, 4, 16), (25, 2, 48), (33, 3, 32)]
BORDERS = {step for first, *_ in STAGES for step in (first, first + 1)}
SIZES = {
    "even": SourceSizes(
        first_row_of_page=np.arange(0, 61, 6), tokens=np.tile(np.array([24, 24, 8], np.int32), 20), window_pages=4
    ),  # two of three are longer than the first samples, and shorter than the next
    "mixed": synthetic_sizes(150, shortest=0, longest=60, rows_per_page=9, window_pages=3, salt=6),
    "long": synthetic_sizes(40, shortest=10, longest=130, rows_per_page=4, window_pages=2, salt=7),
}
SHARES = {"even": "50%", "mixed": "30%", "long": "20%"}
FINGERPRINT = "0123456789abcdef"


def recipe_of(method: str, overflow: str, unit: str = "tokens") -> Recipe:
    packing = {"method": method, "overflow": overflow, "align_tokens": 4}
    recipe = make_recipe(SHARES, samples=STAGES, length=LENGTH, packing=packing)
    return Recipe(**{name: getattr(recipe, name) for name in Recipe.__struct_fields__} | {"unit": unit})


CASES = [
    (method, overflow, unit)
    for method in ("best_fit", "concat", "pad")
    for overflow in ("split", "truncate", "drop")
    for unit in ("tokens", "documents")
    if (method, overflow, unit) != ("pad", "split", "documents")
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "overflow", "unit"), CASES)
def test_nothing_comes_twice_and_an_epoch_lacks_nothing_while_samples_grow(
    method: str, overflow: str, unit: str
) -> None:
    recipe = recipe_of(method, overflow, unit)
    batch = recipe.batch
    planner = make_planner(recipe, SIZES)

    def counted(source: str, row: int, step: int) -> int:
        tokens, length = int(SIZES[source].tokens[row]), length_of_step(batch, step)
        if overflow == "truncate":
            return min(tokens, length)
        return 0 if overflow == "drop" and tokens > length else tokens

    given: Given = defaultdict(dict)
    cursor, whole = planner.start(), []
    for _ in range(130 if method == "pad" else 56):
        before = cursor
        plan, cursor = planner.step(cursor)
        if before.step % 2 or before.step in BORDERS:
            state = encode_state(state_of_cursor(before, planner, recipe=FINGERPRINT, catalog=FINGERPRINT))
            other = make_planner(recipe, SIZES)
            back = cursor_of_state(decode_state(state, recipe=FINGERPRINT), other, catalog=FINGERPRINT)
            assert back is not None
            assert other.step(back)[0].order_digest == plan.order_digest, "a state leads to the same steps"
        length = length_of_step(batch, plan.step)
        ends = plan.sample_offset + plan.pieces.tokens
        assert ends.max() <= length
        note(plan.pieces, planner, given)
        whole.append(plan)
    note(cursor.pool, planner, given)
    epochs = dict(zip(planner.streams, cursor.position.epoch.tolist(), strict=True))
    rows = {name: {name: set(range(one.num_documents))} for name, one in SIZES.items()}
    assert check_ledger(given, epochs, rows, counted) > 1, "a row that never came counts nothing at step 0"
    cut = [int(plan.pieces.tokens.max()) for plan in whole]
    assert max(cut[:3]) <= LENGTH and max(cut[3:9]) <= 32 < max(cut[9:17]) and max(cut[17:25]) <= 16


def test_a_document_is_cut_at_the_samples_of_the_step_that_draws_it() -> None:
    for overflow, most in (("truncate", {0: {8, 16}, 3: {8, 24}}), ("drop", {0: {8}, 3: {8, 24}})):
        plans, _ = plan_steps(make_planner(recipe_of("pad", overflow), SIZES), 9)
        for plan in plans:
            mine = plan.pieces.tokens[plan.pieces.source == plan.sources.index("even")]
            assert set(mine.tolist()) <= most[0 if plan.step < 3 else 3], f"{overflow}, step {plan.step}"


def test_with_pad_a_document_has_a_sample_as_long_as_its_step_allows() -> None:
    plans, _ = plan_steps(make_planner(recipe_of("pad", "split"), SIZES), 14)
    found = defaultdict(set)
    for plan in plans:
        mine = plan.pieces.source == plan.sources.index("even")
        found[length_of_step(part_of(recipe_of("pad", "split"), "train").batch, plan.step)] |= set(
            zip(plan.pieces.start[mine].tolist(), plan.pieces.tokens[mine].tolist(), strict=True)
        )
        assert len(plan.pieces) == plan.num_samples
    assert found[16] <= {(0, 8), (0, 16), (16, 8)} and found[96] == {(0, 8), (0, 24)}
    assert found[32] <= {(0, 8), (0, 24), (16, 8)} and (0, 24) in found[32], (
        "the rest of one that was begun comes alone"
    )
