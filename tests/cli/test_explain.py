"""`--explain` says what each column of each printed table means, and nothing where it is not given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.projects import make_indexed_project
from torchmix.cli import check, index
from torchmix.cli import show as show_step
from torchmix.cli.init import from_files, megatron
from torchmix.cli.main import main
from torchmix.cli.plan import command as plan_summary

RECIPE = "recipe.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_indexed_project(tmp_path)
    write_dataset(tmp_path / "corpus", random_sequences(1, 200, mean_tokens=200))
    monkeypatch.chdir(tmp_path)
    return tmp_path


VERBS = [
    (["check", RECIPE, "--steps", "5"], check.COLUMNS),
    (["index", RECIPE], index.COLUMNS),
    (["plan", RECIPE, "--steps", "2"], {**plan_summary.COLUMNS, **plan_summary.LINES}),
    (["show", RECIPE, "--step", "0", "--sample", "0"], show_step.COLUMNS),
    (["init", "tiny.parquet", "--tokens", "input_ids", "--out", "new.yaml"], from_files.COLUMNS),
    (
        ["init", "--data-path", "corpus", "--seq-length", "64", "--global-batch-size", "4", "--out", "new.yaml"],
        megatron.COLUMNS,
    ),
]


@pytest.mark.parametrize(("words", "columns"), VERBS)
def test_every_column_is_explained(
    folder: Path, words: list[str], columns: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    plain = capsys.readouterr().out
    (folder / "new.yaml").unlink(missing_ok=True)
    assert main([*words, "--explain"]) == 0
    explained = capsys.readouterr().out
    header = next(line for line in plain.splitlines() if line.startswith("source "))
    shown = re.split(r"\s{2,}", header)
    assert shown == list(columns)[: len(shown)]
    for name, meaning in columns.items():
        start = re.escape(" ".join(meaning.split()[:4]))
        assert re.search(rf"^  {name} +{start}", explained, re.MULTILINE), name
        assert not re.search(rf"^  {name} +{start}", plain, re.MULTILINE)
    assert len(explained.splitlines()) >= len(plain.splitlines()) + len(columns)
