"""Text to values: the line of every key path, anchors, percentages, and what YAML must not do."""

from __future__ import annotations

from fractions import Fraction

import pytest

from torchmix.errors import RecipeError
from torchmix.recipe.build import build, nearest
from torchmix.recipe.shares import parse_percent, percent_text
from torchmix.recipe.structs import Recipe, Source
from torchmix.recipe.yaml_lines import line_of, parse_yaml

TEXT = """\
version: 1
sources:
  web:
    path:
      - a
      - b
  no: {path: c}
"""


def test_every_key_path_has_its_line() -> None:
    plain, lines = parse_yaml(TEXT)
    assert plain == {"version": 1, "sources": {"web": {"path": ["a", "b"]}, "no": {"path": "c"}}}
    assert lines == {
        "": 1,
        "version": 1,
        "sources": 2,
        "sources.web": 3,
        "sources.web.path": 4,
        "sources.web.path[0]": 5,
        "sources.web.path[1]": 6,
        "sources.no": 7,
        "sources.no.path": 7,
    }


@pytest.mark.parametrize(
    ("where", "line"),
    [("sources.web.path[1]", 6), ("sources.web.path[1].x", 6), ("sources.web.tokens", 3), ("seed", 1)],
)
def test_a_path_that_is_not_in_the_text_has_the_line_of_what_encloses_it(where: str, line: int) -> None:
    assert line_of(where, parse_yaml(TEXT)[1]) == line


def test_a_place_without_text_has_no_line() -> None:
    assert line_of("sources.web", {}) == 0


def test_settings_are_shared_by_anchor_and_merge() -> None:
    text = "sources: {a: &a {path: w, tokens: t, max_epochs: 2}, b: &b {<<: *a, path: b}, c: {<<: *b, max_epochs: 3}}"
    plain, _ = parse_yaml(text)
    assert build(dict[str, Source], plain["sources"], "sources") == {
        "a": Source(path="w", tokens="t", max_epochs=2),
        "b": Source(path="b", tokens="t", max_epochs=2),
        "c": Source(path="b", tokens="t", max_epochs=3),
    }


def test_a_key_that_overrides_a_merged_one_may_not_come_twice() -> None:
    with pytest.raises(RecipeError, match="twice"):
        parse_yaml("a: &a {path: x}\nb: {<<: *a, path: y, path: z}\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- 1\n", "just text"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="expected a mapping with the keys version"):
        build(Recipe, parse_yaml(text)[0])


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system [ls]", "!!python/name:os.system", "!!set {a}", "!x {}"]
)
def test_tags_make_nothing(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_yaml(f"seed: {text}")


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(RecipeError, match="nests too deeply"):
        parse_yaml("[" * 5000 + "]" * 5000)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("70%", Fraction(7, 10)),
        (" 0.001 % ", Fraction(1, 10**5)),
        ("1e-3%", Fraction(1, 10**5)),
        (".5%", Fraction(1, 200)),
        ("+2.50E1%", Fraction(1, 4)),
    ],
)
def test_percentages_are_exact(text: str, share: Fraction) -> None:
    assert parse_percent(text, "mixture.web") == share


@pytest.mark.parametrize("text", ["", "%", "70", "7 0%", "70%%", "1/3%", "inf%", "1e1000%", "0x1%", "0e5%", "-0.1%"])
def test_what_is_no_positive_percentage_is_refused(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_percent(text, "mixture.web")
    assert caught.value.where == "mixture.web"


@pytest.mark.parametrize("text", ["100%", "99.999%", "0.00001%", "1234.5%"])
def test_percentages_are_written_as_they_are_read(text: str) -> None:
    assert percent_text(parse_percent(text, "")) == text


def test_only_a_name_that_is_near_is_offered() -> None:
    assert nearest("max_epoch", ("path", "max_epochs")) == " (did you mean 'max_epochs'?)"
    assert nearest("zzz", ("path", "max_epochs")) == ""
