"""A state -> the cursor to go on from; and edits of a recipe in between: what may change, and what accepts it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from torchmix.catalog.earlier import EarlierRows
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog
from torchmix.errors import StateError, StateMismatch
from torchmix.mixture.draw import Position
from torchmix.mixture.shares import SHARE_ONE, BegunStage
from torchmix.mixture.windows import are_denied, denied_fingerprint
from torchmix.planner.bounds import MAX_STEPS, POOL_COLUMNS, check_bad_tokens, check_columns, check_step, entered
from torchmix.planner.cursor import NO_ERAS, Cursor, Decision, Eras, RunRows, StreamBefore, begun_by, gone_by
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import UNLIMITED_EPOCHS, Planner
from torchmix.planner.stream_order import stream_fingerprint
from torchmix.recipe.build import listed
from torchmix.recipe.changes import dynamic_of
from torchmix.recipe.fingerprint import adds_stages, differing_keys, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.recipe.sources import rows_of
from torchmix.recipe.streams import row_sets_of
from torchmix.steps.state import (
    MOST_KEYS,
    LoaderState,
    check_catalog,
    other_recipe,
    step_start,
)

# --- A state under an edited recipe: its streams, its pool and its eras brought in line.
#
# A stream that stays keeps its place and what it owes; a piece of the pool stays with a stream that has its row; what
# is denied, or in no stream any more, is not given.

logger = logging.getLogger(__name__)
_PLACE = ("epoch", "window", "offset")
"""What an edit alters of where a stream stands."""


def cursor_of_state(
    state: LoaderState, planner: Planner, *, catalog: str, is_stopped: Callable[[], bool] = lambda: False
) -> Cursor | None:
    """The cursor to plan `state.step` from; None if `is_stopped` ended the planning of the steps before it.

    Raises:
        StateMismatch: The state belongs to another catalog or other streams.
        StateError: A value that the planner cannot have come to; see `check_cursor`.
        SourceExhausted: The state names a step alone, and there is no data left for it.
    """
    if not state.is_planned:
        check_step(state.step)
        cursor = planner.start()
        if state.step:
            logger.info("planning %d steps, to begin at step %d", state.step, state.step)
        while cursor.step < state.step:
            if is_stopped():
                return None
            cursor = planner.skip(cursor)
        return cursor
    if state.edited_from:
        state = reconciled(state, planner, catalog=catalog)
    check_catalog(state, catalog)
    _check_rows(state, planner)
    cursor = _with_more_epochs(entered(state.at, planner), planner)
    check_bad_tokens(state.bad_tokens, state.step, planner)
    return cursor


def _with_more_epochs(cursor: Cursor, planner: Planner) -> Cursor:
    """The cursor without the run-outs of streams that the recipe gives more epochs now."""
    epochs = dict(zip(planner.streams, cursor.position.epoch.tolist(), strict=True))
    more = {name for name in gone_by(cursor.decisions) if epochs[name] < planner.most_epochs[name]}
    if not more:
        return cursor
    logger.info("%s had run out, and may give more epochs now", listed(sorted(more), MOST_KEYS))
    decisions = tuple(one for one in cursor.decisions if one.kind != "ran_out" or one.name not in more)
    return msgspec.structs.replace(cursor, decisions=decisions)


def _check_rows(state: LoaderState, planner: Planner) -> None:
    """Refuse a state of other streams, or of streams with other rows.

    Raises:
        StateMismatch: Names them.
        StateError: Fields that only a run with edits or a policy has.
    """
    rows, now, at = state.rows, planner.rows, state.at
    if rows.streams != now.streams:
        raise StateMismatch(f"the state has streams {list(rows.streams)}, the recipe has {list(now.streams)}")
    if rows.sources != now.sources:
        raise StateMismatch(f"the state has sources {list(rows.source_names)}, the recipe has {list(planner.sources)}")
    pairs = zip(rows.streams, rows.fingerprints, now.fingerprints, strict=True)
    others = [name for name, fingerprint, current in pairs if fingerprint != current]
    if others:
        raise StateMismatch(
            f"the state was saved when {listed(others, MOST_KEYS)} had other rows: files or selections changed; "
            f"restore them, or start a new run"
        )
    if rows.denied != now.denied:
        raise StateMismatch(
            "the state was saved with other deny-lists. To see what it has given, ask with the recipe of before; to go "
            "on with these, `torchmix diff OLD NEW --state FILE` prints the code for load_state_dict(accept_edit=...)"
        )
    deciding, decided = dynamic_of(planner.part), at.decided
    if deciding is None and (decided.shares or decided.length):
        raise StateError("the state has decisions of a policy, which no run of this recipe has; use another checkpoint")
    counts = at.eras.counts
    if not counts.keys() <= set(now.streams) or any(not 0 <= count <= MAX_STEPS for count in counts.values()):
        raise StateError("the state has an era that no run comes to; use another checkpoint")
    if rows.members != now.members:
        raise StateMismatch("the state has flats of other members; the state is damaged, use another checkpoint")
    if deciding is not None and decided.shares:
        is_whole = sum(decided.shares.values()) == SHARE_ONE and min(decided.shares.values()) >= 0
        if tuple(sorted(decided.shares)) != deciding.children or not is_whole or not decided.length:
            raise StateError("the state's shares are not those of a decision; use another checkpoint")


def reconciled(state: LoaderState, planner: Planner, *, catalog: str) -> LoaderState:
    """An accepted state with the streams of the edited recipe; the planner follows its eras.

    Args:
        state: From `edits.accepted`.
        planner: Of the edited recipe.
        catalog: Fingerprint of its catalog.

    Raises:
        StateMismatch: The catalog does not have the rows of before; or rows changed that no edit may change.
        StateError: The pool has pieces of streams or sources that the state does not name.
    """
    at, rows, part = state.at, state.rows, planner.part
    check_columns(at.pool, num_streams=len(rows.streams), num_sources=len(rows.source_names))
    found = dict(zip(rows.streams, rows.fingerprints, strict=True))
    now = dict(zip(planner.streams, planner.fingerprints, strict=True))
    changed = [name for name, fingerprint in found.items() if now.get(name, fingerprint) != fingerprint]
    check_changes(rows, changed, part, planner.edits.earlier)
    edit = _edit(state, changed, planner)
    edits = _still_known((*at.eras.edits, edit) if edit else at.eras.edits, planner)
    counts = {name: at.eras.counts.get(name, 0) + (name in changed) for name in planner.streams}
    counts = {name: count for name, count in counts.items() if count}
    eras = Eras(edits=edits, counts=counts) if edits or counts else NO_ERAS
    planner.enter(eras)
    position = _places(state, planner, {one.name: one for one in edit})
    epochs = dict(zip(planner.streams, position.epoch.tolist(), strict=True))
    cursor = msgspec.structs.replace(
        at,
        position=position,
        pool=_pool(state, planner, epochs, edit),
        decisions=_decisions(at, planner, epochs),
        eras=eras,
    )
    bad_tokens = {name: tokens for name, tokens in state.bad_tokens.items() if name in planner.sources}
    return msgspec.structs.replace(
        state, catalog=catalog, at=cursor, rows=planner.rows, bad_tokens=bad_tokens, edited_from=""
    )


def _places(state: LoaderState, planner: Planner, edited: Mapping[str, StreamBefore]) -> Position:
    """Where the streams of the edited recipe stand: those that come at their beginning, all others where they were."""
    before = {name: s for s, name in enumerate(state.rows.streams)}
    columns = {name: np.zeros(len(planner.streams), np.int64) for name in Position.__struct_fields__}
    for s, (name, order) in enumerate(zip(planner.streams, planner.orders, strict=True)):
        if name in before:
            for key, column in columns.items():
                column[s] = getattr(state.at.position, key)[before[name]]
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
        planner: Of the edited recipe.
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
        part: Of the edited recipe.
        earlier: The rows that its sources and views have and had; None: not known, and only members are looked at.

    Raises:
        StateMismatch: Names the stream or the source, and what to do.
    """
    before = {name: rows.members_of(name) for name in changed}
    for name in changed:
        gone = [member for member, _ in before[name] if member not in part.streams[name].members]
        if gone:
            raise StateMismatch(
                f"flat {name!r} had {listed(gone, MOST_KEYS)} when the state was saved. An edit may add children to a "
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


def _edit(state: LoaderState, changed: list[str], planner: Planner) -> tuple[StreamBefore, ...]:
    """Streams whose rows the edit changes; and those that come or go and share a source with one of these.

    A stream that has given all its epochs stands at the end of the last one, not before the next.
    """
    is_there, at = set(state.rows.streams), state.at
    before = {name: state.rows.members_of(name) for name in state.rows.streams}
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
    places = dict(zip(state.rows.streams, zip(*columns, strict=True), strict=True))
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


def _pool(state: LoaderState, planner: Planner, epochs: Mapping[str, int], edit: tuple[StreamBefore, ...]) -> Pieces:
    """Pieces that stay, with the numbers that streams and sources have now.

    A piece whose row has gone to another stream goes with it, if it was drawn in the present epoch: that one does not
    give the row again in its own. A piece of an earlier epoch stays with the stream that drew it.
    """
    stream_number = {name: s for s, name in enumerate(planner.streams)}
    source_number = {name: s for s, name in enumerate(planner.sources)}
    names, touched = state.rows.source_names, {one.name: one for one in edit}
    columns = [getattr(state.at.pool, name).tolist() for name in POOL_COLUMNS]
    as_ever = set(state.rows.streams) & set(stream_number) - set(state.at.eras.counts) - set(touched)
    rows: list[tuple[int, ...]] = []
    num_gone = num_denied = 0
    for values in zip(*columns, strict=True):
        name, source, epoch, row = state.rows.streams[values[0]], names[values[1]], values[2], values[3]
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
        rows.append((stream_number[name], number, epoch, *values[3:]))
    if num_gone:
        logger.warning("%d deferred pieces go: no stream has their rows after the edit", num_gone)
    if num_denied:
        logger.warning("%d deferred pieces are of denied documents, and are not given", num_denied)
    staying = np.array(rows, np.int64).reshape(-1, len(POOL_COLUMNS)).T
    return Pieces(**dict(zip(POOL_COLUMNS, staying, strict=True)))


def _has(planner: Planner, stream: str, source: int, row: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> bool:
    return bool(planner.orders[planner.streams.index(stream)].space.holds(source, row)[0])


def _had(planner: Planner, before: StreamBefore, source: str, row: int) -> bool:
    """Whether a stream had a row before an edit."""
    if not before.members:
        return False
    rows = planner.edits.rows(before.name, before.members)
    return any(bool(rows.kept[name][row]) for name, of_source in rows.sources.items() if of_source == source)


# --- Edits of a recipe between a save and a load: what may change, the code that accepts it, and the state under it.
#
# An edit is accepted by its own code alone; streams that are in both recipes keep their places, what they owe and what
# waits in the pool, so nothing of them is lost or comes twice.
#
# May change: shares, groups and the schedule; sources may come and go; documents may be denied; the batch may get
# stages that begin at the state's step or later, with more or longer samples. What comes begins at its first epoch and
# owes nothing. What goes takes its pieces in the pool along. Seed, stages of the batch that the state's recipe has,
# shuffle, packing, and how a source that stays is read, may not change.

EDITABLE = ("mixture", "schedule", "selections")
_OF_SOURCE = "sources."
_HALF = 8


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a state knows of its recipe."""

    recipe: str
    """Fingerprint."""
    digests: bytes
    """`key_digests` of its keys."""
    sources: list[str]
    """Sorted names."""
    is_dynamic: bool
    """Whether it has a policy."""


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """How a recipe differs from that of a state."""

    code: str
    """16 hex digits that accept this edit and no other."""
    changed: tuple[str, ...]
    """Keys that differ and may."""
    added: tuple[str, ...]
    """Sources that only the recipe has."""
    removed: tuple[str, ...]
    """Sources that only the state has."""
    rows: tuple[str, ...]
    """Streams of both that have other rows; an empty name stands for deny-lists."""
    refused: tuple[str, ...]
    """Keys that differ and may not."""

    @property
    def text(self) -> str:
        """What the edit does, for a message."""
        # A state has digests alone, and that of a schedule covers the shares that it leads to from the mixture.
        led_to = "what the schedule leads to" if "mixture" in self.changed else "schedule"
        keys = [led_to if key == "schedule" else key for key in self.changed]
        parts = [f"{' and '.join(keys)} changed"] if keys else []
        parts += [f"{listed(names, MOST_KEYS)} {what}" for names, what in self._sources() if names]
        streams = [name for name in self.rows if name]
        parts += [f"{listed(streams, MOST_KEYS)} with other rows"] if streams else []
        return "; ".join([*parts, *(["deny-lists changed"] if "" in self.rows else [])])

    def _sources(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        return (self.added, "added"), (self.removed, "removed")


class RowFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What rows the streams of a recipe in use have, by its catalog."""

    streams: dict[str, str]
    """Fingerprint of the rows of each stream."""
    denied: str
    """Fingerprint of the denied rows; empty where there are none."""
    earlier: EarlierRows | None = None
    """The rows that its sources and views have and had; None: not known."""


def row_facts(part: Part, catalog: Catalog) -> RowFacts:
    """What rows the streams of a part have."""
    prints = {name: source.fingerprint for name, source in catalog.sources.items()}
    prints |= {name: view.fingerprint for name, view in catalog.views.items()}
    return RowFacts(
        streams={name: stream_fingerprint(stream, prints) for name, stream in part.streams.items()},
        denied=denied_fingerprint(catalog.denied_rows),
        earlier=EarlierRows(catalog, settings_of(part.sources, part.shuffle), part.name),
    )


def row_facts_of_state(state: LoaderState) -> RowFacts | None:
    """What rows the streams of a state have; None where it names none, or an edit was accepted that covers them."""
    if not state.is_planned or state.edited_from:
        return None
    rows = state.rows
    return RowFacts(streams=dict(zip(rows.streams, rows.fingerprints, strict=True)), denied=rows.denied)


def changed_rows(before: RowFacts | None, now: RowFacts | None) -> list[list[str]]:
    """What differs: name, fingerprint before and now, of each stream that both have; deny-lists under no name."""
    if before is None or now is None:
        return []
    changed = [
        [name, fingerprint, now.streams[name]]
        for name, fingerprint in sorted(before.streams.items())
        if fingerprint != now.streams.get(name, fingerprint)
    ]
    return [*changed, *([["", before.denied, now.denied]] if before.denied != now.denied else [])]


def state_for(
    state: LoaderState,
    part: Part,
    *,
    rows: RowFacts | None = None,
    from_step_start: bool = False,
    accept_edit: str | None = None,
) -> LoaderState:
    """The state that a loader of a part goes on from.

    Args:
        state: From `read_state`.
        part: In use.
        rows: What its streams have now; None on ranks that open no catalog, where only recipes are compared.
        from_step_start: Go back to the start of the step that the state was saved in.
        accept_edit: The code of an edit; another recipe is refused without it.

    Raises:
        StateMismatch: Saved with another recipe; where that is an edit that can be accepted, the message has its code.
            Or rows changed that no edit may change.
    """
    if from_step_start:
        state = step_start(state)
    fingerprint = recipe_fingerprint(part)
    is_same = state.recipe == fingerprint
    changed = changed_rows(row_facts_of_state(state), rows)
    edit = edit_of(_identity(state), part, step=state.step, rows=changed)
    if not is_same and (not state.is_planned or edit.refused):
        raise other_recipe(state, part)
    is_accepted = accept_edit is not None and accept_edit[:_HALF] == edit.code[:_HALF]
    if rows is not None:
        is_accepted = is_accepted and accept_edit == edit.code
    if is_same and not changed and not is_accepted:
        return state
    shares = state.at.decided.shares
    deciding = dynamic_of(part) if shares else None
    if deciding is not None and sorted(shares) != list(deciding.children):
        raise StateMismatch(
            f"the policy of the run has given shares to {listed(sorted(shares), MOST_KEYS)}, and by this recipe "
            f"it decides those of {listed(deciding.children, MOST_KEYS)}: what it has learned is of other children. "
            f"Restore these at `dynamic.at`, or start a new run"
        )
    if rows is not None:
        check_changes(state.rows, [name for name, *_ in changed if name], part, rows.earlier)
    if not is_accepted:
        given = f"accept_edit={accept_edit!r} accepts another edit. " if accept_edit is not None else ""
        saved = f"recipe {state.recipe}, this recipe is {fingerprint}" if not is_same else "other rows of this recipe"
        raise StateMismatch(
            f"{given}the state was saved with {saved}: {edit.text}. To go on from step {state.step} with this edit, "
            f"call load_state_dict(state, accept_edit={edit.code!r}); nothing that was given before comes again. "
            f"`torchmix plan RECIPE --state FILE --steps N --accept-edit {edit.code}` shows what would come"
        )
    return accepted(state, edit, fingerprint=fingerprint) if state.is_planned else state


def edit_of(before: Identity, part: Part, *, step: int, rows: Sequence[Sequence[str]] = ()) -> Edit:
    """How a recipe differs from another one.

    Args:
        before: What is known of the other one.
        part: The part of the recipe in use.
        step: The first step that it holds for.
        rows: Which rows differ, as `changed_rows` has them.
    """
    fingerprint, keys = recipe_fingerprint(part), recipe_keys(part)
    differing = differing_keys(keys, before.digests, before.sources, is_dynamic=before.is_dynamic)
    was = set(before.sources)
    now = {key.removeprefix(_OF_SOURCE) for key in keys if key.startswith(_OF_SOURCE)}
    added = {f"{_OF_SOURCE}{name}" for name in now - was}
    removed = {f"{_OF_SOURCE}{name}" for name in was - now}
    editable = (*EDITABLE, *(["batch"] if adds_stages(before.digests, part.batch, step) else []))
    allowed = {*editable, *added, *removed}
    return Edit(
        code=_half(f"torchmix-edit {before.recipe} {fingerprint}") + _half(f"torchmix-rows {json.dumps([*rows])}"),
        changed=tuple(key for key in differing if key in editable),
        added=tuple(sorted(now - was)),
        removed=tuple(sorted(was - now)),
        rows=tuple(name for name, *_ in rows),
        refused=tuple(key for key in differing if key not in allowed)
        or (() if before.recipe == fingerprint or before.digests else ("unknown keys",)),
    )


def _half(text: str) -> str:
    """Half a code: one for the recipes, which every rank knows, and one for rows, which only leaders know."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HALF]


def accepted(state: LoaderState, edit: Edit, *, fingerprint: str) -> LoaderState:
    """The state under the edited recipe, with the keys of that which its streams are of; see `edits.py`.

    Raises:
        StateMismatch: The state lies inside a step, which was planned before the edit.
    """
    if state.microbatch:
        raise StateMismatch(
            f"the state was saved inside step {state.step}, which was planned before the edit; go back to the start of "
            f"the step with load_state_dict(state, from_step_start=True, accept_edit={edit.code!r})"
        )
    return msgspec.structs.replace(state, recipe=fingerprint, edited_from=state.edited_from or state.recipe)


def _identity(state: LoaderState) -> Identity:
    return Identity(
        recipe=state.recipe,
        digests=state.recipe_keys,
        sources=list(state.rows.source_names),
        is_dynamic=bool(state.log_branch),
    )
