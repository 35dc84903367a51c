"""What eight ranks compute in runs of several sizes, beside one size for all: by the processor's time, not the clock.

    python benchmarks/long_context_ranks.py [--steps 3] [--width 64] [--rounds 3] [--quick]

The transformer of examples/long_context trains on texts of Python's own library, of up to 4,096 tokens: eight processes
over gloo, each with one thread. A rank holds 2,048 tokens. Each microbatch waits for its slowest rank, and eight ranks
on few cores hide that from the clock, so a step counts the sum over its microbatches of the processor's time of the
slowest rank, forward, backward and exchange: of each microbatch and rank the least of several rounds, in which recipes
take turns. *each round* has the sums of single rounds: how far they are apart is what others disturb. The first step is
left out.

*fixed* has runs of one size, planned in the same way. *several* has runs of 1, 2, 4 and 8 ranks, by the default price
of an exchanged token and a cost from the model's dimensions; *several, fitted* by what `torchmix calibrate` fits to the
timings of a round before. All have the same documents in the same steps.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmix.cli.main import main as torchmix_main

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "long_context"
RANKS = 8
LENGTH, RANK_TOKENS, SAMPLES = 4096, 2048, 8
Rows = list[dict[str, Any]]
Run = tuple[int, int, int]
"""Step, microbatch, first rank."""


def recipe_of(folder: Path, name: str, width: int, context: str, cost: str = "") -> Path:
    """A recipe beside the texts, with its own runs and cost."""
    model = f"model: {{layers: 2, hidden: {width}, ffn: {width * 4 * 2 // 3}, heads: 4, vocab: 260}}"
    path = folder / f"{name}.yaml"
    path.write_text(
        f"""
version: 1
seed: 11
batch: {{samples: {SAMPLES}, length: {LENGTH}}}
sources:
  modules: {{path: texts/modules.parquet, text: text, tokenizer: bytes}}
  docstrings: {{path: texts/docstrings.parquet, text: text, tokenizer: bytes}}
mixture: {{modules: 30%, docstrings: 70%}}
packing: {{method: whole}}
balance: {{context: {{rank_tokens: {RANK_TOKENS}, {context}}}, {cost or model}}}
vocab_size: 260
""",
        encoding="utf-8",
    )
    return path


def trained(recipes: Mapping[str, Path], steps: int, width: int, rounds: int) -> dict[str, list[Rows]]:
    """The timings of all ranks by name of a recipe, then by round; ranks start once for all of them."""
    words = [str(Path(__file__)), "--steps", str(steps), "--width", str(width), "--rounds", str(rounds)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    subprocess.run([*torchrun, *words, "--train", *map(str, recipes.values())], check=True)
    found: dict[str, list[Rows]] = {}
    for name, recipe in recipes.items():
        found[name] = []
        for turn in range(rounds):
            rows: Rows = []
            for rank in range(RANKS):
                with recipe.with_name(f"{recipe.stem}-rank-{rank}-{turn}.csv").open(encoding="utf-8") as file:
                    rows += [{**row, "rank": rank} for row in csv.DictReader(file)]
            found[name].append([row for row in rows if row["step"] != "0"])
    return found


def least_of(rounds: list[Rows]) -> Rows:
    """Of each microbatch and rank the round that took least, since others disturb it."""
    least: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in itertools.chain(*rounds):
        before = least.setdefault((row["step"], row["microbatch"], row["rank"]), row)
        if float(row["seconds"]) < float(before["seconds"]):
            least[row["step"], row["microbatch"], row["rank"]] = row
    return list(least.values())


def train(recipes: list[str], steps: int, width: int, rounds: int) -> None:
    """One of the ranks: trains by each recipe, and writes its timings beside it."""
    import torch
    import torch.distributed as dist

    import torchmix
    from torchmix.parallel import Topology, context_groups

    sys.path.insert(0, str(EXAMPLE))
    from train_long import Model, train_step

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    topology = Topology.from_torchrun()
    groups = context_groups(topology, (1, 2, 4, 8))
    for turn, recipe in itertools.product(range(rounds), recipes):
        torch.manual_seed(1)
        model = Model(LENGTH, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        path = Path(recipe).with_name(f"{Path(recipe).stem}-rank-{topology.rank}-{turn}.csv")
        with (
            path.open("w", encoding="utf-8") as timings,
            torchmix.build_loader(recipe, topology=topology, max_steps=steps, loaders="in_process") as loader,
        ):
            print("lengths,seconds,ranks,step,microbatch,first_rank", file=timings)
            microbatches = []
            for microbatch in loader:
                microbatches.append(microbatch)
                if microbatch.is_last_of_step:
                    optimizer.zero_grad()
                    train_step(model, microbatches, groups, timings)
                    optimizer.step()
                    microbatches = []
        dist.barrier()
    dist.destroy_process_group()


def slowest_of_runs(rows: Rows) -> dict[Run, dict[str, Any]]:
    """Of each run the timing of its slowest rank."""
    found: dict[Run, dict[str, Any]] = {}
    for row in rows:
        key = (int(row["step"]), int(row["microbatch"]), int(row["first_rank"]))
        if key not in found or float(row["seconds"]) > float(found[key]["seconds"]):
            found[key] = row
    return found


def seconds_of(rows: Rows) -> tuple[float, float, int]:
    """Sums over microbatches of the slowest rank and of the mean rank, and how many microbatches there are."""
    of: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        of[row["step"], row["microbatch"]].append(float(row["seconds"]))
    return sum(map(max, of.values())), sum(sum(each) / RANKS for each in of.values()), len(of)


def fitted(folder: Path, recipe: Path, rows: Rows) -> dict[str, int]:
    """The prices that `torchmix calibrate` fits."""
    path = folder / "timings.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["lengths", "seconds", "ranks"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row for row in rows if row["lengths"].strip("0 "))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert torchmix_main(["calibrate", str(recipe), str(path), "--json"]) == 0
    found: dict[str, int] = json.loads(printed.getvalue())
    return {name: found[name] for name in ("per_token", "per_pair", "per_exchanged", "per_microbatch")}


def run(steps: int, width: int, rounds: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(EXAMPLE / "make_texts.py"), str(folder / "texts")], check=True)
        recipes = {
            **{f"fixed {size}": recipe_of(folder, f"fixed-{size}", width, f"sizes: [{size}]") for size in (2, 4, 8)},
            "several": recipe_of(folder, "several", width, "sizes: [1, 2, 4, 8]"),
        }
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert torchmix_main(["index", str(recipes["several"])]) == 0
        timed = [rows for [rows] in trained(recipes, steps, width, 1).values()]
        prices = fitted(folder, recipes["several"], [row for rows in timed for row in slowest_of_runs(rows).values()])
        cost = f"cost: {{per_token: {prices['per_token']}, per_pair: {prices['per_pair']}}}"
        context = ", ".join(f"{key}: {prices[key]}" for key in ("per_exchanged", "per_microbatch"))
        sizes = "sizes: [1, 2, 4, 8]"
        recipes["several, fitted"] = recipe_of(folder, "fitted", width, f"{sizes}, {context}", cost)
        rounds_of = trained(recipes, steps, width, rounds)
    sums = {name: seconds_of(least_of(each)) for name, each in rounds_of.items()}
    best = min(seconds for name, (seconds, _, _) in sums.items() if name.startswith("fixed"))
    print(
        "runs of | microbatches | slowest ranks, s | each round | over best fixed | slowest over mean | bins by ranks"
    )
    print("---|---|---|---|---|---|---")
    for name, (seconds, mean, count) in sums.items():
        bins = Counter(int(row["ranks"]) for row in slowest_of_runs(rounds_of[name][0]).values())
        shown = ", ".join(f"{bins[size]} of {size}" for size in sorted(bins))
        each = " ".join(f"{seconds_of(rows)[0]:.2f}" for rows in rounds_of[name])
        print(f"{name} | {count} | {seconds:.2f} | {each} | {seconds / best:.3f} | {seconds / mean:.3f} | {shown}")
    print(f"\nfitted: {', '.join(f'{key} {value}' for key, value in prices.items())}")


def main() -> None:
    """Read the command line, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small one alone")
    parser.add_argument("--train", nargs="+", metavar="RECIPE", help="be one of the ranks")
    given = parser.parse_args()
    if given.train:
        train(given.train, given.steps, given.width, given.rounds)
        return
    run(*((2, 32, 1) if given.quick else (given.steps, given.width, given.rounds)))


if __name__ == "__main__":
    main()
