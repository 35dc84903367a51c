"""The size of the house: a folder is a room that a newcomer overlooks at once."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "torchmix"
MOST_FILES = 16


def test_a_folder_has_few_files() -> None:
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    assert len(folders) > 15
    crowded = {
        str(folder.relative_to(PACKAGE)): count
        for folder in folders
        if (count := len([path for path in folder.glob("*.py") if path.name != "__init__.py"])) > MOST_FILES
    }
    assert not crowded, f"a prefix that several files share is a folder that is missing: {crowded}"
