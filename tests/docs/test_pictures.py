"""The pictures of the pages: made by their scripts, and shown. Screens need a terminal, a browser and a run; they are
made by hand, and are looked at here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from torchmix.cli.top import COLUMNS

pytest.importorskip("matplotlib")
DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures"


WORDS = {
    "road": ("sample", "rank dp 3"),
    "balance": ("hash order", "microbatch", "data-parallel rank"),
    "shares": ("a ramp begins", "chat", "% of the tokens"),
    "runs_out": ("books ends", "chat ends", "epochs"),
    "contexts": ("as they come", "sizes planned: 1.00"),
    "figures": ("Megatron's builder", "equal"),
    "memory": ("306 Parquet sources", "torch DataLoader"),
}
"""Pictures that the script makes, and words of each."""


@pytest.fixture(scope="module")
def make_pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pictures", PICTURES / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _words(path: Path) -> str:
    return "".join(ElementTree.parse(path).getroot().itertext())


@pytest.mark.slow
def test_the_script_makes_every_picture(make_pictures: ModuleType, tmp_path: Path) -> None:
    make_pictures.main(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(WORDS)
    for name, words in WORDS.items():
        texts = [_words(folder / f"{name}.svg") for folder in (tmp_path, PICTURES)]
        assert all(word in text for word in words for text in texts), name
    for name in ("figures", "memory"):
        drawn, kept = (folder / f"{name}.svg" for folder in (tmp_path, PICTURES))
        assert drawn.read_bytes() == kept.read_bytes(), (
            f"tables of performance.md changed: run make_pictures.py: {name}"
        )


def test_bars_of_figures_say_what_the_table_says_and_slower_is_to_the_left(make_pictures: ModuleType) -> None:
    rows = make_pictures.table("figures")
    assert len(rows) >= 5 and any("small steps" in row[0] for row in rows) and any("large" in row[0] for row in rows)
    text = make_pictures.figures()
    assert all(f"{ratio} x</text>" in text for _, _, ratio, *_ in rows)
    ahead = [float(re.findall(r"[\d.]+", ratio)[0]) for _, _, ratio, good, *_ in rows if good == "more"]
    behind = sum(ratio < 1 for ratio in ahead)
    assert text.count('fill="#c2410c"/>') == behind and 0 < behind < len(rows)


def test_every_picture_is_shown_and_every_shown_one_exists() -> None:
    shown = set()
    for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")):
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page.name} shows {target}"
            shown.add(path)
    assert {path for path in PICTURES.resolve().iterdir() if path.suffix in (".svg", ".png")} <= shown


def test_the_recording_of_the_tutorial_has_the_commands_of_the_page_and_ends_as_it_says() -> None:
    text = "\n".join("".join(line.itertext()) for line in ElementTree.parse(PICTURES / "tutorial.svg").getroot())
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8").partition("```python")[2]
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    wanted = [line for block in blocks for line in block.splitlines()]
    [code] = set(re.findall(r"--accept-edit (\w{16})$", text, re.MULTILINE))
    assert [line.replace(code, "CODE") for line in text.splitlines() if line.startswith("$ ")] == wanted
    digests = re.findall(r"digest +(\w{16})", text)
    assert digests[-1] == digests[-2] and "rank 1 lost" in text
    assert digests[9] == digests[10] in _words(PICTURES / "same_run.svg")


def test_the_screen_of_top_is_one_of_this_version() -> None:
    path = PICTURES / "top.svg"
    text = "\n".join("".join(line.itertext()) for line in ElementTree.parse(path).getroot())
    assert next(line for line in text.splitlines() if line.startswith("process ")).split() == list(COLUMNS)
    assert "takes its place" in text and all(f"trainer {rank} " in text for rank in range(4))
    assert all(path.stat().st_size < 150_000 for path in PICTURES.iterdir() if path.is_file())
