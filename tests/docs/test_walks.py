"""The walks of docs/architecture.md: what passes through many files meets each of them once, and in that order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.loaders import write_job
from tests.support.processes import Processes
from tests.support.threaded_children import threaded_children
from tests.support.traced_calls import Trace, climbs, traced
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILE = re.compile(r"`([\w/]+\.py)`")
STOP = re.compile(r"\| `([\w.]+)` \(`([\w/]+\.py)`\)")
TABLES = [table for table in re.split(r"\n\n", PAGE) if table.startswith("| stop | what it does |")]
STATE, RECIPE, STEP, PAGES = ([STOP.match(row) for row in table.split("\n")[2:]] for table in TABLES)
POLICY = 'dynamic: {policy: odm, every: 4 steps, lag: 3 steps, within: ["0.2x", "5x"], decisions: ./log}'
ALONE = Topology()
RANK_S = 120.0


def stops_of(table: Iterable[re.Match[str] | None]) -> list[tuple[str, str]]:
    """File and function of each stop."""
    found = [(row[2], row[1]) for row in table if row is not None]
    return [
        (file, f"{name}.__init__" if name in ("StepStream", "StatefulDataLoader") else name) for file, name in found
    ]


def test_a_walk_stops_at_no_file_twice() -> None:
    assert len(TABLES) == 4, "a state, a recipe, a step and a page"
    for table in TABLES:
        rows = table.split("\n")[2:]
        stops = [file for row in rows for file in FILE.findall(row.split("|")[1])]
        beside = [file for row in rows for file in FILE.findall(row.split("|")[2])]
        assert len(stops) >= 6 and len({*stops}) == len(stops) == len(rows), sorted(stops)
        assert all(map(STOP.match, rows)), "a stop is a function and its file"
        assert not {*stops} & {*beside}, "what a stop calls is no stop of its own"
        assert all((ROOT / "torchmix" / file).is_file() for file in (*stops, *beside))


def in_order(table: Iterable[re.Match[str] | None], times: dict[tuple[str, str], int]) -> None:
    """Fail unless each stop has a time, and these ascend."""
    stops = stops_of(table)
    assert not [stop for stop in stops if stop not in times], "a stop that nothing passes"
    assert sorted(stops, key=times.__getitem__) == stops


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """A step and its state by a node worker, and pages that loaders are asked for; all of them threads here."""
    recipe = write_job(tmp_path_factory.mktemp("job"), extra=POLICY)
    found: dict[str, Trace] = {}
    for where in ("node", "job"):
        with threaded_children(), traced() as trace, build_loader(recipe, topology=ALONE, loaders=where) as loader:
            trace.restart()
            steps = iter(loader)
            first = next(steps)
            found[where] = trace.restart()
            for _ in range(1, loader.num_microbatches):
                next(steps)
            loader.report(first.step, {"web": (300.0, 100), "prose": (90.0, 60)})
            loader.load_state_dict(loader.state_dict())
            assert next(iter(loader)).step == first.step + 1
            found[f"state, {where}"] = trace.restart()
    return found


def test_a_step_passes_its_stops_in_order(walks: dict[str, Trace]) -> None:
    in_order(STEP, walks["node"].done)


def test_a_state_passes_its_stops_in_order(walks: dict[str, Trace]) -> None:
    walk = walks["state, node"]
    in_order(STATE, walk.entered)
    read, *others = (walk.times[stop] for stop in stops_of(STATE))
    assert (read, {*others}) == (2, {1}), "in this process, and in that of the worker, which is a thread here"


def test_a_page_passes_its_stops_in_order(walks: dict[str, Trace]) -> None:
    in_order(PAGES, walks["job"].entered)


def test_no_room_calls_one_below_it_but_through_what_it_was_given(walks: dict[str, Trace]) -> None:
    assert not [climb for trace in walks.values() for climb in climbs(trace)]


def test_a_climb_is_seen() -> None:
    trace = Trace()
    trace.calls[("planner/planner.py", "Planner.step"), ("steps/blocks.py", "plan_blocks")] = 0
    trace.calls[("parallel/keeper.py", "Keeper.add"), ("steps/worker/keeper.py", "WorkerSeat.start")] = 1
    assert climbs(trace) == ["planner/planner.py Planner.step -> steps/blocks.py plan_blocks"]


@pytest.mark.system
def test_a_recipe_passes_its_stops_in_order_on_a_rank_of_a_job(tmp_path: Path) -> None:
    recipe = write_job(tmp_path / "job")
    with Processes(tmp_path) as processes:
        ranks = processes.start_ranks("-m", "tests.support.walk_rank", str(recipe), world_size=2)
        for rank in ranks:
            assert rank.wait(deadline_s=RANK_S) == 0, processes.report()
    found = json.loads((tmp_path / "job" / "walk.json").read_text())
    times = {(file, name): time for file, name, time in found["entered"]}
    in_order(RECIPE, times)
    files = list(dict.fromkeys(file for file, _ in sorted(times, key=times.__getitem__)))
    stops = [file for file, _ in stops_of(RECIPE)]
    assert [file for file in files if file in stops] == stops, "files are first met in this order, too"
    assert dict.fromkeys(stops_of(RECIPE), 1) == {stop: found["times"][" ".join(stop)] for stop in stops_of(RECIPE)}
    assert not found["climbs"]
