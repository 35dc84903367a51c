"""Properties of lines whose texts were cut."""

from __future__ import annotations

from pathlib import Path

from torchmix.formats.jsonl.lines import read_properties


def test_11_8_half_of_a_surrogate_pair_takes_no_property_from_its_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text":"\\ud83d","lang":"de"}\n{"lang":"e\\ude42","text":"\\ud83d\\ude42"}\n')
    assert read_properties(path, ["lang"], "source 's'").column("lang").to_pylist() == ["de", "e�"]
