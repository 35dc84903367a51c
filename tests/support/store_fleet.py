"""A process that takes one pass over a recipe's data: `python -m tests.support.store_fleet RECIPE PLACE DP`.

PLACE is `in_process`, or as `job of 4`: loaders of so many nodes, and a client for each of DP leaders, all in threads.
Prints JSON: for each rank a hash of its tensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torchmix
from tests.support.loaders import Rank, run_job
from tests.support.node_rank import hash_of
from tests.trials.fleet_matrix import clients_of
from torchmix.parallel.topology import Topology


def hash_all(loader: torchmix.StatefulDataLoader, rank: Rank) -> None:
    """Take all steps, and leave a hash of their tensors."""
    found = hashlib.sha256()
    for microbatch in loader:
        hash_of(microbatch, found)
    rank.result = found.hexdigest()


def main(recipe: Path, place: str, dp: int) -> None:
    """Run it."""
    with tempfile.TemporaryDirectory() as folder, clients_of(place, recipe, Path(folder)):
        ranks = run_job(recipe, Topology(dp=dp), program=hash_all, one_pass=True)
    print(json.dumps([rank.result for rank in ranks]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
