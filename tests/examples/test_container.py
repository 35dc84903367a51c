"""The container's file copies what its command needs, and nothing that is not in the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_what_the_container_copies_is_there_and_make_has_its_targets() -> None:
    text = (ROOT / "examples/container/Containerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert copied
    assert not [name for name in copied if not (ROOT / name).exists()]
    needed = {"Makefile", "README.md", "constraints.txt", "examples", "pyproject.toml", "setup.py", "torchmix"}
    assert needed <= set(copied)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
    for target in re.findall(r'make (\S+)$|"make", "(\w+)"', text, re.MULTILINE):
        name = next(filter(None, target))
        assert re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE), name
