"""Loaders of `packing: {method: whole}`: resumes, other layouts, replays, bad pages, the node worker, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.stateful.test_bad_pages import damage, rows_in
from tests.stateful.test_bad_pages import write_job as write_pages
from tests.stateful.test_reshard import resharded
from tests.support.loaders import Rank, open_job, run_job, same_microbatches, write_job
from tests.support.maps import write_functions
from tests.support.threaded_children import threaded_children
from torchmix.cli.main import main
from torchmix.errors import LengthUnknown, RecipeError, StateMismatch, TopologyError
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader

COST = "cost: {per_token: 100, per_pair: 1}"
LAYOUT = Topology(dp=2, cp=4)


def with_runs(recipe: Path, name: str = "runs", *, rank_tokens: int = 40) -> Path:
    """The recipe with runs of ranks; another file, the same catalog."""
    kept = [line for line in recipe.read_text().splitlines() if not line.startswith(("packing:", "balance:"))]
    found = recipe.with_name(f"{name}.yaml")
    context = f"context: {{rank_tokens: {rank_tokens}, per_exchanged: 60}}"
    kept += ["packing: {method: whole}", f"balance: {{{context}, {COST}}}", ""]
    found.write_text("\n".join(kept))
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return with_runs(write_job(tmp_path))


def in_same_runs(some: Rank, others: Rank) -> bool:
    runs = [[one.cp_ranks for one in rank.microbatches] for rank in (some, others)]
    return runs[0] == runs[1] and same_microbatches(some.microbatches, others.microbatches)


def test_a_state_inside_a_step_goes_on_in_the_same_runs_and_in_no_others(recipe: Path) -> None:
    whole = run_job(recipe, LAYOUT, steps=3)
    parts = [len([one for one in whole[0].microbatches if one.step == step]) for step in range(3)]
    assert min(parts) > 1 and len({one.cp_size for rank in whole for one in rank.microbatches}) > 1
    inside = parts[0] + 1
    before = run_job(recipe, LAYOUT, microbatches=inside)
    after = run_job(recipe, LAYOUT, state=before[5].state, microbatches=sum(parts) - inside)
    for rank, first, rest in zip(whole, before, after, strict=True):
        joined = Rank(microbatches=[*first.microbatches, *rest.microbatches])
        assert in_same_runs(joined, rank) and rest.digests == rank.digests[1:]
    others = with_runs(recipe, "others", rank_tokens=24)
    with pytest.raises(StateMismatch, match="saved inside step 1, whose samples are placed otherwise now"):
        run_job(others, LAYOUT, state=before[0].state, microbatches=1)
    with pytest.raises(StateMismatch, match="saved inside step 1, whose samples are placed otherwise now"):
        run_job(recipe, Topology(dp=2, cp=2), state=before[0].state, microbatches=1)
    with pytest.raises(StateMismatch, match="saved inside step 1, after 1 microbatches of dp 2"):
        run_job(recipe, Topology(dp=4, cp=2), state=before[0].state, microbatches=1)

    def from_step_start(loader: StatefulDataLoader, rank: Rank) -> None:
        loader.load_state_dict(before[0].state, from_step_start=True)
        rank.digests = [loader.order_digest for one in loader if one.is_last_of_step][:2]

    for rank in run_job(others, Topology(dp=3), program=from_step_start, max_steps=3):
        assert rank.digests == whole[0].digests[1:]


@pytest.mark.slow
def test_a_job_goes_on_at_other_layouts_and_replays_its_plan(recipe: Path, tmp_path: Path) -> None:
    layouts = [Topology(dp=8), Topology(dp=2, cp=2, tp=2), Topology(cp=4, pp=2)]
    ranks = resharded(recipe, layouts)
    state: dict[str, Any] | None = None
    for place, layout in enumerate(layouts):
        expected = run_job(recipe, layout, steps=2, state=state)
        for rank, wanted in zip(ranks, expected, strict=True):
            found: Rank = rank.result[place]
            assert in_same_runs(found, wanted) and (found.digests, found.state) == (wanted.digests, wanted.state)
        state = expected[0].state
    plan = tmp_path / "plan"
    assert main(["plan", str(recipe), "--quiet", "--steps", "3", "--dp", "8", "--out", str(plan)]) == 0
    for layout in layouts[1:]:
        replayed, wanted = (run_job(recipe, layout, steps=2, **kind) for kind in ({"replay": plan, "max_steps": 3}, {}))
        assert all(in_same_runs(one, other) for one, other in zip(replayed, wanted, strict=True))


def test_a_node_worker_and_stages_with_leaders_of_their_own_give_the_same(recipe: Path) -> None:
    layout = Topology(cp=2, pp=2, dp=2)
    wanted = run_job(recipe, layout, steps=2)
    tree = ClientPlaceTree.from_topology(layout, leaders="stage")
    for rank, other in zip(run_job(recipe, tree, steps=2), wanted, strict=True):
        assert in_same_runs(rank, other)
    with threaded_children():
        for rank, other in zip(run_job(recipe, layout, steps=2, loaders="node"), wanted, strict=True):
            assert in_same_runs(rank, other) and rank.state == other.state


def test_a_bad_page_of_a_document_over_several_replicas_counts_once(tmp_path: Path) -> None:
    recipe = with_runs(write_pages(tmp_path), rank_tokens=8)
    layout = Topology(dp=8)

    def consume(loader: StatefulDataLoader, rank: Rank) -> None:
        for one in loader:
            rank.microbatches.append(one)
        rank.result = loader.stats()

    sound = run_job(recipe, layout, program=consume, max_steps=2)
    of_row: dict[int, list[int]] = {}
    for number, rank in enumerate(sound):
        for row in rows_in([one for one in rank.microbatches if one.cp_size > 1 and one.step == 1], source=1):
            of_row.setdefault(row, []).append(number)
    row = next(row for row, holders in of_row.items() if len(holders) > 1)
    damage(recipe, [row])
    found = run_job(recipe, layout, program=consume, max_steps=2)
    [alone] = run_job(with_runs(recipe, "alone", rank_tokens=64), Topology(), program=consume, max_steps=2)
    tokens = alone.result["bad_tokens_of_source"]["web"]
    assert 16 <= tokens <= 20 and alone.result["masked_tokens"] == tokens - 1
    for rank in found:
        assert rank.result["bad_tokens_of_source"] == {"web": tokens} and rank.result["masked_tokens"] == tokens - 1
        last = rank.microbatches[-1]
        assert last.num_tokens_global == alone.microbatches[-1].num_tokens_global
    labels = sum(int(one.loss_mask.sum()) for rank in found for one in rank.microbatches if one.step == 1)
    assert labels == found[0].microbatches[-1].num_tokens_global


def test_a_step_has_as_many_microbatches_as_its_plan_says(recipe: Path) -> None:
    def consume(loader: StatefulDataLoader, rank: Rank) -> None:
        with pytest.raises(LengthUnknown, match=r"with balance\.context each step has as many microbatches"):
            len(loader)
        told = [loader.num_microbatches]
        for one in loader:
            assert loader.num_microbatches == told[-1] or one.is_last_of_step
            rank.microbatches.append(one)
            if one.is_last_of_step:
                assert loader.stats()["step"] == one.step
                assert told.pop() == one.index + 1
                told.append(loader.num_microbatches)
        assert told == [0]

    ranks = run_job(recipe, LAYOUT, program=consume, max_steps=3)
    assert len({len(rank.microbatches) for rank in ranks}) == 1


def test_a_rank_without_a_document_has_a_few_tokens_without_loss(tmp_path: Path) -> None:
    recipe = with_runs(write_job(tmp_path, samples=1), rank_tokens=66)
    recipe.write_text(recipe.read_text().replace("per_exchanged: 60", "sizes: [1], align: 3"))
    ranks = run_job(recipe, Topology(dp=8, pp=2), steps=2)
    empty = 0
    for rank in ranks:
        for one in rank.microbatches:
            assert one.cp_size == 1 and not int(one.cu_seqlens_padded[-1]) % 3
            if int(one.cu_seqlens[-1]):
                continue
            empty += 1
            assert one.cu_seqlens.tolist() == [0, 0] and one.cu_seqlens_padded.tolist() == [0, 3]
            if one.tokens is not None:
                assert one.tokens.tolist() == [[0, 0, 0]] == one.position_ids.tolist()
            if one.loss_mask is not None:
                assert one.loss_mask.tolist() == [[0.0, 0.0, 0.0]] and one.source_index.tolist() == [[-1, -1, -1]]
    assert empty > 4


def test_what_runs_cannot_hold_is_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="does not fit the longest run of this job, 1 of its 1 ranks"):
        open_job(recipe, Topology())
    with pytest.raises(TopologyError, match=r"micro_batch_size 2: with packing\.method: whole"):
        open_job(recipe, LAYOUT, micro_batch_size=2)
    lists = recipe.with_name("lists.yaml")
    mapped = f'text: text, map: "{write_functions(tmp_path)}:letters"'
    text = recipe.read_text().replace("text: text, tokenizer: bytes", mapped, 1)
    lists.write_text(f"{text}catalog: of-lists\n")
    with pytest.raises(RecipeError, match=r"sources\.prose\.map: gives lists of numbers beside ids"):
        run_job(lists, LAYOUT, steps=1)
