from __future__ import annotations

from pathlib import Path

import pytest

from torchmix.errors import SourceUnreadable
from torchmix.formats.megatron.files import find_datasets
from torchmix.storage.find_files import find_files

PAIRS = ["web_text_document", "web.v1_text_document", "code/a_text_document", "code/b_text_document", "x[1]"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for pair in PAIRS:
        (tmp_path / pair).parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".bin", ".idx"):
            (tmp_path / (pair + suffix)).write_bytes(b"")
    (tmp_path / "half.bin").write_bytes(b"")
    (tmp_path / "other.idx").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "prefixes"),
    [
        (["web_text_document"], ["web_text_document"]),
        (["web_text_document.bin"], ["web_text_document"]),
        (["web_text_document.idx"], ["web_text_document"]),
        (["web.v1_text_document"], ["web.v1_text_document"]),
        (["code/*.idx"], ["code/a_text_document", "code/b_text_document"]),
        (["code/*.bin", "code/a_text_document"], ["code/a_text_document", "code/b_text_document"]),
        (["code/*"], ["code/a_text_document", "code/b_text_document"]),
        (["**/*_text_document"], sorted(pair for pair in PAIRS if "x" not in pair.rpartition("/")[2][:1])),
        (["x[1]"], ["x[1]"]),
        (["./web_text_document", "web_text_document"], ["./web_text_document"]),
    ],
)
def test_prefixes_files_and_globs_give_each_bin_once(tree, patterns, prefixes):
    assert find_datasets("web", patterns, tree) == [prefix + ".bin" for prefix in prefixes]


def test_an_absolute_prefix_gives_an_absolute_path(tree):
    assert find_datasets("web", [f"{tree}/code/a_text_document"], Path("/")) == [f"{tree}/code/a_text_document.bin"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (
            "web_text_documnet",
            r"no dataset 'web_text_documnet.bin' with 'web_text_documnet.idx'.*: .*'web_text_document.bin'",
        ),
        ("web_text_documnet.idx", "'web_text_documnet.idx' is missing .*'web_text_document.idx'"),
        ("wip/*.idx", "matches no file"),
        ("wip/*", "no dataset 'wip/[*].bin'"),
        ("code", "is a folder; name its datasets, as 'code/[*].idx'"),
        ("half", "half.bin has no half.idx beside it; a dataset is both files"),
        ("other", "other.idx has no other.bin beside it"),
        ("*.bin", "half.bin has no half.idx beside it"),
    ],
)
def test_what_leads_to_no_dataset_is_an_error_that_says_what_is_there(tree, pattern, says):
    with pytest.raises(SourceUnreadable, match=f"source 'web': .*{says}") as caught:
        find_datasets("web", [pattern], tree)
    assert str(tree) in str(caught.value)


def test_a_prefix_in_a_source_of_parquet_says_what_to_write(tree):
    with pytest.raises(SourceUnreadable, match=r"'web_text_document' is missing .*: write format: megatron"):
        find_files("web", ["web_text_document"], tree)
