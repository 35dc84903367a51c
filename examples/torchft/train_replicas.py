"""Training with torchft: replicas fail and return, and the global batch stays the same, bit for bit.

In: a recipe, and a lighthouse. Out: a line a step: loss, replicas that took part, digest of the order. Must hold: what
is learned is what one replica alone learns, up to the order of float additions. Cost: that of a toy, on a CPU.

    torchmix init --demo demo
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 60000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    for i in 0 1 2 3; do REPLICA_ID=r$i python examples/torchft/train_replicas.py demo/recipe.yaml & done

The lighthouse waits so long for replicas that are in a step, so that must be longer than a step takes. Kill one, and
start it again: it gets weights and the loader's state from another, and goes on by planning alone.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

sys.path.append(str(Path(__file__).parents[1] / "ddp"))
from tiny_gpt import TinyGPT, loss_sum

import torchmix
from torchmix.parallel import apart


class Replica:
    """A model, and the state of the loader that goes with its weights."""

    def __init__(self, recipe: str) -> None:
        """Nothing is read before the first quorum."""
        self.recipe, batch = recipe, torchmix.load_recipe(recipe).batch
        torch.manual_seed(0)
        self.model = TinyGPT(vocab=257, length=batch.length)
        self.loader: torchmix.StatefulDataLoader | None = None
        self.place, self.state, self.is_behind = (0, 0), None, False

    def state_dict(self) -> dict[str, object]:
        """For a replica that returns; tensors alone, so that nothing else is believed."""
        data = b"" if self.state is None else self.state["torchmix_state"]
        return {"model": self.model.state_dict(), "loader": torch.tensor(list(data), dtype=torch.uint8)}

    def load_state_dict(self, given: dict[str, object]) -> None:
        """From another replica."""
        self.model.load_state_dict(given["model"])
        data = bytes(given["loader"].tolist())
        self.state, self.is_behind = {"torchmix_state": data} if data else None, True

    def take_place(self, manager: Manager) -> None:
        """The loader at this replica's place in the quorum, before the step that comes."""
        place = manager.num_participants(), manager.participating_rank()
        topology = torchmix.Topology(dp=place[0], rank=place[1])
        if self.loader is None:
            self.loader = torchmix.build_loader(self.recipe, topology=topology, fan_out=apart(topology), elastic=True)
            if self.state is not None:
                self.loader.load_state_dict(self.state)
        elif place != self.place or self.is_behind:
            step = manager.current_step()
            self.loader.reshard(topology, step, fan_out=apart(topology), state_dict=self.state)
        self.place, self.is_behind, self.state = place, False, self.loader.state_dict()


def main(recipe: str, steps: int = 20) -> None:
    """One replica, of one rank."""
    replica, store = Replica(recipe), dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    optimizer = torch.optim.SGD(replica.model.parameters(), lr=0.1)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=replica.load_state_dict,
        state_dict=replica.state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=os.environ["REPLICA_ID"],
    )
    while manager.current_step() < steps:
        manager.start_quorum()
        replica.take_place(manager)
        optimizer.zero_grad()
        step_loss = torch.zeros(())
        for microbatch in replica.loader:
            logits = replica.model(microbatch.tokens, microbatch.position_ids, microbatch.cu_seqlens_padded)
            loss = loss_sum(logits, microbatch.labels, microbatch.loss_mask) / microbatch.num_tokens_global
            loss.backward()
            step_loss += loss.detach()
            if microbatch.is_last_of_step:
                break
        for tensor in (*(each.grad for each in replica.model.parameters()), step_loss):
            manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        if manager.should_commit():
            optimizer.step()
            replica.state = replica.loader.state_dict()
            text = f"loss {step_loss.item():.5f} replicas {replica.place[0]} digest {replica.loader.order_digest}"
            print(f"step {microbatch.step} {text}", flush=True)
        else:
            replica.is_behind = True  # the step comes again
    manager.shutdown()
    replica.loader.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
