"""`torchmix plan RECIPE --loaders`: which loaders would read which sources.

What is shown is what `torchmix serve --processes auto` does with the same recipe, catalog, profile and budget; where
the recipe says how many loaders there are, it is what Ray does with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmix.cli.run import budget_of, open_recipe
from torchmix.cli.terminal import ExitCode, at_least, percent_text, print_json, print_table
from torchmix.errors import OptionError
from torchmix.recipe.amounts import bytes_text
from torchmix.recipe.loaders import check_sources_of, sources_read_first, words_of_sources
from torchmix.recipe.parts import with_all_sources
from torchmix.recipe.structs import Loaders
from torchmix.service.scale.loads import (
    ComingLoads,
    TransformPlace,
    bounds_of_nodes,
    read_profile,
    traffic_of,
    transform_places,
)
from torchmix.service.scale.partition import (
    LoaderBudget,
    Partition,
    SourceLoad,
    bytes_of_process,
    partition,
    partition_of_nodes,
)
from torchmix.service.scale.rule import RunNote, ScaleDecision, replay

SOURCES = {
    "source": "a source, by its name; the costliest come first",
    "cost": "time of loaders for a step of it, mean of the steps asked for",
    "part": "its part of the cost of all",
    "cluster": "sources of like cost, 1 being the costliest",
    "workers": "by how much its cluster costs more than the cheapest one, within the pages that it has",
    "loaders": "that read it, and how many parts of it each",
    "state": "memory of each of these for having it open",
    "windows": "its decoded pages, shared out among its loaders",
    "transform": "where its rows are mapped and tokenized, by loaders.transform_at",
    "road": "bytes that travel for a step of it: read and sent where loaders transform, read where node workers do",
}
LOADERS = {
    "loader": "number of a loader",
    "sources": "how many it reads",
    "work": "its cost over the mean",
    "memory": "pages and states of its sources, and its process",
}
DECISIONS = {
    "step": "first step that it holds for",
    "reason": "begin, more, fewer, or uneven: the same number with other sources",
    "loaders": "from there on",
}
STEPS = 100


def add_loaders(parser: argparse.ArgumentParser) -> None:
    """Declare --loaders and what goes with it."""
    parser.add_argument("--loaders", action="store_true", help="show which loaders would read which sources")
    parser.add_argument(
        "--processes", type=at_least(1), metavar="N", help="with --loaders: so many (default: the recipe's)"
    )
    parser.add_argument("--nodes", type=at_least(1), metavar="N", help="with --loaders: nodes of the job (default 1)")
    parser.add_argument("--cpu", type=at_least(1), metavar="N", help="with --loaders: in the place of loaders.cpu")
    parser.add_argument("--memory", metavar="SIZE", help="with --loaders: in the place of loaders.memory")


def show_loaders(arguments: argparse.Namespace) -> ExitCode:
    """Print the partition of the loaders.

    Raises:
        OptionError: The budget does not suffice.
        CatalogMissing, CatalogStale: There is no profile, or it is of another catalog.
    """
    if arguments.part != "train":
        raise OptionError(f"--loaders --part {arguments.part}: loaders are sized by training; leave --part out")
    recipe, _, part, catalog = open_recipe(arguments.recipe)
    profile = read_profile(catalog.directory, catalog, part.seed)
    coming = ComingLoads(part, catalog, profile)
    start = arguments.start or 0
    loads = coming.mean(start, start + (arguments.steps or STEPS))
    # Loaders of a job are on its nodes, and others on machines of their own.
    num_nodes = arguments.nodes or 1
    nodes = num_nodes if recipe.loaders.asked == "job" else 1
    read_first = sources_read_first(recipe.loaders, part.sources) if recipe.loaders.asked == "job" else []
    budget = budget_of(recipe, cpu=arguments.cpu, memory=arguments.memory, nodes=nodes)
    decisions: list[ScaleDecision] = []
    processes = arguments.processes or _fixed_processes(recipe.loaders)
    scale = recipe.loaders.autoscale
    if scale is not None and arguments.processes is None:
        decisions = replay(
            lambda begin, stop, note: coming.mean(begin, stop, note.gone, note.decided),
            bounds_of_nodes(scale, part, budget, nodes=nodes, read_first=read_first),
            [RunNote(step=start)],
            start + (arguments.steps or STEPS),
        )
    processes = len(decisions[0].loaders) if decisions else processes
    if processes is None:
        found = partition_of_nodes(loads, budget, nodes=nodes, read_first=read_first)
    else:
        found = partition(loads, budget, processes=processes)
    check_sources_of(recipe.loaders, with_all_sources(recipe).sources)
    transforms = transform_places(
        traffic_of(loads, catalog, profile),
        nodes=num_nodes,
        loaders=len(found.loaders),
        said=words_of_sources(recipe.loaders.transform_at, catalog.sources),
    )
    if arguments.json:
        steps = [{"step": one.step, "reason": one.reason, "loaders": len(one.loaders)} for one in decisions]
        print_json({**_values(arguments.recipe, found, loads, transforms, budget), "decisions": steps})
    else:
        _print(found, loads, transforms, budget, explain=arguments.explain)
        if decisions:
            print("\nwith autoscale, if no stream runs out:")
            rows = [(str(one.step), one.reason, str(len(one.loaders))) for one in decisions]
            print_table(DECISIONS, rows, explain=arguments.explain)
        elif arguments.processes is None and processes and recipe.loaders.asked != "ray":
            print(
                f"loaders.processes is {processes}, so each of them reads from all sources, page by page; "
                f"`processes: auto` would give each the sources above"
            )
    return ExitCode.OK


def _fixed_processes(loaders: Loaders) -> int | None:
    """How many loaders the recipe asks for; None where the profile decides, or nothing is said, which is 1."""
    count = loaders.processes
    return count if isinstance(count, int) and count > 1 and loaders.autoscale is None else None


def _values(
    recipe: Path,
    found: Partition,
    loads: list[SourceLoad],
    transforms: Mapping[str, TransformPlace],
    budget: LoaderBudget,
) -> dict[str, Any]:
    return {
        "recipe": str(recipe),
        "cpu": budget.cpu,
        "memory_bytes": budget.memory_bytes,
        "slowest_over_mean": float(found.ratio),
        "clusters": found.clusters,
        "sources": [
            {
                "name": load.name,
                "cost_ns": load.cost,
                "workers": found.workers[load.name],
                "loaders": {number: found.loaders[number].parts[load.name] for number in found.loaders_of(load.name)},
                "state_bytes": load.state_bytes,
                "window_bytes": load.window_bytes,
                "transform_at": transforms[load.name].place,
                "road_bytes": {
                    "loader": transforms[load.name].loader_bytes,
                    "worker": transforms[load.name].worker_bytes,
                },
            }
            for load in loads
        ],
        "loaders": [
            {"cost_ns": one.cost, "memory_bytes": one.memory_bytes + bytes_of_process(loads), "parts": one.parts}
            for one in found.loaders
        ],
    }


def _print(
    found: Partition,
    loads: list[SourceLoad],
    transforms: Mapping[str, TransformPlace],
    budget: LoaderBudget,
    *,
    explain: bool,
) -> None:
    total = sum(load.cost for load in loads)
    cluster_of = {name: number for number, names in enumerate(found.clusters, 1) for name in names}
    rows = []
    for load in sorted(loads, key=lambda load: (-load.cost, load.name)):
        places = [f"{number} x{found.loaders[number].parts[load.name]}" for number in found.loaders_of(load.name)]
        text = ", ".join(places) if len(places) <= 4 else f"{len(places)} of them"
        rows.append(
            (
                load.name,
                f"{load.cost / 1e6:,.4g} ms",
                percent_text(load.cost / max(1, total)),
                str(cluster_of[load.name]),
                str(found.workers[load.name]),
                text,
                bytes_text(load.state_bytes),
                bytes_text(load.window_bytes),
                transforms[load.name].place,
                f"{bytes_text(transforms[load.name].loader_bytes)}, {bytes_text(transforms[load.name].worker_bytes)}",
            )
        )
    print_table(SOURCES, rows, explain=explain)
    print()
    mean = total / len(found.loaders)
    print_table(
        LOADERS,
        [
            (
                str(number),
                str(len(one.parts)),
                f"{one.cost / mean:.3f}" if mean else "",
                bytes_text(one.memory_bytes + bytes_of_process(loads)),
            )
            for number, one in enumerate(found.loaders)
        ],
        explain=explain,
    )
    memory = sum(one.memory_bytes + bytes_of_process(loads) for one in found.loaders)
    node = f" and {bytes_text(budget.node_bytes)}" if budget.node_bytes else ""
    print(
        f"\n{len(found.loaders)} loaders, {bytes_text(memory)}, of {budget.cpu} processors and "
        f"{bytes_text(budget.memory_bytes)}, less {budget.node_cpu} processor(s){node} of the node worker. The slowest "
        f"has {float(found.ratio):.3f} x the mean. A step costs them {total / 1e6:,.4g} ms together"
    )
