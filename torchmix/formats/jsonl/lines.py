"""Lines of JSON -> one key of each, as an Arrow array.

In: bytes of whole lines. Out: an array of a value for each line that is not blank: text, a list of texts, JSON, or a
list of integers. Must hold: every line is one object, read strictly as RFC 8259 says, and where a key stands twice the
last one counts; half of an escaped surrogate pair is U+FFFD; the key is there, and it is null or of the right type; any
other line is a `LineFault` that says which. What the array holds does not depend on which lines are parsed together.

Cost, against `json.loads` on each line and pages of 64 KiB: text 0.35 of its CPU time, lists of integers 0.5. Of the
other ways that were measured, pyarrow.json takes 2 to 3 times as long as this and cannot tell a missing key from a
null; finding the digits of a list with numpy takes as long as making Python's integers does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.formats.column import Kind
from torchmix.formats.jsonl.surrogates import without_lone_surrogates
from torchmix.formats.placed import PlacedValues
from torchmix.recipe.build import listed, nearest

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
            assert kind in ("json", "values"), "only texts and images have places"
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
            hint = "" if self._placed is not None else self._keys_of(line) or _hint(line)
            raise LineFault(f"{error}{hint}", line=number, offset=offset, is_json=True) from None
        except OverflowError:
            message = "a token does not fit 64 bits"
            raise LineFault(message, line=number, offset=offset, is_json=True) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineFault(_about(line, error), line=number, offset=offset, is_json=False) from None
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
                    return [self._placed.images(row) for row in rows]
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


def _about(line: bytes, error: Exception) -> str:
    """What a line that is no JSON may be."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: {error.reason} in the value of the key, at its byte {error.start}"
    if line.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return "it is compressed, by its first bytes; name the file .jsonl.gz or .jsonl.zst"
    if b"\0" in line:
        return "it holds zero bytes; is the text UTF-16? Write it as UTF-8, as by `iconv -t UTF-8`"
    return f"{error}{_hint(line)}"


def _hint(line: bytes) -> str:
    """What to do with a file whose lines are no objects."""
    if line.lstrip(BLANK).startswith(b"["):
        return "; a file that is one JSON array is not read, write one object on each line, as by `jq -c '.[]'`"
    if line.strip(BLANK) == b"{":
        return "; an object must not go over several lines, write each on one line, as by `jq -c .`"
    return ""
