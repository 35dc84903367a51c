"""What the site has beside its Markdown: the version, a page of all verbs and options, and files that links lead to.

In: the pages of `docs/`. Out: the same, where a link to a file of the repository leads to a copy in the site, and
`commands.md`, which is made of the parser. Must hold: a link to a file that does not exist stays as it is, so that the
build warns of it. Cost: one read a link, and the imports of the command line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from commands_page import commands_page
from mkdocs.structure.files import File

from torchmix import __version__

ROOT = Path(__file__).parent.parent
WITH_PROMPT = re.compile(r"^```text\n(?=\$ )", re.MULTILINE)
"""A block of commands and what they print; as `console` it is copied without prompts and output."""
OUTSIDE = re.compile(r"\]\(\.\./((?!\.\.)[\w./-]+)\)")


def on_config(config: Any) -> Any:
    """Say at the foot of every page which version it is of."""
    config.copyright = f"torchmix {__version__}, Apache-2.0"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the page of verbs and options, so that the search finds them."""
    files.append(File.generated(config, "commands.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Copy what a page links to into `files/`, as text that every browser shows; and see WITH_PROMPT."""
    markdown = WITH_PROMPT.sub("```console\n", markdown)
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
