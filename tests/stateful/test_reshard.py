"""`reshard`: a running job goes on at another layout, as a job that resumes there would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.loaders import Rank, open_job, run_job, same_microbatches, take, write_job
from tests.support.worlds import run_ranks
from torchmix.errors import OptionError, StateError, TopologyError
from torchmix.parallel.fan_out import local_world
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.steps import local_steps

LAYOUTS = [Topology(dp=4), Topology(tp=2, dp=2), Topology(tp=4), Topology(pp=2, dp=2), Topology(cp=2, dp=2)]
STEPS = 2


def resharded(recipe: Path, layouts: Sequence[Topology], **options: Any) -> list[Rank]:
    """Every rank of a job that takes STEPS steps at each layout; `result` is what it had of each."""
    worlds = [local_world(layout) for layout in layouts]

    def program(loader: StatefulDataLoader) -> Rank:
        rank = Rank(result=[])
        with loader:
            number = loader._tree.topology.rank
            for place, layout in enumerate(layouts):
                if place:
                    loader.reshard(layout.with_rank(number), place * STEPS, fan_out=worlds[place][number])
                here = Rank()
                take(loader, here, None, steps=STEPS)
                here.state = loader.state_dict()
                here.result = loader.stats()
                rank.result.append(here)
        return rank

    loaders = [
        build_loader(recipe, topology=layouts[0].with_rank(rank), fan_out=end, **{"loaders": "in_process", **options})
        for rank, end in enumerate(worlds[0])
    ]
    return run_ranks(loaders, program, deadline_s=120)


def test_what_follows_is_what_a_resume_would_give(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    ranks = resharded(recipe, LAYOUTS)
    state: dict[str, Any] | None = None
    for place, layout in enumerate(LAYOUTS):
        expected = run_job(recipe, layout, steps=STEPS, state=state)
        for rank, wanted in zip(ranks, expected, strict=True):
            found: Rank = rank.result[place]
            assert same_microbatches(found.microbatches, wanted.microbatches)
            assert (found.digests, found.state) == (wanted.digests, wanted.state)
        state = expected[0].state


def test_a_leader_that_leads_again_keeps_what_it_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counted(local_steps.Reader):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append("reader")
            super().__init__(*arguments, **options)

        def close(self) -> None:
            made.append("closed")
            super().close()

    monkeypatch.setattr(local_steps, "Reader", Counted)
    recipe = write_job(tmp_path)
    ranks = resharded(recipe, [Topology(dp=4), Topology(tp=2, dp=2), Topology(dp=4)])
    # Ranks 0 and 2 lead throughout; 1 and 3 give theirs up, and lead again with another one.
    assert (made.count("reader"), made.count("closed")) == (6, 6)
    first, second, third = (each.result["bytes_read"] for each in ranks[0].result)
    assert first <= second <= third


def test_an_iterator_goes_on_and_a_loader_that_has_not_begun_may_be_resharded(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    with build_loader(recipe, topology=Topology(), loaders="in_process", max_steps=3) as loader:
        loader.reshard(Topology(), 0, micro_batch_size=2)
        microbatches = iter(loader)
        first = [next(microbatches) for _ in range(loader.num_microbatches)]
        assert (len(first), first[-1].is_last_of_step) == (4, True)
        loader.reshard(Topology(), 1, micro_batch_size=4)
        rest = list(microbatches)
    assert [(microbatch.step, microbatch.index) for microbatch in rest] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    [wanted] = run_job(recipe, Topology(), steps=3)
    assert wanted.digests[-1] == loader.order_digest


@pytest.mark.parametrize(
    ("topology", "at_step", "options", "error", "message"),
    [
        (Topology(), 2, {}, StateError, "at_step=2, and this loader is at step 1, microbatch 0"),
        (Topology(dp=2), 1, {}, TopologyError, "rank 0 of 1, the topology is of rank 0 of 2"),
        (Topology(), 1, {"micro_batch_size": 3}, TopologyError, "does not divide"),
        ("tp", 1, {}, OptionError, "topology='tp' must be a torchmix.Topology"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    topology: Any, at_step: int, options: dict[str, int], error: type[Exception], message: str, tmp_path: Path
) -> None:
    recipe = write_job(tmp_path)
    [wanted] = run_job(recipe, Topology(), steps=2)
    [loader] = open_job(recipe, Topology())
    with loader:
        found = Rank()
        take(loader, found, None, steps=1)
        with pytest.raises(error, match=message):
            loader.reshard(topology, at_step, **options)
        take(loader, found, None, steps=2)
    assert same_microbatches(found.microbatches, wanted.microbatches)


def test_inside_a_step_a_reshard_is_refused(tmp_path: Path) -> None:
    [loader] = open_job(write_job(tmp_path), Topology())
    with loader:
        next(iter(loader))
        with pytest.raises(StateError, match="at step 0, microbatch 1; call it on all ranks after the last microbatch"):
            loader.reshard(Topology(), 0)


def test_an_exchange_of_the_callers_needs_another(tmp_path: Path) -> None:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        with pytest.raises(OptionError, match="give a new one"):
            loader.reshard(Topology(dp=2, rank=loader._tree.topology.rank), 0)

    run_job(write_job(tmp_path), Topology(tp=2), program=program)
