"""LoaderState: all that a run must keep of its data plane, as bytes.

In: a cursor, and how many microbatches of its step are consumed. Out: bytes for a checkpoint, the same on every rank;
and back. Must hold: no array of the catalog and nothing executable is in it; a state of another recipe, catalog or
format is refused by name. Size: about 1 KB, plus 50 bytes a stream and 15 bytes a deferred piece.

At a step's boundary (`microbatch` is 0) any layout may continue. Inside a step the consumed microbatches are those of
one placement, so only the same one may: (dp, micro_batch_size) is checked when a state is loaded, and the plan's digest
when the step comes. Going back to the boundary repeats these microbatches.

A state may also name a step alone: the boundary before it, to be planned from the beginning by whoever reads.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Annotated, Literal

import msgspec

from torchmix.errors import StateError, StateMismatch, StateVersion
from torchmix.parallel.layout import Layout
from torchmix.recipe.build import listed
from torchmix.recipe.fingerprint import differing_keys, key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import samples_of_step
from torchmix.recipe.structs import MAX_NAME_BYTES, Batch
from torchmix.steps.cursor_bounds import check_step

logger = logging.getLogger(__name__)

STATE_VERSION = 1
"""The one that is written and read: places of others are in another order of documents."""
_MAGIC = b"torchmix-state"
_DIGEST_BYTES = 8
MOST_KEYS = 5
"""Differing keys that an error names."""
MAX_STATE_BYTES = 32 << 20
"""Most bytes of an encoded state, which travels in the header of an exchange: about two million deferred pieces."""

_Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]
_Fingerprint = Annotated[str, msgspec.Meta(max_length=16)]
_Keys = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
_Digest = Annotated[bytes, msgspec.Meta(max_length=_DIGEST_BYTES)]


class StreamState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Where one stream stands; see `mixture.draw.Position`."""

    name: _Name
    epoch: _Int
    window: _Int
    offset: _Int
    debt: _Int
    residue: _Int
    fingerprint: _Fingerprint
    """A hash of its rows, see `planner.stream_order.stream_fingerprint`; empty where not known."""
    era: _Int
    """How often its rows were changed during the run."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Deferred pieces as columns; `stream` counts `LoaderState.streams`."""

    stream: list[_Int]
    source: list[_Int]
    """Counts `LoaderState.sources`; empty where that is left out, as each piece is of its stream's own source then."""
    epoch: list[_Int]
    row: list[_Int]
    start: list[_Int]
    tokens: list[_Int]
    drawn_step: list[_Int]


class DrawnState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of all draws; see `planner.asking.DrawnTokens`."""

    raw: _Int
    aligned: _Int


class EraState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A stream before an edit of its rows; see `planner.eras.records.StreamBefore`."""

    name: _Name
    epoch: _Int
    window: _Int
    offset: _Int
    members: list[tuple[_Name, _Fingerprint]]
    after: list[tuple[_Name, _Fingerprint]]


class DecisionState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A logged change of what holds; see `planner.cursor.Decision`."""

    step: _Int
    kind: Literal["ran_out", "stage"]
    name: _Name
    epochs: _Int = 0


class LoaderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The state of a loader, on every rank alike."""

    recipe: _Fingerprint
    """Fingerprint of the part of the recipe."""
    catalog: _Fingerprint
    """Fingerprint of the catalog; empty where nothing was planned yet."""
    step: _Int
    """The step to consume next, or the one being consumed."""
    microbatch: _Int
    """Microbatches of `step` that are consumed; 0 at a boundary."""
    dp: _Int
    micro_batch_size: _Int
    order_digest: _Digest
    """The digest of the steps before `step`; empty where nothing was planned yet."""
    plan_digest: _Digest
    """The digest of the plan of `step`, whose placement `microbatch` counts in; empty at a boundary."""
    streams: list[StreamState]
    """By sorted name; empty where nothing was planned yet: the steps before `step` are to be planned from 0."""
    drawn: DrawnState
    """Sums over all draws before `step`."""
    pool: PoolState
    decisions: list[DecisionState]
    sources: list[_Name] = []
    """Sorted names of the sources; left out where each stream is a source as it is."""
    bad_tokens: dict[_Name, _Int] = {}
    """Tokens of each source that could not be read in the steps before `step`; none is left out."""
    recipe_keys: _Keys = b""
    """Digests of the recipe's keys, to say which of them differs in another recipe; see `key_digests`."""
    shares: dict[_Name, _Int] = {}
    """Shares that a policy has given the children of its group, sum 2^32; empty while the schedule's hold."""
    log_digest: _Digest = b""
    """The digest of the records of the policy's log that these shares follow from; empty where there are none yet."""
    log_length: _Int = 0
    """Number of these records."""
    edited_from: _Fingerprint = ""
    """Fingerprint of the recipe whose streams these are, where an edit was accepted and no step planned since."""
    members: dict[_Name, list[tuple[_Name, _Fingerprint]]] = {}
    """Members of each flat, with the fingerprints of their rows."""
    eras: list[list[EraState]] = []
    """Edits of rows that still matter, in their order; empty without."""
    denied: _Fingerprint = ""
    """Fingerprint of the documents that deny-lists name; empty where there are none."""
    log_branch: _Fingerprint = ""
    """The branch of the log that they were read from, and that has the decisions which do not hold yet."""

    decoder: _Name = ""
    """The build that decodes images, see `transform.images.decode.decoder_id`; left out without images."""

    @property
    def source_names(self) -> list[str]:
        """Sorted names of the sources; empty where nothing was planned yet."""
        return self.sources or [stream.name for stream in self.streams]


def start_state(layout: Layout, *, recipe: str | Part, step: int = 0) -> LoaderState:
    """The state before a step, as its number alone, which needs no catalog to be known."""
    fingerprint, keys = _identity(recipe)
    return LoaderState(
        recipe=fingerprint,
        recipe_keys=key_digests(keys),
        catalog="",
        step=step,
        microbatch=0,
        dp=layout.dp,
        micro_batch_size=layout.micro_batch_size,
        order_digest=b"",
        plan_digest=b"",
        streams=[],
        drawn=DrawnState(raw=1, aligned=1),
        pool=PoolState(stream=[], source=[], epoch=[], row=[], start=[], tokens=[], drawn_step=[]),
        decisions=[],
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


def check_layout(state: LoaderState, batch: Batch, layout: Layout) -> None:
    """Refuse a state inside a step when the layout is another, or one that no layout has.

    Raises:
        StateMismatch: Says how to go back to the step's boundary.
        StateError: The step, its layout or the microbatch does not exist.
    """
    check_step(state.step)
    saved = Layout(dp=state.dp, micro_batch_size=state.micro_batch_size)
    num_samples, row = samples_of_step(batch, state.step), saved.row_samples
    if min(saved.dp, saved.micro_batch_size) < 1 or num_samples % row or not 0 <= state.microbatch < num_samples // row:
        raise StateError(
            f"the state has {state.microbatch} consumed microbatches of {saved} in step {state.step}, which has "
            f"{num_samples} samples: the state is damaged, use another checkpoint"
        )
    if state.microbatch and saved != layout:
        raise StateMismatch(
            f"the state was saved inside step {state.step}, after {state.microbatch} microbatches of {saved}; this job "
            f"has {layout}. Resume with the same sizes, or go back to the start of step {state.step} (its microbatches "
            f"come again) with load_state_dict(state, from_step_start=True)"
        )


def step_start(state: LoaderState) -> LoaderState:
    """The state before the first microbatch of its step, where any layout may go on."""
    return msgspec.structs.replace(state, microbatch=0, plan_digest=b"")


def encode_state(state: LoaderState) -> bytes:
    """Bytes of a state: a magic word, the version, a digest, msgpack."""
    body = msgspec.msgpack.encode(state)
    return _MAGIC + bytes([STATE_VERSION]) + hashlib.sha256(body).digest()[:_DIGEST_BYTES] + body


def decode_state(data: bytes, *, recipe: str | Part) -> LoaderState:
    """Read bytes of `encode_state`, from a file that may be anything.

    Args:
        data: The bytes.
        recipe: The part of the recipe in use; or its fingerprint, then an error does not say which key differs.

    Raises:
        StateVersion: Another version of the format.
        StateMismatch: Saved with another recipe.
        StateError: Not a state, or damaged.
    """
    state = read_state(data)
    if state.recipe != (recipe if isinstance(recipe, str) else recipe_fingerprint(recipe)):
        raise other_recipe(state, recipe)
    return state


_decode_loader_state = msgspec.msgpack.Decoder(LoaderState).decode


def read_state(data: bytes) -> LoaderState:
    """A state of any recipe.

    Raises:
        StateVersion: Another version of the format.
        StateError: Not a state, or damaged.
    """
    head = len(_MAGIC) + 1
    if len(data) > MAX_STATE_BYTES:
        raise StateError(f"{len(data)} bytes are no torchmix state, which has at most {MAX_STATE_BYTES}")
    if not data.startswith(_MAGIC) or len(data) < head + _DIGEST_BYTES:
        raise StateError(
            f"{len(data)} bytes that are no torchmix state; pass what state_dict() returned; a file for --state holds "
            f"the bytes of its 'torchmix_state', and nothing else"
        )
    if data[head - 1] != STATE_VERSION:
        raise StateVersion(
            f"the state has format version {data[head - 1]}, this torchmix reads version {STATE_VERSION} and gives "
            f"documents in another order than other versions; resume with the torchmix that saved it"
        )
    digest, body = data[head : head + _DIGEST_BYTES], data[head + _DIGEST_BYTES :]
    if hashlib.sha256(body).digest()[:_DIGEST_BYTES] != digest:
        raise StateError("the state's bytes are damaged (their digest differs); use another checkpoint")
    try:
        state = _decode_loader_state(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateError(f"the state does not decode: {error}; use another checkpoint") from error
    _check_parts(state)
    return state


def other_recipe(state: LoaderState, recipe: str | Part) -> StateMismatch:
    """The error for a state of another recipe: it says which keys differ, where `recipe` is a part."""
    fingerprint, keys = _identity(recipe)
    differing = []
    if keys:
        is_dynamic = bool(state.log_branch)
        differing = differing_keys(keys, state.recipe_keys, state.source_names, is_dynamic=is_dynamic)
    what = "something that decides the order differs (seed, batch, sources' columns, shares, packing or shuffle)"
    if differing:
        gone = "gone" if state.streams else "others"
        now = [f"{name} (now {_cut(keys.get(name, gone))})" for name in differing]
        what = f"of what decides the order, these keys differ: {listed(now, MOST_KEYS)}"
    return StateMismatch(
        f"the state was saved with recipe {state.recipe}, this recipe is {fingerprint}: {what}. Restore that, or "
        f"see by `torchmix diff OLD NEW --state FILE` whether the run may go on with this edit, or start a new run"
    )


def _identity(recipe: str | Part) -> tuple[str, dict[str, str]]:
    return (recipe, {}) if isinstance(recipe, str) else (recipe_fingerprint(recipe), recipe_keys(recipe))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_parts(state: LoaderState) -> None:
    """Refuse a state some of whose fields belong to a state of another kind."""
    is_planned = bool(state.streams)
    faults = {
        "catalog": len(state.catalog) != (16 if is_planned else 0),
        "order_digest": len(state.order_digest) != (_DIGEST_BYTES if is_planned else 0),
        "plan_digest": len(state.plan_digest) != (_DIGEST_BYTES if state.microbatch else 0),
        "pool": bool(state.pool.row) and not is_planned,
        "decisions": bool(state.decisions) and not is_planned,
        "bad_tokens": not state.bad_tokens.keys() <= set(state.source_names),
        "sources": bool(state.sources) and not is_planned,
        "eras": bool(state.eras or state.members) and not is_planned,
        "shares": bool(state.shares or state.log_length) and not is_planned,
        "log_digest": bool(state.log_length) != bool(state.log_digest) or not 0 <= state.log_length <= state.step,
    }
    wrong = [name for name, is_wrong in faults.items() if is_wrong]
    if wrong:
        raise StateError(
            f"the state has {len(state.streams)} streams and {state.microbatch} consumed microbatches, and its "
            f"{', '.join(wrong)} {'does' if len(wrong) == 1 else 'do'} not fit that; the state is damaged, use another "
            f"checkpoint"
        )
