"""What goes wrong in a job: one leader fails, a page is damaged, ranks hold different states or options."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.catalogs import open_catalog
from tests.support.deadlines import LONG_S
from tests.support.files import flip_byte
from tests.support.loaders import Rank, run_job, same_microbatches, take, write_job
from tests.support.processes import wait_until
from tests.support.worlds import run_ranks
from torchmix.constructor.build import pieces_of_replica
from torchmix.errors import CorruptPage, RankLost, SourceExhausted, StateMismatch, TorchmixError
from torchmix.indexing import scan
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.fan_out import FanOut, local_world
from torchmix.parallel.topology import Topology
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import open_planner
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.steps import replica_steps as steps
from torchmix.steps.replica_steps import StreamSettings

LAYOUT = Topology(tp=2, dp=2)  # ranks 0 and 2 lead


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def one_leader_fails_at_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps.modules_of_step

    def fail_or_make(settings: StreamSettings, plan: StepPlan, *rest: Any, **options: Any) -> Any:
        if settings.replica == 1 and plan.step == 3:
            raise CorruptPage("page 7 does not decode")
        return made(settings, plan, *rest, **options)

    monkeypatch.setattr(steps, "modules_of_step", fail_or_make)


def take_all(loader: StatefulDataLoader, rank: Rank, together: threading.Barrier | None = None) -> None:
    """All there is, in step with the other ranks as in training; the error that ends it becomes `rank.result`."""
    try:
        for microbatch in loader:
            if microbatch.is_last_of_step:
                rank.digests.append(loader.order_digest)
                if together is not None:
                    together.wait(LONG_S)
    except TorchmixError as error:
        rank.result = error


@pytest.mark.parametrize("look_ahead", [1, 4])
@pytest.mark.usefixtures("one_leader_fails_at_step_3")
def test_an_error_of_one_leader_reaches_every_rank_after_the_same_good_steps(job: Path, look_ahead: int) -> None:
    together = threading.Barrier(4)
    ranks = run_job(job, LAYOUT, program=lambda loader, rank: take_all(loader, rank, together), look_ahead=look_ahead)
    assert [len(rank.digests) for rank in ranks] == [3] * 4
    assert [type(rank.result) for rank in ranks] == [RankLost, RankLost, CorruptPage, RankLost]
    assert [rank.result.rank for rank in ranks if isinstance(rank.result, RankLost)] == [2, 0, 2]
    assert "failed: CorruptPage: page 7 does not decode" in str(ranks[3].result)


@pytest.mark.usefixtures("one_leader_fails_at_step_3")
def test_an_error_that_no_rank_has_reached_does_not_keep_them_from_closing(job: Path) -> None:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        take(loader, rank, loader.num_microbatches)
        assert loader._feed is not None
        wait_until(lambda: loader._feed._ended, deadline_s=30, what="the error, two steps ahead")

    assert len(run_job(job, LAYOUT, program=program, look_ahead=4)) == 4


def test_the_end_of_a_source_in_look_ahead_comes_after_the_good_steps(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    text = job.read_text().replace("{path: tiny.parquet,", "{path: tiny.parquet, max_epochs: 1,")
    job.write_text(text.replace("prose: 38%, tiny: 2%", "prose: 30%, tiny: 10%"))
    alone = run_job(job, Topology(), program=take_all, look_ahead=4)[0]
    ranks = run_job(job, LAYOUT, program=take_all, look_ahead=4)
    assert len(alone.digests) > 10
    assert [rank.digests for rank in ranks] == [alone.digests] * 4
    assert [type(rank.result) for rank in ranks] == [SourceExhausted, RankLost, SourceExhausted, RankLost]
    assert "SourceExhausted" in str(ranks[1].result)


def first_step_that_needs(job: Path, source: str, page: int) -> int:
    recipe = load_recipe(job)
    catalog = open_catalog(recipe, job.parent)
    planner = open_planner(part_of(recipe, "train"), catalog)
    cursor, index = planner.start(), sorted(recipe.sources).index(source)
    for _ in range(1000):
        plan, cursor = planner.step(cursor)
        pieces = pieces_of_replica(plan, 0)
        rows = pieces.row[pieces.source == index]
        if page in catalog.sources[source].pages.page_of_rows(rows):
            return plan.step
    raise AssertionError(f"no step needs page {page} of {source}")


def test_a_damaged_page_stops_the_run_at_the_step_that_needs_it_and_not_before(tmp_path: Path) -> None:
    job = write_job(tmp_path, checksums=True)
    pages = open_catalog(load_recipe(job), tmp_path).sources["web"].pages
    first_of_page = {page: first_step_that_needs(job, "web", page) for page in (2, 5)}
    page = max(first_of_page, key=lambda page: first_of_page[page])  # warmed before it is needed
    assert first_of_page[page] > 20
    flip_byte(tmp_path / "web-0.parquet", int(pages.place(np.array([page + 1])).offset[0]) - 3)
    rank = run_job(job, Topology(), program=take_all)[0]
    assert isinstance(rank.result, CorruptPage)
    assert len(rank.digests) == first_of_page[page]


@pytest.mark.parametrize("microbatches", [8, 5])
def test_a_state_that_only_leaders_have_loaded_is_told_by_their_peers(job: Path, microbatches: int) -> None:
    state = run_job(job, LAYOUT, microbatches=microbatches)[0].state

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        if loader._tree.is_leader:
            loader.load_state_dict(state)
            next(iter(loader))
        else:
            with pytest.raises(StateMismatch, match=r"waits for step 0 from microbatch 0.*same state"):
                next(iter(loader))

    run_job(job, LAYOUT, program=program)


def test_leaders_that_loaded_other_places_of_one_step_are_told_apart(job: Path) -> None:
    states = [run_job(job, Topology(dp=2), microbatches=count)[0].state for count in (4, 6)]

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        loader.load_state_dict(states[loader._tree.replica])
        with pytest.raises(TorchmixError, match=r"from microbatch 0.*from microbatch 2|from microbatch 2.*0"):
            next(iter(loader))

    run_job(job, Topology(dp=2), program=program)


def test_inside_a_step_another_placement_is_refused_and_its_start_is_not(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    text = job.read_text()
    whole = run_job(job, Topology(dp=2), steps=4)
    state = run_job(job, Topology(dp=2), microbatches=6)[0].state
    job.write_text(text.replace("balance: {method: rows,", "balance: {method: none,"))

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        loader.load_state_dict(state)
        with pytest.raises(StateMismatch, match="placed otherwise"):
            next(iter(loader))
        loader.load_state_dict(state, from_step_start=True)
        take(loader, rank, 3 * loader.num_microbatches)

    assert [rank.digests for rank in run_job(job, Topology(dp=2), program=program)] == [whole[0].digests[1:]] * 2


def test_ranks_may_look_ahead_by_different_numbers_of_steps(job: Path) -> None:
    def program(pair: tuple[int, FanOut]) -> list[str]:
        (rank, end), taken = pair, Rank()
        topology, ahead = LAYOUT.with_rank(rank), (1, 4, 4, 1)[rank]
        with build_loader(job, topology=topology, fan_out=end, loaders="in_process", look_ahead=ahead) as loader:
            take(loader, taken, 12)
        return taken.digests

    found = run_ranks(list(enumerate(local_world(LAYOUT))), program)
    assert found == [run_job(job, Topology(), steps=3)[0].digests] * 4


def test_leaders_that_all_find_no_catalog_build_one_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = scan.compare
    job = write_job(tmp_path)
    expected = run_job(job, Topology(), steps=2)[0].digests
    (tmp_path / "catalog").rename(tmp_path / "catalog-before")
    topology = Topology(dp=4)

    def program(pair: tuple[int, FanOut]) -> list[str]:
        (rank, end), taken = pair, Rank()
        with build_loader(job, topology=topology.with_rank(rank), fan_out=end, loaders="in_process") as loader:
            take(loader, taken, 2 * loader.num_microbatches)
        return taken.digests

    compared: list[object] = []
    monkeypatch.setattr(scan, "compare", lambda *given: compared.append(given) or compare(*given))
    assert run_ranks(list(enumerate(local_world(topology))), program) == [expected] * 4
    assert len(compared) == 1, "the others find what the first has built"


def test_a_catalog_that_is_made_anew_twice_does_not_disturb_a_loader_that_runs(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    expected = run_job(job, Topology(), steps=42)[0]
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        rank = Rank()
        take(loader, rank, 8 * 3)
        for number in (8, 9):
            shutil.copy(tmp_path / "web-1.parquet", tmp_path / f"web-{number}.parquet")
            index_recipe(load_recipe(job), tmp_path)
        take(loader, rank, 8 * 37)
        state = loader.state_dict()
        loader.load_state_dict(state)  # what is opened again is the catalog of the run
        take(loader, rank, 8 * 2)
        assert rank.digests == expected.digests
        assert same_microbatches(rank.microbatches, expected.microbatches)
    with (
        build_loader(job, topology=Topology(), loaders="in_process") as another,
        pytest.raises(StateMismatch, match="other rows of this recipe: web with other rows"),
    ):
        another.load_state_dict(state)
