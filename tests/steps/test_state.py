"""A state is small, checked bytes; it leads back to the same cursor, and refuses what it is not for."""

from __future__ import annotations

import hashlib
from functools import reduce
from operator import getitem
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.errors import StateError, StateMismatch, StateVersion
from torchmix.parallel.place_tree import Layout
from torchmix.planner.cursor import Cursor
from torchmix.planner.entering import MAX_STEPS
from torchmix.planner.planner import Planner
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part, part_of
from torchmix.steps.header import Awaited, StepHeader, check_arrival, decode_header, encode_header, header_of
from torchmix.steps.history import cursor_of_state
from torchmix.steps.state import (
    MAX_STATE_BYTES,
    LoaderState,
    StateToAsk,
    check_layout,
    decode_state,
    encode_state,
    start_state,
    state_of_cursor,
)

RECIPE, CATALOG = "0123456789abcdef", "fedcba9876543210"


def planner_of(shares: dict[str, str], dp: int = 1, *, one_pass: bool = False) -> Planner:
    sizes = {
        name: synthetic_sizes(400, shortest=3, longest=700, salt=index) for index, name in enumerate(sorted(shares))
    }
    return make_planner(make_recipe(shares), sizes, one_pass=one_pass, dp=dp)


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
    data = encode_state(start_state(Layout(dp=1, micro_batch_size=1), recipe=RECIPE))
    cursor = cursor_of_state(decode_state(data, recipe=RECIPE), planner, catalog=CATALOG)
    assert planner.step(cursor)[0].order_digest == planner.step(planner.start())[0].order_digest


def test_a_state_is_small() -> None:
    planner = planner_of({f"source-{s:02d}": "1%" for s in range(100)})
    data = encode_state(state_of_cursor(cursor_after(planner, 20), planner, recipe=RECIPE, catalog=CATALOG))
    pool = cursor_after(planner, 20).pool
    assert len(data) <= 1024 + 75 * 100 + 56 * len(pool)


def some_state() -> bytes:
    planner = planner_of(SHARES)
    cursor = next(cursor for step in range(1, 50) if len((cursor := cursor_after(planner, step)).pool) > 1)
    return encode_state(state_of_cursor(cursor, planner, recipe=RECIPE, catalog=CATALOG))


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


def part_with(shares: dict[str, str], **choices: Any) -> Part:
    return part_of(make_recipe(shares, **choices), "train")


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (part_with(SHARES, seed=8), r"these keys differ: seed \(now 8\)\. Restore"),
        (part_with(SHARES, length=512), r"differ: batch \(now \[\[\[0,16\]\],512\]\)\. "),
        (part_with(SHARES, packing={"method": "concat"}), r"differ: packing \(now \[\"concat\",\"split\",1\]\)\. "),
        (part_with({**SHARES, "alpha": "59%", "gamma": "1.1%"}), r"differ: mixture \(now .*59/100.*\)\. "),
        (
            part_with(SHARES, sources={"beta": {"tokens": "ids"}}),
            r"differ: sources\.beta \(.*packing.*; now .*ids.*\)\. ",
        ),
        (part_with({"alpha": "60%", "beta": "40%"}), r"differ: mixture .*, sources\.gamma \(.*; now gone\)\. "),
        (part_with({**SHARES, "gamma": "0.05%", "delta": "0.05%"}), r"differ: mixture .*, sources\.delta \(.*; now "),
    ],
    ids=["seed", "batch", "packing", "mixture", "source", "less", "more"],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_the_keys_that_another_recipe_has_are_named(other: Part, match: str, steps: int) -> None:
    part, planner = part_with(SHARES), planner_of(SHARES)
    state = start_state(Layout(dp=1, micro_batch_size=1), recipe=part)
    if steps:
        fingerprint, keys = recipe_fingerprint(part), key_digests(recipe_keys(part))
        cursor = cursor_after(planner, steps)
        state = state_of_cursor(cursor, planner, recipe=fingerprint, catalog=CATALOG, keys=keys)
    elif len(other.sources) != len(part.sources):
        match = r"differ: mixture .*, sources(\.| )"  # a state that no step was planned for has no names
    data = encode_state(state)
    assert encode_state(decode_state(data, recipe=part)) == data
    with pytest.raises(StateMismatch, match=match):
        decode_state(data, recipe=other)


def test_another_catalog_or_other_sources_are_named() -> None:
    state = decode_state(some_state(), recipe=RECIPE)
    with pytest.raises(StateMismatch, match=CATALOG):
        cursor_of_state(state, planner_of(SHARES), catalog="0" * 16)
    with pytest.raises(StateMismatch, match="delta"):
        cursor_of_state(state, planner_of({"alpha": "60%", "beta": "39.9%", "delta": "0.1%"}), catalog=CATALOG)


def test_a_state_may_name_a_step_alone() -> None:
    planner = planner_of(SHARES)
    data = encode_state(start_state(Layout(dp=1, micro_batch_size=1), recipe=RECIPE, step=7))
    cursor = cursor_of_state(decode_state(data, recipe=RECIPE), planner, catalog=CATALOG)
    there = cursor_after(planner, 7)
    assert planner.step(cursor)[0].order_digest == planner.step(there)[0].order_digest


@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_is_of_a_single_pass_or_not(steps: int) -> None:
    run = part_with(SHARES)
    once = msgspec.structs.replace(run, one_pass=True)
    for part, other, match in ((run, once, "is of a run, "), (once, run, "is of a single pass, ")):
        state = start_state(Layout(dp=1, micro_batch_size=1), recipe=part)
        if steps:
            planner = planner_of(SHARES, one_pass=part.one_pass)
            cursor = cursor_after(planner, steps)
            state = state_of_cursor(cursor, planner, recipe=recipe_fingerprint(part), catalog=CATALOG)
        assert decode_state(encode_state(state), recipe=part).one_pass == part.one_pass
        with pytest.raises(StateMismatch, match=match):
            decode_state(encode_state(state), recipe=other)


def forged(changes: dict[str, Any]) -> bytes:
    """A state with other values and a fitting digest, as msgpack may spell them; `a.b` lies in the map `a`."""
    data = some_state()
    tree = msgspec.msgpack.decode(data[23:])
    for path, value in changes.items():
        *maps, key = path.split(".")
        reduce(getitem, maps, tree)[key] = value
    body = msgspec.msgpack.encode(tree)
    return data[:15] + hashlib.sha256(body).digest()[:8] + body


@pytest.mark.parametrize(
    "changes",
    [
        {"at.step": 1 << 63},
        {"at.step": -1 - (1 << 63) + 1, "microbatch": 1 << 63},
        {"at.step": "3"},
        {"recipe": RECIPE + "0"},
        {"catalog": ""},
        {"catalog": CATALOG[1:]},
        {"at.order_digest": b""},
        {"at.order_digest": b"123456789"},
        {"plan_digest": b"12345678"},
        {"microbatch": 1},
        {"rows.streams": ["alpha", "beta", "a" * 201]},
        {"rows.streams": ["alpha", "beta"]},
        {"rows.streams": ["alpha", "beta", b"gamma"]},
        {"rows.streams": []},
        {"rows.fingerprints": []},
        {"rows.fingerprints": ["0" * 17] * 3},
        {"rows": {}},
        {"at.position.epoch": b"1234567"},
        {"at.position.epoch": bytes(16)},
        {"at.position.debt": [0, 0, 0]},
        {"at.position.more": bytes(24)},
        {"at.pool.row": b"1"},
        {"at.pool.row": "12345678"},
        {"at.pool.document_tokens": bytes(8)},
        {"at.drawn": [1 << 63, 1]},
        {"at.decisions": [[1, "alpha", None]]},
        {"at.decided": {"shares": {"alpha": 1 << 32}}},
        {"at.decided": {"length": 1, "digest": "0"}},
        {"at.decided": {"length": 1 << 20, "digest": "0" * 16}},
        {"at.eras": {"edits": [[["alpha", 0, 0, 1 << 63, [], []]]]}},
        {"at.eras": {"counts": {"alpha": "1"}}},
        {"at.more": 0},
        {"more": 0},
    ],
    ids=str,
)
def test_a_field_that_no_state_has_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=r"does not decode|not fit that"):
        decode_state(forged(changes), recipe=RECIPE)


def test_text_that_is_no_utf_8_is_refused() -> None:
    data = some_state()
    body = data[23:].replace(b"alpha", b"alph\xff")
    with pytest.raises(StateError, match="does not decode"):
        decode_state(data[:15] + hashlib.sha256(body).digest()[:8] + body, recipe=RECIPE)


def test_a_state_of_too_many_bytes_is_refused_unread() -> None:
    with pytest.raises(StateError, match=r"no torchmix state.* of torch\.save, take them out of it: docs/operations"):
        decode_state(b"PK\x03\x04" + bytes(99), recipe=RECIPE)
    with pytest.raises(StateError, match="at most 33554432"):
        decode_state(some_state().ljust(MAX_STATE_BYTES + 1, b"\0"), recipe=RECIPE)


def test_a_step_alone_that_no_run_has_is_refused_before_it_is_planned() -> None:
    state = start_state(Layout(dp=1, micro_batch_size=1), recipe=RECIPE, step=MAX_STEPS + 1)
    with pytest.raises(StateError, match=f"step is {MAX_STEPS + 1}"):
        cursor_of_state(state, planner_of(SHARES), catalog=CATALOG)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 2), (0, 1)])
def test_other_sources_than_the_recipes_in_their_order_are_refused(order: tuple[int, ...]) -> None:
    state = decode_state(some_state(), recipe=RECIPE)
    rows = msgspec.structs.replace(state.rows, streams=tuple(state.rows.streams[s] for s in order))
    state = msgspec.structs.replace(state, rows=rows)
    with pytest.raises(StateMismatch, match="the state has streams"):
        cursor_of_state(state, planner_of(SHARES), catalog=CATALOG)


def arrived(planner: Planner, cursor: Cursor, **changes: object) -> StepHeader:
    """The header of the step at a cursor, after its way to another process."""
    plan, after = planner.step(cursor)
    header = header_of(
        plan,
        StateToAsk(lambda: state_of_cursor(after, planner, recipe=RECIPE, catalog=CATALOG)),
        recipe=RECIPE,
        layout=planner.layout,
        first_microbatch=0,
        plan_s=0.0,
        read_s=0.0,
        build_s=0.0,
        reading={},
    )
    return msgspec.structs.replace(decode_header(encode_header(header)), **changes)


def test_a_step_that_the_state_waits_for_gives_the_state_after_it() -> None:
    planner = planner_of(SHARES)
    cursor = cursor_after(planner, 2)
    state = state_of_cursor(cursor, planner, recipe=RECIPE, catalog=CATALOG)
    header = arrived(planner, cursor)
    check_arrival(header, Awaited.by(state))
    after = state_of_cursor(planner.step(cursor)[1], planner, recipe=RECIPE, catalog=CATALOG)
    assert encode_state(header.after.state) == encode_state(after)
    assert Awaited.after(header) == Awaited.by(after)
    inside = msgspec.structs.replace(state, microbatch=1, plan_digest=header.plan_digest)
    check_arrival(msgspec.structs.replace(header, first_microbatch=1), Awaited.by(inside))


def test_a_state_to_ask_is_made_once_and_when_it_is_asked_for() -> None:
    made: list[LoaderState] = []

    def make() -> LoaderState:
        made.append(decode_state(some_state(), recipe=RECIPE))
        return made[-1]

    held = StateToAsk(make)
    assert not made
    assert held.state is held.state
    assert held.data == held.data
    assert len(made) == 1
    elsewhere = StateToAsk.of_data(held.data)
    assert elsewhere.data == held.data
    assert encode_state(elsewhere.state) == encode_state(made[0]) == some_state()


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
        check_arrival(arrived(planner, cursor, **of_header), Awaited.by(state))


def test_a_step_of_another_recipe_is_refused() -> None:
    planner = planner_of(SHARES)
    state = state_of_cursor(cursor_after(planner, 2), planner, recipe="0" * 16, catalog=CATALOG)
    with pytest.raises(StateMismatch, match="saved with recipe"):
        check_arrival(arrived(planner, cursor_after(planner, 2)), Awaited.by(state))


def test_inside_a_step_another_layout_is_refused_with_the_way_out() -> None:
    batch = planner_of(SHARES).part.batch
    state = msgspec.structs.replace(decode_state(some_state(), recipe=RECIPE), microbatch=3)
    check_layout(state, batch, Layout(dp=1, micro_batch_size=1))
    with pytest.raises(StateMismatch, match="from_step_start=True"):
        check_layout(state, batch, Layout(dp=2, micro_batch_size=1))
    check_layout(msgspec.structs.replace(state, microbatch=0), batch, Layout(dp=2, micro_batch_size=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"microbatch": 16},
        {"microbatch": -1},
        {"dp": 2, "microbatch": 8},
        {"dp": 3, "microbatch": 6},
        {"dp": 999, "microbatch": 1},
        {"dp": 0},
        {"dp": -1, "micro_batch_size": -1},
        {"step": MAX_STEPS + 1},
        {"step": -1},
    ],
)
def test_a_place_that_no_layout_has_is_refused(changes: dict[str, int]) -> None:
    changes = dict(changes)
    state = decode_state(some_state(), recipe=RECIPE)
    step = changes.pop("step", state.step)
    state = msgspec.structs.replace(state, at=msgspec.structs.replace(state.at, step=step), **changes)
    with pytest.raises(StateError, match="the state is damaged"):
        check_layout(state, planner_of(SHARES).part.batch, Layout(dp=state.dp, micro_batch_size=state.micro_batch_size))
