"""Jobs whose ranks print a hash of what they are handed, see `node_rank.py`, and what they should print."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.loaders import Rank, run_job
from tests.support.node_rank import hash_of
from tests.support.processes import Child, Processes, wait_until
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader

STEPS = 24
DEADLINE_S = 240.0


def hashed(loader: StatefulDataLoader, rank: Rank) -> None:
    """What such a rank does, in a thread."""
    found = hashlib.sha256()
    for microbatch in loader:
        hash_of(microbatch, found)
    rank.result = found.hexdigest(), loader.order_digest


def planned(job: Path, topology: Topology, **options: Any) -> list[tuple[str, str]]:
    """By rank, a hash of all tensors and the digest, as threads of leaders make them."""
    return [rank.result for rank in run_job(job, topology, program=hashed, **{"max_steps": STEPS, **options})]


def results(processes: Processes, ranks: Sequence[Child]) -> list[dict[str, Any]]:
    """What ranks print, when they and all that they have started have ended."""
    processes.wait_all(ranks, deadline_s=DEADLINE_S)
    for rank in ranks:
        wait_until(lambda rank=rank: not rank.session, deadline_s=DEADLINE_S, what="end of all that a rank has started")
    return [json.loads(rank.stdout().splitlines()[-1]) for rank in ranks]


def given(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Hash and digest."""
    return [(rank["hash"], rank["digest"]) for rank in found]
