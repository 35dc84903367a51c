"""Every tensor of runs whose pages lie with loaders, against an oracle that does not know torchmix; as one JSON.

    python -m tests.trials.fleet_matrix --seed 1 --count 120 --out matrix.json

In: a seed and a number of cases. Out: for each case the tokens that were compared. Must hold: whatever the format, the
fleet and the layout are, and with another fleet after a resume, every field of every microbatch of every rank is what
the oracle makes of the plan and the whole files. The 120 cases of a seed are {token lists, text, JSON lines, Arrow,
.bin} x {job of 2 and of 4 nodes, remote of 2, a node before remote of 2} x six layouts, in an order of the seed. Every
leader stands for the worker of a node and is a client of its own, and loaders are threads: connections, keys, routing
and messages are real. A run goes on where it stopped. Cost: about two seconds a case.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.stateful.test_oracle import LAYOUTS, assert_equal
from tests.support import oracle
from tests.support.arrow_files import among_others, write_arrow
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.fleet_clients import clients_of
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.json_lines import json_lines, write_lines
from tests.support.loaders import run_job
from tests.support.trial import continued, trial_parser
from torchmix.cli.main import main as command
from torchmix.parallel.topology import Topology

STEPS = 2
"""Before the resume, and after it."""
LENGTH = 96
FLEETS = ("job of 2", "job of 4", "remote of 2", "node before remote of 2")
Documents = list[list[int]]


def _lists(folder: Path, seed: int) -> tuple[str, Documents]:
    for number in range(2):
        documents = random_tokens(seed + number, 150, mean_tokens=60, vocabulary=50_000)
        make_tokens_file(folder / f"{number}.parquet", documents, codec="zstd")
    return "path: '*.parquet', tokens: input_ids", oracle.read_token_documents([*folder.glob("*.parquet")], "input_ids")


def _text(folder: Path, seed: int) -> tuple[str, Documents]:
    make_text_file(folder / "0.parquet", random_texts(seed, 300))
    return "path: 0.parquet, text: text, tokenizer: bytes", oracle.read_text_documents([folder / "0.parquet"], "text")


def _lines(folder: Path, seed: int) -> tuple[str, Documents]:
    write_lines(folder / "0.jsonl.gz", json_lines(random_texts(seed, 300), "text", seed), mean_bytes=3000)
    return "path: 0.jsonl.gz, text: text, tokenizer: bytes", oracle.read_line_documents([folder / "0.jsonl.gz"], "text")


def _arrow(folder: Path, seed: int) -> tuple[str, Documents]:
    table = among_others(pa.array(random_tokens(seed, 250), pa.list_(pa.int64())), seed, "ids")
    write_arrow(folder / "0.arrow", table, stream=True, codec="lz4", batch_rows=20)
    return "path: 0.arrow, tokens: ids", oracle.read_arrow_documents([folder / "0.arrow"], "ids")


def _bin(folder: Path, seed: int) -> tuple[str, Documents]:
    write_dataset(folder / "0", random_sequences(seed, 200, mean_tokens=80, dtype="uint16"), dtype="uint16")
    return "path: 0.idx", oracle.read_indexed_documents([folder / "0.bin"])


FORMATS: dict[str, Callable[[Path, int], tuple[str, Documents]]] = {
    "token lists": _lists,
    "text": _text,
    "JSON lines": _lines,
    "Arrow": _arrow,
    ".bin": _bin,
}


class Matrix:
    """The data of each format, indexed once, and the cases of a seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._made: dict[str, tuple[Path, Documents]] = {}
        self.cases = list(product(FORMATS, FLEETS, LAYOUTS))
        random.Random(seed).shuffle(self.cases)

    def one(self, number: int) -> dict[str, Any]:
        """Run one case."""
        kind, fleet, layout = self.cases[number]
        draw = random.Random(f"{self._seed} {number}")
        method, boundaries = draw.choice(["concat", "best_fit"]), draw.choice(["document", "none"])
        after = draw.choice(["in_process", *(other for other in FLEETS if other != fleet)])
        recipe, documents = self._recipe(kind, method, boundaries)
        sizes = {"micro_batch_size": draw.choice([1, 2]), **LAYOUTS[layout]}
        job = oracle.Job(length=LENGTH, boundaries=boundaries, method=method, align_tokens=8, **sizes)
        plan = Path(tempfile.mkdtemp(dir=self._folder))
        words = ["--dp", str(job.dp), "--micro-batch-size", str(job.micro_batch_size), "--out", str(plan)]
        with redirect_stdout(StringIO()):
            assert command(["plan", str(recipe), "--steps", str(2 * STEPS), *words]) == 0
        expected = oracle.expected_microbatches(plan / "pieces.parquet", {"s": documents}, job)
        given: list[list[Any]] = [[] for _ in expected]
        state = None
        for place in (fleet, after):
            with clients_of(place, recipe, plan):
                ranks = run_job(
                    recipe,
                    Topology(**LAYOUTS[layout]),
                    steps=STEPS,
                    state=state,
                    micro_batch_size=job.micro_batch_size,
                )
            state = ranks[0].state
            for microbatches, rank in zip(given, ranks, strict=True):
                microbatches += rank.microbatches
        what = f"seed {self._seed}, case {number}: {kind}, {fleet} and then {after}, {layout}"
        for of_rank, wanted in zip(given, expected, strict=True):
            assert len(of_rank) == len(wanted), what
            for found, one in zip(of_rank, wanted, strict=True):
                assert_equal(found, one, f"{what}, step {one['step']}")
        compared = sum(one["tokens"].size for wanted in expected for one in wanted if one["tokens"] is not None)
        return {"format": kind, "fleet": fleet, "after": after, "layout": layout, "tokens": compared}

    def _recipe(self, kind: str, method: str, boundaries: str) -> tuple[Path, Documents]:
        name = f"{kind} {method} {boundaries}"
        if name not in self._made:
            folder = self._folder / name.replace(" ", "-")
            folder.mkdir()
            source, documents = FORMATS[kind](folder, self._seed)
            recipe = folder / "recipe.yaml"
            recipe.write_text(
                f"version: 1\nseed: {self._seed}\nbatch: {{samples: 8, length: {LENGTH}}}\n"
                f"sources: {{s: {{{source}}}}}\nmixture: {{s: 100%}}\n"
                f"packing: {{method: {method}, boundaries: {boundaries}, align_tokens: 8}}\n"
                "balance: {method: rows, model: {layers: 4, hidden: 64, ffn: 256, heads: 4}}\n"
                "shuffle: {window_pages: 3, window_bytes: 64KiB}\n"
            )
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                assert command(["index", "--quiet", str(recipe)]) == 0
            self._made[name] = recipe, documents
        return self._made[name]


def main() -> None:
    """Run the cases that are not in the file yet."""
    asked = trial_parser(__doc__, count=100).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder), asked.seed)
        continued(asked, lambda _, number: matrix.one(number), most=len(matrix.cases))


if __name__ == "__main__":
    main()
