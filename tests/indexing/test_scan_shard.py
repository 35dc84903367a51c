"""Shards of an index run: each file is scanned by one of them, and a plain run publishes what they made."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.support.command_line import values_of
from tests.support.files import make_text_file, random_texts
from torchmix.catalog.publish import LOCK_NAME
from torchmix.cli.main import main
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

RECIPE = """
version: 1
seed: 1
batch: {samples: 2, length: 32}
sources:
  prose: {path: "prose*.parquet", text: text, tokenizer: bytes, keep: tokens}
  web: {path: "web*.parquet", text: text, tokenizer: bytes}
mixture: {prose: 50%, web: 50%}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for number in range(5):
        make_text_file(tmp_path / f"prose{number}.parquet", random_texts(number, 10 + 40 * number))
        make_text_file(tmp_path / f"web{number}.parquet", random_texts(number + 9, 60))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_shards_scan_every_file_once_and_a_plain_run_scans_none(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recipe.parent / "catalog"
    scanned = [values_of(capsys, "index", str(recipe), "--shard", f"{number}/3") for number in (1, 2, 3)]
    assert [one["files_in_all"] for one in scanned] == [10, 10, 10]
    assert sum(one["files_of_shard"] for one in scanned) == 10 and min(one["files_of_shard"] for one in scanned) >= 2
    assert not (folder / "manifest.json").exists() and len(list((folder / "files").glob("*.index"))) == 10
    again = values_of(capsys, "index", str(recipe), "--shard", "2/3")
    assert again["resumed_files"] == again["files_of_shard"] == scanned[1]["files_of_shard"]
    report = values_of(capsys, "index", str(recipe))
    assert (report["scanned_files"], report["resumed_files"]) == (0, 10)
    assert [one["kept_ids_bytes"] > 0 for one in report["sources"]] == [True, False]
    assert not (folder / "files").exists() and len(list((folder / "kept").iterdir())) == 5
    alone = index_recipe(load_recipe(recipe), recipe.parent, force=True)
    assert alone.fingerprint == report["catalog_fingerprint"]
    assert values_of(capsys, "index", str(recipe), "--shard", "1/3")["files_in_all"] == 0


def test_shards_run_beside_each_other(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recipe.parent / "catalog"
    folder.mkdir()
    with (folder / LOCK_NAME).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # as another shard does
        assert values_of(capsys, "index", str(recipe), "--shard", "1/2")["files_of_shard"] > 0
        unfinished = folder / "files" / "web.0123456789abcdef.index.tmp"
        unfinished.touch()
        values_of(capsys, "index", str(recipe), "--shard", "2/2")
        assert unfinished.exists(), "it may be another shard's"
    values_of(capsys, "index", str(recipe))
    assert not unfinished.exists()


@pytest.mark.parametrize("words", ["0/3", "4/3", "3", "a/b", "1/0"])
def test_what_is_no_shard_is_refused(recipe: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(recipe), "--shard", words]) != 0
    assert "is no shard; write I/N" in capsys.readouterr().err


def test_a_shard_is_not_forced(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(recipe), "--shard", "1/2", "--force"]) != 0
    assert "--shard does not go with --force" in capsys.readouterr().err


def test_a_run_says_which_ids_are_kept(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(recipe), "--keep-tokens"]) == 0
    out = capsys.readouterr().out
    assert "prose: its ids are kept, " in out and "web: its ids are kept, " in out
