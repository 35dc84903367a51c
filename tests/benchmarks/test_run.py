"""What is kept of a benchmark, and how its tables come into a page."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a folder of benchmarks of its own."""
    spec = importlib.util.spec_from_file_location("benchmarks_run", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept")
    (tmp_path / "benchmarks").mkdir()
    return module


PRINTED = """some words
G | ms | x
64 | 1.5 | 2
512 | 3 | 4

| name | share |
|---|---|
| a | 1 % |
{"found": 3}
"""


def test_tables_and_objects_are_found_in_what_is_printed(runner: ModuleType) -> None:
    assert runner.tables_of(PRINTED) == [
        [["G", "ms", "x"], ["64", "1.5", "2"], ["512", "3", "4"]],
        [["name", "share"], ["a", "1 %"]],
    ]
    assert runner.objects_of(PRINTED) == [{"found": 3}]
    between = PRINTED.replace("512 |", '{"steps": "1 | 2"}\n512 |')
    assert runner.tables_of(between) == runner.tables_of(PRINTED), "JSON of a row does not end its table"


def test_a_run_is_kept_and_a_page_takes_its_tables(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (runner.HERE / "mine.py").write_text(f"import sys\nprint({PRINTED!r})\nprint(sys.argv[1:])  # --quick\n")
    (runner.HERE / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--", "--steps", "2"])
    assert runner.main() == 3, "a failure is the exit code, and the others have run"
    assert "bad ended with exit code 3" in capfd.readouterr().err
    record = json.loads((runner.KEPT / "mine.json").read_text())
    assert record["command"] == ["python", "benchmarks/mine.py", "--quick", "--steps", "2"]
    assert len(record["tables"]) == 2 and "['--quick', '--steps', '2']" in record["printed"]
    assert not (runner.KEPT / "bad.json").exists()
    page = tmp_path / "page.md"
    places = ["<!-- benchmark mine -->\nold\n<!-- end -->", "<!-- benchmark other -->\nkept\n<!-- end -->"]
    page.write_text("# P\n\n" + "\n\n".join(places))
    monkeypatch.setattr(sys, "argv", ["run.py", "--page", str(page)])
    assert runner.main() == 1 and "other: nothing was kept" in capfd.readouterr().err
    text = page.read_text()
    assert "| 512 | 3 | 4 |\n\n| name | share |\n|---|---|\n" in text and "old" not in text and "kept" in text


def test_a_page_may_take_one_table_of_several(runner: ModuleType) -> None:
    records = {"mine": {"tables": runner.tables_of(PRINTED)}}
    page = "<!-- benchmark mine 2 -->\nold\n<!-- end -->\n<!-- benchmark mine 3 -->\nkept\n<!-- end -->"
    text, missing = runner.fill(page, records)
    assert missing == ["mine"]
    assert text == (
        "<!-- benchmark mine 2 -->\n\n| name | share |\n|---|---|\n| a | 1 % |\n\n<!-- end -->\n"
        "<!-- benchmark mine 3 -->\nkept\n<!-- end -->"
    )


def test_places_of_the_page_are_of_benchmarks_and_hold_tables(runner: ModuleType) -> None:
    page = (PATH.parents[1] / "docs" / "performance.md").read_text(encoding="utf-8")
    places = list(re.finditer(runner.PLACE, page, flags=re.DOTALL))
    assert len(places) == page.count("<!-- benchmark ") >= 3
    assert page.count("<!-- end -->") == len(places) + page.count("<!-- figures -->"), "figures are another script's"
    for place in places:
        assert (PATH.parent / f"{place[1]}.py").is_file(), place[1]
        assert len(runner.tables_of(place[0])) == 1, place[0]


def test_every_script_is_a_benchmark_or_a_part_of_one() -> None:
    command = [sys.executable, str(PATH), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    listed = done.stdout
    assert "planning" in listed and "synthetic" not in listed
    folder = PATH.parent
    for path in folder.glob("*.py"):
        is_part = path.stem in {"megatron_data", "megatron_rival", "process_trees", "run", "synthetic"}
        assert is_part or '__name__ == "__main__"' in path.read_text(encoding="utf-8"), path.stem
