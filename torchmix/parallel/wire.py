"""What travels between processes: the forms of arrays and errors in every message, and an exchange between ranks."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix import errors
from torchmix.errors import TorchmixError, WireError
from torchmix.parallel.place_tree import Role, Stage

# --- The form of an array in a message, without its values: name, dtype, shape.
#
# In, at a sender: an array. Out, at a receiver: how many bytes it has, and how to see them. One description for all
# that travels, between ranks and between a leader and its worker. Must hold: whatever decodes is bounded, so a damaged
# or foreign message makes nobody allocate much. Size: some 20 bytes in msgpack, the list [name, code of the dtype,
# shape].

MAX_BYTES = 16 << 30
"""Most bytes of an array, and of all arrays of a message."""
MAX_ARRAYS = 256
"""Most arrays of a message."""

ITEM_BYTES_OF_DTYPE = {
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "uint16": 2,
}
"""The dtypes that travel, by torch's names. The code of a dtype is its place here; append only."""
DTYPES = tuple(ITEM_BYTES_OF_DTYPE)

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class ArrayForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """An array without its values, little-endian and in row-major order."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    code: Annotated[int, msgspec.Meta(ge=0, lt=len(DTYPES))]
    """Place of the dtype in DTYPES."""
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=8)]

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> ArrayForm:
        """The form of an array of a dtype in DTYPES."""
        return cls(name=name, code=DTYPES.index(dtype), shape=shape)

    @property
    def dtype(self) -> str:
        """The dtype by torch's name, as numpy has it, too, except bfloat16."""
        return DTYPES[self.code]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES_OF_DTYPE[self.dtype]


# --- What an error in a message is: its class by name, its arguments as plain values, its text.
#
# In, at a sender: an error. Out, at a receiver: the same error, to be raised there. One description for all that
# travels, between ranks and between a leader and its worker. Must hold: nothing in it is executable; only classes of
# torchmix are looked up by name, and any other error becomes a RuntimeError that names it; lengths are bounded. Cost:
# none where there is no error.

MOST_TEXT = 1 << 16
MOST_TRACEBACK = 1 << 18
"""Characters; of longer ones the end is cut off, of a traceback the beginning."""
MOST_ARGUMENTS = 16

_Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]


class ErrorForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """An error without its objects."""

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """Name of its class."""
    text: _Text
    arguments: Annotated[tuple[int | _Text, ...], msgspec.Meta(max_length=MOST_ARGUMENTS)]
    """What the class is called with."""
    traceback: Annotated[str, msgspec.Meta(max_length=MOST_TRACEBACK)] = ""
    """Where it happened; empty where nobody there would look."""

    @classmethod
    def of(cls, error: BaseException, *, with_traceback: bool = False) -> ErrorForm:
        """The form of an error."""
        arguments = [item if type(item) is int and abs(item) < 1 << 63 else _plain(item) for item in error.args]
        lines = "".join(traceback.format_exception(error)) if with_traceback else ""
        return cls(
            kind=type(error).__name__[:128],
            text=_plain(error),
            arguments=tuple(arguments[:MOST_ARGUMENTS]),
            traceback=_plain(lines, -MOST_TRACEBACK),
        )

    @property
    def is_of_torchmix(self) -> bool:
        """Whether the class is one of torchmix's own."""
        kind = getattr(errors, self.kind, None)
        return isinstance(kind, type) and issubclass(kind, TorchmixError)

    def error(self) -> Exception:
        """The error to raise: of the same class if it is torchmix's own, else a RuntimeError that names it."""
        if self.is_of_torchmix:
            with suppress(TypeError, ValueError):  # whoever sent it calls the class otherwise
                error: Exception = getattr(errors, self.kind)(*self.arguments)
                str(error)
                return error
        return RuntimeError(f"{self.kind}: {self.text}")


def _plain(value: object, most: int = MOST_TEXT) -> str:
    """Text that travels: without halves of surrogates, and cut."""
    text = str(value).encode(errors="replace").decode()
    return text[:most] if most > 0 else text[most:]


# --- What an exchange looks like on the wire: a fixed envelope of integers, then one payload of bytes.
#
# In, at the leader: the caller's opaque header and named arrays. Out, at a peer: the same, as views into the payload.
#
#     envelope   int64 [12], the fields of `Envelope` after a magic number and the wire version
#     payload    uint8 [payload_bytes]
#                  description   msgpack: name, dtype code and shape of each array
#                  header        the caller's bytes, not looked into
#                  arrays        each at the next multiple of 64 bytes, in the order of the description; gaps are zero
#
# Invariants: nothing in it is executable; sizes are bounded before anything is allocated or decoded; a payload is
# accepted only if its description accounts for every byte; any other bytes raise an error that names the sender. The
# wire is between processes of one job that run one version of torchmix: a change of layout is a new WIRE_VERSION, and
# versions do not mix.
#
# Cost: one copy of each array at the leader, none at a peer; about 60 bytes of description per array. No torch.

WIRE_VERSION = 1
MAGIC = int.from_bytes(b"torchmix", "big")
ENVELOPE_FIELDS = 12
ALIGN_BYTES = 64
KIND_DATA, KIND_END, KIND_FAILED = 1, 2, 3

MAX_DESCRIPTION_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = MAX_BYTES

STAGES: tuple[Stage, ...] = ("only", "first", "middle", "last")
"""The code of a stage on the wire is its place here; append only."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know before the payload: whether it is for this rank, and how large it is."""

    kind: int
    """KIND_DATA; or, when none follows, KIND_END (then all sizes are 0) or KIND_FAILED (the header says why)."""
    sequence: int
    """Exchanges between these two ranks before this one."""
    leader: int
    """Global rank of the sender."""
    replica: int
    """Replica the content is for."""
    stage: int
    """Place of the role's stage in STAGES."""
    cp_rank: int
    """CP slice of the role."""
    description_bytes: int
    header_bytes: int
    payload_bytes: int
    """Bytes that follow, description and header included."""


class Block(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One array as it travels."""

    name: str
    dtype: str
    """One of `array_form.DTYPES`."""
    shape: tuple[int, ...]
    values: NDArray[np.uint8]
    """The array's bytes in row-major order, uint8 [product of shape * item bytes]."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Annotated[tuple[ArrayForm, ...], msgspec.Meta(max_length=MAX_ARRAYS)])


def encode_envelope(envelope: Envelope) -> NDArray[np.int64]:
    """The envelope as int64 [ENVELOPE_FIELDS]."""
    values = [MAGIC, WIRE_VERSION, *(getattr(envelope, name) for name in Envelope.__struct_fields__)]
    return np.array(values + [0] * (ENVELOPE_FIELDS - len(values)), dtype=np.int64)


def decode_envelope(values: NDArray[np.int64], *, sequence: int, leader: int, replica: int, role: Role) -> Envelope:
    """Check that these integers announce the exchange that this rank waits for.

    Args:
        values: int64 [ENVELOPE_FIELDS] as received.
        sequence: Exchanges this rank has received before.
        leader: Global rank that this rank is served by.
        replica: Replica of this rank.
        role: Role of this rank.

    Raises:
        WireError: They do not, with `rank` the leader's.
    """
    numbers: list[int] = values.tolist()
    if len(numbers) != ENVELOPE_FIELDS or numbers[0] != MAGIC:
        _refuse(leader, f"it does not begin as one does ({numbers[:2]}); was another collective issued on this group?")
    if numbers[1] != WIRE_VERSION:
        _refuse(
            leader, f"wire version {numbers[1]}, but this torchmix reads {WIRE_VERSION}; run one version on all ranks"
        )
    names = Envelope.__struct_fields__
    envelope = Envelope(**dict(zip(names, numbers[2:], strict=False)))
    expected = {
        "sequence": sequence,
        "leader": leader,
        "replica": replica,
        "stage": STAGES.index(role.stage),
        "cp_rank": role.cp_rank,
    }
    for name, value in expected.items():
        if getattr(envelope, name) != value:
            _refuse(
                leader,
                f"{name} is {getattr(envelope, name)}, this rank waits for {value}; build the same topology and place "
                "tree on all ranks, and iterate each loader from one thread",
            )
    sizes = (envelope.description_bytes, envelope.header_bytes, envelope.payload_bytes)
    limits = (MAX_DESCRIPTION_BYTES, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES)
    if envelope.kind not in (KIND_DATA, KIND_END, KIND_FAILED) or any(numbers[2 + len(names) :]):
        _refuse(leader, f"unknown kind {envelope.kind}")
    if not all(0 <= size <= limit for size, limit in zip(sizes, limits, strict=True)) or sum(sizes[:2]) > sizes[2]:
        _refuse(leader, f"description, header and payload of {sizes} bytes; at most {limits}")
    if envelope.kind == KIND_END and any(sizes):
        _refuse(leader, f"an end that carries {sizes} bytes")
    return envelope


def encode_payload(
    header: bytes, blocks: Sequence[Block], *, buffer: NDArray[np.uint8] | None = None
) -> tuple[int, NDArray[np.uint8]]:
    """Lay a header and arrays out as one payload.

    Args:
        header: The caller's bytes, at most MAX_HEADER_BYTES.
        blocks: At most 256 arrays of up to 8 dimensions, with distinct names of up to 64 characters.
        buffer: Memory to write into where it is large enough; else it is allocated.

    Returns:
        Bytes of the description, and the payload, uint8 [payload_bytes].
    """
    described = tuple(ArrayForm.of(block.name, block.dtype, block.shape) for block in blocks)
    description = _encoder.encode(described)
    _decoder.decode(description)  # the sender is held to the limits that a peer will apply
    assert len({block.name for block in blocks}) == len(blocks), (
        f"two of one name in {[block.name for block in blocks]}"
    )
    assert all(block.values.size == form.num_bytes for block, form in zip(blocks, described, strict=True))
    starts, payload_bytes = _layout(len(description) + len(header), described)
    assert len(header) <= MAX_HEADER_BYTES, f"a header of {len(header)} bytes"
    assert payload_bytes <= MAX_PAYLOAD_BYTES, f"a payload of {payload_bytes} bytes; make the global batch smaller"
    if buffer is None or buffer.size < payload_bytes:
        buffer = np.empty(payload_bytes, dtype=np.uint8)
    payload = buffer[:payload_bytes]
    position = len(description) + len(header)
    payload[:position] = np.frombuffer(description + header, dtype=np.uint8)
    for block, start in zip(blocks, starts, strict=True):
        payload[position:start] = 0
        position = start + block.values.size
        payload[start:position] = block.values
    payload[position:] = 0
    return len(description), payload


def decode_payload(envelope: Envelope, payload: NDArray[np.uint8]) -> tuple[bytes, list[Block]]:
    """The header, and the arrays as views into `payload`.

    Raises:
        WireError: The payload does not hold what its description says, with `rank` the leader's.
    """
    content_start = envelope.description_bytes + envelope.header_bytes
    try:
        described = _decoder.decode(payload[: envelope.description_bytes].tobytes())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _refuse(envelope.leader, f"its description does not decode: {error}")
    starts, payload_bytes = _layout(content_start, described)
    if payload_bytes != payload.size or len({form.name for form in described}) < len(described):
        _refuse(envelope.leader, f"it describes {payload_bytes} bytes of distinct arrays, {payload.size} came")
    header = payload[envelope.description_bytes : content_start].tobytes()
    blocks = [
        Block(name=form.name, dtype=form.dtype, shape=form.shape, values=payload[start : start + form.num_bytes])
        for form, start in zip(described, starts, strict=True)
    ]
    return header, blocks


def _layout(content_start: int, described: Sequence[ArrayForm]) -> tuple[list[int], int]:
    """Where each array starts, and where the payload stops, in bytes."""
    starts = []
    stop = content_start
    for form in described:
        starts.append(-(-stop // ALIGN_BYTES) * ALIGN_BYTES)
        stop = starts[-1] + form.num_bytes
    return starts, stop


def _refuse(leader: int, reason: str) -> NoReturn:
    raise WireError(f"what came from leader rank {leader} is not the exchange this rank waits for: {reason}", leader)
