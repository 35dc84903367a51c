"""`torchmix plan --simulate`: what the steps would take, beside jobs without a plan.

All assumptions are said with it. Cost: some milliseconds a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from torchmix.cli.terminal import at_least, count_text, print_table
from torchmix.errors import OptionError, TopologyError
from torchmix.parallel.place_tree import Layout
from torchmix.planner.contexts import check_runs, run_costs
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.simulation import (
    ASSUMPTIONS,
    MEGATRONS,
    MODELS,
    Rival,
    Simulation,
    meaning_of_order,
    named_model,
)
from torchmix.recipe.modules import COSTS, cost_key_of
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of, lengths_of, most_length, stages_of
from torchmix.recipe.structs import Balance, Batch

DEFAULT_STEPS = 8
DEFAULT_TFLOPS = 400.0
COLUMNS = {
    "order": "how samples come to ranks and microbatches",
    "step": "predicted time of a step in which ranks meet at its end",
    "over ideal": "this time over that of equal work for all ranks, without a bubble of the pipeline",
    "lockstep": "predicted time of a step in which ranks meet in each microbatch, as with FSDP or spread experts",
    "over ideal ": "likewise",
}


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("predicted times")
    group.add_argument("--simulate", action="store_true", help="predict the time of a step, with and without the plan")
    group.add_argument(
        "--megatron",
        action="store_true",
        help="with --simulate and balance.context: also by the schedulers of the installed Megatron",
    )
    add_simulated_job(group)


def add_simulated_job(parser: argparse._ActionsContainer) -> None:
    """Declare what is predicted: of which model, batch and rate."""
    parser.add_argument("--model", metavar="NAME", help=f"dimensions of the model: {', '.join(MODELS)}")
    parser.add_argument("--samples", type=at_least(1), metavar="G", help="another global batch than the recipe's")
    parser.add_argument("--length", type=at_least(1), metavar="L", help="samples of a later stage, of another length")
    parser.add_argument(
        "--tflops",
        type=_rate,
        default=DEFAULT_TFLOPS,
        metavar="F",
        help=f"TFLOP/s that a rank reaches (default {DEFAULT_TFLOPS:g})",
    )


def simulated_part(arguments: argparse.Namespace, part: Part) -> Part:
    """The part that is planned: with the named model and batch, and balanced by rows where the recipe balances nothing.

    Raises:
        OptionError: An option goes with --simulate alone; there are no dimensions of a model.
    """
    if not arguments.simulate:
        for name in ("model", "samples", "length", "megatron", "tflops"):
            if getattr(arguments, name) not in (None, False, DEFAULT_TFLOPS):
                raise OptionError(f"--{name} goes with --simulate: a run has what the recipe says")
        return part
    if arguments.samples is not None or arguments.length is not None:
        if arguments.out is not None:
            name = "samples" if arguments.length is None else "length"
            raise OptionError(f"--{name} plans another run than the recipe's, which --out would write down")
        length = most_length(part.batch) if arguments.length is None else arguments.length
        of_length = [stage for stage in stages_of(part.batch) if length_of(part.batch, stage) == length]
        if not of_length:
            lengths = ", ".join(map(str, lengths_of(part.batch)))
            raise OptionError(f"--length {length}: samples of the recipe have {lengths} tokens")
        part = replace(part, batch=Batch(samples=arguments.samples or of_length[-1].samples, length=length))
    settings = part.balance
    if arguments.model is not None:
        model = named_model(arguments.model)
        has_no_method = settings.method == "none" and settings.strategy is None and settings.context is None
        method = "rows" if has_no_method else settings.method
        settings = Balance(
            **{name: getattr(settings, name) for name in Balance.__struct_fields__ if name not in _REPLACED},
            method=method,
            model=model,
        )
    if cost_key_of(settings) is None:
        raise OptionError(f"predicted times need balance.model in the recipe, or --model, one of {', '.join(MODELS)}")
    return replace(part, balance=settings)


_REPLACED = ("method", *COSTS)


def simulation_of(part: Part, layout: Layout, *, with_megatron: bool = False) -> Simulation:
    """A simulation without steps, perhaps beside Megatron's schedulers.

    Raises:
        TopologyError: The batch does not divide by the ranks; says how to simulate another one.
        OptionError: Megatron's schedulers are of runs of ranks, or none is installed.
    """
    cost = backbone_cost(part)
    if with_megatron and part.balance.context is None:
        raise OptionError("--megatron: its schedulers place documents of any length; it goes with balance.context")
    if part.balance.context is not None:
        runs = run_costs(part.balance.context, cost, layout)
        check_runs(runs, part.batch)
        rivals = _megatrons() if with_megatron else {}
        return Simulation(cost=cost, packing=part.packing, seed=part.seed, runs=runs, rivals=rivals)
    for stage in stages_of(part.batch):
        if stage.samples % layout.row_samples and not layout.elastic:
            raise TopologyError(
                f"a global batch of {stage.samples} samples does not divide by {layout} = {layout.row_samples}; "
                f"--samples {-(-stage.samples // layout.row_samples) * layout.row_samples} simulates one that does"
            )
    return Simulation(cost=cost, packing=part.packing, seed=part.seed)


def _megatrons() -> dict[str, Rival]:
    """The schedulers of the installed Megatron, by name."""
    from torchmix.megatron_adapter.schedulers import installed_schedulers, place_as_megatron

    def rival(name: str) -> Rival:
        return lambda tokens, costs: place_as_megatron(name, tokens, costs).load_of_ranks

    found = {f"{MEGATRONS}{name}": rival(name) for name in installed_schedulers()}
    if not found:
        raise OptionError(
            "--megatron: no Megatron with a scheduler of documents can be imported; pip install megatron-core"
        )
    return found


def simulation_values(
    simulation: Simulation, part: Part, layout: Layout, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The simulation for a program: means of the steps. Seconds are null where costs were measured in another unit."""
    steps = max(simulation.num_steps, 1)
    second = cost_of_a_second(part, layout, arguments.tflops)

    def times(value: float) -> dict[str, float | None]:
        return {"seconds": None if second is None else value / steps / second, "over_ideal": value / simulation.ideal}

    return {
        "model": arguments.model or "the model of the recipe",
        "tflops": arguments.tflops,
        "num_steps": simulation.num_steps,
        "lengths": sorted(simulation.lengths),
        "other_lengths": sorted({*lengths_of(part.batch)} - simulation.lengths),
        "has_runs": simulation.runs is not None,
        "world": layout.dp * layout.tp * layout.cp * layout.pp,
        "ideal_seconds": times(simulation.ideal)["seconds"],
        "pipeline_bubble": simulation.even / simulation.ideal,
        "orders": {
            name: {
                "at_end": times(one.at_end),
                "each_microbatch": times(one.each_microbatch),
            }
            for name, one in simulation.times.items()
        },
        "modules": {
            name: {"hash_order_over_ideal": one.hash_order / one.ideal, "plan_over_ideal": one.plan / one.ideal}
            for name, one in simulation.modules.items()
            if one.ideal
        },
        "assumptions": [*ASSUMPTIONS, rate_assumption(second is not None, arguments.tflops)],
    }


def cost_of_a_second(part: Part, layout: Layout, tflops: float) -> float | None:
    """What a rank computes in a second, in the unit of costs; None where costs were measured in a unit of their own."""
    model = part.balance.model
    if model is None or cost_key_of(part.balance) != "model":
        return None
    shared = layout.tp * (layout.cp if part.balance.context is None else 1)  # costs of runs are those of each rank
    return tflops * 1e12 * shared / (2 * model.hidden)


def rate_assumption(has_seconds: bool, tflops: float) -> str:
    """What seconds follow from."""
    if has_seconds:
        return f"A rank reaches {tflops:g} TFLOP/s (--tflops); ratios do not depend on it."
    return "The recipe's cost was measured in a unit of its own, so there are ratios and no seconds."


def print_simulation(values: Mapping[str, Any], *, explain: bool) -> None:
    """Print `simulation_values` for a person."""
    bubble = values["pipeline_bubble"]
    print(f"\npredicted for {values['model']} on {count_text(values['world'])} ranks:\n")
    rows = []
    for name, one in values["orders"].items():
        cells = [(seconds_text(way["seconds"]), f"{way['over_ideal']:.3f}") for way in one.values()]
        rows.append((name, *cells[0], *cells[1]))
    print_table(COLUMNS, rows, explain=explain)
    print(f"\nequal microbatches would take {bubble:.3f} x the ideal, which is the bubble of the pipeline")
    for name, one in values["modules"].items():
        print(
            f"module {name}: its slowest consumer takes {one['plan_over_ideal']:.3f} x the mean, in hash order "
            f"{one['hash_order_over_ideal']:.3f}"
        )
    if values["other_lengths"]:
        lengths = ", ".join(map(count_text, values["other_lengths"]))
        print(f"samples of {lengths} tokens are in none of these steps; --length predicts theirs")
    if explain:
        print("\nWhat the orders are:")
        for name in values["orders"]:
            print(f"- {name}: {meaning_of_order(name, has_runs=values['has_runs'])}.")
        print("\nWhat is assumed:")
        for line in values["assumptions"]:
            print(f"- {line}")
    else:
        print("no communication, F:B = 1:2; --explain says all that is assumed")


def seconds_text(seconds: float | None) -> str:
    """Seconds with three digits."""
    return "-" if seconds is None else f"{seconds:.3g} s"


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of TFLOP/s above 0")
    return value
