"""Tensors of every rank with runs of ranks, against an oracle that imports neither planner nor package, as one JSON.

    python -m tests.trials.context_delivery --seed 1 --count 300 --out context_delivery.json

In: a seed and a number of jobs of 8 to 64 ranks of dp x cp x pp x tp, with documents of lengths with a long tail, and
runs of sizes of their own. Out: what each job was; an AssertionError names the first that breaks a promise. Must hold,
of each job, over two steps: every tensor of every rank is what `oracle.microbatches_of_runs` makes of the plan's rows,
of whole files, and of the runs that `book_contexts` works out; ranks of a run have the same bin, and what they have
together is each piece of it once; the order digests are those of one rank of the same recipe, and of another layout
with other `rank_tokens` that resumes after the first step. A run goes on where it stopped. Cost: 0.3 to 3 s a job.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.support import oracle
from tests.support.book_contexts import BookRuns, placed_in_runs
from tests.support.files import make_tokens_file
from tests.support.loaders import Rank, run_job, take
from tests.support.oracle_job import assert_equal
from tests.support.trial import continued, trial_parser
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader

LENGTH = 192
STEPS = 2
PER_TOKEN, PER_PAIR = 900, 5


def sizes_of(draw: random.Random, ranks: int) -> tuple[int, ...] | None:
    """None, powers of two, or one size."""
    powers = [1 << bit for bit in range(7) if ranks % (1 << bit) == 0]
    kind = draw.choice(["auto", "auto", "some", "one"])
    if kind == "auto":
        return None
    return tuple(powers[draw.randrange(len(powers)) :]) if kind == "some" else (draw.choice(powers),)


def random_layout(draw: random.Random) -> dict[str, int]:
    """A layout of 8 to 64 ranks whose dp x cp is more than one."""
    while True:
        layout = {name: draw.choice(of) for name, of in AXES.items()}
        count = layout["dp"] * layout["cp"] * layout["pp"] * layout["tp"]
        if 8 <= count <= 64 and layout["dp"] * layout["cp"] > 1:
            return layout


AXES = {"dp": (1, 2, 3, 4, 8, 16), "cp": (1, 2, 4, 8), "pp": (1, 1, 2, 3), "tp": (1, 1, 2)}


def random_runs(draw: random.Random, ranks: int, align: int) -> tuple[tuple[int, ...] | None, int]:
    """Sizes of runs, and tokens of a rank that suffice for a document of LENGTH."""
    sizes = sizes_of(draw, ranks)
    widest = sizes[-1] if sizes else ranks
    multiple = align * (2 * widest if widest > 1 else 1)
    least = -(-(-(-LENGTH // multiple) * multiple) // widest)
    return sizes, draw.randint(least, max(least, LENGTH))


def write_files(folder: Path, draw: random.Random) -> dict[str, list[list[oracle.Document]]]:
    """Two sources whose documents have a long tail; some exceed LENGTH."""
    found = {}
    for name in ("book", "web"):
        mean = draw.choice([6, 20, 60])
        longest = draw.choice([LENGTH, 2 * LENGTH])
        rows = [
            [draw.randrange(5000) for _ in range(min(longest, max(1, int(mean * draw.paretovariate(1.1)))))]
            for _ in range(draw.randint(40, 160))
        ]
        make_tokens_file(folder / f"{name}.parquet", rows, page_bytes=draw.choice([300, 2000]), codec="none")
        found[name] = [oracle.Document(row, [True] * len(row), {}) for row in rows]
    return found


def write_recipe(folder: Path, name: str, numbers: dict[str, Any]) -> Path:
    path = folder / f"{name}.yaml"
    context = {key: value for key, value in numbers["context"].items() if value is not None}
    path.write_text(
        f"""
version: 1
seed: {numbers["seed"]}
batch: {{samples: {numbers["samples"]}, length: {LENGTH}}}
sources:
  book: {{path: book.parquet, tokens: input_ids}}
  web: {{path: web.parquet, tokens: input_ids}}
mixture: {{book: 40%, web: 60%}}
packing: {{method: whole, overflow: {numbers["overflow"]}}}
balance: {{context: {json.dumps(context)}, cost: {{per_token: {PER_TOKEN}, per_pair: {PER_PAIR}}}}}
shuffle: {{window_pages: 2}}
"""
    )
    assert main(["index", str(path)]) == 0
    return path


def rows_of_plan(recipe: Path, folder: Path, layout: dict[str, int]) -> list[list[dict[str, Any]]]:
    """The pieces of each step, as they are on disk."""
    sizes = [word for name in ("dp", "cp", "pp", "tp") for word in (f"--{name}", str(layout[name]))]
    assert main(["plan", str(recipe), "--steps", str(STEPS), *sizes, "--out", str(folder)]) == 0
    rows = pq.read_table(folder / "pieces.parquet").to_pylist()
    return [[row for row in rows if row["step"] == step] for step in range(STEPS)]


def expected_of_plan(
    pieces: list[list[dict[str, Any]]],
    documents: dict[str, list[oracle.Document]],
    layout: dict[str, int],
    *,
    length: int,
    sizes: tuple[int, ...] | None = None,
    **numbers: int,
) -> list[list[dict[str, Any]]]:
    """What every rank is handed, by the oracle.

    Args:
        pieces: Of each step, as they are on disk.
        documents: By name of the source.
        layout: Sizes of the axes.
        length: Of the batch.
        sizes: Of the runs, as a recipe has them.
        numbers: Of `BookRuns`.
    """
    ranks = layout["dp"] * layout["cp"]
    there = _auto(ranks) if sizes is None else tuple(size for size in sizes if size <= ranks)
    runs = BookRuns(**numbers, sizes=there, ranks=ranks, stages=layout["pp"])
    job = oracle.Job(
        length=length, boundaries="document", method="pad", align_tokens=runs.align, micro_batch_size=1, **layout
    )
    steps = []
    for of_step in pieces:
        ordered = sorted(of_step, key=lambda piece: piece["sample"])
        assert [piece["sample"] for piece in ordered] == list(range(len(ordered))), "a piece is a sample"
        placed = placed_in_runs(runs, [piece["tokens"] for piece in ordered])
        steps.append(
            oracle.microbatches_of_runs(
                ordered,
                documents,
                job,
                bins=placed.bins,
                bin_of_sample=placed.bin_of_sample,
                padded_tokens=placed.padded,
            )
        )
    return [[each for step in steps for each in step[rank]] for rank in range(job.world_size)]


def check_runs(ranks: list[Rank], layout: dict[str, int], rank_tokens: int) -> Counter[int]:
    """Ranks of a run have one bin; each rank has its room of it. Returns bins by their ranks."""
    tp, places = layout["tp"], layout["dp"] * layout["cp"]
    found: Counter[int] = Counter()
    first_stage = [ranks[place * tp].microbatches for place in range(places)]
    assert len({len(of_rank) for of_rank in first_stage}) == 1, "ranks have as many microbatches"
    for of_ranks in zip(*first_stage, strict=True):
        place = 0
        while place < places:
            run = of_ranks[place].cp_ranks
            assert run.start == place and place % len(run) == 0, "runs are aligned, and cover the ranks"
            shapes = {of_ranks[other].tokens.shape for other in run}
            assert len(shapes) == 1 and shapes.pop()[1] <= rank_tokens
            for other in run:
                assert of_ranks[other].cp_ranks == run
                assert of_ranks[other].cu_seqlens_padded.equal(of_ranks[place].cu_seqlens_padded)
            found[len(run)] += 1
            place += len(run)
    return found


def two_steps(loader: StatefulDataLoader, rank: Rank) -> None:
    """Take them, and keep the state between."""
    take(loader, rank, None, steps=1)
    rank.result = loader.state_dict()
    take(loader, rank, None, steps=STEPS)


def try_job(seed: int, number: int) -> dict[str, Any]:
    """One job; raises where something differs."""
    draw = random.Random(f"context delivery {seed} {number}")
    layout = random_layout(draw)
    ranks = layout["dp"] * layout["cp"]
    align = draw.choice([1, 1, 2, layout["tp"]])
    sizes, rank_tokens = random_runs(draw, ranks, align)
    numbers = {
        "seed": draw.randrange(1000),
        "samples": draw.choice([2, 5, 8, 16]),
        "overflow": draw.choice(["split", "truncate", "drop"]),
        "context": {
            "rank_tokens": rank_tokens,
            "sizes": sizes,
            "align": align,
            "per_exchanged": draw.choice([None, 0, 40]),
            "per_microbatch": draw.choice([0, 20_000]),
        },
    }
    exchanged = numbers["context"]["per_exchanged"]
    of_book = {
        "per_token": PER_TOKEN,
        "per_pair": PER_PAIR,
        "per_exchanged": -(-PER_TOKEN // 128) if exchanged is None else exchanged,
        "per_microbatch": numbers["context"]["per_microbatch"],
        "rank_tokens": rank_tokens,
        "align": align,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = write_files(folder, draw)
        recipe = write_recipe(folder, "recipe", numbers)
        pieces = rows_of_plan(recipe, folder / "plan", layout)
        expected = expected_of_plan(pieces, documents, layout, length=LENGTH, sizes=sizes, **of_book)
        found = run_job(recipe, Topology(**layout), program=two_steps)
        for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
            for got, want in zip(mine.microbatches, wanted, strict=True):
                assert_equal(got, want, f"job {seed}/{number}, rank {rank}, step {want['step']}")
        bins = check_runs(found, layout, rank_tokens)
        [alone] = run_job(_with(folder, numbers, 2 * LENGTH, None), Topology(), steps=STEPS)
        assert all(rank.digests == alone.digests for rank in found), "the order does not depend on the layout"
        other = random_layout(draw)
        other = {**other, "pp": 1, "tp": 1, "dp": min(other["dp"], 4)}
        again = run_job(
            _with(folder, numbers, LENGTH + 2 * align * other["dp"] * other["cp"], None),
            Topology(**other),
            steps=1,
            state=found[0].result,
        )
        assert all([alone.digests[0], *rank.digests] == alone.digests for rank in again), "nor on rank_tokens"
    samples = sum(len(step) for step in pieces)
    return {
        "layout": layout,
        "context": numbers["context"],
        "samples": samples,
        "bins_by_ranks": {str(size): count for size, count in sorted(bins.items())},
        "microbatches": len(found[0].microbatches),
        "empty": sum(not bool((m.cu_seqlens > 0).any()) for rank in found for m in rank.microbatches),
    }


def _auto(ranks: int) -> tuple[int, ...]:
    return (*(1 << bit for bit in range(8) if 1 << bit < ranks), ranks)


def _with(folder: Path, numbers: dict[str, Any], rank_tokens: int, sizes: tuple[int, ...] | None) -> Path:
    """The recipe with other runs."""
    context = {**numbers["context"], "rank_tokens": rank_tokens, "sizes": sizes}
    return write_recipe(folder, f"other-{rank_tokens}", {**numbers, "context": context})


def trial(arguments: list[str]) -> dict[str, Any]:
    """Run it by the words of a command line; returns what the file has."""
    return continued(trial_parser(__doc__, count=300).parse_args(arguments), try_job)


if __name__ == "__main__":
    trial(sys.argv[1:])
