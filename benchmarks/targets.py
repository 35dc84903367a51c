"""The targets of speed: each a ratio to a rival or a bound of the same minutes, by turns, with all rounds.

    python benchmarks/targets.py [--rows small big decode nodes leaders ranks planning start] [--rounds 5] [--quick]

Rounds of a row alternate between its contestants, which run at once where they can, so that they meet the same machine.
A ratio is of one round; the table has the median over rounds, all of them, and the spread (largest less smallest over
the median). Above it stands what else the machine did. CPU seconds are user and system time of process trees.

  small     .bin of 306 sources, steps of 8 x 4096 tokens: tokens per CPU-second over Megatron's datasets without worker
            processes (`megatron_throughput.py`), in threads of the rank and with a worker
  big       the same with steps of 256 x 4096
  decode    Parquet of 8 sources, steps of 256 x 4096: the loader over pyarrow that only decodes (`steady_reading.py`),
            and the 99th percentile of a batch's time over the median; beside it that of a loop which sorts and copies
            the same numbers again and again, which is what this machine does to constant work
  nodes     Parquet of 306 sources, steps of 8 x 4096, data larger than the caches: the loader over torchdata's nodes
  leaders   Parquet, steps of 64 x 4096: CPU a token of a node with eight leaders over one. The leaders are threads of
            one process, as ranks of one node; each takes every microbatch of its replica
  ranks     the same with a process for each leader, as torchrun starts them, which compare their plans over gloo
  planning  CPU milliseconds of the thread a step of 64, 512 and 4096 x 8192 (`planning.py`), means of a round: several
            steps may be planned in one call
  start     seconds from `build_loader` to the first batch of 306 sources of Parquet, in threads and after
            `start_worker`, over those of a DataLoader of torch's with one worker (`loader_start.py`)
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from process_trees import cpu_seconds, reply, requests, spread
from synthetic import write_tokens

LENGTH = 4096
Rounds = dict[str, list[float]]
"""What is measured, as the table calls it -> its value in each round."""
GOALS = {
    ".bin 8 x 4096, 306 sources, over Megatron w0: threads": 2,
    ".bin 8 x 4096, 306 sources, over Megatron w0: node": 1.3,
    ".bin 256 x 4096, 306 sources, over Megatron w0: threads": 5,
    ".bin 256 x 4096, 306 sources, over Megatron w0: node": 5,
    "Parquet loader over decoding alone, 256 x 4096": 0.8,
    "Parquet 8 x 4096, 306 sources, over torchdata's nodes": 1,
    "CPU a token of a node, eight leaders over one": 1.3,
    "CPU a token of a node, eight ranks over gloo over one": 1.3,
    "planning 64 x 8192, ms": 0.1,
    "planning 512 x 8192, ms": 0.5,
    "planning 4096 x 8192, ms": 4,
    "p99 over p50 of a batch": 1.5,
}


def over_megatron(samples: int, options: argparse.Namespace) -> Iterator[Rounds]:
    """Tokens per CPU-second over those of Megatron."""
    from megatron_throughput import measure

    ours = {"threads": "torchmix w0", "node": "torchmix w1"}
    asked = argparse.Namespace(
        contestants=["megatron w0", *ours.values()],
        tokens=options.tokens,
        mean=800,
        samples=samples,
        micro_batch_size=1,
        rounds=options.rounds,
        window_s=options.window_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.sources, "u16", asked)["contestants"]
    for where, name in ours.items():
        title = f".bin {samples} x 4096, {options.sources} sources, over Megatron w0: {where}"
        yield {title: found[name]["rounds"]["megatron w0"]}


def over_readers(options: argparse.Namespace, *, is_small: bool) -> Iterator[Rounds]:
    """Tokens per CPU-second of the loader from Parquet over those of another reader."""
    import numpy as np
    from steady_reading import DECODED, NODES, measure, write_sources

    num_sources, page_kb = options.sources if is_small else 8, 256
    samples, rival = (8, NODES) if is_small else (256, "decode")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "files"
        # Ids take 4 bytes a token: half a gigabyte, beside caches of at most 0.4.
        write_sources(folder, num_sources, num_tokens=options.read_tokens, page_kb=page_kb)
        found = measure(
            folder,
            rounds=options.rounds,
            # A turn is a pass over the files: who holds whole row groups may decode none for a while.
            batches=max(1, options.read_tokens // (samples * LENGTH)),
            warm_up=1,
            readers=(rival, "torchmix loader"),
            window_bytes=max(40 << 20, int(num_sources * page_kb * 1024 * DECODED)),
            samples=samples,
        )
    ratios = [
        theirs / ours for theirs, ours in zip(found[rival]["cpu_ns"], found["torchmix loader"]["cpu_ns"], strict=True)
    ]
    if is_small:
        yield {f"Parquet 8 x 4096, {num_sources} sources, over torchdata's nodes": ratios}
        return
    yield {"Parquet loader over decoding alone, 256 x 4096": ratios}
    p50, p99 = np.percentile(found["torchmix loader"]["ms"], [50, 99])
    yield {"p99 over p50 of a batch": [float(p99 / p50)]}
    yield {"p99 over p50 of constant work": [of_constant_work() for _ in range(options.rounds)]}


def of_constant_work() -> float:
    """The 99th percentile over the median of the time of equal pieces of work, while another thread does the same."""
    import numpy as np

    numbers = np.random.default_rng(1).integers(0, 1 << 30, 1 << 20)
    is_over = threading.Event()

    def work() -> None:
        np.sort(numbers[: 1 << 18])
        numbers.copy()

    def beside() -> None:
        while not is_over.is_set():
            work()

    other = threading.Thread(target=beside)
    other.start()
    taken = []
    for _ in range(1000):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    is_over.set()
    other.join()
    p50, p99 = np.percentile(taken, [50, 99])
    return float(p99 / p50)


# --- Leaders of a node.

SAMPLES = 64


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


def cpu_of_leaders(recipe: str, dp: int, num_steps: int) -> float:
    """CPU ns a token of the tree, over the steps after the first quarter, as `dp` leaders of a node with a worker."""
    import torch

    import torchmix
    from torchmix.parallel.fan_out import local_world

    torch.set_num_threads(1)
    first = num_steps // 4
    marks: list[float] = []
    at_start, at_end = (threading.Barrier(dp, lambda: marks.append(cpu_seconds())) for _ in range(2))

    def lead(rank: int, fan_out: object) -> None:
        topology = torchmix.Topology(dp=dp, rank=rank)
        with torchmix.build_loader(
            recipe, topology=topology, loaders="node", fan_out=fan_out, max_steps=num_steps
        ) as loader:
            for microbatch in loader:
                if microbatch.is_last_of_step and microbatch.step == first - 1:
                    at_start.wait()
            at_end.wait()

    world = local_world(torchmix.Topology(dp=dp))
    threads = [threading.Thread(target=lead, args=(rank, fan_out)) for rank, fan_out in enumerate(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (marks[1] - marks[0]) / ((num_steps - first) * SAMPLES * LENGTH) * 1e9


def eight_over_one(options: argparse.Namespace) -> Iterator[Rounds]:
    """CPU a token of a node with eight leaders over one; each case is a process."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder), min(64, options.sources), options.read_tokens // 4)
        for _ in range(options.rounds):
            one, eight = (
                float(answer_of(__file__, "--leaders", json.dumps([str(recipe), dp, options.steps]))) for dp in (1, 8)
            )
            ratios.append(eight / one)
    yield {"CPU a token of a node, eight leaders over one": ratios}


def be_rank(recipe: str, num_steps: int) -> None:
    """A rank of a node; it says when all have come to the end of the first quarter of the steps, and to their end."""
    import torch
    import torch.distributed as dist

    import torchmix

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = torchmix.Topology.from_torchrun()

    def meet() -> None:
        dist.barrier()
        if topology.rank == 0:
            reply(met=True)
            next(requests())
        dist.barrier()

    with torchmix.build_loader(recipe, topology=topology, loaders="node") as loader:
        for microbatch in loader:
            if microbatch.is_last_of_step and microbatch.step == num_steps // 4 - 1:
                meet()
            if microbatch.is_last_of_step and microbatch.step == num_steps - 1:
                break
        meet()
    dist.destroy_process_group()


def cpu_of_ranks(recipe: Path, dp: int, num_steps: int) -> float:
    """As `cpu_of_leaders`, of processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    sizes = {"WORLD_SIZE": str(dp), "LOCAL_WORLD_SIZE": str(dp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    try:
        for number in range(dp):
            own = {"RANK": str(number), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": "1"}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--rank", json.dumps([str(recipe), num_steps])],
                    env={**os.environ, **sizes, **own},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        marks = []
        for _ in range(2):
            assert next(line for line in ranks[0].stdout or () if line.startswith("{"))
            marks.append(sum(cpu_seconds(rank.pid) for rank in ranks))
            print("{}", file=ranks[0].stdin, flush=True)
        for rank in ranks:
            rank.wait(60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return (marks[1] - marks[0]) / ((num_steps - num_steps // 4) * SAMPLES * LENGTH) * 1e9


def eight_ranks_over_one(options: argparse.Namespace) -> Iterator[Rounds]:
    """CPU a token of a node with eight ranks over one."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder), min(64, options.sources), options.read_tokens // 4)
        cases = [[cpu_of_ranks(recipe, dp, options.steps) for dp in (1, 8)] for _ in range(options.rounds)]
    yield {"CPU a token of a node, eight ranks over gloo over one": [eight / one for one, eight in cases]}


def planning(options: argparse.Namespace) -> Iterator[Rounds]:
    """Milliseconds of the thread's CPU a step, best fit; sizes take turns, and their plans go on."""
    from planning import make_planner

    planners = {}
    for samples, num_sources, dp in ((64, 8, 4), (512, 64, 32), (4096, 306, 128)):
        planner = make_planner(samples, num_sources, dp, "best_fit", 20_000)
        planners[samples] = planner, planner.step(planner.start())[1]  # the first step makes the first windows
    rounds: Rounds = {f"planning {samples} x 8192, ms": [] for samples in planners}
    for _ in range(options.rounds):
        for samples, (planner, cursor) in planners.items():
            began = time.thread_time()
            for _ in range(options.steps):
                cursor = planner.step(cursor)[1]
            rounds[f"planning {samples} x 8192, ms"].append((time.thread_time() - began) / options.steps * 1e3)
            planners[samples] = planner, cursor
    yield rounds


def starts(options: argparse.Namespace) -> Iterator[Rounds]:
    """Seconds to the first batch over those of a DataLoader; each start is a process."""
    from loader_start import PLAIN, PROGRAM, write_recipe

    here, rounds = str(Path(__file__).parent), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        recipe = str(write_recipe(Path(folder) / "files", options.sources))
        script = Path(folder) / "plain.py"
        script.write_text(PLAIN)
        for number in range(options.rounds + 1):  # the first one writes what Python keeps compiled
            plain_s = json.loads(answer_of(str(script), here))[1]
            for where in ("in_process", "start_worker"):
                found = json.loads(answer_of("-c", PROGRAM, recipe, where, here))
                if number:
                    title = f"first batch of {options.sources} sources over a DataLoader's, {where}"
                    rounds.setdefault(title, []).append(found[1] / plain_s)
    yield rounds


def answer_of(*command: str) -> str:
    """The last line that a Python process prints."""
    done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True, timeout=900)
    return done.stdout.strip().splitlines()[-1]


ROWS: dict[str, Callable[[argparse.Namespace], Iterator[Rounds]]] = {
    "small": lambda options: over_megatron(8, options),
    "big": lambda options: over_megatron(256, options),
    "decode": lambda options: over_readers(options, is_small=False),
    "nodes": lambda options: over_readers(options, is_small=True),
    "leaders": eight_over_one,
    "ranks": eight_ranks_over_one,
    "planning": planning,
    "start": starts,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sources", type=int, default=306)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="of the .bin files")
    parser.add_argument("--read-tokens", type=int, default=128_000_000, help="of the Parquet files")
    parser.add_argument("--window-s", type=float, default=1.5, help="seconds of a contestant's turn with .bin files")
    parser.add_argument("--steps", type=int, default=64, help="of a case of leaders, and of planning")
    parser.add_argument("--quick", action="store_true", help="little data, one round, to see that it runs")
    parser.add_argument("--leaders", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.leaders is not None:
        print(cpu_of_leaders(*options.leaders))
        return 0
    if options.rank is not None:
        be_rank(*options.rank)
        return 0
    if options.quick:
        options.rounds, options.sources, options.tokens, options.read_tokens = 1, 8, 4_000_000, 8_000_000
        options.window_s, options.steps = 0.3, 16
    print(f"load of the last minutes at the begin: {' '.join(f'{load:.1f}' for load in os.getloadavg())}\n")
    print("| what | median | spread | rounds | goal | load after it |\n|---|---|---|---|---|---|")
    for row in options.rows:
        for rounds in ROWS[row](options):
            for title, values in rounds.items():
                line = ", ".join(f"{value:.2f}" for value in values)
                cells = (f"{statistics.median(values):.2f}", f"{spread(values):.2f}", line, str(GOALS.get(title, "")))
                print(f"| {title} | {' | '.join(cells)} | {os.getloadavg()[0]:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
