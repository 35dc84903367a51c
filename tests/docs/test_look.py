"""The look at pages in a real browser finds what is wrong with a page, and nothing where nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.look import faults_of, served
from tests.support.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
HEAD = '<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
FAULTY = {
    "wide": ('<p style="width: 800px">wide</p>', "wide.html at 390, light: is 8"),
    "cut": (
        '<article><div style="width: 90px; overflow: hidden; white-space: pre">a line that is longer</div></article>',
        "cut.html at 1280, dark: cuts a line: DIV. a line",
    ),
    "missing": ('<img src="none.png">', "missing.html at 1280, light: a picture is missing"),
    "outside": (
        '<script src="http://127.0.0.1:9/x.js" async></script>',
        "outside.html asks for http://127.0.0.1:9/x.js",
    ),
    "bright": ("<style>body { background: #fff }</style>", "bright.html at 1280, dark: has not the colors of"),
    "script": ("<script>throw new Error('oh')</script>", "script.html: "),
}


@pytest.mark.system
def test_each_fault_of_a_page_is_found_and_a_page_without_has_none(tmp_path: Path) -> None:
    for name, (body, _) in FAULTY.items():
        (tmp_path / f"{name}.html").write_text(HEAD + body, encoding="utf-8")
    scrolls = (
        '<article><div style="width: 90px; overflow: auto; white-space: pre">a line that is longer</div></article>'
    )
    (tmp_path / "right.html").write_text(HEAD + scrolls, encoding="utf-8")
    found = faults_of(tmp_path, tmp_path / "shots", settles_s=0.5)
    for _, fault in FAULTY.values():
        assert any(fault in each for each in found), (fault, found)
    assert not [fault for fault in found if fault.startswith("right.html")]
    assert not any(fault.startswith("wide.html at 1280") for fault in found)
    assert (tmp_path / "shots" / "wide.html-390-dark.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.system
def test_a_page_is_opened_as_who_was_never_there_though_a_page_keeps_something_as_it_is_left(tmp_path: Path) -> None:
    keeps = "<script>addEventListener('pagehide', () => localStorage.setItem('colors', 'dark'))</script>"
    (tmp_path / "keeps.html").write_text(HEAD + keeps, encoding="utf-8")
    with served(tmp_path) as address, Browser() as browser:
        browser.look(390, dark=True)
        for _ in range(3):
            browser.open(address + "keeps.html")
            browser.wait("innerWidth === 390 && matchMedia('(prefers-color-scheme: dark)').matches")
            assert browser.value("localStorage.getItem('colors')") is None
            browser.value("localStorage.setItem('colors', 'light')")
            assert browser.requests()[0] == address + "keeps.html"
