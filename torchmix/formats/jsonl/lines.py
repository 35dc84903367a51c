"""Lines of JSON -> one key of each, as an Arrow array; and the pages that lines are read by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.errors import SourceUnreadable
from torchmix.formats.column import Kind
from torchmix.formats.items import PlacedValues
from torchmix.formats.jsonl.frames import Codec, Frame, codec_of_name, decompress, find_frames
from torchmix.recipe.build import listed, nearest
from torchmix.storage.store_file import opened

# --- Halves of surrogate pairs that JSON escapes -> U+FFFD.
#
# What is replaced has as many bytes, so that places in the lines stay. Cost: one search for all escapes, where a line
# has failed to parse.

_REPLACEMENT = rb"\ufffd"
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|u[dD][c-fC-F][0-9a-fA-F]{2}|.)"
)
"""A backslash and what belongs to it: the first half of a pair, with the second if it follows; a second half alone; or
one byte, which may be a backslash too."""


def without_lone_surrogates(content: bytes | memoryview) -> bytes | None:
    """The content with U+FFFD for half pairs; None if there are none."""
    whole = _ESCAPE.sub(_whole, content)
    return None if whole == content else whole


def _whole(escape: re.Match[bytes]) -> bytes:
    """One escape; of those found, half a pair alone has the length of `\\ufffd`."""
    found = escape[0]
    return _REPLACEMENT if len(found) == len(_REPLACEMENT) else found


# --- Lines of JSON -> one key of each, as an Arrow array.
#
# Every line is one object, read strictly as RFC 8259 says, and where a key stands twice the last one counts; half of
# an escaped surrogate pair is U+FFFD; the key is there, and it is null or of the right type; any other line is a
# `LineFault` that says which. What the array holds does not depend on which lines are parsed together.
#
# Cost, against `json.loads` on each line and pages of 64 KiB: text 0.35 of its CPU time, lists of integers 0.5. Two
# other ways were measured: pyarrow.json takes 2 to 3 times as long as this and cannot tell a missing key from a
# null; finding the digits of a list with numpy takes as long as making Python's integers does.

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLANK = b" \t\r"
"""What may stand on a line without an object; JSON has no other white space within a line."""
MOST_NAME = 60
"""Characters of a key that a message shows."""


_HELD: dict[Kind, Any] = {
    "text": str | None,
    "tokens": list[int] | None,
    "values": list[str | None] | str | None,
    "json": msgspec.Raw,
    "flags": list[int | bool] | None,
}


_NULL = msgspec.Raw(b"null")


class LineFault(ValueError):
    """A line that is not what it should be."""

    def __init__(self, message: str, *, line: int, offset: int, is_json: bool) -> None:
        """Describe the line.

        Args:
            message: What is wrong with it.
            line: Lines before it in what was parsed.
            offset: Bytes before it in what was parsed.
            is_json: It is JSON, but does not hold what it should.
        """
        super().__init__(message)
        self.line = line
        self.offset = offset
        self.is_json = is_json


class LineParser:
    """Reads one key of every line; safe to share between threads."""

    def __init__(self, column: str, kind: Kind) -> None:
        """Prepare to read a key.

        Args:
            column: The key; `a.b` is key `b` of the object at key `a`. Or a `placed_column`.
            kind: Whether it holds text, a list of integers, one text or a list of them, or anything, as JSON.
        """
        self._kind = kind
        self._placed = PlacedValues.of(column)
        self._path = ["value"] if self._placed is not None else column.split(".")
        if self._placed is not None:
            assert kind in ("json", "values"), "only texts and items have places"
            self._decoder: Any = msgspec.json.Decoder(dict[str, Any])
            return
        held: Any = _HELD[kind]
        for depth, key in enumerate(reversed(self._path)):
            field: Any = ("value", held) if depth == 0 else ("value", held | None)
            held = msgspec.defstruct(f"Row{depth}", [field], rename={"value": key}, gc=False)
        self._decoder = msgspec.json.Decoder(held)

    def parse(self, content: bytes | memoryview, faults: dict[int, LineFault] | None = None) -> pa.Array:
        """The values of all lines.

        Args:
            content: Lines; the last may lack its end.
            faults: Takes lines that are at fault, by their place among those that are not blank; they read as null.

        Returns:
            [lines that are not blank] large_string, or large_list<int64> where a null is an empty list.

        Raises:
            LineFault: The first line that is at fault, if nothing takes it.
        """
        try:
            rows = self._decoder.decode_lines(content)
            if _has_an_object_on_each_line(content, len(rows)):
                return self._array(self._values(rows))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
            whole = without_lone_surrogates(content)
            if whole is not None:
                return self.parse(whole, faults)
        values = []
        for row, line in enumerate(_lines(content)):
            try:
                values.append(self._value(*line))
            except LineFault as fault:
                if faults is None:
                    raise
                faults[row] = fault
                values.append(None)
        return self._array(values)

    def _value(self, number: int, offset: int, line: bytes) -> Any:
        """What one line holds."""
        try:
            value = self._values([self._decoder.decode(line)])[0]
            if self._kind == "tokens" and value is not None:
                np.fromiter(value, np.int64, len(value))
        except msgspec.ValidationError as error:
            hint = "" if self._placed is not None else self._keys_of(line) or hint_of_line(line)
            raise LineFault(f"{error}{hint}", line=number, offset=offset, is_json=True) from None
        except OverflowError:
            message = "a token does not fit 64 bits"
            raise LineFault(message, line=number, offset=offset, is_json=True) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineFault(about_line(line, error), line=number, offset=offset, is_json=False) from None
        return value

    def _keys_of(self, line: bytes) -> str:
        """The keys that a line has, where it lacks the one that is read."""
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ""  # what stands behind the value at fault is no JSON either
        for key in self._path:
            if not isinstance(found, dict):
                return ""
            if key not in found:
                names = [name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}..." for name in found]
                return f"; it has {f'the keys {listed(names)}' if names else 'no keys'}{nearest(key, names)}"
            found = found[key]
        return ""

    def _values(self, rows: list[Any]) -> list[Any]:
        if self._placed is not None:
            try:
                if self._kind == "values":
                    return [self._placed.items(row) for row in rows]
                return [msgspec.Raw(msgspec.json.encode(self._placed.texts(row))) for row in rows]
            except ValueError as error:
                raise msgspec.ValidationError(str(error)) from None
        values = [row.value for row in rows]
        for _ in self._path[1:]:
            values = [None if value is None else value.value for value in values]
        return values

    def _array(self, values: list[Any]) -> pa.Array:
        if self._kind == "text":
            return pa.array(values, pa.large_string())
        if self._kind == "json":
            texts = [None if value is None or value == _NULL else bytes(value) for value in values]
            return pa.array(texts, pa.large_binary()).view(pa.large_string())
        if self._kind == "values":
            lists_of_texts = [[value] if isinstance(value, str) else value or () for value in values]
            return pa.array(lists_of_texts, pa.large_list(pa.large_string()))
        lists = [value or () for value in values]
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(value) for value in lists], out=offsets[1:])
        ids = np.fromiter(chain.from_iterable(lists), np.int64, int(offsets[-1]))
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids))


def whole_lines(content: bytes, num_rows: int) -> bytes:
    """The first lines of some bytes, so many that `num_rows` of them are not blank."""
    stop = 0
    for _, offset, line in _lines(content):
        if not num_rows:
            break
        num_rows -= 1
        stop = offset + len(line) + 1
    return content[:stop]


def lines_of_rows(content: bytes | memoryview, *, is_first: bool) -> Iterator[bytes]:
    """Each line that is not blank; `is_first`: a byte order mark may stand before the first one."""
    skipped = len(BYTE_ORDER_MARK) if is_first and bytes(content[: len(BYTE_ORDER_MARK)]) == BYTE_ORDER_MARK else 0
    return (line for _, _, line in _lines(content[skipped:]))


def _lines(content: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line that is not blank."""
    offset = 0
    for number, line in enumerate(bytes(content).split(b"\n")):
        if line.strip(BLANK):
            yield number, offset, line
        offset += len(line) + 1


def _has_an_object_on_each_line(content: bytes | memoryview, num_objects: int) -> bool:
    """Whether objects that were found in some bytes, in whatever lines, stand one on each line.

    If as many lines begin with `{` and end with `}`, no object goes over a line's end: what follows `}` inside an
    object, or precedes `{` in it, is never the other of the two.
    """
    cells = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(cells == ord("\n"))
    if not len(ends) or ends[-1] != len(cells) - 1:
        ends = np.append(ends, len(cells))
    if len(ends) != num_objects or not len(cells):
        return not num_objects and not len(cells)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    lasts = ends - 1 - (cells[ends - 1] == ord("\r"))
    return bool((cells[starts] == ord("{")).all() and (cells[lasts] == ord("}")).all())


def about_line(line: bytes, error: Exception) -> str:
    """What a line that is no JSON may be."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: {error.reason} in the value of the key, at its byte {error.start}"
    if line.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return "it is compressed, by its first bytes; name the file .jsonl.gz or .jsonl.zst"
    if b"\0" in line:
        return "it holds zero bytes; is the text UTF-16? Write it as UTF-8, as by `iconv -t UTF-8`"
    return f"{error}{hint_of_line(line)}"


def hint_of_line(line: bytes) -> str:
    """What to do with a file whose lines are no objects."""
    if line.lstrip(BLANK).startswith(b"["):
        return "; a file that is one JSON array is not read, write one object on each line, as by `jq -c '.[]'`"
    if line.strip(BLANK) == b"{":
        return "; an object must not go over several lines, write each on one line, as by `jq -c .`"
    return ""


# --- A file of JSON lines -> its pages: runs of whole lines that are read together.
#
# A page is the lines that begin in the same PAGE_BYTES of the file; of a compressed file, the lines that begin in the
# frames whose content begins in the same PAGE_BYTES of all content. So pages follow from the file's bytes alone, and
# no line is in two of them. What a page's bytes hold beside its lines, where frames end inside lines, its `kind` says.
# Memory: a few pages or frames, and the longest line.

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


# --- Other keys of a file of JSON lines: the properties of its rows.
#
# Rows are those of a scan, in order; a key that a line lacks is null there. Cost: each line is parsed once, as far as
# these keys.
#
# A key's values may differ in type from line to line. Whole and broken numbers become broken ones; numbers and text
# together, or any other two types, become the text of their JSON.


def read_properties(path: str | Path, columns: Sequence[str], where: str) -> pa.Table:
    """The named top-level keys of a file's lines.

    Raises:
        SourceUnreadable: No such file, which is `where`, or no line with one of the keys.
    """
    decoder = msgspec.json.Decoder(_row_type(columns))
    values: dict[str, list[Any]] = {column: [] for column in columns}
    with opened(path, where) as file:
        for page in cut_pages(file.read, codec_of_name(str(path))):
            for line in lines_of_rows(page.lines, is_first=page.offset == 0):
                try:
                    row = _decode(decoder, line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    row = None  # a bad row, which a scan has judged: it has no properties
                for number, column in enumerate(columns):
                    values[column].append(None if row is None else getattr(row, f"value{number}"))
    for column, found in values.items():
        if found and all(value is None for value in found):
            raise SourceUnreadable(f"no line has a value at key {column!r}, which is named as a property", where)
    return pa.table({column: _array(found) for column, found in values.items()})


def _decode(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError:
        whole = without_lone_surrogates(line)
        if whole is None:
            raise
        return decoder.decode(whole)


def _row_type(columns: Sequence[str]) -> type[msgspec.Struct]:
    """A row of which only these keys are read."""
    fields: list[Any] = [(f"value{number}", Any, None) for number in range(len(columns))]
    rename = {f"value{number}": column for number, column in enumerate(columns)}
    return msgspec.defstruct("Properties", fields, rename=rename, gc=False)


def _array(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        texts = [None if value is None else _text(value) for value in values]
        return pa.array(texts, pa.string())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
