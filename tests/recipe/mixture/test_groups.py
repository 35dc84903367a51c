"""The mixture of a recipe: groups, ratios, sizes; and what is wrong with one, by its path of keys and line."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.recipe_text import TEXT, load_text
from torchmix.errors import RecipeError
from torchmix.recipe.changes import parse_shares
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.structs import Recipe

NAMES = ("web", "german", "pubmed", "peps", "code")
HEAD = "version: 1\nseed: 1\nbatch: {samples: 4, length: 64}\nsources:\n"
SOURCES = "".join(f"  {name}: {{path: {name}.parquet, tokens: ids}}\n" for name in NAMES)
PAPER = """mixture:
  text:
    share: 80%
    children: {web: 9000, german: 518, small: {share: 1019, proportional: 0.5, children: [pubmed, peps]}}
  code: 20%
"""


def recipe_of(folder: Path, mixture: str) -> Recipe:
    return load_text(folder, HEAD + SOURCES + mixture)


def test_groups_ratios_and_sizes(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, PAPER)
    tokens = {"web": 1, "german": 1, "code": 1, "pubmed": 9 * 10**9, "peps": 10**9}
    shares = parse_shares(recipe, tokens=tokens)
    assert shares["code"] == Fraction(1, 5) and shares["web"] == Fraction(4, 5) * Fraction(9000, 10537)
    assert shares["pubmed"] + shares["peps"] == Fraction(4, 5) * Fraction(1019, 10537)
    assert float(shares["pubmed"] / shares["peps"]) == pytest.approx(3), "the root of nine times as many tokens"
    assert sum(shares.values()) == 1


@pytest.mark.parametrize(
    ("mixture", "share"),
    [
        ("{web: 1/3, german: 1/3, pubmed: 1/6, peps: 1/12, code: 1/12}", Fraction(1, 3)),
        ("{web: 2, german: 1, pubmed: 1, peps: 0.5, code: 1.5}", Fraction(1, 3)),
        ("{web: 25%, a: {share: 3/4, children: {german: 1, pubmed: 1, peps: 1, code: 1}}}", Fraction(1, 4)),
    ],
)
def test_fractions_and_ratios_are_exact(tmp_path: Path, mixture: str, share: Fraction) -> None:
    assert parse_shares(recipe_of(tmp_path, f"mixture: {mixture}\n"))["web"] == share


@pytest.mark.parametrize(
    ("mixture", "where", "words"),
    [
        ("{web: 50%, g: {share: 50%, children: {german: 9, pubmed: 9, peps: 9, cod: 9}}}", "mixture.g.cod", "'code'"),
        ("{web: 50%, g: {share: 50%, children: {german: 9, pubmed: 9, peps: 9}}}", "mixture.code", "has no share"),
        ("{web: 50%, g: {share: 50%, children: {german: 9, pubmed: 50%}}}", "mixture.g.children.german", "as text"),
        ("{web: 50%, g: {share: 50%, children: {german: 50%}}}", "mixture.g.children", "50% is missing"),
        ("{web: 1/3, g: {share: 1/2, children: {german: 1}}}", "mixture", "sum to 5/6, not 100%; 1/6 is missing"),
        ("{web: 50%, g: {children: {german: 1}}}", "mixture.g.share", "required and missing"),
        ("{web: 50%, g: {share: 50%}}", "mixture.g.children", "required and missing"),
        ("{web: 50%, g: {share: 50%, children: {}}}", "mixture.g.children", "names no source"),
        ("{web: 50%, g: {share: 50%, children: [german]}}", "mixture.g.children", "add `proportional: 1`"),
        ("{web: 50%, g: {share: 50%, proportional: 2, children: [german]}}", "mixture.g.proportional", "not in .0, 1."),
        (
            "{web: 50%, g: {share: 50%, proportional: 1, children: {german: 3}}}",
            "mixture.g.children.german",
            "share of its own",
        ),
        ("{web: 50%, g: {share: 50%, childs: {german: 1}}}", "mixture.g.childs", "did you mean 'children'"),
        ("{web: 50%, g: [german]}", "mixture.g", "a mapping with the keys share, children, flat, proportional"),
        ("{web: 1, g: {share: 1, children: {web: 1}}}", "mixture", "stands there twice"),
        ("{web: 1/0, german: 1}", "mixture.web", "divides by 0"),
        ("{web: .nan, german: 1}", "mixture.web", "no share"),
        ("{web: -1, german: 1}", "mixture.web", "below 0"),
        ("{web: 0, german: 1, pubmed: 1, peps: 1, code: 1}", "mixture.web", "never above 0"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(tmp_path: Path, mixture: str, where: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        recipe_of(tmp_path, f"mixture: {mixture}\n")
    assert caught.value.where == where and caught.value.line == 10


def test_a_flat_mixture_has_the_fingerprint_of_its_shares_and_groups_are_covered(tmp_path: Path) -> None:
    flat = recipe_fingerprint(load_text(tmp_path, TEXT))
    ratios = TEXT.replace("{web: 70%, peps: 30%}", "{web: 7, peps: 3}")
    grouped = TEXT.replace("{web: 70%, peps: 30%}", "{web: 70%, g: {share: 30%, children: {peps: 1}}}")
    named = grouped.replace(" g: {", " h: {")
    assert recipe_fingerprint(load_text(tmp_path, ratios)) == flat
    assert len({flat, *(recipe_fingerprint(load_text(tmp_path, text)) for text in (grouped, named))}) == 3
