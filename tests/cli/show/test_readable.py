"""Text that a terminal may be shown."""

from __future__ import annotations

import unicodedata

import pytest

from torchmix.cli.terminal import excerpt, readable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, naïve 日本語 🙂", "plain, naïve 日本語 🙂"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("a\rb\nc\td\x00", "a\\rb\\nc\\td\\x00"),
        ("abc\u202edef\u2066g", "abc\\u202edef\\u2066g"),
        ("\x9b1m", "\\x9b1m"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("line\u2028end", "line\\u2028end"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("\ud800", "\\ud800"),
        ("\U000e0041tag", "\\U000e0041tag"),
    ],
)
def test_what_acts_on_a_terminal_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert readable(text) == shown


def test_no_control_character_is_left() -> None:
    everything = "".join(map(chr, range(0x11000)))
    kept = {unicodedata.category(character) for character in readable(everything)} & {"Cc", "Cs", "Zl", "Zp", "Cf"}
    assert kept == {"Cf"}, "two joiners"
    assert readable("a\n\x1b\tb", keep="\n\t") == "a\n\\x1b\tb"


def test_an_excerpt_is_the_two_ends() -> None:
    assert excerpt("abcdef", 3) == "abcdef"
    assert excerpt("abcdefg", 3) == "abc ... efg"
    assert excerpt("a\nbcd", 2) == "a\\n ... cd"
