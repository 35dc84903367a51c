"""LoaderState: all that a run must keep of its data plane, as bytes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Annotated

import msgspec

from torchmix.array_types import Int64
from torchmix.errors import StateError, StateMismatch, StateVersion
from torchmix.mixture.draw import Position
from torchmix.mixture.policy_log import LOG_START
from torchmix.modalities.table import MOST_DECODER
from torchmix.parallel.place_tree import Layout
from torchmix.planner.cursor import (
    UNDECIDED,
    Cursor,
    Digest,
    Fingerprint,
    Name,
    RunRows,
    column_bytes,
    column_of_bytes,
)
from torchmix.planner.entering import MOST_NAMES, check_step
from torchmix.planner.planner import Planner
from torchmix.recipe.build import listed
from torchmix.recipe.fingerprint import differing_keys, key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import samples_of_step
from torchmix.recipe.structs import Batch

# --- LoaderState: all that a run must keep of its data plane, as bytes.
#
# No array of the catalog and nothing executable is in it; a state of another recipe, catalog or format is refused by
# name. Size: about 1 KB, plus 75 bytes a stream and 56 bytes a deferred piece.
#
# At a step's boundary (`microbatch` is 0) any layout may continue. Inside a step the consumed microbatches are those
# of one placement, so only the same one may: (dp, micro_batch_size) is checked when a state is loaded, and the plan's
# digest when the step comes. Going back to the boundary repeats these microbatches.
#
# A state may also name a step alone: the boundary before it, to be planned from the beginning by whoever reads.

logger = logging.getLogger(__name__)

STATE_VERSION = 1
"""The one that is written and read: places of others are in another order of documents."""
_MAGIC = b"torchmix-state"
_DIGEST_BYTES = 8
MAX_STATE_BYTES = 32 << 20
"""Most bytes of an encoded state, which travels in the header of an exchange: about 600,000 deferred pieces."""

_Keys = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class LoaderState(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True, omit_defaults=True):
    """The state of a loader, on every rank alike."""

    recipe: Fingerprint
    """Fingerprint of the part of the recipe."""
    catalog: Fingerprint
    """Fingerprint of the catalog; empty where nothing was planned yet."""
    dp: Int64
    micro_batch_size: Int64
    at: Cursor
    """Where the run stands before the step to consume next, or the one being consumed."""
    rows: RunRows = RunRows()
    """Whose rows; left out where nothing was planned yet: the steps before that of `at` are to be planned from 0."""
    microbatch: Int64 = 0
    """Microbatches of the step that are consumed; 0 at a boundary."""
    plan_digest: Digest = b""
    """The digest of the plan of the step, whose placement `microbatch` counts in; empty at a boundary."""
    bad_tokens: dict[Name, Int64] = {}
    """Tokens of each source that could not be read in the steps before; none is left out."""
    one_pass: bool = False
    """Whether it is of a single pass, which has other steps than a run that goes round its sources."""
    recipe_keys: _Keys = b""
    """Digests of the recipe's keys, to say which of them differs in another recipe; see `key_digests`."""
    edited_from: Fingerprint = ""
    """Fingerprint of the recipe whose streams these are, where an edit was accepted and no step planned since."""
    log_branch: Fingerprint = ""
    """The branch of a policy's log that decisions were read from, and that has those which do not hold yet."""
    decoder: Annotated[str, msgspec.Meta(max_length=MOST_DECODER)] = ""
    """What decodes items, see `modalities.table.decoder_of`; left out without items."""

    @property
    def step(self) -> int:
        """The step to consume next, or the one being consumed."""
        return self.at.step

    @property
    def order_digest(self) -> bytes:
        """The digest of the steps before `step`; empty where nothing was planned yet."""
        return self.at.order_digest

    @property
    def is_planned(self) -> bool:
        """Whether it says where each stream stands; else it names a step alone."""
        return bool(self.rows.streams)


class StateToAsk:
    """A state that is made, written or read when somebody asks for it, and then kept.

    A step carries one, so a step whose state nobody saves costs no encoding where it stays in its process, and no
    decoding elsewhere.
    """

    __slots__ = ("_data", "_make", "_state")

    def __init__(self, make: Callable[[], LoaderState]) -> None:
        """`make`: called at most once, by whoever asks first."""
        self._make: Callable[[], LoaderState] | None = make
        self._state: LoaderState | None = None
        self._data = b""

    @staticmethod
    def of(state: LoaderState) -> StateToAsk:
        """One that is made."""
        return StateToAsk(lambda: state)

    @staticmethod
    def of_data(data: bytes) -> StateToAsk:
        """One that came from another process of the job, as its `data`."""
        found = StateToAsk(lambda: _decode_loader_state(data))
        found._data = data
        return found

    def __reduce__(self) -> tuple[Callable[[bytes], StateToAsk], tuple[bytes]]:
        """A worker of torch's sends what it gives: then the bytes go, and not what makes the record."""
        return StateToAsk.of_data, (self.data,)

    @property
    def state(self) -> LoaderState:
        """The record."""
        make = self._make  # another thread may have asked meanwhile
        if self._state is None and make is not None:
            self._state = make()
            self._make = None
        assert self._state is not None, "it is kept before `make` goes"
        return self._state

    @property
    def data(self) -> bytes:
        """Its msgpack, without what `encode_state` writes before it."""
        self._data = self._data or _encode_loader_state(self.state)
        return self._data


def start_state(layout: Layout, *, recipe: str | Part, step: int = 0) -> LoaderState:
    """The state before a step, as its number alone, which needs no catalog to be known."""
    fingerprint, keys = _identity(recipe)
    return LoaderState(
        recipe=fingerprint,
        recipe_keys=key_digests(keys),
        one_pass=isinstance(recipe, Part) and recipe.one_pass,
        catalog="",
        dp=layout.dp,
        micro_batch_size=layout.micro_batch_size,
        at=Cursor.of_step(step),
    )


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
    """The state at the boundary before `cursor.step`; `log_branch`: where decisions are read. Cost: two records."""
    return LoaderState(
        recipe=recipe,
        recipe_keys=keys,
        catalog=catalog,
        dp=planner.layout.dp,
        micro_batch_size=planner.layout.micro_batch_size,
        at=cursor.without_catalog(),
        rows=planner.rows,
        one_pass=planner.part.one_pass,
        log_branch=log_branch,
        decoder=decoder,
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


def check_pass(state: LoaderState, part: Part) -> None:
    """Refuse a state of a single pass in a run, and one of a run in a single pass; fingerprints cover no epochs.

    Raises:
        StateMismatch: Says how to go on.
    """
    if state.one_pass and not part.one_pass:
        raise StateMismatch(
            f"the state of step {state.step} is of a single pass, and this is a run that goes round its sources: go on "
            "with one_pass=True (`torchmix plan --one-pass`), or begin the run without this state"
        )
    if part.one_pass and not state.one_pass:
        raise StateMismatch(
            f"the state of step {state.step} is of a run, and one_pass=True (--one-pass) gives each document once from "
            "the beginning on: leave it out, or begin the pass without this state. For a run of training to end with "
            "the first epoch of its sources, give them `max_epochs: 1` and `on_exhausted: renormalise`, and resume it"
        )


def check_layout(state: LoaderState, batch: Batch, layout: Layout, *, has_runs: bool = False) -> None:
    """Refuse a state inside a step when the layout is another, or one that no layout has.

    Args:
        state: To resume from.
        batch: The recipe's.
        layout: In use.
        has_runs: Whether samples have runs of ranks: then how many microbatches a step has is known with its plan.

    Raises:
        StateMismatch: Says how to go back to the step's boundary.
        StateError: The step, its layout or the microbatch does not exist.
    """
    check_step(state.step)
    saved = Layout(dp=state.dp, micro_batch_size=state.micro_batch_size)
    num_samples, row = samples_of_step(batch, state.step), saved.row_samples
    is_of_plan = has_runs and state.microbatch >= 0
    # Masked samples fill the last microbatch of an elastic job, so each layout has a first one.
    exists = min(saved.dp, saved.micro_batch_size) >= 1 and (
        is_of_plan or 0 <= state.microbatch < -(-num_samples // row)
    )
    if not exists:
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
    """The state before the first microbatch of its step, where any layout may continue."""
    return msgspec.structs.replace(state, microbatch=0, plan_digest=b"")


def encode_state(state: LoaderState) -> bytes:
    """Bytes of a state: a magic word, the version, a digest, msgpack."""
    body = _encode_loader_state(state)
    return _MAGIC + bytes([STATE_VERSION]) + hashlib.sha256(body).digest()[:_DIGEST_BYTES] + body


def is_state(data: bytes) -> bool:
    """Whether bytes begin as those of a state."""
    return data.startswith(_MAGIC)


def decode_state(data: bytes, *, recipe: str | Part) -> LoaderState:
    """Read bytes of `encode_state`, from a file that may be anything.

    Args:
        data: The bytes.
        recipe: The part of the recipe in use; or its fingerprint, then an error does not say which key differs.

    Raises:
        StateVersion: Another version of the format.
        StateMismatch: Saved with another recipe; or `recipe` is a part, and the state one of a single pass, or not, as
            the part is not.
        StateError: Not a state, or damaged.
    """
    state = read_state(data)
    if state.recipe != (recipe if isinstance(recipe, str) else recipe_fingerprint(recipe)):
        raise other_recipe(state, recipe)
    if isinstance(recipe, Part):
        check_pass(state, recipe)
    return state


_encode_loader_state = msgspec.msgpack.Encoder(enc_hook=column_bytes).encode
_decode_loader_state = msgspec.msgpack.Decoder(LoaderState, dec_hook=column_of_bytes).decode
decode_cursor = msgspec.msgpack.Decoder(Cursor, dec_hook=column_of_bytes).decode
"""A cursor of a state, as msgpack has it."""


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
        of_torch = data.startswith(b"PK\x03\x04")
        raise StateError(
            f"{len(data)} bytes that are no torchmix state; pass what state_dict() returned; a file for --state holds "
            "the bytes of its 'torchmix_state', and nothing else"
            + ("; this one is of torch.save, take them out of it: docs/operations.md#checkpoints" if of_torch else "")
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
        differing = differing_keys(keys, state.recipe_keys, state.rows.source_names, is_dynamic=is_dynamic)
    what = "something that decides the order differs (seed, batch, sources' columns, shares, packing or shuffle)"
    if differing:
        gone = "gone" if state.is_planned else "others"
        now = [f"{name} ({_of_source(name)}now {_cut(keys.get(name, gone))})" for name in differing]
        what = f"of what decides the order, these keys differ: {listed(now, MOST_NAMES)}"
    return StateMismatch(
        f"the state was saved with recipe {state.recipe}, this recipe is {fingerprint}: {what}. Restore that, or "
        f"see by `torchmix diff OLD NEW --state FILE` whether the run may resume with this edit, or start a new run"
    )


def _identity(recipe: str | Part) -> tuple[str, dict[str, str]]:
    return (recipe, {}) if isinstance(recipe, str) else (recipe_fingerprint(recipe), recipe_keys(recipe))


def _of_source(key: str) -> str:
    """What the values of a source are, which stand there without their names."""
    return "its column, tokenizer, map, fim, packing, items, format, documents; " if key.startswith("sources.") else ""


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_decided(at: Cursor) -> bool:
    """Whether shares and digest of what a policy has decided are those of so many records."""
    length, digest = at.decided.length, at.decided.digest
    if not length:
        return not at.decided.shares and digest == LOG_START
    return 0 < length <= at.step and len(digest) == len(LOG_START) and not set(digest) - set("0123456789abcdef")


def _check_parts(state: LoaderState) -> None:
    """Refuse a state some of whose fields belong to a state of another kind."""
    is_planned, at, rows = state.is_planned, state.at, state.rows
    num_streams = len(rows.streams)
    places = (getattr(at.position, name) for name in Position.__struct_fields__)
    faults = {
        "catalog": len(state.catalog) != (16 if is_planned else 0),
        "order_digest": len(at.order_digest) != (_DIGEST_BYTES if is_planned else 0),
        "plan_digest": len(state.plan_digest) != (_DIGEST_BYTES if state.microbatch else 0),
        "position": any(len(column) != num_streams for column in places),
        "fingerprints": len(rows.fingerprints) != num_streams,
        "pool": bool(len(at.pool)) and not is_planned,
        "document_tokens": bool(len(at.pool.document_tokens)),
        "decisions": bool(at.decisions) and not is_planned,
        "bad_tokens": not state.bad_tokens.keys() <= set(rows.source_names),
        "sources": bool(rows.sources) and not is_planned,
        "eras": bool(at.eras.edits or at.eras.counts or rows.members) and not is_planned,
        "decided": not _is_decided(at) if is_planned else at.decided != UNDECIDED,
    }
    wrong = [name for name, is_wrong in faults.items() if is_wrong]
    if wrong:
        raise StateError(
            f"the state has {num_streams} streams and {state.microbatch} consumed microbatches, and its "
            f"{', '.join(wrong)} {'does' if len(wrong) == 1 else 'do'} not fit that; the state is damaged, use another "
            f"checkpoint"
        )
