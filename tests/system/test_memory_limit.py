"""`loaders.memory` is kept while the worker runs: what allocates beyond it is named."""

from __future__ import annotations

import sys
import time
from itertools import islice, takewhile
from pathlib import Path

import pytest

from tests.support.deadlines import stretched
from tests.support.files import make_text_file, random_texts
from torchmix.errors import MemoryLimit
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.stateful.open import build_loader

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux bounds it")]
MAP = """
import pathlib
import numpy as np
HERE = pathlib.Path(__file__).parent

def greedy(columns, *, row, epoch, seed):
    if (HERE / "allocate").exists():
        np.zeros(64 << 30, np.uint8)  # not touched: a machine without the limit keeps its memory
    return {"text": columns["text"]}

greedy.version = 1
"""
RECIPE = """\
version: 1
seed: 5
batch: {samples: 4, length: 64}
sources:
  prose: {path: prose.parquet, text: text, tokenizer: bytes, map: "greedy_map:greedy"}
mixture: {prose: 100%}
read: {cache: 16MiB}
"""


def test_a_map_that_allocates_beyond_memory_is_named_and_ends_nobody(tmp_path: Path) -> None:
    make_text_file(tmp_path / "prose.parquet", random_texts(3, 700))
    (tmp_path / "greedy_map.py").write_text(MAP)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    index_recipe(load_recipe(recipe), tmp_path)
    with build_loader(recipe, topology=Topology(), loaders="node,memory=1GiB") as loader:
        steps = iter(loader)
        assert len(list(islice(steps, 400))) == 400
        (tmp_path / "allocate").touch()
        give_up_s = time.monotonic() + stretched(300)
        with pytest.raises(MemoryLimit, match=r"the map greedy_map:greedy, given \d+ rows .* loaders.memory"):
            # The limit comes with the worker's first beat, within a second or so.
            for _ in takewhile(lambda _: time.monotonic() < give_up_s, steps):
                pass
        assert loader.stats()["workers_lost"] == 0
