"""One message of each kind between loaders and clients, and ways to damage its frames."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchmix.errors import CorruptPage
from torchmix.parallel.wire import ErrorForm
from torchmix.service.messages import (
    BusyReply,
    FailureReply,
    LoaderHello,
    LoaderPing,
    LoaderPong,
    LoaderRefusal,
    LoaderWelcome,
    PagesAhead,
    PieceReply,
    PieceRequest,
    decode_of_client,
    decode_of_loader,
    forms_of,
)

_ASKED: dict[str, Any] = {
    "source": np.array([0, 1], np.int32),
    "row": np.array([7, 1 << 33]),
    "epoch": np.array([0, 2]),
    "start": np.array([0, 4096]),
    "tokens": np.array([3, 0]),
}
_GIVEN: dict[str, Any] = {"ids": np.array([5, 0, 65535], np.uint16), "ids.lengths": np.array([3, 0], np.int32)}
_PAGES: dict[str, Any] = {"page": np.array([4, 8, 15])}
EXAMPLES: tuple[Any, ...] = (
    LoaderHello(client="gpu-0:71", catalog="0123456789abcdef", transforms=bytes(range(8)), masked=("web",)),
    PieceRequest(number=3, patience_ms=120_000, forms=forms_of(_ASKED)),
    PagesAhead(source=1, is_over=True, forms=forms_of(_PAGES)),
    LoaderPing(number=2),
    LoaderWelcome(loader="cpu-0:12", window_bytes=1 << 24),
    LoaderRefusal(reason="the client has catalog x, this loader serves y (train)"),
    PieceReply(number=3, request=0xC0FFEE, forms=forms_of(_GIVEN)),
    FailureReply(number=3, error=ErrorForm.of(CorruptPage("source 'web': the page at bytes [4, 90)"))),
    BusyReply(number=3),
    LoaderPong(
        number=2,
        owed=1,
        waiting=4,
        at_hand_s=0.25,
        figures={"requests": 9, "decode_amplification": 1.5},
        words=("12:00:00 WARNING a page is damaged",),
    ),
)


def example_arrays(message: Any) -> dict[str, Any]:
    """The arrays of an example."""
    kinds = {PieceRequest: _ASKED, PieceReply: _GIVEN, PagesAhead: _PAGES}
    return kinds.get(type(message), {})


def decoder_of(message: Any) -> Callable[..., tuple[Any, Any]]:
    """The side that hears it."""
    is_of_client = isinstance(message, LoaderHello | PieceRequest | PagesAhead | LoaderPing)
    return decode_of_client if is_of_client else decode_of_loader


def damaged(frames: Sequence[bytes | memoryview], chance: random.Random) -> list[bytes]:
    """Frames with bits flipped, bytes cut off or added, or a frame lost or repeated."""
    found = [bytes(frame) for frame in frames]
    at = chance.choice([k for k, frame in enumerate(found) if frame])
    frame = bytearray(found[at])
    match chance.randrange(5):
        case 0:
            frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        case 1:
            del frame[chance.randrange(len(frame)) :]
        case 2:
            frame += chance.randbytes(chance.randint(1, 100))
        case 3:
            return found[:1]
        case _:
            return [*found, found[at]]
    found[at] = bytes(frame)
    return found
