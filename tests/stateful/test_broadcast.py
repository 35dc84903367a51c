"""`balance.broadcast_at`: a trainer that sends tokens and labels along an axis gets them on its first rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stateful.test_runs_of_ranks import with_runs
from tests.support.loaders import Rank, run_job, same_microbatches, write_job
from torchmix.errors import RecipeError
from torchmix.parallel.place_tree import BroadcastAxis, ClientPlaceTree, tree_with_broadcast
from torchmix.parallel.topology import Topology

HELD = ("tokens", "labels", "loss_mask", "position_ids", "source_index")


def sending(recipe: Path, axis: str) -> Path:
    """The recipe with the key; another file, the same catalog."""
    found = recipe.with_name(f"{recipe.stem}-{axis}.yaml")
    found.write_text(recipe.read_text().replace("balance: {", f"balance: {{broadcast_at: {axis}, "))
    return found


def tree(axis: BroadcastAxis, **sizes: int) -> ClientPlaceTree:
    """As ranks see the job: the exchange of a job inside one process is made before its loaders."""
    return tree_with_broadcast(ClientPlaceTree.from_topology(Topology(**sizes)), axis)


def have_boundaries_alone(ranks: list[Rank], like: Rank) -> bool:
    pairs = [pair for rank in ranks for pair in zip(rank.microbatches, like.microbatches, strict=True)]
    assert pairs
    return all(
        all(getattr(one, name) is None for name in HELD) and one.cu_seqlens_padded.equal(other.cu_seqlens_padded)
        for one, other in pairs
    )


@pytest.mark.parametrize("loaders", ["in_process", "node"])
def test_at_cp_the_first_rank_gets_whole_samples(loaders: str, tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    whole = run_job(recipe, Topology(dp=2), steps=2)
    ranks = run_job(sending(recipe, "CP"), tree("CP", dp=2, cp=2), steps=2, loaders=loaders)
    for replica in range(2):
        first, behind = ranks[2 * replica], ranks[2 * replica + 1]
        assert same_microbatches(first.microbatches, whole[replica].microbatches)
        assert have_boundaries_alone([behind], first)
        assert [one.cp_ranks for one in first.microbatches] == [range(2 * replica, 2 * replica + 2)] * 8
    assert all(rank.digests == whole[0].digests for rank in ranks)


@pytest.mark.parametrize("method", ["best_fit", "whole"])
def test_at_pp_the_first_stage_gets_labels_too(method: str, tmp_path: Path) -> None:
    recipe = write_job(tmp_path) if method == "best_fit" else with_runs(write_job(tmp_path), rank_tokens=64)
    if method == "whole":  # the number of stages decides about runs, so the same ones are asked for their tensors
        recipe.write_text(recipe.read_text().replace("rank_tokens: 64", "rank_tokens: 64, sizes: [1]"))
    plain = run_job(recipe, Topology(pp=3, cp=2), steps=2)
    ranks = run_job(sending(recipe, "PP"), tree("PP", pp=3, cp=2), steps=2)
    for cp_rank in range(2):
        first, last = plain[cp_rank].microbatches, plain[4 + cp_rank].microbatches
        assert have_boundaries_alone([ranks[2 + cp_rank], ranks[4 + cp_rank]], plain[cp_rank])
        for one, head, tail in zip(ranks[cp_rank].microbatches, first, last, strict=True):
            assert head.labels is None and one.tokens.equal(head.tokens) and one.position_ids.equal(head.position_ids)
            assert tail.tokens is None and one.labels.equal(tail.labels) and one.loss_mask.equal(tail.loss_mask)


def test_an_axis_of_one_rank_changes_nothing(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    plain = run_job(recipe, Topology(dp=2, tp=2), steps=1)
    for axis in ("CP", "PP"):
        for rank, wanted in zip(run_job(sending(recipe, axis), Topology(dp=2, tp=2), steps=1), plain, strict=True):
            assert same_microbatches(rank.microbatches, wanted.microbatches)


def test_what_has_no_such_group_is_refused_by_name(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, extra="modules: {query: {sources: [prose], method: lpt, axis: WORLD}}")
    with pytest.raises(RecipeError, match=r"balance\.broadcast_at: CP: rows of a module go to the CP rank"):
        run_job(sending(recipe, "CP"), Topology(cp=2), steps=1)
    with pytest.raises(RecipeError, match=r"balance.broadcast_at: CP: in each microbatch other ranks"):
        run_job(sending(with_runs(write_job(tmp_path)), "CP"), Topology(cp=2), steps=1)
