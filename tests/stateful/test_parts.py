"""Parts, a first step by number, single passes: what `build_loader` gives beside a whole training run."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import LONG_S
from tests.support.files import make_text_file, random_texts
from tests.support.loaders import Rank, open_job, run_job, same_microbatches, take, write_job
from tests.support.threads import own_threads
from tests.support.worlds import run_ranks
from torchmix.cli.main import main
from torchmix.constructor.fields import Microbatch
from torchmix.errors import OptionError, RecipeError, SourceExhausted, StateMismatch
from torchmix.parallel.topology import Topology
from torchmix.planner.planner import Planner
from torchmix.planner.plans import plan
from torchmix.recipe.sources import PARTS
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader

SPLIT = "split: [60, 20, 20]"
OWN = """
validation:
  sources: {held: {path: prose.parquet, text: text, tokenizer: bytes, documents: [90%, 100%]}}
  mixture: {held: 100%}
"""


@pytest.fixture(scope="module", params=["best_fit", "concat"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp(request.param), method=request.param, samples=16, length=256, extra=SPLIT)


def method_of(job: Path) -> str:
    return "concat" if "concat" in job.parent.name else "best_fit"


def tokens_of(microbatches: list[Microbatch]) -> Counter[int]:
    counter: Counter[int] = Counter()
    for microbatch in microbatches:
        assert microbatch.tokens is not None and microbatch.source_index is not None
        counter.update(microbatch.tokens[microbatch.source_index >= 0].tolist())
    return counter


def test_parts_have_orders_of_their_own(job: Path) -> None:
    digests = {run_job(job, Topology(), steps=2, keep=False, part=part)[0].digests[-1] for part in PARTS}
    assert len(digests) == 3


@pytest.mark.slow
def test_the_passes_over_all_parts_are_the_pass_over_everything(job: Path) -> None:
    whole = job.parent / "whole.yaml"
    whole.write_text(job.read_text().replace(SPLIT, "catalog: ./whole"))
    everything = tokens_of(run_job(whole, Topology(), one_pass=True)[0].microbatches)
    parts = [tokens_of(run_job(job, Topology(), part=part, one_pass=True)[0].microbatches) for part in PARTS]
    assert sum(parts, Counter()) == everything


@pytest.mark.parametrize("topology", [Topology(dp=4), Topology(tp=2, dp=2), Topology(cp=2, pp=2)], ids=str)
def test_a_pass_ends_on_all_ranks_at_once_with_padding(job: Path, topology: Topology) -> None:
    ranks = run_job(job, topology, part="test", one_pass=True)
    alone = run_job(job, Topology(), part="test", one_pass=True)[0]
    assert [rank.digests for rank in ranks] == [alone.digests] * topology.world_size
    counts = {len(rank.microbatches) for rank in ranks}
    assert counts == {len(alone.microbatches) // topology.dp}
    last = alone.microbatches[-16:]
    assert [microbatch.index for microbatch in last] == list(range(16))
    assert sum(float(microbatch.loss_mask.sum()) for microbatch in last) == last[0].num_tokens_global
    assert sum(int((microbatch.source_index >= 0).sum()) for microbatch in last) < 16 * 256


def test_a_finished_pass_stays_finished_and_begins_again_from_its_first_state(job: Path) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process", part="test", one_pass=True) as loader:
        first = loader.state_dict()
        once = list(loader)
        end = loader.state_dict()
        assert once[-1].step + 1 == len(list(plan(job, part="test", one_pass=True)))
        assert list(loader) == []
        loader.load_state_dict(end)
        assert list(loader) == []
        loader.load_state_dict(first)
        assert same_microbatches(list(loader), once)


@pytest.mark.parametrize("start_step", [0, 1])
def test_a_pass_and_a_run_do_not_go_on_from_each_others_states(job: Path, start_step: int) -> None:
    """A pass that began inside a run, or in its second epoch, would leave documents out, and nobody would see it."""
    options = {"loaders": "in_process", "part": "test", "start_step": start_step}
    with (
        build_loader(job, topology=Topology(), one_pass=True, elastic=True, **options) as once,
        build_loader(job, topology=Topology(), elastic=True, **options) as run,
    ):
        for _ in range(3):  # nothing is planned, a step has begun, a step is consumed
            of_pass, of_run = once.state_dict(), run.state_dict()
            with pytest.raises(StateMismatch, match=r"is of a single pass, .* go on with one_pass=True"):
                run.load_state_dict(of_pass)
            with pytest.raises(StateMismatch, match=r"is of a run, .* leave it out, or begin the pass"):
                once.load_state_dict(of_run, from_step_start=True, accept_edit="0" * 16)
            with pytest.raises(StateMismatch, match=r"is of a run, "):
                once.reshard(Topology(), start_step + 1, state_dict=of_run)
            assert (once.state_dict(), run.state_dict()) == (of_pass, of_run)
            for loader in (once, run):
                list(islice(iter(loader), 8))


def test_a_pass_is_resumed_at_another_layout(job: Path) -> None:
    whole = run_job(job, Topology(), part="test", one_pass=True)[0]
    begun = run_job(job, Topology(), part="test", one_pass=True, steps=1, keep=False)[0]
    rest = run_job(job, Topology(tp=2, dp=2), part="test", one_pass=True, state=begun.state)
    assert [rank.digests for rank in rest] == [whole.digests[1:]] * 4


@pytest.mark.parametrize(
    ("topology", "loaders"),
    [
        (Topology(), "in_process"),
        (Topology(pp=2, dp=2), "in_process"),
        pytest.param(Topology(pp=2, dp=2), "node", marks=pytest.mark.system),
    ],
    ids=["one rank", "pp2 dp2", "pp2 dp2 with workers"],
)
def test_a_start_by_number_gives_what_a_run_gives_from_there(job: Path, topology: Topology, loaders: str) -> None:
    whole = run_job(job, topology, steps=6)
    later = run_job(job, topology, steps=2, start_step=4, loaders=loaders)
    for one, other in zip(whole, later, strict=True):
        assert other.digests == one.digests[4:]
        count = len(other.microbatches)
        assert same_microbatches(one.microbatches[-count:], other.microbatches)
        assert other.state == one.state


def test_a_start_by_number_can_be_saved_before_and_inside_its_first_step(job: Path) -> None:
    whole = run_job(job, Topology(), steps=4)[0]
    with build_loader(job, topology=Topology(), loaders="in_process", start_step=3) as loader:
        before = loader.state_dict()
        assert loader.order_digest == ""
        next(iter(loader))
        inside = loader.state_dict()
    assert len(before["torchmix_state"]) < 300
    for state, first in ((before, 0), (inside, 1)):
        rest = run_job(job, Topology(), microbatches=16 - first, state=state)[0]
        assert same_microbatches(whole.microbatches[48 + first :], rest.microbatches)
        assert rest.state == whole.state
    at_dp4 = run_job(job, Topology(dp=4), steps=1, state=before, keep=False)
    assert [rank.digests for rank in at_dp4] == [whole.digests[-1:]] * 4


@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2, dp=2)], ids=str)
def test_a_start_beyond_the_end_of_a_pass_gives_nothing_and_of_a_run_is_an_error(job: Path, topology: Topology) -> None:
    num_steps = len(list(plan(job, part="test", one_pass=True)))
    for start_step in (num_steps, num_steps + 7):
        ranks = run_job(job, topology, part="test", one_pass=True, start_step=start_step)
        assert [rank.microbatches for rank in ranks] == [[]] * topology.world_size
    [last, *_] = run_job(job, topology, part="test", one_pass=True, start_step=num_steps - 1)
    assert len(last.digests) == 1
    once = job.parent / "once.yaml"
    once.write_text(job.read_text().replace("tokens: input_ids}", "tokens: input_ids, max_epochs: 1}"))
    with (
        build_loader(once, topology=Topology(), loaders="in_process", start_step=1000) as loader,
        pytest.raises(SourceExhausted, match="'web'"),
    ):
        next(iter(loader))


def test_a_loader_that_plans_its_way_to_a_far_start_ends_at_once(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = threading.Event()
    skip = Planner.skip

    def watched(planner: Planner, cursor: Any) -> Any:
        skipped.set()
        return skip(planner, cursor)

    monkeypatch.setattr(Planner, "skip", watched)
    topology = Topology(tp=2, dp=2)

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        iter(loader)
        assert skipped.wait(LONG_S)

    run_job(job, topology, program=program, start_step=10**7)
    assert not own_threads()
    loader = build_loader(job, topology=Topology(), loaders="in_process", start_step=10**7)
    iter(loader)
    loader.load_state_dict(build_loader(job, topology=Topology(), loaders="in_process", start_step=2).state_dict())
    assert next(iter(loader)).step == 2, "what is stopped goes on elsewhere"
    loader.close()


def test_a_state_of_one_part_is_not_one_of_another(job: Path) -> None:
    state = run_job(job, Topology(), steps=1, keep=False, part="validation")[0].state
    with (
        build_loader(job, topology=Topology(), loaders="in_process") as loader,
        pytest.raises(StateMismatch, match="recipe"),
    ):
        loader.load_state_dict(state)


@pytest.mark.slow
def test_training_and_validation_run_side_by_side(job: Path) -> None:
    topology = Topology(tp=2, dp=2)
    train_alone, validation_alone = (run_job(job, topology, steps=4, part=part) for part in ("train", "validation"))
    validations = open_job(job, topology, part="validation")

    def consume(train: StatefulDataLoader) -> tuple[Rank, Rank]:
        ranks = Rank(), Rank()
        validation = validations[train._tree.topology.rank]
        with train, validation:
            for _ in range(4):
                take(train, ranks[0], 8)
                take(validation, ranks[1], 8)
        return ranks

    for number, (train, validation) in enumerate(run_ranks(open_job(job, topology), consume, deadline_s=120)):
        assert same_microbatches(train.microbatches, train_alone[number].microbatches)
        assert same_microbatches(validation.microbatches, validation_alone[number].microbatches)


def test_own_sources_of_validation_are_indexed_with_the_others(tmp_path: Path) -> None:
    recipe = write_job(tmp_path / "job", extra=OWN)
    (tmp_path / "job" / "catalog" / "manifest.json").unlink()
    with build_loader(recipe, topology=Topology(), loaders="in_process", max_steps=1) as loader:
        train = list(loader)
    assert '"held"' in (tmp_path / "job" / "catalog" / "manifest.json").read_text()
    with build_loader(recipe, topology=Topology(), loaders="in_process", part="validation", max_steps=1) as loader:
        held = list(loader)
    assert {int(source) for each in held for source in each.source_index.unique()} <= {-1, 0}
    assert len(train) == len(held) == 8


def test_a_part_that_is_not_there_is_named(job: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'valid' is no part of a recipe"):
        build_loader(job, topology=Topology(), part="valid")
    plain = write_job(tmp_path / "plain")
    with pytest.raises(RecipeError, match="the recipe has no part test"):
        build_loader(plain, topology=Topology(), part="test")
    for start_step in (-1, 10**9):
        with pytest.raises(OptionError, match=f"start_step={start_step} must be an int of at least 0 and at most"):
            build_loader(plain, topology=Topology(), start_step=start_step)
    for patience_s in (2.9, float("inf"), float("nan"), "11"):
        with pytest.raises(OptionError, match=f"patience_s={patience_s!r} must be a number of seconds of at least 3"):
            build_loader(plain, topology=Topology(), patience_s=patience_s)


def test_a_state_of_another_catalog_is_refused_when_it_is_loaded(job: Path, tmp_path: Path) -> None:
    other = write_job(tmp_path / "other", seed=5, samples=16, length=256, extra=SPLIT, method=method_of(job))
    state = run_job(job, Topology(), steps=1, keep=False)[0].state
    make_text_file(tmp_path / "other" / "tiny.parquet", random_texts(99, 9, mean_words=20), codec="none")
    assert main(["index", str(other)]) == 0
    with build_loader(other, topology=Topology(), loaders="in_process") as loader:
        with pytest.raises(StateMismatch, match="does not have the rows that 'tiny' had") as caught:
            loader.load_state_dict(state)
        assert "accept_edit" not in str(caught.value)
        assert next(iter(loader)).step == 0, "the loader stays where it was"
