"""Halves of surrogate pairs that JSON escapes -> U+FFFD.

In: bytes of JSON. Out: the same with `\\ufffd` for each first half without a second behind it, and for each second half
without a first. `json.dumps` writes such halves of a text that was cut within a character, and no UTF-8 can hold them,
so that strict parsers refuse the line. The replacement is what Unicode recommends for what cannot be decoded
(https://www.unicode.org/versions/latest/core-spec/chapter-5/, section 5.22). Must hold: what is replaced has as many
bytes, so that places in the lines stay. Cost: one search for all escapes, where a line has failed to parse.
"""

from __future__ import annotations

import re

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
