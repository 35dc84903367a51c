"""Notes what decoders of videos and sounds do in a process: for each item its hash, and the frames or seconds.

`install` does so from now on, into FOLDER/PID; `site_folder` of `decode_log` has it installed in every new interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

from tests.support.decode_log import digest_of
from torchmix.modalities.sounds import features
from torchmix.modalities.sounds.kind import SoundModality
from torchmix.modalities.videos import frames
from torchmix.modalities.videos.kind import VideoModality


class Decoded(NamedTuple):
    """One decoding of an item."""

    digest: str
    amount: float
    """Frames that came out of the decoder, or seconds."""


class CountedStream:
    """A stream whose decoder says which packets it gets, and counts the frames that it gives."""

    def __init__(self, stream: Any, given: Callable[[int], None] = lambda count: None) -> None:
        self.codec_context, self._decoder, self._given = self, stream.codec_context, given
        self.name = self._decoder.name
        self.times: list[int] = []
        self.num_frames = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("thread_count", "skip_frame"):
            setattr(self._decoder, name, value)
        else:
            super().__setattr__(name, value)

    def flush_buffers(self) -> None:
        """See `CodecContext`."""
        self._decoder.flush_buffers()

    def decode(self, packet: Any) -> list[Any]:
        """See `CodecContext`."""
        if packet is not None:
            self.times.append(packet.pts)
        found: list[Any] = self._decoder.decode(packet)
        self.num_frames += len(found)
        self._given(len(found))
        return found


def install(folder: str) -> Callable[[], None]:
    """Note what is decoded from now on, until the function that is returned is called."""
    here, lock = local(), Lock()
    before = VideoModality.decode, SoundModality.decode, frames.decoded_frames, features._blocks

    def noted(decode: Callable[..., Any]) -> Callable[..., Any]:
        def with_note(self: Any, content: Any, *words: Any) -> Any:
            here.amount = 0.0
            try:
                return decode(self, content, *words)
            finally:
                line = f"{digest_of(bytes(content))} {here.amount}\n"
                with lock, Path(folder, str(os.getpid())).open("a", encoding="ascii") as log:
                    log.write(line)

        return with_note

    def counted(stream: Any, packets: Any, wanted: Any) -> Iterator[Any]:
        def given(count: int) -> None:
            here.amount += count

        yield from before[2](CountedStream(stream, given), packets, wanted)

    def timed(soundfile: Any, content: Any, header: Any) -> Iterator[Any]:
        for block, is_last in before[3](soundfile, content, header):
            here.amount += len(block) / header.rate
            yield block, is_last

    VideoModality.decode, SoundModality.decode = map(noted, before[:2])  # type: ignore[method-assign]
    frames.decoded_frames, features._blocks = counted, timed

    def undo() -> None:
        VideoModality.decode, SoundModality.decode = before[:2]  # type: ignore[method-assign]
        frames.decoded_frames, features._blocks = before[2:]

    return undo


def decoded(folder: Path) -> list[Decoded]:
    """All decodings, of all processes."""
    lines = [line.split() for log in folder.iterdir() for line in log.read_text(encoding="ascii").splitlines()]
    return [Decoded(digest, float(amount)) for digest, amount in lines]
