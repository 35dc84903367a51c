"""The frame of pages: text of the user's is text, and a page is whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from torchmix.cli.terminal import write_html


def test_the_title_is_text_and_the_style_stands_beside_that_of_all(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_html(path, "Plan of <b>.yaml", ["<p>one</p>\n"], style="p { margin: 0 }\n")
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and page.endswith("<p>one</p>\n</body></html>\n")
    assert "<h1>Plan of &lt;b&gt;.yaml</h1>" in page and "<b>" not in page
    assert "body { font:" in page and "p { margin: 0 }" in page


def test_a_page_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_html(path, "before", [], style="")

    def parts() -> Iterator[str]:
        yield "<p>half</p>"
        raise ValueError("a row cannot be read")

    with pytest.raises(ValueError, match="a row"):
        write_html(path, "after", parts(), style="")
    assert "before" in path.read_text(encoding="utf-8") and [one.name for one in tmp_path.iterdir()] == ["page.html"]
