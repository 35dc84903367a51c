"""What loaders and their clients say to each other: two frames a message, of which nothing is executable."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable, WireError
from torchmix.parallel.wire import DTYPES, ArrayForm, ErrorForm
from torchmix.reader.protocol import OtherRows, WantedPieces, chosen_lists

# --- What loaders and their clients say to each other: two frames a message, of which nothing is executable.
#
# Every length is bounded before anything is allocated, a message is accepted only if its checksum fits and its forms
# account for every byte of the body; whatever else comes is a WireError. A client names a catalog by its fingerprint,
# sources by number, and rows; never a path, a column or a function. Cost: one copy and one checksum of the body, some
# 0.1 ns a byte, and 20 microseconds.
#
#     frame 0    `LOADERS`, the version as one byte, the checksum of both frames (4 bytes, little-endian), then one
#                msgpack list: the message's tag and its fields
#     frame 1    the arrays, each at the next multiple of 64 bytes, in the order of the message's forms; gaps are zero
#
# A *ragged* array `x` of n rows is two arrays: `x`, the values of all rows end to end, and `x.lengths`, int32 [n].

TAG = b"LOADERS"
LOADERS_VERSION = 1
ALIGNED_BYTES = 64
TARGET_BYTES = 33 << 16
"""What a request asks for at most, 2 MiB of ids and their lengths: with much more, tails of latency grow; with much
less, the cost of each message."""
MOST_TOKENS = TARGET_BYTES // 8 - 16
"""A longer piece is asked for in parts of so many tokens; some have no successor."""
MOST_HEADER_BYTES = 512 << 10
MOST_BODY_BYTES = 6 << 20
"""A request asks for at most 2 MiB at 4 bytes a token; ids of 8 bytes, and gaps, come on top."""
MOST_REQUEST_BYTES = TARGET_BYTES + (64 << 10)
"""Most bytes of a frame that a client sends: pieces, with what lies between arrays and what a connection adds."""
WINDOW_BYTES = 16 << 20
"""Planned bytes that a client may have asked of a loader, and not got."""
MOST_PAGES = 1 << 15
"""Pages of a message, and pages ahead that a loader keeps in mind for a client."""
MOST_EPOCH = 1 << 31
MOST_NAMES = 1 << 16
MOST_REASON = 2000
"""Characters of a refusal, or of an error, in a log."""
MOST_ARRAYS = 8
"""Arrays of a message."""

_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Forms = Annotated[tuple[ArrayForm, ...], msgspec.Meta(max_length=MOST_ARRAYS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class LoaderHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="hello"):
    """A client's first message on a connection: what it is going to ask for."""

    client: _Text
    """Host and process, for logs."""
    catalog: _Text
    """Fingerprint of its part's catalog."""
    transforms: Annotated[bytes, msgspec.Meta(max_length=32)]
    """`transforms_digest` of that catalog."""
    masked: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MOST_NAMES)] = ()
    """Sources whose damaged pages come as `NO_ID`, sorted."""


class PieceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="ask"):
    """Tokens of pieces, please. Arrays of [n]: `source` int32; `row`, `epoch`, `start` and `tokens` int64."""

    number: _Count
    """The request's number; its reply carries it."""
    patience_ms: _Count
    """After this time nobody waits for the reply."""
    forms: _Forms


class PagesAhead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="ahead"):
    """The client's progress: pages to decode ahead of need, or that it needs no more. Array: `page` int64 [n]."""

    source: _Count
    is_over: bool
    """Whether the pages are needed no more."""
    forms: _Forms


class LoaderPing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="ping"):
    """Is anybody there?"""

    number: _Count


class LoaderWelcome(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="welcome"
):
    """The loader serves this catalog."""

    loader: _Text
    """Host and process, for logs."""
    window_bytes: _Count
    """Planned bytes that this client may have on the way."""


class LoaderRefusal(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="refused"
):
    """The loader serves something else, or does not know the client any more."""

    reason: _Text
    is_unknown: bool = False
    """Whether another hello would help."""


class PieceReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="pieces"):
    """The rows of a request as named ragged arrays; their tokens are `ids`."""

    number: _Count
    request: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    """The checksum of the request's frames, so that what was asked for is what comes."""
    forms: _Forms


class FailureReply(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="failed"
):
    """The rows of a request cannot be read here."""

    number: _Count
    error: ErrorForm


class BusyReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="busy"):
    """The loader has no room for the request now, and has forgotten it."""

    number: _Count


class LoaderPong(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True, tag="pong"):
    """How the loader is."""

    number: _Count
    """The ping's number."""
    owed: _Count
    """Requests of this client that it has accepted and not answered; replies that it sent came before this message."""
    waiting: _Count
    """Requests of all clients that wait to be read."""
    at_hand_s: _Seconds
    """Since when the request at hand is being read; 0 if none is."""
    figures: Annotated[dict[_Text, int | float], msgspec.Meta(max_length=64)]
    """Figures of its reader and of itself, since it started."""
    words: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)] = ()
    """Its last warnings, oldest first."""


FromClient = LoaderHello | PieceRequest | PagesAhead | LoaderPing
FromLoader = LoaderWelcome | LoaderRefusal | PieceReply | FailureReply | BusyReply | LoaderPong
Arrays = dict[str, NDArray[Any]]
_Message = TypeVar("_Message")
_encode = msgspec.msgpack.Encoder().encode
_of_client = msgspec.msgpack.Decoder(FromClient)
_of_loader = msgspec.msgpack.Decoder(FromLoader)
_HEAD = len(TAG) + 1 + 4
_ROW_WORDS = 512
"""Words of 8 bytes in a row of the checksum."""
_NAME_OF_DTYPE = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}
_COLUMNS = {"source": np.dtype(np.int32)} | dict.fromkeys(("row", "epoch", "start", "tokens"), np.dtype(np.int64))
"""The arrays of a request, in their order."""


def one_line(text: str, most: int = 200) -> str:
    """What another process has said, for a log: one line without control characters, which could forge others.

    Args:
        text: A text of any length.
        most: Characters that are kept, before they are escaped.
    """
    kept = text if len(text) <= most else f"{text[:most]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in kept)


def planned_bytes(num_pieces: int, num_tokens: int) -> int:
    """What a request counts as in the flow of a connection, for itself and its reply: both sides come to the same."""
    return 4 * num_tokens + 40 * num_pieces


def forms_of(arrays: Mapping[str, NDArray[Any]]) -> tuple[ArrayForm, ...]:
    """The forms of arrays, in their order."""
    return tuple(ArrayForm.of(name, _NAME_OF_DTYPE[array.dtype], array.shape) for name, array in arrays.items())


def encode(
    message: FromClient | FromLoader, arrays: Mapping[str, NDArray[Any]] | None = None
) -> tuple[bytes, memoryview]:
    """Frames of a message.

    Args:
        message: With `forms_of(arrays)` where it has forms.
        arrays: Contiguous and little-endian.
    """
    starts, num_bytes = _layout(getattr(message, "forms", ()))
    body, stop = np.empty(num_bytes, np.uint8), 0  # zeros everywhere would cost as much as the copy
    for array, start in zip((arrays or {}).values(), starts, strict=True):
        body[stop:start] = 0
        stop = start + array.nbytes
        body[start:stop] = array.reshape(-1).view(np.uint8)
    header = _encode(message)
    assert len(header) <= MOST_HEADER_BYTES and num_bytes <= MOST_BODY_BYTES, (len(header), num_bytes)
    checksum = checksum_of(header, body.data)
    return TAG + bytes([LOADERS_VERSION]) + checksum.to_bytes(4, "little") + header, body.data


def checksum_of(header: bytes | memoryview, body: bytes | memoryview) -> int:
    """Checksum of a message: a crc32 over sums of the body, which costs a tenth of one over the body.

    The body's words of 8 bytes stand in rows of 512. The crc32 goes over the header, the sum of each whole row, the sum
    of each column of whole rows (both modulo 2**64), and the bytes of the last row where it is not whole. Whatever
    alters at most three words, or 4 KiB in a row, alters a sum; of other damage one in 2**32 is not noticed.
    """
    checksum = zlib.crc32(header)
    whole = len(body) // (8 * _ROW_WORDS)
    if whole:
        rows = np.frombuffer(body, "<u8", whole * _ROW_WORDS).reshape(whole, _ROW_WORDS)
        checksum = zlib.crc32(np.add.reduce(rows, axis=1), checksum)
        checksum = zlib.crc32(np.add.reduce(rows, axis=0), checksum)
    return zlib.crc32(memoryview(body)[whole * 8 * _ROW_WORDS :], checksum)


def checksum_in(header: bytes | memoryview) -> int:
    """The checksum that the first frame of a message carries."""
    return int.from_bytes(header[_HEAD - 4 : _HEAD], "little")


def decode_of_client(frames: Sequence[bytes | memoryview]) -> tuple[FromClient, Arrays]:
    """What a client says, with its arrays as views into the second frame.

    Raises:
        WireError: The frames hold no message of a client, or a damaged one.
    """
    return _decode(_of_client, frames)


def decode_of_loader(frames: Sequence[bytes | memoryview]) -> tuple[FromLoader, Arrays]:
    """What a loader says; as `decode_of_client`."""
    return _decode(_of_loader, frames)


def columns_of(pieces: WantedPieces) -> Arrays:
    """The arrays of a request; the places stay with who asks."""
    return {name: getattr(pieces, name) for name in _COLUMNS}


def pieces_of(arrays: Arrays) -> WantedPieces:
    """The pieces that a request names, to be given end to end.

    Raises:
        WireError: They are of several lengths or other types, or ask for more than a request may.
    """
    if arrays.keys() != _COLUMNS.keys() or any(column.ndim != 1 for column in arrays.values()):
        _refuse(f"a request with arrays {sorted(arrays)}")
    if any(arrays[name].dtype != dtype for name, dtype in _COLUMNS.items()):
        _refuse("a request whose arrays have other types")
    tokens, epochs = arrays["tokens"], arrays["epoch"]
    count = len(tokens)
    if not count or {len(column) for column in arrays.values()} != {count}:
        _refuse(f"a request of {count} pieces")
    # One by one first, as a sum may overflow.
    most = MOST_BODY_BYTES // 8
    if tokens.min() < 0 or tokens.max() > most or planned_bytes(len(tokens), int(tokens.sum())) > TARGET_BYTES:
        _refuse("a request for more than 2 MiB of ids")
    if epochs.min() < 0 or epochs.max() > MOST_EPOCH:
        _refuse(f"a request for epoch {epochs.min()} or {epochs.max()}")
    return WantedPieces.end_to_end(**arrays)


def pages_of(arrays: Arrays) -> NDArray[np.int64]:
    """The pages that a message of progress names.

    Raises:
        WireError: They are no pages, or too many.
    """
    pages = arrays.get("page")
    if len(arrays) != 1 or pages is None or pages.ndim != 1 or pages.dtype != np.int64 or len(pages) > MOST_PAGES:
        _refuse("progress without pages, or with too many")
    return pages


def rows_of(arrays: Arrays, name: str, lengths: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
    """The values of a ragged array of integers, whose rows must have these lengths.

    Raises:
        WireError: There is no such array, or it has other rows.
    """
    values, found = arrays.get(name), arrays.get(f"{name}.lengths")
    if values is None or found is None or values.ndim != 1 or found.dtype != np.int32 or values.dtype.kind not in "iu":
        _refuse(f"a reply without {name}")
    if not np.array_equal(found, lengths) or len(values) != lengths.sum():
        _refuse(f"a reply whose {name} have other lengths than the rows that were asked for")
    return values


def _decode(
    decoder: msgspec.msgpack.Decoder[_Message], frames: Sequence[bytes | memoryview]
) -> tuple[_Message, Arrays]:
    if len(frames) != 2:
        _refuse(f"{len(frames)} frames; a message has 2")
    header, body = memoryview(frames[0]), memoryview(frames[1])
    if len(header) > MOST_HEADER_BYTES + _HEAD or len(body) > MOST_BODY_BYTES:
        _refuse(f"frames of {len(header)} and {len(body)} bytes")
    if len(header) < _HEAD or header[: len(TAG)] != TAG:
        _refuse(f"it begins with {bytes(header[:8])!r}")
    version = header[len(TAG)]
    if version != LOADERS_VERSION:
        _refuse(f"version {version} of the wire, this torchmix has {LOADERS_VERSION}; run one torchmix everywhere")
    if checksum_of(header[_HEAD:], body) != checksum_in(header):
        _refuse("its checksum does not fit: it was damaged on its way")
    try:
        message = decoder.decode(header[_HEAD:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _refuse(str(error))
    forms: tuple[ArrayForm, ...] = getattr(message, "forms", ())
    starts, num_bytes = _layout(forms)
    if num_bytes != len(body) or len({form.name for form in forms}) < len(forms):
        _refuse(f"it describes {num_bytes} bytes of distinct arrays, {len(body)} came")
    return message, {form.name: _array(form, body, start) for form, start in zip(forms, starts, strict=True)}


def _array(form: ArrayForm, body: memoryview, start: int) -> NDArray[Any]:
    if form.dtype == "bfloat16":
        _refuse("an array of bfloat16, which loaders do not send")
    count = form.num_bytes // np.dtype(form.dtype).itemsize
    found = np.frombuffer(body, np.dtype(form.dtype), count, start).reshape(form.shape)
    # The transport puts small frames anywhere.
    return found if found.flags.aligned else found.copy()


def _layout(forms: Sequence[ArrayForm]) -> tuple[list[int], int]:
    """Where each array starts in the body, and where the body stops."""
    starts, stop = [], 0
    for form in forms:
        starts.append(-(-stop // ALIGNED_BYTES) * ALIGNED_BYTES)
        stop = starts[-1] + form.num_bytes
    return starts, stop


def _refuse(reason: str) -> NoReturn:
    raise WireError(f"no message between a loader and its client: {reason}")


# --- What maps give beside ids, in a reply of a loader.
#
# Lists that do not fit a message are an error that names the map's output; what comes is checked as ids are. Cost:
# copies.
#
#     row/NAME           the numbers of all rows of the request, end to end
#     row/NAME.lengths   int32 [n] how many come with each piece; -1 for a piece that begins no row that has some

PREFIX = "row/"
NONE = -1


def arrays_of_others(others: Sequence[OtherRows], num_pieces: int, *, ids_bytes: int) -> Arrays:
    """The arrays of a reply.

    Args:
        others: From the reader, of one source.
        num_pieces: The number of pieces of the request.
        ids_bytes: Bytes that the ids and their lengths take.

    Raises:
        SourceUnreadable: They do not fit a message.
    """
    found: dict[str, NDArray[Any]] = {}
    for name in dict.fromkeys(other.name for other in others):
        mine = [other for other in others if other.name == name]
        piece = np.concatenate([other.piece for other in mine])
        order = np.argsort(piece, kind="stable")
        lists = chosen_lists(pa.concat_arrays([other.values for other in mine]), order)
        offsets = lists.offsets.to_numpy()
        lengths = np.full(num_pieces, NONE, np.int32)
        lengths[piece[order]] = np.diff(offsets)
        found[f"{PREFIX}{name}"] = lists.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        found[f"{PREFIX}{name}.lengths"] = lengths
    num_bytes = ids_bytes + sum(array.nbytes + 64 for array in found.values())
    if num_bytes > MOST_BODY_BYTES or len(found) + 2 > MOST_ARRAYS:
        names = ", ".join(sorted({other.name for other in others}))
        raise SourceUnreadable(
            f"what a map gives beside ids ({names}) makes a reply of {num_bytes:,} bytes and {len(found) + 2} arrays; "
            f"a loader sends at most {MOST_BODY_BYTES:,} and {MOST_ARRAYS}: give less, or read with loaders where: node"
        )
    return found


def others_of(arrays: Arrays, piece: Int64Array) -> list[OtherRows]:
    """The inverse of `arrays_of_others`.

    Args:
        arrays: The arrays of a reply.
        piece: [n] index of each piece of the request, in what the lists are for.

    Raises:
        WireError: The arrays are no such lists.
    """
    found: list[OtherRows] = []
    for name in arrays:
        if not name.startswith(PREFIX) or name.endswith(".lengths"):
            continue
        values, lengths = arrays[name], arrays.get(f"{name}.lengths")
        if lengths is None or lengths.dtype != np.int32 or values.ndim != 1 or values.dtype.kind not in "iuf":
            raise WireError(f"a reply with {name} and without its lengths, or of {values.dtype}")
        chosen = np.flatnonzero(lengths != NONE)
        counts = lengths[chosen].astype(np.int64)
        if len(lengths) != len(piece) or (counts < 0).any() or counts.sum() != len(values):
            raise WireError(f"a reply whose {name} have other lengths than the rows that were asked for")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        numbers = pa.array(values)
        buffers = [None, pa.py_buffer(offsets)]
        lists = pa.Array.from_buffers(pa.large_list(numbers.type), len(chosen), buffers, children=[numbers])
        found.append(OtherRows(name=name.removeprefix(PREFIX), piece=piece[chosen], values=lists))
    return found
