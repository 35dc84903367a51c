"""Functions over rows in a module of a recipe's folder, and a source whose rows go through one of them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Batch, Recipe, Source

FUNCTIONS = '''
import numpy as np
import pyarrow as pa

def shout(columns, *, row, epoch, seed):
    [texts] = columns.values()
    return {"text": pa.array([text.upper() for text in texts.to_pylist()])}

def letters(columns, *, row, epoch, seed):
    """Tokens of texts, and as another output their bytes; of "bad" an error, of "" nothing."""
    texts = columns["text"].to_pylist()
    return {
        "tokens": pa.array([[ord(letter) for letter in text] for text in texts], pa.list_(pa.int64())),
        "raw": pa.array([list(text.encode()) for text in texts], pa.list_(pa.uint8())),
        "error": pa.array(["a bad word" if text == "bad" else None for text in texts], pa.string()),
    }

def doubled(columns, *, row, epoch, seed):
    [lists] = columns.values()
    return {"tokens": pa.array([[2 * token for token in tokens] for tokens in lists.to_pylist()], pa.list_(pa.int32()))}

def drawn(columns, *, row, epoch, seed):
    """As many tokens as the text has letters, drawn from the seed."""
    texts = columns["text"].to_pylist()
    draws = [np.random.Generator(np.random.Philox(key=int(key))) for key in seed]
    return {"tokens": pa.array([draw.integers(0, 1000, len(text)) for draw, text in zip(draws, texts)])}

drawn.random = True

def unsaid(columns, **given):
    return drawn(columns, **given)

def stretched(columns, *, row, epoch, seed):
    return {"tokens": pa.array([[7] * (3 + epoch)] * len(row), pa.list_(pa.int32()))}

def failing(columns, *, row, epoch, seed):
    return {"tokens": pa.array([[1 // (text != "bad")] for text in columns["text"].to_pylist()])}

def noted(columns, *, row, epoch, seed):
    """The texts; each row is noted in the file LOG."""
    with open(LOG, "a") as log:
        log.write("".join(f"{number} {epoch}\\n" for number in row.tolist()))
    return {"text": columns["text"]}

for each in (shout, letters, doubled, drawn, unsaid, stretched, failing, noted):
    each.version = 1
'''
_numbers = itertools.count()


def write_functions(directory: Path, more: str = "") -> str:
    """Write the functions above into a module that no other test has; returns its name."""
    name = f"maps_of_test_{next(_numbers)}"
    sys.modules.pop(name, None)
    content = f"LOG = {str(directory / 'rows.log')!r}\n{FUNCTIONS}\n{more}"
    (directory / f"{name}.py").write_text(content, encoding="utf-8")
    return name


def recipe_of_map(map: str, *, length: int = 16, samples: int = 4, **source: Any) -> Recipe:
    """A checked recipe over one source `web` with this map; by default texts of web.parquet, as bytes."""
    keys = {"path": "web.parquet", "text": "text", "tokenizer": "bytes", **source}
    return check_recipe(
        Recipe(
            version=1,
            seed=5,
            batch=Batch(samples=samples, length=length),
            sources={"web": Source(**keys, map=map)},
            mixture={"web": "100%"},
        )
    )
