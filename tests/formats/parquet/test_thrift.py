"""The compact codec on structs written here, on every cut of them, and on random bytes."""

from __future__ import annotations

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchmix.formats.parquet import thrift

INNER = thrift.write_struct([(1, thrift.I32, -1), (2, thrift.BINARY, b"name")])
OUTER = thrift.write_struct(
    [
        (1, thrift.I32, 1),
        (2, thrift.LIST, thrift.write_list(thrift.STRUCT, [INNER] * 20)),
        (3, thrift.I64, -(2**63)),
        (4, thrift.STRUCT, INNER),
        (30, thrift.I16, 300),
        (31, thrift.BINARY, b"x" * 200),
        (32, thrift.LIST, thrift.write_list(thrift.I64, [b"\x00", b"\x02", b"\x01"])),
        (33, thrift.LIST, thrift.write_list(thrift.BINARY, [])),
    ]
)
INNER_VALUE = {1: -1, 2: b"name"}
VALUE = {
    1: 1,
    2: [INNER_VALUE] * 20,
    3: -(2**63),
    4: INNER_VALUE,
    30: 300,
    31: b"x" * 200,
    32: [0, 1, -1],
    33: [],
}


def test_what_is_written_is_read() -> None:
    padded = b"\xff" + OUTER + b"\xff"
    assert thrift.read_struct(padded, 1) == (VALUE, len(padded) - 1)
    assert thrift.read_struct(memoryview(padded), 1) == (VALUE, len(padded) - 1)


@pytest.mark.parametrize("value", [0, 1, -1, 63, 64, -64, -65, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
def test_integers_of_every_size_survive(value: int) -> None:
    assert thrift.read_struct(thrift.write_struct([(7, thrift.I64, value)]))[0] == {7: value}


def test_fields_far_apart_are_told_by_their_long_form() -> None:
    # field 1 as a byte, then field 1000 by its own id: header type, zigzag 2000
    encoded = bytes([0x10 | thrift.BYTE, 5, thrift.I32, 0xD0, 0x0F, 8, 0])
    assert thrift.read_struct(encoded) == ({1: 5, 1000: 4}, len(encoded))
    assert thrift.find_field(encoded, 0, 1000) == (thrift.I32, 5)


def test_booleans_are_in_the_type_of_a_field_and_in_the_bytes_of_a_list() -> None:
    flags = thrift.write_list(thrift.TRUE, [b"\x01", b"\x02"])
    encoded = bytes([0x10 | thrift.TRUE, 0x10 | thrift.FALSE, 0x10 | thrift.LIST]) + flags + b"\x00"
    assert thrift.read_struct(encoded) == ({1: True, 2: False, 3: [True, False]}, len(encoded))
    assert thrift.find_field(encoded, 0, 3) == (thrift.LIST, 3)


def test_doubles_and_maps_are_stepped_over() -> None:
    entry = bytes([thrift.BINARY << 4 | thrift.I32, 1]) + b"k" + bytes([2])
    encoded = bytes([0x10 | thrift.DOUBLE]) + b"8 bytes." + bytes([0x10 | thrift.MAP, 1]) + entry
    encoded += bytes([0x10 | thrift.MAP, 0, 0x10 | thrift.I32, 6, 0])
    fields, stop = thrift.read_struct(encoded)
    assert fields[4] == 3
    assert stop == len(encoded)


@pytest.mark.parametrize("field", [1, 2, 3, 4, 30, 31, 32, 33])
def test_a_field_is_found_where_its_value_begins(field: int) -> None:
    type, position = thrift.find_field(OUTER, 0, field)
    assert thrift.read_struct(bytes([0x10 | type]) + OUTER[position:])[0][1] == VALUE[field]


def test_a_field_that_is_not_there_has_type_0() -> None:
    assert thrift.find_field(OUTER, 0, 99) == (0, len(OUTER))


@pytest.mark.parametrize(("index", "kept"), [(0, [0]), (2, [-1]), (3, [])])
def test_one_element_of_a_list_is_kept(index: int, kept: list[int]) -> None:
    assert thrift.read_struct(OUTER, keep=(32, index)) == (VALUE | {32: kept}, len(OUTER))


def test_every_cut_of_a_struct_ends_too_early() -> None:
    for stop in range(len(OUTER)):
        with pytest.raises(EOFError):
            thrift.read_struct(OUTER[:stop])
        with pytest.raises(EOFError):
            thrift.read_struct(OUTER[:stop], keep=(2, 1))
        with pytest.raises(EOFError):
            thrift.find_field(OUTER[:stop], 0, 99)


def test_random_bytes_end_in_a_value_or_one_of_two_errors() -> None:
    rng = random.Random(11)
    outcomes = set()
    for _ in range(20_000):
        encoded = bytearray(OUTER if rng.random() < 0.5 else rng.randbytes(60))
        encoded[rng.randrange(len(encoded))] = rng.randrange(256)
        try:
            _, stop = thrift.read_struct(bytes(encoded))
            assert stop <= len(encoded)
            outcomes.add("value")
        except (EOFError, ValueError) as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"value", "EOFError", "ValueError"}


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="nested"):
        thrift.read_struct(bytes([0x10 | thrift.STRUCT]) * 5000)
    with pytest.raises(ValueError, match="nested"):
        thrift.find_field(bytes([0x10 | thrift.STRUCT]) * 5000, 0, 2)
    with pytest.raises(ValueError, match="nested"):
        thrift.read_struct(bytes([0x10 | thrift.LIST]) + bytes([0x10 | thrift.LIST]) * 5000)


def test_endless_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="64 bits"):
        thrift.read_struct(bytes([0x10 | thrift.I32]) + b"\xff" * 100)


def test_a_map_of_absurd_size_ends_too_early_at_once() -> None:
    with pytest.raises(EOFError):
        thrift.read_struct(bytes([0x10 | thrift.MAP]) + b"\xff" * 8 + b"\x01" + bytes([thrift.BYTE << 4 | thrift.BYTE]))


def test_a_real_footer_reads_as_pyarrow_reads_it() -> None:
    table = pa.table({"a": [1, 2, 3], "b": ["x", "y", None]})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=2)
    content = file.getvalue()
    footer = content[-8 - int.from_bytes(content[-8:-4], "little") : -8]
    metadata = pq.read_metadata(file)
    fields, stop = thrift.read_struct(footer)
    assert stop == len(footer)
    assert fields[3] == metadata.num_rows
    assert [group[3] for group in fields[4]] == [2, 1]
    assert fields[6].decode() == metadata.created_by
    assert [element[4] for element in fields[2]] == [b"schema", b"a", b"b"]
    for g, group in enumerate(fields[4]):
        for c, chunk in enumerate(group[1]):
            known = metadata.row_group(g).column(c)
            assert chunk[3][9] == known.data_page_offset
            assert chunk[3][7] == known.total_compressed_size
            assert chunk[3][3] == [known.path_in_schema.encode()]
