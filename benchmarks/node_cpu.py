"""What a step costs a node: CPU ns a token with one leader and with eight, by who reads, and of which parts.

    python benchmarks/node_cpu.py [--sources 64] [--tokens 64000000] [--steps 40] [--rounds 3] [--quick]

Parquet files of token lists, steps of 64 x 4096 tokens for all leaders together. The leaders are threads of one
process, as ranks of one node; each takes every microbatch of its replica. CPU seconds are user and system time of the
tree, from /proc, over the steps after the first quarter; of each figure the smallest over rounds, whose cases take
turns, since a machine that others use adds to all of them. "plan", "read" and "build" are the loader's own figures, by
the clock, of rank 0. The last table has the ratios: of eight leaders to one, and of threads of each leader to a worker.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from process_trees import cpu_seconds
from synthetic import write_tokens

SAMPLES, LENGTH = 64, 4096
CASES = [(dp, where) for where in ("node", "in_process") for dp in (1, 8)]


def write_recipe(folder: Path, num_sources: int, num_tokens: int) -> Path:
    """Files, their recipe and their index."""
    names = [f"s{number:03}" for number in range(num_sources)]
    for number, name in enumerate(names):
        write_tokens(folder / f"{name}.parquet", num_tokens=num_tokens // num_sources, page_bytes=64 << 10, seed=number)
    sources = "\n".join(f"  {name}: {{path: {name}.parquet, tokens: input_ids}}" for name in names)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"version: 1\nseed: 1\nbatch: {{samples: {SAMPLES}, length: {LENGTH}}}\nsources:\n{sources}\n"
        f"mixture: {{{', '.join(f'{name}: 1' for name in names)}}}\nread: {{cache: 512MiB}}\n"
    )
    call = "import sys; from torchmix.cli.main import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", call, "index", str(recipe), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return recipe


def run_case(recipe: str, dp: int, where: str, num_steps: int) -> dict[str, float]:
    """CPU ns a token of the tree, and the loader's own seconds a step."""
    import torch

    import torchmix
    from torchmix.parallel.fan_out import local_world

    torch.set_num_threads(1)
    first = num_steps // 4
    began: list[float] = []
    parts: dict[str, float] = {}
    at_start = threading.Barrier(dp, lambda: began.append(cpu_seconds()))

    def lead(rank: int, fan_out: object) -> None:
        topology = torchmix.Topology(dp=dp, rank=rank)
        with torchmix.build_loader(
            recipe, topology=topology, loaders=where, fan_out=fan_out, max_steps=num_steps
        ) as loader:
            for microbatch in loader:
                if microbatch.is_last_of_step:
                    if microbatch.step == first - 1:
                        at_start.wait()
                    elif rank == 0 and microbatch.step >= first:
                        for name in ("plan_s", "read_s", "build_s"):
                            parts[name] = parts.get(name, 0.0) + float(loader.stats()[name])
            ended.wait()

    ended = threading.Barrier(dp, lambda: began.append(cpu_seconds()))
    threads = [
        threading.Thread(target=lead, args=(rank, fan_out))
        for rank, fan_out in enumerate(local_world(torchmix.Topology(dp=dp)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    num_tokens = (num_steps - first) * SAMPLES * LENGTH
    return {"cpu_ns": (began[1] - began[0]) / num_tokens * 1e9} | {
        name.replace("_s", "_ns"): value / num_tokens * 1e9 for name, value in parts.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64_000_000)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        recipe, dp, where, steps = json.loads(options.case)
        print(json.dumps(run_case(recipe, dp, where, steps)))
        return 0
    if options.quick:
        options.sources, options.tokens, options.steps, options.rounds = 4, 8_000_000, 16, 1
    found: dict[tuple[int, str], list[dict[str, float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder), options.sources, options.tokens)
        for _ in range(options.rounds):
            for dp, where in CASES:
                case = json.dumps([str(recipe), dp, where, options.steps])
                command = [sys.executable, __file__, "--case", case]
                done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
                found[dp, where].append(json.loads(done.stdout))
    smallest = {case: {name: min(one[name] for one in rounds) for name in rounds[0]} for case, rounds in found.items()}
    print("| leaders | read by | CPU, ns a token | plan | read | build |")
    print("|---|---|---|---|---|---|")
    for (dp, where), one in smallest.items():
        figures = (f"{one[name]:.2f}" for name in ("cpu_ns", "plan_ns", "read_ns", "build_ns"))
        print(f"| {dp} | {where} | {' | '.join(figures)} |")
    ratios = {
        "eight leaders of a node over one": smallest[8, "node"]["cpu_ns"] / smallest[1, "node"]["cpu_ns"],
        "eight leaders that read themselves over one": (
            smallest[8, "in_process"]["cpu_ns"] / smallest[1, "in_process"]["cpu_ns"]
        ),
        "eight that read themselves over eight with a worker": (
            smallest[8, "in_process"]["cpu_ns"] / smallest[8, "node"]["cpu_ns"]
        ),
    }
    print()
    print("| CPU a token | ratio |")
    print("|---|---|")
    for name, ratio in ratios.items():
        print(f"| {name} | {ratio:.2f} |")
    print(json.dumps({"ratios": {name: round(ratio, 3) for name, ratio in ratios.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
