"""Selections, properties, cuts and hold-outs: what a recipe may say of the rows of a source."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from tests.support.recipe_text import load_text
from torchmix.errors import RecipeError
from torchmix.recipe.changes import parse_shares
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.sources import columns_of, path_properties_of
from torchmix.recipe.streams import row_sets_of
from torchmix.recipe.structs import Recipe, Selection

SOURCES = """\
  web: {path: "data/(en)/*.parquet", tokens: ids, id: url, properties: [lang, quality]}
  german: {from: web, where: "lang = 'de' and quality >= 0.7"}
  papers: {path: "papers/*/*.parquet", tokens: ids, split_by: dir}
  grades: {path: "g/*.parquet", tokens: ids, split_by: {column: difficulty, quantiles: 4}, properties: [difficulty]}
"""
MIXTURE = "{web: 50%, german: 20%, papers/pubmed: 10%, grades/q1: 10%, grades/q4: 10%}"


def text_of(sources: str = SOURCES, mixture: str = MIXTURE, more: str = "") -> str:
    return f"version: 1\nseed: 1\nbatch: {{samples: 4, length: 64}}\nsources:\n{sources}mixture: {mixture}\n{more}"


def test_a_source_with_from_is_a_selection_in_a_file_and_in_python(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, text_of())
    assert recipe.selections == {"german": Selection(source="web", where="lang = 'de' and quality >= 0.7")}
    assert sorted(recipe.sources) == ["grades", "papers", "web"]
    assert check_recipe(recipe) == recipe
    assert check_recipe(msgspec.to_builtins(recipe)) == recipe


def test_the_mixture_names_sources_selections_and_children(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, text_of())
    found = row_sets_of(part_of(recipe, "train"))
    assert {name: (one.source, one.child) for name, one in found.items()} == {
        "german": ("web", None),
        "grades/q1": ("grades", "q1"),
        "grades/q4": ("grades", "q4"),
        "papers/pubmed": ("papers", "pubmed"),
        "web": ("web", None),
    }
    assert parse_shares(recipe)["papers/pubmed"] == Fraction(1, 10)


def test_a_source_of_which_only_selections_have_shares_needs_none(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, text_of(mixture="{german: 90%, grades/q1: 5%, papers/a: 5%}"))
    assert list(parse_shares(recipe)) == ["german", "grades/q1", "papers/a"]
    with pytest.raises(RecipeError, match="'grades' has no share"):
        load_text(tmp_path, text_of(mixture="{german: 90%, papers/a: 10%}"))


def test_properties_are_columns_of_files_or_parts_of_paths(tmp_path: Path) -> None:
    source = "  web: {path: a.parquet, tokens: t, id: url, properties: {l: lang, crawl: {path: 'data/([^/]+)/'}}}\n"
    web = load_text(tmp_path, text_of(source, "{web: 1}")).sources["web"]
    assert columns_of(web) == {"l": "lang", "url": "url"}
    assert path_properties_of(web) == {"crawl": "data/([^/]+)/"}


def test_properties_do_not_alter_the_fingerprint_and_selections_do_not_by_their_text(tmp_path: Path) -> None:
    plain = "  web: {path: a.parquet, tokens: t}\n"
    rich = "  web: {path: a.parquet, tokens: t, id: url, properties: [lang]}\n"
    german = "  german: {from: web, where: \"lang = 'de'\"}\n"

    def fingerprint(sources: str, mixture: str) -> str:
        return recipe_fingerprint(load_text(tmp_path, text_of(sources, mixture)))

    assert fingerprint(rich, "{web: 1}") == fingerprint(plain, "{web: 1}")
    both = fingerprint(rich + german, "{web: 1, german: 1}")
    assert both == fingerprint(rich + german.replace("=", "!="), "{web: 1, german: 1}")
    assert both != fingerprint(rich + german.replace("german", "other"), "{web: 1, other: 1}")


@pytest.mark.parametrize(
    ("old", "new", "where", "words"),
    [
        ("german: {from: web", "german: {from: wep", "sources.german.from", "no source 'wep' with files (did you mean"),
        ("where:", "were:", "sources.german.were", "unknown key (did you mean 'where'?)"),
        ("  german:", "  web/de:", "sources.web/de", "is not usable: printable text without '/', '.'"),
        ("  german:", "  web.de:", "sources.web.de", "is not usable"),
        ("  german:", "  papers:", "", "the key 'papers' is there twice"),
        ("split_by: dir", "split_by: folder", "sources.papers.split_by", "'folder' is not 'dir'"),
        ("quantiles: 4", "quantiles: 1", "sources.grades.split_by.quantiles", "must be in [2, 1000]"),
        ("grades/q4", "grades/q5", "mixture.grades/q5", "no such source (did you mean 'grades/q4'?)"),
        ("[lang, quality]", "[lang, tokens]", "sources.web.properties", "every row has the property tokens"),
        ("[lang, quality]", "{a: {path: '['}}", "sources.web.properties.a.path", "is no regular expression"),
        ("[lang, quality]", "{a: {path: 'a'}}", "sources.web.properties.a.path", "has 0 groups"),
    ],
)
def test_faults_are_named(tmp_path: Path, old: str, new: str, where: str, words: str) -> None:
    text = text_of()
    assert old in text
    with pytest.raises(RecipeError) as caught:
        load_text(tmp_path, text.replace(old, new, 1))
    if where:
        assert caught.value.where == where
        assert words in caught.value.message
        assert caught.value.line


HELD = "hold_out: {validation: {web: 0.5%, papers: 1%}, test: {web: 2%}}\n"


def test_what_is_held_out_is_a_part_with_the_mixture_of_what_has_such_rows(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, text_of(more=HELD))
    assert [has_part(recipe, part) for part in ("train", "validation", "test")] == [True, True, True]
    train, validation, test = (part_of(recipe, name) for name in ("train", "validation", "test"))
    assert train.bands == {"papers": ("1/100", "1"), "web": ("1/200", "49/50")}
    assert validation.bands == {"papers": ("0", "1/100"), "web": ("0", "1/200")}
    assert test.bands == {"web": ("49/50", "1")}
    assert parse_shares(validation) == {
        "german": Fraction(2, 8),
        "papers/pubmed": Fraction(1, 8),
        "web": Fraction(5, 8),
    }
    assert sorted(test.sources) == ["web"] and sorted(parse_shares(test)) == ["german", "web"]


@pytest.mark.parametrize(
    ("more", "where", "words"),
    [
        ("hold_out: {vali: {web: 1%}}\n", "hold_out.vali", "did you mean 'validation'"),
        ("hold_out: {validation: {german: 1%}}\n", "hold_out.validation.german", "no such source"),
        ("hold_out: {validation: {web: 100%}}\n", "hold_out.validation.web", "below 100%"),
        ("hold_out: {validation: {web: 60%}, test: {web: 40%}}\n", "hold_out", "all rows of 'web' are held out"),
        (HELD + "split: [9, 1]\n", "hold_out.validation", "split cuts the rows"),
        (
            HELD + "validation: {sources: {v: {path: v.bin}}, mixture: {v: 1}}\n",
            "hold_out.validation",
            "has sources of its own",
        ),
    ],
)
def test_faults_of_hold_outs_are_named(tmp_path: Path, more: str, where: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(tmp_path, text_of(more=more))
    assert caught.value.where == where and words in caught.value.message


def test_what_is_held_out_keeps_groups_and_ratios(tmp_path: Path) -> None:
    mixture = "{text: {share: 80%, children: {web: 1/4, german: 1/4, papers/a: 1/2}}, grades/q1: 20%}"
    recipe: Recipe = load_text(tmp_path, text_of(mixture=mixture, more="hold_out: {test: {web: 1%}}\n"))
    test = part_of(recipe, "test")
    assert parse_shares(test) == {"german": Fraction(1, 2), "web": Fraction(1, 2)}
    assert list(test.mixture) == ["text"]
