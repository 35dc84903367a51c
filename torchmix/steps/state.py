"""LoaderState: all that a run must keep of its data plane, as bytes.

In: a cursor, and how many microbatches of its step are consumed. Out: bytes for a checkpoint, the same on every rank;
and back. Must hold: no array of the catalog and nothing executable is in it; a state of another recipe, catalog or
format is refused by name. Size: about 1 KB, plus 30 bytes a source and 15 bytes a deferred piece.

At a step's boundary (`microbatch` is 0) any layout may continue. Inside a step the consumed microbatches are those of
one placement, so only the same one may: (dp, micro_batch_size) is checked when a state is loaded, and the plan's digest
when the step comes. Going back to the boundary repeats these microbatches.

A state may also name a step alone: the boundary before it, to be planned from the beginning by whoever reads.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import StateError, StateMismatch, StateVersion
from torchmix.mixture.draw import Position
from torchmix.mixture.order import SourceOrder
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import Cursor, Decision, Planner

logger = logging.getLogger(__name__)

STATE_VERSION = 1
"""The one that is written and read: places of others are in another order of documents."""
_MAGIC = b"torchmix-state"
_DIGEST_BYTES = 8


class SourceState(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where one source stands; see `mixture.draw.Position`."""

    name: str
    epoch: int
    window: int
    offset: int
    debt: int
    residue: int


class PoolState(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Deferred pieces as columns; `source` counts `LoaderState.sources`."""

    source: list[int]
    epoch: list[int]
    row: list[int]
    start: list[int]
    tokens: list[int]
    drawn_step: list[int]


class DecisionState(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A logged change of shares: `source` ran out in `step`."""

    step: int
    source: str


class LoaderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a loader, on every rank alike."""

    recipe: str
    """Fingerprint of the recipe."""
    catalog: str
    """Fingerprint of the catalog; empty where nothing was planned yet."""
    step: int
    """The step to consume next, or the one being consumed."""
    microbatch: int
    """Microbatches of `step` that are consumed; 0 at a boundary."""
    dp: int
    micro_batch_size: int
    order_digest: bytes
    """Of the steps before `step`; empty where nothing was planned yet."""
    plan_digest: bytes
    """Of `step`, whose placement `microbatch` counts in; empty at a boundary."""
    sources: list[SourceState]
    """By sorted name; empty where nothing was planned yet: the steps before `step` are to be planned from 0."""
    pool: PoolState
    decisions: list[DecisionState]


def start_state(*, recipe: str, dp: int, micro_batch_size: int, step: int = 0) -> LoaderState:
    """The state before a step, as its number alone, which needs no catalog to be known."""
    return LoaderState(
        recipe=recipe,
        catalog="",
        step=step,
        microbatch=0,
        dp=dp,
        micro_batch_size=micro_batch_size,
        order_digest=b"",
        plan_digest=b"",
        sources=[],
        pool=PoolState(source=[], epoch=[], row=[], start=[], tokens=[], drawn_step=[]),
        decisions=[],
    )


def state_of_cursor(cursor: Cursor, planner: Planner, *, recipe: str, catalog: str) -> LoaderState:
    """The state at the boundary before `cursor.step`."""
    at = cursor.position
    columns = np.stack([at.epoch, at.window, at.offset, at.debt, at.residue], axis=1).tolist()
    pool = cursor.pool
    return LoaderState(
        recipe=recipe,
        catalog=catalog,
        step=cursor.step,
        microbatch=0,
        dp=planner.dp,
        micro_batch_size=planner.micro_batch_size,
        order_digest=cursor.order_digest,
        plan_digest=b"",
        sources=[
            SourceState(name=name, epoch=epoch, window=window, offset=offset, debt=debt, residue=residue)
            for name, (epoch, window, offset, debt, residue) in zip(planner.sources, columns, strict=True)
        ],
        pool=PoolState(**{name: getattr(pool, name).tolist() for name in PoolState.__struct_fields__}),
        decisions=[DecisionState(step=d.step, source=d.source) for d in cursor.decisions],
    )


def cursor_of_state(
    state: LoaderState, planner: Planner, *, catalog: str, is_stopped: Callable[[], bool] = lambda: False
) -> Cursor | None:
    """The cursor to plan `state.step` from; None if it was told to stop before it had planned the steps up to there.

    Raises:
        StateMismatch: The state belongs to another catalog or other sources.
        StateError: A position lies outside its source.
        SourceExhausted: The state names a step alone, and there is no data left for it.
    """
    if not state.sources:
        cursor = planner.start()
        if state.step:
            logger.info("planning %d steps, to begin at step %d", state.step, state.step)
        while cursor.step < state.step:
            if is_stopped():
                return None
            cursor = planner.skip(cursor)
        return cursor
    check_catalog(state, catalog)
    by_name = {source.name: source for source in state.sources}
    if sorted(by_name) != list(planner.sources):
        raise StateMismatch(f"the state has sources {sorted(by_name)}, the recipe has {list(planner.sources)}")
    index_of_source = {name: s for s, name in enumerate(planner.sources)}
    index = np.array([index_of_source[source.name] for source in state.sources], np.int64)
    ordered = [by_name[name] for name in planner.sources]
    pool = {name: np.array(getattr(state.pool, name), np.int64) for name in PoolState.__struct_fields__}
    try:
        source = index[pool["source"]]
        document_tokens = _document_tokens(planner, source, pool["row"])
        if np.stack(list(pool.values())).min(initial=0) < 0 or (pool["start"] + pool["tokens"] > document_tokens).any():
            raise IndexError
    except (IndexError, ValueError):
        raise StateError("the state's pool holds a piece that does not exist; the state is damaged") from None
    for place, order in zip(ordered, planner.orders, strict=True):
        _check_place(place, order)
    return Cursor(
        step=state.step,
        position=Position(
            **{
                name: np.array([getattr(place, name) for place in ordered], np.int64)
                for name in ("epoch", "window", "offset", "debt", "residue")
            }
        ),
        pool=Pieces(**{**pool, "source": source}, document_tokens=document_tokens),
        order_digest=state.order_digest,
        decisions=tuple(Decision(step=d.step, source=d.source) for d in state.decisions),
    )


def check_catalog(state: LoaderState, catalog: str) -> None:
    """Refuse a state that was saved with another catalog.

    Raises:
        StateMismatch: With both fingerprints.
    """
    if state.catalog and state.catalog != catalog:
        raise StateMismatch(
            f"the state was saved with catalog {state.catalog}, this catalog is {catalog}: files were added, removed "
            f"or changed, or their windows were; restore the catalog's folder of that run, or start a new run"
        )


def _check_place(place: SourceState, order: SourceOrder) -> None:
    """Refuse a position that the source does not have."""
    is_inside = 0 <= place.epoch < 1 << 62 and 0 <= place.window < order.num_windows and 0 <= place.residue < 1 << 32
    if not is_inside or not 0 <= place.offset < max(1, order.num_rows(place.epoch, place.window)):
        raise StateError(
            f"the state stands at epoch {place.epoch}, window {place.window}, offset {place.offset}, residue "
            f"{place.residue} of source {place.name!r}, which has {order.num_windows} windows: the state is damaged"
        )


def check_layout(state: LoaderState, *, dp: int, micro_batch_size: int) -> None:
    """Refuse a state inside a step when the layout is another.

    Raises:
        StateMismatch: Says how to go back to the step's boundary.
    """
    if state.microbatch and (state.dp, state.micro_batch_size) != (dp, micro_batch_size):
        raise StateMismatch(
            f"the state was saved inside step {state.step}, after {state.microbatch} microbatches of dp {state.dp} x "
            f"micro_batch_size {state.micro_batch_size}; this job has dp {dp} x micro_batch_size {micro_batch_size}. "
            f"Resume with the same sizes, or go back to the start of step {state.step} (its microbatches come again) "
            f"with load_state_dict(state, from_step_start=True)"
        )


def step_start(state: LoaderState) -> LoaderState:
    """The state before the first microbatch of its step, where any layout may go on."""
    return msgspec.structs.replace(state, microbatch=0, plan_digest=b"")


def encode_state(state: LoaderState) -> bytes:
    """Bytes of a state: a magic word, the version, a digest, msgpack."""
    body = msgspec.msgpack.encode(state)
    return _MAGIC + bytes([STATE_VERSION]) + hashlib.sha256(body).digest()[:_DIGEST_BYTES] + body


def decode_state(data: bytes, *, recipe: str) -> LoaderState:
    """Read bytes of `encode_state`, from a file that may be anything.

    Args:
        data: The bytes.
        recipe: Fingerprint of the recipe in use.

    Raises:
        StateVersion: Another version of the format.
        StateMismatch: Saved with another recipe.
        StateError: Not a state, or damaged.
    """
    head = len(_MAGIC) + 1
    if not data.startswith(_MAGIC) or len(data) < head + _DIGEST_BYTES:
        raise StateError(f"{len(data)} bytes that are no torchmix state; pass what state_dict() returned")
    if data[head - 1] != STATE_VERSION:
        raise StateVersion(
            f"the state has format version {data[head - 1]}, this torchmix reads version {STATE_VERSION} and gives "
            f"documents in another order than other versions; resume with the torchmix that saved it"
        )
    digest, body = data[head : head + _DIGEST_BYTES], data[head + _DIGEST_BYTES :]
    if hashlib.sha256(body).digest()[:_DIGEST_BYTES] != digest:
        raise StateError("the state's bytes are damaged (their digest differs); use another checkpoint")
    try:
        state = msgspec.msgpack.decode(body, type=LoaderState)
    except msgspec.MsgspecError as error:
        raise StateError(f"the state does not decode: {error}; use another checkpoint") from error
    if min(state.step, state.microbatch) < 0:
        raise StateError(f"the state holds step {state.step}, microbatch {state.microbatch}; it is damaged")
    if state.recipe != recipe:
        raise StateMismatch(
            f"the state was saved with recipe {state.recipe}, this recipe is {recipe}: something that decides the "
            f"order differs (seed, batch, sources' columns, shares, packing or shuffle); restore it, or start anew"
        )
    return state


def _document_tokens(planner: Planner, source: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
    tokens = np.empty(len(row), np.int64)
    for s in np.unique(source).tolist():
        mine = source == s
        tokens[mine] = planner.orders[s].sizes.tokens[row[mine]]
    return tokens
