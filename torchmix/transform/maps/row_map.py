"""`module:function` in a recipe -> the function.

In: the recipe's words and its folder. Out: a `RowMap`. Must hold: only a recipe names a function: no catalog, state or
message does. Its module is looked for in the recipe's folder first, then where Python looks. Cost: importing it, once
in each process.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchmix.errors import RecipeError


class RowMap(msgspec.Struct, frozen=True, kw_only=True):
    """A function over rows, imported."""

    words: str
    """`module:function`, as the recipe has it."""
    function: Callable[..., Mapping[str, Any]]
    version: str
    """What its author calls this version: lengths in a catalog are true for this one alone."""
    is_random: bool
    """Whether the epoch and the seed of a row decide its tokens."""


def open_maps(words_of_source: Mapping[str, str], directory: Path) -> dict[str, RowMap]:
    """The function of each source that has one, by the source's name; errors as `open_map`."""
    return {name: open_map(words, directory, f"sources.{name}.map") for name, words in words_of_source.items()}


def open_map(words: str, directory: Path, where: str) -> RowMap:
    """Import a function.

    Args:
        words: `module:function`, as the recipe's check lets pass.
        directory: The recipe's folder.
        where: Path of keys in the recipe, for errors.

    Raises:
        RecipeError: There is no such module or function, or it has no version.
    """
    module_name, _, path = words.partition(":")
    found: Any = _import(module_name, directory, where)
    for name in path.split("."):
        if not hasattr(found, name):
            raise RecipeError(f"module {module_name!r} ({_file(module_name)}) has no {path!r}", where)
        found = getattr(found, name)
    if not callable(found):
        raise RecipeError(f"{words!r} is no function", where)
    version = getattr(found, "version", None)
    if not isinstance(version, str | int) or isinstance(version, bool):
        name = path.rpartition(".")[2]
        raise RecipeError(
            f"{words!r} has no version: write `{name}.version = 1` behind the function, and another number whenever it "
            "gives other tokens; the index is made again then",
            where,
        )
    return RowMap(words=words, function=found, version=str(version), is_random=bool(getattr(found, "random", False)))


def _import(name: str, directory: Path, where: str) -> Any:
    """The module, from the recipe's folder if it is there."""
    here = directory.absolute() / Path(*name.split("."))
    own = next((file for file in (here.with_name(here.name + ".py"), here / "__init__.py") if file.is_file()), None)
    folder = str(directory.absolute())
    sys.path.insert(0, folder)
    try:
        importlib.invalidate_caches()
        module = pkgutil.resolve_name(f"{name}:")
    except ImportError as error:
        raise RecipeError(
            f"cannot import {name!r}: {error}; it is looked for in the recipe's folder {folder}, then where Python "
            "looks (PYTHONPATH)",
            where,
        ) from error
    except Exception as error:  # whatever the user's module does while it is imported
        raise RecipeError(f"importing {name!r} fails: {type(error).__name__}: {error}", where) from error
    finally:
        sys.path.remove(folder)
    if own is not None and Path(_file(name)).resolve() != own.resolve():
        raise RecipeError(
            f"the recipe's folder has {own}, but another module {name!r} is loaded already, from {_file(name)}; rename "
            "one of them",
            where,
        )
    return module


def _file(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", None) or "no file")
