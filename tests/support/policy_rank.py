"""A real rank of a run with a policy: `python -m tests.support.policy_rank RECIPE WHERE TP STOP [STATE_FILE]`

Each reporting rank reports its part of scripted losses, so that their sum over the ranks is that of a run alone. It
prints `step S digest D` for each step and writes the state after the last one to `state-RANK` beside the recipe.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

import torchmix
from tests.stateful.test_reports import losses_of
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.stateful.reports import reporting_ranks


def main(arguments: list[str]) -> None:
    recipe, where, tp, stop, *state = arguments
    dist.init_process_group("gloo")
    topology = torchmix.Topology.from_torchrun(tp=int(tp))
    parts = len(reporting_ranks(ClientPlaceTree.from_topology(topology)))
    with torchmix.build_loader(recipe, topology=topology, loaders=where, look_ahead=4) as loader:
        if state:
            loader.load_state_dict({"torchmix_state": Path(state[0]).read_bytes()})
        for microbatch in loader:
            if microbatch.is_last_of_step:
                step = microbatch.step
                loader.report(
                    step, {name: (value[0] / parts, value[1] / parts) for name, value in losses_of(step).items()}
                )
                print(f"step {step} digest {loader.order_digest}", flush=True)
                if step + 1 == int(stop):
                    break
        found = loader.state_dict()["torchmix_state"]
        Path(recipe).with_name(f"state-{dist.get_rank()}").write_bytes(found)
    assert len(dist.distributed_c10d._world.pg_map) == 1, "the loader gives its groups back"
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
