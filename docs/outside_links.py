"""Links of the pages to files outside `docs/`, as files of the site.

In: the Markdown of a page. Out: the same, where a link to a file of the repository leads to a copy in the site. Must
hold: a link to a file that does not exist stays as it is, so that the build warns of it. Cost: one read a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./((?!\.\.)[\w./-]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Copy what a page links to into `files/`, as text that every browser shows."""
    if page.file.src_uri.count("/"):
        return markdown

    def copied(found: re.Match[str]) -> str:
        source = ROOT / found[1]
        if not source.is_file():
            return found[0]
        uri = f"files/{found[1]}.txt"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=source.read_text(encoding="utf-8")))
        return f"]({uri})"

    return OUTSIDE.sub(copied, markdown)
