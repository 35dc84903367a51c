"""Where each stage of a pipeline has a leader, that of a middle stage reads no text, and gives its ranks the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stateful.test_bad_pages import damage
from tests.stateful.test_bad_pages import write_job as write_pages
from tests.stateful.test_resets import write_job as write_resets
from tests.stateful.test_runs_of_ranks import with_runs
from tests.support.loaders import FIELDS, Rank, run_job, write_job
from tests.support.maps import write_functions
from tests.support.threaded_children import threaded_children
from torchmix.constructor.fields import RowLists
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.place_tree import ClientPlaceTree, Leaders, Role
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.stateful.loader import StatefulDataLoader

SHAPES = ("cu_seqlens", "cu_seqlens_padded", "spans", "max_seqlen", "num_tokens_global", "step", "index", "cp_ranks")


def of_job(
    path: Path, topology: Topology, leaders: Leaders, *, roles: dict[int, Role] | None = None, **options: Any
) -> list[Rank]:
    """Each rank with its microbatches, digests and figures."""

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        for one in loader:
            rank.microbatches.append(one)
            if one.is_last_of_step:
                rank.digests.append(loader.order_digest)
        rank.result = loader.stats()

    tree = ClientPlaceTree.from_topology(topology, leaders=leaders, roles=roles)
    return run_job(path, tree, program=program, max_steps=3, **options)


def readers_of(ranks: list[Rank]) -> list[int]:
    """The ranks whose leader has read something."""
    for rank in ranks:
        assert (rank.result["bytes_read"] > 0) == (rank.result["bytes_served"] > 0)
    return [number for number, rank in enumerate(ranks) if rank.result["bytes_read"]]


def assert_alike(ranks: list[Rank], others: list[Rank]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, RowLists):
            value = value.values
        return value.tolist() if isinstance(value, torch.Tensor) else value

    for one, other in zip(ranks, others, strict=True):
        assert one.digests == other.digests and one.state == other.state
        for ours, theirs in zip(one.microbatches, other.microbatches, strict=True):
            for name in FIELDS + SHAPES:
                assert plain(getattr(ours, name)) == plain(getattr(theirs, name)), name
            assert {key: plain(rows) for key, rows in ours.rows.items()} == {
                key: plain(rows) for key, rows in theirs.rows.items()
            }


@pytest.mark.parametrize("method", ["best_fit", "concat", "whole"])
def test_the_leader_of_a_middle_stage_reads_nothing(method: str, tmp_path: Path) -> None:
    path = with_runs(write_job(tmp_path)) if method == "whole" else write_job(tmp_path, method=method)
    topology = Topology(pp=4, cp=2)
    ranks = of_job(path, topology, "stage")
    assert readers_of(ranks) == [0, 1, 6, 7]
    assert_alike(ranks, of_job(path, topology, "replica"))


def test_what_follows_from_texts_alone_is_read_for_every_stage(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("resets", "rows")]
    for folder in folders:
        folder.mkdir()
    resets = write_resets(folders[0], packing="{method: concat}")
    rows = write_job(folders[1])
    functions = write_functions(folders[1])
    text = "prose.parquet, text: text"
    rows.write_text(rows.read_text().replace(text, f'{text}, map: "{functions}:letters"'))
    index_recipe(load_recipe(rows), folders[1])
    for path in (resets, rows):
        ranks = of_job(path, Topology(pp=3), "stage")
        assert readers_of(ranks) == [0, 1, 2]
        assert_alike(ranks, of_job(path, Topology(pp=3), "replica"))
    assert any(one.rows for one in ranks[1].microbatches)


def test_a_stage_that_predicts_tokens_and_the_leader_that_counts_bad_rows_read(tmp_path: Path) -> None:
    path = write_pages(tmp_path)
    damage(path, range(0, 400, 3))
    predicting = {2: Role(stage="only", cp_rank=0)}
    for leaders, roles, expected in (
        ("stage", None, [0, 3]),
        ("stage", predicting, [0, 2, 3]),
        ({0: 2, 1: 1, 2: 2, 3: 2}, None, [0, 1, 2, 3]),  # rank 1 is the first that leads
        ({0: 0, 1: 2, 2: 2, 3: 3}, None, [0, 3]),
    ):
        ranks = of_job(path, Topology(pp=4), leaders, roles=roles)
        assert readers_of(ranks) == expected
        wanted = of_job(path, Topology(pp=4), "replica", roles=roles)
        assert_alike(ranks, wanted)
        assert ranks[1].result["masked_tokens"] == wanted[1].result["masked_tokens"] > 0


@pytest.mark.parametrize("topology", [Topology(cp=2, pp=3), Topology(dp=2, cp=2)])
def test_ranks_that_all_lead_get_slices_and_fields_of_their_role(topology: Topology, tmp_path: Path) -> None:
    path, alone = write_job(tmp_path), {rank: rank for rank in range(topology.world_size)}
    assert_alike(of_job(path, topology, alone), of_job(path, topology, "replica"))


@pytest.mark.slow
def test_node_workers_give_stages_the_same_where_replicas_are_apart_too(tmp_path: Path) -> None:
    path, topology = write_job(tmp_path), Topology(pp=4)
    wanted = of_job(path, topology, "replica")
    with threaded_children():
        assert_alike(of_job(path, topology, "stage", loaders="node"), wanted)
        two, leaders = Topology(pp=3).among(0, 2), {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 4}
        apart = of_job(path, two, leaders, loaders="node", group_ranks=3, elastic=True)
    assert_alike(apart, of_job(path, two, "replica"))
