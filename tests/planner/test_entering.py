"""Every cursor that a planner makes is within its bounds; a value outside of them is refused, and named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.errors import SourceExhausted, StateError
from torchmix.planner.cursor import Cursor, Decision
from torchmix.planner.drawing import DrawnTokens
from torchmix.planner.entering import MAX_STEPS, POOL_COLUMNS, check_cursor, looked_up
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import Planner

SHARES = {"alpha": "60%", "beta": "39.9%", "gamma": "0.1%"}
ENDS = {name: {"max_epochs": 2, "on_exhausted": "renormalise"} for name in ("alpha", "beta", "gamma")}


def planner_of(*, longest: int = 700, num_documents: int = 400, one_pass: bool = False, **choices: Any) -> Planner:
    sizes = {
        name: synthetic_sizes(num_documents, shortest=0, longest=longest, salt=index, window_pages=2)
        for index, name in enumerate(sorted(SHARES))
    }
    return make_planner(make_recipe(SHARES, **choices), sizes, one_pass=one_pass)


def cursors(planner: Planner, steps: int) -> list[Cursor]:
    found = [planner.start()]
    try:
        while len(found) <= steps:
            found.append(planner.skip(found[-1]))
    except SourceExhausted:
        assert len(found) > 4
    return found


@pytest.mark.slow
@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("method", ["best_fit", "concat", "cut", "own"])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"longest": 90_000},
        {"samples": [(0, 2), (5, 32), (9, 4)]},
        {"samples": 1, "length": 64, "longest": 9000},
        {"sources": {"beta": {"documents": ("10%", "35%")}}},
        {"sources": ENDS},
        {"sources": ENDS, "one_pass": True},
        {"samples": 3, "num_documents": 7},
    ],
    ids=["plain", "long", "ramp", "small", "part", "ends", "one pass", "few"],
)
def test_what_a_planner_makes_is_within_the_bounds(method: str, overflow: str, choices: dict[str, Any]) -> None:
    if own := {"cut": {"method": "concat"}, "own": {"overflow": "split", "max_length": 64}}.get(method):
        sources = choices.get("sources", {})
        choices = {**choices, "sources": {**sources, "alpha": {**sources.get("alpha", {}), "packing": own}}}
    planner = planner_of(packing={"method": "best_fit" if own else method, "overflow": overflow}, **choices)
    for cursor in cursors(planner, 60):
        assert np.array_equal(
            looked_up(cursor.without_catalog().pool, planner).document_tokens, cursor.pool.document_tokens
        )
        check_cursor(cursor, planner)


def some_cursor(planner: Planner) -> Cursor:
    cursor = cursors(planner, 7)[-1]
    assert len(cursor.pool) > 1
    return cursor


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("epoch", 1 << 31),
        ("epoch", (1 << 63) - 1),
        ("window", -1),
        ("window", 4),  # of four
        ("offset", -1),
        ("offset", 1000),
        ("debt", 129),  # more than half a sample
        ("debt", -129),
        ("debt", 1_000_000_000),
        ("debt", -(1 << 63)),
        ("residue", -1),
        ("residue", 1 << 32),
    ],
)
def test_a_position_that_its_source_does_not_have_is_refused(name: str, value: int) -> None:
    planner = planner_of()
    cursor = some_cursor(planner)
    column = getattr(cursor.position, name).copy()
    column[1] = value
    wrong = replace(cursor, position=replace(cursor.position, **{name: column}))
    with pytest.raises(StateError, match=rf"the state's {name} of stream 'beta' is {value}, which is not in \["):
        check_cursor(wrong, planner)


@pytest.mark.parametrize(
    ("raw", "aligned", "match"),
    [
        (0, 5, "sum of tokens drawn is 0"),
        (1 << 40, 1 << 40, "sum of tokens drawn is"),
        (100, 99, "sum of aligned tokens drawn is 99"),
        (1, 1 << 40, "sum of aligned tokens drawn is"),  # a draw would ask for a token at a time
    ],
)
def test_totals_that_no_draws_have_are_refused(raw: int, aligned: int, match: str) -> None:
    planner = planner_of()
    with pytest.raises(StateError, match=f"the state's {match}"):
        check_cursor(replace(some_cursor(planner), drawn=DrawnTokens(raw=raw, aligned=aligned)), planner)


@pytest.mark.parametrize("step", [-1, MAX_STEPS + 1, 1 << 31])
def test_a_step_that_no_run_has_is_refused(step: int) -> None:
    planner = planner_of()
    with pytest.raises(StateError, match=f"the state's step is {step}"):
        check_cursor(replace(some_cursor(planner), step=step), planner)


def with_last(pool: Pieces, **values: int) -> Pieces:
    """A pool whose last piece has other values."""
    columns = {name: getattr(pool, name).copy() for name in values}
    for name, value in values.items():
        columns[name][-1] = value
    return replace(pool, **columns)


@pytest.mark.parametrize("method", ["best_fit", "concat"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("epoch", 1 << 40),
        ("start", -1),
        ("start", 700),
        ("start", (1 << 63) - 1),
        ("tokens", 0),
        ("tokens", -1),
        ("tokens", 701),
        ("tokens", (1 << 63) - 1),
        ("drawn_step", -1),
        ("drawn_step", 7),
        ("drawn_step", 1 << 31),
    ],
)
def test_a_piece_of_the_pool_that_does_not_exist_is_refused(method: str, name: str, value: int) -> None:
    planner = planner_of(packing={"method": method})
    cursor = some_cursor(planner)
    with pytest.raises(StateError, match="piece that does not exist"):
        check_cursor(replace(cursor, pool=with_last(cursor.pool, **{name: value})), planner)


@pytest.mark.parametrize(("name", "value"), [("source", -1), ("source", 3), ("row", -1), ("row", 400)])
def test_a_row_of_the_pool_that_does_not_exist_is_refused(name: str, value: int) -> None:
    planner = planner_of()
    pool = with_last(some_cursor(planner).pool, **{name: value})
    with pytest.raises(StateError, match="piece that does not exist"):
        looked_up(pool, planner)


@pytest.mark.parametrize("name", POOL_COLUMNS)
def test_columns_of_several_lengths_are_refused(name: str) -> None:
    planner = planner_of()
    pool = some_cursor(planner).pool
    with pytest.raises(StateError, match="columns of several lengths"):
        looked_up(replace(pool, **{name: getattr(pool, name)[:-1]}), planner)


def test_a_row_that_the_part_does_not_use_is_refused() -> None:
    planner = planner_of(sources={"beta": {"documents": ("0%", "50%")}})
    cursor = cursors(planner, 7)[-1]
    unused = np.flatnonzero(planner.sizes[1].tokens[200:])[0] + 200
    zeros = {name: np.array([0]) for name in ("epoch", "start", "drawn_step")}
    ones = {name: np.array([1]) for name in ("stream", "source", "tokens", "document_tokens")}
    piece = Pieces(**zeros, **ones, row=np.array([unused]))
    with pytest.raises(StateError, match="piece that does not exist"):
        check_cursor(replace(cursor, pool=piece), planner)


def test_a_piece_that_is_longer_than_those_of_its_source_is_refused() -> None:
    """Or begins where none of them does."""
    planner = planner_of(
        packing={"method": "best_fit"}, sources={"alpha": {"packing": {"max_length": 64}}}, longest=700
    )
    for cursor in cursors(planner, 40):
        pool = cursor.pool
        mine = (pool.source == 0) & (pool.document_tokens > pool.start + 64) & (pool.start > 0)
        if mine.any():
            break
    at = int(np.argmax(mine))
    assert pool.tokens[at] == 64
    for name, value in (("tokens", 65), ("tokens", 63), ("start", int(pool.start[at]) - 32)):
        column = getattr(pool, name).copy()
        column[at] = value
        with pytest.raises(StateError, match="piece that does not exist"):
            check_cursor(replace(cursor, pool=replace(pool, **{name: column})), planner)


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_a_pool_that_holds_tokens_twice_is_refused(method: str) -> None:
    planner = planner_of(packing={"method": method})
    cursor = some_cursor(planner)
    with pytest.raises(StateError, match="twice"):
        check_cursor(replace(cursor, pool=Pieces.concatenate([cursor.pool, cursor.pool])), planner)


def test_a_pool_of_more_than_the_batch_and_a_document_of_each_source_is_refused() -> None:
    planner = planner_of(samples=2)
    cursor = some_cursor(planner)
    rows = np.flatnonzero(planner.sizes[0].tokens)
    zeros = np.zeros_like(rows)
    tokens = planner.sizes[0].tokens[rows].astype(np.int64)
    short = np.minimum(tokens, 256)
    pool = Pieces(
        stream=zeros,
        source=zeros,
        epoch=zeros,
        row=rows,
        start=zeros,
        tokens=short,
        drawn_step=zeros,
        document_tokens=tokens,
    )
    total = int(short.sum())
    assert total > 3 * 256 + 3 * 700
    with pytest.raises(StateError, match=f"pool, in tokens, is {total}, which is not in"):
        check_cursor(replace(cursor, pool=pool), planner)


@pytest.mark.parametrize(
    ("decisions", "match"),
    [
        ([(7, "beta")], "has run out, in step is 7"),
        ([(1 << 31, "beta")], "in step is 2147483648"),
        ([(-1, "beta")], "is -1"),
        ([(3, "beta"), (2, "alpha")], "is 2, which is not in .3, 6."),
        ([(3, "beta"), (3, "beta")], "twice"),
        ([(3, "delta")], "'delta' has run out; streams are alpha, beta, gamma"),
    ],
)
def test_a_decision_that_was_not_made_is_refused(decisions: list[tuple[int, str]], match: str) -> None:
    planner = planner_of()
    cursor = some_cursor(planner)
    none = np.zeros(3, np.int64)
    cursor = replace(cursor, position=replace(cursor.position, debt=none))
    made = tuple(Decision(step=step, kind="ran_out", name=name) for step, name in decisions)
    with pytest.raises(StateError, match=match):
        check_cursor(replace(cursor, decisions=made), planner)


def test_a_source_that_has_run_out_owes_nothing() -> None:
    planner = planner_of()
    cursor = some_cursor(planner)
    cursor = replace(cursor, position=replace(cursor.position, debt=np.array([0, 5, 0])))
    with pytest.raises(StateError, match="debt of stream 'beta', which has run out, is 5"):
        check_cursor(replace(cursor, decisions=(Decision(step=3, kind="ran_out", name="beta"),)), planner)
