"""Memory of a node of 8 ranks that read many Parquet sources: torchmix against DataLoaders over row groups.

    python benchmarks/node_memory.py [--sources 100 306] [--steps 30] [--layouts] [--quick]

Eight processes with gloo, as torchrun would start them, each with torch, pyarrow and torchmix imported; *above* is what
the job holds beyond that. Memory is the sum of proportional set sizes over all processes of the job, workers too. It is
looked at every 0.1 s while they take `--steps` global batches; the most of it counts.

  torchmix      eight leaders (dp 8) and the worker of their node; `read.cache` is `--cache-mib`
  dataloader    torch's DataLoader on each rank, `--workers` workers; each worker has all sources open, a row group of
                each at hand, and takes documents from all in turn: what a mixture needs where loaders do not share
  stateful      the same dataset in torchdata's StatefulDataLoader, with the state of each batch

All rivals are given their shard by rank and worker, hold no shuffle buffer, and pack nothing. The second table has
torchmix alone at dp 4 and with CP, PP or TP of 2 beside; it is all that `--layouts` makes. *Own* is memory that is of
no file: pages of a library count less in each process the more processes of the machine have them, others' too, so that
the floor itself was 33 MiB apart between two runs. The third is a model, not a measurement: a rank that loads
takes `workers` x (process + sources x open), torchmix `worker + sources x open` for a node with a leader, with the
coefficients of the first table; it says how much the jobs of 288 GPUs (TP 4, PP 8, DP 9) and 576 (TP 4, PP 4, CP 4,
DP 9), 16 to a node, would hold, where all ranks of TP 0 load, or those of the first and last stage alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from process_trees import Contestant, memory_mib, reply, requests, tree_of
from synthetic import write_tokens

LENGTH = 4096
DISTINCT = 12
"""Files that are written; further sources are other names of the same content, which nobody maps."""
LOOK_S = 0.1
SIZES = {
    "dp 4": {"dp": 4},
    "cp 2 dp 4": {"cp": 2, "dp": 4},
    "pp 2 dp 4": {"pp": 2, "dp": 4},
    "tp 2 dp 4": {"tp": 2, "dp": 4},
}
JOBS = {
    "288 GPUs: TP 4, PP 8, DP 9": {"gpus": 288, "tp": 4, "pp": 8, "cp": 1, "dp": 9},
    "576 GPUs: TP 4, PP 4, CP 4, DP 9": {"gpus": 576, "tp": 4, "pp": 4, "cp": 4, "dp": 9},
}
GPUS_A_NODE = 16


def write_sources(folder: Path, count: int, tokens: int) -> list[Path]:
    """Parquet files of a source each, in row groups of some 160,000 tokens."""
    paths = []
    for number in range(count):
        path = folder / f"source-{number:03}.parquet"
        if number < DISTINCT:
            write_tokens(path, num_tokens=tokens, page_bytes=64 << 10, row_group_rows=200, seed=number)
        else:
            os.link(paths[number % DISTINCT], path)
        paths.append(path)
    return paths


def write_job(folder: Path, paths: list[Path], cache_mib: int) -> Path:
    """A recipe over these sources, indexed."""
    from torchmix.indexing.scan import index

    names = [path.stem.replace("-", "") for path in paths]
    sources = "\n".join(
        f"  {n}: {{path: {path.name}, tokens: input_ids}}" for n, path in zip(names, paths, strict=True)
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""version: 1
seed: 1
batch: {{samples: 64, length: {LENGTH}}}
sources:
{sources}
mixture: {{{", ".join(f"{name}: 1" for name in names)}}}
packing: {{method: best_fit, align_tokens: 8}}
shuffle: {{window_bytes: 256KiB}}
read: {{cache: {cache_mib}MiB}}
"""
    )
    index(recipe)
    return recipe


def row_groups_of(paths: list[Path], shard: int, num_shards: int) -> Iterator[Any]:
    """Documents of all sources in turn, from row groups that this shard has, one of each source at hand."""
    import pyarrow.parquet as pq

    def documents(path: Path) -> Iterator[Any]:
        file = pq.ParquetFile(path)
        while True:
            for group in range(shard % file.num_row_groups, file.num_row_groups, num_shards) or [0]:
                table = file.read_row_group(group, columns=["input_ids"])
                for chunk in table["input_ids"].chunks:
                    for row in range(len(chunk)):
                        yield chunk[row].values.to_numpy()

    opened = [documents(path) for path in paths]
    while True:
        for source in opened:
            yield next(source)


def hold_rival(options: dict[str, Any]) -> Any:
    """The loader and its last batch."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
    from torchdata.stateful_dataloader import StatefulDataLoader

    paths = [Path(path) for path in options["paths"]]

    class Samples(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            shard = options["rank"] * options["workers"] + (info.id if info else 0)
            parts, held = [], 0
            for document in row_groups_of(paths, shard, options["world"] * options["workers"]):
                parts.append(document)
                held += len(document)
                if held > LENGTH:
                    whole = np.concatenate(parts)
                    yield torch.from_numpy(whole[: LENGTH + 1].astype(np.int64))
                    parts, held = [whole[LENGTH:].copy()], len(whole) - LENGTH

    kind = DataLoader if options["of"] == "dataloader" else StatefulDataLoader
    loader = kind(Samples(), batch_size=1, num_workers=options["workers"])
    batches, held = iter(loader), None
    # Each source gives a document at least before a worker is done with its first round.
    for _ in range(max(options["steps"] * 64 // options["world"], len(paths) // 2)):
        held = next(batches)
        if options["of"] == "stateful":
            loader.state_dict()
    return loader, batches, held


def hold_torchmix(options: dict[str, Any]) -> Any:
    """The loader and its last microbatch."""
    from torchmix.parallel.topology import Topology
    from torchmix.stateful.open import build_loader

    sizes = {name: options["sizes"].get(name, 1) for name in ("tp", "cp", "pp")}
    topology = Topology.from_world(world_size=options["world"], rank=options["rank"], **sizes)
    loader = build_loader(options["recipe"], topology=topology, loaders="node")
    batches, held = iter(loader), None
    for _ in range(options["steps"] * 64 // topology.dp):
        held = next(batches)
    return loader, batches, held


def contestant(options: dict[str, Any]) -> None:
    import pyarrow.parquet
    import torch
    import torchdata.stateful_dataloader

    import torchmix

    torch.set_num_threads(1)
    imported = (pyarrow.parquet, torchdata.stateful_dataloader, torchmix.build_loader)
    world, rank = options["world"], options["rank"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    store = torch.distributed.TCPStore("127.0.0.1", options["port"], world, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.distributed.all_reduce(torch.zeros(1))
    hold = (
        None
        if options["of"] == "floor"
        else hold_torchmix(options)
        if options["of"] == "torchmix"
        else hold_rival(options)
    )
    gc.collect()
    torch.distributed.barrier()
    reply(holds=hold is not None, imported=len(imported))
    for _ in requests():
        pass  # until told to end


class Most(NamedTuple):
    """The most at any moment."""

    mib: float
    own_mib: float
    """Of no file."""
    processes: int


def most_mib(shared: dict[str, Any], of: str) -> Most:
    """The most memory of a contestant's processes together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [Contestant(__file__, **shared, of=of, rank=rank, port=port) for rank in range(shared["world"])]
    most = Most(0.0, 0.0, 0)
    with ThreadPoolExecutor(len(ranks)) as pool:
        answers = [pool.submit(rank.answer) for rank in ranks]
        while True:
            is_over = all(answer.done() for answer in answers)
            pids = [pid for rank in ranks for pid in tree_of(rank.pid)]
            sizes = memory_mib(pids)
            own_mib = max(most.own_mib, sizes["Pss_Anon"] + sizes["Pss_Shmem"])
            most = Most(max(most.mib, sizes["Pss"]), own_mib, max(most.processes, len(pids)))
            if is_over:
                break
            time.sleep(LOOK_S)
    for answer in answers:
        answer.result()
    for rank in ranks:
        rank.kill()
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[100, 306])
    parser.add_argument("--tokens", type=int, default=300_000, help="of a source")
    parser.add_argument("--cache-mib", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2, help="of a DataLoader")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layouts", action="store_true", help="the second table alone")
    parser.add_argument("--quick", action="store_true", help="few sources, to see that it runs")
    parser.add_argument("--contestant", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant is not None:
        contestant(args.contestant)
        return
    if args.quick:
        args.sources, args.tokens, args.steps = [4, 8], 200_000, 3
    above: dict[tuple[int, str], float] = {}
    with tempfile.TemporaryDirectory() as name:
        shared = {"world": 8, "workers": args.workers, "steps": args.steps, "sizes": {"dp": 8}}
        floor = most_mib(shared, "floor")
        print(f"the floor: {floor.mib:.0f} MiB, {floor.own_mib:.0f} own; read.cache {args.cache_mib} MiB\n")
        recipes: list[Path] = []
        if not args.layouts:
            print("sources | contestant | processes | MiB above the floor | beyond read.cache | times torchmix")
        for count in args.sources[: 1 if args.layouts else None]:
            folder = Path(name) / str(count)
            folder.mkdir()
            paths = write_sources(folder, count, args.tokens)
            recipes.append(write_job(folder, paths, args.cache_mib))
            shared |= {"recipe": str(recipes[-1]), "paths": [str(path) for path in paths]}
            for of in () if args.layouts else ("torchmix", "dataloader", "stateful"):
                most = most_mib(shared, of)
                above[count, of] = most.mib - floor.mib
                beyond = f"{most.mib - floor.mib - args.cache_mib:.0f}" if of == "torchmix" else ""
                times = above[count, of] / above[count, "torchmix"]
                line = f"{count} | {of} | {most.processes} | {above[count, of]:.0f} | {beyond} | {times:.1f}"
                print(line, flush=True)
        layouts = memory_of_layouts({**shared, "recipe": str(recipes[0])}, args.sources[0])
    few, many = args.sources[0], args.sources[-1]
    if above and many > few:
        model(above, few, many, args.workers)
    found = {f"{count} {of}": mib for (count, of), mib in above.items()}
    print(json.dumps({"floor": floor.mib, "above": found, "layouts": layouts}))


def memory_of_layouts(shared: dict[str, Any], count: int) -> dict[str, float]:
    """The second table; own memory above the floor, by layout."""
    print(f"\nlayout, {count} sources | ranks | MiB above the floor | own | of dp 4")
    floors: dict[int, Most] = {}
    found: dict[str, float] = {}
    for layout, of_layout in SIZES.items():
        world = 4 if layout == "dp 4" else 8
        here = {**shared, "world": world, "sizes": of_layout}
        if world not in floors:
            floors[world] = most_mib(here, "floor")
        most, floor = most_mib(here, "torchmix"), floors[world]
        found[layout] = own = most.own_mib - floor.own_mib
        print(f"{layout} | {world} | {most.mib - floor.mib:.0f} | {own:.0f} | {own / found['dp 4']:.2f}", flush=True)
    return found


def model(above: dict[tuple[int, str], float], few: int, many: int, workers: int) -> None:
    """Whole jobs, from the coefficients of the first table."""
    open_mib = (above[many, "dataloader"] - above[few, "dataloader"]) / (many - few) / (8 * workers)
    process_mib = above[few, "dataloader"] / (8 * workers) - few * open_mib
    ours_open = max(0.0, (above[many, "torchmix"] - above[few, "torchmix"]) / (many - few))
    ours = above[few, "torchmix"] - few * ours_open
    print(
        f"\na worker of a DataLoader: {process_mib:.0f} MiB + {open_mib:.2f} a source; the worker of a node: "
        f"{ours:.0f} MiB + {ours_open:.2f} a source\n"
    )
    print(f"job, {many} sources | all ranks of TP 0 load, GiB | first and last stage | torchmix | times less")
    for name, job in JOBS.items():
        rank = workers * (process_mib + many * open_mib)
        loads = job["gpus"] // job["tp"]
        ends = loads // job["pp"] * min(2, job["pp"])
        nodes = min(job["dp"], job["gpus"] // GPUS_A_NODE)
        own = nodes * (ours + many * ours_open)
        cells = (loads * rank / 1024, ends * rank / 1024, own / 1024)
        times = ", ".join(f"{cell / cells[2]:.0f}" for cell in cells[:2])
        print(f"{name} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {times}")


if __name__ == "__main__":
    main()
