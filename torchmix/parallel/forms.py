"""What arrays and errors are in a message: no values of the one, nothing executable of the other."""

from __future__ import annotations

import math
import traceback
from contextlib import suppress
from typing import Annotated

import msgspec

from torchmix import errors
from torchmix.errors import TorchmixError

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
