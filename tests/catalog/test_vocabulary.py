from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.catalogs import open_catalog
from tests.support.file_indexes import make_file_index, publish_files
from tests.support.recipes import make_recipe
from torchmix.catalog.manifest import MOST_ID, IdRange
from torchmix.catalog.store import ANY_MODEL, Catalog, check_vocabulary, id_limit, vocabulary_misfits
from torchmix.errors import RecipeError
from torchmix.recipe.structs import Recipe


def recipe_with(vocab_size: int | None = None) -> Recipe:
    return msgspec.structs.replace(make_recipe({"web": "100%"}), vocab_size=vocab_size)


def opened(directory: Path, *ids: IdRange | None, **recipe: Any) -> tuple[Recipe, Catalog]:
    """A source of a file for each range of ids."""
    made = recipe_with(**recipe)
    parts = [msgspec.structs.replace(make_file_index([[3, 2]], seed=seed), ids=found) for seed, found in enumerate(ids)]
    files = [(f"{i}.parquet", part) for i, part in enumerate(parts)]
    publish_files(made, directory, {"web": files})
    return made, open_catalog(made, directory)


def test_the_file_with_the_largest_id_is_named_with_both_values(tmp_path):
    recipe, catalog = opened(tmp_path, IdRange(5, 300), IdRange(0, 50_257), IdRange(9, 60), vocab_size=50_257)
    assert [tuple(one) for one in vocabulary_misfits(recipe.vocab_size, catalog)] == [
        (
            "sources.web",
            "1.parquet holds the token 50257, but vocab_size is 50257; the ids are of another vocabulary, or the "
            "column holds something else",
        )
    ]
    with pytest.raises(RecipeError, match=r"^sources.web: 1.parquet holds the token 50257, but vocab_size is 50257"):
        check_vocabulary(recipe.vocab_size, catalog)


@pytest.mark.parametrize(
    ("ids", "vocab_size", "padded", "is_refused"),
    [
        (IdRange(0, 99), 100, None, False),
        (IdRange(0, 100), 100, None, True),
        (IdRange(0, 100), 100, 128, True),  # rows that pad the embedding have learned nothing
        (IdRange(0, 127), None, 128, False),
        (IdRange(0, 128), None, 128, True),
        (IdRange(0, MOST_ID), None, None, False),
        (IdRange(-1, 5), None, None, True),  # an index for other loaders than a recipe's may hold any integers
        (IdRange(0, 2**40), None, None, True),
        (None, 100, 128, False),
        (IdRange(0, 99), 100, 99, True),
    ],
)
def test_ids_vocab_size_and_the_padded_size(tmp_path, ids, vocab_size, padded, is_refused):
    recipe, catalog = opened(tmp_path, ids, vocab_size=vocab_size)
    assert bool(list(vocabulary_misfits(recipe.vocab_size, catalog, padded_vocab_size=padded))) == is_refused


def test_a_vocab_size_above_the_padded_one_is_told_without_a_catalog():
    recipe = recipe_with(vocab_size=50_304)
    [misfit] = vocabulary_misfits(recipe.vocab_size, None, padded_vocab_size=50_257)
    assert misfit.where == "vocab_size" and "50304 ids" in misfit.message and "has 50257" in misfit.message


def test_all_misfits_are_in_one_error(tmp_path):
    recipe, catalog = opened(tmp_path, IdRange(-3, 70), vocab_size=60)
    with pytest.raises(RecipeError) as error:
        check_vocabulary(recipe.vocab_size, catalog, padded_vocab_size=50)
    assert str(error.value).startswith("vocab_size: 60 ids") and "token -3" in str(error.value)
    assert "token 70, but vocab_size is 60" in str(error.value)


def test_what_ids_must_be_below():
    recipe = make_recipe({"web": "100%"})
    assert id_limit(recipe.vocab_size) == ANY_MODEL and ANY_MODEL.size == 2**31
    assert id_limit(recipe.vocab_size, 128).size == 128
    assert id_limit(100, 128).size == 100
