"""Training with torchft: replicas fail and return, and the global batch stays the same, bit for bit.

In: a recipe, and a lighthouse. Out: a line a step. What is learned is what one replica alone learns, up to the order of
float additions.

    torchmix init --demo demo
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 60000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    for i in 0 1 2 3; do REPLICA_ID=r$i python examples/torchft/train_replicas.py demo/recipe.yaml & done

The lighthouse waits so long for replicas that are in a step. Kill one, and start it again: it gets weights and the
loader's state from another, and goes on by planning alone.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

sys.path.append(f"{sys.path[0]}/../ddp")
from tiny_gpt import TinyGPT, loss_sum

import torchmix
from torchmix.parallel import apart


def main(recipe: str, steps: int = 20) -> None:
    """One replica, of one rank; all begin with the weights of one."""
    model = TinyGPT(vocab=257, length=torchmix.load_recipe(recipe).batch.length)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, place, state = None, None, None  # the state after the last step that was committed

    def state_dict() -> dict[str, object]:  # for a replica that returns; tensors alone, so nothing else is believed
        data = state["torchmix_state"] if state else b""
        return {"model": model.state_dict(), "loader": torch.tensor(list(data), dtype=torch.uint8)}

    def load_state_dict(given: dict[str, object]) -> None:
        nonlocal place, state
        model.load_state_dict(given["model"])
        place, state = None, {"torchmix_state": bytes(given["loader"].tolist())} if len(given["loader"]) else None

    store, limit = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), timedelta(seconds=10)
    here = {"rank": 0, "world_size": 1, "store_addr": "localhost", "store_port": store.port}
    options = {"min_replica_size": 1, "use_async_quorum": False, "replica_id": os.environ["REPLICA_ID"], **here}
    manager = Manager(ProcessGroupGloo(limit), load_state_dict, state_dict, timeout=limit, **options)
    while manager.current_step() < steps:
        manager.start_quorum()
        topology = torchmix.Topology(dp=manager.num_participants(), rank=manager.participating_rank())
        if loader is None:
            loader = torchmix.build_loader(recipe, topology=topology, fan_out=apart(topology), elastic=True)
            if state:
                loader.load_state_dict(state)
        elif topology != place:  # the quorum is another one, or the last step comes again
            loader.reshard(topology, manager.current_step(), fan_out=apart(topology), state_dict=state)
        state, step_loss = loader.state_dict(), torch.zeros(())
        optimizer.zero_grad()
        for microbatch in loader:
            logits = model(microbatch.tokens, microbatch.position_ids, microbatch.cu_seqlens_padded)
            loss = loss_sum(logits, microbatch.labels, microbatch.loss_mask) / microbatch.num_tokens_global
            loss.backward()
            step_loss += loss.detach()
            if microbatch.is_last_of_step:
                break
        for tensor in (*(each.grad for each in model.parameters()), step_loss):
            manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        place = topology if manager.should_commit() else None
        if place is not None:
            optimizer.step()
            state = loader.state_dict()
            text = f"loss {step_loss:.5f} replicas {topology.dp} digest {loader.order_digest}"
            print(f"step {microbatch.step} {text}", flush=True)
    manager.shutdown()
    loader.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
