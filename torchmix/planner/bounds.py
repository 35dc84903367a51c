"""A cursor that was read -> one of the planner: filled in from the catalog, and each number in its bounds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import MAX_DOCUMENT_TOKENS
from torchmix.errors import StateError
from torchmix.mixture.windows import are_denied
from torchmix.planner.cursor import Cursor, begun_by
from torchmix.planner.drawing import MOST_ALIGNED
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import UNLIMITED_EPOCHS, Planner
from torchmix.planner.stream_order import DOCUMENT_CHARGE
from torchmix.recipe.ramp import most_length, most_tokens, tokens_before

POOL_COLUMNS = tuple(name for name in Pieces.__struct_fields__ if name != "document_tokens")
"""What a state holds of a piece."""

# --- A cursor that was read, as the planner has one: with what follows from the catalog, and each number in its bounds.
#
# Each cursor that the planner has made is within all bounds; within them a step takes time and memory that the recipe
# and the catalog imply, whoever wrote the state. Cost: a look at each stream and at each piece of the pool, and one
# window of each stream, which the next step needs.
#
# The bounds, with L tokens of a sample, C of the largest global batch, and of stream s `longest(s)`, the tokens of its
# longest piece: at most L, and at most those of its longest document:
#
#     step               in [0, MAX_STEPS]
#     epoch              at most the tokens that have been drawn from all streams, as each epoch gives one or more;
#                        and those are at most the capacity of the steps before, plus the pool
#     window, offset     exist in the stream; the offset counts pieces of the window
#     debt               |debt| <= longest(s) / 2, as a draw stops at the midpoint of a piece (mixture/draw.py); with
#                        `pad` at most four samples for each stream, twice what mixture/draw.py proves
#     residue            in [0, 2^32)
#     drawn              1 <= raw <= aligned <= 2^40; raw is at most one more than the tokens that have been drawn, and
#                        aligned at most `align_tokens` * (raw + 1), as each piece has a token or more
#     unit: documents    documents are charged and drawn as a whole: longest(s) is the longest document, |debt| is at
#     most
#                        half the charge of one, and raw counts charges, one document or less for each token drawn
#     pool               each piece is one that packing makes, of a used row of its stream, and no token of an epoch
#     is in
#                        two; at most C + L + sum of longest(s) tokens: a draw asks for what is missing to C, or for L,
#                        and a stream gives at most longest(s) more than that
#     drawn_step         in [0, step)
#     decisions          by step, in [0, step); a stream runs out once, and then owes nothing; an entry of the schedule
#                        begins once, and its stream has given the epochs that it names

MAX_STEPS = 1 << 24
"""Steps of a run. The recipe implies none where sources may be repeated without a bound; runs have a million or two."""


def entered(cursor: Cursor, planner: Planner) -> Cursor:
    """A cursor that was read, as the planner goes on from it; its orders follow the cursor's edits, and its lengths.

    Args:
        cursor: Of the planner's rows.
        planner: Of the recipe and the catalog in use.

    Raises:
        StateError: The planner cannot have made it; names the first value that is out of its bounds.
        StateMismatch: The catalog does not have the rows that a stream had before an edit.
    """
    cursor = replace(cursor, pool=looked_up(cursor.pool, planner))
    planner.enter(cursor.eras)
    planner.cut_for(cursor.step)
    check_cursor(cursor, planner)
    return cursor


def check_cursor(cursor: Cursor, planner: Planner) -> None:
    """Refuse a cursor that the planner cannot have made.

    Args:
        cursor: Its arrays are int64 and of the planner's sources; its pool comes from `looked_up`.
        planner: Of the recipe and the catalog in use.

    Raises:
        StateError: Names the first value that is out of its bounds.
    """
    check_step(cursor.step)
    _check_decisions(cursor, planner)
    _check_begun(cursor, planner)
    length = most_length(planner.part.batch)
    by_document = planner.part.counts_documents  # which are then drawn as a whole
    most_piece = MAX_DOCUMENT_TOKENS if by_document else length
    longest = np.array([min(order.space.longest_tokens, most_piece) for order in planner.orders], np.int64)
    pads = planner.part.packing.method == "pad"
    most_in_pool = most_pool_tokens(planner, longest) if cursor.step and not pads else 0
    batch = planner.part.batch
    drawn = tokens_before(batch, cursor.step) + most_in_pool
    position = cursor.position
    for s, order in enumerate(planner.orders):
        epoch, window, offset = int(position.epoch[s]), int(position.window[s]), int(position.offset[s])
        debt, residue = int(position.debt[s]), int(position.residue[s])
        most_debt = (DOCUMENT_CHARGE if by_document else int(longest[s])) // 2
        if pads:
            most_debt = 4 * max(length, DOCUMENT_CHARGE) * len(planner.orders)
        name = planner.streams[s]
        _check(f"epoch of stream {name!r}", epoch, 0, drawn)
        _check(f"window of stream {name!r}", window, 0, order.num_windows_of(epoch) - 1)
        _check(f"offset of stream {name!r}", offset, 0, max(0, order.num_pieces(epoch, window) - 1))
        _check(f"debt of stream {name!r}", debt, -most_debt, most_debt)
        _check(f"residue of stream {name!r}", residue, 0, (1 << 32) - 1)
    totals = cursor.drawn
    if by_document:
        _check("sum of documents drawn", totals.raw, 1, DOCUMENT_CHARGE * (1 + drawn))
        _check("sum of aligned tokens drawn", totals.aligned, 1, MOST_ALIGNED)
    else:
        _check("sum of tokens drawn", totals.raw, 1, min(1 + drawn, MOST_ALIGNED))
        most_aligned = min(planner.align_tokens * (totals.raw + 1), MOST_ALIGNED)
        _check("sum of aligned tokens drawn", totals.aligned, totals.raw, most_aligned)
    _check_pool(cursor, planner, most_tokens=most_in_pool)


def check_bad_tokens(bad_tokens: Mapping[str, int], step: int, planner: Planner) -> None:
    """Refuse more tokens that could not be read than the steps before `step` had.

    Raises:
        StateError: Of a source there are more, or none.
    """
    batch = planner.part.batch
    for name, tokens in bad_tokens.items():
        _check(f"bad_tokens of source {name!r}", tokens, 1, tokens_before(batch, step))


def check_step(step: int) -> None:
    """Refuse a step that no run has.

    Raises:
        StateError: It is below 0 or above MAX_STEPS.
    """
    _check("step", step, 0, MAX_STEPS)


def looked_up(pieces: Pieces, planner: Planner) -> Pieces:
    """Pieces as a state holds them, with the tokens of their documents, which follow from the planner's catalog.

    Raises:
        StateError: Columns of several lengths, or a piece of a stream, source or row that there is not.
    """
    row, source = pieces.row, pieces.source
    check_columns(pieces, num_streams=len(planner.streams), num_sources=len(planner.sources))
    num_documents = np.array([sizes.num_documents for sizes in planner.sizes], np.int64)
    _check_each("row", row, 0, num_documents[source] - 1)
    tokens = np.empty(len(row), np.int64)
    for s, mine in _by_number(source):
        tokens[mine] = planner.sizes[s].tokens[row[mine]]
    return replace(pieces, document_tokens=tokens)


def check_columns(pieces: Pieces, *, num_streams: int, num_sources: int) -> None:
    """Refuse pieces of streams and sources that there are not.

    Raises:
        StateError: That, or columns of several lengths.
    """
    if any(len(getattr(pieces, name)) != len(pieces) for name in POOL_COLUMNS):
        raise StateError("the state's pool has columns of several lengths; the state is damaged")
    _check_each("stream", pieces.stream, 0, num_streams - 1)
    _check_each("source", pieces.source, 0, num_sources - 1)


def most_pool_tokens(planner: Planner, longest_tokens: Int64Array) -> int:
    """Tokens that a pool has at most, given those of the longest piece of each stream."""
    batch = planner.part.batch
    return most_tokens(batch) + most_length(batch) + int(longest_tokens.sum())


def _check_pool(cursor: Cursor, planner: Planner, *, most_tokens: int) -> None:
    pool, length = cursor.pool, planner.part.batch.length
    _check_each("epoch", pool.epoch, 0, cursor.position.epoch[pool.stream])
    _check_each("drawn_step", pool.drawn_step, 0, cursor.step - 1)
    counted = np.zeros(len(pool), np.int64)
    for stream, of_stream in _by_number(pool.stream):
        order = planner.orders[stream]
        for source, inside in _by_number(pool.source[of_stream]):
            mine = of_stream[inside]
            each = order.counted(pool.document_tokens[mine].astype(np.int32))
            gives = order.gives(source, pool.row[mine])
            name = planner.streams[stream]
            if name in cursor.eras.counts and planner.sources[source] in planner.part.streams[name].sources:
                # What an edit has given to another stream waits here, if an earlier epoch drew it.
                is_earlier = pool.epoch[mine] < cursor.position.epoch[stream]
                gives |= is_earlier & ~are_denied(planner.denied, pool.source[mine], pool.row[mine])
            counted[mine] = np.where(gives, each, 0)
    _check_each("start", pool.start, 0, counted - 1)
    _check_each("tokens", pool.tokens, 1, counted - pool.start)
    if planner.part.packing.method == "best_fit":  # it splits documents at multiples of a sample, and nowhere else
        rest = pool.start % length
        _check_each("start", pool.start, pool.start - rest, pool.start - rest)
        most = most_length(planner.part.batch)
        whole = np.minimum(counted - pool.start, most)
        rest = np.where(pool.tokens < whole, pool.tokens % length, 0)  # samples were shorter when it was drawn
        _check_each("tokens", pool.tokens, whole if most == length else pool.tokens - rest, whole)
    order_in_documents = np.lexsort((pool.start, pool.row, pool.epoch, pool.source, pool.stream))
    ordered = pool.take(order_in_documents)
    is_same = np.ones(max(0, len(pool) - 1), np.bool_)
    for name in ("stream", "source", "epoch", "row"):
        is_same &= np.diff(getattr(ordered, name)) == 0
    is_twice = is_same & (np.diff(ordered.start) < ordered.tokens[:-1])
    if is_twice.any():
        at = int(np.argmax(is_twice))
        raise StateError(
            f"the state's pool holds tokens of row {ordered.row[at]} of source "
            f"{planner.sources[int(ordered.source[at])]!r} twice; the state is damaged, use another checkpoint"
        )
    _check("pool, in tokens,", int(pool.tokens.sum()), 0, most_tokens)


def _check_decisions(cursor: Cursor, planner: Planner) -> None:
    earliest, found = 0, set[str]()
    for decision in cursor.decisions:
        if decision.kind == "stage":
            _check(
                "decision that an entry of the schedule has begun, in step", decision.step, earliest, cursor.step - 1
            )
            earliest = decision.step
            continue
        if decision.name not in planner.streams or decision.name in found:
            raise StateError(
                f"the state's decisions say {'twice ' if decision.name in found else ''}that stream "
                f"{decision.name!r} has run out; streams are {', '.join(planner.streams)}. The state is damaged"
            )
        found.add(decision.name)
        _check("epochs of the decision that a stream has run out,", decision.epochs, 0, 0)
        _check("decision that a stream has run out, in step", decision.step, earliest, cursor.step - 1)
        earliest = decision.step
        s = planner.streams.index(decision.name)
        _check(f"debt of stream {decision.name!r}, which has run out,", int(cursor.position.debt[s]), 0, 0)


def _check_begun(cursor: Cursor, planner: Planner) -> None:
    """Check the stages that have begun at an epoch."""
    begun, places = begun_by(cursor.decisions), planner.shares_of_step.places
    found = places.steps_of(begun)
    if len(found) != len(begun):
        raise StateError(
            f"the state's decisions say that changes of the shares at epochs of {', '.join(one.of for one in begun)} "
            f"have begun, and the recipe's schedule has no such changes. The state is damaged"
        )
    for number in found:
        epoch = places.stage_of(number).epoch
        assert epoch is not None, "the stage has begun at an epoch"
        _check(
            f"epoch of stream {epoch.of!r}, at which schedule[{number}] has begun,",
            int(cursor.position.epoch[planner.streams.index(epoch.of)]),
            epoch.epochs - (epoch.of in cursor.eras.counts),  # new rows of an epoch that was over have it go on
            UNLIMITED_EPOCHS,
        )


def _by_number(numbers: Int64Array) -> list[tuple[int, Int64Array]]:
    """The numbers that occur, each with the positions where it does."""
    order = np.argsort(numbers, kind="stable")
    found, first = np.unique(numbers[order], return_index=True)
    return list(zip(found.tolist(), np.split(order, first[1:]), strict=False))


def _check(what: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise StateError(
            f"the state's {what} is {value}, which is not in [{lowest}, {highest}]: the state is damaged, use another "
            f"checkpoint"
        )


def _check_each(what: str, values: Int64Array, lowest: Int64Array | int, highest: Int64Array | int) -> None:
    """Refuse a pool whose pieces have values outside these bounds."""
    is_outside = (values < lowest) | (values > highest)
    if is_outside.any():
        at = int(np.argmax(is_outside))
        low, high = (int(np.broadcast_to(bound, values.shape)[at]) for bound in (lowest, highest))
        raise StateError(
            f"the state's pool holds a piece that does not exist: the {what} of piece {at} is {values[at]}, which is "
            f"not in [{low}, {high}]; the state is damaged, use another checkpoint"
        )
