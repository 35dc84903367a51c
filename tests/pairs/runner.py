"""A row of the matrix as a small job: its life is run, and three judges look at what every rank was handed.

In: a row and a folder. Out: a `Verdict`; or the error that refuses the row. Ranks and leaders are threads, and so are
node workers and loaders, unless `real` asks for processes, which are forks. Cost: half a second of a processor a row.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import patch

from tests.pairs.columns import Row, is_valid
from tests.pairs.judges import Leg, Verdict, judge
from tests.pairs.project import Project, make_project
from tests.support.deadlines import LONG_S
from tests.support.forked_children import forked_children
from tests.support.loaders import Rank, run_job
from tests.support.threaded_children import threaded_children
from torchmix.catalog import publish
from torchmix.catalog.in_store import catalog_folder, fetch_catalog
from torchmix.catalog.store import open_part
from torchmix.cli.main import main
from torchmix.errors import SourceExhausted, StateMismatch
from torchmix.indexing.scan import index
from torchmix.parallel.fan_out import local_world
from torchmix.parallel.place_tree import ClientPlaceTree, Leaders, tree_with_broadcast
from torchmix.parallel.topology import Topology
from torchmix.planner.balance import Placement
from torchmix.planner.planner import open_planner
from torchmix.planner.plans import SampleRuns, placement_of, plan_raw, summary_buffer
from torchmix.recipe.load import load_recipe
from torchmix.recipe.modules import BACKBONE
from torchmix.recipe.parts import PARTS, has_part, part_of
from torchmix.service import open_fleet
from torchmix.service.endpoints import Registry
from torchmix.service.keys import write_keys
from torchmix.service.main import LoaderStart
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.pool import LoaderPool, starts_of
from torchmix.service.routed_reader import NodeFraction
from torchmix.service.scale.loads import SourceProfile, profile_of, write_profile
from torchmix.service.server import new_pair
from torchmix.stateful.arguments import places_of
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.steps.decisions import FollowedLog
from torchmix.steps.replay import write_plan_files
from torchmix.steps.replica_steps import start_cursor
from torchmix.steps.state import decode_state, start_state
from torchmix.storage.stores import place_of

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp": {"dp": 4},
    "tp": {"tp": 2, "dp": 2},
    "cp": {"cp": 2, "dp": 2},
    "pp": {"pp": 2, "dp": 2},
    "leaders": {"tp": 2, "pp": 2},
    "uneven": {"dp": 3},
}
STEPS = 3
"""In each leg."""


def group_of(row: Row, layout: str) -> Topology | None:
    """The ranks that share a world where others are apart: two replicas of four, else one."""
    sizes = LAYOUTS[layout]
    return Topology(**{**sizes, "dp": 2 if sizes.get("dp") == 4 else 1}) if row["replicas"] == "apart" else None


def tree_of(row: Row, layout: str) -> ClientPlaceTree:
    """The place tree of a row at a layout, as rank 0 sees it."""
    leaders: Leaders = "stage" if layout == "leaders" else "replica"
    group, topology = group_of(row, layout), Topology(**LAYOUTS[layout])
    if group is not None:
        topology = group.among(0, topology.world_size // group.world_size)
    tree = ClientPlaceTree.from_topology(topology, leaders=leaders)
    return tree_with_broadcast(tree, None if row["broadcast_at"] == "none" else row["broadcast_at"])  # type: ignore[arg-type]


def ends_of(row: Row, layout: str) -> list[Any]:
    """The exchange of each rank."""
    group, tree = group_of(row, layout), tree_of(row, layout)
    if group is not None:
        return [*local_world(tree, group_ranks=group.world_size)]
    return [*local_world(tree)] if tree.topology.world_size > 1 else [None]


def run_row(row: Row, folder: Path, *, real: bool = False) -> Verdict:
    """Run a row, and judge it."""
    project = make_project(folder, row)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), patch.object(publish, "SMALL_BYTES", 0):
        index(project.path)  # each source has a file of its own, as sources of a real size have
    _write_profile(project)
    if row["catalog"] == "store":  # the ranks are on a host that has indexed nothing
        shutil.rmtree(catalog_folder(project.folder, load_recipe(project.path).catalog))
    with forked_children(folder) if real else threaded_children():
        return judge(_LIVES.get(row["life"], _first)(project))


def _write_profile(project: Project) -> None:
    """What sources cost, where somebody wants to know."""
    row = project.row
    if row["processes"] == "auto" or row["autoscale"] == "given" or row["transform_at"] in ("auto", "of_sources"):
        whole = load_recipe(project.path)
        folder = fetch_catalog(project.folder, whole.catalog)
        catalog = open_part(folder, part_of(whole, "train"))
        one = SourceProfile(
            tokens=1000,
            busy_ns=1000,
            cpu_ns=0,
            read_bytes=0,
            decoded_bytes=0,
            sent_bytes=0,
            window_bytes=0,
            state_bytes=0,
            pages=1,
        )
        write_profile(folder, profile_of(catalog, whole.seed, dict.fromkeys(catalog.sources, one)))


class Half(NodeFraction):
    """Half of the pages, however busy this machine is."""

    def look(self) -> float:
        """The fraction."""
        self.fraction = 0.5
        return self.fraction


def _joined(make: Any, *words: Any, is_joined: bool, **options: Any) -> Any:
    return make(*words, **{**options, "is_joined": True})


def _patient(make: Any, settings: FleetSettings, *words: Any) -> Any:
    return make(replace(settings, lost_s=LONG_S), *words)


@contextmanager
def _served(project: Project) -> Iterator[None]:
    """Loaders are waited for, and those that `torchmix serve` would run, are, where the row asks them."""
    row = project.row
    with ExitStack() as stack:
        if row["mode"].startswith("node_"):  # it would begin without loaders, and end before they are there
            make = partial(_joined, open_fleet.FleetReader, is_joined=True)
            stack.enter_context(patch.object(open_fleet, "FleetReader", make))
            stack.enter_context(patch.object(open_fleet, "NodeFraction", Half))
            stack.enter_context(patch.object(open_fleet, "_fleet", partial(_patient, open_fleet._fleet)))
        if row["mode"] in ("remote", "node_remote"):
            stack.enter_context(_serving(project))
        yield


@contextmanager
def _serving(project: Project) -> Iterator[None]:
    row = project.row
    whole = load_recipe(project.path)
    keys = ""
    if row["keys"] == "given":
        if not (project.folder / "keys").exists():
            write_keys(project.folder / "keys", new_pair, num_clients=1)
        keys = str(project.folder / "keys")
    sockets = tempfile.mkdtemp(prefix="pairs-")  # short, and of this user alone
    bind = "tcp://127.0.0.1:0" if keys else f"ipc://{sockets}"
    start = LoaderStart(
        parts={name: part_of(whole, name) for name in PARTS if has_part(whole, name)},
        base=str(project.folder),
        catalog_folder=place_of(project.folder, whole.catalog),
        cache_bytes=1 << 24,
        bind=bind,
        keys=keys,
    )
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, sockets, ignore_errors=True)
        pool = LoaderPool(starts_of(start, 2 if row["processes"] == "2" else 1))
        stack.callback(pool.close)
        registry = Registry(project.folder / "endpoints")
        stack.callback(registry.close)
        for endpoint in pool.endpoints:
            registry.put(endpoint)
        yield


def losses_of(project: Project, step: int) -> dict[str, tuple[float, int]]:
    """What a trainer would report."""
    return {name: ((2.0 + i / 7 + step % 3 / 10) * 100, 100) for i, name in enumerate(sorted(project.rows()))}


def _take(
    project: Project,
    loader: StatefulDataLoader,
    rank: Rank,
    *,
    steps: int | None = None,
    microbatches: int | None = None,
) -> None:
    """Take so many whole steps or microbatches, and report."""
    if steps == 0:
        return
    for microbatch in loader:
        rank.microbatches.append(microbatch)
        if microbatch.is_last_of_step:
            rank.digests.append(loader.order_digest)
            if project.row["dynamic"] != "none":
                loader.report(microbatch.step, losses_of(project, microbatch.step))
        if len(rank.microbatches) == microbatches or (microbatch.is_last_of_step and len(rank.digests) == steps):
            return


def _options(project: Project, layout: str, micro_batch: int, **more: Any) -> dict[str, Any]:
    row = project.row
    group = group_of(row, layout)
    return {
        "group_ranks": None if group is None else group.world_size,
        "elastic": layout == "uneven" or row["life"] == "elastic" or group is not None,
        "loaders": project.recipe["loaders"],
        "micro_batch_size": micro_batch,
        "part": project.part,
        "look_ahead": int(row["look_ahead"]),
        "one_pass": row["life"] == "one_pass",
        **more,
    }


def leg_of(project: Project, layout: str, micro_batch: int, state: bytes | None, ranks: list[Rank], **more: Any) -> Leg:
    """What the steps of some ranks are to be, planned again from where they began."""
    whole = load_recipe(project.path)
    part = part_of(whole, project.part, one_pass=project.row["life"] == "one_pass")
    folder = catalog_folder(project.folder, whole.catalog)
    catalog = open_part(folder, part)
    _, grid = places_of(tree_of(project.row, layout), micro_batch, part, elastic=True)
    at = start_state(grid, recipe=part) if state is None else decode_state(state, recipe=part)
    log = None
    if part.dynamic is not None:
        branch = decode_state(ranks[0].state["torchmix_state"], recipe=part).log_branch
        log = FollowedLog(project.folder / part.dynamic.decisions, branch)
    planner = open_planner(part, catalog, grid, decisions=log)
    cursor = start_cursor(at, planner, catalog=catalog, catalog_folder=folder)
    assert cursor is not None
    plans, cursors = [], [cursor]
    for _ in ranks[0].digests:
        plan, cursor = planner.step(cursors[-1])
        plans.append(plan)
        cursors.append(cursor)
    if log is not None:
        log.close()
    assert len({rank.state["torchmix_state"] for rank in ranks}) == 1, "all ranks have one state"
    assert len({tuple(rank.digests) for rank in ranks}) == 1
    return Leg(
        project=project,
        sizes=LAYOUTS[layout],
        topology=tree_of(project.row, layout).topology,
        micro_batch=micro_batch,
        plans=plans,
        cursors=cursors,
        planner=planner,
        catalog=catalog,
        given=[rank.microbatches for rank in ranks],
        digests=ranks[0].digests,
        **more,
    )


def _run(project: Project, layout: str, micro_batch: int, *, state: bytes | None = None, **options: Any) -> list[Rank]:
    steps, microbatches = options.pop("steps", None), options.pop("microbatches", None)
    is_edit, refused = options.pop("is_edit", False), list[str]()

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        if state is not None:
            given = {"torchmix_state": state}
            try:
                loader.load_state_dict(given)
            except StateMismatch as error:
                refused.append(str(error))
                word = re.search(r"accept_edit='([0-9a-f]{16})'", str(error))
                if word is None or not is_edit:
                    raise
                loader.load_state_dict(given, accept_edit=word[1])
            rank.result = loader.state_dict()["torchmix_state"]
        _take(project, loader, rank, steps=steps, microbatches=microbatches)

    more = _options(project, layout, micro_batch, **options)
    with _served(project):
        ranks = run_job(project.path, tree_of(project.row, layout), program=program, **more)
    assert bool(refused) == is_edit, "an edit, and nothing else, is refused without its code"
    return ranks


def _first(project: Project) -> list[Leg]:
    row = project.row
    ranks = _run(project, row["layout"], int(row["micro_batch"]), steps=2 * STEPS)
    return [leg_of(project, row["layout"], int(row["micro_batch"]), None, ranks)]


def _one_pass(project: Project) -> list[Leg]:
    row = project.row
    ranks = _run(project, row["layout"], int(row["micro_batch"]))
    return [leg_of(project, row["layout"], int(row["micro_batch"]), None, ranks)]


def _validation(project: Project) -> list[Leg]:
    return _first(project)


def next_layout(row: Row, *, of_same_size: bool = False) -> str:
    """Another layout that the row can have, if there is one."""
    names = [*LAYOUTS]
    order = [*names[names.index(row["layout"]) + 1 :], *names]
    for layout in order:
        is_same = Topology(**LAYOUTS[layout]).world_size == Topology(**LAYOUTS[row["layout"]]).world_size
        if layout != row["layout"] and (is_same or not of_same_size) and is_valid({**row, "layout": layout}):
            return layout
    return row["layout"]


def _other_size(row: Row) -> int:
    """Another number of samples of a microbatch; with runs of ranks there is one alone."""
    return 1 if row["method"] == "whole" else 3 - int(row["micro_batch"])


def _resume(project: Project) -> list[Leg]:
    row = project.row
    layout, size = row["layout"], int(row["micro_batch"])
    first = _run(project, layout, size, steps=STEPS)
    legs = [leg_of(project, layout, size, None, first)]
    state, other = first[0].state["torchmix_state"], next_layout(row)
    second = _run(project, other, _other_size(row), steps=STEPS, state=state)
    return [*legs, leg_of(project, other, _other_size(row), state, second)]


def _mid_step(project: Project) -> list[Leg]:
    row = project.row
    layout, size = row["layout"], int(row["micro_batch"])
    of_two_steps = 2 * -(-16 // (size * LAYOUTS[layout].get("dp", 1)))
    if row["method"] == "whole":
        of_two_steps = len(_run(project, layout, size, steps=2)[0].microbatches)
    first = _run(project, layout, size, microbatches=of_two_steps + 1)
    second = _run(project, layout, size, state=first[0].state["torchmix_state"], steps=STEPS + 1)
    for one, other in zip(first, second, strict=True):
        other.microbatches[:0] = one.microbatches
        other.digests[:0] = one.digests
    return [leg_of(project, layout, size, None, second)]


def _replay(project: Project) -> list[Leg]:
    row = project.row
    layout, size = row["layout"], int(row["micro_batch"])
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert main(["plan", str(project.path), "--steps", str(STEPS), "--out", str(project.folder / "plan")]) == 0
    ranks = _run(project, layout, size, replay="plan", steps=STEPS + 1)
    return [leg_of(project, layout, size, None, ranks)]


def _by_hand(project: Project) -> list[Leg]:
    """Replay plans by hand: the recipe's samples, with replicas and microbatches in reverse."""
    row = project.row
    layout, size = row["layout"], int(row["micro_batch"])
    whole = load_recipe(project.path)
    part = part_of(whole, project.part)
    catalog = open_part(fetch_catalog(project.folder, whole.catalog), part)
    _, grid = places_of(tree_of(row, layout), size, part, elastic=True)
    planner = open_planner(part, catalog, grid)
    plans, cursor = [], planner.start()
    with write_plan_files(project.folder / "plan", planner, catalog.fingerprint) as files:
        for _ in range(STEPS):
            plan, after = planner.step(cursor)
            summary = summary_buffer(planner, cursor)
            last, placed = plan.num_microbatches - 1, plan.placement
            of_samples: Placement | SampleRuns = placement_of(
                grid.dp - 1 - placed.dp_rank_of_sample, last - placed.microbatch_of_sample
            )
            if plan.contexts is not None:
                run = plan.contexts.bin_of_sample
                of_samples = SampleRuns(
                    microbatch=last - plan.contexts.microbatch_of_sample,
                    first_rank=plan.contexts.first_rank_of_bin[run],
                    size=plan.contexts.size_of_bin[run],
                )
            columns = {**summary.columns}
            modules = {BACKBONE: of_samples, **plan.item_modules}
            plans.append(plan_raw(summary, columns["sample"], modules, slot_of_piece=columns["slot"]))
            files.add(plans[-1], cursor, after, by_hand=True)
            cursor = after
    ranks = _run(project, layout, size, replay="plan", steps=STEPS + 1)
    leg = leg_of(project, layout, size, None, ranks)
    return [replace(leg, plans=[*plans, *leg.plans[STEPS:]])]


def _reshard(project: Project) -> list[Leg]:
    row = project.row
    layout, size = row["layout"], int(row["micro_batch"])
    other = next_layout(row, of_same_size=True)
    tree, ends = tree_of(row, other), ends_of(row, other)
    before: dict[int, Rank] = {}

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        number = loader._tree.topology.rank
        before[number] = Rank()
        _take(project, loader, before[number], steps=STEPS)
        before[number].state = loader.state_dict()
        place = tree.with_rank(number)
        loader.reshard(place, STEPS, micro_batch_size=_other_size(row), fan_out=ends[number])
        _take(project, loader, rank, steps=STEPS)

    more = _options(project, layout, size)
    with _served(project):
        after = run_job(project.path, tree_of(project.row, layout), program=program, **more)
    first = [before[number] for number in range(len(after))]
    legs = [leg_of(project, layout, size, None, first)]
    return [*legs, leg_of(project, other, _other_size(row), first[0].state["torchmix_state"], after)]


def _elastic(project: Project) -> list[Leg]:
    """Some ranks go, and the others go on from a state in memory, as three ranks or as one."""
    row = project.row
    layout, size = row["layout"], int(row["micro_batch"])
    num_ranks = Topology(**LAYOUTS[layout]).world_size
    is_three = num_ranks > 3 and is_valid({**row, "layout": "uneven"})
    other = "uneven" if is_three else "one"
    tree, ends = tree_of(row, other), ends_of(row, other)
    before: dict[int, Rank] = {}
    border = Barrier(num_ranks)

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        number = loader._tree.topology.rank
        before[number] = Rank()
        _take(project, loader, before[number], steps=STEPS)
        border.wait(LONG_S)  # as the trainer's own collectives do
        state = before[number].state = loader.state_dict()
        if number < len(ends):
            place = tree.with_rank(number)
            loader.reshard(place, STEPS, micro_batch_size=_other_size(row), fan_out=ends[number], state_dict=state)
            _take(project, loader, rank, steps=STEPS)

    with _served(project):
        after = run_job(
            project.path, tree_of(project.row, layout), program=program, **_options(project, layout, size, elastic=True)
        )
    first = [before[number] for number in range(num_ranks)]
    legs = [leg_of(project, layout, size, None, first)]
    kept = after[: len(ends)]
    return [*legs, leg_of(project, other, _other_size(row), first[0].state["torchmix_state"], kept)]


def _edit(project: Project) -> list[Leg]:
    row = project.row
    layout, size = row["layout"], int(row["micro_batch"])
    first = _run(project, layout, size, steps=STEPS)
    before = leg_of(project, layout, size, None, first)
    edited = edited_project(project)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        index(edited.path)
    _write_profile(edited)
    second = _run(edited, layout, size, steps=STEPS, state=first[0].state["torchmix_state"], is_edit=True)
    return [before, leg_of(edited, layout, size, second[0].result, second, is_edited=True)]


def edited_project(project: Project) -> Project:
    """The project with other shares, a file more, a source more, or documents denied."""
    edited = Project(**{**vars(project), "denied": {name: set(rows) for name, rows in project.denied.items()}})
    kind = project.row["edit"]
    if kind == "shares":
        edited.weights = 1 - project.weights
    elif kind == "file":
        edited.add_file()
    elif kind == "source":
        edited.has_extra = True
    else:
        edited.deny("deny2.parquet", "side", set(range(0, 60, 7)))
    edited.write()
    return edited


_LIVES: Mapping[str, Any] = {
    "first": _first,
    "resume": _resume,
    "edit": _edit,
    "mid_step": _mid_step,
    "replay": _replay,
    "by_hand": _by_hand,
    "reshard": _reshard,
    "elastic": _elastic,
    "one_pass": _one_pass,
    "validation": _validation,
}
__all__ = ["SourceExhausted", "run_row"]
