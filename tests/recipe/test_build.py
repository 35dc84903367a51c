"""Plain values to Structs: shapes and types, and words for what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from torchmix.errors import RecipeError
from torchmix.recipe.build import build, nearest
from torchmix.recipe.load import parse_yaml
from torchmix.recipe.structs import Batch, Evaluation, RampStage, Recipe, Source


def test_settings_are_shared_by_anchor_and_merge() -> None:
    text = "sources: {a: &a {path: w, tokens: t, max_epochs: 2}, b: &b {<<: *a, path: b}, c: {<<: *b, max_epochs: 3}}"
    plain, _ = parse_yaml(text)
    assert build(dict[str, Source], plain["sources"], "sources") == {
        "a": Source(path="w", tokens="t", max_epochs=2),
        "b": Source(path="b", tokens="t", max_epochs=2),
        "c": Source(path="b", tokens="t", max_epochs=3),
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "- 1\n", "just text"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="expected a mapping with the keys version"):
        build(Recipe, parse_yaml(text)[0])


def test_only_a_name_that_is_near_is_offered() -> None:
    assert nearest("max_epoch", ("path", "max_epochs")) == " (did you mean 'max_epochs'?)"
    assert nearest("zzz", ("path", "max_epochs")) == ""


def test_a_number_or_a_list_of_mappings_is_told_apart() -> None:
    stages = [{"from_step": 0, "samples": 4}, {"from_step": 9, "samples": 8}]
    assert build(Batch, {"samples": 4, "length": 8}) == Batch(samples=4, length=8)
    ramp = (RampStage(from_step=0, samples=4), RampStage(from_step=9, samples=8))
    assert build(Batch, {"samples": stages, "length": 8}) == Batch(samples=ramp, length=8)
    assert build(Batch, {"samples": tuple(stages), "length": 8}) == Batch(samples=ramp, length=8)


@pytest.mark.parametrize(
    ("kind", "value", "where", "words"),
    [
        (
            Batch,
            {"samples": "4", "length": 8},
            "x.samples",
            "a whole number or a list of mappings with the keys from_s",
        ),
        (Batch, {"samples": [4], "length": 8}, "x.samples[0]", "expected a mapping with the keys from_step, samples"),
        (Batch, {"samples": [{"from_step": 0}], "length": 8}, "x.samples[0].samples", "required and missing"),
        (Batch, {"samples": [{"from": 0, "samples": 1}], "length": 8}, "x.samples[0].from", "did you mean 'from_step'"),
        (
            Source,
            {"path": "a", "documents": "3%"},
            "x.documents",
            "expected a list of 2 texts or nothing, got text '3%'",
        ),
        (Source, {"path": "a", "documents": ["3%"]}, "x.documents", "expected a list of 2 texts"),
        (Source, {"path": "a", "documents": [0, 1]}, "x.documents", "expected a list of 2 texts"),
        (Recipe, {"split": "9,1"}, "x.split", "a list of numbers or nothing, got text '9,1'"),
        (Recipe, {"split": [9, True]}, "x.split", "a list of numbers"),
        (Evaluation | None, {"sources": {}}, "x.mixture", "required and missing"),
        (Evaluation | None, [], "x", "expected a mapping with the keys sources, mixture"),
    ],
)
def test_what_was_expected_is_said(kind: Any, value: Any, where: str, words: str) -> None:
    if kind is Recipe:
        value = {"version": 1, "seed": 1, "batch": {"samples": 1, "length": 2}, "sources": {}, "mixture": {}} | value
    with pytest.raises(RecipeError) as caught:
        build(kind, value, "x")
    assert caught.value.where == where
    assert words in caught.value.message
