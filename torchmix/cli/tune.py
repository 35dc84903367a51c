"""`torchmix tune`: which balance would make the steps of a recipe fastest, by predicted times on its own documents.

Where runs of ranks share documents, it tries the runs instead: how many tokens a rank holds, and which sizes runs have.

It changes nothing, and what it proposes changes no order: the same samples go to other ranks and microbatches.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

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
from torchmix.errors import OptionError
from torchmix.parallel.place_tree import Layout
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.simulation import ASSUMPTIONS, Simulation
from torchmix.planner.tuning import (
    ContextTuning,
    Tried,
    TriedContext,
    Tuning,
    Way,
    context_ways_to_try,
    ways_to_try,
)
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import most_length, stages_of
from torchmix.recipe.structs import Balance
from torchmix.steps.run_fold import RunFold

HELP = "find the balance whose steps take the least predicted time"
COLUMNS = {
    "method": "balance.method; the first row is what the recipe says today",
    "level": "balance.level",
    "order": "balance.microbatches, the order of microbatches in time",
    "micro-batch": "samples of a microbatch",
    "tokens": "of a microbatch, padding included: what a rank holds of it follows from that",
    "step": "predicted time of a step",
    "over ideal": "this time over that of equal work for all ranks, without a bubble of the pipeline",
    "gain": "time of today's recipe over this time, less 1",
}
SHOWN = 5
WHAT_IS_TRIED = (
    "Every built-in method, level and order of microbatches is tried, at each size of a microbatch.",
    "The sizes of the job stay as they are: predicted times have no communication, by which layouts differ.",
    "The order does not change: all ways train on the same samples in the same steps, and no data is moved for them.",
    "Packing does not change either, since it decides the order; `torchmix plan --simulate` shows what it gains.",
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
    add_layout(parser)
    add_simulated_job(parser.add_argument_group("predicted times"))
    add_decisions(parser)
    add_explain(parser)
    parser.set_defaults(simulate=True, out=None)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Plan steps, try all ways on them, and print the best.

    Raises:
        OptionError: A strategy places the samples, or the model is not known.
        TorchmixError: Whatever keeps a step from being planned.
    """
    recipe = load_recipe(arguments.recipe)
    part = part_of(recipe, "train")
    if part.balance.strategy is not None:
        raise OptionError(
            f"balance.strategy: {part.balance.strategy} places the samples, and tune tries the keys of balance; remove "
            f"the strategy from a copy of the recipe to see what they would give"
        )
    settings = part.balance
    part = simulated_part(arguments, part)
    layout = layout_of_arguments(arguments, part)
    simulation = simulation_of(part, layout)  # refuses sizes that do not divide
    directory = recipe_directory(arguments.recipe)
    catalog = open_part(directory / recipe.catalog, part)
    if part.balance.context is not None:
        if arguments.try_micro_batch_sizes:
            raise OptionError("--try-micro-batch-sizes: with balance.context a microbatch is a bin of any documents")
        fold = run_fold(arguments, part, catalog, directory=directory, layout=layout)
        return _tune_contexts(arguments, part, layout, simulation, fold)
    today = Way(
        method=settings.method,
        level=settings.level,
        objective=settings.objective,
        microbatches=settings.microbatches,
        group_size=settings.group_size,
        micro_batch_size=layout.micro_batch_size,
    )
    size = layout.micro_batch_size
    sizes = arguments.try_micro_batch_sizes or sorted({max(size // 2, 1), size, 2 * size})
    num_samples = [stage.samples for stage in stages_of(part.batch)]
    ways = ways_to_try(today, layout, arguments.meet, num_samples=num_samples, micro_batch_sizes=sizes)
    tuning, cost = Tuning(ways, layout, arguments.meet), backbone_cost(part)
    fold = run_fold(arguments, part, catalog, directory=directory, layout=layout)
    with progress_bar(arguments.steps, unit="step", title="trying", silent=arguments.json or arguments.quiet) as bar:
        for _ in range(arguments.steps):
            plan = fold.plan()
            simulation.add(plan)
            tuning.add(
                cost.of_samples(plan.pieces.tokens, plan.sample, num_samples=plan.num_samples, length=plan.length),
                plan.length,
            )
            bar.update()
    second = cost_of_a_second(part, layout, arguments.tflops)
    found = tuning.best()
    values = {
        "recipe": str(arguments.recipe),
        "num_steps": tuning.num_steps,
        "num_ways": len(ways),
        "world": layout.dp * layout.tp * layout.cp * layout.pp,
        "meet": arguments.meet,
        "today": _values(tuning.tried[0], tuning, second),
        "best": [_values(one, tuning, second) for one in found[:SHOWN]],
        "arrival_order_over_hash_order": _packing_gain(simulation, arguments.meet),
        "change": _change(settings, tuning.tried[0], found[0]),
        "assumptions": [
            *WHAT_IS_TRIED,
            *ASSUMPTIONS,
            rate_assumption(second is not None, arguments.tflops),
        ],
    }
    if arguments.json:
        print_json(values)
    else:
        _print(values, explain=arguments.explain)
    return ExitCode.OK


CONTEXT_COLUMNS = {
    "rank_tokens": "balance.context.rank_tokens; the first row is what the recipe says today",
    "sizes": "balance.context.sizes, ranks that may share documents; one size is a fixed context-parallel size",
    "held": "most tokens that a rank holds in a microbatch, padding included: its memory follows from that",
    "exchanged": "tokens that ranks get from others of their runs in a step, all ranks together: the traffic",
    "microbatches": "of a step, on average",
    "step": "predicted time of a step",
    "over ideal": "this time over that of equal work for all ranks, each document in the run that suits it best",
    "gain": "time of today's recipe over this time, less 1",
}
WHAT_IS_TRIED_OF_CONTEXTS = (
    "Half and twice the recipe's rank_tokens are tried, with all sizes of runs and with each size alone.",
    "An exchanged token costs what the recipe says, or 1/128 of a computed one, which is a convention: "
    "`torchmix calibrate` fits it, and much of a gain over fixed sizes depends on it.",
    "Twice the rank_tokens need memory for them; the column `held` says how many tokens a rank holds.",
    "The order does not change: runs are placement, and all ways train on the same documents in the same steps.",
)


def _tune_contexts(
    arguments: argparse.Namespace, part: Part, layout: Layout, simulation: Simulation, fold: RunFold
) -> ExitCode:
    """Try runs of ranks, where they place the samples."""
    runs = simulation.runs
    assert runs is not None, "the recipe has runs"
    ways = context_ways_to_try(runs, most_length(part.batch))
    tuning = ContextTuning(ways, runs)
    with progress_bar(arguments.steps, unit="step", title="trying", silent=arguments.json or arguments.quiet) as bar:
        for _ in range(arguments.steps):
            plan = fold.plan()
            simulation.add(plan)
            tuning.add(plan.pieces.tokens)
            bar.update()
    second = cost_of_a_second(part, layout, arguments.tflops)
    found, today = tuning.best(), tuning.tried[0]

    def values_of(one: TriedContext) -> dict[str, Any]:
        return {
            "rank_tokens": one.way.rank_tokens,
            "sizes": list(one.way.sizes),
            "held_tokens": one.most_rank_tokens,
            "exchanged_tokens": one.exchanged_tokens / tuning.num_steps,
            "num_microbatches": one.num_microbatches / tuning.num_steps,
            "step_seconds": None if second is None else one.time / tuning.num_steps / second,
            "over_ideal": one.time / tuning.ideal,
            "gain": today.time / one.time - 1,
        }

    change: dict[str, Any] = {}
    if found[0].time < today.time:
        now, best = today.way, found[0].way
        change = {
            key: value
            for key, value in (("rank_tokens", best.rank_tokens), ("sizes", list(best.sizes)))
            if value not in (getattr(now, key), list(now.sizes))
        }
    values = {
        "recipe": str(arguments.recipe),
        "num_steps": tuning.num_steps,
        "num_ways": len(ways),
        "world": layout.dp * layout.tp * layout.cp * layout.pp,
        "meet": "microbatch",
        "today": values_of(today),
        "best": [values_of(one) for one in found[:SHOWN]],
        "dp_balanced_over_today": simulation.times["hash order"].each_microbatch / today.time,
        "change": {"context": change} if change else {},
        "assumptions": [
            *WHAT_IS_TRIED_OF_CONTEXTS,
            *ASSUMPTIONS,
            rate_assumption(second is not None, arguments.tflops),
        ],
    }
    if arguments.json:
        print_json(values)
    else:
        _print_contexts(values, explain=arguments.explain)
    return ExitCode.OK


def _print_contexts(values: Mapping[str, Any], *, explain: bool) -> None:
    """Print the values for a person."""
    print(
        f"{values['num_ways']} ways to share documents over ranks, tried on {values['num_steps']} steps of "
        f"{count_text(values['world'])} ranks:\n"
    )

    def row(one: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
        return (
            f"{prefix}{count_text(one['rank_tokens'])}",
            " ".join(map(str, one["sizes"])),
            count_text(one["held_tokens"]),
            count_text(round(one["exchanged_tokens"])),
            f"{one['num_microbatches']:.1f}",
            seconds_text(one["step_seconds"]),
            f"{one['over_ideal']:.3f}",
            f"{one['gain']:+.1%}",
        )

    rows = [row(values["today"], "today: ")]
    rows += [row(one, "") for one in values["best"] if one != values["today"]]
    print_table(CONTEXT_COLUMNS, rows, explain=explain)
    if not values["change"]:
        print("\nno way is faster than the recipe as it is")
    else:
        text = ", ".join(f"{key}: {value}" for key, value in values["change"]["context"].items())
        print(f"\n{values['best'][0]['gain']:.1%} faster than today:")
        print(f"  in the recipe      balance: {{context: {{{text}}}}}    (beside their other keys)")
        print("The order of the run stays. A run may take this over when it resumes between two steps.")
    print(
        f"\nDocuments as they come, in runs of one size, as Megatron's dp_balanced places them, would take "
        f"{values['dp_balanced_over_today']:.2f} x\nthe time of today: that gain is of planning, and the recipe has it "
        f"already."
    )
    if explain:
        print("\nWhat is assumed:")
        for line in values["assumptions"]:
            print(f"- {line}")
    else:
        print("exchange is priced as the recipe says; --explain says all that is assumed")


def _values(one: Tried, tuning: Tuning, second: float | None) -> dict[str, Any]:
    """A way for a program."""
    return {
        "method": one.way.method,
        "level": one.way.level,
        "objective": one.way.objective,
        "microbatches": one.way.microbatches,
        "group_size": one.way.group_size,
        "micro_batch_size": one.way.micro_batch_size,
        "microbatch_tokens": one.most_bin_tokens,
        "step_seconds": None if second is None else one.time / tuning.num_steps / second,
        "over_ideal": one.time / tuning.ideal,
        "gain": tuning.tried[0].time / one.time - 1,
        "steps_in_hash_order": one.hash_order_steps,
    }


def _packing_gain(simulation: Simulation, meet: str) -> float:
    """Time of documents packed as they come over that of the recipe's packing, both dealt to ranks in turn."""
    arrived, packed = simulation.times["arrival order"], simulation.times["hash order"]
    if meet == "step":
        return arrived.at_end / packed.at_end
    return arrived.each_microbatch / packed.each_microbatch


def _change(settings: Balance, today: Tried, best: Tried) -> dict[str, Any]:
    """What to write for the fastest way: keys of `balance`, and arguments of the job. Empty: nothing is faster."""
    if best.time >= today.time:
        return {}
    keys = {
        name: getattr(best.way, name)
        for name in ("method", "level", "objective", "microbatches", "group_size")
        if getattr(best.way, name) != getattr(settings, name)
    }
    changed: dict[str, Any] = {"balance": keys} if keys else {}
    if best.way.micro_batch_size != today.way.micro_batch_size:
        changed["micro_batch_size"] = best.way.micro_batch_size
    return changed


def _print(values: Mapping[str, Any], *, explain: bool) -> None:
    """Print the values for a person."""
    today = values["today"]
    where = "at the end of a step" if values["meet"] == "step" else "in each microbatch"
    print(
        f"{values['num_ways']} ways to balance {values['num_steps']} steps on {count_text(values['world'])} ranks that "
        f"wait for each other {where}:\n"
    )
    rows = [_row(today, "today: ")]
    rows += [_row(one, "") for one in values["best"] if one != today]
    print_table(COLUMNS, rows, explain=explain)
    change = values["change"]
    if not change:
        print("\nno way is faster than the recipe as it is")
    else:
        print(f"\n{values['best'][0]['gain']:.1%} faster than today:")
        if "balance" in change:
            text = ", ".join(f"{name}: {'null' if word is None else word}" for name, word in change["balance"].items())
            print(f"  in the recipe      balance: {{{text}}}    (beside its other keys)")
        if "micro_batch_size" in change:
            print(f"  in the job         micro_batch_size={change['micro_batch_size']}")
        print("The order of the run stays. A run may take this over when it resumes between two steps.")
    gain = values["arrival_order_over_hash_order"]
    print(
        f"\nNext fit of the documents as they come would take {gain:.2f} x the time of this recipe's samples in hash\n"
        f"order: that gain is of packing, and the recipe has it already."
    )
    if explain:
        print("\nWhat is assumed:")
        for line in values["assumptions"]:
            print(f"- {line}")
    else:
        print("no communication, F:B = 1:2; --explain says all that is assumed")


def _row(one: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    grouped = "" if one["group_size"] is None else f" in groups of {one['group_size']}"
    is_plain = one["method"] == "none"
    return (
        f"{prefix}{one['method']}{grouped}",
        "-" if is_plain else one["level"],
        "-" if is_plain else one["microbatches"],
        str(one["micro_batch_size"]),
        count_text(one["microbatch_tokens"]),
        seconds_text(one["step_seconds"]),
        f"{one['over_ideal']:.3f}",
        f"{one['gain']:+.1%}",
    )
