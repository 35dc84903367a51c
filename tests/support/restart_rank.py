"""A real rank that ends all its process groups and goes on: `python -m tests.support.restart_rank RECIPE STEPS HOW`

Three times it takes STEPS steps, prints each with its digest, and ends: with `abort` it destroys its groups while steps
are read ahead, with `error` rank 1 raises an error inside a step, which is thrown away. Then it makes new groups over
the same store, and reshards. Rank 0 prints which node worker it has each time.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

import torchmix


def main(recipe: str, steps: str, how: str) -> None:
    """One rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False)
    topology, loader, state = torchmix.Topology(dp=world_size, rank=rank), None, None
    for attempt in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=world_size)
        if loader is None:
            loader = torchmix.build_loader(recipe, topology=topology, loaders="node", elastic=True)
        else:
            loader.reshard(topology, attempt * int(steps), state_dict=state)
        if rank == 0:
            print(f"worker {loader.dataset._node._keeper.pid}", flush=True)
        for microbatch in loader:
            if not microbatch.is_last_of_step:
                continue
            if microbatch.step == (attempt + 1) * int(steps):
                break  # of a step that is thrown away
            dist.barrier()
            state = loader.state_dict()
            print(f"step {microbatch.step} digest {loader.order_digest}", flush=True)
            if how == "abort" and microbatch.step + 1 == (attempt + 1) * int(steps):
                break
        if how == "error" and attempt < 2:
            if rank == 1:
                loader._liveness.post_abort(ValueError("a fault inside the step"))
            try:
                while True:
                    next(iter(loader))
            except torchmix.RankLost as error:
                print(f"lost rank {error.rank}", flush=True)
        dist.destroy_process_group()
    loader.close()
    store.set(f"ended {rank}", "")
    if rank == 0:
        store.wait([f"ended {other}" for other in range(world_size)])


if __name__ == "__main__":
    main(*sys.argv[1:])
