"""A node whose memory holds half of what its windows take: loaders read the rest, and every tensor is what it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fleets import PATIENT
from tests.support.image_oracle import write_project
from tests.support.image_world import records
from tests.support.loaders import Rank, run_job, same_microbatches, write_job
from tests.support.threaded_children import threaded_children
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.reader.items import UnitReader
from torchmix.recipe.load import load_recipe
from torchmix.service import open_fleet
from torchmix.service.fleet import LoaderFleet
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.routed_reader import NodeFraction, NodeRoom
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.steps import memory_budget as memory_budget_module

TOPOLOGY = Topology(dp=2)
STEPS = 24
ROOM = 20_000
"""Bytes of items."""


class Idle(NodeFraction):
    """Processors that are free, however busy this machine is: memory alone decides."""

    def look(self) -> float:
        return 1.0


@contextmanager
def patient_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[UnitReader]]:
    """Threads in the place of processes; a node waits for loaders. Gives what has decoded items beside loaders."""
    fleet, found = open_fleet._fleet, list[UnitReader]()

    def patient(settings: open_fleet.FleetSettings, *words: Any) -> LoaderFleet:
        made = fleet(settings, *words)
        made.members.patience = PATIENT  # a loader that a loaded machine keeps from answering is not lost
        return made

    def joined(*words: Any, **options: Any) -> FleetReader:
        return FleetReader(*words, **{**options, "is_joined": True})

    def decoder(*words: Any, **options: Any) -> UnitReader:
        found.append(UnitReader(*words, **options))
        return found[-1]

    with monkeypatch.context() as patched, threaded_children():
        patched.setattr(open_fleet, "_fleet", patient)
        patched.setattr(open_fleet, "FleetReader", joined)
        patched.setattr(open_fleet, "NodeFraction", Idle)
        patched.setattr(open_fleet, "UnitReader", decoder)
        yield found


def figures_of_steps(loader: StatefulDataLoader, rank: Rank) -> None:
    """Take all microbatches, and note the figures of each step."""
    rank.result = []
    for microbatch in loader:
        rank.microbatches.append(microbatch)
        if microbatch.is_last_of_step:
            rank.digests.append(loader.order_digest)
            rank.result.append(loader.stats())


def run(job: Path, loaders: Any) -> list[Rank]:
    return run_job(job, TOPOLOGY, program=figures_of_steps, max_steps=STEPS, loaders=loaders)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loaders",
    [
        {"where": ["node", "job"], "processes": 2},
        {"where": ["node", "ray"], "processes": 1, "transform_at": {"prose": "loader", "tiny": "worker"}},
    ],
    ids=["job", "ray"],
)
def test_a_node_with_memory_for_half_of_its_windows_stays_in_it_and_gives_the_same_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaders: dict[str, Any]
) -> None:
    job = write_job(tmp_path)
    wanted = run(job, "in_process")
    with patient_nodes(monkeypatch):
        whole = run(job, loaders)[0].result
        assert whole[-1]["node_fraction"] == 1.0, "memory for all"
        room = max(one["window_bytes"] for one in whole) // 2
        path = job.read_text() + f"read: {{cache: {room}}}\n"
        job.write_text(path)
        found = run(job, loaders)
    for one, other in zip(wanted, found, strict=True):
        assert same_microbatches(one.microbatches, other.microbatches)
        assert one.digests == other.digests
    for one in found[0].result:
        assert one["window_bytes_here"] <= room and one["cache_bytes"] <= room
    last = found[0].result[-1]
    assert last["total_node_tokens"] > 0 and last["total_loader_tokens"] > 0 and 0 < last["node_fraction"] < 1
    assert last["decode_amplification"] == 1.0, "what the node reads it decodes once"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loader", "worker"])
def test_a_node_with_memory_for_some_items_stays_in_it_and_gives_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    write_project(tmp_path, ["parquet", "lists"])
    job = tmp_path / "recipe.yaml"
    text = job.read_text()
    job.write_text(text.replace("items: image", f"decode_at: {place}\n    items: image"))
    index_recipe(load_recipe(job), tmp_path)
    parts, decoded = list[float](), list[int]()

    class Noted(NodeRoom):
        def expect(self, *words: Any) -> None:
            super().expect(*words)
            if self.room_bytes == ROOM:
                assert self.held_bytes <= ROOM
                parts.append(self.part)

    wanted = records(job, TOPOLOGY, 4, with_mrope=False, loaders="in_process")
    with patient_nodes(monkeypatch) as decoders, monkeypatch.context() as patched:
        patched.setattr(open_fleet, "NodeRoom", Noted)
        patched.setattr(memory_budget_module, "ITEM_BYTES", ROOM)
        found = records(job, TOPOLOGY, 4, with_mrope=False, loaders={"where": ["node", "job"]})
        decoded += [int(one.stats()["item_bytes_at_once"]) for one in decoders]
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    assert min(parts) < 1 and any(0 < part < 1 for part in parts), "some of a step's items are left to loaders"
    assert len(decoded) == (place == "loader") and all(0 < num_bytes <= ROOM for num_bytes in decoded)
