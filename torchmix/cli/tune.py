"""`torchmix tune`: what would make the steps of a recipe fastest, by predicted times on its own documents.

It tries methods of balance, sizes of a microbatch, runs of ranks, and who computes the items of modules; other sizes of
the job where it is asked to. It changes nothing, and what it proposes changes no order: the same samples go to other
ranks and microbatches.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from torchmix.catalog.in_store import fetch_catalog
from torchmix.catalog.store import open_part
from torchmix.cli.plan.simulate import (
    DEFAULT_STEPS,
    add_simulated_job,
    cost_of_a_second,
    rate_assumption,
    seconds_text,
    simulated_part,
    simulation_of,
)
from torchmix.cli.run import add_decisions, add_layout, layout_of_arguments, run_fold
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    add_recipe,
    at_least,
    count_text,
    print_json,
    print_table,
    progress_bar,
)
from torchmix.errors import OptionError, RecipeError
from torchmix.planner.simulation import ASSUMPTIONS, Simulation
from torchmix.planner.tuning import (
    Changes,
    Job,
    Tried,
    Tuning,
    unbeaten,
    ways_of_balance,
    ways_of_layout,
    ways_of_module,
    ways_of_runs,
)
from torchmix.recipe.amounts import bytes_text, parse_bytes
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import part_of

HELP = "find the placement whose steps take the least predicted time"
COLUMNS = {
    "way": "what it changes; the first row is the recipe as it is today",
    "step": "predicted time of a step",
    "over ideal": "this time over that of equal work for all ranks, without a bubble of the pipeline",
    "gain": "time of today's recipe over this time, less 1",
    "tokens": "most that a rank holds in a microbatch, padding included",
    "memory": "of a rank: weights, their gradients and optimizer, and activations under way",
    "traffic": "what a rank gets from others in a step, mean of all ranks",
}
SHOWN = 5
UNSURE = 0.1
"""A predicted gain below this came to nothing in some of the jobs that `tests/trials/tuned.py` has measured."""
RANKS_PER_NODE = 8
WHAT_IS_TRIED = (
    "The order does not change: all ways train on the same samples in the same steps, and no data is moved for them.",
    "Packing does not change either, since it decides the order; `torchmix plan --simulate` shows what it gains.",
    "Memory counts 18 bytes a weight and no recomputing; a distributed optimizer, FSDP or recomputing takes less.",
    "Traffic has no time: how fast it is, and what of it is hidden behind computing, a plan does not know.",
    "A module's items are computed by the ranks of its consumer together; its weights count in no column.",
)
OF_RUNS = (
    "An exchanged token costs what the recipe says, or 1/128 of a computed one, which is a convention: "
    "`torchmix calibrate` fits it, and much of a gain over fixed sizes depends on it.",
)
"""What stands beside the assumptions of predicted times."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    parser.add_argument(
        "--steps", type=at_least(1), default=DEFAULT_STEPS, metavar="N", help=f"steps to try (default {DEFAULT_STEPS})"
    )
    parser.add_argument(
        "--meet",
        choices=("step", "microbatch"),
        default="step",
        help="where ranks wait for each other: at the end of a step (default), or in each microbatch, as with FSDP or "
        "with experts that are spread over ranks",
    )
    parser.add_argument(
        "--try-micro-batch-sizes",
        type=at_least(1),
        nargs="+",
        metavar="B",
        help="sizes of a microbatch to try (default: --micro-batch-size, its half and its double)",
    )
    parser.add_argument(
        "--try-layouts",
        action="store_true",
        help="show other tp, cp, pp and dp of as many ranks, too, with their traffic",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=at_least(1),
        default=RANKS_PER_NODE,
        metavar="N",
        help=f"with --try-layouts: the largest tp (default {RANKS_PER_NODE})",
    )
    parser.add_argument(
        "--rank-memory", type=_size, metavar="SIZE", help="with --try-layouts: of a rank, as 80GiB (default: today's)"
    )
    add_layout(parser)
    add_simulated_job(parser.add_argument_group("predicted times"))
    add_decisions(parser)
    add_explain(parser)
    parser.set_defaults(simulate=True, out=None)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Draw steps, try all ways on them, and print the best.

    Raises:
        OptionError: The model is not known, or an option does not go with the recipe.
        TorchmixError: Whatever keeps a step from being planned.
    """
    recipe = load_recipe(arguments.recipe)
    part = simulated_part(arguments, part_of(recipe, "train"))
    layout = layout_of_arguments(arguments, part)
    simulation = simulation_of(part, layout)  # refuses sizes that do not divide
    directory = recipe_directory(arguments.recipe)
    job = Job(part=part, layout=layout)
    _check(arguments, job)
    catalog = open_part(fetch_catalog(directory, recipe.catalog), part)
    fold = run_fold(arguments, part, catalog, directory=directory, layout=layout)
    steps = []
    silent = arguments.json or arguments.quiet
    for _ in range(arguments.steps):
        drawn = fold.draw()
        simulation.add(fold.planner.placed(drawn))
        steps.append(drawn)
    tuning = Tuning(job, arguments.meet, steps)
    size = layout.micro_batch_size
    sizes = arguments.try_micro_batch_sizes or sorted({max(size // 2, 1), size, 2 * size})
    ways = ways_of_balance(job, arguments.meet, sizes) if part.balance.context is None else ways_of_runs(job)
    with progress_bar(len(ways), unit="way", title="trying", silent=silent) as bar:
        tuning.over(ways, on_each=bar.update)
    for name in part.modules:
        base = tuning.best()[0].changes
        tuning.over({**base, **way} for way in ways_of_module(job, name))
    found = tuning.best()
    layouts: list[Tried] = []
    if arguments.try_layouts:
        most = arguments.rank_memory or tuning.today.memory_bytes or 1 << 62  # unknown where a module has no dimensions
        tried = tuning.over([{}, found[0].changes, *_on_layouts(job, found[0].changes, arguments)])
        layouts = unbeaten([one for one in tried if (one.memory_bytes or 0) <= most])
    second = cost_of_a_second(part, layout, arguments.tflops)
    rate = None if second is None else arguments.tflops * 1e12

    def values_of(one: Tried) -> dict[str, Any]:
        return {
            "change": _nested(one.changes),
            "step_seconds": None if rate is None else one.time / len(steps) / rate,
            "over_ideal": one.time / one.ideal,
            "gain": tuning.today.time / one.time - 1,
            "modules": {name: time / (tuning.today.modules[name] or 1.0) for name, time in one.modules.items()},
            "microbatch_tokens": one.most_tokens,
            "memory_bytes": one.memory_bytes,
            "traffic_bytes": None if one.traffic_bytes is None else one.traffic_bytes / len(steps),
            "steps_in_hash_order": one.hash_order_steps,
            "job": {name: getattr(one.job.layout, name) for name in ("dp", "tp", "cp", "pp", "micro_batch_size")},
        }

    values = {
        "recipe": str(arguments.recipe),
        "num_steps": len(steps),
        "num_ways": len(tuning.all_tried()),
        "world": layout.dp * layout.tp * layout.cp * layout.pp,
        "meet": "step" if arguments.meet == "step" and part.balance.context is None else "microbatch",
        "today": values_of(tuning.today),
        "best": [values_of(one) for one in found[:SHOWN]],
        "layouts": [values_of(one) for one in layouts],
        "change": _nested(found[0].changes),
        "baselines": _baselines(simulation, arguments.meet),
        "are_comparable": tuning.today.are_comparable,
        "assumptions": [
            *WHAT_IS_TRIED,
            *(OF_RUNS if part.balance.context is not None else ()),
            *ASSUMPTIONS,
            rate_assumption(second is not None, arguments.tflops),
        ],
    }
    if arguments.json:
        print_json(values)
    else:
        _print(values, explain=arguments.explain)
    return ExitCode.OK


def _check(arguments: argparse.Namespace, job: Job) -> None:
    """Refuse options that the recipe leaves nothing to do for."""
    balance = job.part.balance
    if balance.context is not None and arguments.try_micro_batch_sizes:
        raise OptionError("--try-micro-batch-sizes: with balance.context a microbatch is a bin of any documents")
    if not arguments.try_layouts:
        for name in ("rank_memory", "ranks_per_node"):
            if getattr(arguments, name) not in (None, RANKS_PER_NODE):
                raise OptionError(f"--{name.replace('_', '-')} goes with --try-layouts, and would do nothing here")
        return
    if balance.context is not None:
        raise OptionError("--try-layouts: with balance.context each microbatch has sizes of its own; leave it out")
    if balance.model is None or balance.model.experts_per_token is not None:
        raise OptionError(
            "--try-layouts needs balance.model, or --model, of a dense model: memory and traffic follow from its "
            "dimensions, and of experts the recipe does not say how many there are"
        )


def _on_layouts(job: Job, best: Changes, arguments: argparse.Namespace) -> list[Changes]:
    """The best way on other layouts, judged by what these are judged by."""
    found: list[Changes] = []
    for way in ways_of_layout(job, arguments.ranks_per_node):
        objective = "rows" if arguments.meet == "microbatch" else "pipeline" if way["job.pp"] > 1 else "rank"
        of_pipeline = {"balance.objective": objective} if "balance.objective" in best else {}
        found.append({**best, **of_pipeline, **way})
    return found


def _nested(changes: Changes) -> dict[str, Any]:
    """`{"balance.method": "rows"}` as `{"balance": {"method": "rows"}}`, as a recipe has it."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        *rooms, name = key.split(".")
        at = found
        for room in rooms:
            at = at.setdefault(room, {})
        at[name] = list(value) if isinstance(value, tuple) else value
    return found


def _baselines(simulation: Simulation, meet: str) -> dict[str, float]:
    """What the same documents would take without a plan, over what the backbone takes by today's recipe."""

    def time(name: str) -> float:
        one = simulation.times[name]
        return one.each_microbatch if meet == "microbatch" else one.at_end

    names = [name for name in ("hash order", "arrival order") if name in simulation.times]
    return {name.replace(" ", "_"): time(name) / time("this plan") for name in names}


def _print(values: Mapping[str, Any], *, explain: bool) -> None:
    """Print the values for a person."""
    where = "at the end of a step" if values["meet"] == "step" else "in each microbatch"
    print(
        f"{values['num_ways']} ways to place {values['num_steps']} steps on {count_text(values['world'])} ranks that "
        f"wait for each other {where}:\n"
    )
    today = values["today"]
    print_table(COLUMNS, _rows([today, *(one for one in values["best"] if one["change"])]), explain=explain)
    best = values["best"][0]
    if not values["change"]:
        print("\nno way is faster than the recipe as it is")
    else:
        print(f"\n{best['gain']:.1%} faster than today:")
        _print_change(values["change"])
        print("The order of the run stays. A run may take this over when it resumes between two steps.")
        if best["gain"] < UNSURE:
            print(f"A gain below {UNSURE:.0%} is within what predictions miss: measure a few steps of both.")
    for name, part in best["modules"].items():
        if not values["are_comparable"]:
            print(f"module {name}, in a unit of its own: {1 / part - 1 if part else 0:.1%} faster than today")
    if values["layouts"]:
        print("\nSizes of the job that need no more memory, of which none is better in time and traffic at once:\n")
        rows = _rows(values["layouts"])
        names = [", ".join(f"{name} {size}" for name, size in one["job"].items()) for one in values["layouts"]]
        print_table(COLUMNS, [(name, *row[1:]) for name, row in zip(names, rows, strict=True)], explain=False)
        print("Which is fastest depends on how fast the traffic is, which is not in these times.")
    _print_baselines(values["baselines"])
    if explain:
        print("\nWhat is assumed:")
        for line in values["assumptions"]:
            print(f"- {line}")
    else:
        print("no time for communication, F:B = 1:2; --explain says all that is assumed")


def _print_change(change: Mapping[str, Any]) -> None:
    """The lines of the recipe and of the job that a way changes."""
    recipe = {room: keys for room, keys in change.items() if room != "job"}
    for room, keys in recipe.items():
        print(f"  in the recipe      {room}: {_yaml(keys)}    (beside its other keys)")
    if "job" in change:
        print(f"  in the job         {', '.join(f'{name}={value}' for name, value in change['job'].items())}")


def _print_baselines(baselines: Mapping[str, float]) -> None:
    """What documents would take without a plan, so that a gain is not taken for another."""
    hashed, arrived = baselines["hash_order"], baselines.get("arrival_order")
    print("\nEach gain is over the recipe as it is. Beside it, without a plan:")
    if arrived is None:
        print(
            f"{hashed:.2f} x the time of today in runs of one size, documents as they come, as Megatron's dp_balanced "
            f"places\nthem: that gain is of planning, and the recipe has it already"
        )
        return
    print(f"{hashed:.2f} x the time of today with its samples in hash order: what the recipe's balance gains already")
    print(
        f"{arrived:.2f} x with documents as they come in next fit, too: {arrived / hashed:.2f} x of it is the gain of "
        f"packing, not of\nbalance, and the recipe has it already"
    )


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_yaml(each)}" for name, each in value.items()) + "}"
    return "null" if value is None else str(value)


def _text_of(change: Mapping[str, Any]) -> str:
    """A way in a few words; by what it is judged follows from the job, and stands in the lines to change."""
    found = []
    for room, keys in change.items():
        for name, value in keys.items():
            inner = value if isinstance(value, Mapping) else {name: value}
            of_module = f"{name}." if room == "modules" else ""
            found += [f"{of_module}{key} {_yaml(each)}" for key, each in inner.items() if key != "objective"]
    return ", ".join(found) or ("another objective" if change else "today")


def _rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            _text_of(one["change"]),
            seconds_text(one["step_seconds"]),
            f"{one['over_ideal']:.3f}",
            f"{one['gain']:+.1%}",
            count_text(one["microbatch_tokens"]),
            "-" if one["memory_bytes"] is None else bytes_text(one["memory_bytes"]),
            "-" if one["traffic_bytes"] is None else bytes_text(round(one["traffic_bytes"])),
        )
        for one in found
    ]


def _size(text: str) -> int:
    try:
        return parse_bytes(text, where="--rank-memory")
    except RecipeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
