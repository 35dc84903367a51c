"""One real rank of the abort tests: `python -m tests.support.abort_rank TP BEHAVIOUR...`, a behaviour per rank.

Started with torchrun's environment, one by one. Each opens the fan-out and liveness of a job, says that it delivered
step 41, prints `ready`, and then does what its behaviour says:

    check      asks for lost ranks until one is found, as a loader does that waits for its next step
    barrier    waits in a collective of the default group that never completes
    stuck      waits in a call that never ends, whatever becomes of other ranks
    idle       waits for a signal and touches nothing, as a rank does that is to be killed
    dies       kills itself when all are as far
    raise      fails with a ValueError outside of the loader
    leave      ends without closing
    close      closes and ends
    close-late closes and ends after a line appears in the file named by GO
    failed     its loader fails with an error of its own
    forks      forks a process, ends it by SIGTERM, and goes on as `close`
    before     as `idle`; its script handles SIGTERM, since before the loader was opened: it says so, and exits with 7
               when it knows of a loss
    after      likewise since after that

Where the environment has QUIET, nobody beats or looks any more: a loss is found when SIGTERM comes, and not before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.support.deadlines import LONG_S
from torchmix.parallel.fan_out import open_fan_out
from torchmix.parallel.liveness import termination
from torchmix.parallel.liveness.evidence import Patience
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.liveness.open import open_liveness
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology

opened: list[Liveness] = []


def handle(number: int, frame: object) -> None:
    print("handled", flush=True)
    opened[0]._known.wait(LONG_S)  # as one that saves first
    os._exit(7)


def behave(behaviour: str, liveness: Liveness) -> None:
    if behaviour == "barrier":
        dist.barrier()
    elif behaviour == "stuck":
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(minutes=30))
    elif behaviour == "idle":
        signal.pause()
    elif behaviour == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour in ("before", "after"):
        if behaviour == "after":
            signal.signal(signal.SIGTERM, handle)
        while True:
            signal.pause()
    elif behaviour == "forks":
        child = os.fork()
        if child == 0:
            signal.pause()
        os.kill(child, signal.SIGTERM)
        print("fork ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    elif behaviour == "raise":
        raise ValueError("a mistake in the training script")
    elif behaviour == "failed":
        liveness.post_abort(KeyError("no such shard"))
        dist.barrier()
    elif behaviour in ("check", "close-late"):
        go = Path(os.environ.get("GO", "never"))
        while not (behaviour == "close-late" and go.exists()):
            liveness.check()
            time.sleep(0.05)
    if behaviour.startswith("close") or behaviour == "forks":
        liveness.close()


def main(tp: int, behaviours: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    topology = Topology.from_torchrun(tp=tp)
    if behaviours[topology.rank] == "before":
        signal.signal(signal.SIGTERM, handle)
    tree = ClientPlaceTree.from_topology(topology)
    end = open_fan_out(tree)
    is_quiet = "QUIET" in os.environ
    termination.LOOK_S = LONG_S
    liveness = open_liveness(tree, patience=Patience(store_s=LONG_S) if is_quiet else None)
    opened.append(liveness)
    liveness.note_step(41)
    pulse = liveness._pulse
    assert pulse is not None
    while pulse.num_beats < 3:  # until the others can know the step
        time.sleep(0.01)
    if is_quiet:
        pulse.round = lambda: time.sleep(0.1)  # type: ignore[method-assign]
    if "dies" in behaviours:
        dist.barrier()
    print("ready", flush=True)
    behave(behaviours[topology.rank], liveness)
    end.close()
    dist.destroy_process_group()
    print("ended", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
