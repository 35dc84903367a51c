"""A real rank of the fan-out test: `python -m tests.support.fan_out_rank RANK WORLD TP CP PP STORE STEPS LEADERS`.

It trains nothing: a background thread exchanges shares over the private groups, while the main thread keeps the default
group busy, as a training step would. It prints one line, `received N`, after checking every value it was sent.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from msgspec.structs import replace

from torchmix.parallel.agreement import ToCompare
from torchmix.parallel.fan_out import FanOut, RoleBatch, open_fan_out
from torchmix.parallel.place_tree import ClientPlaceTree, LeaderChoice, Role, Stage
from torchmix.parallel.topology import Topology

STAGES: tuple[Stage, ...] = ("only", "first", "middle", "last")


def share_for(replica: int, role: Role, step: int) -> RoleBatch:
    """A share whose every value tells whom it is for; large enough for gloo to send it in pieces."""
    key = 1000 * step + 100 * replica + 10 * STAGES.index(role.stage) + role.cp_rank
    return RoleBatch(
        header=str(key).encode(), tensors={"tokens": torch.full((64, 1024), key), "few": torch.tensor([key])}
    )


def with_own(tree: ClientPlaceTree, role: Role, step: int) -> RoleBatch:
    """A share, every other time with something for each of its ranks alone."""
    ranks = tree.ranks_of_role(tree.topology.rank, role) if step % 2 else ()
    own = {rank: {"own": torch.full((100_000 * (1 + rank),), rank)} for rank in ranks if rank != tree.topology.rank}
    return replace(share_for(tree.replica, role, step), own=own)


def exchange(end: FanOut, tree: ClientPlaceTree, num_steps: int) -> int:
    """Send or receive every step; the number of steps."""
    if tree.is_leader:
        for step in range(num_steps):
            end.compare([ToCompare(step=step, order_digest=step.to_bytes(8, "big"), plan_digest=b"\xff" * 8)])
            end.send({role: with_own(tree, role, step) for role in end.roles_to_send})
        end.send_end()
        return num_steps
    step = 0
    while (share := end.receive()) is not None:
        expected = share_for(tree.replica, tree.role, step)
        assert share.header == expected.header
        assert all(torch.equal(share.tensors[name], tensor) for name, tensor in expected.tensors.items())
        assert (tree.topology.rank in share.own) == bool(step % 2)
        assert all((held["own"] == rank).all() for rank, held in share.own.items())
        step += 1
    return step


def main(arguments: list[str]) -> None:
    rank, world_size, tp, cp, pp = (int(text) for text in arguments[:5])
    store = dist.FileStore(arguments[5], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=30))
    topology = Topology.from_world(world_size=world_size, rank=rank, tp=tp, cp=cp, pp=pp)
    tree = ClientPlaceTree.from_topology(topology, leaders=cast(LeaderChoice, arguments[7]), ranks_per_node=2)
    end = open_fan_out(tree, timeout_s=1800.0)
    received: list[int] = []
    thread = threading.Thread(target=lambda: received.append(exchange(end, tree, int(arguments[6]))))
    thread.start()
    for step in range(50):
        total = torch.tensor([rank + step])
        dist.all_reduce(total)
        assert total.item() == sum(range(world_size)) + world_size * step
    thread.join()
    end.close()
    dist.destroy_process_group()
    print(f"received {received[0]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
