"""`torchmix reframe`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.files import random_texts
from tests.support.json_lines import frame_of, plain_lines
from torchmix.cli.main import main
from torchmix.formats.jsonl.source import JsonLinesSource


def test_a_file_that_index_refuses_is_read_after_the_command_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = plain_lines(random_texts(1, 2000))
    old, new = tmp_path / "old.jsonl.gz", tmp_path / "new.jsonl.zst"
    old.write_bytes(frame_of(content, ".gz"))
    monkeypatch.setattr("torchmix.formats.jsonl.frames.MOST_FRAME_BYTES", 100_000)
    source = JsonLinesSource(name="web", column="text", kind="text")
    with pytest.raises(Exception, match="torchmix reframe IN OUT"):
        source.scan(old)
    assert main(["reframe", str(old), str(new), "--frame", "16KiB", "--level", "1"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"{new}: ") and " frames, " in output.out and output.err == ""
    assert source.scan(new).num_rows == 2000


def test_with_json_it_is_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_bytes(b'{"a":1}\n')
    assert main(["reframe", str(tmp_path / "in"), str(tmp_path / "out.gz"), "--json"]) == 0
    written = (tmp_path / "out.gz").stat().st_size
    assert json.loads(capsys.readouterr().out) == {
        "source": str(tmp_path / "in"),
        "target": str(tmp_path / "out.gz"),
        "num_frames": 1,
        "content_bytes": 8,
        "read_bytes": 8,
        "written_bytes": written,
    }


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["in", "out.gz", "--level", "10"], 2, "--level 10: the level goes from 1 to 9"),
        (["in", "out.jsonl", "--level", "1"], 2, "--level 1: the level needs an OUT that ends in .gz or .zst"),
        (["in", "out.gz", "--frame", "5MiB"], 2, "5MiB is more than 4MiB"),
        (["in", "out.gz", "--frame", "much"], 2, "'much' is not a size"),
        (["none", "out.gz"], 3, "none: cannot be read to its end: No such file"),
        (["in", "in"], 3, "in exists"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_bytes(b'{"a":1}\n')
    assert main(["reframe", *words]) == code
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
