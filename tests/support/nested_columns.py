"""Random columns of token lists: types nested from lists and structs, and rows of them, from a seed."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa

INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


def random_type(rng: random.Random, depth: int = 3, *, plain: bool = False) -> pa.DataType:
    """A type with one leaf of integers, and at least one list around it.

    `plain`: lists of one kind, all nullable, structs of one field, and integers of 32 or 64 bits, as `make_split_file`
    writes them.
    """
    leaf = rng.choice([pa.int32(), pa.int64()] if plain else INTEGERS)
    type = _list_of(rng, _wrapped(rng, leaf, plain), plain)
    for _ in range(rng.randrange(depth)):
        type = _list_of(rng, type, plain) if rng.random() < 0.5 else type
        type = _wrapped(rng, type, plain)
    return type


def random_value(rng: random.Random, type: pa.DataType, nullable: bool = True) -> Any:
    """A value of a type; what stands for an integer is never null, all else may be where its field is nullable."""
    if nullable and not _stands_for_integer(type) and rng.random() < 0.15:
        return None
    if isinstance(type, pa.FixedSizeListType):
        return [random_value(rng, type.value_type, type.value_field.nullable) for _ in range(type.list_size)]
    if isinstance(type, pa.ListType | pa.LargeListType):
        length = rng.choice((0, 1, 2, 3, 7))
        return [random_value(rng, type.value_type, type.value_field.nullable) for _ in range(length)]
    if isinstance(type, pa.StructType):
        return {field.name: random_value(rng, field.type, field.nullable) for field in type}
    if pa.types.is_string(type):
        return rng.choice(("", "x", "beside"))
    signed = not str(type).startswith("u")
    return rng.randrange(-(1 << 6) if signed else 0, 1 << min(type.bit_width - 1, 40))


def _stands_for_integer(type: pa.DataType) -> bool:
    """An integer, or structs around it: a null of them would be a null token."""
    if isinstance(type, pa.StructType):
        return any(_stands_for_integer(field.type) for field in type)
    return bool(pa.types.is_integer(type))


def _list_of(rng: random.Random, type: pa.DataType, plain: bool) -> pa.DataType:
    if plain:
        return pa.list_(type)
    field = pa.field("element", type, nullable=rng.random() < 0.6)
    # pyarrow writes no null list of a fixed size inside another one
    kinds = [pa.list_, pa.large_list]
    if pa.types.is_integer(type):
        kinds.append(lambda entry: pa.list_(entry, 3))
    return rng.choice(kinds)(field)


def _wrapped(rng: random.Random, type: pa.DataType, plain: bool) -> pa.DataType:
    """The type itself, or a struct with it; around an integer a struct is not null."""
    if rng.random() < 0.6 or (plain and pa.types.is_integer(type)):
        return type
    fields = [pa.field("ids", type, nullable=plain or rng.random() < 0.6)]
    if not plain and rng.random() < 0.5:
        fields.insert(rng.randrange(2), pa.field("note", pa.string()))
    return pa.struct(fields)
