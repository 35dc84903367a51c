"""Many clients of few loaders: what is counted, at a small size."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fleet_clients import RANKS_OF_NODE, measure, write_world

RANKS, LOADERS, STEPS = 16, 2, 2


def test_workers_of_nodes_take_an_eighth_of_the_connections_and_every_client_is_served(tmp_path: Path) -> None:
    ids = write_world(tmp_path)
    found = {
        way: measure(way, tmp_path, ids, ranks=RANKS, num_loaders=LOADERS, steps=STEPS, processes=0)
        for way in ("ranks", "nodes")
    }
    assert found["ranks"]["clients"] == RANKS_OF_NODE * found["nodes"]["clients"] == RANKS
    assert found["ranks"]["connections"] >= RANKS_OF_NODE * found["nodes"]["clients"] * LOADERS
    assert found["nodes"]["requests"] < found["ranks"]["requests"]
    for one in found.values():
        assert one["decode_amplification"] == 1
        assert one["MiB"] >= one["MiB_of_ids"]
        if not one["asked_twice"]:  # a slow machine asks another loader, too
            assert one["requests"] <= RANKS * LOADERS * STEPS
            assert one["MiB"] < 1.2 * one["MiB_of_ids"]
