"""The Megatron example: one rank, DP 2, TP 2, CP 2 and PP 2 train alike, from shared checkpoints.

PP 2 runs under torchrun. The others are ranks that were forked after an import of Megatron, which takes more of a core
than their training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.example import EXAMPLE
from tests.support.forks import MEGATRON
from tests.support.processes import Processes

pytestmark = pytest.mark.system

DEADLINE_S = 300.0
SEED = 20_261_121
RECIPE = """
version: 1
seed: 7
batch: {samples: 8, length: 64}
sources:
  long: {path: long.parquet, text: text, tokenizer: bytes}
  short: {path: short.parquet, text: text, tokenizer: bytes}
mixture: {long: 60%, short: 40%}
packing: {method: best_fit, overflow: split, boundaries: document, align_tokens: 8}
balance: {method: rows, model: {layers: 2, hidden: 32, ffn: 64, heads: 4}}
"""


def write_corpus(directory: Path) -> Path:
    """Two sources of random words and their recipe."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    words = ["".join(map(chr, rng.integers(97, 123, int(rng.integers(1, 9))))) for _ in range(50)]
    for name, most_words in (("long", 40), ("short", 6)):
        texts = [" ".join(rng.choice(words, int(rng.integers(1, most_words)))) for _ in range(400)]
        pq.write_table(pa.table({"text": texts}), directory / f"{name}.parquet")
    path = directory / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def train(
    directory: Path, name: str, *, ranks: int, steps: int, arguments: tuple[str, ...], by_torchrun: bool = False
) -> list[dict[str, Any]]:
    """Run the example and return its log, a dict per step."""
    log = directory / f"{name}.jsonl"
    script = (str(EXAMPLE / "train.py"), "--data-recipe", str(directory / "recipe.yaml"), *arguments)
    numbers = ("--steps", str(steps), "--micro-batch-size", "2", "--loaders", "in_process", "--log-file", str(log))
    with Processes(directory) as processes:
        if by_torchrun:
            launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
            children = [processes.start_python(*launcher, *script, *numbers, name=name)]
        else:
            children = processes.start_ranks(*script, *numbers, world_size=ranks, after=MEGATRON)
        for child in children:
            assert child.wait(deadline_s=DEADLINE_S) == 0, processes.report()
    return [json.loads(line) for line in log.read_text().splitlines()]


def column(log: list[dict[str, Any]], name: str) -> list[Any]:
    return [facts[name] for facts in log]


def test_layouts_train_alike_from_one_checkpoint(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    shared, by_pipeline = tmp_path / "shared", tmp_path / "by_pipeline"
    train(tmp_path, "start", ranks=1, steps=3, arguments=("--save", str(shared)))
    load = ("--load", str(shared))
    one = train(tmp_path, "one", ranks=1, steps=16, arguments=load)
    assert column(one, "step") == list(range(4, 17))
    save = ("--pp", "2", "--save", str(by_pipeline))
    pp = train(tmp_path, "pp", ranks=2, steps=13, arguments=(*load, *save), by_torchrun=True)
    parallel = {
        "dp": train(tmp_path, "dp", ranks=2, steps=13, arguments=load),
        "tp": train(tmp_path, "tp", ranks=2, steps=13, arguments=(*load, "--tp", "2")),
        "cp": train(tmp_path, "cp", ranks=2, steps=13, arguments=(*load, "--cp", "2")),
        "pp": pp,
    }
    for name, log in parallel.items():
        assert column(log, "loss") == pytest.approx(column(one, "loss")[:10], rel=1e-5), name
        assert column(log, "order_digest") == column(one, "order_digest")[:10], name
        assert column(log, "tokens_of_source") == column(one, "tokens_of_source")[:10], name
    # What two pipeline stages saved, optimizer included, continues on two tensor-parallel halves.
    resumed = train(tmp_path, "resumed", ranks=2, steps=16, arguments=("--load", str(by_pipeline), "--tp", "2"))
    assert column(resumed, "loss") == pytest.approx(column(one, "loss")[10:], rel=1e-5)
    assert column(resumed, "order_digest") == column(one, "order_digest")[10:]
