"""The table of docs/scale.md, at few nodes: what does not depend on chance."""

from __future__ import annotations

from benchmarks.fleet_at_scale import LOADERS, RANKS_OF_NODE, step_of


def test_a_step_of_64_nodes() -> None:
    found = step_of(64)
    assert found["connections_of_a_loader"] == 64
    assert found["connections_of_a_loader_if_each_rank_asks"] == 64 * RANKS_OF_NODE
    assert found["pages_read_by_loaders"] < found["pages_read_if_each_node_reads"] <= found["documents"]
    assert found["bytes"] == found["documents"] * 4096
    assert 1 <= found["sources_open_in_a_loader_by_partition"] < 3 < found["sources_open_in_a_loader_over_all"]
    assert found["loaders"] == LOADERS and step_of(64) == found
