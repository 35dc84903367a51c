"""The frame of every page of HTML that a verb writes: one style, text escaped, never a half page on disk."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path

FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 68em; padding: 0 1em; color: #222;
  background: #fff }}
h1 {{ font-size: 1.5em; margin-bottom: .2em }} h2 {{ font-size: 1.15em }} figcaption {{ color: #555; font-size: .9em }}
{style}</style></head><body>
<h1>{title}</h1>
"""


def html_text(title: str, parts: Iterable[str], *, style: str) -> str:
    """The whole page; arguments as `write_html`."""
    return FRAME.format(title=html.escape(title), style=style) + "".join(parts) + "</body></html>\n"


def write_html(path: Path, title: str, parts: Iterable[str], *, style: str) -> None:
    """Write a page beside its place and move it there when it is whole.

    Args:
        path: The file to write.
        title: Text, which is escaped here.
        parts: HTML of the body, in which text is escaped.
        style: CSS that this page has beside that of all.

    Raises:
        OSError: The file cannot be written.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(FRAME.format(title=html.escape(title), style=style))
            file.writelines(parts)
            file.write("</body></html>\n")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
