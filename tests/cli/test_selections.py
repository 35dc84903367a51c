"""Selections on the command line: index shows them, query asks them, properties adds to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.command_line import values_of
from tests.support.selections import make_rows, write_rows
from torchmix.cli.main import main

RECIPE = """\
version: 1
seed: 1
batch: {samples: 4, length: 64}
sources:
  web: {path: web/*/*.parquet, tokens: ids, id: url, properties: [lang, quality], split_by: dir}
  german: {from: web, where: "lang = 'de'"}
mixture: {web: 50%, german: 30%, web/b: 20%}
hold_out: {validation: {web: 20%}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for number, folder in enumerate("ab"):
        write_rows(tmp_path / "web" / folder / "0.parquet", 120 * number, 120)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert main(["index", str(path), "--quiet"]) == 0
    return path


def test_index_shows_what_each_stream_has_and_leaves(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = values_of(capsys, "index", str(recipe))["selections"]
    assert [(one["part"], one["name"]) for one in found] == [
        (part, name) for part in ("train", "validation") for name in ("german", "web", "web/b")
    ]
    assert sum(one["num_documents"] for one in found) == 240, "each row is in one stream of one part"
    by_name = {one["name"]: one for one in found if one["part"] == "train"}
    assert by_name["german"]["left"] == {} and by_name["web/b"]["left"] == {"german": 30}
    assert by_name["web"]["left"] == {"german": 60, "web/b": 120}
    assert by_name["german"]["bytes_read_per_byte"] > 2
    assert main(["index", str(recipe), "--explain"]) == 0
    output = capsys.readouterr().out
    assert "60 to german, 120 to web/b" in output and "where this is high".casefold() in output.casefold()


def test_check_shows_what_streams_have_and_plans_other_parts(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of(capsys, "check", str(recipe), "--steps", "10")
    indexed = {
        one["name"]: one for one in values_of(capsys, "index", str(recipe))["selections"] if one["part"] == "train"
    }
    assert [one["name"] for one in values["sources"]] == ["german", "web", "web/b"]
    for one in values["sources"]:
        assert one["num_documents"] == indexed[one["name"]]["num_documents"]
        assert one["num_tokens"] == indexed[one["name"]]["num_tokens"] == one["epoch_tokens"]
    assert [one["name"] for one in values["selections"]] == ["german", "web", "web/b"]
    assert not [one for one in values["findings"] if one["where"] in ("catalog", "validation")]
    assert main(["check", str(recipe), "--steps", "10", "--part", "validation"]) in (0, 1)
    assert "60 to german, 120 to web/b" in capsys.readouterr().out


def notes_of_cut(capsys: pytest.CaptureFixture[str], recipe: Path) -> list[str]:
    """What `check` says of the children of web; it may find other things, too."""
    capsys.readouterr()
    assert main(["check", str(recipe), "--steps", "2", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)["findings"]
    return [one["message"] for one in found if one["where"] == "sources.web.split_by"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ("{web/b: 1}", "(web/a, 120 rows): no row of them is trained on; give them shares, or web itself"),
        ("{german: 1, web/b: 1}", "(web/a, 120 rows): no row of them is trained on, but for those of selections;"),
        ("{web/a: 1, web/b: 1}", None),
        ("{web: 1, web/b: 1}", None),
        ("{german: 1}", None),
        ("{all: {share: 1, flat: [web, web/b]}}", None),
        ("{all: {share: 1, cells: {of: [web], shares: {lang: {de: 1, en: 1}}}}, web/b: 1}", None),
    ],
)
def test_check_names_children_that_no_share_reaches(
    recipe: Path, capsys: pytest.CaptureFixture[str], mixture: str, message: str | None
) -> None:
    text = RECIPE.replace("{web: 50%, german: 30%, web/b: 20%}", mixture).replace("hold_out", "# hold_out")
    recipe.write_text(text if "german" in mixture else text.replace("  german:", "  # german:"))
    assert main(["index", str(recipe), "--quiet"]) == 0
    found = notes_of_cut(capsys, recipe)
    if message is None:
        assert not found
    else:
        [said] = found
        assert said.startswith("the mixture does not name 1 of 2 children ") and message in said


def test_check_names_quantiles_that_no_share_reaches(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = RECIPE.replace("split_by: dir", "split_by: {column: quality, quantiles: 4}").replace("hold_out", "# hold_out")
    cut = cut.replace("{web: 50%, german: 30%, web/b: 20%}", "{web/q4: 1}").replace("  german:", "  # german:")
    recipe.write_text(cut)
    assert main(["index", str(recipe), "--quiet"]) == 0
    [said] = notes_of_cut(capsys, recipe)
    assert said.startswith("the mixture does not name 3 of 4 children (web/q1, web/q2, web/q3): no row of them")


def test_query_counts_rows_and_tokens_by_property(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "select lang, count(*) n, sum(tokens) t from web group by 1 order by 1 nulls last"
    rows = values_of(capsys, "query", str(recipe), text)["rows"]
    expected: dict[Any, list[int]] = {}
    for row in make_rows(0, 240).to_pylist():
        one = expected.setdefault(row["lang"], [0, 0])
        one[0], one[1] = one[0] + 1, one[1] + len(row["ids"])
    assert rows == [{"lang": lang, "n": expected[lang][0], "t": expected[lang][1]} for lang in ("de", "en", "fr", None)]
    assert main(["query", str(recipe), text]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["lang", "n", "t"] and lines[-1].split()[:2] == ["-", "60"]


def test_query_knows_selections_and_children_of_each_part(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def count(table: str, *words: str) -> int:
        return values_of(capsys, "query", str(recipe), f"select count(*) n from {table}", *words)["rows"][0]["n"]

    assert count("german") + count("german", "--part", "validation") == 60
    assert count('"web/b"') + count('"web/b"', "--part", "validation") == 90


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("select * from wep", "there is no table 'wep' (did you mean 'web'?);"),
        ("select * from pets", "query: there is no table 'pets';"),  # DuckDB would name pg_settings
        ("select * from columnz", "query: there is no table 'columnz';"),
        ("select lag from web", "Referenced column"),
        ("select * from read_csv('/etc/passwd')", "disabled"),
        ("copy web to 'out.csv'", "disabled"),
        ("selec", "syntax error"),
    ],
)
def test_query_names_what_is_wrong_and_reaches_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str], sql: str, words: str
) -> None:
    message = values_of(capsys, "query", str(recipe), sql, code=2)["error"]["message"]
    assert words in message and "tables are 'web', 'german', 'web/b'" in message


def test_properties_are_added_from_a_table(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"url": [f"https://{row}.example" for row in range(240)], "score": [row / 240 for row in range(240)]}
    pq.write_table(pa.table(scores), recipe.parent / "web.parquet")
    words = ("properties", "add", str(recipe), str(recipe.parent / "web.parquet"), "--key", "url")
    values = values_of(capsys, *words)
    assert (values["source"], values["properties"], values["documents"]) == ("web", ["score"], 240)
    assert main(list(words)) == 0
    assert capsys.readouterr().out == "web: 240 documents have the properties score\n"
    rows = values_of(capsys, "query", str(recipe), "select count(*) n from web where score >= 0.5")["rows"]
    assert rows == [{"n": 120}]


def test_a_wrong_expression_is_a_fault_of_the_recipe_with_its_line(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE.replace("lang = 'de'", "langs = 'de'"))
    error = values_of(capsys, "index", str(recipe), code=2)["error"]
    assert error["where"] == "sources.german.where" and "did you mean 'lang'" in error["message"]


@pytest.mark.parametrize("sql", ["select * from read_csv('.tmp/a.csv')", "copy (select 1 as one) to '.tmp/b.csv'"])
def test_a_query_opens_no_file_not_even_of_a_folder_of_duckdb(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    folder = recipe.parent / ".tmp"  # where DuckDB spills by default, and lets SQL read and write
    folder.mkdir()
    (folder / "a.csv").write_text("secret\n1\n")
    monkeypatch.chdir(recipe.parent)
    assert main(["query", str(recipe), sql]) == 2
    assert "disabled by configuration" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["a.csv"]
