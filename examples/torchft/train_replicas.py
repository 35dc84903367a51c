"""Training with torchft: replicas fail and return, and the global batch stays the same, bit for bit.

In: a recipe, and a lighthouse. Out: a line a step. What is learned is what one learns, up to the order of additions.

    torchmix init --demo demo
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 60000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    for i in 0 1 2 3; do
      REPLICA_ID=r$i torchrun --standalone --nproc-per-node 2 examples/torchft/train_replicas.py demo/recipe.yaml &
    done

The lighthouse waits so long for replicas in a step. Kill one, and start it again: it gets weights and a loader's state
from another, and goes on by planning alone. Both ranks of a replica train alike, as tensor-parallel ranks would.
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
    """One rank of a replica; all begin with the weights of one."""
    torch.manual_seed(torchmix.load_recipe(recipe).seed)
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

    dist.init_process_group("gloo")  # of this replica alone
    inner, limit = torchmix.Topology.from_torchrun(tp=dist.get_world_size()), timedelta(seconds=10)
    options = {"min_replica_size": 1, "use_async_quorum": False, "replica_id": os.environ["REPLICA_ID"]}
    manager = Manager(ProcessGroupGloo(limit), load_state_dict, state_dict, timeout=limit, **options)
    while manager.current_step() < steps:
        manager.start_quorum()
        topology = inner.among(manager.participating_rank(), manager.num_participants())
        if loader is None:
            loader = torchmix.build_loader(recipe, topology=topology, fan_out=apart(topology), elastic=True)
        if topology != place:  # the quorum is another one, or the last step comes again
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
            digest = loader.order_digest
            print(f"step {microbatch.step} loss {step_loss:.5f} replicas {topology.dp} digest {digest}", flush=True)
    manager.shutdown()
    loader.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
