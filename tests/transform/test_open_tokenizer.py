"""Opening tokenizers by the recipe's words: once, and with errors that say what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.vocabularies import END, TINY, install_tiny_encoding, make_tokenizer
from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.transform.bytes_tokenizer import BytesTokenizer
from torchmix.transform.open_tokenizer import Tokenizers


def test_a_vocabulary_is_opened_once(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t.json")
    tokenizers = Tokenizers(tmp_path)
    first = tokenizers.open("web", "t.json", end_id=END)
    path.unlink()
    assert tokenizers.open("code", "t.json", end_id=END) is first
    assert tokenizers.open("code", "t.json").transform_id != first.transform_id
    assert isinstance(tokenizers.open("peps", "bytes"), BytesTokenizer)


@pytest.mark.parametrize(("words", "package"), [("t.json", "tokenizers"), (f"tiktoken:{TINY}", "tiktoken")])
def test_a_missing_package_comes_with_its_command(
    words: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RecipeError, match=f"pip install {package}") as caught:
        Tokenizers(tmp_path).open("web", words)
    assert caught.value.where == "sources.web.tokenizer"


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceUnreadable, match=r"sources\.web\.tokenizer: cannot read .*t\.json: No such file"):
        Tokenizers(tmp_path).open("web", "t.json")
    for content in ("{", "[]", '{"model": {}}', '{"version": "1.0", "model": {"type": "Other"}}'):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(SourceUnreadable, match=r"t\.json is no tokenizer\.json that tokenizers \d"):
            Tokenizers(tmp_path).open("web", "t.json")


def test_a_file_whose_tokens_differ_each_time_is_refused(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t.json")
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 0.1
    path.write_text(json.dumps(content))
    with pytest.raises(SourceUnreadable, match=r"dropout to 0\.1"):
        Tokenizers(tmp_path).open("web", "t.json")


def test_a_word_that_the_vocabulary_lacks_is_named(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t.json")
    content = json.loads(path.read_text())
    content["model"] = {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "[UNK]"}
    path.write_text(json.dumps(content))
    with pytest.raises(SourceUnreadable, match=r"t\.json cannot encode a text: .*UNK"):
        Tokenizers(tmp_path).open("web", "t.json")


def test_a_token_that_is_not_there_is_named_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer(tmp_path / "t.json")
    install_tiny_encoding(monkeypatch)
    for words in ("t.json", f"tiktoken:{TINY}"):
        with pytest.raises(
            RecipeError, match=r"no token '<\|endoftxt\|>' \(did you mean '<\|endoftext\|>'\?\)"
        ) as caught:
            Tokenizers(tmp_path).open("web", words, end_id="<|endoftxt|>")
        assert caught.value.where == "sources.web.end_id"


def test_an_encoding_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=r"no encoding 'cl10k_base'; it has \['gpt2'"):
        Tokenizers(tmp_path).open("web", "tiktoken:cl10k_base")

    def offline(*_: object, **__: object) -> bytes:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("tiktoken.load.read_file", offline)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(SourceUnreadable, match=r"cannot load gpt2: no route to host.*TIKTOKEN_CACHE_DIR"):
        Tokenizers(tmp_path).open("web", "tiktoken:gpt2")
