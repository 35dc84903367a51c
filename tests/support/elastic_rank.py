"""A process that trains while others come and go: what it learned and gave is in files, one line a step.

In: the recipe, a store, and a script that says when this process dies, leaves, or waits for others to have come. Out:
`given-NAME.jsonl`, for each step that it was handed: group, rank, the step's samples, written before the step is
reduced; and for each step that it committed: digest, weights, seconds. Must hold: the model is integers, so its weights
are equal bit for bit however the samples lie.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from torchmix.constructor.fields import Microbatch
from torchmix.elastic import Meeting, Membership
from torchmix.errors import RankLost
from torchmix.parallel.fan_out import FanOut, apart
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader

WIDTH, LENGTH = 16, 64
TIMEOUT = timedelta(seconds=20)
MODULUS = 1_000_003


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one process."""

    name: str
    founders: int
    stop: int
    """Steps of the run."""
    dies_at: int = -1
    dies_in: str = "step"
    """`step`: before the reduction; `commit`: behind it, before the commit; `border`: where the group would meet;
    `meeting`: while others meet after a loss; `new`: when it has just become a member."""
    leaves_at: int = -1
    waits_at: dict[int, int] = {}
    """Step -> how many must have asked to join in the whole run, so that they come there."""
    tp: int = 1
    """Tensor-parallel ranks, where they divide the ranks; with `replica` those of it."""
    replica: str = ""
    """The group of ranks that it is of, which shares no process group with others; empty: all ranks share one."""
    rank: int = 0
    """Its number in the replica."""
    pp: int = 1
    dp: int = 1
    """Stages and samples apart inside the replica."""
    life: int = 0
    """How often the replica has lost a rank, and filled its place."""
    is_filled: bool = False
    """Whether the place of a lost rank of the replica is filled; else the others end."""
    replaces: str = ""
    """Whose place this process fills."""
    where: str = "in_process"
    patience_s: float = 10.0
    pause_s: float = 0.0
    """In each step, on this process alone."""


def samples_of(microbatches: list[Microbatch]) -> list[str]:
    """A hash of each sample that has loss."""
    found = []
    for one in microbatches:
        assert one.tokens is not None and one.labels is not None and one.loss_mask is not None
        for row in zip(one.tokens, one.labels, one.loss_mask, strict=True):
            if row[2].any():
                data = b"".join(part.numpy().tobytes() for part in row)
                found.append(hashlib.sha256(data).hexdigest()[:16])
    return found


def gradient_of(microbatch: Microbatch) -> torch.Tensor:
    """int64 [WIDTH]; that of a step is the sum over its samples."""
    assert microbatch.tokens is not None and microbatch.labels is not None and microbatch.loss_mask is not None
    value = (microbatch.tokens * 31 + microbatch.labels * 17 + 7) * microbatch.loss_mask.long()
    sums = torch.zeros(WIDTH, dtype=torch.int64)
    return sums.index_add_(0, (microbatch.labels % WIDTH).flatten(), value.flatten())


def updated(weights: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """After a step; what came before is not lost."""
    return (weights * 3 + gradient) % MODULUS


class ElasticRank:
    """One process."""

    def __init__(self, recipe: Path, folder: Path, store: dist.Store, script: Script) -> None:
        """Be no member yet."""
        self.recipe, self.store, self.script = recipe, store, script
        self.members = Membership(store, founders=script.founders, patience_s=script.patience_s)
        self.weights = torch.zeros(WIDTH, dtype=torch.int64)
        self.loader: StatefulDataLoader | None = None
        self.state: dict[str, Any] | None = None
        self.step = 0
        """The step that the state begins with: those before are committed."""
        self.told = folder / "step"
        self.out = (folder / f"given-{script.name}.jsonl").open("a", buffering=1)

    def run(self) -> None:
        """Train to the end, or to this process' end."""
        meeting = self.meet()
        while meeting is not None and self.step < self.script.stop:
            try:
                self.take_place(meeting)
                self.train(meeting)
            except (RankLost, RuntimeError) as error:
                self.say(lost=f"{type(error).__name__}: {str(error).splitlines()[0]}", step=self.step)
                self.die_in("meeting")
            self.leave_group()
            if self.step < self.script.stop:
                meeting = self.meet()
        if self.loader is not None:
            self.loader.close()
        self.say(ended=self.step)

    def open_group(self, meeting: Meeting) -> None:
        """Process groups of the ranks of a meeting."""
        dist.init_process_group(
            "gloo", store=meeting.store, rank=meeting.rank, world_size=meeting.world_size, timeout=TIMEOUT
        )

    def leave_group(self) -> None:
        """End them."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def topology_of(self, meeting: Meeting) -> Topology:
        """The ranks of a meeting."""
        tp = self.script.tp if meeting.world_size % self.script.tp == 0 else 1
        return Topology.from_world(world_size=meeting.world_size, rank=meeting.rank, tp=tp)

    def exchange_of(self, topology: Topology) -> FanOut | None:
        """The exchange that the loader does not make by itself."""
        return None

    def take_weights(self, source: int) -> None:
        """Those of the newest state."""
        dist.broadcast(self.weights, source)

    def with_all_fields(self, microbatch: Microbatch) -> Microbatch:
        """Also those that other stages have."""
        return microbatch

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        dist.all_reduce(gradient)
        return gradient

    def meet(self) -> Meeting | None:
        """The next group."""
        try:
            return self.members.meet(self.state, step=self.step, leaves=self.is_leaving())
        except RankLost:
            self.say(late=True)  # the run has ended before
            return None

    def is_leaving(self) -> bool:
        """Whether this process wants to go."""
        return 0 <= self.script.leaves_at <= self.step

    def take_place(self, meeting: Meeting) -> None:
        """A process group, the loader at its place in it, and the weights of the newest state."""
        self.die_in("new" if self.loader is None else "")
        self.open_group(meeting)
        topology = self.topology_of(meeting)
        exchange = self.exchange_of(topology)
        if self.loader is None:
            options = {"loaders": self.script.where, "elastic": True, "fan_out": exchange}
            self.loader = build_loader(self.recipe, topology=topology, **options)
            if meeting.state_dict is not None:
                self.loader.load_state_dict(meeting.state_dict)
        else:
            state = meeting.state_dict if meeting.state_dict is not None else self.loader.state_dict()
            self.loader.reshard(topology, meeting.step, state_dict=state, fan_out=exchange)
        if meeting.behind and meeting.source >= 0:
            self.take_weights(meeting.source)
        self.state, self.step = self.loader.state_dict(), meeting.step
        self.say(group=meeting.number, rank=meeting.rank, world_size=topology.world_size, begins=self.step)

    def train(self, meeting: Meeting) -> None:
        """Steps, until the group ends or the run does."""
        assert self.loader is not None
        microbatches, gradient = [], torch.zeros(WIDTH, dtype=torch.int64)
        if self.is_border(meeting):
            return
        at = self.loader._tree.topology.coordinates
        counts = (at.tp, at.pp) == (0, 0)
        for microbatch in map(self.with_all_fields, self.loader):
            microbatches.append(microbatch)
            gradient += gradient_of(microbatch)
            if not microbatch.is_last_of_step:
                continue
            time.sleep(self.script.pause_s)
            self.say(given=self.step, group=meeting.number, samples=samples_of(microbatches) if counts else [])
            self.die_in("step")
            if not counts:
                gradient.zero_()
            gradient = self.reduce(gradient)
            self.die_in("commit")
            self.weights = updated(self.weights, gradient)
            self.state, self.step = self.loader.state_dict(), self.step + 1
            weights = hashlib.sha256(self.weights.numpy().tobytes()).hexdigest()[:16]
            self.say(
                committed=self.step - 1,
                group=meeting.number,
                digest=self.loader.order_digest,
                weights=weights,
                at_s=time.monotonic(),
                cpu_s=time.process_time(),
            )
            microbatches.clear()
            gradient = torch.zeros(WIDTH, dtype=torch.int64)
            if self.step == self.script.stop or self.is_border(meeting):
                return

    def is_border(self, meeting: Meeting) -> bool:
        """Whether the group meets before the next step."""
        is_first = meeting.rank == self.script.rank == 0
        if is_first:
            self.told.write_text(str(self.step))
        if is_first and self.step in self.script.waits_at:
            while not self.store.check([f"torchmix/members/come/{self.script.waits_at[self.step]}"]):
                time.sleep(0.01)
        if self.is_leaving():
            self.members.ask_to_leave()
        if not self.members.ends(self.step):
            return False
        self.die_in("border")
        return True

    def die_in(self, place: str) -> None:
        """End as if the machine did, if the script says so."""
        if self.script.dies_in == place and 0 <= self.script.dies_at <= self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, **values: Any) -> None:
        """A line of the file."""
        self.out.write(json.dumps(values) + "\n")


class ReplicaRank(ElasticRank):
    """One process of a replica of several ranks, as those of torchft: it shares a process group with no other one."""

    def __init__(self, recipe: Path, folder: Path, store: dist.Store, script: Script) -> None:
        """Be of a replica that is no member yet."""
        super().__init__(recipe, folder, store, script)
        self.inner = Topology(tp=script.tp, pp=script.pp, dp=script.dp, rank=script.rank)
        self.across: dist.ProcessGroupGloo | None = None
        """The ranks of this number in all replicas."""
        self.life = script.life

    def run(self) -> None:
        """Be of the replica, and train to the end."""
        if self.begin():
            super().run()

    def begin(self) -> bool:
        """Be of a replica whose ranks are all there; False if they are not."""
        name, size = f"{self.script.replica}/{self.life}", self.inner.world_size
        if size > 1:
            store = dist.PrefixStore(f"replica/{name}", self.store)
            try:
                dist.init_process_group("gloo", store=store, rank=self.script.rank, world_size=size, timeout=TIMEOUT)
            except RuntimeError:
                if self.life == 0:
                    raise
                self.say(late=True)  # the others have ended with the run
                return False
        self.members = Membership(
            self.store,
            founders=self.script.founders,
            replica=(dist.PrefixStore(f"members/{name}", self.store), self.script.rank, size),
            patience_s=self.script.patience_s,
        )
        return True

    def meet(self) -> Meeting | None:
        """The next group, where the replica is whole or gets so."""
        while True:
            try:
                return self.members.meet(self.state, step=self.step, leaves=self.is_leaving())
            except RankLost as error:
                self.say(broken=str(error).splitlines()[0])
                if "a rank of this replica, is gone" not in str(error) or not self.script.is_filled or self.life:
                    return None  # it is not to be filled, or the run has ended before
            super().leave_group()
            self.life, self.state, self.step = self.life + 1, None, 0
            if not self.begin():
                return None

    def open_group(self, meeting: Meeting) -> None:
        """With the ranks of its number in the other replicas; the replica's own stays."""
        if dist.is_initialized():
            dist.barrier()
        store = dist.PrefixStore(f"across/{self.script.rank}", meeting.store)
        self.across = dist.ProcessGroupGloo(store, meeting.rank, meeting.world_size, TIMEOUT)

    def leave_group(self) -> None:
        """End that with the others."""
        self.across = None
        gc.collect()  # an error's traceback keeps its connections open

    def topology_of(self, meeting: Meeting) -> Topology:
        """The ranks of all replicas."""
        return self.inner.among(meeting.rank, meeting.world_size)

    def exchange_of(self, topology: Topology) -> FanOut | None:
        """None with other replicas."""
        return apart(topology)

    def take_weights(self, source: int) -> None:
        """Those of the rank of this number in the newest replica."""
        assert self.across is not None
        self.across.broadcast(self.weights, source).wait()

    def with_all_fields(self, microbatch: Microbatch) -> Microbatch:
        """Those of its sample, from the stages that have them."""
        if self.inner.pp == 1:
            return microbatch
        fields = torch.full((self.inner.dp, 2, 1, LENGTH), torch.iinfo(torch.int32).min, dtype=torch.int32)
        for number, field in enumerate((microbatch.tokens_int32, microbatch.labels_int32)):
            if field is not None:
                fields[self.inner.replica, number] = field
        dist.all_reduce(fields, dist.ReduceOp.MAX)
        tokens, labels = fields[self.inner.replica]
        return msgspec.structs.replace(microbatch, tokens_int32=tokens, labels_int32=labels)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, once those of the replica agree that they have it."""
        assert self.across is not None
        error = None
        try:
            self.across.allreduce([gradient]).wait()
        except RuntimeError as found:
            error = found
        summed = torch.cat([gradient, torch.tensor([int(error is None)])])
        if dist.is_initialized():
            dist.all_reduce(summed)
        if summed[-1] < self.inner.world_size:
            raise RuntimeError(f"not committed: {error or 'another rank of the replica'}")
        return summed[:-1]


def rank_of(recipe: Path, folder: Path, store: dist.Store, script: Script) -> ElasticRank:
    """The process of a script."""
    return (ReplicaRank if script.replica else ElasticRank)(recipe, folder, store, script)
