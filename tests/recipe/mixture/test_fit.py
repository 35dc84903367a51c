"""Shares of cells: every property has what it asks, cells keep the odds of their sizes, and what cannot be is named."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from torchmix.errors import RecipeError
from torchmix.recipe.fit import fit_cells

HALF = Fraction(1, 2)


def test_the_mixture_of_two_properties() -> None:
    """50/50 by source and 80/20 by language, as in Mixtera's paper."""
    sizes = {("wiki", "en"): 900, ("wiki", "de"): 100, ("subtitles", "en"): 300, ("subtitles", "de"): 700}
    by_language = {"en": Fraction(4, 5), "de": Fraction(1, 5)}
    fit = fit_cells(sizes, ("source", "lang"), ({"wiki": HALF, "subtitles": HALF}, by_language))
    shares = fit.shares
    assert sum(shares.values()) == 1
    assert shares["wiki", "en"] + shares["subtitles", "en"] == pytest.approx(0.8, abs=1e-11)
    assert shares["wiki", "en"] + shares["wiki", "de"] == pytest.approx(0.5, abs=1e-11)
    odds = shares["wiki", "en"] * shares["subtitles", "de"] / (shares["wiki", "de"] * shares["subtitles", "en"])
    assert odds == pytest.approx(900 * 700 / (100 * 300), rel=1e-9), "fitting keeps the odds of the sizes"


@pytest.mark.parametrize("seed", range(20))
def test_what_cells_can_have_together_is_found_to_the_bit_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    values = [[f"{at}{i}" for i in range(rng.randint(1, 5))] for at in range(3)]
    cells = {tuple(rng.choice(names) for names in values): rng.randint(1, 10**9) for _ in range(60)}
    some = {cell: Fraction(rng.randint(1, 100)) for cell in cells}  # shares that do exist: those of other sizes
    total = sum(some.values())
    shares = [
        {name: sum(x for cell, x in some.items() if cell[at] == name) / total for name in names}
        for at, names in enumerate(values)
    ]
    present = [{name: share for name, share in each.items() if share} for each in shares]
    fit = fit_cells(cells, ("a", "b", "c"), present)
    for at, each in enumerate(present):
        for name, share in each.items():
            assert sum(x for cell, x in fit.shares.items() if cell[at] == name) == pytest.approx(share, abs=1e-11)
    turned = dict(sorted(cells.items(), reverse=True))
    assert fit_cells(turned, ("a", "b", "c"), present).shares == fit.shares


def test_shares_that_do_not_go_together_are_an_error_with_the_nearest() -> None:
    sizes = {("wiki", "en"): 900, ("subtitles", "de"): 700}
    wanted = ({"wiki": HALF, "subtitles": HALF}, {"en": Fraction(4, 5), "de": Fraction(1, 5)})
    with pytest.raises(RecipeError, match=r"no shares of the cells that exist .* lang: de 20 %, en 80 %"):
        fit_cells(sizes, ("source", "lang"), wanted)
    with pytest.raises(RecipeError, match="no document has lang 'fr'"):
        fit_cells(sizes, ("source", "lang"), ({"wiki": Fraction(1)}, {"en": HALF, "fr": HALF}))


def test_cells_of_values_without_a_share_get_nothing() -> None:
    sizes = {("wiki", "en"): 900, ("wiki", "de"): 100, ("books", "en"): 5}
    fit = fit_cells(sizes, ("source", "lang"), ({"wiki": Fraction(1)}, {"en": HALF, "de": HALF}))
    assert set(fit.shares) == {("wiki", "en"), ("wiki", "de")}
