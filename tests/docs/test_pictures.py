"""The pictures of the pages: made by their script, and shown."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")
DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures"


def test_the_script_makes_every_picture(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_pictures", PICTURES / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in PICTURES.glob("*.svg")) == ["balance.svg", "road.svg"]
    for name in made:
        texts = ["".join(ElementTree.parse(folder / name).getroot().itertext()) for folder in (tmp_path, PICTURES)]
        words = ("sample", "rank dp 3") if name == "road.svg" else ("hash order", "microbatch", "data-parallel rank")
        assert all(word in text for word in words for text in texts)


def test_every_picture_is_shown_and_every_shown_one_exists() -> None:
    shown = set()
    for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")):
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page.name} shows {target}"
            shown.add(path)
    assert set(PICTURES.resolve().glob("*.svg")) <= shown
