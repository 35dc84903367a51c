"""Parts: what training, validation and test read, each as a recipe of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.recipe_text import load_text
from torchmix.errors import OptionError, RecipeError
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import Part, has_part, part_of, with_all_sources
from torchmix.recipe.structs import Recipe

TRAIN = """\
version: 1
seed: 1
batch: {samples: [{from_step: 0, samples: 4}, {from_step: 10, samples: 8}], length: 64}
sources: {web: {path: web.parquet, tokens: t, max_epochs: 3}, code: {path: code.bin}}
mixture: {web: 60%, code: 40%}
"""
SPLIT = TRAIN + "split: [90, 10]\n"
OWN = TRAIN + "validation: {sources: {held: {path: held.parquet, tokens: t}}, mixture: {held: 100%}}\n"


def bounds(recipe: Recipe) -> dict[str, tuple[str, str] | None]:
    return {name: source.documents for name, source in recipe.sources.items()}


def test_a_split_cuts_every_source(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, SPLIT)
    train, validation = part_of(recipe, "train"), part_of(recipe, "validation")
    assert bounds(train) == {"web": ("0%", "90%"), "code": ("0%", "90%")}
    assert bounds(validation) == {"web": ("90%", "100%"), "code": ("90%", "100%")}
    assert validation.mixture == recipe.mixture
    assert [has_part(recipe, part) for part in ("train", "validation", "test")] == [True, True, False]
    with pytest.raises(RecipeError, match="split gives no documents to test"):
        part_of(recipe, "test")


def test_a_part_of_its_own_brings_its_sources(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, OWN)
    validation = part_of(recipe, "validation")
    assert list(validation.sources) == ["held"]
    assert validation.mixture == {"held": "100%"}
    assert list(part_of(recipe, "train").sources) == ["web", "code"]
    assert [has_part(recipe, part) for part in ("train", "validation", "test")] == [True, True, False]
    with pytest.raises(RecipeError, match="no part test"):
        part_of(recipe, "test")
    assert sorted(with_all_sources(recipe).sources) == ["code", "held", "web"]


@pytest.mark.parametrize("text", [TRAIN, SPLIT, OWN])
def test_a_part_is_all_that_planning_needs(tmp_path: Path, text: str) -> None:
    recipe = load_text(tmp_path, text)
    for part in ("train", "validation"):
        if not has_part(recipe, part):
            continue
        alone = part_of(recipe, part)
        assert (alone.name, alone.one_pass) == (part, False)
        assert (alone.seed, alone.packing, alone.shuffle) == (recipe.seed, recipe.packing, recipe.shuffle)
        encoded = msgspec.msgpack.encode(alone)
        assert msgspec.msgpack.decode(encoded, type=Part) == alone, "it travels to a worker"


def test_evaluation_has_the_size_after_the_ramp(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, SPLIT)
    assert part_of(recipe, "train").batch == recipe.batch
    assert part_of(recipe, "validation").batch.samples == 8


def test_one_pass_ends_every_source_after_an_epoch(tmp_path: Path) -> None:
    once = part_of(load_text(tmp_path, SPLIT), "validation", one_pass=True)
    assert {(source.max_epochs, source.on_exhausted) for source in once.streams.values()} == {(1, "renormalise")}


def test_max_epochs_bounds_training_alone(tmp_path: Path) -> None:
    own = OWN.replace("tokens: t}}", "tokens: t, max_epochs: 1}}")
    for text, names in ((SPLIT, ["web", "code"]), (own, ["held"])):
        recipe = load_text(tmp_path, text)
        assert part_of(recipe, "train").streams["web"].max_epochs == 3
        validation = part_of(recipe, "validation")
        assert {name: source.max_epochs for name, source in validation.streams.items()} == dict.fromkeys(names)


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"'valid' is no part of a recipe \(did you mean 'validation'\?\)"):
        part_of(load_text(tmp_path, SPLIT), "valid")


def test_the_fingerprint_is_that_of_training(tmp_path: Path) -> None:
    plain, split, own = (load_text(tmp_path, text) for text in (TRAIN, SPLIT, OWN))
    assert recipe_fingerprint(own) == recipe_fingerprint(plain)
    assert recipe_fingerprint(split) == recipe_fingerprint(part_of(split, "train"))
    prints = {recipe_fingerprint(each) for each in (plain, split, part_of(split, "validation"))}
    assert len(prints) == 3
    assert recipe_fingerprint(load_text(tmp_path, TRAIN + "split: [1]\n")) == recipe_fingerprint(plain)
