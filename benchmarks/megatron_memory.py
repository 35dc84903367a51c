"""Host memory of 8 ranks at tp x cp = 4, dp 2: Megatron's data builder against torchmix, on the same .bin files.

    python benchmarks/megatron_memory.py [--sources 306] [--tp 2 --cp 2] [--steps 20] [--quick]

Eight processes with gloo, as torchrun would start them, each with every module imported that its contestant needs and
with its process groups made. *Above the floor* is what the same processes hold beyond that when they do nothing more.
They take `--steps` global batches, and are measured while they hold the last microbatch: the sum of proportional set
sizes over all processes of the job, workers too, and its anonymous, shared and file parts. File pages are the kernel's
cache of mapped files, which it can drop; they are counted for both.

  megatron   datasets and DataLoader on tp rank 0 of every (cp, dp), as `pretrain_gpt.py` has it, each microbatch
             broadcast to its tp group; num_workers 0 and Megatron's default of 2
  torchmix   the loader on all ranks, one leader for each dp; in its threads (w0), or with one worker process for each
             leader (w1)

A file that is read leaves nothing behind: all contestants map the same pages of the same files, in the same order.
"""

from __future__ import annotations

import argparse
import gc
import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from megatron_data import write_corpus, write_recipe
from process_trees import Contestant, memory_mib, reply, requests, tree_of

LENGTH = 4096
WORLD = 8
CONTESTANTS: dict[str, dict[str, Any]] = {
    "megatron floor": {"of": "megatron", "workers": None},
    "megatron w0": {"of": "megatron", "workers": 0},
    "megatron w2": {"of": "megatron", "workers": 2},
    "torchmix floor": {"of": "torchmix", "loaders": None},
    "torchmix w0": {"of": "torchmix", "loaders": "in_process"},
    "torchmix w1": {"of": "torchmix", "loaders": "node"},
}


def contestant(options: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", options["port"], WORLD, is_master=options["rank"] == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=options["rank"], world_size=WORLD)
    hold = {"megatron": hold_megatron, "torchmix": hold_torchmix}[options["of"]](options)
    gc.collect()
    torch.distributed.barrier()
    reply(holds=hold is not None)
    for _ in requests():
        pass  # until told to end
    del hold


def hold_megatron(options: dict[str, Any]) -> Any:
    """The last microbatch, with the iterator that gave it."""
    import torch
    from megatron.core import parallel_state
    from megatron_rival import build_data_loader, build_dataset

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options["tp"], context_parallel_size=options["cp"]
    )
    group = parallel_state.get_tensor_model_parallel_group()
    is_built = parallel_state.get_tensor_model_parallel_rank() == 0
    torch.distributed.all_reduce(torch.zeros(1), group=group)  # groups connect when first used
    if options["workers"] is None:
        return None
    corpus = write_corpus(Path(options["folder"]), **options["corpus"])
    dataset = build_dataset(
        corpus, num_samples=corpus.num_tokens // LENGTH, length=LENGTH, is_built_on_rank=lambda: is_built
    )
    batches = None
    if is_built:
        dp_rank = parallel_state.get_data_parallel_rank()
        loader = build_data_loader(
            dataset, micro_batch_size=1, num_workers=options["workers"], dp_rank=dp_rank, dp=options["dp"]
        )
        batches = iter(loader)
    held: dict[str, torch.Tensor] = {}
    dtypes = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}
    for _ in range(options["steps"] * options["samples"] // options["dp"]):
        batch = next(batches) if batches is not None else {}
        held = {
            name: batch[name] if is_built else torch.empty((1, LENGTH), dtype=dtype) for name, dtype in dtypes.items()
        }
        for tensor in held.values():
            torch.distributed.broadcast(tensor, group=group, group_src=0)
    return batches, held


def hold_torchmix(options: dict[str, Any]) -> Any:
    """The last microbatch, with the loader that gave it."""
    import torch

    from torchmix.parallel.topology import Topology
    from torchmix.stateful.open import build_loader

    torch.distributed.all_reduce(torch.zeros(1))
    if options["loaders"] is None:
        return None
    topology = Topology.from_world(world_size=WORLD, rank=options["rank"], tp=options["tp"], cp=options["cp"])
    loader = build_loader(options["recipe"], topology=topology, loaders=options["loaders"])
    batches, held = iter(loader), None
    for _ in range(options["steps"] * options["samples"] // options["dp"]):
        held = next(batches)
    return loader, held


def measure(name: str, shared: dict[str, Any]) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [Contestant(__file__, **shared, **CONTESTANTS[name], rank=rank, port=port) for rank in range(WORLD)]
    for rank in ranks:
        rank.answer()
    pids = [pid for rank in ranks for pid in tree_of(rank.pid)]
    found = memory_mib(pids) | {"processes": len(pids)}
    for rank in ranks:
        rank.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[306])
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of a corpus, over all its sources")
    parser.add_argument("--samples", type=int, default=64, help="of a global batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one small corpus, to see that it runs")
    parser.add_argument("--contestant", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant is not None:
        contestant(args.contestant)
        return
    if args.quick:
        args.sources, args.tokens, args.steps = [8], 10_000_000, 3
    print("sources | contestant | processes | floor | above the floor: all | anonymous and shared | mapped files")
    for num_sources in args.sources:
        with tempfile.TemporaryDirectory() as folder:
            corpus = {"num_sources": num_sources, "dtype": "u16", "num_tokens": args.tokens}
            recipe = write_recipe(write_corpus(Path(folder), **corpus), samples=args.samples, length=LENGTH)
            shared = {
                **{key: getattr(args, key) for key in ("samples", "steps", "tp", "cp")},
                "dp": WORLD // (args.tp * args.cp),
                "folder": folder,
                "corpus": corpus,
                "recipe": str(recipe),
            }
            rows: dict[str, dict[str, float]] = {}
            for name in args.contestants:
                row = rows[name] = measure(name, shared)
                floor = rows.get(f"{name.split()[0]} floor", row)
                row["above"] = round(row["Pss"] - floor["Pss"], 1)
                row["above_file"] = round(row["Pss_File"] - floor["Pss_File"], 1)
                if not name.endswith("floor"):
                    print(
                        f"{num_sources} | {name.replace('megatron', 'Megatron')} | {row['processes']} | "
                        f"{floor['Pss']:.0f} | {row['above']:.0f} | {row['above'] - row['above_file']:.0f} | "
                        f"{row['above_file']:.0f}",
                        flush=True,
                    )
            print(json.dumps({"sources": num_sources, "tp": args.tp, "cp": args.cp, "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
