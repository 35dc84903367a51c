"""Text from files, made safe and short for a terminal.

In: any text. Out: text that a terminal shows as it is. Must hold: nothing in it moves the cursor, alters colours or
turns the direction of writing: what a document holds must not act on the machine of who looks at it. Cost: about 100 ns
a character.
"""

from __future__ import annotations

import unicodedata

UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of Unicode: controls, formats, surrogates, private and unassigned characters, separators of lines."""
JOINERS = frozenset("\u200c\u200d")
"""Formats that words of some scripts, and many emoji, are written with."""


def readable(text: str, *, keep: str = "") -> str:
    """The text with unsafe characters as escapes, as `\\x1b` or `\\u202e`; those in `keep` stay."""
    return "".join(character if _is_safe(character) or character in keep else _escape(character) for character in text)


def excerpt(text: str, most: int) -> str:
    """The text in one line, as `readable`: whole if it has up to 2 x `most` characters, else its two ends."""
    if len(text) <= 2 * most:
        return readable(text)
    return f"{readable(text[:most])} ... {readable(text[-most:] if most else '')}"


def _is_safe(character: str) -> bool:
    return unicodedata.category(character) not in UNSAFE or character in JOINERS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
