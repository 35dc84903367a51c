"""A cursor -> the state that keeps it, and back.

A state of other streams, of other rows, or of a cursor that the planner cannot have made, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np

from torchmix.errors import StateError, StateMismatch
from torchmix.mixture.draw import Position
from torchmix.mixture.policy_log import LOG_START
from torchmix.mixture.shares import SHARE_ONE
from torchmix.planner.cursor import Cursor, Decided, gone_by
from torchmix.planner.drawing import NOT_DECIDED
from torchmix.planner.planner import Planner
from torchmix.recipe.build import listed
from torchmix.recipe.changes import dynamic_of
from torchmix.steps.edits import eras_of_state, members_of_state, reconciled
from torchmix.steps.state import (
    MAX_STEPS,
    MOST_KEYS,
    LoaderState,
    PoolState,
    StreamState,
    check_bad_tokens,
    check_catalog,
    check_cursor,
    check_step,
    pieces_of_columns,
)

logger = logging.getLogger(__name__)


def state_of_cursor(
    cursor: Cursor,
    planner: Planner,
    *,
    recipe: str,
    catalog: str,
    keys: bytes = b"",
    log_branch: str = "",
    decoder: str = "",
) -> LoaderState:
    """The state at the boundary before `cursor.step`; `log_branch`: where decisions are read."""
    at = cursor.position
    columns = np.stack([at.epoch, at.window, at.offset, at.debt, at.residue], axis=1).tolist()
    pool = {name: getattr(cursor.pool, name).tolist() for name in PoolState.__struct_fields__}
    of_streams = zip(planner.streams, columns, planner.fingerprints, strict=True)
    has_plain_streams = planner.streams_are_sources
    return LoaderState(
        recipe=recipe,
        recipe_keys=keys,
        catalog=catalog,
        step=cursor.step,
        microbatch=0,
        dp=planner.layout.dp,
        micro_batch_size=planner.layout.micro_batch_size,
        order_digest=cursor.order_digest,
        plan_digest=b"",
        streams=[
            StreamState(
                name=name,
                epoch=epoch,
                window=window,
                offset=offset,
                debt=debt,
                residue=residue,
                fingerprint=fingerprint,
                era=cursor.eras.counts.get(name, 0),
            )
            for name, (epoch, window, offset, debt, residue), fingerprint in of_streams
        ],
        drawn=cursor.drawn,
        pool=PoolState(**{**pool, "source": []} if has_plain_streams else pool),
        decisions=cursor.decisions,
        sources=[] if has_plain_streams else list(planner.sources),
        shares=dict(cursor.decided.shares),
        log_digest=bytes.fromhex(cursor.decided.digest) if cursor.decided.length else b"",
        log_length=cursor.decided.length,
        log_branch=log_branch,
        members=members_of_state(planner),
        eras=cursor.eras.edits,
        denied=planner.denied_fingerprint,
        decoder=decoder,
    )


def cursor_of_state(
    state: LoaderState, planner: Planner, *, catalog: str, is_stopped: Callable[[], bool] = lambda: False
) -> Cursor | None:
    """The cursor to plan `state.step` from; None if `is_stopped` ended the planning of the steps before it.

    Raises:
        StateMismatch: The state belongs to another catalog or other streams.
        StateError: A value that the planner cannot have come to; see `check_cursor`.
        SourceExhausted: The state names a step alone, and there is no data left for it.
    """
    if not state.streams:
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
    _check_streams(state, planner)
    cursor = recorded_cursor(state, planner)
    planner.enter(cursor.eras)
    planner.cut_for(cursor.step)
    check_cursor(cursor, planner)
    cursor = _with_more_epochs(cursor, planner)
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


def recorded_cursor(state: LoaderState, planner: Planner) -> Cursor:
    """The cursor of a state that has streams, which are the planner's; its values are not looked at.

    Raises:
        StateError: The pool has a row that does not exist.
    """
    pool = {name: np.array(getattr(state.pool, name), np.int64) for name in PoolState.__struct_fields__}
    if planner.streams_are_sources:
        pool["source"] = pool["stream"]
    return Cursor(
        step=state.step,
        position=Position(
            **{
                name: np.array([getattr(place, name) for place in state.streams], np.int64)
                for name in ("epoch", "window", "offset", "debt", "residue")
            }
        ),
        pool=pieces_of_columns(planner, **pool),
        order_digest=state.order_digest,
        decisions=state.decisions,
        drawn=state.drawn,
        decided=Decided(
            shares=state.shares or NOT_DECIDED, length=state.log_length, digest=state.log_digest.hex() or LOG_START
        ),
        eras=eras_of_state(state),
    )


def _check_streams(state: LoaderState, planner: Planner) -> None:
    """Refuse a state of other streams, or of streams with other rows.

    Raises:
        StateMismatch: Names them.
        StateError: Fields that only a run with edits or a policy has.
    """
    names, sources = [stream.name for stream in state.streams], list(planner.sources)
    if names != list(planner.streams):
        raise StateMismatch(f"the state has streams {names}, the recipe has {list(planner.streams)}")
    if state.sources != ([] if planner.streams_are_sources else sources):
        raise StateMismatch(f"the state has sources {state.source_names}, the recipe has {sources}")
    pairs = zip(state.streams, planner.fingerprints, strict=True)
    others = [stream.name for stream, fingerprint in pairs if stream.fingerprint != fingerprint]
    if others:
        raise StateMismatch(
            f"the state was saved when {listed(others, MOST_KEYS)} had other rows: files or selections changed; "
            f"restore them, or start a new run"
        )
    if state.denied != planner.denied_fingerprint:
        raise StateMismatch(
            "the state was saved with other deny-lists. To see what it has given, ask with the recipe of before; to go "
            "on with these, `torchmix diff OLD NEW --state FILE` prints the word for load_state_dict(accept_edit=...)"
        )
    deciding = dynamic_of(planner.part)
    if deciding is None and (state.shares or state.log_length):
        raise StateError("the state has decisions of a policy, which no run of this recipe has; use another checkpoint")
    if any(not 0 <= stream.era <= MAX_STEPS for stream in state.streams):
        raise StateError("the state has an era that no run comes to; use another checkpoint")
    if state.members != members_of_state(planner):
        raise StateMismatch("the state has flats of other members; the state is damaged, use another checkpoint")
    if deciding is not None and state.shares:
        is_whole = sum(state.shares.values()) == SHARE_ONE and min(state.shares.values()) >= 0
        if tuple(sorted(state.shares)) != deciding.children or not is_whole or not state.log_length:
            raise StateError("the state's shares are not those of a decision; use another checkpoint")
