from __future__ import annotations

from pathlib import Path

import pytest

from torchmix.errors import SourceUnreadable
from torchmix.storage.find_files import find_files

NAMES = [
    "web/b.parquet",
    "web/a.parquet",
    "web/deep/er/c.parquet",
    "web/.hidden.parquet",
    "peps.parquet",
    "x[1].parquet",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "files"),
    [
        (["peps.parquet"], ["peps.parquet"]),
        (["web/*.parquet"], ["web/a.parquet", "web/b.parquet"]),
        (["web/**/*.parquet"], ["web/a.parquet", "web/b.parquet", "web/deep/er/c.parquet"]),
        (["**/*.parquet"], ["peps.parquet", "web/a.parquet", "web/b.parquet", "web/deep/er/c.parquet", "x[1].parquet"]),
        (["web/b.parquet", "peps.parquet"], ["peps.parquet", "web/b.parquet"]),
        (["web/[ab].parquet", "web/?.parquet"], ["web/a.parquet", "web/b.parquet"]),
        (["x[1].parquet"], ["x[1].parquet"]),
        (["./web/a.parquet", "web/a.parquet"], ["./web/a.parquet"]),
        (["web/*"], ["web/a.parquet", "web/b.parquet"]),
        (["web/../peps.parquet"], ["web/../peps.parquet"]),
    ],
)
def test_patterns_give_each_file_once_sorted_and_relative(tree, patterns, files):
    assert find_files("web", patterns, tree) == files


def test_an_absolute_pattern_gives_absolute_paths(tree):
    assert find_files("web", [f"{tree}/web/*.parquet"], Path("/")) == [f"{tree}/web/{x}.parquet" for x in "ab"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("pep.parquet", r"'pep.parquet' is missing in .*nearest to 'pep.parquet' in .*: 'peps.parquet'"),
        ("wep/*.parquet", r"'wep/\*.parquet' matches no file in .*nearest to 'wep' in .*: 'web'"),
        ("web/*.jsonl", r"matches no file in .*"),
        ("zzz", r"holds 'peps.parquet', 'web', 'x\[1\].parquet'"),
        ("web", r"'web' in .* is a folder; name its files, as 'web/\*.parquet'"),
    ],
)
def test_a_pattern_without_files_is_an_error_with_the_nearest_names(tree, pattern, says):
    with pytest.raises(SourceUnreadable, match=f"source 'web': .*{says}") as caught:
        find_files("web", ["peps.parquet", pattern], tree)
    assert str(tree) in str(caught.value)


def test_an_empty_folder_and_a_long_one_are_told_in_short(tmp_path):
    with pytest.raises(SourceUnreadable, match=f"the folder {tmp_path} is empty"):
        find_files("web", ["*.parquet"], tmp_path)
    for number in range(9):
        (tmp_path / f"{number}").write_bytes(b"")
    with pytest.raises(SourceUnreadable, match=r"holds '0', '1', '2', '3', '4' and 4 more"):
        find_files("web", ["*.parquet"], tmp_path)
