from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.recipes import make_recipe
from torchmix.errors import RecipeError
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe
from torchmix.recipe.sources import masks_resets, resets_attention, resets_positions, sources_with_resets
from torchmix.recipe.structs import Evaluation, Packing, Recipe, Source


def with_reset(reset_id: int = 3, **packing: Any) -> Recipe:
    return make_recipe({"web": "100%"}, sources={"web": {"reset_id": reset_id}}, packing=packing)


@pytest.mark.parametrize(
    ("packing", "attention", "positions", "loss"),
    [
        ({}, True, True, True),
        ({"boundaries": "none"}, False, False, True),
        ({"boundaries": "none", "positions": "document"}, False, True, True),
        ({"boundaries": "none", "positions": "document", "reset_loss": "keep"}, False, True, False),
        ({"positions": "sample"}, True, False, True),
    ],
)
def test_each_switch_is_one_of_its_own(packing: dict[str, Any], attention: bool, positions: bool, loss: bool) -> None:
    found = Packing(**packing)
    assert (resets_attention(found), resets_positions(found), masks_resets(found)) == (attention, positions, loss)
    assert sources_with_resets(with_reset(**packing).sources) == {"web": 3}


def test_resets_are_no_part_of_the_order() -> None:
    plain = make_recipe({"web": "100%"})
    found = {recipe_fingerprint(recipe) for recipe in (plain, with_reset(), with_reset(4, positions="sample"))}
    assert len(found) == 1


@pytest.mark.parametrize("reset_id", [-1, 2**31])
def test_an_id_is_in_range(reset_id: int) -> None:
    with pytest.raises(RecipeError, match=r"sources\.web\.reset_id: .* out of range"):
        with_reset(reset_id)


def test_an_id_is_one_of_the_vocabulary_in_every_part() -> None:
    source = Source(path="held.parquet", tokens="input_ids", reset_id=7)
    recipe = msgspec.structs.replace(
        make_recipe({"web": "100%"}),
        vocab_size=7,
        validation=Evaluation(sources={"held": source}, mixture={"held": "100%"}),
    )
    with pytest.raises(RecipeError, match=r"validation\.sources\.held\.reset_id: 7 is no id of vocab_size 7"):
        check_recipe(recipe)
    check_recipe(msgspec.structs.replace(recipe, vocab_size=8))


def test_an_id_at_which_nothing_resets_is_refused_in_every_part() -> None:
    off = {"boundaries": "none", "reset_loss": "keep"}
    with pytest.raises(RecipeError, match=r"^sources\.web\.reset_id: nothing resets at it"):
        with_reset(**off)
    with_reset(**off, positions="document")
