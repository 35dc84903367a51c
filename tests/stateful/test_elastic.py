"""Loaders of ranks that come and go: any number of ranks gets the same samples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.pairs.columns import DEFAULTS
from tests.pairs.runner import run_row
from tests.support.loaders import Rank, run_job, same_microbatches, take, write_job
from tests.support.worlds import run_ranks
from torchmix.errors import OptionError, StateError, StateMismatch, TopologyError
from torchmix.parallel.fan_out import FanOut, apart, local_world
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader

STEPS = 2
UNEVEN = [(3, 1), (3, 2), (5, 1), (7, 2)]


def samples_of(ranks: list[Rank], step: int) -> Counter[tuple[int, ...]]:
    """The samples of a step that have loss: their ids and labels."""
    found: Counter[tuple[int, ...]] = Counter()
    for microbatch in (one for rank in ranks for one in rank.microbatches if one.step == step):
        assert microbatch.tokens is not None and microbatch.labels is not None and microbatch.loss_mask is not None
        for tokens, labels, mask in zip(microbatch.tokens, microbatch.labels, microbatch.loss_mask, strict=True):
            if mask.any():
                found[(*tokens.tolist(), *labels.tolist(), *mask.int().tolist())] += 1
            else:
                assert not tokens.any()
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(
        tmp_path_factory.mktemp("elastic"), samples="[{from_step: 0, samples: 8}, {from_step: 1, samples: 10}]"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "size"), UNEVEN)
def test_any_number_of_ranks_has_the_samples_of_one(recipe: Path, dp: int, size: int) -> None:
    whole = run_job(recipe, Topology(), steps=STEPS)
    ranks = run_job(recipe, Topology(dp=dp), steps=STEPS, micro_batch_size=size, elastic=True)
    assert all(rank.digests == whole[0].digests for rank in ranks)
    for step, samples in enumerate((8, 10)):
        assert samples_of(ranks, step) == samples_of(whole, step)
        held = [sum(one.step == step for one in rank.microbatches) for rank in ranks]
        assert held == [-(-samples // (dp * size))] * dp
    totals = [{one.step: one.num_tokens_global for one in rank.microbatches} for rank in (*whole, *ranks)]
    assert all(total == totals[0] for total in totals)


@pytest.mark.slow
def test_its_state_goes_on_at_any_layout_and_inside_a_step_at_its_own(recipe: Path) -> None:
    whole = run_job(recipe, Topology(), steps=STEPS)
    first = run_job(recipe, Topology(dp=3), microbatches=2, elastic=True)[0].state
    rest = run_job(recipe, Topology(dp=3), steps=STEPS, state=first, elastic=True)
    assert rest[0].digests == whole[0].digests
    with pytest.raises(StateMismatch, match="after 2 microbatches of dp 3"):
        run_job(recipe, Topology(dp=2), steps=STEPS, state=first)
    after = run_job(recipe, Topology(dp=3), steps=1, elastic=True)[0].state
    resumed = run_job(recipe, Topology(), steps=1, state=after)
    assert same_microbatches(resumed[0].microbatches, [one for one in whole[0].microbatches if one.step])


def test_its_length_counts_the_microbatches_of_every_step(recipe: Path) -> None:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        rank.result = loader.num_microbatches, len(loader)
        rank.microbatches.extend(loader)

    [rank, *_] = run_job(recipe, Topology(dp=3), max_steps=3, elastic=True, program=program)
    assert (rank.result, len(rank.microbatches)) == ((3, 11), 3 + 4 + 4)
    [rank, *_] = run_job(recipe, Topology(dp=3), max_steps=3, start_step=2, elastic=True, program=program)
    assert (rank.result, len(rank.microbatches)) == ((4, 4), 4)


def test_without_it_samples_must_divide(recipe: Path) -> None:
    with pytest.raises(TopologyError, match=r"8 samples does not divide by dp 3.*or say elastic"):
        build_loader(recipe, topology=Topology(dp=3), loaders="in_process")
    with pytest.raises(OptionError, match="elastic=1 must be True or False"):
        build_loader(recipe, topology=Topology(), loaders="in_process", elastic=1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_masked_microbatch_has_no_loss_and_no_document(recipe: Path) -> None:
    ranks = run_job(recipe, Topology(dp=7), steps=1, elastic=True)
    masked = [one for rank in ranks for one in rank.microbatches if not one.loss_mask.any()]  # type: ignore[union-attr]
    assert len(masked) == 6
    for one in masked:
        assert one.tokens is not None and one.source_index is not None
        assert torch.equal(one.source_index, torch.full_like(one.source_index, -1))


def test_replicas_that_are_apart_have_the_samples_of_one(recipe: Path) -> None:
    whole = run_job(recipe, Topology(), steps=STEPS)
    ranks = []
    for rank in range(3):  # one after the other: nobody waits for another one
        topology = Topology(dp=3, rank=rank)
        options = {"loaders": "in_process", "elastic": True}
        with build_loader(recipe, topology=topology, fan_out=apart(topology), **options) as loader:
            ranks.append(Rank())
            take(loader, ranks[-1], None, steps=1)
            state, alone = loader.state_dict(), Topology(dp=2, rank=rank % 2)
            loader.reshard(alone, 1, fan_out=apart(alone), state_dict=state)
            if rank < 2:
                take(loader, ranks[-1], None, steps=2)
    assert [rank.digests for rank in ranks] == [whole[0].digests, whole[0].digests, whole[0].digests[:1]]
    for step in range(STEPS):
        assert samples_of(ranks, step) == samples_of(whole, step)


@pytest.mark.parametrize("group", [Topology(tp=2, pp=2), Topology(pp=2, dp=2), Topology(cp=2)])
@pytest.mark.slow
def test_ranks_of_groups_apart_have_what_they_have_in_one_job_and_go_on_among_other_groups(
    recipe: Path, group: Topology
) -> None:
    size, whole = group.world_size, ClientPlaceTree.from_topology(group.among(0, 3), leaders="stage")
    expected = run_job(recipe, whole, steps=STEPS, elastic=True)
    ends, later = local_world(whole, group_ranks=size), local_world(whole, group_ranks=size)
    alone = [local_world(group.among(0, 1), group_ranks=size) for _ in range(3)]

    def consume(end: FanOut) -> Rank:
        rank, number = Rank(), end.tree.topology.rank
        fewer, again = alone[number // size][number % size], later[number]
        with build_loader(recipe, topology=end.tree, fan_out=end, loaders="in_process", elastic=True) as loader:
            take(loader, rank, None, steps=1)
            loader.reshard(fewer.tree, 1, fan_out=fewer, state_dict=loader.state_dict())
            rank.result = loader.num_microbatches
            loader.reshard(again.tree, 1, fan_out=again)
            take(loader, rank, None, steps=2)
        return rank

    for first in range(0, 3 * size, size):  # one group after the other: none waits for another one
        for rank, wanted in zip(
            run_ranks(ends[first : first + size], consume, deadline_s=120), expected[first:], strict=False
        ):
            assert rank.digests == wanted.digests
            assert same_microbatches(rank.microbatches, wanted.microbatches)
            assert rank.result == 10 // group.dp


def test_groups_that_are_no_whole_replicas_are_refused() -> None:
    with pytest.raises(TopologyError, match="groups of 1 neighbouring ranks are no whole replicas of tp 2"):
        apart(Topology(tp=2, dp=2))
    with pytest.raises(TopologyError, match="of 2 neighbouring ranks are no whole replicas"):
        local_world(Topology(pp=2, dp=2), group_ranks=2)  # stages are not neighbours in Megatron's order
    with pytest.raises(TopologyError, match="of 3 neighbouring ranks are no whole replicas"):
        local_world(Topology(dp=4), group_ranks=3)
    with pytest.raises(TopologyError, match="group number 2 is not in"):
        Topology().among(2, 2)


def test_what_needs_to_hear_of_others_is_refused_apart(recipe: Path) -> None:
    with pytest.raises(OptionError, match="come and go; pass elastic=True"):
        build_loader(recipe, topology=Topology(dp=2), fan_out=apart(Topology(dp=2)), loaders="in_process")
    given = Topology(dp=2)
    text = recipe.read_text(encoding="utf-8").replace("tokens: input_ids}", "tokens: input_ids, bad_rows: mask}")
    masking = recipe.with_name("masking.yaml")
    masking.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match="sources web mask bad rows, and replicas that are apart"):
        build_loader(masking, topology=given, fan_out=apart(given), loaders="in_process", elastic=True)
    resetting = recipe.with_name("resetting.yaml")
    resetting.write_text(text.replace("bad_rows: mask", "reset_id: 7"), encoding="utf-8")
    with pytest.raises(OptionError, match="the reset_id of sources web has no loss, and replicas that are apart"):
        build_loader(resetting, topology=given, fan_out=apart(given), loaders="in_process", elastic=True)
    with_module = recipe.with_name("module.yaml")
    with_module.write_text(recipe.read_text(encoding="utf-8") + "modules: {encoder: {}}\n", encoding="utf-8")
    with pytest.raises(OptionError, match="rows of modules encoder travel between ranks of all replicas"):
        build_loader(with_module, topology=given, fan_out=apart(given), loaders="in_process", elastic=True)


def test_an_exchange_of_other_ranks_is_refused_before_each_has_samples_of_others(recipe: Path) -> None:
    second, options = Topology(dp=4, rank=2), {"loaders": "in_process", "elastic": True, "max_steps": 2}
    for asked in (None, Topology(dp=4, rank=1), Topology(dp=2, rank=0)):
        with pytest.raises(TopologyError, match="fan_out as rank 2 of 4; make fan_out of the topology that you pass"):
            build_loader(recipe, topology=asked, fan_out=apart(second), **options)
    with build_loader(recipe, topology=second, fan_out=apart(second), **options) as loader:
        state = loader.state_dict()
        with pytest.raises(TopologyError, match="reshard: the topology has this as rank 0 of 3, fan_out as rank 1 of"):
            loader.reshard(Topology(dp=3), 0, fan_out=apart(Topology(dp=3, rank=1)), state_dict=state)
        assert [microbatch.step for microbatch in loader if microbatch.is_last_of_step] == [0, 1]


def test_replicas_apart_count_for_all_what_has_no_loss(tmp_path: Path) -> None:
    row = {**DEFAULTS, "rows": "chats", "tokenizer": "bytes", "layout": "dp", "replicas": "apart"}
    assert run_row(row, tmp_path).tokens


def test_what_does_not_fit_other_ranks_is_refused_and_changes_nothing(recipe: Path) -> None:
    options = {"loaders": "in_process"}
    with (
        build_loader(recipe, topology=Topology(), **options) as loader,
        pytest.raises(OptionError, match="elastic=True"),
    ):
        loader.reshard(Topology(), 0, state_dict=loader.state_dict())
    [wanted] = run_job(recipe, Topology(), steps=STEPS)
    with build_loader(recipe, topology=Topology(), elastic=True, **options) as loader:
        found = Rank()
        take(loader, found, None, steps=1)
        state = loader.state_dict()
        with pytest.raises(StateError, match="at_step=3, and the state is at step 1, microbatch 0"):
            loader.reshard(Topology(), 3, state_dict=state)
        with pytest.raises(StateError, match="expected the dict that state_dict"):
            loader.reshard(Topology(), 1, state_dict={})
        with pytest.raises(OptionError, match=r"topology=4 must be a torchmix\.Topology"):
            loader.reshard(4, 1, state_dict=state)  # type: ignore[arg-type]
        take(loader, found, None, steps=2)
        loader.reshard(Topology(), 1, state_dict=state)
        assert loader.order_digest == wanted.digests[0], "the step that is thrown away comes again"
        take(loader, found, None, steps=3)
    assert found.digests == [*wanted.digests, wanted.digests[1]]
