"""A job whose steps differ in their samples: every tensor by the plan's files, and the order over resumes.

In: a recipe of `write_job`, and what each step has. Out: nothing, or an AssertionError. Must hold: tensors are worked
out from the plan's files and the sources by `oracle`, without the package's constructor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.support import oracle
from tests.support.loaders import run_job
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology


def check_tensors(
    job: Path, topology: Topology, folder: Path, *, samples: Sequence[int], lengths: Sequence[int], method: str
) -> None:
    """Every tensor of every rank is what the plan says; `samples` and `lengths` are those of each step."""
    assert main(["plan", str(job), "--steps", str(len(samples)), "--dp", str(topology.dp), "--out", str(folder)]) == 0
    documents = {
        "web": oracle.read_token_documents(list(job.parent.glob("web-*.parquet")), "input_ids"),
        "prose": oracle.read_text_documents([job.parent / "prose.parquet"], "text"),
        "tiny": oracle.read_text_documents([job.parent / "tiny.parquet"], "text"),
    }
    sizes = {"tp": topology.tp, "cp": topology.cp, "pp": topology.pp, "dp": topology.dp}
    pieces = pq.read_table(folder / "pieces.parquet")
    wanted: list[list[dict[str, Any]]] = [[] for _ in range(topology.world_size)]
    for length, group in groupby(range(len(lengths)), key=lambda step: lengths[step]):
        steps = list(group)
        inside = pc.and_(pc.greater_equal(pieces["step"], steps[0]), pc.less_equal(pieces["step"], steps[-1]))
        pq.write_table(pieces.filter(inside), folder / "some.parquet")
        facts: dict[str, Any] = {"length": length, "boundaries": "document", "method": method, "align_tokens": 8}
        found = oracle.Job(**facts, **sizes, micro_batch_size=1)
        for rank, some in enumerate(oracle.expected_microbatches(folder / "some.parquet", documents, found)):
            wanted[rank] += some
    for rank, expected in zip(run_job(job, topology, steps=len(samples)), wanted, strict=True):
        assert len(rank.microbatches) == sum(samples) // topology.dp
        for found, values in zip(rank.microbatches, expected, strict=True):
            for name, value in values.items():
                given = getattr(found, name)
                np.testing.assert_array_equal(given if given is None else np.asarray(given), value, err_msg=name)


def digests_over_resumes(job: Path, layouts: Mapping[str, Topology], first: str, counts: Sequence[int]) -> list[str]:
    """Order digests of a run that goes on at another layout after so many steps, beginning with a named one."""
    names = list(layouts)
    found: list[str] = []
    state = None
    for number, steps in enumerate(counts):
        topology = layouts[names[(names.index(first) + number) % len(names)]]
        ranks = run_job(job, topology, steps=steps, state=state, keep=False)
        assert all(rank.state == ranks[0].state and rank.digests == ranks[0].digests for rank in ranks)
        found += ranks[0].digests
        state = ranks[-1].state
    return found
