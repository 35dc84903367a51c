"""Strategies and methods of balance that break one rule each, by name, with what the error must say.

A recipe names one as `tests.support.wrong_strategies:NAME`: the names are those of `STRATEGIES` and `METHODS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from torchmix.errors import SourceExhausted
from torchmix.planner.graph.strategy import flops, vit_flops

Wrong = tuple[Callable[..., Any], str]
_kept: list[Any] = []


def backbone(step: Any, model: Any) -> Any:
    return step.graph("tokens").distribute("DP").cost(flops(model)).balance("rows")


def images(step: Any, model: Any, sources: Any = None) -> Any:
    graph = step.graph("patches", sources, unit="image").distribute("WORLD")
    return graph.cost(vit_flops(model.vision)).balance("lpt")


def right(step: Any, tree: Any, model: Any) -> Any:
    """Breaks no rule."""
    return step.plan(backbone(step, model), vision=images(step, model))


def _altered(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A strategy that gives the right plan with something changed."""
    return lambda step, tree, model: change(right(step, tree, model))


def _field(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    return _altered(lambda plan: replace(plan, **{name: change(getattr(plan, name))}))


def _pieces(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    return _field("pieces", lambda it: replace(it, **{name: to(getattr(it, name)) for name, to in changes.items()}))


def _backbone(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def of(plan: Any) -> Any:
        whole = replace(plan.backbone, **{name: change(getattr(plan.backbone, name))})
        return replace(plan, modules={**plan.modules, "backbone": whole})

    return _altered(of)


def _placement(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    return _backbone("placement", lambda it: replace(it, **{name: change(getattr(it, name))}))


def _vision(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def of(plan: Any) -> Any:
        module = plan.modules["vision"]
        return replace(
            plan, modules={**plan.modules, "vision": replace(module, **{name: change(getattr(module, name))})}
        )

    return _altered(of)


def _items(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    return _vision("items", lambda it: replace(it, **{name: change(getattr(it, name))}))


def _at(place: int, value: int) -> Callable[[Any], Any]:
    def of(values: Any) -> Any:
        found = values.copy()
        found[place] = value
        return found

    return of


def _half(plan: Any) -> Any:
    n = len(plan.pieces) // 2
    half = np.arange(n)
    of = {name: getattr(plan, name)[:n] for name in ("sample", "slot", "sample_offset")}
    return replace(plan, pieces=plan.pieces.take(half), **of)


def _half_of_images(plan: Any) -> Any:
    module = plan.modules["vision"]
    half = np.arange(len(module.items) // 2)
    of = {name: getattr(module, name)[half] for name in ("consumer_of_item", "bin_of_item", "slot_of_item")}
    fewer = replace(module, items=module.items.take(half), cost_of_item=module.cost_of_item[half], **of)
    return replace(plan, modules={**plan.modules, "vision": fewer})


def _swapped(values: Any) -> Any:
    found = values.copy()
    at = int(np.argmax(values != values[0]))
    found[[0, at]] = found[[at, 0]]
    return found


def _raising(error: BaseException) -> Callable[..., Any]:
    def of(step: Any, tree: Any, model: Any) -> Any:
        raise error

    return of


def _written(at: Callable[[Any], Any]) -> Callable[..., Any]:
    """Writes into an array of the step in place."""

    def of(step: Any, tree: Any, model: Any) -> Any:
        plan = right(step, tree, model)
        array = at(step)
        array[0] = array[-1] + 1
        return plan

    return of


def _unlocked(step: Any, tree: Any, model: Any) -> Any:
    rows = step.drawn.packed.pieces.row
    rows.flags.writeable = True
    rows[0] += 1
    return right(step, tree, model)


def _yesterday(step: Any, tree: Any, model: Any) -> Any:
    _kept.append(right(step, tree, model))
    return next(each for each in _kept if each.step < step.drawn.step or len(_kept) < 3)


def _modules(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
    return _field("modules", lambda modules: change(dict(modules)))


def _no_axis(step: Any, tree: Any, model: Any) -> Any:
    return step.graph("tokens").cost(flops(model)).balance("rows").plan()


def _deep(step: Any, tree: Any, model: Any) -> Any:
    return _deep(step, tree, model)


def _with_method(name: str) -> Callable[..., Any]:
    def of(step: Any, tree: Any, model: Any) -> Any:
        graph = step.graph("tokens").distribute("DP").cost(flops(model)).balance(f"{__name__}:{name}")
        return step.plan(graph, vision=images(step, model))

    return of


STRATEGIES: dict[str, Wrong] = {
    "gives_none": (lambda step, tree, model: None, "gives NoneType, not a DGraph or a StepPlan"),
    "gives_a_dict": (lambda step, tree, model: {}, "gives dict, not a DGraph"),
    "gives_samples_alone": (lambda step, tree, model: backbone(step, model), "lacks the module 'vision'"),
    "gives_images": (lambda step, tree, model: images(step, model), "needs a graph over samples that is balanced"),
    "takes_two": (lambda step, tree: None, "raises TypeError: .*takes 2 positional arguments"),
    "asserts": (_raising(AssertionError("no")), "raises AssertionError: no at .*wrong_strategies.py, line"),
    "misses_a_key": (_raising(KeyError("web")), "raises KeyError: 'web'"),
    "misses_a_place": (lambda step, tree, model: [][1], "raises IndexError: list index out of range at"),
    "adds_text": (lambda step, tree, model: step + "", "raises TypeError"),
    "misses_a_name": (lambda step, tree, model: model.visoin, "AttributeError: the recipe has no module 'visoin'"),
    "exits": (_raising(SystemExit(3)), "raises SystemExit: 3"),
    "claims_the_end": (_raising(SourceExhausted("no more")), "step 0: no more"),
    "never_ends": (_deep, "raises RecursionError"),
    "divides": (lambda step, tree, model: 1 // 0, "raises ZeroDivisionError"),
    "knows_no_axis": (_no_axis, r"call distribute\(axis\) before it"),
    "half_of_the_pieces": (
        _altered(_half),
        r"int64 \[\d+\], not int64 \[\d+\], a number for each of the \d+ pieces as",
    ),
    "a_piece_twice": (_pieces(row=lambda it: it[np.r_[0, 0, 2 : len(it)]]), "piece 1 has row"),
    "another_row": (_pieces(row=_at(3, 0)), "piece 3 has row 0, and was drawn with"),
    "another_source": (_pieces(source=_swapped), "piece 0 has source"),
    "another_stream": (_pieces(stream=_swapped), "piece 0 has stream"),
    "another_epoch": (_pieces(epoch=_at(0, 9)), "piece 0 has epoch 9"),
    "another_start": (_pieces(start=_at(2, 7)), "piece 2 has start 7"),
    "fewer_tokens": (_pieces(tokens=_at(0, 1)), "piece 0 has tokens 1"),
    "another_age": (_pieces(drawn_step=_at(0, 8)), "piece 0 has drawn_step 8"),
    "shorter_documents": (_pieces(document_tokens=_at(0, 1)), "piece 0 has document_tokens 1"),
    "pieces_in_floats": (_pieces(row=lambda it: it * 1.0), "row is float64"),
    "pieces_in_a_list": (_pieces(row=lambda it: it.tolist()), "row is list, not int64"),
    "no_pieces": (_field("pieces", lambda it: None), "its pieces are NoneType, not Pieces"),
    "another_sample": (_field("sample", _swapped), "piece 0 has sample"),
    "another_slot": (_field("slot", _at(0, 5)), "piece 0 has slot 5"),
    "another_offset": (_field("sample_offset", _at(0, 8)), "piece 0 has sample_offset 8"),
    "another_step": (_field("step", lambda it: it + 1), "gives the plan of another step: 1"),
    "the_step_before": (_yesterday, "step 1: it gives the plan of another step: 0"),
    "other_sources": (_field("sources", lambda it: it[::-1]), "its sources is"),
    "other_streams": (_field("streams", lambda it: it[1:]), "its streams is"),
    "other_tokens": (_field("num_tokens_global", lambda it: it - 1), "its num_tokens_global is"),
    "tokens_of_one_source": (_field("delivered_tokens", _at(0, 0)), "its delivered_tokens is"),
    "a_smaller_batch": (_field("capacity_tokens", lambda it: it // 2), "its capacity_tokens is"),
    "an_order_digest": (_field("order_digest", lambda it: bytes(8)), "it says 0000000000000000"),
    "a_plan_digest": (_field("plan_digest", lambda it: bytes(8)), "its plan digest is 0000000000000000"),
    "no_plan_digest": (_field("plan_digest", lambda it: None), "its plan digest is None"),
    "writes_into_rows": (_written(lambda step: step.drawn.packed.pieces.row), "ValueError: assignment destination is"),
    "writes_into_the_pool": (
        _written(lambda step: step.drawn.packed.pool.row),
        "ValueError: assignment destination is",
    ),
    "unlocks_rows": (_unlocked, "its pieces have order digest"),
    "no_modules": (_field("modules", lambda it: None), "its modules lack 'backbone'"),
    "no_backbone": (_modules(lambda it: {"vision": it["vision"]}), "its modules lack 'backbone'"),
    "no_vision": (_modules(lambda it: {"backbone": it["backbone"]}), "lacks the module 'vision'"),
    "visoin": (
        _modules(lambda it: {"backbone": it["backbone"], "visoin": it["vision"]}),
        "'vision' .*, and has visoin",
    ),
    "an_unknown_module": (_modules(lambda it: {**it, "audio": it["vision"]}), "module 'audio' is none of the recipe"),
    "items_as_backbone": (_modules(lambda it: {**it, "backbone": it["vision"]}), "backbone needs a ModulePlan"),
    "samples_as_items": (
        _modules(lambda it: {**it, "vision": it["backbone"]}),
        "vision needs an ItemPlan, not ModulePlan",
    ),
    "another_layout": (_backbone("layout", lambda it: type(it)(dp=4, tp=1)), "is planned for Layout"),
    "no_placement": (_backbone("placement", lambda it: None), "needs a Placement, not NoneType"),
    "no_report": (_backbone("balance", lambda it: None), "needs a BalanceReport"),
    "no_bound": (_backbone("balance", lambda it: replace(it, lower_bound=0)), "the bound is 1 or more"),
    "a_rank_too_many": (_placement("dp_rank_of_sample", _at(2, 4)), "sample 2 has rank 4; there are 0 to 3"),
    "a_negative_rank": (_placement("dp_rank_of_sample", _at(2, -1)), "sample 2 has rank -1"),
    "a_bin_too_full": (_placement("dp_rank_of_sample", lambda it: it * 0), "has 4 samples; each has 1"),
    "a_microbatch_too_many": (_placement("microbatch_of_sample", _at(0, 4)), "sample 0 has microbatch 4"),
    "another_slot_of_a_sample": (_placement("slot_of_sample", _at(1, 1)), "sample 1 has slot 1, not 0"),
    "short_ranks": (_placement("dp_rank_of_sample", lambda it: it.astype(np.int32)), "is int32 .*, not int64"),
    "a_plan_of_old_ranks": (_placement("dp_rank_of_sample", lambda it: (it + 1) % 4), "its plan digest is"),
    "half_of_the_images": (_altered(_half_of_images), r"has \d+ of the \d+ images of this step"),
    "images_of_one_source": (
        lambda step, tree, model: step.plan(backbone(step, model), vision=images(step, model, ("code",))),
        r"has \d+ of the \d+ images of this step: it computes those of all sources",
    ),
    "documents_for_images": (
        lambda step, tree, model: step.plan(
            backbone(step, model), vision=step.graph(unit="document").distribute("DP").cost(abs).balance("lpt")
        ),
        "computes images, and its graph is over documents",
    ),
    "an_image_twice": (_items("item", lambda it: it[np.r_[0, 0, 2 : len(it)]]), "item 1 of module vision has item"),
    "an_image_elsewhere": (_items("sample", _at(0, 15)), "item 0 of module vision has sample 15"),
    "images_of_no_tokens": (_items("tokens", lambda it: it * 0), "item 0 of module vision has tokens 0"),
    "images_at_an_offset": (_items("offset", lambda it: it + 1), "item 0 of module vision has offset"),
    "images_of_other_pieces": (_items("piece", _swapped), "item 0 of module vision has piece"),
    "a_negative_size": (_items("size", _at(0, -4)), "item 0 of module vision has size -4"),
    "no_items": (_vision("items", lambda it: None), "vision needs Items, not NoneType"),
    "another_axis": (_vision("axis", lambda it: "DP"), "has 8 consumers at axis 'DP'; the job has 4 at DP"),
    "no_axis": (_vision("axis", lambda it: "TP"), "has 8 consumers at axis 'TP'"),
    "a_consumer_too_many": (_vision("consumer_of_item", _at(0, 8)), "item 0 of module vision has consumer 8"),
    "a_negative_consumer": (_vision("consumer_of_item", _at(0, -1)), "item 0 of module vision has consumer -1"),
    "bins_of_no_microbatch": (_vision("num_bins", lambda it: 3), "has 3 bins; there is 1 for a whole step"),
    "a_bin_of_none": (_vision("bin_of_item", _at(0, 1)), "item 0 of module vision has bin 1"),
    "slots_that_are_taken": (_vision("slot_of_item", lambda it: it * 0), "has slot 0, not 1"),
    "costs_below_zero": (_vision("cost_of_item", lambda it: it - (1 << 60)), "has cost -"),
    "a_plan_of_old_consumers": (_vision("consumer_of_item", lambda it: it[::-1].copy()), "has slot|its plan digest is"),
    "a_wrong_method": (_with_method("ragged"), "the method tests.support.wrong_strategies:ragged, step 0: it raises"),
}


def tires(step: Any, tree: Any, model: Any) -> Any:
    """Answers otherwise when it has been asked often."""
    _kept.append(None)
    return step.graph("tokens").distribute("DP").cost(flops(model)).balance("rows" if len(_kept) < 4 else "none")


def hashes(cost: Any, memory: Any, *, num_buckets: int, bins: int, **rules: Any) -> Any:
    """Follows the order of a set of texts, which differs from process to process."""
    print("a function may print")
    order = np.array([int(each) for each in {str(number) for number in range(len(cost))}])
    return order % (num_buckets * bins)


METHODS: dict[str, Wrong] = {
    "asserts_again": (_raising(AssertionError("no")), "raises TypeError"),
    "no_rules": (lambda cost, memory: cost, "raises TypeError: .*unexpected keyword argument"),
    "gives_nothing": (lambda cost, memory, **rules: None, r"gives object \[\], not one whole number"),
    "ragged": (lambda cost, memory, **rules: [[1], [1, 2]], "raises ValueError"),
    "a_place_too_far": (lambda cost, memory, **rules: cost[len(cost)], "raises IndexError"),
    "below_zero": (lambda cost, memory, **rules: cost * 0 - 1, "puts item 0 into bin -1"),
    "all_in_one": (lambda cost, memory, **rules: cost * 0, "items into bin 0; each has"),
    "fewer": (lambda cost, memory, **rules: cost[1:] * 0, r"gives int64 \[\d+\], not one whole number"),
    "in_floats": (lambda cost, memory, **rules: cost * 0.0, "gives float64"),
}


def __getattr__(name: str) -> Any:
    for table in (STRATEGIES, METHODS):
        if name in table:
            return table[name][0]
    raise AttributeError(f"{sys.modules[__name__]} has no {name}")
