"""A process with one loader that does not end as it should: `python -m tests.support.lone_loader RECIPE WORKERS HOW`.

It takes some steps, prints `ready`, and then does what HOW says:

    leave     ends without closing
    raise     fails outside of a `with`
    suspend   ends while a generator, which nothing but its module holds, is inside of a `with`
    train     trains on inside a `with`, until a signal comes
    lose      kills its worker and trains on
    fork      forks a child that does nothing for long, prints its process id, and trains on
    fork-exit forks a child that ends inside of a `with`, as a script does, and then trains to its own end
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import islice

import torchmix
from tests.support.processes import workers_of_this_process

held: list[Iterator[torchmix.Microbatch]] = []


def microbatches(loader: torchmix.StatefulDataLoader) -> Iterator[torchmix.Microbatch]:
    with loader:
        yield from loader


def main(recipe: str, loaders: str, how: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that a shell runs in its background ignore it
    loader = torchmix.build_loader(recipe, topology=torchmix.Topology.single(), loaders=loaders)
    source = microbatches(loader) if how == "suspend" else loader
    for _ in islice(source, 20):
        pass
    if how == "suspend":
        held.append(source)
    if how == "lose":
        for _ in loader:  # each one that takes the place of another, too
            for worker in workers_of_this_process():
                os.kill(worker, signal.SIGKILL)
    if how == "fork":
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # a fork of a process with threads: that is it
        if not (fork := os.fork()):
            time.sleep(600)
            os._exit(0)
        print(fork, flush=True)
    print("ready", flush=True)
    if how == "raise":
        raise ValueError("a mistake in the training script")
    if how in ("leave", "suspend"):
        return
    with loader:
        if how == "fork-exit":
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            if not (fork := os.fork()):
                sys.exit(0)
            assert os.waitpid(fork, 0)[1] == 0
            assert sum(1 for _ in islice(loader, 400)) == 400
            return
        for _ in loader:
            time.sleep(0.01)  # a training step


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
