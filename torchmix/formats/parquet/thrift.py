"""Thrift's compact encoding, as far as Parquet's footers and page headers use it.

Any input ends in a value, or in one of two errors: EOFError, the bytes end too early (read more, try again), and
ValueError, they are no such encoding. Cost: about 1 us per field; `read_struct(keep=)` skips what a wide footer holds
of other columns at half of that.

Encoding: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

Bytes = bytes | memoryview
Struct = dict[int, Any]

_MAX_DEPTH = 24
_MAX_VARINT_BITS = 70


def read_struct(buffer: Bytes, position: int = 0, *, keep: tuple[int, int] | None = None) -> tuple[Struct, int]:
    """Read a struct.

    Args:
        buffer: holds the struct from `position` on.
        keep: (field, index): of this list field read only the element `index`, as a list of one (or of none, if the
            list is shorter); the others are skipped.

    Returns:
        The fields by id, and the position of the first byte after the struct.

    Raises:
        EOFError: the buffer ends inside the struct.
        ValueError: not a struct.
    """
    try:
        return _read_struct(buffer, position, 0, keep)
    except IndexError:
        raise EOFError(f"struct at byte {position} continues after byte {len(buffer)}") from None


def find_field(buffer: Bytes, position: int, field: int) -> tuple[int, int]:
    """Type and position of a field's value in the struct at `position`; type 0 if the struct lacks it.

    Skips the fields before it. Raises as `read_struct`.
    """
    try:
        found = 0
        while True:
            head = buffer[position]
            position += 1
            if head == 0:
                return 0, position
            if head >> 4:
                found += head >> 4
            else:
                found, position = _read_zigzag(buffer, position)
            if found == field:
                return head & 15, position
            if head & 15 > FALSE:  # a boolean is in its type
                position = _skip(buffer, position, head & 15, 1)
    except IndexError:
        raise EOFError(f"struct at byte {position} continues after byte {len(buffer)}") from None


def read_list_head(buffer: Bytes, position: int) -> tuple[int, int, int]:
    """Element type and length of the list at `position`, and the position of its first element; raises as above."""
    try:
        return _read_list_head(buffer, position)
    except IndexError:
        raise EOFError(f"list at byte {position} continues after byte {len(buffer)}") from None


def write_struct(fields: Sequence[tuple[int, int, int | bytes]], *, after: int = 0, end: bool = True) -> bytes:
    """Encode (id, type, value) fields of rising ids.

    A value is an int for I16 to I64, plain bytes for BINARY, and bytes already encoded for LIST and STRUCT. `after` is
    the id of the field that came before, and `end=False` leaves the struct open, so that a struct can be put together
    from parts of which some are kept.
    """
    out = bytearray()
    for field, type, value in fields:
        if field - after <= 15:
            out.append((field - after) << 4 | type)
        else:
            out.append(type)
            out += write_varint(field << 1)
        after = field
        if isinstance(value, int):
            out += write_varint(value << 1 ^ value >> 63)
        elif type == BINARY:
            out += write_varint(len(value)) + value
        else:
            out += value
    if end:
        out.append(0)
    return bytes(out)


def write_list(type: int, elements: Sequence[bytes]) -> bytes:
    """Encode a list of elements that are already encoded."""
    size = len(elements)
    head = bytes([size << 4 | type]) if size < 15 else bytes([15 << 4 | type]) + write_varint(size)
    return head + b"".join(elements)


def write_varint(value: int) -> bytes:
    """Encode an integer of at least 0, seven bits a byte, lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(buffer: Bytes, position: int) -> tuple[int, int]:
    byte = buffer[position]
    position += 1
    if byte < 128:
        return byte, position
    value, shift = byte & 127, 7
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError(f"integer before byte {position} has more than 64 bits")


def _read_zigzag(buffer: Bytes, position: int) -> tuple[int, int]:
    value, position = _read_varint(buffer, position)
    return value >> 1 ^ -(value & 1), position


def _read_list_head(buffer: Bytes, position: int) -> tuple[int, int, int]:
    head = buffer[position]
    position += 1
    size = head >> 4
    if size == 15:
        size, position = _read_varint(buffer, position)
    if size > len(buffer) - position:  # an element has at least one byte
        raise IndexError
    return head & 15, size, position


def _read_struct(buffer: Bytes, position: int, depth: int, keep: tuple[int, int] | None) -> tuple[Struct, int]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"structs at byte {position} are nested more than {_MAX_DEPTH} deep")
    fields: Struct = {}
    field = 0
    while True:
        head = buffer[position]
        position += 1
        if head == 0:
            return fields, position
        if head >> 4:
            field += head >> 4
        else:
            field, position = _read_zigzag(buffer, position)
        type = head & 15
        if I16 <= type <= I64:
            byte = buffer[position]
            if byte < 128:  # most integers of a page header
                fields[field] = byte >> 1 ^ -(byte & 1)
                position += 1
            else:
                fields[field], position = _read_zigzag(buffer, position)
        elif type <= FALSE:  # the boolean is in the type
            fields[field] = type == TRUE
        elif keep is not None and field == keep[0] and type == LIST:
            fields[field], position = _read_one_of_list(buffer, position, depth + 1, keep[1])
        else:
            fields[field], position = _read_value(buffer, position, type, depth + 1)


def _read_one_of_list(buffer: Bytes, position: int, depth: int, index: int) -> tuple[list[Any], int]:
    type, size, position = _read_list_head(buffer, position)
    kept: list[Any] = []
    for i in range(size):
        if i == index:
            value, position = _read_value(buffer, position, type, depth)
            kept.append(value)
        else:
            position = _skip(buffer, position, type, depth)
    return kept, position


def _read_value(buffer: Bytes, position: int, type: int, depth: int) -> tuple[Any, int]:
    """Read a value that is not a field's boolean; a boolean in a list has a byte of its own."""
    if I16 <= type <= I64:
        return _read_zigzag(buffer, position)
    if type == STRUCT:
        return _read_struct(buffer, position, depth, None)
    if type == BINARY:
        size, position = _read_varint(buffer, position)
        if size > len(buffer) - position:
            raise IndexError
        return bytes(buffer[position : position + size]), position + size
    if type in (LIST, SET):
        if depth > _MAX_DEPTH:
            raise ValueError(f"lists at byte {position} are nested more than {_MAX_DEPTH} deep")
        type, size, position = _read_list_head(buffer, position)
        values = []
        for _ in range(size):
            value, position = _read_value(buffer, position, type, depth + 1)
            values.append(value)
        return values, position
    if type in (TRUE, FALSE, BYTE):
        return (buffer[position] if type == BYTE else buffer[position] == TRUE), position + 1
    stop = _skip(buffer, position, type, depth)  # Parquet has neither doubles nor maps
    return bytes(buffer[position:stop]), stop


def _skip(buffer: Bytes, position: int, type: int, depth: int) -> int:
    """Position after a value; unlike `_read_value`, of a list's boolean, not of a field's."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"values at byte {position} are nested more than {_MAX_DEPTH} deep")
    if I16 <= type <= I64:
        while buffer[position] > 127:
            position += 1
        return position + 1
    if type == BINARY:
        size, position = _read_varint(buffer, position)
        return position + size
    if type == STRUCT:
        while True:
            head = buffer[position]
            position += 1
            if head == 0:
                return position
            if not head >> 4:
                _, position = _read_varint(buffer, position)
            type = head & 15
            if type > FALSE:
                position = _skip(buffer, position, type, depth + 1)
    if type in (LIST, SET):
        type, size, position = _read_list_head(buffer, position)
        for _ in range(size):
            position = _skip(buffer, position, type, depth + 1)
        return position
    if type in (TRUE, FALSE, BYTE):
        return position + 1
    if type == DOUBLE:
        return position + 8
    if type == MAP:
        size, position = _read_varint(buffer, position)
        if size > len(buffer) - position:
            raise IndexError
        if size:
            types = buffer[position]
            position += 1
            for _ in range(size):
                position = _skip(buffer, position, types >> 4, depth + 1)
                position = _skip(buffer, position, types & 15, depth + 1)
        return position
    raise ValueError(f"type {type} before byte {position} is not one of the compact encoding")
