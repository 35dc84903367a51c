"""Edits of a recipe between a save and a load: what may change, the word that accepts it, and the state under it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from torchmix.catalog.earlier import EarlierRows
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog
from torchmix.errors import StateMismatch
from torchmix.mixture.shares import BegunStage
from torchmix.mixture.windows import are_denied, denied_fingerprint
from torchmix.planner.cursor import Decision, Eras, Members, StreamBefore, begun_by
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
    PoolState,
    StreamState,
    other_recipe,
    step_start,
)

# --- A state under an edited recipe: its streams, its pool and its eras brought in line.
#
# A stream that stays keeps its place and what it owes; a piece of the pool stays with a stream that has its row; what
# is denied, or in no stream any more, is not given.

logger = logging.getLogger(__name__)


def reconciled(state: LoaderState, planner: Planner, *, catalog: str) -> LoaderState:
    """An accepted state with the streams of the edited recipe; the planner follows its eras.

    Args:
        state: From `edits.accepted`.
        planner: Of the edited recipe.
        catalog: Fingerprint of its catalog.

    Raises:
        StateMismatch: The catalog does not have the rows of before; or rows changed that no edit may change.
    """
    found = {stream.name: stream for stream in state.streams}
    prints = dict(zip(planner.streams, planner.fingerprints, strict=True))
    changed = [name for name, stream in found.items() if name in prints and prints[name] != stream.fingerprint]
    before = {name: members_before(state, stream) for name, stream in found.items()}
    check_changes(state, changed, planner.part, planner.edits.earlier)
    eras = eras_of_state(state)
    edit = _edit(state, changed, before, planner, eras)
    counts = {stream.name: stream.era + (stream.name in changed) for stream in state.streams}
    if edit:
        eras = Eras(edits=(*eras.edits, edit), counts=counts)
    eras = _still_known(eras, planner)
    planner.enter(eras)
    places = {one.name: (one.epoch, one.window, one.offset) for one in edit}
    new = dict.fromkeys(("epoch", "window", "offset", "debt", "residue", "era"), 0)
    streams = []
    for name, order in zip(planner.streams, planner.orders, strict=True):
        stream = found.get(name) or StreamState(name=name, fingerprint=prints[name], **new)
        epoch, window, offset = places.get(name, (stream.epoch, stream.window, stream.offset))
        if window >= order.num_windows_of(epoch):  # the edit leaves nothing of the epoch
            epoch, window, offset = epoch + 1, 0, 0
        place = {"epoch": epoch, "window": window, "offset": offset}
        streams.append(msgspec.structs.replace(stream, fingerprint=prints[name], era=counts.get(name, 0), **place))
    has_plain_streams = planner.streams_are_sources
    return msgspec.structs.replace(
        state,
        catalog=catalog,
        streams=streams,
        sources=[] if has_plain_streams else list(planner.sources),
        pool=_pool(state, planner, {one.name: one for one in streams}, edit),
        decisions=_decisions(state, planner, {one.name: one.epoch for one in streams}),
        bad_tokens={name: tokens for name, tokens in state.bad_tokens.items() if name in planner.sources},
        members=members_of_state(planner),
        eras=eras.edits,
        denied=planner.denied_fingerprint,
        edited_from="",
    )


def runs_again(before: LoaderState, after: LoaderState) -> tuple[str, ...]:
    """Names of the streams that had run out by one state, and that have not by another one, in which all of them are.

    Args:
        before: As it was saved.
        after: What an edit made of it, see `reconciled`; or a later one.
    """
    out = {one.name for one in after.decisions if one.kind == "ran_out"}
    stay = {stream.name for stream in after.streams} - out
    return tuple(sorted(one.name for one in before.decisions if one.kind == "ran_out" and one.name in stay))


def _decisions(state: LoaderState, planner: Planner, epochs: Mapping[str, int]) -> tuple[Decision, ...]:
    """The decisions that hold on: run-outs of streams that have nothing new to give, and begun stages that the schedule
    still has.

    Args:
        state: Before the edit.
        planner: Of the edited recipe.
        epochs: The epoch in which each stream stands after it.
    """
    has_given = {name for name, most in planner.most_epochs.items() if epochs[name] >= most}
    begun = [*planner.shares_of_step.places.still_begun(begun_by(state.decisions))]
    staying = []
    for one in state.decisions:
        if one.kind == "ran_out":
            stays = one.name in has_given
        elif stays := (one.name, one.epochs, one.step) in begun:
            begun.remove(BegunStage(one.name, one.epochs, one.step))
        if stays:
            staying.append(one)
    return tuple(staying)


def members_before(state: LoaderState, stream: StreamState) -> Members:
    """Members of a stream of a state, with the fingerprints of their rows; none where these are not known."""
    if not stream.fingerprint:
        return ()
    return state.members.get(stream.name, ((stream.name, stream.fingerprint),))


def members_of_state(planner: Planner) -> dict[str, Members]:
    """Members of flats, as a state keeps them."""
    members = planner.edits.members
    return {name: of for name, of in members.items() if of and planner.part.streams[name].is_flat}


def eras_of_state(state: LoaderState) -> Eras:
    """What a state remembers of edits."""
    counts = {stream.name: stream.era for stream in state.streams if stream.era}
    return Eras(edits=state.eras, counts=counts) if state.eras or counts else Eras()


def _still_known(eras: Eras, planner: Planner) -> Eras:
    """Edits without the streams of sources that are gone: their rows are in no other stream."""
    known = set(planner.part.streams)
    for one in chain.from_iterable(eras.edits):
        if planner.edits.sources_of((*one.members, *one.after)):
            known.add(one.name)
    edits = (tuple(one for one in edit if one.name in known) for edit in eras.edits)
    return Eras(edits=tuple(filter(None, edits)), counts=eras.counts)


def check_changes(state: LoaderState, changed: Sequence[str], part: Part, earlier: EarlierRows | None) -> None:
    """Refuse changes of rows that would lose or repeat some.

    Args:
        state: Before the edit.
        changed: Streams of the state and of the part whose rows changed.
        part: Of the edited recipe.
        earlier: The rows that its sources and views have and had; None: not known, and only members are looked at.

    Raises:
        StateMismatch: Names the stream or the source, and what to do.
    """
    before = {stream.name: members_before(state, stream) for stream in state.streams if stream.name in changed}
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
            rows = earlier.num_rows(source)
            if rows != had.num_documents and rows_of(part.sources[source], rows) != (0, rows):
                raise StateMismatch(
                    f"source {source!r} has other rows than when the state was saved, and `documents` or `split` cuts "
                    f"it by their number: rows would move between training and validation. Restore its files"
                )


def _edit(
    state: LoaderState, changed: list[str], before: Mapping[str, Members], planner: Planner, eras: Eras
) -> tuple[StreamBefore, ...]:
    """Streams whose rows the edit changes; and those that come or go and share a source with one of these.

    A stream that has given all its epochs stands at the end of the last one, not before the next.
    """
    is_there = {stream.name for stream in state.streams}
    added = [name for name in planner.streams if name not in is_there]
    removed = [name for name in is_there if name not in planner.part.streams]
    row_sets = row_sets_of(planner.part)
    sources = {name: {row_sets[member].source for member, _ in planner.edits.members[name]} for name in planner.streams}
    left = {name: planner.edits.sources_of(before[name]) for name in removed}
    losing = set(chain.from_iterable(sources[name] for name in changed)) | set(chain.from_iterable(left.values()))
    gaining = {name for name in added if sources[name] & losing}
    giving = {name for name in removed if any(left[name] & sources[other] for other in (*changed, *gaining))}
    out = {one.name for one in state.decisions if one.kind == "ran_out"} - set(planner.streams)
    places = {stream.name: (stream.epoch, stream.window, stream.offset) for stream in state.streams}
    edit = []
    for name in sorted({*changed, *gaining, *giving}):
        epoch, window, offset = places.get(name, (0, 0, 0))
        has_given = name in out or planner.most_epochs.get(name, UNLIMITED_EPOCHS) <= epoch
        if has_given and epoch and (window, offset) == (0, 0):
            epoch -= 1
            window = planner.edits.num_windows_of(_still_known(eras, planner), before, name, epoch)
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


def _pool(
    state: LoaderState, planner: Planner, streams: Mapping[str, StreamState], edit: tuple[StreamBefore, ...]
) -> PoolState:
    """Pieces that stay, with the numbers that streams and sources have now.

    A piece whose row has gone to another stream goes with it, if it was drawn in the present epoch: that one does not
    give the row again in its own. A piece of an earlier epoch stays with the stream that drew it.
    """
    stream_number = {name: s for s, name in enumerate(planner.streams)}
    source_number = {name: s for s, name in enumerate(planner.sources)}
    names, touched = state.source_names, {one.name: one for one in edit}
    columns = [getattr(state.pool, name) for name in PoolState.__struct_fields__]
    columns[1] = columns[1] or columns[0]
    as_ever = {one.name for one in state.streams if one.name in stream_number and not one.era} - set(touched)
    rows: list[tuple[int, ...]] = []
    num_gone = num_denied = 0
    for values in zip(*columns, strict=True):
        name, source, epoch, row = state.streams[values[0]].name, names[values[1]], values[2], values[3]
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
                name, epoch = heirs[0], streams[heirs[0]].epoch
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
    staying: list[list[int]] = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(7)]
    kept = dict(zip(PoolState.__struct_fields__, staying, strict=True))
    if planner.streams_are_sources:
        kept["source"] = []
    return PoolState(**kept)


def _has(planner: Planner, stream: str, source: int, row: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> bool:
    return bool(planner.orders[planner.streams.index(stream)].space.holds(source, row)[0])


def _had(planner: Planner, before: StreamBefore, source: str, row: int) -> bool:
    """Whether a stream had a row before an edit."""
    if not before.members:
        return False
    rows = planner.edits.rows(before.name, before.members)
    return any(bool(rows.kept[name][row]) for name, of_source in rows.sources.items() if of_source == source)


# --- Edits of a recipe between a save and a load: what may change, the word that accepts it, and the state under it.
#
# An edit is accepted by its own word alone; streams that are in both recipes keep their places, what they owe and what
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

    word: str
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
    if not state.streams or state.edited_from:
        return None
    return RowFacts(streams={stream.name: stream.fingerprint for stream in state.streams}, denied=state.denied)


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
        accept_edit: The word of an edit; another recipe is refused without it.

    Raises:
        StateMismatch: Saved with another recipe; where that is an edit that can be accepted, the message has its word.
            Or rows changed that no edit may change.
    """
    if from_step_start:
        state = step_start(state)
    fingerprint = recipe_fingerprint(part)
    is_same = state.recipe == fingerprint
    changed = changed_rows(row_facts_of_state(state), rows)
    edit = edit_of(_identity(state), part, step=state.step, rows=changed)
    if not is_same and (not state.streams or edit.refused):
        raise other_recipe(state, part)
    is_accepted = accept_edit is not None and accept_edit[:_HALF] == edit.word[:_HALF]
    if rows is not None:
        is_accepted = is_accepted and accept_edit == edit.word
    if is_same and not changed and not is_accepted:
        return state
    deciding = dynamic_of(part) if state.shares else None
    if deciding is not None and sorted(state.shares) != list(deciding.children):
        raise StateMismatch(
            f"the policy of the run has given shares to {listed(sorted(state.shares), MOST_KEYS)}, and by this recipe "
            f"it decides those of {listed(deciding.children, MOST_KEYS)}: what it has learned is of other children. "
            f"Restore these at `dynamic.at`, or start a new run"
        )
    if rows is not None:
        check_changes(state, [name for name, *_ in changed if name], part, rows.earlier)
    if not is_accepted:
        given = f"accept_edit={accept_edit!r} accepts another edit. " if accept_edit is not None else ""
        saved = f"recipe {state.recipe}, this recipe is {fingerprint}" if not is_same else "other rows of this recipe"
        raise StateMismatch(
            f"{given}the state was saved with {saved}: {edit.text}. To go on from step {state.step} with this edit, "
            f"call load_state_dict(state, accept_edit={edit.word!r}); nothing that was given before comes again. "
            f"`torchmix plan RECIPE --state FILE --steps N --accept-edit {edit.word}` shows what would come"
        )
    return accepted(state, edit, fingerprint=fingerprint) if state.streams else state


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
        word=_half(f"torchmix-edit {before.recipe} {fingerprint}") + _half(f"torchmix-rows {json.dumps([*rows])}"),
        changed=tuple(key for key in differing if key in editable),
        added=tuple(sorted(now - was)),
        removed=tuple(sorted(was - now)),
        rows=tuple(name for name, *_ in rows),
        refused=tuple(key for key in differing if key not in allowed)
        or (() if before.recipe == fingerprint or before.digests else ("unknown keys",)),
    )


def _half(text: str) -> str:
    """Half a word: one for the recipes, which every rank knows, and one for rows, which only leaders know."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HALF]


def accepted(state: LoaderState, edit: Edit, *, fingerprint: str) -> LoaderState:
    """The state under the edited recipe, with the keys of that which its streams are of; see `edits.py`.

    Raises:
        StateMismatch: The state lies inside a step, which was planned before the edit.
    """
    if state.microbatch:
        raise StateMismatch(
            f"the state was saved inside step {state.step}, which was planned before the edit; go back to the start of "
            f"the step with load_state_dict(state, from_step_start=True, accept_edit={edit.word!r})"
        )
    return msgspec.structs.replace(state, recipe=fingerprint, edited_from=state.edited_from or state.recipe)


def _identity(state: LoaderState) -> Identity:
    return Identity(
        recipe=state.recipe,
        digests=state.recipe_keys,
        sources=state.source_names,
        is_dynamic=bool(state.log_branch),
    )
