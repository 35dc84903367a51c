"""Which processes make a run's steps, and what of a node they may take: the `loaders` of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from torchmix.errors import OptionError, RecipeError
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.build import build, nearest
from torchmix.recipe.structs import Loaders

MOST_SPARES = 16
MOST_CPU = 4096
MOST_PROCESSES = 256
_ASKED = ("job", "ray", "remote")
_FIRST = {word: f"[node, {word}]" for word in _ASKED}
NODE_FIRST = tuple(_FIRST.values())
"""Lists of `where`."""
_WORKER = ("node", *_ASKED, *NODE_FIRST)
MODES_OF_KEY = {
    "processes": (*_ASKED, *NODE_FIRST),
    "spares": _WORKER,
    "cpu": _WORKER,
    "endpoints": ("remote", _FIRST["remote"]),
    "keys": ("remote", _FIRST["remote"]),
    "autoscale": (*_ASKED, *NODE_FIRST),
    "transform_at": (*_ASKED, *NODE_FIRST),
    "address": ("ray", _FIRST["ray"]),
}
"""Keys that only some values of `where` have, with these; elsewhere they are refused, since nothing would use them."""
_INSTEAD = {
    ("spares", "in_process"): "nothing waits to replace a thread",
    ("cpu", "in_process"): "the threads of a trainer are not bounded",
}
"""What to know of a key that a value of `where` lacks."""


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
    if not isinstance(loaders.where, str) and _mode_of(loaders.where) not in NODE_FIRST:
        raise RecipeError(_why_no_list(loaders.where), f"{where}.where")
    _check_keys_of_mode(loaders, where)
    if loaders.asked == "remote" and not loaders.endpoints:
        raise RecipeError("`remote` needs endpoints: tcp://HOST:PORT, or the folder where loaders register", where)
    if loaders.address == "":
        raise RecipeError("is empty; write HOST:PORT of a Ray cluster, or auto", f"{where}.address")
    scale = loaders.autoscale
    if scale is not None and not 1 <= scale.min <= scale.max <= MOST_CPU:
        raise RecipeError(f"min {scale.min} and max {scale.max}: 1 <= min <= max <= {MOST_CPU}", f"{where}.autoscale")
    if scale is not None and loaders.processes not in (1, "auto"):
        raise RecipeError(
            f"{loaders.processes} processes and autoscale contradict each other; write one of them",
            f"{where}.processes",
        )
    if loaders.memory is not None:
        parse_bytes(loaders.memory, where=f"{where}.memory")


def _why_no_list(words: Sequence[str]) -> str:
    """What is wrong with a list of `where` that is none of `NODE_FIRST`."""
    said = _mode_of(words)
    if len(words) < 2:
        return f"{said} names {len(words)} of those who read, and a list has two" + (
            f": write `where: {words[0]}`" if words else ""
        )
    if len(set(words)) < len(words):
        return f"{said} names one of them twice"
    if "node" not in words:
        instead = " or ".join(_FIRST[word] for word in words)
        return f"{said}: only a node sees how much of its processors and of its memory is used; write {instead}"
    asked = [word for word in words if word != "node"]
    instead = " or ".join(_FIRST[word] for word in asked)
    if words[0] != "node":
        return f"{said}: loaders read all that they are asked for, so a node behind them reads nothing; write {instead}"
    return f"{said}: a page has one owner among loaders of one kind, and these are {len(asked)} kinds; write {instead}"


def _check_keys_of_mode(loaders: Loaders, where: str) -> None:
    """Refuse a key that nothing would use; raises a RecipeError."""
    mode = _mode_of(loaders.where)
    for field in msgspec.structs.fields(Loaders):
        name, owners = field.name, MODES_OF_KEY.get(field.name, (mode,))
        if mode in owners or getattr(loaders, name) == field.default:
            continue
        words = [f"`where: {owners[0]}`", *(f"`{one}`" for one in owners[1:])]
        listed = f"{', '.join(words[:-1])} and {words[-1]} have" if words[1:] else f"{words[0]} has"
        hint = _INSTEAD.get((name, mode), "remove it, or change `where`")
        raise RecipeError(f"only {listed} {name}, and this is `{mode}`: {hint}", f"{where}.{name}")


def _mode_of(where: object) -> str:
    """A value of `where` as one word of `MODES_OF_KEY`."""
    return f"[{', '.join(map(str, where))}]" if isinstance(where, list | tuple) else str(where)


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
        mode, own = _mode_of(keys.get("where", loaders.where)), msgspec.to_builtins(loaders)
        meant = {name: value for name, value in own.items() if mode in MODES_OF_KEY.get(name, (mode,))}
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


def sources_read_first(loaders: Loaders, sources: Collection[str]) -> list[str]:
    """The sources that a node reads before it asks loaders, as `where` and `transform_at` say."""
    words = words_of_sources(loaders.transform_at or "auto", sources)
    return [name for name, word in words.items() if loaders.is_node_first and word == "auto"]


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
    return msgspec.structs.replace(loaders, cpu=None, memory=None) if loaders.asked == "ray" else loaders


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
