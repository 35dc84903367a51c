"""A state under the recipe in use: as it is, edited with the code that accepts the edit, or refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import msgspec

from torchmix.catalog.earlier import EarlierRows
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog
from torchmix.errors import StateMismatch
from torchmix.mixture.windows import denied_fingerprint
from torchmix.parallel.place_tree import Layout
from torchmix.planner.entering import MOST_NAMES, check_changes
from torchmix.planner.stream_order import stream_fingerprint
from torchmix.recipe.build import listed
from torchmix.recipe.changes import dynamic_of
from torchmix.recipe.fingerprint import adds_stages, differing_keys, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.steps.state import LoaderState, check_catalog, check_layout, check_pass, other_recipe, step_start

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
        parts += [f"{listed(names, MOST_NAMES)} {what}" for names, what in self._sources() if names]
        streams = [name for name in self.rows if name]
        parts += [f"{listed(streams, MOST_NAMES)} with other rows"] if streams else []
        return "; ".join([*parts, *(["deny-lists changed"] if "" in self.rows else [])])

    def _sources(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        return (self.added, "added"), (self.removed, "removed")


class RowFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What rows the streams of a recipe in use have, by its catalog."""

    catalog: str
    """Fingerprint of the catalog."""
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
        catalog=catalog.fingerprint,
        streams={name: stream_fingerprint(stream, prints) for name, stream in part.streams.items()},
        denied=denied_fingerprint(catalog.denied_rows),
        earlier=EarlierRows(catalog, settings_of(part.sources, part.shuffle), part.name),
    )


def row_facts_of_state(state: LoaderState) -> RowFacts | None:
    """What rows the streams of a state have; None where it names none, or an edit was accepted that covers them."""
    if not state.is_planned or state.edited_from:
        return None
    rows = state.rows
    streams = dict(zip(rows.streams, rows.fingerprints, strict=True))
    return RowFacts(catalog=state.catalog, streams=streams, denied=rows.denied)


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
    layout: Layout | None = None,
    rows: RowFacts | None = None,
    from_step_start: bool = False,
    accept_edit: str | None = None,
) -> LoaderState:
    """The state that a loader of a part resumes from.

    Args:
        state: From `read_state`.
        part: In use.
        layout: In use; None: any, and the state is not looked at inside its step.
        rows: What its streams have now; None on ranks that open no catalog, where only recipes are compared.
        from_step_start: Go back to the start of the step that the state was saved in.
        accept_edit: The code of an edit; another recipe is refused without it.

    Raises:
        StateMismatch: Saved with another recipe; where that is an edit that can be accepted, the message has its code.
            Or rows changed that no edit may change; or the catalog differs otherwise, or inside a step the layout; or
            one of state and part is of a single pass, and the other is not.
        StateError: The step, its layout or the microbatch does not exist.
    """
    if from_step_start:
        state = step_start(state)
    state = _of_part(state, part, rows, accept_edit)
    if layout is not None:
        check_layout(state, part.batch, layout, has_runs=part.balance.context is not None)
    if rows is not None and not state.edited_from:  # after an edit each stream's own rows were compared
        check_catalog(state, rows.catalog)
    return state


def _of_part(state: LoaderState, part: Part, rows: RowFacts | None, accept_edit: str | None) -> LoaderState:
    """The state as one of the recipe and the rows in use."""
    fingerprint = recipe_fingerprint(part)
    is_same = state.recipe == fingerprint
    changed = changed_rows(row_facts_of_state(state), rows)
    edit = edit_of(_identity(state), part, step=state.step, rows=changed)
    if not is_same and (not state.is_planned or edit.refused):
        raise other_recipe(state, part)
    check_pass(state, part)
    is_accepted = isinstance(accept_edit, str) and accept_edit[:_HALF] == edit.code[:_HALF]
    if rows is not None:
        is_accepted = is_accepted and accept_edit == edit.code
    if is_same and not changed and not is_accepted:
        return state
    shares = state.at.decided.shares
    deciding = dynamic_of(part) if shares else None
    if deciding is not None and sorted(shares) != list(deciding.children):
        raise StateMismatch(
            f"the policy of the run has given shares to {listed(sorted(shares), MOST_NAMES)}, and by this recipe "
            f"it decides those of {listed(deciding.children, MOST_NAMES)}: what it has learned is of other children. "
            f"Restore these at `dynamic.at`, or start a new run"
        )
    if rows is not None:
        check_changes(state.rows, [name for name, *_ in changed if name], part, rows.earlier)
    if not is_accepted:
        given = f"accept_edit={accept_edit!r} accepts another edit. " if accept_edit is not None else ""
        saved = f"recipe {state.recipe}, this recipe is {fingerprint}" if not is_same else "other rows of this recipe"
        raise StateMismatch(
            f"{given}the state was saved with {saved}: {edit.text}. To resume from step {state.step} with this edit, "
            f"call load_state_dict(state, accept_edit={edit.code!r}), or give accept_edit to build_loader where a "
            f"trainer loads the state; nothing that was given before comes again. "
            f"`torchmix plan RECIPE --state FILE --steps N --accept-edit {edit.code}` shows what would come"
        )
    return accepted(state, edit, fingerprint=fingerprint) if state.is_planned else state


def edit_of(before: Identity, part: Part, *, step: int, rows: Sequence[Sequence[str]]) -> Edit:
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
