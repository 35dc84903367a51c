"""Training with torch's DDP while ranks come and go.

In: a recipe, and a store that outlives the ranks. Out: a line a step on rank 0: loss, number of ranks, digest of the
order. Must hold: whoever is lost, leaves or joins, the steps are those of one rank, up to the order of float additions.
Cost: that of a toy; it runs on a CPU.

    torchmix init --demo demo
    python examples/ddp/train_elastic.py --serve 29400 &
    for i in 1 2 3 4; do
      python examples/ddp/train_elastic.py demo/recipe.yaml --store localhost:29400 --founders 4 &
    done

Kill one of the four, and the three others go on from the step that they have; start another, and it joins before the
next step. Under torchrun, which ends all ranks when one is lost, --save makes its restarts go on from a checkpoint:

    torchrun --nproc-per-node 4 --max-restarts 3 examples/ddp/train_elastic.py demo/recipe.yaml --save run.pt
"""

from __future__ import annotations

import argparse
import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_gpt import TinyGPT, loss_sum
from torch.nn.parallel import DistributedDataParallel

import torchmix
from torchmix.elastic import Meeting, Membership


class Run:
    """What a rank has committed: weights, and the state of the loader that goes with them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Begin at step 0, or with the checkpoint."""
        self.arguments, recipe = arguments, torchmix.load_recipe(arguments.recipe)
        torch.manual_seed(recipe.seed)
        self.model = TinyGPT(vocab=arguments.vocab, length=recipe.batch.length)
        self.loader: torchmix.StatefulDataLoader | None = None
        self.state, self.step, self.saved = None, 0, (0, 0)
        if arguments.save is not None and arguments.save.exists():
            saved = torch.load(arguments.save, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.state, self.step = {"torchmix_state": bytes(saved["loader"].numpy())}, saved["step"]

    def take_place(self, meeting: Meeting) -> None:
        """The loader at this rank's place in a new group, and the newest weights."""
        dist.init_process_group(
            "gloo",
            store=meeting.store,
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=60),
        )
        topology = torchmix.Topology.from_world(world_size=meeting.world_size, rank=meeting.rank)
        state, step = meeting.state_dict or self.state, meeting.step if meeting.state_dict else self.step
        if self.loader is None:
            self.loader = torchmix.build_loader(
                self.arguments.recipe, topology=topology, max_steps=self.arguments.steps, elastic=True
            )
            if state is not None:
                self.loader.load_state_dict(state)
        else:
            self.loader.reshard(topology, step, state_dict=state)
        if meeting.behind and meeting.source >= 0:
            for tensor in self.model.state_dict().values():
                dist.broadcast(tensor, meeting.source)
        self.state, self.step = self.loader.state_dict(), step
        if meeting.rank == 0:
            self.save(begins=True)

    def train(self, members: Membership) -> None:
        """Steps, until the group meets again or the run ends."""
        assert self.loader is not None
        model = DistributedDataParallel(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        step_loss = torch.zeros(())
        if members.ends(self.step):
            return
        for microbatch in self.loader:
            scale = dist.get_world_size() / microbatch.num_tokens_global  # DDP averages over ranks
            with nullcontext() if microbatch.is_last_of_step else model.no_sync():
                logits = model(microbatch.tokens, microbatch.position_ids, microbatch.cu_seqlens_padded)
                loss = loss_sum(logits, microbatch.labels, microbatch.loss_mask)
                (loss * scale).backward()
            step_loss += loss.detach() / microbatch.num_tokens_global
            if not microbatch.is_last_of_step:
                continue
            dist.all_reduce(step_loss)
            optimizer.step()
            optimizer.zero_grad()
            self.state, self.step = self.loader.state_dict(), self.step + 1  # committed
            if dist.get_rank() == 0:
                text = f"loss {step_loss.item():.5f} ranks {dist.get_world_size()} digest {self.loader.order_digest}"
                print(f"step {microbatch.step} {text}", flush=True)
                self.save()
            step_loss.zero_()
            if members.ends(self.step):
                return

    def save(self, *, begins: bool = False) -> None:
        """Replace the checkpoint; whoever finds that others have begun with it since ends, and torchrun unites them.

        torchrun takes a machine that is silent for a while for lost, and forms another group, though it goes on.
        """
        if (path := self.arguments.save) is None:
            return
        if not begins and stamp_of(path) != self.saved:
            raise SystemExit(f"others of this job have begun with {path} since: torchrun took this rank for lost")
        state, new = self.state["torchmix_state"], path.with_suffix(f".{os.getpid()}")
        loader = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        torch.save({"model": self.model.state_dict(), "loader": loader, "step": self.step}, new)
        self.saved = stamp_of(new)
        new.replace(path)


def stamp_of(path: Path) -> tuple[int, int]:
    """What another checkpoint does not share, and a rename keeps."""
    return (found := path.stat()).st_ino, found.st_mtime_ns


def store_of(arguments: argparse.Namespace) -> dist.Store:
    """The store that was named, or torchrun's, which outlives its restarts; rank 0 hosts it where torchrun does not."""
    if arguments.store is not None:
        host, port = arguments.store.rsplit(":", 1)
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":  # a new one for each group; agents count restarts apart
        return dist.TCPStore(host, port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def main() -> None:
    """Train, or host the store."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=257)
    parser.add_argument("--store", metavar="HOST:PORT", help="where --serve runs; without it torchrun's store")
    parser.add_argument("--founders", type=int, help="processes that begin; without it torchrun's")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint each step, and begin with it")
    parser.add_argument("--serve", type=int, metavar="PORT", help="host the store, and do nothing else")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        store = dist.TCPStore("0.0.0.0", arguments.serve, is_master=True, wait_for_workers=False)
        threading.Event().wait()
        del store
    run, founders = Run(arguments), arguments.founders or int(os.environ["WORLD_SIZE"])
    with Membership(store_of(arguments), founders=founders) as members:
        while run.step < arguments.steps:
            meeting = members.meet(run.state, step=run.step)
            assert meeting is not None, "of one that leaves"
            try:
                run.take_place(meeting)
                run.train(members)
            except (torchmix.RankLost, RuntimeError) as error:  # torch's own errors are RuntimeErrors
                print(f"rank {meeting.rank} at step {run.step}: {str(error).splitlines()[0]}", flush=True)
            if dist.is_initialized():
                dist.destroy_process_group()
    if run.loader is not None:
        run.loader.close()


if __name__ == "__main__":
    main()
