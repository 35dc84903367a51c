"""Every key of `loaders` in every mode: what a run is made with differs by it, or it is refused by name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import yaml

from torchmix.catalog.store import Catalog
from torchmix.cli import serve
from torchmix.cli.serve import _processes
from torchmix.errors import RecipeError
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import check_recipe
from torchmix.recipe.loaders import MODES_OF_KEY, NODE_FIRST, limits_of_node
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Loaders, Read, Recipe
from torchmix.service.main import LoaderStart
from torchmix.service.open_fleet import FleetSettings
from torchmix.stateful import shared_loaders
from torchmix.stateful.shared_loaders import behind_node, job_loaders, remote_loaders, with_own_sources
from torchmix.steps.memory_budget import memory_budget
from torchmix.steps.replica_steps import StreamOptions
from torchmix.steps.worker.keeper import options_of

MODES: dict[str, dict[str, Any]] = {
    "in_process": {},
    "node": {},
    "job": {},
    "ray": {},
    "remote": {"endpoints": "e"},
    "[node, job]": {"where": ["node", "job"]},
    "[node, ray]": {"where": ["node", "ray"]},
    "[node, remote]": {"where": ["node", "remote"], "endpoints": "e"},
}
"""Keys that a recipe must have in each mode."""
ALL = tuple(MODES)
REMOTE, RAY = ("remote", "[node, remote]"), ("ray", "[node, ray]")
SHARED = ("job", "ray", "remote", *NODE_FIRST)
USED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "where": (None, ALL),
    "processes": (3, SHARED),
    "spares": (2, ("node", *SHARED)),
    "cpu": (7, ("node", *SHARED)),
    "memory": ("9GiB", ALL),
    "endpoints": ("tcp://a:1", REMOTE),
    "autoscale": ({"min": 2, "max": 5}, SHARED),
    "transform_at": ({"web": "worker"}, SHARED),
    "address": ("a:1", RAY),
    "keys": ("./client-0.secret", REMOTE),
}
"""A value of each key, and the modes that use it; the others refuse it."""


def recipe_with(loaders: dict[str, Any]) -> Recipe:
    return check_recipe(
        {
            "version": 1,
            "seed": 3,
            "batch": {"samples": 8, "length": 64},
            "sources": {"web": {"path": "web.parquet", "tokens": "ids"}},
            "mixture": {"web": 1},
            "loaders": loaders,
        }
    )


@pytest.fixture
def made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Recipe], list[Any]]:
    """What a run and `torchmix serve` make of a recipe's loaders, up to the start of processes."""
    kept: list[Any] = []

    def start_job(start: LoaderStart, *, means: Any, **_: Any) -> Any:
        kept.append((start.cpu, means))
        return SimpleNamespace(fleet=FleetSettings(endpoints=(), lost_s=1.0))

    monkeypatch.setattr(shared_loaders, "open_job_loaders", start_job)
    monkeypatch.setattr(shared_loaders, "catalog_of_part", lambda *_: None)
    monkeypatch.setattr(shared_loaders, "client_keys", lambda *_: None)
    monkeypatch.setattr(serve, "own_board", SimpleNamespace(open=lambda *_, **__: None))
    monkeypatch.setattr(serve, "_serve_fixed", lambda arguments, recipe, *_: kept.append(_processes(arguments, recipe)))
    monkeypatch.setattr(serve, "_serve_scaled", lambda arguments, recipe, start, scale, _: kept.append(scale))

    def made(recipe: Recipe) -> list[Any]:
        kept.clear()
        part, means = part_of(recipe, "train"), recipe.loaders
        if means.where != "in_process":
            kept.append(options_of(means, ()))
        bare = msgspec.structs.replace(part, sources={})
        budget = memory_budget(
            bare,
            cast(Catalog, None),
            Read(),
            limits_of_node(means),
            samples_here=1,
            num_leaders=1,
            options=StreamOptions(look_ahead=1),
        )
        kept.append(budget.limit_bytes)
        started = job_loaders(means, recipe, tmp_path, ClientPlaceTree.from_topology(Topology()), store=None)
        fleet = remote_loaders(means, tmp_path) if started is None else started.fleet
        fleet = behind_node(fleet, means, nodes=1, item_bytes=budget.item_bytes)
        kept.append(with_own_sources(fleet, means, part, recipe, tmp_path, nodes=1))
        if means.asked == "remote":
            path = tmp_path / "recipe.yaml"
            path.write_text(yaml.safe_dump(msgspec.to_builtins(recipe)))
            arguments = argparse.ArgumentParser()
            serve.add_arguments(arguments)
            given = arguments.parse_args([str(path)])
            serve.run(given)
        return [*kept]

    return made


def test_every_key_has_a_row_and_every_mode_a_column() -> None:
    assert set(USED) == set(Loaders.__struct_fields__), "a new key: say which modes use it"
    words = msgspec.json.schema(Loaders)["$defs"]["Loaders"]["properties"]["where"]["anyOf"]
    assert {word for one in words for word in one.get("enum", ())} | {*NODE_FIRST} == set(MODES)
    assert {key: modes for key, (_, modes) in USED.items() if modes != ALL} == MODES_OF_KEY


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", [key for key in USED if key != "where"])
def test_a_key_is_used_or_refused_by_name(key: str, mode: str, made_with: Callable[[Recipe], list[Any]]) -> None:
    value, modes = USED[key]
    own = {"where": mode, **MODES[mode]}
    if mode in modes:
        assert made_with(recipe_with({**own, key: value})) != made_with(recipe_with(own))
        return
    with pytest.raises(RecipeError, match=f"^loaders.{key}: only `where: .*, and this is `{re.escape(mode)}`"):
        recipe_with({**own, key: value})
