"""The rules of a plan that code of the user's has made: by a strategy, a method of balance, or `plan_raw`.

A plan that passes gives every piece and every item of the step, each once; nothing is believed that can be computed
from the arrays. Cost: a SHA-256 over 56 bytes a piece, and finding the items of modules again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError
from torchmix.parallel.place_tree import GridAxis, Layout
from torchmix.planner.balance import BalanceReport, Placement
from torchmix.planner.contexts import ContextPlan, RunCosts, check_contexts
from torchmix.planner.graph.dgraph import DrawnStep, placement_of_contexts
from torchmix.planner.graph.items import slots_of
from torchmix.planner.pack import Packed, Pieces
from torchmix.planner.plan import (
    ItemPlan,
    Items,
    ModulePlan,
    StepPlan,
    plan_digest,
    plan_digest_of_contexts,
    plan_digest_of_modules,
)
from torchmix.recipe.build import nearest
from torchmix.recipe.modules import BACKBONE
from torchmix.recipe.structs import Module

_PLACES = ("sample", "slot", "sample_offset")
_CHECKED_ALONE = {"step", "pieces", *_PLACES, "modules", "order_digest", "plan_digest"}


def check_plan(plan: Any, drawn: DrawnStep, runs: RunCosts | None = None) -> StepPlan:
    """The plan, if it is one of this step and keeps every rule that loading relies on.

    Args:
        plan: What code of the user's gives.
        drawn: The step.
        runs: Runs of ranks of the layout, with `packing.method: whole`.

    Raises:
        PlanError: Names the first rule that is broken, with values.
    """
    if not isinstance(plan, StepPlan):
        raise PlanError(f"it gives {type(plan).__name__}, not a DGraph or a StepPlan")
    if plan.step != drawn.step:
        raise PlanError(f"it gives the plan of another step: {plan.step}; plan the one that is asked for")
    _check_drawn(plan, drawn)
    backbone, modules = _modules_of(plan.modules, drawn)
    if runs is None:
        if backbone.contexts is not None:
            raise PlanError(f"{BACKBONE} has runs of ranks, which are of packing.method: whole")
        check_placement(backbone.placement, drawn.num_samples, drawn.layout)
    else:
        _check_contexts(backbone, drawn, runs)
    _check_report(BACKBONE, backbone.balance)
    for name, module in drawn.modules.items():
        _check_items(name, modules[name], module, backbone.placement, drawn)
    if backbone.contexts is None:
        digest = plan_digest(drawn.order_digest, backbone.placement, backbone.layout)
    else:
        digest = plan_digest_of_contexts(drawn.order_digest, backbone.contexts, backbone.layout)
    digest = plan_digest_of_modules(digest, modules)
    if plan.plan_digest != digest:
        raise PlanError(
            f"its plan digest is {_hex(plan.plan_digest)}, and its arrays have {digest.hex()}; make the plan by "
            f"step.plan(backbone, ...) after the last change of an array"
        )
    return plan


def check_placement(placement: Any, num_samples: int, layout: Layout) -> None:
    """Refuse a placement that does not give each microbatch of each rank its samples; raises a PlanError."""
    if not isinstance(placement, Placement):
        raise PlanError(f"{BACKBONE} needs a Placement, not {type(placement).__name__}")
    num_rows = layout.num_microbatches(num_samples)
    rank, microbatch, slot = (
        _column(name, getattr(placement, name), num_samples, "samples") for name in Placement.__struct_fields__
    )
    for name, column, count in (("rank", rank, layout.dp), ("microbatch", microbatch, num_rows)):
        outside = (column < 0) | (column >= count)
        if outside.any():
            sample = int(np.argmax(outside))
            raise PlanError(f"sample {sample} has {name} {column[sample]}; there are 0 to {count - 1}")
    place = rank * num_rows + microbatch
    held = np.bincount(place, minlength=layout.dp * num_rows)
    if (held != layout.micro_batch_size).any():
        number = int(np.argmax(held != layout.micro_batch_size))
        at_rank, at_microbatch = divmod(number, num_rows)
        raise PlanError(
            f"microbatch {at_microbatch} of rank {at_rank} has {held[number]} samples; each has "
            f"{layout.micro_batch_size}"
        )
    _check_slots("sample", slot, place, "samples of a microbatch")


def _check_contexts(backbone: ModulePlan, drawn: DrawnStep, runs: RunCosts) -> None:
    """Runs are those of the layout, and each sample is placed at the first rank of its run."""
    contexts = backbone.contexts
    if not isinstance(contexts, ContextPlan):
        raise PlanError(
            f"{BACKBONE} needs a ContextPlan, not {type(contexts).__name__}: samples of packing.method: whole"
        )
    check_contexts(contexts, drawn.packed.pieces.tokens, runs)
    if not isinstance(backbone.placement, Placement):
        raise PlanError(f"{BACKBONE} needs a Placement, not {type(backbone.placement).__name__}")
    wanted = placement_of_contexts(contexts, drawn.layout)
    for name in Placement.__struct_fields__:
        if not np.array_equal(getattr(backbone.placement, name), getattr(wanted, name)):
            raise PlanError(f"{name} does not follow from its runs; make the plan by step.plan(backbone)")


def _check_drawn(plan: StepPlan, drawn: DrawnStep) -> None:
    """A strategy only places: all that was drawn is as it was."""
    found, packed = plan.pieces, drawn.packed
    if not isinstance(found, Pieces):
        raise PlanError(f"its pieces are {type(found).__name__}, not Pieces; leave them as they were drawn")
    columns = [(name, getattr(found, name), getattr(packed.pieces, name)) for name in Pieces.__struct_fields__]
    columns += [(name, getattr(plan, name), getattr(packed, name)) for name in _PLACES]
    for name, values, as_drawn in columns:
        if values is as_drawn:  # compared with the digest below
            continue
        values = _column(name, values, len(as_drawn), "pieces as drawn")
        if not np.array_equal(values, as_drawn):
            piece = int(np.argmax(values != as_drawn))
            raise PlanError(
                f"piece {piece} has {name} {values[piece]}, and was drawn with {as_drawn[piece]}; a strategy places "
                f"samples, it does not change what is in them"
            )
    expected = drawn.make(modules={}, plan_digest=b"")
    for name in StepPlan.__struct_fields__:
        if name in _CHECKED_ALONE:
            continue
        value, as_drawn = getattr(plan, name), getattr(expected, name)
        if value is not as_drawn and not (type(value) is type(as_drawn) and np.array_equal(value, as_drawn)):
            raise PlanError(f"its {name} is {value}, and the step was drawn with {as_drawn}; leave it as it was")
    digest = drawn.digest_of(
        Packed(pieces=found, sample=plan.sample, slot=plan.slot, sample_offset=plan.sample_offset, pool=packed.pool)
    )
    if not digest == plan.order_digest == drawn.order_digest:
        raise PlanError(
            f"its pieces have order digest {digest.hex()}, it says {_hex(plan.order_digest)}, and the step was drawn "
            f"with {drawn.order_digest.hex()}; leave the arrays of the step as they are, also in place"
        )


def _modules_of(found: Any, drawn: DrawnStep) -> tuple[ModulePlan, dict[str, ItemPlan]]:
    if not isinstance(found, Mapping) or BACKBONE not in found:
        raise PlanError(f"its modules lack {BACKBONE!r}, which computes the samples")
    backbone = found[BACKBONE]
    if not isinstance(backbone, ModulePlan):
        raise PlanError(f"module {BACKBONE} needs a ModulePlan, not {type(backbone).__name__}")
    if _sizes(backbone.layout) != _sizes(drawn.layout):
        raise PlanError(f"module {BACKBONE} is planned for {backbone.layout!r}; the job has {drawn.layout!r}")
    modules: dict[str, ItemPlan] = {}
    for name in drawn.modules:
        if name not in found:
            unknown = [str(each) for each in found if each != BACKBONE and each not in drawn.modules]
            instead = f", and has {', '.join(unknown)}" if unknown else ""
            raise PlanError(
                f"it lacks the module {name!r} of the recipe{instead}: its items would be computed by nobody; give "
                f"step.plan(backbone, {name}=step.graph(..., unit={drawn.modules[name].items!r})...balance())"
            )
    for name, module in found.items():
        if name == BACKBONE:
            continue
        if name not in drawn.modules:
            known = ", ".join(drawn.modules) or "none"
            raise PlanError(
                f"module {name!r} is none of the recipe, which has {known}{nearest(name, drawn.modules)}; add it under "
                f"`modules`, or leave it out"
            )
        if not isinstance(module, ItemPlan):
            raise PlanError(f"module {name} needs an ItemPlan, not {type(module).__name__}")
        modules[name] = module
    return backbone, dict(sorted(modules.items()))


def _check_items(name: str, plan: ItemPlan, module: Module, samples: Placement, drawn: DrawnStep) -> None:
    wanted = drawn.items(module.items, module.sizes, module.sources, module=name)
    if plan.unit != module.items:
        raise PlanError(f"module {name} computes {module.items}s, and its graph is over {plan.unit}s")
    if not isinstance(plan.items, Items):
        raise PlanError(f"module {name} needs Items, not {type(plan.items).__name__}")
    count, items = len(wanted), plan.items
    if items is not wanted:
        if len(items) != count:
            raise PlanError(
                f"module {name} has {len(items)} of the {count} {module.items}s of this step: {_named_sources(module)}"
            )
        for column in ("piece", "item", "sample", "offset", "tokens", "size", "segments"):
            values = _column(f"{name}: {column}", getattr(items, column), count, "items")
            differs = values < 0 if column == "size" else values != getattr(wanted, column)  # sizes follow the graph
            if differs.any():
                item = int(np.argmax(differs))
                raise PlanError(
                    f"item {item} of module {name} has {column} {values[item]}, and lies in the step with "
                    f"{getattr(wanted, column)[item]}; make its graph over this step, and keep all items in order"
                )
    axes = {axis: drawn.layout.dp * drawn.layout.consumers_of_replica(axis) for axis in get_args(GridAxis)}
    if plan.axis not in axes or plan.num_consumers != axes[plan.axis]:
        raise PlanError(
            f"module {name} has {plan.num_consumers} consumers at axis {plan.axis!r}; the job has "
            f"{', '.join(f'{number} at {axis}' for axis, number in axes.items())}"
        )
    consumer = _column(f"{name}: consumer_of_item", plan.consumer_of_item, count, "items")
    at_bin = _column(f"{name}: bin_of_item", plan.bin_of_item, count, "items")
    slot = _column(f"{name}: slot_of_item", plan.slot_of_item, count, "items")
    costs = _column(f"{name}: cost_of_item", plan.cost_of_item, count, "items")
    num_rows = drawn.layout.num_microbatches(drawn.num_samples)
    if plan.num_bins not in (1, num_rows) or (plan.num_bins > 1 and drawn.layout.pp > 1):
        raise PlanError(
            f"module {name} has {plan.num_bins} bins; there is 1 for a whole step, or without pipeline stages one for "
            f"each of {num_rows} microbatches"
        )
    in_time = samples.microbatch_of_sample[wanted.sample] if plan.num_bins > 1 else np.zeros(count, np.int64)
    for what, values, wrong, valid in (
        ("consumer", consumer, (consumer < 0) | (consumer >= plan.num_consumers), f"0 to {plan.num_consumers - 1}"),
        ("bin", at_bin, at_bin != in_time, "the microbatch of its sample, or 0 where a step has one bin"),
        ("cost", costs, costs < 0, "0 or more"),
    ):
        if wrong.any():
            item = int(np.argmax(wrong))
            raise PlanError(f"item {item} of module {name} has {what} {values[item]}; it must be {valid}")
    _check_slots(f"module {name}: item", slot, consumer * plan.num_bins + at_bin, "items of a consumer's bin")
    _check_report(name, plan.balance)


def _named_sources(module: Module) -> str:
    if module.sources is None:
        return "it computes those of all sources; leave `sources` out of its graph, and take none away"
    return f"it computes those of {', '.join(module.sources)}; give its graph these sources"


def _check_report(name: str, report: Any) -> None:
    if not isinstance(report, BalanceReport):
        raise PlanError(f"module {name} needs a BalanceReport, not {type(report).__name__}")
    if not (report.cost >= 0 and report.hash_order_cost >= 0 and report.lower_bound >= 1):
        raise PlanError(f"module {name} reports {report}; costs are 0 or more, and the bound is 1 or more")


def _check_slots(what: str, slot: Int64Array, place: Int64Array, held: str) -> None:
    wanted = slots_of(place)
    if not np.array_equal(slot, wanted):
        at = int(np.argmax(slot != wanted))
        raise PlanError(f"{what} {at} has slot {slot[at]}, not {wanted[at]}; {held} are in ascending order")


def _column(name: str, values: Any, count: int, of: str) -> Int64Array:
    if not isinstance(values, np.ndarray) or values.shape != (count,) or values.dtype != np.int64:
        shape = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise PlanError(f"{name} is {shape}, not int64 [{count}], a number for each of the {count} {of}")
    return values


def _sizes(layout: Layout) -> Iterable[object]:
    """All of its sizes: two layouts are equal where samples are placed alike, and modules look at more."""
    return [getattr(layout, name, None) for name in ("dp", "micro_batch_size", "tp", "cp", "pp")]


def _hex(digest: object) -> str:
    return digest.hex() if isinstance(digest, bytes) else repr(digest)
