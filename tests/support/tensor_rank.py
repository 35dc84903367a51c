"""A real rank that writes down what it is handed: `python -m tests.support.tensor_rank RECIPE FOLDER STEPS TP CP PP`.

It begins at the state in FOLDER/state if there is one, and takes STEPS whole steps. `written` reads what it leaves in
FOLDER: for its rank the microbatches, the order digest after each step, and the state after the last. LOADERS in the
environment stands in the place of the recipe's `loaders`; MICRO is the size of a microbatch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchmix
from tests.support.loaders import Rank
from torchmix.constructor.fields import Microbatch

NAMES = ("tokens_int32", "labels_int32", "spans", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""What a microbatch is made of."""
PLACE = ("step", "index", "num_microbatches", "is_last_of_step", "num_tokens_global")


def written(folder: Path, rank: int) -> Rank:
    """What a rank was handed."""
    found = torch.load(folder / f"rank-{rank}.pt", weights_only=True)
    return Rank(
        microbatches=[Microbatch(**fields) for fields in found["microbatches"]],
        digests=found["digests"],
        state={"torchmix_state": bytes(found["state"])},
    )


def main(recipe: str, folder: Path, steps: int, tp: int, cp: int, pp: int) -> None:
    dist.init_process_group("gloo")
    topology = torchmix.Topology.from_torchrun(tp=tp, cp=cp, pp=pp)
    options = {"loaders": os.environ["LOADERS"], "micro_batch_size": int(os.environ["MICRO"])}
    microbatches: list[dict[str, Any]] = []
    digests: list[str] = []
    with torchmix.build_loader(recipe, topology=topology, **options) as loader:
        if (folder / "state").exists():
            loader.load_state_dict({"torchmix_state": (folder / "state").read_bytes()})
        for microbatch in loader:
            microbatches.append({name: getattr(microbatch, name) for name in (*NAMES, *PLACE)})
            if microbatch.is_last_of_step:
                digests.append(loader.order_digest)
                if len(digests) == steps:
                    break
        state = loader.state_dict()["torchmix_state"]
        dist.barrier()
    found = {"microbatches": microbatches, "digests": digests, "state": list(state)}
    torch.save(found, folder / f"rank-{topology.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
