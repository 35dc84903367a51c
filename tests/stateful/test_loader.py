"""What the user holds: iteration, state of the last consumed microbatch, a second iter, reloading, closing, figures."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import yaml
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

from tests.support.loaders import Rank, open_job, run_job, same_microbatches, same_tensors, take, write_job
from tests.support.threads import own_threads
from torchmix.errors import (
    LengthUnknown,
    LoaderClosed,
    OptionError,
    RecipeError,
    SourceUnreadable,
    StateError,
    StateMismatch,
    TopologyError,
)
from torchmix.parallel.place_tree import ClientPlaceTree, LeaderChoice
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful import stream
from torchmix.stateful.arguments import _facts
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.steps import state as states


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def first_microbatches(job: Path, count: int) -> Rank:
    return run_job(job, Topology(), microbatches=count)[0]


def test_it_is_a_torchdata_loader(job: Path) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        assert isinstance(loader, TorchdataLoader)
        assert isinstance(loader, StatefulDataLoader)


def test_one_process_needs_no_torchrun(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with build_loader(str(job), loaders="in_process") as loader:
        microbatch = next(iter(loader))
    assert microbatch.tokens is not None and microbatch.tokens.shape == (1, 64)
    assert (microbatch.step, microbatch.index, microbatch.is_last_of_step) == (0, 0, False)


def test_a_second_iter_continues(job: Path) -> None:
    expected = first_microbatches(job, 20).microbatches
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        found = [*islice(iter(loader), 5), *islice(iter(loader), 9), *islice(loader, 6)]
    assert same_microbatches(expected, found)


def test_the_state_is_that_of_the_last_microbatch_handed_out(job: Path) -> None:
    whole = first_microbatches(job, 30)
    for stop in (0, 1, 7, 8, 9, 16, 21):
        state = run_job(job, Topology(), microbatches=stop, look_ahead=4)[0].state
        rest = run_job(job, Topology(), microbatches=30 - stop, state=state)[0]
        assert same_microbatches(whole.microbatches[stop:], rest.microbatches), stop
        assert rest.digests == whole.digests[stop // 8 :]
        assert rest.state == whole.state


@pytest.mark.parametrize("tp", [1, 2])
def test_states_are_written_and_read_when_somebody_asks(tp: int, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[[Any], Any]:
        call = getattr(states, name)

        def count(value: Any) -> Any:
            calls[name] += 1
            return call(value)

        return count

    for name in ("_encode_loader_state", "_decode_loader_state"):
        monkeypatch.setattr(states, name, counted(name))
    run_job(job, Topology(tp=tp), microbatches=24)  # three steps; then each rank gives its state
    if tp == 1:
        assert calls == {"_encode_loader_state": 1}
    else:  # a step goes to the peer with its state, which the peer reads once it is asked
        assert calls["_encode_loader_state"] >= 3
        assert calls["_decode_loader_state"] == 1


def test_loading_into_a_running_loader_discards_what_was_ahead(job: Path) -> None:
    whole = first_microbatches(job, 24)
    with build_loader(job, topology=Topology(), loaders="in_process", look_ahead=3) as loader:
        rank = Rank()
        take(loader, rank, 11)
        state = loader.state_dict()
        running = iter(loader)
        take(loader, rank, 6)
        loader.load_state_dict(state)
        again = list(islice(running, 13))
    assert same_microbatches(whole.microbatches[11:], again)


def test_inside_a_step_another_layout_may_go_back_to_its_start(job: Path) -> None:
    whole = first_microbatches(job, 24)
    state = run_job(job, Topology(), microbatches=11)[0].state

    def resume(loader: StatefulDataLoader, rank: Rank) -> None:
        with pytest.raises(StateMismatch, match="inside step 1"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, from_step_start=True)
        take(loader, rank, 8)

    ranks = run_job(job, Topology(dp=2), program=resume)
    assert [rank.digests for rank in ranks] == [whole.digests[1:3]] * 2


def test_it_ends_before_max_steps_also_after_a_resume(job: Path) -> None:
    ended = run_job(job, Topology(), microbatches=None, max_steps=2)[0]
    assert [m.step for m in ended.microbatches] == [0] * 8 + [1] * 8
    rest = run_job(job, Topology(), microbatches=None, max_steps=3, state=ended.state)[0]
    assert [m.step for m in rest.microbatches] == [2] * 8
    assert rest.digests == run_job(job, Topology(), steps=3)[0].digests[2:]


def test_the_callers_random_numbers_stay_what_they_are(job: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first_microbatches(job, 3)
    assert torch.equal(torch.rand(4), expected)


def test_a_closed_loader_says_so_and_leaves_no_thread(job: Path) -> None:
    before = set(threading.enumerate())
    loader = build_loader(job, topology=Topology(), loaders="in_process")
    iterator = iter(loader)
    next(iterator)
    assert own_threads()
    loader.close()
    loader.close()
    assert set(threading.enumerate()) <= before
    for call in (lambda: next(iterator), loader.__enter__, lambda: loader.load_state_dict({})):
        with pytest.raises(LoaderClosed):
            call()


def test_stats_tell_of_the_step_in_hand(job: Path) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        assert set(loader.stats()) == {"data_wait_s", "total_data_wait_s", "workers_lost", "native"}
        microbatches = list(islice(iter(loader), 8))
        stats = loader.stats()
    tokens = {"prose": 0, "tiny": 0, "web": 0}
    for microbatch in microbatches:
        for index, name in enumerate(sorted(tokens)):
            tokens[name] += int((microbatch.source_index == index).sum())
    assert stats["tokens_of_source"] == tokens
    assert stats["step"] == 0
    assert stats["fill"] == sum(tokens.values()) / (8 * 64)
    assert 1 <= stats["balance_ratio"] <= stats["hash_order_ratio"]
    assert stats["decode_amplification"] >= 1
    assert 0 < stats["read_s"] < 60, "of the step"
    assert stats["total_read_s"] > 0 and stats["total_decode_s"] > 0


def test_all_ranks_hold_equal_states_and_figures(job: Path) -> None:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        take(loader, rank, 3)
        rank.result = loader.stats()

    ranks = run_job(job, Topology(tp=2, pp=2, dp=2), program=program)
    assert all(rank.state == ranks[0].state for rank in ranks)
    assert all(rank.result["tokens_of_source"] == ranks[0].result["tokens_of_source"] for rank in ranks)


def test_a_job_can_load_a_state_while_it_runs(job: Path) -> None:
    whole = run_job(job, Topology(), steps=6)[0]

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        per_step = loader.num_microbatches
        take(loader, rank, 2 * per_step)
        state = loader.state_dict()
        take(loader, rank, 2 * per_step)
        loader.load_state_dict(state)
        take(loader, rank, 4 * per_step)

    for rank in run_job(job, Topology(tp=2, dp=2), program=program):
        assert rank.digests == whole.digests[:4] + whole.digests[2:6]


def test_leaders_that_stop_at_different_steps_still_close(job: Path) -> None:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        # What is prepared ahead differs between ranks: one has asked for nothing, another for three steps.
        take(loader, rank, loader.num_microbatches * {0: 3, 1: 3, 2: 3, 3: 3}[loader._tree.topology.rank])

    assert len(run_job(job, Topology(dp=4), program=program, look_ahead=4)) == 4


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({"micro_batch_size": 0}, OptionError, "micro_batch_size"),
        ({"loaders": "node_worker"}, OptionError, "did you mean 'node'"),
        ({"look_ahead": 0}, OptionError, "look_ahead"),
        ({"max_steps": -1}, OptionError, "max_steps"),
        ({"one_pass": "no"}, OptionError, "one_pass='no' must be True or False"),
        ({"topology": (1, 1, 1)}, OptionError, r"topology=\(1, 1, 1\) must be a torchmix.Topology"),
        ({"recipe": 3}, OptionError, "recipe=3 must be the path of a YAML file"),
        ({"micro_batch_size": 3}, TopologyError, "does not divide"),
        ({"topology": Topology(cp=8)}, TopologyError, "align_tokens"),
        ({"topology": Topology(dp=2)}, TopologyError, "init_process_group"),
    ],
)
def test_wrong_arguments_are_named(job: Path, bad: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        build_loader(**{"recipe": job, "topology": Topology(), "loaders": "in_process", **bad})


def test_a_file_that_is_missing_is_one_error_and_no_chain(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nseed: 1\nbatch: {samples: 4, length: 64}\n"
        "sources: {web: {path: none.parquet, tokens: ids}}\nmixture: {web: 1}\n"
    )
    with pytest.raises(SourceUnreadable, match="is missing in") as caught:
        build_loader(recipe, topology=Topology(), loaders="in_process")
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_a_recipe_may_be_a_mapping_with_the_keys_of_a_file(job: Path) -> None:
    mapping = yaml.safe_load(job.read_text(encoding="utf-8"))
    whole = first_microbatches(job, 4)
    with build_loader(mapping, directory=job.parent, topology=Topology(), loaders="in_process") as loader:
        assert same_microbatches(list(islice(loader, 4)), whole.microbatches)
    with pytest.raises(RecipeError, match=r"sources.*: unknown key .*did you mean"):
        name = next(iter(mapping["sources"]))
        wrong = {**mapping["sources"], name: {**mapping["sources"][name], "max_epoch": 1}}
        build_loader({**mapping, "sources": wrong}, directory=job.parent, loaders="in_process")


def test_a_loader_with_an_end_has_a_length(job: Path) -> None:
    options = {"topology": Topology(), "micro_batch_size": 2, "loaders": "in_process"}
    with build_loader(job, max_steps=3, **options) as loader:
        assert len(loader) == len(list(loader)) == 3 * loader.num_microbatches
    with build_loader(job, max_steps=3, start_step=1, **options) as loader:
        assert len(loader) == len(list(loader))
    with build_loader(job, max_steps=1, start_step=3, **options) as loader:
        assert len(loader) == 0 and loader
    for endless in ({}, {"max_steps": 3, "one_pass": True}):
        with build_loader(job, **options, **endless) as loader:
            assert loader, "is one, whatever its length"
            with pytest.raises(LengthUnknown, match="needs max_steps"):
                len(loader)
            assert operator.length_hint(loader, 7) == 7, "so that list(loader) works"


def test_a_job_that_the_environment_does_not_know_is_not_taken_for_single_ranks(
    job: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", torch.distributed.HashStore)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TopologyError, match=r"has 4 ranks, .* give 1; pass topology="):
        build_loader(job, loaders="in_process")
    assert not caplog.records
    build_loader(job, topology=Topology(), loaders="in_process").close()
    assert "of 4 ranks, this one opens a loader for itself alone" in caplog.text


def test_several_workers_of_another_loader_are_refused(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        monkeypatch.setattr(stream, "get_worker_info", lambda: SimpleNamespace(num_workers=2))
        with pytest.raises(OptionError, match="num_workers=2 would give each step as often"):
            iter(loader.dataset)


@pytest.mark.parametrize("state", [{}, {"torchmix_state": "text"}, {"torchmix_state": b"other"}, b"bytes", None])
def test_a_foreign_state_is_refused_and_changes_nothing(job: Path, state: object) -> None:
    whole = first_microbatches(job, 4)
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        found = list(islice(loader, 2))
        with pytest.raises(StateError):
            loader.load_state_dict(state)  # type: ignore[arg-type]
        found += islice(loader, 2)
    assert same_microbatches(whole.microbatches, found)


def test_two_jobs_of_one_process_do_not_meddle(job: Path) -> None:
    first, second = (open_job(job, Topology())[0] for _ in range(2))
    with first, second:
        for one, other in zip(islice(first, 10), islice(second, 10), strict=True):
            assert same_tensors(one, other)


def test_what_ranks_compare_names_each_key_of_the_recipe(job: Path) -> None:
    recipe, tree = load_recipe(job), ClientPlaceTree.from_topology(Topology(dp=2))
    sources = {**recipe.sources, "web": msgspec.structs.replace(recipe.sources["web"], tokens="ids")}
    other = msgspec.structs.replace(recipe, seed=recipe.seed + 1, sources=sources)
    facts, others = (_facts(part_of(each, "train"), tree, job.parent) for each in (recipe, other))
    assert {name for name in facts if facts[name] != others[name]} == {"seed", "sources.web"}


@pytest.mark.parametrize("leaders", ["node", "stage"])
def test_several_leaders_of_a_replica_give_what_one_does(leaders: LeaderChoice, tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    topology = Topology(tp=2, pp=2, dp=2)
    expected = run_job(recipe, topology, steps=3)
    tree = ClientPlaceTree.from_topology(topology, leaders=leaders, ranks_per_node=4)
    assert len(tree.leaders) == 4
    for one, other in zip(expected, run_job(recipe, tree, steps=3), strict=True):
        assert same_microbatches(one.microbatches, other.microbatches)
        assert (one.digests, one.state) == (other.digests, other.state)
