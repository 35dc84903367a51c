"""The pictures of the pages: made by their scripts, and shown. Screens need a terminal, a browser and a run; they are
made by hand, and are looked at here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from torchmix.cli.top import COLUMNS

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
    assert made == ["balance.svg", "road.svg"]
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
    assert {path for path in PICTURES.resolve().iterdir() if path.suffix in (".svg", ".png")} <= shown


def test_the_screen_of_top_is_one_of_this_version() -> None:
    path = PICTURES / "top.svg"
    text = "\n".join("".join(line.itertext()) for line in ElementTree.parse(path).getroot())
    assert next(line for line in text.splitlines() if line.startswith("process ")).split() == list(COLUMNS)
    assert "goes on in its place" in text and all(f"trainer {rank} " in text for rank in range(4))
    assert all(path.stat().st_size < 150_000 for path in PICTURES.iterdir() if path.is_file())
