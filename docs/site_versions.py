"""The sites of several versions side by side: `python docs/site_versions.py v0.1.0 pages`, after `mkdocs build`.

In: a tag, the site that was built of it in `site/`, the tags of this repository, and a folder. Out, in that folder: the
site under the name of the tag; `versions.json`, from which the site's menu of versions is made, in the form of the tool
mike; `index.html`, which leads to the newest version. What the folder has of other versions stays, and so does what a
host has over which it is unpacked.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from release_notes import ROOT, version

INDEX = """\
<!doctype html>
<meta charset="utf-8">
<title>torchmix</title>
<meta http-equiv="refresh" content="0; url={tag}/index.html">
<a href="{tag}/index.html">torchmix {tag}</a>
"""


def rank(tag: str) -> tuple[list[int], bool, str]:
    """Sorts tags by their numbers; `v1.0.0` comes behind `v1.0.0rc1`."""
    numbers, rest = re.fullmatch(r"v(\d+(?:\.\d+)*)(.*)", tag).groups()  # type: ignore[union-attr]
    return [int(number) for number in numbers.split(".")], not rest, rest


def add_version(tag: str, site: Path, pages: Path, tags: Iterable[str]) -> None:
    """Put the site of a tag beside the others.

    Args:
        tag: Of this tree's version.
        site: That was built of it.
        pages: The folder; made if missing.
        tags: All that the repository has.

    Raises:
        ValueError: The tag is of another version, or there is no site.
    """
    if tag != f"v{version()}":
        raise ValueError(f"the tag {tag} is not v{version()}, which torchmix/__init__.py says")
    if not (site / "index.html").is_file():
        raise ValueError(f"{site} has no site; `make docs` builds it")
    shutil.rmtree(pages / tag, ignore_errors=True)
    shutil.copytree(site, pages / tag)
    known = sorted({one for one in (*tags, tag) if re.fullmatch(r"v\d+(\.\d+)*\w*", one)}, key=rank, reverse=True)
    menu = [
        {"version": one, "title": one.removeprefix("v"), "aliases": ["latest"] if one == known[0] else []}
        for one in known
    ]
    (pages / "versions.json").write_text(json.dumps(menu, indent=1) + "\n", encoding="utf-8")
    (pages / "index.html").write_text(INDEX.format(tag=known[0]), encoding="utf-8")


def main(tag: str, folder: str) -> None:
    """Do it for this repository."""
    listed = subprocess.run(["git", "tag", "--list"], cwd=ROOT, capture_output=True, check=True, text=True)
    add_version(tag, ROOT / "site", Path(folder), listed.stdout.split())


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (TypeError, ValueError) as error:
        raise SystemExit(f"site versions: {error}") from error
