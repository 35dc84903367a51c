"""The counterparts of MegaScale-Data's Figures 15, 16, 17 and 20, as tables.

    python benchmarks/paper_figures.py --sources 4 16 64

In: numbers of sources, and of nodes. Out: a table for each figure. Figure 15 is measured: a loader of this process
makes steps, and says how long it has planned, read and built. Figure 17 takes the state of a source as `torchmix
profile` measures it in a process of its own; everything else is computed by the routing and the partition that
clients use, at up to 4,096 nodes, and no socket is opened. Cost: a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fleet_at_scale import LOADERS, RANKS_OF_NODE, SOURCES, step_of

from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.service.scale.partition import LOADER_BYTES
from torchmix.stateful.open import build_loader

STEPS = 24
ROWS = 400
WORKERS_OF_RANK = 2
"""How many workers a loader has that each rank has for itself, as with PyTorch's."""
COMMAND = "from torchmix.cli.main import main; raise SystemExit(main())"


def write_sources(folder: Path, count: int) -> Path:
    """Token files and a recipe of them, indexed; its path."""
    draw = np.random.default_rng(count)
    names = [f"s{number:03d}" for number in range(count)]
    for name in names:
        lengths = np.maximum(1, draw.lognormal(5.5, 1.2, ROWS).astype(np.int64))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        ids = pa.ListArray.from_arrays(ends.astype(np.int32), draw.integers(0, 1000, ends[-1]).astype(np.int32))
        pq.write_table(pa.table({"ids": ids}), folder / f"{name}.parquet", compression="zstd")
    path = folder / "recipe.yaml"
    sources = "\n".join(f"  {name}: {{path: {name}.parquet, tokens: ids}}" for name in names)
    shares = ", ".join(f"{name}: {100 / count}%" for name in names)  # exact for powers of two
    model = "{layers: 4, hidden: 512, ffn: 2048, heads: 8}"
    path.write_text(
        f"version: 1\nseed: 1\nbatch: {{samples: 64, length: 2048}}\nsources:\n{sources}\n"
        f"mixture: {{{shares}}}\nbalance: {{method: rows, model: {model}}}\n"
    )
    index_recipe(load_recipe(path), folder)
    return path


def parts_of_a_step(recipe: Path) -> dict[str, float]:
    """Mean milliseconds of a step that its parts take, and its balance, over all but the first steps."""
    found: dict[str, list[float]] = {}
    with build_loader(
        recipe, topology=Topology(), micro_batch_size=64, loaders="in_process", max_steps=STEPS
    ) as loader:
        for step, _ in enumerate(loader):
            stats = loader.stats()
            for key in ("plan_s", "read_s", "build_s") if step > 2 else ():
                found.setdefault(key, []).append(1000 * float(stats[key]))
    return {key: float(np.median(values)) for key, values in found.items()}


def state_of_a_source(recipe: Path) -> int:
    """Bytes that a loader takes for a source that is open, beside its pages."""
    words = ("profile", str(recipe), "--source", "s000", "--json", "--seconds", "1")
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["state_bytes"])


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    """Make the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    arguments = parser.parse_args()
    state = 0
    row("sources", "plan ms", "read ms", "build ms", "plan / all")
    for count in arguments.sources:
        with tempfile.TemporaryDirectory() as name:
            recipe = write_sources(Path(name), count)
            parts = parts_of_a_step(recipe)
            state = state or state_of_a_source(recipe)
        times = [parts[key] for key in ("plan_s", "read_s", "build_s")]
        row(count, *(f"{value:.1f}" for value in times), f"{times[0] / sum(times):.2f}")
    steps = {nodes: step_of(nodes) for nodes in arguments.nodes}
    print()
    row(
        "nodes", "pages read by loaders", "by each node", "ratio", "sources open in a loader", "if all read all", "less"
    )
    for nodes, step in steps.items():
        ours, theirs = step["pages_read_by_loaders"], step["pages_read_if_each_node_reads"]
        few, many = step["sources_open_in_a_loader_by_partition"], step["sources_open_in_a_loader_over_all"]
        row(
            nodes,
            f"{ours:,}",
            f"{theirs:,}",
            f"{theirs / ours:.1f}",
            f"{few:.1f}",
            f"{many:.1f}",
            f"{many / few:.0f} x",
        )
    print()
    row("who reads", "processes of a node", "sources open in all", "MiB of a node")
    mib, nodes = 1 << 20, max(arguments.nodes)
    of_loader = steps[nodes]["sources_open_in_a_loader_by_partition"] * LOADERS / nodes
    for what, processes, sources in (
        ("each rank, two workers", RANKS_OF_NODE * WORKERS_OF_RANK, RANKS_OF_NODE * WORKERS_OF_RANK * SOURCES),
        ("the node worker", 1, SOURCES),
        (f"loaders, {LOADERS} on {nodes} nodes", 1 + LOADERS / nodes, of_loader),
    ):
        memory = processes * LOADER_BYTES + sources * state
        row(what, f"{processes:.2f}", f"{sources:,.3g}" if sources < 1 else f"{sources:,.0f}", f"{memory / mib:,.0f}")
    print()
    row(
        "nodes",
        "ranks",
        "connections of a loader",
        "if each rank asks",
        "requests a step and node",
        "slowest loader / mean",
    )
    for nodes, step in steps.items():
        row(
            f"{nodes:,}",
            f"{nodes * RANKS_OF_NODE:,}",
            f"{step['connections_of_a_loader']:,}",
            f"{step['connections_of_a_loader_if_each_rank_asks']:,}",
            f"{step['requests_by_partition'] / nodes:.0f}",
            f"{step['slowest_loader_over_mean_by_partition']:.2f}",
        )


if __name__ == "__main__":
    main()
