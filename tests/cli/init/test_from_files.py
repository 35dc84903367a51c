"""`torchmix init FILE...`: every recipe that it writes loads, indexes, and says what the files hold."""

from __future__ import annotations

import gzip
import json
import random
import shlex
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.arrow_files import write_arrow
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.memory_store import memory_store
from tests.support.vocabularies import make_tokenizer
from torchmix.cli.init import choose as choose_tokenizer
from torchmix.cli.main import main
from torchmix.recipe.changes import parse_shares
from torchmix.recipe.load import load_recipe
from torchmix.recipe.structs import Recipe

TEXTS = random_texts(1, 200)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path


def init(*words: str, code: int = 0) -> Recipe | None:
    assert main(["init", *words]) == code
    return load_recipe("recipe.yaml") if code == 0 else None


def written(*words: str) -> Recipe:
    recipe = init(*words)
    assert recipe is not None
    return recipe


def json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_a_folder_of_all_formats_becomes_a_recipe_that_indexes_and_passes_check(folder: Path, capsys: Any) -> None:
    data = folder / "data"
    make_text_file(data / "prose.parquet", TEXTS)
    for number in range(3):
        make_tokens_file(data / f"web-0000{number}-of-00003.parquet", random_tokens(number, 200))
    json_lines(data / "chat.jsonl", [{"id": i, "text": text} for i, text in enumerate(TEXTS)])
    json_lines(data / "zipped.jsonl.gz", [{"meta": {"content": text}} for text in TEXTS])
    write_arrow(data / "cached.arrow", pa.table({"input_ids": random_tokens(5, 100)}))
    write_dataset(data / "mega_text_document", random_sequences(6, 100))
    (data / "README.md").write_text("about the data")
    (data / "dataset_info.json").write_text("{}")
    recipe = written("data", "--tokenizer", "bytes", "--seq-length", "128", "--global-batch-size", "16")
    assert "default suits" not in Path("recipe.yaml").read_text(encoding="utf-8"), "both were given"
    found = {name: (source.path, source.text or source.tokens) for name, source in recipe.sources.items()}
    assert found == {
        "cached": ("data/cached.arrow", "input_ids"),
        "chat": ("data/chat.jsonl", "text"),
        "mega": ("data/mega_text_document.bin", None),
        "prose": ("data/prose.parquet", "text"),
        "web": ("data/web-0000*-of-00003.parquet", "input_ids"),
        "zipped": ("data/zipped.jsonl.gz", "meta.content"),
    }
    assert (recipe.batch.length, recipe.batch.samples) == (128, 16)
    printed = capsys.readouterr().out
    assert "left out, as no data by their names" in printed and "dataset_info.json" in printed
    assert main(["index", "recipe.yaml"]) == 0
    assert main(["check", "recipe.yaml", "--steps", "5"]) == 0


def test_shares_follow_the_tokens_that_sources_hold(folder: Path) -> None:
    make_tokens_file(folder / "data" / "few.parquet", random_tokens(1, 300))
    make_tokens_file(folder / "data" / "many.parquet", [tokens * 3 for tokens in random_tokens(1, 300)])
    json_lines(
        folder / "data" / "lines.jsonl", [{"tokens": tokens, "note": "x" * 99} for tokens in random_tokens(1, 300)]
    )
    shares = parse_shares(written("data"))
    assert sum(shares.values()) == 1
    assert abs(shares["many"] - Fraction(3, 5)) < Fraction(1, 100)
    assert abs(shares["lines"] - Fraction(1, 5)) < Fraction(1, 100)


def test_a_tiny_source_beside_a_large_one_keeps_a_share(folder: Path) -> None:
    make_text_file(folder / "data" / "tiny.parquet", ["a"])
    make_text_file(folder / "data" / "large.parquet", ["b" * 1000] * 3000)
    assert parse_shares(written("data", "--tokenizer", "bytes"))["tiny"] == Fraction(1, 10_000)


@pytest.mark.parametrize(
    ("names", "sources"),
    [
        (["web0", "web1", "code"], {"web": "data/web*.parquet", "code": "data/code.parquet"}),
        (
            ["train-00000-of-00002-0a1b2c3d4e5f", "train-00001-of-00002-9f1b2c3d4e5f"],
            {"NAME": "data/train-0000*.parquet"},
        ),
        (["wikitext103"], {"wikitext103": "data/wikitext103.parquet"}),
        (["a [1]"], {"a [1]": "data/a [1].parquet"}),
        (["part-00000-8d3c2f1e-1234-4c4c-9999-0123456789ab-c000.snappy"], None),
    ],
)
def test_shards_are_one_source_and_its_name_says_something(
    folder: Path, names: list[str], sources: dict[str, str] | None
) -> None:
    for name in names:
        make_text_file(folder / "data" / f"{name}.parquet", TEXTS)
    recipe = written("data", "--tokenizer", "bytes")
    if sources is None:
        assert [*recipe.sources] == [folder.name], "data and part say nothing"
        return
    expected = {name.replace("NAME", folder.name): path for name, path in sources.items()}
    for name, source in recipe.sources.items():
        if "*" in expected[name]:
            assert isinstance(source.path, str) and source.path.startswith(expected[name].split("*")[0])
        else:
            assert source.path == expected[name]
    assert recipe.sources.keys() == expected.keys()
    assert main(["index", "recipe.yaml"]) == 0


def test_files_that_no_simple_glob_tells_apart_are_listed(folder: Path) -> None:
    for name in ("1-a", "2-b", "2-a"):
        make_text_file(folder / "data" / f"{name}.parquet", TEXTS)
    recipe = written("data/1-a.parquet", "data/2-a.parquet", "data/2-b.parquet", "--tokenizer", "bytes")
    assert recipe.sources["b"].path == "data/2-b.parquet"
    make_text_file(folder / "data" / "3-a.parquet", TEXTS)
    recipe = written("data/1-a.parquet", "data/2-a.parquet", "--tokenizer", "bytes", "--force")
    assert recipe.sources["a"].path == ("data/1-a.parquet", "data/2-a.parquet")


def test_files_of_validation_and_test_are_not_trained_on(folder: Path) -> None:
    for part in ("train", "validation", "test"):
        make_text_file(folder / "data" / f"{part}-00000-of-00001.parquet", TEXTS)
    recipe = written("data", "--tokenizer", "bytes")
    assert recipe.validation is not None and recipe.test is not None
    assert [*recipe.sources, *recipe.validation.sources, *recipe.test.sources] == [
        folder.name,
        f"{folder.name}-validation",
        f"{folder.name}-test",
    ]
    assert main(["index", "recipe.yaml"]) == 0
    assert main(["init", "data/test-00000-of-00001.parquet", "--tokenizer", "bytes", "--force"]) == 2


def test_names_that_differ_in_a_part_are_one_source_and_its_evaluations(folder: Path) -> None:
    for name in ("wiki-train-00000-of-00001", "wiki-validation", "unit-test", "news_train", "news_dev"):
        make_tokens_file(folder / "data" / f"{name}.parquet", random_tokens(1, 50))
    recipe = written("data")
    assert set(recipe.sources) == {"wiki", "news", "unit-test"}
    assert recipe.validation is not None and set(recipe.validation.sources) == {"wiki-validation", "news-validation"}


def test_paths_are_relative_to_the_recipe_unless_they_are_absolute(folder: Path) -> None:
    make_text_file(folder / "data" / "prose.parquet", TEXTS)
    (folder / "recipes").mkdir()
    for word, path in (
        ("data", "../data/prose.parquet"),
        (str(folder / "data"), str(folder / "data" / "prose.parquet")),
    ):
        assert main(["init", word, "--tokenizer", "bytes", "--out", "recipes/r.yaml", "--force"]) == 0
        assert load_recipe("recipes/r.yaml").sources["prose"].path == path


def test_a_vocabulary_is_opened_and_gives_the_end_of_texts(folder: Path) -> None:
    make_text_file(folder / "data" / "prose.parquet", TEXTS)
    make_tokenizer(folder / "tokenizer.json")
    source = written("data", "--tokenizer", "tokenizer.json").sources["prose"]
    assert source.tokenizer == "tokenizer.json"
    (folder / "model").mkdir()
    make_tokenizer(folder / "model" / "tokenizer.json")
    assert written("data", "--tokenizer", "model", "--force").sources["prose"].tokenizer == "model/tokenizer.json"
    assert source.end_id is not None or "end_id: the token after each text" in Path("recipe.yaml").read_text()
    assert written("data", "--tokenizer", "tokenizer.json", "--end-id", "3", "--force").sources["prose"].end_id == 3
    init("data", "--tokenizer", "tokenizer.json", "--end-id", "<nothing>", "--force", code=2)
    init("data", "--tokenizer", "missing.json", "--force", code=3)
    assert main(["index", "recipe.yaml"]) == 0


def test_on_a_terminal_the_tokenizer_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return "bytes\n"

    make_text_file(folder / "data" / "prose.parquet", TEXTS)
    init("data", code=2)
    assert "text needs --tokenizer; give bytes, tiktoken:NAME, or the path" in capsys.readouterr().err
    monkeypatch.setattr(choose_tokenizer.sys, "stdin", Terminal())
    monkeypatch.setattr(choose_tokenizer.sys.stderr, "isatty", lambda: True)
    assert written("data").sources["prose"].tokenizer == "bytes"
    assert "prose: text, which needs a tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "init needs to be told where data is"),
        (("data", "--demo"), 2, "files and --demo name different data"),
        (("data", "--from-megatron", "p"), 2, "files and --from-megatron name different data"),
        (("data/two.parquet", "--text", "one", "--tokenizer", "gpt2"), 2, "--tokenizer gpt2: no tokenizer"),
        (("data/ids.parquet", "--tokenizer", "bytes"), 2, "no source has text"),
        (("data/ids.parquet", "--tokens", "ids"), 3, "no column 'ids' of a list of ids (did you mean 'input_ids'?)"),
        (("data/two.parquet", "--tokenizer", "bytes"), 2, "has one (text), two (text); say which one"),
        (("data/two.parquet", "--tokenizer", "bytes"), 2, "written as one column, messages: docs/moving.md#hugg"),
        (("data/numbers.parquet",), 3, "no column of text, or of lists of integers"),
        (("data/id.parquet",), 3, "nearest to 'id.parquet'"),
        (("empty",), 3, "the folder holds no data files (it is empty)"),
        (("data/broken.jsonl",), 3, "line 1 is no JSON"),
        (("data/ids.parquet", "--split", "a,b"), 2, "--split"),
    ],
)
def test_what_cannot_become_a_recipe_is_named(
    folder: Path, words: tuple[str, ...], code: int, message: str, capsys: Any
) -> None:
    make_tokens_file(folder / "data" / "ids.parquet", random_tokens(1, 50))
    pq.write_table(pa.table({"one": ["a"], "two": ["b"]}), folder / "data" / "two.parquet")
    pq.write_table(pa.table({"x": [1]}), folder / "data" / "numbers.parquet")
    (folder / "data" / "broken.jsonl").write_text("{nothing\n")
    (folder / "empty").mkdir()
    assert main(["init", *words]) == code
    assert message in capsys.readouterr().err
    assert not Path("recipe.yaml").exists()


KINDS = [
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run `git lfs pull`"),
    ("a.jsonl", b"<!DOCTYPE html><html>", "a page of HTML"),
    ("a.jsonl", gzip.compress(b'{"text": "a"}\n'), "name it .jsonl.gz"),
    ("a.jsonl.gz", b'{"text": "a"}\n', "name it .jsonl if"),
    ("a.parquet", b'{"text": "a"}\n', "name it .jsonl if"),
    ("a.arrow", b"PAR1 and more of it", "name it .parquet"),
    ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "as by `iconv -f UTF-16"),
    ("a.json", b'[{"text": "a"}]', "one JSON array is not read"),
]
"""Files that are not what their names say."""
LINES = [
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:30] + b"x" * 30, "cannot be looked at as jsonl"),
    ("a.jsonl", '{"text": "caf\u00e9"}\n'.encode("latin-1"), "line 1 is no JSON: it is not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n{"text": oh}\n', "line 2 is no JSON: Expecting value at column 10"),
    ("a.jsonl.bz2", b"BZh9", "unpack it: bunzip2"),
    ("a b.tar.gz", gzip.compress(b"x" * 999), "unpack it: gunzip '"),
    ("a.txt", b"some words", "jq -cR '{text: .}'"),
    ("a.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', "'text' is missing in line 3, 'body' is missing in line 1"),
    ("a.jsonl", b'{"text": "a"}\n{"text": 7}\n', "'text' holds text in line 1, a number in line 2"),
    ("a.jsonl", b"", "a.jsonl: empty; write something"),
]


@pytest.mark.parametrize(
    ("name", "content", "message"), KINDS + LINES, ids=[f"{name}: {message}" for name, _, message in KINDS + LINES]
)
def test_a_file_that_is_not_what_its_name_says_is_told_apart(
    folder: Path, name: str, content: bytes, message: str, capsys: Any
) -> None:
    (folder / "data" / name).write_bytes(content)
    assert main(["init", f"data/{name}", "--tokenizer", "bytes"]) == 3
    printed = capsys.readouterr().err
    assert message in printed and name in printed
    if (name, content, message) in KINDS:  # the index says it, too
        Path("recipe.yaml").write_text(
            "version: 1\nseed: 1\nbatch: {samples: 1, length: 8}\nmixture: {a: 1}\n"
            f"sources: {{a: {{path: data/{name}, text: text, tokenizer: bytes}}}}\n"
        )
        assert main(["index", "recipe.yaml", "--quiet"]) == 3
        printed = capsys.readouterr().err
        assert message in printed and name in printed


def test_a_folder_is_taken_without_what_holds_nothing(folder: Path, capsys: Any) -> None:
    data = folder / "data"
    make_text_file(data / "web.parquet", TEXTS)
    json_lines(data / "long.jsonl", [{"text": "x" * (3 << 20)}, {"text": "y"}])
    (data / "none.jsonl").write_bytes(b"")
    (data / "part-0.jsonl").write_bytes(b"")
    json_lines(data / "part-1.jsonl", [{"text": "z"}])
    pq.write_table(pa.table({"count": [1]}), data / "stats.parquet")
    write_arrow(data / "cache-0123456789abcdef.arrow", pa.table({"text": TEXTS}))
    recipe = written("data", "--tokenizer", "bytes")
    assert {source.path for source in recipe.sources.values()} == {
        "data/web.parquet",
        "data/long.jsonl",
        "data/part-*.jsonl",
    }
    printed = capsys.readouterr().out
    for reason, name in (
        ("empty", "none.jsonl"),
        ("without text, ids or messages", "stats.parquet"),
        ("no data by their names", "cache-0123456789abcdef.arrow"),
    ):
        assert f"left out, as {reason}: {data / name}" in printed
    assert main(["index", "recipe.yaml", "--quiet"]) == 0
    init("data/stats.parquet", "--force", code=3)  # what is named is not left out
    (data / "gone.jsonl").symlink_to("nowhere.jsonl")
    init("data", "--tokenizer", "bytes", "--force", code=3)
    assert "a link to nowhere.jsonl, which is missing" in capsys.readouterr().err


def test_files_of_lines_named_json_are_taken_where_they_are_named(folder: Path, capsys: Any) -> None:
    for number in range(2):
        json_lines(folder / "data" / f"part-{number}.json", [{"text": text} for text in TEXTS])
    init("data", "--tokenizer", "bytes", code=3)
    *_, line = capsys.readouterr().err.strip().partition("torchmix init ")
    assert written(*shlex.split(line), "--tokenizer", "bytes").sources


def test_nothing_is_overwritten_unless_the_user_says_so(folder: Path, capsys: Any) -> None:
    make_tokens_file(folder / "data" / "ids.parquet", random_tokens(1, 50))
    Path("recipe.yaml").write_text("mine")
    init("data", code=2)
    assert Path("recipe.yaml").read_text() == "mine" and "--force" in capsys.readouterr().err
    assert written("data", "--force", "--split", "90,5,5").split == (90, 5, 5)


def test_objects_of_a_store_are_found_by_folder_and_by_glob(folder: Path) -> None:
    for number in range(3):
        make_tokens_file(folder / "data" / f"web-{number}.parquet", random_tokens(number, 100))
    (folder / "data" / "README.md").write_text("about")
    with memory_store(folder):
        for word in ("memory://bucket/data", "memory://bucket/data/*.parquet"):
            recipe = written(word, "--force")
            path = recipe.sources["web"].path
            assert isinstance(path, str) and path.startswith("memory://bucket/data/") and "*" in path
            assert main(["index", "recipe.yaml"]) == 0


def test_json_has_what_the_table_has(folder: Path, capsys: Any) -> None:
    make_tokens_file(folder / "data" / "ids.parquet", random_tokens(1, 50))
    init("data", "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["sources"][0] | {"num_bytes": 0} == {
        "part": "train",
        "name": "ids",
        "path": "data/ids.parquet",
        "format": "parquet",
        "column": "input_ids",
        "items": {},
        "num_files": 1,
        "num_bytes": 0,
        "share": "100%",
    }


def test_any_guess_of_columns_can_be_corrected(folder: Path) -> None:
    rng = random.Random(1)
    rows = [{"title": "t", "text": text, "url": str(rng.random())} for text in TEXTS]
    json_lines(folder / "data" / "a.jsonl", rows)
    source = written("data", "--tokenizer", "bytes").sources["a"]
    assert source.text == "text"
    text = Path("recipe.yaml").read_text()
    assert "it also has title, url; with `id: url` trace and deny-lists name its rows by url" in text
    assert written("data", "--tokenizer", "bytes", "--text", "title", "--force").sources["a"].text == "title"
