"""A state is small, checked bytes; it leads back to the same cursor, and refuses what it is not for."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.errors import StateError, StateMismatch, StateVersion
from torchmix.planner.planner import Cursor, Planner
from torchmix.steps.header import StepHeader, check_arrival, decode_header, encode_header
from torchmix.steps.state import (
    check_layout,
    cursor_of_state,
    decode_state,
    encode_state,
    start_state,
    state_of_cursor,
)

RECIPE, CATALOG = "0123456789abcdef", "fedcba9876543210"


def planner_of(shares: dict[str, str], dp: int = 1) -> Planner:
    sizes = {
        name: synthetic_sizes(400, shortest=3, longest=700, salt=index) for index, name in enumerate(sorted(shares))
    }
    return Planner(make_recipe(shares), sizes, dp=dp)


def cursor_after(planner: Planner, steps: int) -> Cursor:
    cursor = planner.start()
    for _ in range(steps):
        _, cursor = planner.step(cursor)
    return cursor


SHARES = {"alpha": "60%", "beta": "39.9%", "gamma": "0.1%"}


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_a_state_leads_back_to_the_same_steps(steps: int) -> None:
    planner = planner_of(SHARES)
    cursor = cursor_after(planner, steps)
    data = encode_state(state_of_cursor(cursor, planner, recipe=RECIPE, catalog=CATALOG))
    other = planner_of(dict(reversed(SHARES.items())), dp=2)
    again = cursor_of_state(decode_state(data, recipe=RECIPE), other, catalog=CATALOG)
    assert np.array_equal(again.pool.document_tokens, cursor.pool.document_tokens)
    for _ in range(5):
        plan, cursor = planner.step(cursor)
        plan_again, again = other.step(again)
        assert plan.order_digest == plan_again.order_digest
    assert encode_state(state_of_cursor(again, other, recipe=RECIPE, catalog=CATALOG)) != data


def test_the_start_needs_no_catalog() -> None:
    planner = planner_of(SHARES)
    data = encode_state(start_state(recipe=RECIPE, dp=1, micro_batch_size=1))
    cursor = cursor_of_state(decode_state(data, recipe=RECIPE), planner, catalog=CATALOG)
    assert planner.step(cursor)[0].order_digest == planner.step(planner.start())[0].order_digest


def test_a_state_is_small() -> None:
    planner = planner_of({f"source-{s:02d}": "1%" for s in range(100)})
    data = encode_state(state_of_cursor(cursor_after(planner, 20), planner, recipe=RECIPE, catalog=CATALOG))
    pool = cursor_after(planner, 20).pool
    assert len(data) <= 1024 + 40 * 100 + 20 * len(pool)


def some_state() -> bytes:
    planner = planner_of(SHARES)
    return encode_state(state_of_cursor(cursor_after(planner, 3), planner, recipe=RECIPE, catalog=CATALOG))


def test_any_changed_or_missing_byte_is_refused() -> None:
    data = some_state()
    for at in range(len(data)):
        with pytest.raises(StateError):
            decode_state(data[:at], recipe=RECIPE)
        with pytest.raises(StateError):
            decode_state(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :], recipe=RECIPE)


@pytest.mark.parametrize("version", [0, 2, 9])
def test_another_version_is_named(version: int) -> None:
    data = some_state()
    with pytest.raises(StateVersion, match=rf"version {version}, .* another order"):
        decode_state(data[:14] + bytes([version]) + data[15:], recipe=RECIPE)


def test_another_recipe_is_named() -> None:
    with pytest.raises(StateMismatch, match=f"{RECIPE}.*{'f' * 16}"):
        decode_state(some_state(), recipe="f" * 16)


def test_another_catalog_or_other_sources_are_named() -> None:
    state = decode_state(some_state(), recipe=RECIPE)
    with pytest.raises(StateMismatch, match=CATALOG):
        cursor_of_state(state, planner_of(SHARES), catalog="0" * 16)
    with pytest.raises(StateMismatch, match="delta"):
        cursor_of_state(state, planner_of({"alpha": "60%", "beta": "39.9%", "delta": "0.1%"}), catalog=CATALOG)


def test_a_state_may_name_a_step_alone() -> None:
    planner = planner_of(SHARES)
    data = encode_state(start_state(recipe=RECIPE, dp=1, micro_batch_size=1, step=7))
    cursor = cursor_of_state(decode_state(data, recipe=RECIPE), planner, catalog=CATALOG)
    there = cursor_after(planner, 7)
    assert planner.step(cursor)[0].order_digest == planner.step(there)[0].order_digest


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": -1},
        {"window": -1},
        {"window": 1},  # of one
        {"offset": -1},
        {"offset": 400},
        {"residue": -1},
        {"residue": 1 << 32},
    ],
)
def test_a_position_outside_its_source_is_refused(changes: dict[str, int]) -> None:
    state = decode_state(some_state(), recipe=RECIPE)
    sources = [state.sources[0], msgspec.structs.replace(state.sources[1], **changes), state.sources[2]]
    with pytest.raises(StateError, match="of source 'beta', which has 1 windows: the state is damaged"):
        cursor_of_state(msgspec.structs.replace(state, sources=sources), planner_of(SHARES), catalog=CATALOG)


@pytest.mark.parametrize(
    "changes",
    [
        {"source": 3},
        {"source": -1},
        {"row": 400},
        {"row": -1},
        {"start": -1},
        {"start": 700},
        {"tokens": 701},
        {"drawn_step": -1},
    ],
)
def test_a_piece_of_the_pool_that_does_not_exist_is_refused(changes: dict[str, int]) -> None:
    state = decode_state(some_state(), recipe=RECIPE)
    pool = state.pool
    assert len(pool.row) > 1
    [(name, value)] = changes.items()
    wrong = msgspec.structs.replace(pool, **{name: [*getattr(pool, name)[:-1], value]})
    with pytest.raises(StateError, match="piece that does not exist"):
        cursor_of_state(msgspec.structs.replace(state, pool=wrong), planner_of(SHARES), catalog=CATALOG)
    ragged = msgspec.structs.replace(pool, **{name: getattr(pool, name)[:-1]})
    with pytest.raises(StateError, match="piece that does not exist"):
        cursor_of_state(msgspec.structs.replace(state, pool=ragged), planner_of(SHARES), catalog=CATALOG)


def header_of(planner: Planner, cursor: Cursor, **changes: object) -> StepHeader:
    plan, after = planner.step(cursor)
    state = encode_state(state_of_cursor(after, planner, recipe=RECIPE, catalog=CATALOG))
    data = encode_header(plan, state, first_microbatch=0, plan_s=0.0, read_s=0.0, build_s=0.0, reading={})
    return msgspec.structs.replace(decode_header(data), **changes)


def test_a_step_that_the_state_waits_for_gives_the_state_after_it() -> None:
    planner = planner_of(SHARES)
    cursor = cursor_after(planner, 2)
    state = state_of_cursor(cursor, planner, recipe=RECIPE, catalog=CATALOG)
    header = header_of(planner, cursor)
    assert check_arrival(header, state) == decode_state(header.next_state, recipe=RECIPE)
    inside = msgspec.structs.replace(state, microbatch=1, plan_digest=header.plan_digest)
    assert check_arrival(msgspec.structs.replace(header, first_microbatch=1), inside).step == 3


@pytest.mark.parametrize(
    ("of_header", "of_state", "match"),
    [
        ({"step": 3}, {}, "waits for step 2 from microbatch 0.* step 3"),
        ({"first_microbatch": 1}, {}, "waits for step 2 from microbatch 0.* from microbatch 1"),
        ({}, {"microbatch": 1}, "waits for step 2 from microbatch 1.* from microbatch 0"),
        ({}, {"dp": 2}, "of dp 2 x micro_batch_size 1; what came .* of dp 1"),
        ({}, {"micro_batch_size": 2}, "micro_batch_size 2; what came"),
        ({}, {"plan_digest": b"12345678"}, "placed otherwise.*3132333435363738.*from_step_start=True"),
    ],
)
def test_a_step_that_the_state_does_not_wait_for_is_refused(
    of_header: dict[str, object], of_state: dict[str, object], match: str
) -> None:
    planner = planner_of(SHARES)
    cursor = cursor_after(planner, 2)
    state = msgspec.structs.replace(state_of_cursor(cursor, planner, recipe=RECIPE, catalog=CATALOG), **of_state)
    with pytest.raises(StateMismatch, match=match):
        check_arrival(header_of(planner, cursor, **of_header), state)


def test_inside_a_step_another_layout_is_refused_with_the_way_out() -> None:
    state = msgspec.structs.replace(decode_state(some_state(), recipe=RECIPE), microbatch=3)
    check_layout(state, dp=1, micro_batch_size=1)
    with pytest.raises(StateMismatch, match="from_step_start=True"):
        check_layout(state, dp=2, micro_batch_size=1)
    check_layout(msgspec.structs.replace(state, microbatch=0), dp=2, micro_batch_size=1)
