"""The `where` of a selection: which rows it keeps, and what is refused since it could keep others in another run."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest

from torchmix.catalog.properties import columns_of_expression, kept_rows
from torchmix.errors import RecipeError

TABLE = pa.table(
    {
        "lang": ["de", "en", None, "de", "fr"],
        "quality": [0.7, 0.9, 0.8, 0.2, None],
        "tags": [["a", "b"], [], None, ["b"], ["c"]],
        "meta": [{"year": 2020}, {"year": 2021}, {"year": None}, None, {"year": 2024}],
        "day": [datetime.date(2020, 1, day) for day in range(1, 6)],
    }
)


@pytest.mark.parametrize(
    ("text", "columns", "kept"),
    [
        ("lang = 'de' and quality >= 0.7", ("lang", "quality"), [0]),
        ("lang = 'de' or quality > 0.75", ("lang", "quality"), [0, 1, 2, 3]),
        ("lang in ('de', 'fr')", ("lang",), [0, 3, 4]),
        ("lang is null", ("lang",), [2]),
        ("not (quality > 0.5)", ("quality",), [3]),
        ("list_contains(tags, 'b')", ("tags",), [0, 3]),
        ("len(list_filter(tags, lambda t: t = 'b')) > 0", ("tags",), [0, 3]),
        ("meta.year >= 2021", ("meta",), [1, 4]),
        ("lang like 'd%' -- German", ("lang",), [0, 3]),
        ("regexp_matches(lang, '^[ef]')", ("lang",), [1, 4]),
        ("day between date '2020-01-02' and date '2020-01-03'", ("day",), [1, 2]),
        ("case when lang = 'de' then quality else 1 end > 0.5", ("lang", "quality"), [0, 1, 2, 4]),
        ("\"lang\" = 'de'", ("lang",), [0, 3]),
    ],
)
def test_an_expression_keeps_rows_and_null_keeps_nothing(text: str, columns: tuple[str, ...], kept: list[int]) -> None:
    assert columns_of_expression(text) == columns
    assert kept_rows(text, TABLE).nonzero()[0].tolist() == kept


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("random() > 0.5 and lang = 'de'", "calls random"),
        ("now() > day", "calls now"),
        ("current_date > day", "names current_date"),
        ("lang = uuid()::varchar", "calls uuid"),
        ("lang = (select 'de')", "has a subquery"),
        ("exists (select 1)", "has a subquery"),
        ("count(*) > 1", "calls count_star"),
        ("max(quality) > 0.5", "calls max"),
        ("row_number() over () > 3 and lang = 'de'", "has a window function"),
        ("lang = 'de'; drop table x", "no SQL expression"),
        ("lang) or (quality > 0", "no SQL expression"),
        ("lang = 'de' limit 1", "no SQL expression"),
        ("lang as x", "more than one SQL expression"),
        ("lang, quality", "more than one SQL expression"),
        ("lang from s where quality > 0 --", "no SQL expression"),
        ("getenv('HOME') = lang", "calls getenv"),
        ("read_text('/etc/passwd') = lang", "calls read_text"),
        ("lang = $1", "has a parameter"),
        ("nextval('s') = 1", "calls nextval"),
        ("", "no SQL expression"),
        ("1 = 1", "names no property"),
        ("lang = ", "'lang = ' is no SQL expression: it is not whole; more must follow at its end$"),
        ("lang in ('de',", "it is not whole"),
        ("(lang = 'de'", "it is not whole"),
        ("lang = 'de' and )", "syntax error at or near"),
        ("lang = 'de", "unterminated string literal"),
    ],
)
def test_what_is_no_function_of_one_row_is_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        columns_of_expression(text, "sources.german.where")
    assert caught.value.where == "sources.german.where"


def test_what_does_not_fit_the_columns_is_named() -> None:
    with pytest.raises(RecipeError, match=r"no property 'langs' .did you mean 'lang'\?.*day, lang, meta"):
        kept_rows("langs = 'de'", TABLE)
    with pytest.raises(RecipeError, match="does not fit its columns"):
        kept_rows("quality + tags", TABLE)
    with pytest.raises(RecipeError, match="does not fit its columns"):
        kept_rows("cast(lang as integer) > 3", TABLE)


def test_many_rows_keep_their_order() -> None:
    table = pa.table({"n": pa.array(range(1_000_000), pa.int64())})
    assert kept_rows("n % 1000 = 7", table).nonzero()[0].tolist() == list(range(7, 1_000_000, 1000))
