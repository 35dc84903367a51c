"""What verbs share: numbers as people read them, aligned tables, and a bar only where somebody watches."""

from __future__ import annotations

import argparse
import io
import sys

import pytest

from torchmix.cli.terminal import at_least, count_text, percent_text, print_table, progress_bar
from torchmix.recipe.amounts import bytes_text


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.7, "70 %"), (1.0, "100 %"), (0.9999, "99.99 %"), (1e-5, "0.001 %"), (0.123456, "12.35 %"), (0.0, "0 %")],
)
def test_shares_keep_four_digits(share: float, text: str) -> None:
    assert percent_text(share) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 2**20, "1.5 GiB"), (3000 * 2**40, "3,000.0 TiB")],
)
def test_sizes_are_in_the_largest_unit(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


def test_counts_have_separators() -> None:
    assert count_text(12345678) == "12,345,678"


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"name": "what it is called", "n": "how many"}, [("a", "1"), ("longer", "1,234")], explain=False)
    assert capsys.readouterr().out == "name        n\na           1\nlonger  1,234\n"


def test_meanings_stand_below_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"name": "what it is called", "n": "word " * 30}, [("a", "1")], explain=True)
    table, meanings = capsys.readouterr().out.split("\n\n")
    assert table == "name  n\na     1"
    first, second, *more = meanings.splitlines()
    assert first == "  name  what it is called" and second.startswith("  n     word word")
    assert more and all(line.startswith("        word") and len(line) <= 100 for line in more)


def test_counts_of_arguments_have_a_lower_bound() -> None:
    assert at_least(1)("12") == 12
    for text in ("0", "-3", "1.5", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            at_least(1)(text)


@pytest.mark.parametrize(
    ("stream", "silent", "shown"), [(Screen, False, True), (Screen, True, False), (io.StringIO, False, False)]
)
def test_progress_is_shown_only_to_a_watcher(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], silent: bool, shown: bool
) -> None:
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar(4, unit="step", title="planning", silent=silent) as bar:
        bar.update(4)
    assert ("planning" in screen.getvalue()) == shown
