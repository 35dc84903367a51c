"""What the changelog says of the version of a tag: `python docs/release_notes.py v0.1.0`.

In: a tag. Out: that part of CHANGELOG.md, printed. Must hold: the tag is that of this tree's version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def version() -> str:
    """The version of this tree, which is not imported."""
    text = (ROOT / "torchmix" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None, "the package has a version"
    return found[1]


def release_notes(tag: str) -> str:
    """The notes of a tag.

    Raises:
        ValueError: The tag is of another version, or the changelog has nothing about it.
    """
    if tag != f"v{version()}":
        raise ValueError(f"the tag {tag} is not v{version()}, which torchmix/__init__.py says")
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if version() in re.findall(r"\d+\.\d+\.\w+", head):
            return f"# torchmix {version()}\n\n{body.strip()}\n"
    raise ValueError(f"CHANGELOG.md has no part about {version()}")


if __name__ == "__main__":
    try:
        sys.stdout.write(release_notes(*sys.argv[1:]))
    except (TypeError, ValueError) as error:
        raise SystemExit(f"release notes: {error}") from error
