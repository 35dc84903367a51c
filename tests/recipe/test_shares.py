"""Shares: percentages are taken exactly, and written as they are read."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.support.recipe_text import small_recipe
from torchmix.errors import RecipeError
from torchmix.recipe.amounts import apportioned, parse_fraction, percent_text
from torchmix.recipe.changes import parse_shares
from torchmix.recipe.structs import Evaluation, Source


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
    assert parse_fraction(text, "mixture.web") == share


@pytest.mark.parametrize("text", ["", "%", "70", "7 0%", "70%%", "1/3%", "inf%", "1e1000%", "0x1%"])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_fraction(text, "mixture.web")
    assert caught.value.where == "mixture.web"


@pytest.mark.parametrize("text", ["100%", "99.999%", "0.00001%", "1234.5%"])
def test_percentages_are_written_as_they_are_read(text: str) -> None:
    assert percent_text(parse_fraction(text, "")) == text


def test_shares_are_exact_and_ordered_by_name() -> None:
    names = ("tiny", "big", "Mid")
    sources = {name: Source(path="x", tokens="t") for name in names}
    mixture = {"tiny": "1e-3%", "big": "66.666 %", "Mid": "33.333%"}
    shares = parse_shares(small_recipe(sources=sources, mixture=mixture))
    assert shares == {"Mid": Fraction(33333, 10**5), "big": Fraction(66666, 10**5), "tiny": Fraction(1, 10**5)}
    assert list(shares) == ["Mid", "big", "tiny"]


def test_a_fraction_may_be_nothing() -> None:
    assert parse_fraction("0%", "x") == 0
    assert parse_fraction("-1%", "x") == Fraction(-1, 100)


def test_the_shares_of_a_part_are_named_with_it() -> None:
    part = Evaluation(sources={"v": Source(path="x", tokens="t")}, mixture={"v": "90%"})
    with pytest.raises(RecipeError, match="10% is missing") as caught:
        parse_shares(part, "validation")
    assert caught.value.where == "validation.mixture"


@pytest.mark.parametrize("share", ["9" * 5000 + "%", "1/" + "3" * 5000, 10**5000, -(10**5000)], ids=range(4))
def test_numbers_without_end_are_no_shares(share: str | int) -> None:
    part = Evaluation(sources={"v": Source(path="x", tokens="t")}, mixture={"v": share})
    with pytest.raises(RecipeError, match=r"is not a percentage|more than 64 bits"):
        parse_shares(part, "validation")


def test_parts_are_rounded_by_their_largest_remainders() -> None:
    assert apportioned([100, 100, 100], 3, 100) == [34, 33, 33], "of equal remainders the first gets one more"
    assert apportioned([101, 505, 394], 10, 100) == [10, 51, 39]
    assert apportioned([0, 1, 500, 499], 10, 100) == [0, 1, 50, 49], "only what has no part gets none"
    assert apportioned([1, 1, 1, 1, 498, 498], 10, 100) == [1, 1, 1, 1, 49, 47], "the last of the largest pays"
