from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.memory_store import memory_store
from torchmix.errors import SourceUnreadable
from torchmix.storage.find_files import find_files

NAMES = [
    "web/b.parquet",
    "web/a.parquet",
    "web/deep/er/c.parquet",
    "web/deep/.hid/d.parquet",
    "web/.hidden.parquet",
    "webs/a.parquet",
    "peps.parquet",
    "x[1].parquet",
]


@pytest.fixture
def tree(tmp_path: Path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with memory_store(tmp_path, "bucket"):
        yield tmp_path


PATTERNS = [
    "peps.parquet",
    "web/*.parquet",
    "web/**/*.parquet",
    "**/*.parquet",
    "web*/a.parquet",
    "web/[ab].parquet",
    "web/?.parquet",
    "x[1].parquet",
    "*/**/*.parquet",
    "web/deep/**/c.parquet",
    "w*/d*/er/*",
    "web/.*.parquet",
    "web/**",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_globs_give_what_they_give_on_a_disk(tree, pattern: str) -> None:
    found = find_files("web", [f"memory://bucket/{pattern}"], tree)
    assert [path.removeprefix("memory://bucket/") for path in found] == find_files("web", [pattern], tree)


def test_objects_and_files_of_one_source_are_sorted_together_and_each_once(tree) -> None:
    patterns = ["peps.parquet", "memory://bucket/web/*.parquet", "memory://bucket/web/a.parquet"]
    assert find_files("web", patterns, tree) == [
        "memory://bucket/web/a.parquet",
        "memory://bucket/web/b.parquet",
        "peps.parquet",
    ]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("bucket/pep.parquet", r"is missing; nearest to 'pep.parquet' in memory://bucket: 'peps.parquet'"),
        ("bucket/wep/*.parquet", r"matches no object; nearest to 'wep' in memory://bucket: 'web'"),
        ("bucket/web/*.zip", r"matches no object; "),
        ("bucket/zzz", r"is missing; memory://bucket holds 'peps.parquet', 'web', 'webs', 'x\[1\].parquet'"),
        ("bucket/web", r"is a folder; name its files, as 'memory://bucket/web/\*.parquet'"),
        ("basket/web/a.parquet", r"is missing; there is no memory://basket, or it is not shown to these credentials"),
    ],
)
def test_a_pattern_without_objects_is_an_error_with_the_nearest_names(tree, pattern: str, says: str) -> None:
    with pytest.raises(SourceUnreadable, match=f"source 'web': 'memory://{pattern[:6]}.*{says}"):
        find_files("web", [f"memory://{pattern}"], tree)
