"""Recipes made in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Balance, Batch, Model, Packing, PackingOfSource, RampStage, Recipe, Source


def make_recipe(
    shares: Mapping[str, str],
    *,
    samples: int | Sequence[tuple[int, ...]] = 16,
    length: int = 256,
    seed: int = 7,
    packing: Mapping[str, Any] | None = None,
    sources: Mapping[str, Mapping[str, Any]] | None = None,
    balance: str = "rows",
) -> Recipe:
    """A checked recipe over token sources named as in `shares`; `sources` adds keys of single sources.

    `samples` may be a ramp of (from_step, samples), or with a length as the third.
    """
    extra = sources or {}
    if not isinstance(samples, int):
        samples = tuple(
            RampStage(**dict(zip(("from_step", "samples", "length"), one, strict=False))) for one in samples
        )
    return check_recipe(
        Recipe(
            version=1,
            seed=seed,
            batch=Batch(samples=samples, length=length),
            sources={
                name: _source({"path": f"{name}.parquet", "tokens": "input_ids", **extra.get(name, {})})
                for name in shares
            },
            mixture=dict(shares),
            packing=Packing(**(packing or {})),
            balance=Balance(method=balance, model=Model(layers=32, hidden=4096, ffn=11008, heads=32)),
        )
    )


def _source(keys: dict[str, Any]) -> Source:
    return Source(**{**keys, "packing": PackingOfSource(**keys.get("packing", {}))})
