"""`torchmix check` compares the ids of data, the tokenizers, `vocab_size` and the model's padded size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.projects import make_indexed_project
from tests.support.vocabularies import make_tokenizer
from torchmix.cli.main import main

VOCABULARY = "tokenizer: bytes"


def findings(recipe: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Message by place, of all that is more than a note."""
    capsys.readouterr()
    code = main(["check", str(recipe), "--json", "--steps", "10", *words])
    values = json.loads(capsys.readouterr().out)
    found = {one["where"]: one["message"] for one in values["findings"] if one["level"] != "note"}
    assert code == (1 if found else 0)
    return found


def seeded(folder: Path, key: str) -> Path:
    return make_indexed_project(folder, ("seed: 5\n", f"seed: 5\n{key}\n"))


def test_the_catalog_shows_the_ids_of_each_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = seeded(tmp_path, "vocab_size: 50000")
    assert main(["check", str(recipe), "--json", "--steps", "5"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["vocab_size"] == 50_000
    code, _, web = values["sources"]
    assert (code["smallest_id"], code["largest_id"], code["tokenizer_vocab_size"]) == (None, None, 257)
    assert 0 <= web["smallest_id"] < 100 and 900 < web["largest_id"] < 1000 and not web["tokenizer_vocab_size"]


def test_ids_above_vocab_size_are_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(seeded(tmp_path, "vocab_size: 256"), capsys)
    assert set(found) == {"sources.web", "sources.tiny", "sources.code.tokenizer"}
    assert "data/web-" in found["sources.web"] and "but vocab_size is 256" in found["sources.web"]
    assert found["sources.code.tokenizer"].startswith("bytes has ids up to 256, but vocab_size is 256")


def test_the_padded_size_of_megatron_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = seeded(tmp_path, "vocab_size: 50000")
    assert findings(recipe, capsys, "--padded-vocab-size", "50048") == {}
    found = findings(recipe, capsys, "--padded-vocab-size", "49920")
    assert list(found) == ["vocab_size"] and "50000 ids" in found["vocab_size"] and "49920" in found["vocab_size"]


def test_two_vocabularies_are_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of one vocabulary, or one with more ids, are no two; another that was trained on other texts is."""
    make_tokenizer(tmp_path / "a.json", seed=0)
    make_tokenizer(tmp_path / "b.json", seed=0)
    make_tokenizer(tmp_path / "c.json", seed=0, specials=("<|endoftext|>", "<pad>"), vocabulary=401)
    make_tokenizer(tmp_path / "d.json", seed=7)
    more = "  more: {path: code.parquet, text: text, tokenizer: b.json}\n  tiny:"
    shares = ("mixture: {web: 79%,", "mixture: {web: 69%, more: 10%,")
    recipe = make_indexed_project(tmp_path, (VOCABULARY, "tokenizer: a.json"), ("  tiny:", more), shares)
    assert findings(recipe, capsys) == {}
    for tokenizer, message in (("d.json", "gives text other ids than"), ("bytes", "gives text other ids than")):
        recipe.write_text(recipe.read_text().replace("tokenizer: b.json", f"tokenizer: {tokenizer}"))
        assert main(["index", str(recipe)]) == 0
        found = findings(recipe, capsys)
        assert list(found) == ["sources.more.tokenizer"] and message in found["sources.more.tokenizer"]
        assert f"{tokenizer} gives text other ids than a.json of sources.code" in found["sources.more.tokenizer"]
        recipe.write_text(recipe.read_text().replace(f"tokenizer: {tokenizer}", "tokenizer: b.json"))
