"""The wire: what is sent is what comes out, and anything else is refused by name, in bounded memory."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from torchmix.errors import WireError
from torchmix.parallel.place_tree import Role
from torchmix.parallel.wire import (
    ALIGN_BYTES,
    DTYPES,
    ENVELOPE_FIELDS,
    ITEM_BYTES_OF_DTYPE,
    KIND_DATA,
    KIND_END,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    WIRE_VERSION,
    Block,
    Envelope,
    decode_envelope,
    decode_payload,
    encode_envelope,
    encode_payload,
)

ROLE = Role(stage="last", cp_rank=1)


def envelope(**changes: int) -> Envelope:
    values = {
        "kind": KIND_DATA,
        "sequence": 7,
        "leader": 4,
        "replica": 1,
        "stage": 3,
        "cp_rank": 1,
        "description_bytes": 10,
        "header_bytes": 20,
        "payload_bytes": 100,
    }
    return Envelope(**{**values, **changes})


def decode(values: NDArray[np.int64]) -> Envelope:
    return decode_envelope(values, sequence=7, leader=4, replica=1, role=ROLE)


def blocks_of(seed: int, shapes: list[tuple[int, ...]]) -> list[Block]:
    rng = np.random.default_rng(seed)
    blocks = []
    for index, shape in enumerate(shapes):
        dtype = DTYPES[index % len(DTYPES)]
        size = int(np.prod(shape)) * ITEM_BYTES_OF_DTYPE[dtype]
        values = rng.integers(0, 256, size, dtype=np.uint8)
        blocks.append(Block(name=f"array {index}", dtype=dtype, shape=shape, values=values))
    return blocks


SHAPES: list[tuple[int, ...]] = [(3, 5), (), (0, 4), (7,), (1, 1, 1), (64,), (2, 3), (5,), (9, 2)]


def sent(header: bytes, blocks: list[Block]) -> tuple[Envelope, NDArray[np.uint8]]:
    size, payload = encode_payload(header, blocks)
    return envelope(description_bytes=size, header_bytes=len(header), payload_bytes=payload.size), payload.copy()


def test_an_envelope_comes_back() -> None:
    values = encode_envelope(envelope())
    assert (values.dtype, values.shape) == (np.int64, (ENVELOPE_FIELDS,))
    assert decode(values) == envelope()


def test_the_envelope_is_frozen() -> None:
    assert encode_envelope(envelope()).tolist() == [0x746F7263686D6978, 1, 1, 7, 4, 1, 3, 1, 10, 20, 100, 0]
    assert (MAGIC, WIRE_VERSION) == (0x746F7263686D6978, 1)


@pytest.mark.parametrize("header", [b"", b"x", b"\x00" * 1000])
def test_a_payload_comes_back_as_aligned_views(header: bytes) -> None:
    blocks = blocks_of(1, SHAPES)
    announced, payload = sent(header, blocks)
    found_header, found = decode_payload(announced, payload)
    assert found_header == header
    assert [(block.name, block.dtype, block.shape) for block in found] == [
        (block.name, block.dtype, block.shape) for block in blocks
    ]
    for block, original in zip(found, blocks, strict=True):
        assert block.values.tobytes() == original.values.tobytes()
        assert np.shares_memory(block.values, payload) or block.values.size == 0
        assert (block.values.ctypes.data - payload.ctypes.data) % ALIGN_BYTES == 0


def test_a_payload_of_nothing_comes_back() -> None:
    assert decode_payload(*sent(b"", [])) == (b"", [])


def test_a_large_enough_buffer_is_written_into_and_cleaned() -> None:
    buffer = np.full(1 << 16, 255, dtype=np.uint8)
    blocks = blocks_of(2, SHAPES)
    _, payload = encode_payload(b"head", blocks, buffer=buffer)
    assert np.shares_memory(payload, buffer)
    assert payload.tobytes() == encode_payload(b"head", blocks)[1].tobytes()


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, 5, "does not begin as one does"),
        (1, 2, "wire version 2, but this torchmix reads 1; run one version"),
        (2, 4, "unknown kind 4"),
        (3, 8, "sequence is 8, this rank waits for 7"),
        (4, 0, "leader is 0, this rank waits for 4"),
        (5, 0, "replica is 0, this rank waits for 1"),
        (6, 1, "stage is 1, this rank waits for 3"),
        (7, 0, "cp_rank is 0, this rank waits for 1"),
        (8, -1, "description, header and payload of"),
        (8, 1 << 20, "description, header and payload of"),
        (9, 1 << 40, "description, header and payload of"),
        (9, 91, "description, header and payload of"),
        (10, MAX_PAYLOAD_BYTES + 1, "description, header and payload of"),
        (11, 1, "unknown kind"),
    ],
)
def test_a_foreign_envelope_is_refused_with_the_senders_rank(position: int, value: int, message: str) -> None:
    values = encode_envelope(envelope())
    values[position] = value
    with pytest.raises(WireError, match=message) as caught:
        decode(values)
    assert caught.value.rank == 4
    assert "leader rank 4" in str(caught.value)


def test_an_end_carries_nothing() -> None:
    empty = {"description_bytes": 0, "header_bytes": 0, "payload_bytes": 0}
    assert decode(encode_envelope(envelope(kind=KIND_END, **empty))).kind == KIND_END
    with pytest.raises(WireError, match="an end that carries"):
        decode(encode_envelope(envelope(kind=KIND_END)))


def described(entries: object) -> tuple[Envelope, NDArray[np.uint8]]:
    """An exchange of 64 bytes with a description of one's own."""
    description = msgspec.msgpack.encode(entries)
    payload = np.zeros(max(64, len(description)), dtype=np.uint8)
    payload[: len(description)] = np.frombuffer(description, dtype=np.uint8)
    return envelope(description_bytes=len(description), header_bytes=0, payload_bytes=payload.size), payload


@pytest.mark.parametrize(
    "entries",
    [
        {"name": 1},
        [["a", len(DTYPES), [1]]],
        [["a", -1, [1]]],
        [["", 0, [1]]],
        [["a" * 65, 0, [1]]],
        [["a", 0, [-1]]],
        [["a", 0, [1] * 9]],
        [["a", 0, [1], "more"]],
        [["a", 0, [2**62, 2**62]]],
        [["a", 0, [2**33, 2**33]]],
        [["a", 0, []]] * 65,
        [["a", 0, [0]], ["a", 0, [0]]],
        [["a", 0, [1]]],
    ],
)
def test_a_foreign_description_is_refused(entries: object) -> None:
    with pytest.raises(WireError, match="leader rank 4"):
        decode_payload(*described(entries))


def test_changed_bytes_decode_to_arrays_inside_the_payload_or_are_refused() -> None:
    seed = 20
    rng = random.Random(seed)
    announced, clean = sent(b"header", blocks_of(seed, SHAPES))
    num_refused = 0
    for _ in range(3000):
        payload = clean.copy()
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(announced.description_bytes + 8)] = rng.randrange(256)
        try:
            _, blocks = decode_payload(announced, payload)
        except WireError:
            num_refused += 1
            continue
        for block in blocks:
            assert block.values.size == int(np.prod(block.shape)) * ITEM_BYTES_OF_DTYPE[block.dtype]
            assert np.shares_memory(block.values, payload) or block.values.size == 0
    assert 0 < num_refused < 3000, f"seed {seed}"
