"""What an error in a message is: its class by name, its arguments as plain values, its text.

In, at a sender: an error. Out, at a receiver: the same error, to be raised there. One description for all that travels,
between ranks and between a leader and its worker. Must hold: nothing in it is executable; only classes of torchmix are
looked up by name, and any other error becomes a RuntimeError that names it; lengths are bounded. Cost: none where there
is no error.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import Annotated

import msgspec

from torchmix import errors
from torchmix.errors import TorchmixError

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
