"""Which frames of a video are seen, decoded from the keyframe before, and scaled."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import ItemUnreadable
from torchmix.modalities.videos.packets import VideoHeader, opened, packets_of, unreadable

# --- Some frames of a video, by their numbers in the order in which they are shown.
#
# Of each group of pictures with such a frame, packets are decoded from its keyframe until the last of these frames has
# come; groups without one are passed over, and so are frames of H.264 that are not wanted and that no other frame
# refers to. (HEVC's say as much of their own temporal layer alone.) One thread decodes and one scales, with swscale's
# exact and portable arithmetic, so that values depend on the build alone. Cost: frames from a keyframe to the last that
# is wanted.

_SAYS_REFERENCES = ("h264",)
"""Codecs whose packets say whether any frame refers to theirs."""


def frames_of(
    content: bytes | memoryview, header: VideoHeader, numbers: list[int], *, width: int, height: int
) -> Iterator[NDArray[np.uint8]]:
    """Frames, uint8 [height, width, 3], after turning.

    Args:
        content: The bytes of the video.
        header: As the index found it.
        numbers: Which, ascending.
        width: Pixels of a row that it is scaled to.
        height: Rows that it is scaled to.

    Raises:
        ItemUnreadable: It does not decode, or is not as the index found it.
    """
    container, stream = opened(io.BytesIO(content), bytes(content[:64]))
    with container:
        packets = list(packets_of(container, stream))
        if len(packets) != header.frames:
            raise ItemUnreadable(f"it has {len(packets)} frames, and its tables say {header.frames}")
        times = sorted(packet.pts for packet in packets)
        if len(set(times)) < len(times):
            raise ItemUnreadable("two frames of it are shown at one time")
        wanted = [times[number] for number in numbers]
        try:
            yield from _scaled(decoded_frames(stream, packets, wanted), header, width, height)
        except (ItemUnreadable, MemoryError):
            raise
        except Exception as error:  # libavcodec's errors are of many kinds
            raise unreadable("it does not decode", error) from None


def decoded_frames(stream: Any, packets: list[Any], wanted: list[int]) -> Iterator[Any]:
    """The frames of some times, ascending."""
    decoder = stream.codec_context
    decoder.thread_count = 1
    keys = [place for place, packet in enumerate(packets) if packet.is_keyframe]
    times_of_keys = [packets[place].pts for place in keys]
    if not keys or times_of_keys != sorted(times_of_keys):
        raise ItemUnreadable("it has no keyframes in the order of their times")
    passes_over = decoder.name in _SAYS_REFERENCES
    at = 0
    while at < len(wanted):
        group = max(0, bisect_right(times_of_keys, wanted[at]) - 1)
        last = at + 1
        end = times_of_keys[group + 1] if group + 1 < len(keys) else None
        while last < len(wanted) and (end is None or wanted[last] < end):
            last += 1
        left = wanted[at:last]
        asked, held = set(left), dict[int, Any]()
        decoder.flush_buffers()
        for packet in (*packets[keys[group] :], None):
            if passes_over:
                decoder.skip_frame = "DEFAULT" if packet is None or packet.pts in asked else "NONREF"
            for frame in decoder.decode(packet):
                if frame.pts in asked:
                    held[frame.pts] = frame
            while left and left[0] in held:
                yield held.pop(left.pop(0))
            if not left:
                break
        if left:
            raise ItemUnreadable(f"{len(left)} of its frames do not decode")
        at = last


def _scaled(frames: Iterator[Any], header: VideoHeader, width: int, height: int) -> Iterator[NDArray[np.uint8]]:
    from av.video.reformatter import Interpolation

    exact = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT | Interpolation.FULL_CHR_H_INT
    for frame in frames:
        turns, rest = divmod(round(frame.rotation), 90)
        if rest:
            raise ItemUnreadable(f"it is turned by {frame.rotation} degrees")
        is_turned = bool(turns % 2)
        shown = (frame.height, frame.width) if is_turned else (frame.width, frame.height)
        if shown != (header.width, header.height):
            said = f"its header says {header.width} x {header.height}"
            raise ItemUnreadable(f"a frame has {shown[0]} x {shown[1]} pixels, {said}")
        sides = (height, width) if is_turned else (width, height)
        scaled = frame.reformat(width=sides[0], height=sides[1], format="rgb24", interpolation=exact, threads=1)
        yield np.ascontiguousarray(np.rot90(scaled.to_ndarray(), turns))
