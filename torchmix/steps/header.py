"""What travels with a step's tensors: its digests, the state after it, and a report.

With a step's header any rank can answer `state_dict()` and `stats()`, and tell whether the step is the one that its own
state waits for. Between threads it is the record; between processes bytes, about as many as of the state, in which the
state stays as it is until somebody asks for it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from torchmix.errors import StateMismatch
from torchmix.parallel.place_tree import Layout
from torchmix.planner.cursor import column_bytes
from torchmix.planner.plan import StepPlan
from torchmix.steps.state import LoaderState, StateToAsk, decode_cursor, other_recipe


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step, for logs."""

    tokens_of_source: bytes
    """int64 [S], little-endian: delivered tokens of each source, by sorted name; padding not counted."""
    tokens_of_stream: bytes
    """Likewise of each stream."""
    delivered_tokens: int
    """The sum over sources."""
    squared_tokens: int
    """The sum of the squares of the tokens of pieces, which attention costs."""
    capacity_tokens: int
    balance_cost: int
    hash_order_cost: int
    lower_bound: int
    plan_s: float
    """Time to plan the step."""
    read_s: float
    """Time to read and decode this replica's pieces."""
    build_s: float
    """Time to fill this replica's tensors."""
    reading: dict[str, int | float]
    """The leader's reader since it started; see `Reader.stats`."""


class StepHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step, less its tensors."""

    step: int
    order_digest: bytes
    plan_digest: bytes
    recipe: str
    """Fingerprint of the part of the recipe."""
    dp: int
    """Replicas that the step is placed on."""
    micro_batch_size: int
    """Samples of a microbatch."""
    first_microbatch: int
    """Where the leader begins in the step: not 0 where it loaded a state inside it."""
    after: StateToAsk
    """The state at the boundary after this step."""
    report: StepReport
    num_masked_tokens: int = 0
    """Tokens that the plan counts in the loss, and that have none because of reading: of all replicas."""
    num_unlabelled: int = 0
    """Where replicas are apart, tokens of all replicas that have no label, as the index knows; 0 elsewhere."""
    bad_tokens: dict[str, int] = {}
    """Tokens of each source that could not be read: on their way to a leader those of its part of this step; from the
    leader those of all replicas, up to this step."""
    most_bad_tokens: dict[str, int] = {}
    """How many may be, up to this step, of each source that masks bad rows."""

    def sources(self) -> tuple[str, ...]:
        """Sorted names of where rows lie."""
        return self.after.state.rows.source_names


def header_of(
    plan: StepPlan,
    after: StateToAsk,
    *,
    recipe: str,
    layout: Layout,
    first_microbatch: int,
    plan_s: float,
    read_s: float,
    build_s: float,
    reading: dict[str, int | float],
    num_unlabelled: int = 0,
    bad_tokens: dict[str, int] | None = None,
    most_bad_tokens: dict[str, int] | None = None,
) -> StepHeader:
    """The header of a step; arguments as its fields.

    Args:
        recipe: Fingerprint of the part of the recipe.
        layout: What its samples are placed on.
    """
    balance, tokens = plan.balance, plan.pieces.tokens
    return StepHeader(
        step=plan.step,
        order_digest=plan.order_digest,
        plan_digest=plan.plan_digest,
        recipe=recipe,
        dp=layout.dp,
        micro_batch_size=layout.micro_batch_size,
        first_microbatch=first_microbatch,
        after=after,
        report=StepReport(
            tokens_of_source=plan.tokens_of_source().astype("<i8", copy=False).tobytes(),
            tokens_of_stream=plan.delivered_tokens.astype("<i8", copy=False).tobytes(),
            delivered_tokens=int(plan.delivered_tokens.sum()),
            squared_tokens=int(tokens @ tokens),
            capacity_tokens=plan.capacity_tokens,
            balance_cost=balance.cost,
            hash_order_cost=balance.hash_order_cost,
            lower_bound=balance.lower_bound,
            plan_s=plan_s,
            read_s=read_s,
            build_s=build_s,
            reading=reading,
        ),
        num_unlabelled=num_unlabelled,
        bad_tokens=bad_tokens or {},
        most_bad_tokens=most_bad_tokens or {},
    )


# --- A header on its way to another process.


def encode_header(header: StepHeader) -> bytes:
    """Bytes of a header."""
    return _encode_step_header(header)


def _data_of(value: Any) -> bytes:
    assert isinstance(value, StateToAsk), f"{type(value).__name__} is no part of a header"
    return value.data


def _of_data(kind: Any, value: Any) -> StateToAsk:
    return StateToAsk.of_data(value)


_encode_step_header = msgspec.msgpack.Encoder(enc_hook=_data_of).encode
_decode_step_header = msgspec.msgpack.Decoder(StepHeader, dec_hook=_of_data).decode


def decode_header(data: bytes) -> StepHeader:
    """The inverse of `encode_header`."""
    return _decode_step_header(data)


# --- The headers of a block on their way to another process.
#
# The states of its steps differ by where the run stands alone, so what they share travels once. A place is decoded when
# somebody asks for its state.


class _BlockHeaders(msgspec.Struct, frozen=True, kw_only=True):
    shared: bytes
    """The state after the last step."""
    places: list[Any]
    """The cursor after each step."""
    headers: list[StepHeader]
    """Without states."""


class _RawHeaders(_BlockHeaders, frozen=True, kw_only=True):
    places: list[msgspec.Raw]


_NO_STATE = StateToAsk.of_data(msgspec.msgpack.encode(None))
"""Stands in each header for its state; empty data would be made when it is asked for."""


def encode_headers(headers: Sequence[StepHeader]) -> bytes:
    """Bytes of the headers of consecutive steps, as one process has made them."""
    states = [header.after.state for header in headers]
    block = _BlockHeaders(
        shared=headers[-1].after.data,
        places=[state.at for state in states],
        headers=[replace(header, after=_NO_STATE) for header in headers],
    )
    return _encode_block(block)


class HeadersToSend:
    """The headers of a block, encoded once for all who get the same."""

    def __init__(self, headers: Sequence[StepHeader]) -> None:
        self._headers, self._data = headers, b""

    def are(self, headers: Sequence[StepHeader]) -> bool:
        """Whether these are they."""
        return len(headers) == len(self._headers) and all(map(operator.is_, headers, self._headers))

    def data(self, first: int = 0) -> bytes:
        """Bytes of those from `first` on."""
        if first:
            return encode_headers(self._headers[first:])
        self._data = self._data or encode_headers(self._headers)
        return self._data


def decode_headers(data: bytes) -> list[StepHeader]:
    """The inverse of `encode_headers`."""
    block = _decode_block(data)
    shared = StateToAsk.of_data(block.shared)
    return [
        replace(header, after=StateToAsk(partial(_state_at, shared, place)))
        for header, place in zip(block.headers, block.places, strict=True)
    ]


def _state_at(shared: StateToAsk, place: msgspec.Raw) -> LoaderState:
    return replace(shared.state, at=decode_cursor(place))


def _part_of_block(value: Any) -> Any:
    return value.data if isinstance(value, StateToAsk) else column_bytes(value)


_encode_block = msgspec.msgpack.Encoder(enc_hook=_part_of_block).encode
_decode_block = msgspec.msgpack.Decoder(_RawHeaders, dec_hook=_of_data).decode


# --- The step that a rank waits for.


class Awaited(msgspec.Struct, frozen=True, kw_only=True):
    """What a step must be like to be the next one of a rank."""

    recipe: str
    """Fingerprint of the part of the recipe."""
    step: int
    microbatch: int
    """Where the rank begins in the step."""
    dp: int
    micro_batch_size: int
    order_digest: bytes
    """The digest of the steps before; empty where nothing was planned yet."""
    plan_digest: bytes = b""
    """The digest of the step, where a part of it was used; else empty."""

    @staticmethod
    def by(state: LoaderState) -> Awaited:
        """The step that a state waits for."""
        return Awaited(**{name: getattr(state, name) for name in Awaited.__struct_fields__})

    @staticmethod
    def after(header: StepHeader) -> Awaited:
        """The step behind one that was used up."""
        return Awaited(
            recipe=header.recipe,
            step=header.step + 1,
            microbatch=0,
            dp=header.dp,
            micro_batch_size=header.micro_batch_size,
            order_digest=header.order_digest,
        )


def check_arrival(header: StepHeader, awaited: Awaited) -> None:
    """Refuse a step that has come in the place of the one that a rank waits for.

    Args:
        header: The header of the step.
        awaited: By this rank, before the step's next microbatch.

    Raises:
        StateMismatch: The rank that sent the step has loaded another state or has other options, or the samples are
            placed otherwise than where the state was saved.
    """
    if header.recipe != awaited.recipe:
        raise other_recipe(header.after.state, awaited.recipe)
    asked = (awaited.step, awaited.microbatch, awaited.dp, awaited.micro_batch_size)
    came = (header.step, header.first_microbatch, header.dp, header.micro_batch_size)
    if asked != came:
        text = "step {} from microbatch {}, of dp {} x micro_batch_size {}"
        raise StateMismatch(
            f"this rank waits for {text.format(*asked)}; what came is {text.format(*came)}. Load the same state and "
            f"give the same options on all ranks; after an interrupt, load_state_dict(loader.state_dict()) continues"
        )
    if awaited.plan_digest and awaited.plan_digest != header.plan_digest:
        raise StateMismatch(
            f"the state was saved inside step {awaited.step}, whose samples are placed otherwise now (plan digest "
            f"{header.plan_digest.hex()}, then {awaited.plan_digest.hex()}): the recipe's balance or boundaries "
            f"differ, or torchmix. Restore them, or go back to the start of the step (its microbatches come again) "
            f"with load_state_dict(state, from_step_start=True)"
        )


def stats_of(header: StepHeader) -> dict[str, object]:
    """The report as a flat dict, for `StatefulDataLoader.stats`."""
    report = header.report
    rows = header.after.state.rows
    figures: dict[str, object] = {
        "step": header.step,
        "tokens_of_source": _by_name(rows.source_names, report.tokens_of_source),
        "mixture_tokens_of_stream": _by_name(rows.streams, report.tokens_of_stream),
        "delivered_tokens": report.delivered_tokens,
        "squared_tokens": report.squared_tokens,
        "fill": report.delivered_tokens / report.capacity_tokens,
        "balance_ratio": report.balance_cost / report.lower_bound,
        "hash_order_ratio": report.hash_order_cost / report.lower_bound,
        "plan_s": report.plan_s,
        "read_s": report.read_s,
        "build_s": report.build_s,
        "masked_tokens": header.num_masked_tokens,
        "bad_tokens_of_source": header.bad_tokens,
    }
    assert not figures.keys() & report.reading.keys(), "figures of the step are not those since the start"
    return {**figures, **report.reading}


def _by_name(names: Sequence[str], tokens: bytes) -> dict[str, int]:
    return dict(zip(names, np.frombuffer(tokens, "<i8").tolist(), strict=True))
