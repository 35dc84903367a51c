"""Strategies and methods of balance as a user writes them: those of the paper's use cases, and faulty ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from torchmix.planner.graph.strategy import activations, flops, vit_flops

_calls = itertools.count()


def llm_balance(step: Any, tree: Any, model: Any) -> Any:
    graph = step.graph("tokens").mix(step.schedule)
    graph = graph.distribute("DP")
    graph = graph.cost(flops(model), memory=activations(model))
    graph = graph.balance("rows", level="both", microbatches="unimodal")
    return graph.broadcast_at("TP")


def turning(step: int) -> dict[str, float]:
    """Shares of three sources, as a function of the step."""
    return {"web": 1 + step % 5, "prose": 2.0, "tiny": 0.2 if step % 2 else 0.1}


def with_turning_shares(step: Any, tree: Any, model: Any) -> Any:
    return step.graph("tokens").mix(turning).distribute("DP").cost(flops(model)).balance("rows")


def vlm_balance(step: Any, tree: Any, model: Any) -> Any:
    images = step.graph("patches", unit="image").distribute("WORLD")
    images = images.cost(vit_flops(model.vision)).balance("lpt", scope="step")
    return step.plan(backbone=llm_balance(step, tree, model), vision=images)


def restless(step: Any, tree: Any, model: Any) -> Any:
    return step.graph("tokens").distribute("DP").cost(flops(model)).balance("none" if next(_calls) % 2 else "rows")


def of_no_step(step: Any, tree: Any, model: Any) -> Any:
    return 5


def in_turn(cost: np.ndarray, memory: np.ndarray, *, num_buckets: int, bins: int, **rules: Any) -> np.ndarray:
    return np.argsort(np.argsort(cost, kind="stable")) % (num_buckets * bins)


def losing_one(cost: np.ndarray, memory: np.ndarray, **rules: Any) -> np.ndarray:
    return np.zeros(len(cost) - 1, np.int64)


def beyond(cost: np.ndarray, memory: np.ndarray, *, num_buckets: int, bins: int, **rules: Any) -> np.ndarray:
    return np.full(len(cost), num_buckets * bins)


def all_in_one(cost: np.ndarray, memory: np.ndarray, **rules: Any) -> np.ndarray:
    return np.zeros(len(cost), np.int64)


def in_floats(cost: np.ndarray, memory: np.ndarray, **rules: Any) -> np.ndarray:
    return np.zeros(len(cost))


def changing(cost: np.ndarray, memory: np.ndarray, *, num_buckets: int, bins: int, **rules: Any) -> np.ndarray:
    return (np.arange(len(cost)) + next(_calls)) % (num_buckets * bins)
