"""The wire of loaders: what is said is what is heard, and whatever else comes is refused, in bounded memory."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.loader_messages import EXAMPLES, damaged, decoder_of, example_arrays
from tests.writers.write_loader_vectors import body_of
from torchmix.errors import SourceChanged, WireError
from torchmix.parallel.wire import ArrayForm, ErrorForm
from torchmix.service.messages import (
    MOST_BODY_BYTES,
    MOST_HEADER_BYTES,
    TAG,
    FailureReply,
    PieceReply,
    PieceRequest,
    checksum_of,
    decode_of_client,
    decode_of_loader,
    encode,
    forms_of,
    pieces_of,
    rows_of,
)

VECTORS = Path(__file__).parents[2] / "docs" / "loader_vectors.json"


def framed(header: bytes, body: bytes = b"", *, version: int = 1, tag: bytes = TAG) -> list[bytes]:
    """Frames with a checksum that fits, whatever they hold."""
    return [tag + bytes([version]) + checksum_of(header, body).to_bytes(4, "little") + header, body]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_said_is_what_is_heard(message: Any) -> None:
    arrays = example_arrays(message)
    heard, found = decoder_of(message)(encode(message, arrays))
    assert heard == message
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_arrays_lie_at_multiples_of_64_bytes_with_zeros_between() -> None:
    arrays = {"a": np.full(3, 255, np.uint8), "b": np.zeros(0, np.int64), "c": np.full(9, -1, np.int32)}
    _, body = encode(PieceReply(number=1, request=0, forms=forms_of(arrays)), arrays)
    assert bytes(body) == b"\xff" * 3 + bytes(61) + b"\xff" * 36


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_the_frames_are_those_of_the_page_of_formats(message: Any) -> None:
    vectors = {one["message"]: one for one in json.loads(VECTORS.read_text(encoding="utf-8"))["messages"]}
    frames = [bytes(frame).hex() for frame in encode(message, example_arrays(message))]
    assert vectors[type(message).__name__]["frames"] == frames
    assert len(vectors) == len(EXAMPLES)


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "0 frames"),
        ([b"x"], "1 frames"),
        ([b"", b"", b""], "3 frames"),
        ([b"", b""], "it begins with"),
        ([b"LOADERS\x01", b""], "it begins with"),
        (framed(b"", tag=b"loaders"), "it begins with"),
        (framed(b"", version=2), "version 2 of the wire, this torchmix has 1"),
        ([*framed(b"\x90")[:1], b"x"], "checksum"),
        (framed(b"\x90"), "no message"),
        (framed(msgspec.msgpack.encode(["no such tag"])), "no such tag"),
        (framed(msgspec.msgpack.encode({"number": 1})), "no message"),
        (framed(b"\x91" * 5000), "no message"),
        ([b"x" * (MOST_HEADER_BYTES + 100), b""], "frames of"),
        ([b"x", bytes(MOST_BODY_BYTES + 1)], "frames of"),
    ],
    ids=range(14),
)
def test_what_is_no_message_is_refused(frames: list[bytes], says: str) -> None:
    for decode in (decode_of_client, decode_of_loader):
        with pytest.raises(WireError, match=says):
            decode(frames)


@pytest.mark.parametrize(
    ("forms", "body", "says"),
    [
        ([["ids", 4, [1 << 34]]], b"", "no message"),
        ([["ids", 4, [1 << 30]]], b"", "describes 8589934592 bytes"),
        ([["ids", 3, [4]]], bytes(15), "describes 16 bytes"),
        ([["ids", 3, [4]], ["ids", 3, [0]]], bytes(64), "distinct"),
        ([["ids", 3, [0]]] * 9, b"", "no message"),
        ([["ids", 6, [4]]], bytes(8), "bfloat16"),
        ([["ids", 99, [4]]], bytes(8), "no message"),
    ],
    ids=range(7),
)
def test_forms_that_do_not_fit_the_body_are_refused(forms: list[Any], body: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_of_loader(framed(msgspec.msgpack.encode(["pieces", 7, 0, forms]), body))


def checksum_by_hand(header: bytes, body: bytes) -> int:
    """The checksum, from the page of formats, in Python's integers."""
    words = [int.from_bytes(body[at : at + 8], "little") for at in range(0, len(body) // 4096 * 4096, 8)]
    rows = [words[at : at + 512] for at in range(0, len(words), 512)]
    sums = [sum(row) % 2**64 for row in rows]
    sums += [sum(column) % 2**64 for column in zip(*rows, strict=True)]
    rest = body[len(rows) * 4096 :]
    return zlib.crc32(header + b"".join(each.to_bytes(8, "little") for each in sums) + rest)


def test_checksums_are_those_of_the_page_of_formats() -> None:
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))["checksums"]
    for one in vectors:
        header, body = bytes.fromhex(one["header"]), body_of(one["body_bytes"])
        assert one["checksum"] == checksum_of(header, body) == checksum_by_hand(header, body)
    assert max(one["body_bytes"] for one in vectors) == 1 << 20


@pytest.mark.parametrize("seed", range(4))
def test_damage_of_a_long_body_is_refused(seed: int) -> None:
    """Bits, swapped words, lost or repeated stretches, and the highest bits of several words, whose sums may cancel."""
    chance = random.Random(seed)
    body = chance.randbytes((1 << 16) + 24)
    expected = checksum_of(b"", body)
    for _ in range(300):
        found, (first, second) = bytearray(body), sorted(8 * at for at in chance.sample(range(len(body) // 8), 2))
        match chance.randrange(5):
            case 0:
                for at in chance.sample(range(len(body)), 3):
                    found[at] ^= 1 << chance.randrange(8)
            case 1:
                found[first : first + 8], found[second : second + 8] = body[second:][:8], body[first:][:8]
            case 2:
                found[first : first + 4096] = bytes(len(found[first : first + 4096]))
            case 3:
                found[second:] = (body[first:second] + body)[: len(body) - second]
            case _:
                for at in (first, second):
                    found[at + 7] ^= 0x80
        assert checksum_of(b"", found) != expected


@pytest.mark.parametrize("seed", range(4))
def test_damage_anywhere_is_refused_by_name(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        message = chance.choice(EXAMPLES)
        frames = damaged(encode(message, example_arrays(message)), chance)
        for decode in (decode_of_client, decode_of_loader):
            with pytest.raises(WireError):
                decode(frames)


@pytest.mark.parametrize("seed", range(4))
def test_any_header_with_a_checksum_that_fits_decodes_or_is_refused_by_name(seed: int) -> None:
    """Whoever knows the format sends what he likes: it is a message within bounds, or a WireError."""
    chance = random.Random(seed)
    for _ in range(500):
        message = chance.choice(EXAMPLES)
        header, body = encode(message, example_arrays(message))
        inner = bytearray(header[len(TAG) + 5 :])
        for _ in range(chance.randint(1, 4)):
            inner[chance.randrange(len(inner))] = chance.randrange(256)
        frames = framed(bytes(inner), bytes(body) if chance.random() < 0.7 else chance.randbytes(64))
        for decode in (decode_of_client, decode_of_loader):
            try:
                found, arrays = decode(frames)
                assert sum(array.nbytes for array in arrays.values()) <= len(frames[1])
                if isinstance(found, PieceRequest):
                    pieces_of(arrays)
            except WireError:
                pass


def request(**changes: Any) -> dict[str, Any]:
    arrays = {
        "source": np.zeros(2, np.int32),
        "row": np.array([3, 4]),
        "epoch": np.zeros(2, np.int64),
        "start": np.zeros(2, np.int64),
        "tokens": np.array([5, 6]),
    }
    return {name: array for name, array in {**arrays, **changes}.items() if array is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {"row": None},
        {"more": np.zeros(2)},
        {"row": np.zeros((2, 1), np.int64)},
        {"row": np.zeros(3, np.int64)},
        {"source": np.zeros(2, np.int64)},
        {"tokens": np.array([5, -1])},
        {"tokens": np.array([1 << 40, 1])},
        {"tokens": np.array([(1 << 63) - 1, (1 << 63) - 1])},
        {"epoch": np.array([0, -1])},
        {"epoch": np.array([1 << 40, 0])},
        {name: np.zeros(0, np.int32 if name == "source" else np.int64) for name in request()},
        {name: np.zeros(70_000, np.int32 if name == "source" else np.int64) for name in request()},
    ],
    ids=range(12),
)
def test_a_request_for_more_than_fits_is_refused(changes: dict[str, Any]) -> None:
    assert pieces_of(request()).tokens.tolist() == [5, 6]
    with pytest.raises(WireError):
        pieces_of(request(**changes))


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"ids": np.zeros(3, np.int32)},
        {"ids": np.zeros(3, np.int32), "ids.lengths": np.array([1, 1], np.int32)},
        {"ids": np.zeros(4, np.int32), "ids.lengths": np.array([1, 2], np.int32)},
        {"ids": np.zeros(3, np.float32), "ids.lengths": np.array([1, 2], np.int32)},
        {"ids": np.zeros((3, 1), np.int32), "ids.lengths": np.array([1, 2], np.int32)},
    ],
    ids=range(6),
)
def test_a_reply_with_other_rows_is_refused(arrays: dict[str, Any]) -> None:
    lengths = np.array([1, 2])
    good = {"ids": np.arange(3, dtype=np.uint16), "ids.lengths": lengths.astype(np.int32)}
    assert rows_of(good, "ids", lengths).tolist() == [0, 1, 2]
    with pytest.raises(WireError):
        rows_of(arrays, "ids", lengths)


def test_arrays_in_memory_that_is_not_aligned_are_copied() -> None:
    arrays = {"ids": np.arange(5, dtype=np.int64)}
    header, body = encode(PieceReply(number=1, request=0, forms=forms_of(arrays)), arrays)
    shifted = bytearray(b"x") + bytes(body)
    _, found = decode_of_loader([header, memoryview(shifted)[1:]])
    assert found["ids"].flags.aligned and found["ids"].tolist() == [0, 1, 2, 3, 4]


def test_an_error_travels_as_everywhere_in_the_house() -> None:
    said = FailureReply(number=3, error=ErrorForm.of(SourceChanged("web/0.parquet: its size differs")))
    heard, _ = decode_of_loader(encode(said))
    assert isinstance(heard, FailureReply)
    assert isinstance(heard.error.error(), SourceChanged)


def test_no_form_of_a_request_names_a_path_or_a_function() -> None:
    """Only whole numbers travel to a loader, beside the words of a hello."""
    assert set(PieceRequest.__annotations__) == {"number", "patience_ms", "forms"}
    assert set(ArrayForm.__struct_fields__) == {"name", "code", "shape"}
