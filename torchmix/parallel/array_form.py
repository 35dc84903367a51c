"""The form of an array in a message, without its values: name, dtype, shape.

In, at a sender: an array. Out, at a receiver: how many bytes it has, and how to see them. One description for all that
travels, between ranks and between a leader and its worker. Must hold: whatever decodes is bounded, so a damaged or
foreign message makes nobody allocate much. Size: some 20 bytes in msgpack, the list [name, code of the dtype, shape].
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

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
