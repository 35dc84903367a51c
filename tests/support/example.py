"""The files of examples as modules: scripts that import each other by plain names; and a recipe for some."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from tests.support.files import make_text_file, random_texts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron"
PRETRAIN_GPT = EXAMPLE / "pretrain_gpt"


def example_module(name: str, folder: Path = EXAMPLE) -> ModuleType:
    """Import `name`.py of an example's folder as it is imported when a script beside it runs."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def odd_batch_of_prose(folder: Path) -> Path:
    """A recipe of one source in a folder: seven samples a step, which two, three and four ranks do not divide."""
    make_text_file(folder / "prose.parquet", random_texts(1, 300))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        "{version: 1, seed: 1, batch: {samples: 7, length: 64}, mixture: {prose: 100%}, loaders: {where: in_process}, "
        "sources: {prose: {path: prose.parquet, text: text, tokenizer: bytes}}}",
        encoding="utf-8",
    )
    return recipe
