"""Which processes make a run's steps, and what of a node they may take: the `loaders` of a recipe.

In: the recipe's `loaders`, and what a call or a flag says in its place. Out: checked values. Must hold: nothing here
decides the order, so a run may go on with others; a wrong key or value names the nearest valid one. Cost: none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from torchmix.errors import OptionError, RecipeError
from torchmix.recipe.build import build, nearest
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.structs import Loaders

MOST_SPARES = 16
MOST_CPU = 4096
MOST_PROCESSES = 256
_WHERE = {
    "processes": ("job", "ray", "remote"),
    "endpoints": ("remote",),
    "keys": ("remote",),
    "address": ("ray",),
    "transform_at": ("job", "ray", "remote"),
}
"""Keys that some values of `where` alone have."""


def check_loaders(loaders: Loaders, where: str = "loaders") -> None:
    """Check values that have the right types.

    Raises:
        RecipeError: The first fault, with its path of keys.
    """
    if not 0 <= loaders.spares <= MOST_SPARES:
        raise RecipeError(f"{loaders.spares} is not in [0, {MOST_SPARES}]", f"{where}.spares")
    if loaders.cpu is not None and not 1 <= loaders.cpu <= MOST_CPU:
        raise RecipeError(f"{loaders.cpu} is not in [1, {MOST_CPU}]", f"{where}.cpu")
    if loaders.processes != "auto" and not 1 <= loaders.processes <= MOST_PROCESSES:
        raise RecipeError(f"{loaders.processes} is not in [1, {MOST_PROCESSES}], nor auto", f"{where}.processes")
    if not set(_WHERE["processes"]) & set(loaders.words) and loaders.processes != 1:
        raise RecipeError(
            f"only `where: job`, `ray` and `remote` have processes, and this is `{loaders.where}`", f"{where}.processes"
        )
    if loaders.where == "ray" and loaders.autoscale is not None and loaders.processes not in (1, "auto"):
        raise RecipeError(
            f"{loaders.processes} processes and autoscale contradict each other; write one of them",
            f"{where}.processes",
        )
    if loaders.address is not None and (loaders.where != "ray" or not loaders.address):
        raise RecipeError(f"of a Ray cluster, and this is `where: {loaders.where}`", f"{where}.address")
    if loaders.transform_at is not None and loaders.where not in _WHERE["transform_at"]:
        words = loaders.where if isinstance(loaders.where, str) else f"[{', '.join(loaders.where)}]"
        raise RecipeError(
            f"only `where: job`, `ray` and `remote` have it, and this is `{words}`", f"{where}.transform_at"
        )
    if not isinstance(loaders.where, str) and loaders.where != ("node", "remote"):
        raise RecipeError(f"[{', '.join(loaders.where)}] is not [node, remote], the only list", f"{where}.where")
    if loaders.is_remote and not loaders.endpoints:
        raise RecipeError("`remote` needs endpoints: tcp://HOST:PORT, or the folder where loaders register", where)
    if not loaders.is_remote and (loaders.endpoints or loaders.keys):
        name = "endpoints" if loaders.endpoints else "keys"
        raise RecipeError(f"only `where: remote` has {name}, and this is `where: {loaders.where}`", f"{where}.{name}")
    scale = loaders.autoscale
    if scale is not None and not 1 <= scale.min <= scale.max <= MOST_CPU:
        raise RecipeError(f"min {scale.min} and max {scale.max}: 1 <= min <= max <= {MOST_CPU}", f"{where}.autoscale")
    if loaders.memory is not None:
        parse_bytes(loaders.memory, where=f"{where}.memory")


def loaders_of(call: str, loaders: Loaders, instead: str | Mapping[str, Any] | Loaders | None) -> Loaders:
    """What a run uses: the recipe's values, with those of a call or a flag in their place.

    Args:
        call: Name of the call or flag, for errors.
        loaders: The recipe's.
        instead: A value of `where`; or keys with their values, as a mapping or as text, which leave the recipe's other
            keys as they are: `node,spares=1,memory=8GiB`, or `node,remote`; or a whole `Loaders`.

    Raises:
        OptionError: It is none of these, or has a wrong key or value.
    """
    if instead is None:
        return loaders
    try:
        if isinstance(instead, Loaders):
            instead = msgspec.to_builtins(instead)
        keys = _keys_of_text(instead) if isinstance(instead, str) else instead
        if not isinstance(keys, Mapping):
            raise RecipeError("expected a word of `where`, keys as where=node,spares=1, a mapping, or torchmix.Loaders")
        # Keys of another `where` than the one that is asked for are not meant.
        where = keys.get("where", loaders.where)
        words = tuple(where) if isinstance(where, list | tuple) else (where,)
        own = msgspec.to_builtins(loaders)
        meant = {name: value for name, value in own.items() if name not in _WHERE or set(_WHERE[name]) & set(words)}
        found: Loaders = build(Loaders, {**meant, **keys})
        check_loaders(found, "")
    except RecipeError as error:
        raise OptionError(f"{call}: loaders={instead!r}: {error}") from None
    return found


def words_of_sources(words: str | Mapping[str, str] | None, sources: Collection[str]) -> dict[str, str]:
    """The word of `transform_at` for each source; those that a mapping does not name go by `auto`."""
    if words is None or isinstance(words, str):
        return dict.fromkeys(sources, words or "loader")
    return {name: words.get(name, "auto") for name in sources}


def check_sources_of(loaders: Loaders, sources: Collection[str]) -> None:
    """Refuse a source that there is not.

    Raises:
        OptionError: `transform_at` names it.
    """
    for name in loaders.transform_at if isinstance(loaders.transform_at, dict) else ():
        if name not in sources:
            raise OptionError(f"loaders.transform_at.{name}: the recipe has no such source{nearest(name, sources)}")


def limits_of_node(loaders: Loaders) -> Loaders:
    """The values whose `cpu` and `memory` bound what a node does for itself; with `ray` they bound the cluster's."""
    return msgspec.structs.replace(loaders, cpu=None, memory=None) if loaders.where == "ray" else loaders


def _keys_of_text(text: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    where: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, is_pair, value = map(str.strip, part.partition("="))
        if not is_pair:
            where.append(name)
            continue
        keys[name] = int(value) if value.isascii() and value.isdigit() else value
    if where:
        keys["where"] = where[0] if len(where) == 1 else where
    return keys
