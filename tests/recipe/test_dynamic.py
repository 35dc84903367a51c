"""The key `dynamic`: what it names, when decisions hold, and which values are errors."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from torchmix.errors import RecipeError
from torchmix.recipe.changes import dynamic_of, shares_in_group, tree_of_part, with_decided
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe
from torchmix.recipe.tree import stream_shares

MIXTURE = {"text": {"share": "80%", "children": {"web": "75%", "german": "25%"}}, "code": "20%"}


def recipe(dynamic: dict[str, Any] | None, mixture: dict[str, Any] = MIXTURE) -> Recipe:
    plain: dict[str, Any] = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 8, "length": 256},
        "sources": {
            name: {"path": f"{name}.jsonl", "text": "text", "tokenizer": "bytes"} for name in ("web", "german", "code")
        },
        "mixture": mixture,
    }
    return check_recipe(plain if dynamic is None else plain | {"dynamic": dynamic})


def test_a_group_is_decided_and_the_rest_stays() -> None:
    deciding = dynamic_of(recipe({"policy": "ado", "at": "text", "every": "10 steps", "lag": "4 steps"}))
    assert deciding is not None
    assert deciding.path == ("text",) and deciding.children == ("german", "web")
    assert (deciding.lowest, deciding.highest) == (Fraction(1, 2), Fraction(2))
    assert [step for step in range(40) if deciding.step_of(step) is not None] == [13, 23, 33]
    assert deciding.step_of(13) == 9
    tree = tree_of_part(recipe(None))
    assert shares_in_group(tree, ("text",)) == {"german": Fraction(1, 4), "web": Fraction(3, 4)}
    decided = with_decided(tree, ("text",), {"german": 1 << 31, "web": 1 << 31})
    assert stream_shares(decided) == {"code": Fraction(1, 5), "german": Fraction(2, 5), "web": Fraction(2, 5)}
    assert with_decided(tree, ("text",), {"german": 1, "books": 1}) == tree, "a stage that has other children"
    assert shares_in_group(tree, ("none",)) == {}


def test_the_whole_mixture_can_be_decided() -> None:
    deciding = dynamic_of(recipe({"policy": "my.module:Mine", "within": ["0x", "10x"]}))
    assert deciding is not None and deciding.path == () and deciding.children == ("code", "text")
    assert (deciding.every_steps, deciding.lag_steps) == (50, 16)


def test_when_decisions_hold_is_part_of_the_order_and_who_decides_is_not() -> None:
    def fingerprint(**dynamic: Any) -> str:
        return recipe_fingerprint(recipe({"policy": "ado", "at": "text"} | dynamic))

    assert fingerprint() == fingerprint(policy="odm", on_error="stop", decisions="elsewhere", within=["0.1x", "3x"])
    assert len({recipe_fingerprint(recipe(None)), fingerprint(), fingerprint(every="7 steps"), fingerprint(at="")}) == 4


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"policy": "adoo"}, "did you mean 'ado'"),
        ({"policy": "ado", "at": "txt"}, "no group 'txt' .did you mean 'text'"),
        ({"policy": "ado", "at": "code"}, "no group 'code'"),
        ({"policy": "ado", "every": "0 steps"}, "dynamic.every"),
        ({"policy": "ado", "lag": "4"}, "dynamic.lag"),
        ({"policy": "ado", "within": ["2x", "3x"]}, "1x, is not within"),
        ({"policy": "ado", "within": ["0.5", "2x"]}, "no multiple"),
        ({"policy": "ado", "on_error": "go on"}, "on_error"),
    ],
)
def test_wrong_values_are_named_errors(dynamic: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(dynamic)


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ({"text": {"share": "80%", "children": {"web": 1, "german": 1}, "proportional": 1}, "code": "20%"}, None),
        ({"text": {"share": "80%", "children": {"web": {}, "german": {}}, "proportional": 1}, "code": "20%"}, None),
        ({"text": {"share": "80%", "children": {"web": "100%"}}, "code": "10%", "german": "10%"}, "fewer than two"),
    ],
)
def test_a_group_whose_shares_cannot_change_is_refused(mixture: dict[str, Any], message: str | None) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe({"policy": "ado", "at": "text"}, mixture)
