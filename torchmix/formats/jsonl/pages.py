"""A file of JSON lines -> its pages: runs of whole lines that are read together.

In: a file, plain or compressed in frames, as a function that reads ranges. Out: pages in order, each with its place and
its lines. Must hold: a page is the lines that begin in the same PAGE_BYTES of the file; of a compressed file, the lines
that begin in the frames whose content begins in the same PAGE_BYTES of all content. So pages follow from the file's
bytes alone, and no line is in two of them. What a page's bytes hold beside its lines, where frames end inside lines,
its `kind` says. Memory: a few pages or frames, and the longest line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from torchmix.errors import SourceUnreadable
from torchmix.formats.jsonl.frames import Codec, Frame, decompress, find_frames
from torchmix.formats.jsonl.lines import whole_lines

PAGE_BYTES = 64 << 10
MOST_LINE_BYTES = 256 << 20
"""A longer line is refused; most likely its file is no JSON lines at all."""
READ_BYTES = 4 << 20

PLAIN, GZIP, ZSTD = 0, 1, 2
BEGINS_INSIDE, ENDS_INSIDE = 4, 8
"""Added to a kind: the page's first frame begins, or its last one ends, inside a line that is not of the page."""
KIND_OF_CODEC: dict[Codec | None, int] = {None: PLAIN, "gzip": GZIP, "zstd": ZSTD}

Read = Callable[[int, int], bytes]
"""Bytes of a file, by offset and number; fewer only where the file ends."""


class LinePage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Lines that are read together."""

    offset: int
    """First byte in the file."""
    num_bytes: int
    """Size in the file."""
    kind: int
    """PLAIN, GZIP or ZSTD, and where its frames end inside lines."""
    lines: bytes
    """Its whole lines; the last of a file may lack its end."""
    first_byte: int
    """Bytes of the file's content before `lines`."""


def cut_pages(read: Read, codec: Codec | None) -> Iterator[LinePage]:
    """The pages of a file, in order; some may hold blank lines alone.

    Raises:
        SourceUnreadable: A line or a frame is too long.
        CorruptPage: A frame is damaged.
    """
    if codec is None:
        return _cut_plain(read)
    return _cut_framed(find_frames(read, codec), KIND_OF_CODEC[codec])


def lines_of_page(content: bytes | memoryview, kind: int, num_rows: int) -> bytes | memoryview:
    """The lines of a page, or of several whose frames end with lines, from their bytes in the file.

    Args:
        content: Their bytes, end to end.
        kind: `LinePage.kind`.
        num_rows: Lines of them that are not blank.

    Raises:
        ValueError, OSError: The bytes do not decompress.
    """
    compression = kind & 3
    if compression == PLAIN:
        return content
    lines = decompress(content, "gzip" if compression == GZIP else "zstd", 2 * MOST_LINE_BYTES)
    if kind & BEGINS_INSIDE:
        lines = lines[lines.find(b"\n") + 1 :]
    return whole_lines(lines, num_rows) if kind & ENDS_INSIDE else lines


def is_alone(kind: int) -> bool:
    """Whether a page's bytes are not its lines alone, so that it is not to be read together with others."""
    return bool(kind & (BEGINS_INSIDE | ENDS_INSIDE))


def _cut_plain(read: Read) -> Iterator[LinePage]:
    offset = 0  # of the page to cut next
    buffer, start = b"", 0  # what was read, and where the page begins in it
    at_end, step_bytes = False, 2 * PAGE_BYTES  # who looks at the first page alone reads little
    while not at_end or start < len(buffer):
        last = (offset // PAGE_BYTES + 1) * PAGE_BYTES - 1  # a line that ends here or later is the page's last
        stop = buffer.find(b"\n", start + last - offset) + 1
        if not stop and not at_end:
            buffer, start = buffer[start:], 0
            line = buffer.rfind(b"\n") + 1
            if len(buffer) - line > MOST_LINE_BYTES:
                raise _too_long(offset + line)
            more = read(offset + len(buffer), max(step_bytes, len(buffer)))
            step_bytes = min(2 * step_bytes, READ_BYTES)
            at_end = not more
            buffer += more
            continue
        lines = buffer[start : stop or len(buffer)]
        yield LinePage(offset=offset, num_bytes=len(lines), kind=PLAIN, lines=lines, first_byte=offset)
        offset += len(lines)
        start += len(lines)


class _FramedPage(msgspec.Struct, kw_only=True):
    """A page of frames that is being cut."""

    cell: int
    """The PAGE_BYTES of all content in which its own frames begin."""
    offset: int
    stop: int
    kind: int
    first_byte: int = -1
    line_bytes: int = 0
    """Bytes of its last line, so far."""
    parts: list[bytes] = msgspec.field(default_factory=list)

    def add(self, part: bytes, place: int, stop: int) -> None:
        """A part of its lines, of a frame that ends at `stop`; `place` is the part's in all content."""
        if not self.parts:
            self.first_byte = place
        self.parts.append(part)
        self.stop = stop
        first_end, last_end = part.find(b"\n"), part.rfind(b"\n")
        if self.line_bytes + (first_end if first_end >= 0 else len(part)) > MOST_LINE_BYTES:
            raise _too_long(place - self.line_bytes)
        self.line_bytes = len(part) - last_end - 1 + (self.line_bytes if last_end < 0 else 0)

    def cut(self) -> LinePage:
        return LinePage(
            offset=self.offset,
            num_bytes=self.stop - self.offset,
            kind=self.kind,
            lines=b"".join(self.parts),
            first_byte=self.first_byte,
        )


def _cut_framed(frames: Iterator[Frame], kind: int) -> Iterator[LinePage]:
    page: _FramedPage | None = None  # of the frame at hand
    owner: _FramedPage | None = None  # in which the line begins that the last frame did not end
    place = 0
    for frame in frames:
        content = frame.content
        if not content:
            continue
        stop = frame.offset + frame.num_bytes
        if page is None or place // PAGE_BYTES != page.cell:
            if page is not None and page is not owner and page.parts:
                yield page.cut()
            page = _FramedPage(
                cell=place // PAGE_BYTES,
                offset=frame.offset if place else 0,  # what holds the file's first line is known by it
                stop=stop,
                kind=kind + (BEGINS_INSIDE if owner is not None else 0),
            )
        head_bytes = 0
        if owner is not None:
            head_bytes = content.find(b"\n") + 1 or len(content)
            owner.add(content[:head_bytes], place, stop)
            if owner is not page and head_bytes < len(content):
                owner.kind |= ENDS_INSIDE
            if content[head_bytes - 1] == ord("\n"):
                if owner is not page:
                    yield owner.cut()
                owner = None
        if head_bytes < len(content):
            page.add(content[head_bytes:], place + head_bytes, stop)
            if content[-1] != ord("\n"):
                owner = page
        place += len(content)
    if owner is not None and owner is not page:
        yield owner.cut()
    if page is not None and page.parts:
        yield page.cut()


def _too_long(offset: int) -> SourceUnreadable:
    return SourceUnreadable(
        f"a line after byte {offset} of its content has over {MOST_LINE_BYTES / 2**20:.4g} MiB; is it "
        "JSON lines, with one object on each line?"
    )
