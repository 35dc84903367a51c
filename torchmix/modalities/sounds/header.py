"""The length of a sound from its header, its last page, or a scan of its frames, without decoding it."""

from __future__ import annotations

import struct
from typing import NamedTuple

from torchmix.errors import ItemUnreadable
from torchmix.modalities.modality import ReadRange

# --- How long a sound is, how fast and how wide, by what its file says.
#
# WAV and FLAC say it in their header. The last page of an OGG file has the number of its last sample. Nothing in an
# MP3 need say it, so its frames are counted. Nothing is taken that the file is too short for. What decodes gives
# another length is refused where it is decoded, so a header that lies costs its own row alone.
#
# Sources: RFC 9639 (FLAC), RFC 3533 (OGG), RFC 7845 (Opus), the Vorbis I specification, EBU Tech 3306 (RF64), and
# ISO 11172-3 with the tags of Xing and LAME (MP3). Cost: some reads of a few bytes; of an OGG file its last 64 KiB; of
# an MP3 file all, at half a microsecond a frame of some 26 ms.

HEADER_VERSION = 1
"""Rises when a sound of before gets another length; a part of the `transform_id` of sources with sounds."""
LEAST_RATE, MOST_RATE = 4_000, 384_000
"""Samples a second."""
MOST_CHANNELS = 64
_MOST_CHUNKS = 4096
_STREAMED_BYTES = 0x7FFF_F000
"""The size of its data that a program writes into the header of a WAV before it knows it, or more."""


class SoundHeader(NamedTuple):
    """What a header says."""

    kind: str
    """`wav`, `flac`, `ogg` or `mp3`."""
    samples: int
    """Samples of a channel, at `rate`."""
    rate: int
    """Samples a second."""
    channels: int


def header_of(content: bytes | memoryview) -> SoundHeader:
    """The header of a sound whose bytes are all here; as `read_header`."""
    view = memoryview(content)
    return read_header(lambda offset, count: bytes(view[offset : offset + count]), len(view))


def read_header(read: ReadRange, num_bytes: int) -> SoundHeader:
    """The header of a sound.

    Args:
        read: Reads ranges of it.
        num_bytes: Its size.

    Raises:
        ItemUnreadable: It is no sound of these kinds, is cut off, is empty, or is of a form that is not read.
    """
    head = read(0, 12)
    try:
        if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
            header = _wav(read, num_bytes)
        elif head[:4] == b"fLaC":
            header = _flac(read)
        elif head[:4] == b"OggS":
            header = _ogg(read, num_bytes)
        elif is_mp3(head):
            header = _mp3(read, num_bytes)
        else:
            raise ItemUnreadable(f"it is no WAV, FLAC, OGG or MP3; it begins with {head[:8]!r}")
    except (struct.error, IndexError):
        raise ItemUnreadable(f"its header is cut off after {num_bytes} bytes") from None
    if header.samples < 1:
        raise ItemUnreadable("it has no samples")
    if not LEAST_RATE <= header.rate <= MOST_RATE:
        message = f"its header says {header.rate} samples a second; {LEAST_RATE} to {MOST_RATE} are read"
        raise ItemUnreadable(message)
    if not 1 <= header.channels <= MOST_CHANNELS:
        raise ItemUnreadable(f"its header says {header.channels} channels; 1 to {MOST_CHANNELS} are read")
    return header


def _wav(read: ReadRange, num_bytes: int) -> SoundHeader:
    found: tuple[int, int, int] | None = None
    long_bytes, place = 0, 12
    for _ in range(_MOST_CHUNKS):
        name, size = struct.unpack("<4sI", read(place, 8))
        if name == b"ds64":
            (long_bytes,) = struct.unpack("<Q", read(place + 16, 8))
        elif name == b"fmt ":
            tag, channels, rate, _, align, bits = struct.unpack("<HHIIHH", read(place + 8, 16))
            if tag == 0xFFFE:
                (tag,) = struct.unpack("<H", read(place + 32, 2))
            if tag not in (1, 3, 6, 7) or align != channels * -(-bits // 8) or not align:
                raise ItemUnreadable(f"it is a WAV of the form {tag} with {bits} bits and blocks of {align} bytes")
            found = rate, channels, align
        elif name == b"data":
            if found is None:
                raise ItemUnreadable("it is a WAV whose samples come before their form")
            rate, channels, align = found
            size = long_bytes if size == 0xFFFF_FFFF and long_bytes else size
            here = num_bytes - place - 8
            if size > here and size < _STREAMED_BYTES:
                raise ItemUnreadable(f"it is cut off: its header says {size} bytes of samples, and {here} are there")
            return SoundHeader("wav", min(size, here) // align, rate, channels)
        place += 8 + size + size % 2
    raise ItemUnreadable(f"it is a WAV with {_MOST_CHUNKS} chunks before its samples")


def _flac(read: ReadRange) -> SoundHeader:
    head = read(4, 38)
    if head[0] & 0x7F or int.from_bytes(head[1:4], "big") != 34:
        raise ItemUnreadable("it is a FLAC that does not begin with its form")
    bits = int.from_bytes(head[14:22], "big")
    samples = bits & (1 << 36) - 1
    if len(head) < 38:
        raise IndexError
    if not samples:
        raise ItemUnreadable("it is a FLAC that does not say how long it is; write it again, with its length")
    return SoundHeader("flac", samples, bits >> 44, (bits >> 41 & 7) + 1)


# --- OGG: pages of 27 bytes, a table of the sizes of segments, and these.

_PAGE_BYTES = 27 + 255 + 255 * 255
_BEGINS, _ENDS, _NO_SAMPLE = 2, 4, (1 << 64) - 1
_OPUS_RATE = 48_000
_OPUS_RATES = (8_000, 12_000, 16_000, 24_000)
"""Rates below 48,000 at which Opus decodes; libsndfile takes the first that is not below what the header says."""


class _OggPage(NamedTuple):
    flags: int
    granule: int
    """Number of the last sample that ends on the page; _NO_SAMPLE where none does."""
    serial: int
    num_bytes: int
    body: int
    """Where it begins in the page."""


def _page(block: bytes, place: int) -> _OggPage:
    sign, version, flags, granule, serial, _, _, count = struct.unpack_from("<4sBBQIIIB", block, place)
    if sign != b"OggS" or version:
        raise ItemUnreadable(f"it is no whole OGG: no page at byte {place}")
    sizes = block[place + 27 : place + 27 + count]
    if len(sizes) < count:
        raise IndexError
    return _OggPage(flags, granule, serial, 27 + count + sum(sizes), 27 + count)


def _ogg(read: ReadRange, num_bytes: int) -> SoundHeader:
    block = read(0, _PAGE_BYTES)
    first = _page(block, 0)
    head = block[first.body : first.num_bytes]
    if head[:7] == b"\x01vorbis":
        channels, rate = struct.unpack_from("<BI", head, 11)
        skipped = 0
    elif head[:8] == b"OpusHead":
        channels, skipped, said = struct.unpack_from("<BHI", head, 9)
        rate = next((rate for rate in _OPUS_RATES if said <= rate), _OPUS_RATE)
    else:
        raise ItemUnreadable(f"it is an OGG of {head[:8]!r}; Vorbis and Opus are read")
    if first.num_bytes < len(block) and _page(block, first.num_bytes).flags & _BEGINS:
        raise ItemUnreadable("it is an OGG of several streams")
    last = _last_page(read, num_bytes)
    if last.serial != first.serial:
        raise ItemUnreadable("it is an OGG of several sounds, one after the other")
    samples = last.granule
    if head[:8] == b"OpusHead":
        samples = (samples - skipped - _start_of_opus(read, first.num_bytes)) * rate // _OPUS_RATE
    return SoundHeader("ogg", samples, rate, channels)


def _start_of_opus(read: ReadRange, place: int) -> int:
    """The number of the first sample, from the page at `place` on, which begins the packet of tags."""
    are_tags = True
    for _ in range(_MOST_CHUNKS):
        block = read(place, _PAGE_BYTES)
        page = _page(block, 0)
        if not are_tags:
            start = 0 if page.granule == _NO_SAMPLE else max(0, page.granule - _opus_samples(block, page))
            if start and page.flags & _ENDS:
                raise ItemUnreadable("it is an Opus of one page that does not begin at 0; libsndfile reads none")
            return start
        are_tags = min(block[27 : page.body], default=255) == 255
        place += page.num_bytes
    raise ItemUnreadable(f"it is an OGG with {_MOST_CHUNKS} pages of tags")


def _opus_samples(block: bytes, page: _OggPage) -> int:
    """Samples, at 48,000 a second, of the packets that end on a page."""
    found, at, begins = 0, page.body, page.body
    for size in block[27 : page.body]:
        at += size
        if size < 255:
            kind = block[begins] >> 3
            of_frame = (
                (480, 960, 1920, 2880)[kind & 3]
                if kind < 12
                else (480, 960)[kind & 1]
                if kind < 16
                else 120 << (kind & 3)
            )
            code = block[begins] & 3
            found += of_frame * (block[begins + 1] & 63 if code == 3 else 1 if code == 0 else 2)
            begins = at
    return found


def _last_page(read: ReadRange, num_bytes: int) -> _OggPage:
    """The last page on which a sample ends; the file must end with a whole page."""
    stop = num_bytes
    while stop:
        start = max(0, stop - _PAGE_BYTES)
        block = read(start, stop - start)
        place = len(block)
        while (place := block.rfind(b"OggS", 0, place)) >= 0:
            try:
                page = _page(block, place)
            except (ItemUnreadable, struct.error, IndexError):
                continue
            if start + place + page.num_bytes == stop:
                break
        else:
            raise ItemUnreadable(f"it is cut off: no page of it ends at byte {stop}")
        if page.granule != _NO_SAMPLE:
            return page
        stop = start + place
    raise ItemUnreadable("it is an OGG without samples")


# --- MP3: frames of 4 bytes of header and their bits; tags before and behind them.

_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
"""Samples a second, by the two bits of the version."""
_KBITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KBITS_LOW = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_BLOCK_BYTES = 1 << 20
_JUNK_BYTES = 1 << 16
"""A decoder gives up after so many bytes that are no frame."""
_DECODER_DELAY = 529
"""Samples that a decoder's filters hold back."""


class _Mp3Frame(NamedTuple):
    version: int
    rate: int
    channels: int
    num_bytes: int

    @property
    def samples(self) -> int:
        return 1152 if self.version == 3 else 576

    def is_like(self, other: _Mp3Frame) -> bool:
        """Whether it may follow another one."""
        return (self.version, self.rate) == (other.version, other.rate)


def is_mp3(head: bytes) -> bool:
    """Whether bytes begin as an MP3 does: with a tag, or with a frame."""
    return head[:3] == b"ID3" or _frame(head) is not None


def _frame(head: bytes) -> _Mp3Frame | None:
    """A frame of layer III by its first four bytes; None: they are none."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    version, kbits, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or kbits in (0, 15) or rate == 3:
        return None
    found = _RATES[version][rate]
    table, samples = (_KBITS, 144) if version == 3 else (_KBITS_LOW, 72)
    num_bytes = samples * 1000 * table[kbits] // found + (head[2] >> 1 & 1)
    return _Mp3Frame(version, found, 1 if head[3] >> 6 == 3 else 2, num_bytes)


class _Blocks:
    """The bytes of a file, read a block at a time."""

    def __init__(self, read: ReadRange) -> None:
        self._read, self._start, self._block = read, 0, b""

    def at(self, place: int, count: int) -> bytes:
        """At most `count` bytes; fewer only at the end."""
        if not self._start <= place <= place + count <= self._start + len(self._block):
            self._start, self._block = place, self._read(place, max(count, _BLOCK_BYTES))
        return self._block[place - self._start : place - self._start + count]


def with_frame_count(content: bytes | memoryview) -> bytes:
    """An MP3 whose first frame says how many follow, without its tags before that.

    libsndfile guesses the length of one that does not say it from the size of its first frames, and gives no more: with
    a variable rate some lost half. It leaves out the decoder's delay of one that says it.
    """
    view = memoryview(content)
    window = _Blocks(lambda offset, count: bytes(view[offset : offset + count]))
    start = _behind_tags(window)
    first, start = _next_frame(window, start, None)
    if first is None or _lame(window.at(start, first.num_bytes), first)[0] is not None:
        return bytes(view[start:])
    header = _mp3(window.at, len(view))
    head = bytearray(window.at(start, 4))
    head[1] |= 1  # no checksum
    head[2] = head[2] & 0x0F | 0xA0  # room for the tag at any rate
    frame = _frame(bytes(head))
    assert frame is not None, "as the first one"
    tag = b"Info" + struct.pack(">II", 1, (header.samples + _DECODER_DELAY) // first.samples)
    return (bytes(head) + bytes(_side_bytes(first)) + tag).ljust(frame.num_bytes, b"\0") + view[start:]


def _mp3(read: ReadRange, num_bytes: int) -> SoundHeader:
    window = _Blocks(read)
    place = _behind_tags(window)
    first, place = _next_frame(window, place, None)
    if first is None:
        raise ItemUnreadable("it is no MP3: it has no two frames, one after the other")
    said, cut = _lame(window.at(place, first.num_bytes), first)
    count = 0
    if said is not None:
        place += first.num_bytes
    frame: _Mp3Frame | None = first
    while True:
        frame = _frame(window.at(place, 4))
        if frame is None or not frame.is_like(first):
            frame, place = _next_frame(window, place, first)
            if frame is None:
                break
        if place + frame.num_bytes > num_bytes:
            break
        count += 1
        place += frame.num_bytes
    if said is not None and count < said:
        raise ItemUnreadable(f"it is cut off: its header says {said} frames, and {count} are there")
    whole = count * first.samples
    samples = whole - _DECODER_DELAY if cut is None else whole - cut[0] - max(cut[1], _DECODER_DELAY)
    return SoundHeader("mp3", samples, first.rate, first.channels)


def _behind_tags(window: _Blocks) -> int:
    place = 0
    while (head := window.at(place, 10))[:3] == b"ID3":
        if len(head) < 10 or max(head[6:10]) > 0x7F:
            raise ItemUnreadable("it begins with a broken tag")
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        place += 10 + size + (10 if head[5] & 0x10 else 0)
    return place


def _next_frame(window: _Blocks, place: int, like: _Mp3Frame | None) -> tuple[_Mp3Frame | None, int]:
    """The next frame that another one follows, or the end of the file; within some bytes, before a tag."""
    stop = place + _JUNK_BYTES
    while place < stop:
        block = window.at(place, 4096 + 4)
        if block[:3] == b"TAG" or block[:8] == b"APETAGEX" or len(block) < 4:
            return None, place
        at = block.find(b"\xff")
        if at < 0:
            place += max(1, len(block) - 3)
            continue
        place += at
        found = _frame(window.at(place, 4))
        if found is not None and (like is None or found.is_like(like)):
            follows = window.at(place + found.num_bytes, 4)
            after = _frame(follows)
            if (after is not None and after.is_like(found)) or (like is not None and len(follows) < 4):
                return found, place
            if follows[:3] == b"TAG":
                return found, place
        place += 1
    return None, place


def _side_bytes(frame: _Mp3Frame) -> int:
    return ((32, 17) if frame.version == 3 else (17, 9))[frame.channels == 1]


def _lame(frame: bytes, first: _Mp3Frame) -> tuple[int | None, tuple[int, int] | None]:
    """What the first frame says in the place of sound: how many follow, and samples to leave out before and behind."""
    place = 4 + _side_bytes(first)
    if frame[36:40] == b"VBRI":
        return int.from_bytes(frame[50:54], "big"), None
    if frame[place : place + 4] not in (b"Xing", b"Info"):
        return None, None
    flags = int.from_bytes(frame[place + 4 : place + 8], "big")
    said = int.from_bytes(frame[place + 8 : place + 12], "big") if flags & 1 else 0
    tag = place + 8 + 4 * bool(flags & 1) + 4 * bool(flags & 2) + 100 * bool(flags & 4) + 4 * bool(flags & 8)
    held = frame[tag : tag + 24]
    if len(held) < 24 or not any(held[:9]):
        return said, None
    cut = int.from_bytes(held[21:24], "big")
    return said, (cut >> 12, cut & 0xFFF)
