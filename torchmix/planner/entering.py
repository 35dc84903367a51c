"""A cursor that was read -> one of the planner: in line with edits, filled in from the catalog, in its bounds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from msgspec.structs import replace

from torchmix.array_types import Int64Array
from torchmix.catalog.earlier import EarlierRows
from torchmix.catalog.sizes import MAX_DOCUMENT_TOKENS
from torchmix.errors import StateError, StateMismatch
from torchmix.mixture.draw import Position
from torchmix.mixture.shares import SHARE_ONE, BegunStage
from torchmix.mixture.windows import are_denied
from torchmix.planner.cursor import NO_ERAS, Cursor, Decision, Eras, RunRows, StreamBefore, begun_by, gone_by
from torchmix.planner.drawing import MOST_ALIGNED
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import UNLIMITED_EPOCHS, Planner
from torchmix.planner.stream_order import DOCUMENT_CHARGE, counted_tokens
from torchmix.recipe.build import listed
from torchmix.recipe.changes import dynamic_of
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import most_length, most_tokens, tokens_before
from torchmix.recipe.sources import rows_of
from torchmix.recipe.streams import row_sets_of

# --- A cursor that was read, as the planner continues from it.
#
# Whoever wrote the state, the planner continues from a cursor that it could have made of its own rows.

POOL_COLUMNS = tuple(name for name in Pieces.__struct_fields__ if name != "document_tokens")
"""What a state holds of a piece."""
MOST_NAMES = 5
"""Names that an error lists."""
_PLACE = ("epoch", "window", "offset")
"""What an edit alters of where a stream stands."""

logger = logging.getLogger(__name__)


def entered(at: Cursor, rows: RunRows, planner: Planner, *, is_edited: bool = False) -> Cursor:
    """A cursor that was read, as the planner continues from it; its orders follow the cursor's edits, and its lengths.

    Args:
        at: As a state holds it.
        rows: The names that it counts, and the rows of then.
        planner: The planner of the recipe and the catalog in use.
        is_edited: Whether an edit of the recipe or of its rows was accepted since.

    Raises:
        StateMismatch: The cursor is of other rows than the planner's; or the catalog does not have the rows that a
            stream had before an edit; or rows changed that no edit may change.
        StateError: The planner cannot have made it; names the first value that is out of its bounds.
    """
    edit: tuple[StreamBefore, ...] = ()
    if is_edited:
        edit, eras = _edited(at, rows, planner)
        at = replace(at, eras=eras)
    else:
        _check_rows(rows, planner)
    _check_said(at, planner)
    planner.enter(at.eras)
    if is_edited:
        at = _moved(at, rows, planner, edit)
    cursor = replace(at, pool=looked_up(at.pool, planner))
    planner.cut_for(cursor.step)
    check_cursor(cursor, planner)
    return _with_more_epochs(cursor, planner)


def _check_rows(rows: RunRows, planner: Planner) -> None:
    """Refuse a cursor of other streams, or of streams with other rows.

    Raises:
        StateMismatch: Names them.
    """
    now = planner.rows
    if rows.streams != now.streams:
        raise StateMismatch(f"the state has streams {list(rows.streams)}, the recipe has {list(now.streams)}")
    if rows.sources != now.sources:
        raise StateMismatch(f"the state has sources {list(rows.source_names)}, the recipe has {list(planner.sources)}")
    pairs = zip(rows.streams, rows.fingerprints, now.fingerprints, strict=True)
    others = [name for name, fingerprint, current in pairs if fingerprint != current]
    if others:
        raise StateMismatch(
            f"the state was saved when {listed(others, MOST_NAMES)} had other rows: files or selections changed; "
            f"restore them, or start a new run"
        )
    if rows.denied != now.denied:
        raise StateMismatch(
            "the state was saved with other deny-lists. To see what it has given, ask with the recipe of before; to go "
            "on with these, `torchmix diff OLD NEW --state FILE` prints the code for load_state_dict(accept_edit=...)"
        )
    if rows.members != now.members:
        raise StateMismatch("the state has flats of other members; the state is damaged, use another checkpoint")


def _check_said(at: Cursor, planner: Planner) -> None:
    """Refuse what only a run with edits or a policy has, where it is not of such a run."""
    deciding, decided, counts = dynamic_of(planner.part), at.decided, at.eras.counts
    if deciding is None and (decided.shares or decided.length):
        raise StateError("the state has decisions of a policy, which no run of this recipe has; use another checkpoint")
    if not counts.keys() <= set(planner.streams) or any(not 0 <= count <= MAX_STEPS for count in counts.values()):
        raise StateError("the state has an era that no run comes to; use another checkpoint")
    if deciding is not None and decided.shares:
        is_whole = sum(decided.shares.values()) == SHARE_ONE and min(decided.shares.values()) >= 0
        if tuple(sorted(decided.shares)) != deciding.children or not is_whole or not decided.length:
            raise StateError("the state's shares are not those of a decision; use another checkpoint")


def _with_more_epochs(cursor: Cursor, planner: Planner) -> Cursor:
    """The cursor without the run-outs of streams that the recipe gives more epochs now."""
    epochs = dict(zip(planner.streams, cursor.position.epoch.tolist(), strict=True))
    more = {name for name in gone_by(cursor.decisions) if epochs[name] < planner.most_epochs[name]}
    if not more:
        return cursor
    logger.info("%s had run out, and may give more epochs now", listed(sorted(more), MOST_NAMES))
    decisions = tuple(one for one in cursor.decisions if one.kind != "ran_out" or one.name not in more)
    return replace(cursor, decisions=decisions)


# --- A cursor under an edited recipe: its streams, its pool and its eras brought in line.
#
# A stream that stays keeps its place and what it owes; a piece of the pool stays with a stream that has its row; what
# is denied, or in no stream any more, is not given.


def _edited(at: Cursor, rows: RunRows, planner: Planner) -> tuple[tuple[StreamBefore, ...], Eras]:
    """The streams whose rows the accepted edit changes, and the edits that are remembered with it.

    Raises:
        StateMismatch: The catalog does not have the rows of before; or rows changed that no edit may change.
        StateError: The pool has pieces of streams or sources that the state does not name.
    """
    check_columns(at.pool, num_streams=len(rows.streams), num_sources=len(rows.source_names))
    found = dict(zip(rows.streams, rows.fingerprints, strict=True))
    now = dict(zip(planner.streams, planner.fingerprints, strict=True))
    changed = [name for name, fingerprint in found.items() if now.get(name, fingerprint) != fingerprint]
    check_changes(rows, changed, planner.part, planner.edits.earlier)
    edit = _edit(at, rows, changed, planner)
    edits = _still_known((*at.eras.edits, edit) if edit else at.eras.edits, planner)
    counts = {name: at.eras.counts.get(name, 0) + (name in changed) for name in planner.streams}
    counts = {name: count for name, count in counts.items() if count}
    return edit, Eras(edits=edits, counts=counts) if edits or counts else NO_ERAS


def _moved(at: Cursor, rows: RunRows, planner: Planner, edit: tuple[StreamBefore, ...]) -> Cursor:
    """The cursor with the streams of the edited recipe, whose orders follow its eras already."""
    position = _places(at, rows, planner, {one.name: one for one in edit})
    epochs = dict(zip(planner.streams, position.epoch.tolist(), strict=True))
    return replace(
        at,
        position=position,
        pool=_pool(at, rows, planner, epochs, edit),
        decisions=_decisions(at, planner, epochs),
    )


def _edit(at: Cursor, rows: RunRows, changed: list[str], planner: Planner) -> tuple[StreamBefore, ...]:
    """Streams whose rows the edit changes; and those that come or go and share a source with one of these.

    A stream that has given all its epochs stands at the end of the last one, not before the next.
    """
    is_there = set(rows.streams)
    before = {name: rows.members_of(name) for name in rows.streams}
    added = [name for name in planner.streams if name not in is_there]
    removed = [name for name in is_there if name not in planner.part.streams]
    row_sets = row_sets_of(planner.part)
    sources = {name: {row_sets[member].source for member, _ in planner.edits.members[name]} for name in planner.streams}
    left = {name: planner.edits.sources_of(before[name]) for name in removed}
    losing = set(chain.from_iterable(sources[name] for name in changed)) | set(chain.from_iterable(left.values()))
    gaining = {name for name in added if sources[name] & losing}
    giving = {name for name in removed if any(left[name] & sources[other] for other in (*changed, *gaining))}
    out = gone_by(at.decisions) - set(planner.streams)
    columns = (getattr(at.position, key).tolist() for key in _PLACE)
    places = dict(zip(rows.streams, zip(*columns, strict=True), strict=True))
    known = Eras(edits=_still_known(at.eras.edits, planner))
    edit = []
    for name in sorted({*changed, *gaining, *giving}):
        epoch, window, offset = places.get(name, (0, 0, 0))
        has_given = name in out or planner.most_epochs.get(name, UNLIMITED_EPOCHS) <= epoch
        if has_given and epoch and (window, offset) == (0, 0):
            epoch -= 1
            window = planner.edits.num_windows_of(known, before, name, epoch)
        edit.append(
            StreamBefore(
                name=name,
                epoch=epoch,
                window=window,
                offset=offset,
                members=before.get(name, ()),
                after=planner.edits.members.get(name, ()),
            )
        )
    return tuple(edit)


def _still_known(edits: tuple[tuple[StreamBefore, ...], ...], planner: Planner) -> tuple[tuple[StreamBefore, ...], ...]:
    """Edits without the streams of sources that are gone: their rows are in no other stream."""
    known = set(planner.part.streams)
    for one in chain.from_iterable(edits):
        if planner.edits.sources_of((*one.members, *one.after)):
            known.add(one.name)
    staying = (tuple(one for one in edit if one.name in known) for edit in edits)
    return tuple(filter(None, staying))


def check_changes(rows: RunRows, changed: Sequence[str], part: Part, earlier: EarlierRows | None) -> None:
    """Refuse changes of rows that would lose or repeat some.

    Args:
        rows: Before the edit.
        changed: Streams of these and of the part whose rows changed.
        part: The part of the edited recipe.
        earlier: The rows that its sources and views have and had; None: not known, and only members are looked at.

    Raises:
        StateMismatch: Names the stream or the source, and what to do.
    """
    before = {name: rows.members_of(name) for name in changed}
    for name in changed:
        gone = [member for member, _ in before[name] if member not in part.streams[name].members]
        if gone:
            raise StateMismatch(
                f"flat {name!r} had {listed(gone, MOST_NAMES)} when the state was saved. An edit may add children to a "
                f"flat, and not take them out; put them back, and name their documents in a deny-list"
            )
        if earlier is None:
            continue
        for member, fingerprint in before[name]:
            source, had, _ = earlier.found(member, fingerprint)
            present = earlier.num_rows(source)
            if present != had.num_documents and rows_of(part.sources[source], present) != (0, present):
                raise StateMismatch(
                    f"source {source!r} has other rows than when the state was saved, and `documents` or `split` cuts "
                    f"it by their number: rows would move between training and validation. Restore its files"
                )


def _places(at: Cursor, rows: RunRows, planner: Planner, edited: Mapping[str, StreamBefore]) -> Position:
    """Where the streams of the edited recipe stand: those that come at their beginning, all others where they were."""
    before = {name: s for s, name in enumerate(rows.streams)}
    columns = {name: np.zeros(len(planner.streams), np.int64) for name in Position.__struct_fields__}
    for s, (name, order) in enumerate(zip(planner.streams, planner.orders, strict=True)):
        if name in before:
            for key, column in columns.items():
                column[s] = getattr(at.position, key)[before[name]]
        if name in edited:
            for key in _PLACE:
                columns[key][s] = getattr(edited[name], key)
        if columns["window"][s] >= order.num_windows_of(int(columns["epoch"][s])):
            # The edit leaves nothing of the epoch.
            columns["epoch"][s] += 1
            columns["window"][s] = columns["offset"][s] = 0
    return Position(**columns)


def _decisions(at: Cursor, planner: Planner, epochs: Mapping[str, int]) -> tuple[Decision, ...]:
    """The decisions that hold on: run-outs of streams that have nothing new to give, and begun stages that the schedule
    still has.

    Args:
        at: Before the edit.
        planner: The planner of the edited recipe.
        epochs: The epoch in which each stream stands after it.
    """
    has_given = {name for name, most in planner.most_epochs.items() if epochs[name] >= most}
    begun = [*planner.shares_of_step.places.still_begun(begun_by(at.decisions))]
    staying = []
    for one in at.decisions:
        if one.kind == "ran_out":
            stays = one.name in has_given
        elif stays := (one.name, one.epochs, one.step) in begun:
            begun.remove(BegunStage(one.name, one.epochs, one.step))
        if stays:
            staying.append(one)
    return tuple(staying)


def _pool(
    at: Cursor, rows: RunRows, planner: Planner, epochs: Mapping[str, int], edit: tuple[StreamBefore, ...]
) -> Pieces:
    """Pieces that stay, with the numbers that streams and sources have now.

    A piece whose row has gone to another stream goes with it, if it was drawn in the present epoch: that one does not
    give the row again in its own. A piece of an earlier epoch stays with the stream that drew it.
    """
    stream_number = {name: s for s, name in enumerate(planner.streams)}
    source_number = {name: s for s, name in enumerate(planner.sources)}
    names, touched = rows.source_names, {one.name: one for one in edit}
    columns = [getattr(at.pool, name).tolist() for name in POOL_COLUMNS]
    as_ever = set(rows.streams) & set(stream_number) - set(at.eras.counts) - set(touched)
    found: list[tuple[int, ...]] = []
    num_gone = num_denied = 0
    for values in zip(*columns, strict=True):
        name, source, epoch, row = rows.streams[values[0]], names[values[1]], values[2], values[3]
        number = source_number.get(source)
        if number is None:
            num_gone += 1
            continue
        place = np.array([row], np.int64)
        if planner.denied and are_denied(planner.denied, np.array([number]), place)[0]:
            num_denied += 1
            continue
        if name not in as_ever and not (name in stream_number and _has(planner, name, number, place)):
            others = [one for one in planner.streams if one != name and _has(planner, one, number, place)]
            heirs = [one for one in others if one in touched and not _had(planner, touched[one], source, row)]
            had = name in touched and _had(planner, touched[name], source, row)
            if had and heirs and epoch == touched[name].epoch:
                name, epoch = heirs[0], epochs[heirs[0]]
            elif not (heirs if had else others):
                name = ""
        if name not in stream_number:
            num_gone += 1
            continue
        found.append((stream_number[name], number, epoch, *values[3:]))
    if num_gone:
        logger.warning("%d deferred pieces go: no stream has their rows after the edit", num_gone)
    if num_denied:
        logger.warning("%d deferred pieces are of denied documents, and are not given", num_denied)
    staying = np.array(found, np.int64).reshape(-1, len(POOL_COLUMNS)).T
    return Pieces(**dict(zip(POOL_COLUMNS, staying, strict=True)))


def _has(planner: Planner, stream: str, source: int, row: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> bool:
    return bool(planner.orders[planner.streams.index(stream)].space.holds(source, row)[0])


def _had(planner: Planner, before: StreamBefore, source: str, row: int) -> bool:
    """Whether a stream had a row before an edit."""
    if not before.members:
        return False
    rows = planner.edits.rows(before.name, before.members)
    return any(bool(rows.kept[name][row]) for name, of_source in rows.sources.items() if of_source == source)


# --- What follows from the catalog, and each number in its bounds.
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


def check_cursor(cursor: Cursor, planner: Planner) -> None:
    """Refuse a cursor that the planner cannot have made.

    Args:
        cursor: Its arrays are int64 and of the planner's sources; its pool comes from `looked_up`.
        planner: The planner of the recipe and the catalog in use.

    Raises:
        StateError: Names the first value that is out of its bounds.
    """
    check_step(cursor.step)
    _check_decisions(cursor, planner)
    _check_begun(cursor, planner)
    length = most_length(planner.part.batch)
    by_document = planner.part.counts_documents  # which are then drawn as a whole
    cuts = planner.cuts(length)[planner.source_of_stream]
    most_piece = MAX_DOCUMENT_TOKENS if by_document else np.where(cuts > 0, cuts, length)
    longest = np.minimum([order.space.longest_tokens for order in planner.orders], most_piece)
    pads = planner.part.packing.method == "pad"
    most_in_pool = most_pool_tokens(planner, longest) if cursor.step and not pads else 0
    batch = planner.part.batch
    drawn = tokens_before(batch, cursor.step) + most_in_pool
    if planner.part.packing.method == "whole":  # a step may exceed its capacity, by less than a piece
        drawn += cursor.step * int(longest.max(initial=0))
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
        StateError: There are more of a source, or none.
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
    pool, longest = cursor.pool, most_length(planner.part.batch)
    _check_each("epoch", pool.epoch, 0, cursor.position.epoch[pool.stream])
    _check_each("drawn_step", pool.drawn_step, 0, cursor.step - 1)
    counted = np.zeros(len(pool), np.int64)
    for stream, of_stream in _by_number(pool.stream):
        order = planner.orders[stream]
        for source, inside in _by_number(pool.source[of_stream]):
            mine = of_stream[inside]
            name = planner.streams[stream]
            # Samples may have been longer when it was drawn.
            each = counted_tokens(
                planner.part, planner.sources[source], longest, pool.document_tokens[mine].astype(np.int32)
            )
            gives = order.gives(source, pool.row[mine])
            if name in cursor.eras.counts and planner.sources[source] in planner.part.streams[name].sources:
                # What an edit has given to another stream waits here, if an earlier epoch drew it.
                is_earlier = pool.epoch[mine] < cursor.position.epoch[stream]
                gives |= is_earlier & ~are_denied(planner.denied, pool.source[mine], pool.row[mine])
            counted[mine] = np.where(gives, each, 0)
    _check_each("start", pool.start, 0, counted - 1)
    _check_each("tokens", pool.tokens, 1, counted - pool.start)
    if planner.part.packing.method in ("best_fit", "whole"):  # these cut at multiples of a sample alone
        size, most = (planner.cuts(length)[pool.source] for length in (planner.part.batch.length, longest))
        flows, size = size == 0, np.maximum(size, 1)
        rest = np.where(flows, 0, pool.start % size)
        _check_each("start", pool.start, pool.start - rest, pool.start - rest)
        whole = np.where(flows, pool.tokens, np.minimum(counted - pool.start, most))
        rest = np.where(pool.tokens < whole, pool.tokens % size, 0)  # of shorter samples
        _check_each("tokens", pool.tokens, np.where(most == size, whole, pool.tokens - rest), whole)
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
            epoch.epochs - (epoch.of in cursor.eras.counts),  # new rows of an epoch that was over have it continue
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
