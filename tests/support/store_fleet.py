"""A process that takes one pass over a recipe's data: `python -m tests.support.store_fleet RECIPE PLACE DP`.

PLACE is `in_process`, or as `job of 4`: loaders of so many nodes, and a client for each of DP leaders, all in threads.
Prints JSON: for each rank a hash of its tensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torchmix
from tests.support.deadlines import LONG_S
from tests.support.fleet_clients import clients_of
from tests.support.loaders import Rank, run_job
from tests.support.node_rank import hash_of
from tests.support.patient_fleets import be_patient
from torchmix.parallel.topology import Topology


def hash_all(loader: torchmix.StatefulDataLoader, rank: Rank, after_each: Callable[[], object] = int) -> None:
    """Take all steps, and leave a hash of their tensors."""
    found = hashlib.sha256()
    for microbatch in loader:
        hash_of(microbatch, found)
        after_each()
    rank.result = found.hexdigest()


def main(recipe: Path, place: str, dp: int) -> None:
    """Run it, with leaders that go step by step together, as those of a job do, and that give nobody up as slow."""
    together = threading.Barrier(dp)

    def program(loader: torchmix.StatefulDataLoader, rank: Rank) -> None:
        hash_all(loader, rank, lambda: together.wait(LONG_S))

    be_patient()
    with tempfile.TemporaryDirectory() as folder, clients_of(place, recipe, Path(folder)):
        ranks = run_job(recipe, Topology(dp=dp), program=program, one_pass=True)
    print(json.dumps([rank.result for rank in ranks]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
