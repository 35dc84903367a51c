"""A folder as a user has it: Parquet files of four kinds of sources, and a recipe beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.templates import made_once
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

RECIPE = """\
version: 1
seed: 5
batch: {samples: 16, length: 256}
sources:
  code: {path: code.parquet, text: text, tokenizer: bytes}
  tiny: {path: tiny.parquet, tokens: input_ids}
  web: {path: data/web-*.parquet, tokens: input_ids}
mixture: {web: 79%, code: 20%, tiny: 1%}
balance: {method: rows, model: {layers: 4, hidden: 64, ffn: 128, heads: 4}}
"""


def make_project(folder: Path, *edits: tuple[str, str]) -> Path:
    """Write the data files and `recipe.yaml`, each edit (old, new) applied to its text; the path of the recipe.

    `web` has two files and some empty documents, `code` is text, `tiny` has six documents.
    """
    shutil.copytree(_files(), folder, dirs_exist_ok=True)
    return _with_recipe(folder, edits)


def make_indexed_project(folder: Path, *edits: tuple[str, str]) -> Path:
    """`make_project`, with a catalog of the edited recipe."""
    shutil.copytree(_indexed(), folder, dirs_exist_ok=True)
    path = _with_recipe(folder, edits)
    index_recipe(load_recipe(path), folder)  # what the edits leave as it is, is found in the copied catalog
    return path


@made_once
def _files(folder: Path) -> None:
    for number in range(2):
        make_tokens_file(folder / "data" / f"web-{number}.parquet", random_tokens(number, 1500, mean_tokens=80.0))
    make_text_file(folder / "code.parquet", random_texts(2, 300, mean_words=20.0))
    make_tokens_file(folder / "tiny.parquet", random_tokens(3, 6, mean_tokens=30.0, empty=0.0))


@made_once
def _indexed(folder: Path) -> None:
    path = make_project(folder)
    index_recipe(load_recipe(path), folder)


def _with_recipe(folder: Path, edits: tuple[tuple[str, str], ...]) -> Path:
    text = RECIPE
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} does not stand once in the recipe"
        text = text.replace(old, new)
    recipe = folder / "recipe.yaml"
    recipe.write_text(text, encoding="utf-8")
    return recipe
