"""Whole steps of docs/vectors.json against the planner: draw, pack, place, digests."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.docs.test_formats import SOURCES, VECTORS, sizes_of
from torchmix.catalog.store import View
from torchmix.errors import SourceExhausted
from torchmix.parallel.place_tree import Layout
from torchmix.planner.plan import START_DIGEST
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import (
    Balance,
    Batch,
    Group,
    Model,
    Packing,
    RampStage,
    Recipe,
    Selection,
    Shuffle,
    Source,
)


def view_of(source: str, rows: list[int], window_pages: int) -> View:
    tokens = [SOURCES[source].tokens[row] for row in rows]
    return View(
        source=source,
        kept=np.array(rows, np.uint32),
        window_units=window_pages,
        fingerprint="",
        longest_tokens=max(tokens),
        num_tokens=sum(tokens),
    )


def samples_of_run(run: dict[str, Any]) -> int | tuple[RampStage, ...]:
    if isinstance(run["samples"], int):
        return int(run["samples"])
    return tuple(RampStage(from_step=step, samples=samples) for step, samples in run["samples"])


def recipe_of_run(run: dict[str, Any]) -> Recipe:
    views, flats = run.get("views", {}), run.get("flats", {})
    shares = {name: f"{float(100 * Fraction(share)):g}%" for name, share in run["shares"].items()}
    limits = {name: {"max_epochs": run["max_epochs"].get(name), "on_exhausted": "renormalise"} for name in shares}
    return check_recipe(
        Recipe(
            version=1,
            seed=run["seed"],
            batch=Batch(samples=samples_of_run(run), length=run["length"]),
            sources={
                name: Source(
                    path="none",
                    tokens="none",
                    **limits.get(name, {}),
                    documents=tuple(run["documents"][name]) if name in run.get("documents", {}) else None,
                )
                for name in SOURCES
            },
            selections={
                name: Selection(source=view["source"], where="x", **limits.get(name, {}))
                for name, view in views.items()
            },
            mixture={
                name: Group(share=share, flat=tuple(flats[name]), **limits[name]) if name in flats else share
                for name, share in shares.items()
            },
            shuffle=Shuffle(window_pages=run.get("window_pages", 256)),
            packing=Packing(
                method=run["method"],
                overflow=run["overflow"],
                boundaries=run["boundaries"],
                align_tokens=run["align_tokens"],
            ),
            balance=Balance(method="rows", model=Model(**run["model"])),
        )
    )


@pytest.mark.parametrize("run", VECTORS["runs"], ids=lambda run: f"{run['method']}-{run['overflow']}-{run['samples']}")
def test_whole_steps(run: dict[str, Any]) -> None:
    sizes = {name: sizes_of(source) for name, source in SOURCES.items()}
    layout = {"dp": run["dp"], "micro_batch_size": run["micro_batch_size"]}
    part = replace(part_of(recipe_of_run(run), "train"), one_pass=run.get("one_pass", False))
    views = {name: view_of(**view) for name, view in run.get("views", {}).items()}
    planner = Planner(part, sizes, Layout(**layout), views=views)
    assert START_DIGEST.hex() == VECTORS["start_digest"]
    cursor = planner.start()
    for wanted in run["steps"]:
        plan, cursor = planner.step(cursor)
        found = {
            "step": plan.step,
            "pieces": [
                [sample, slot, offset, plan.sources[source], *piece]
                for sample, slot, offset, source, *piece in zip(
                    *(column.tolist() for column in (plan.sample, plan.slot, plan.sample_offset)),
                    *(getattr(plan.pieces, name).tolist() for name in ("source", "epoch", "row", "start", "tokens")),
                    plan.pieces.drawn_step.tolist(),
                    strict=True,
                )
            ],
            "stream_of_piece": [planner.streams[stream] for stream in plan.pieces.stream],
            "dp_rank_of_sample": plan.placement.dp_rank_of_sample.tolist(),
            "microbatch_of_sample": plan.placement.microbatch_of_sample.tolist(),
            **{f"{what}_tokens": getattr(plan, f"{what}_tokens").tolist() for what in ("asked", "drawn", "delivered")},
            "pool_tokens": plan.pool_tokens.tolist(),
            "num_tokens_global": plan.num_tokens_global,
            "cost": plan.balance.cost,
            "hash_order_cost": plan.balance.hash_order_cost,
            "lower_bound": plan.balance.lower_bound,
            "order_digest": plan.order_digest.hex(),
            "plan_digest": plan.plan_digest.hex(),
        }
        assert {name: found[name] for name in wanted} == wanted
    assert [[decision.step, decision.name] for decision in cursor.decisions] == run["decisions"]
    if run.get("one_pass"):
        with pytest.raises(SourceExhausted):
            planner.step(cursor)
