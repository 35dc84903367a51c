"""Names that are imported when they are used: what a package re-exports, rows of tables, functions of recipes."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

from torchmix.errors import RecipeError


def lazy_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """What the `__getattr__` of a package gives.

    Args:
        package: The package's name.
        homes: Module by name; a module that has the package's name before its own is the value itself.
        name: The name that is asked for.

    Raises:
        AttributeError: The package has no such name.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    home = import_module(homes[name])
    return home if homes[name] == f"{package}.{name}" else getattr(home, name)


def of_table(home: str) -> Any:
    """What `module:name` in a table of this package names."""
    return pkgutil.resolve_name(home)


def imported(name: str, where: str) -> Callable[..., Any]:
    """The function or class that `module:function` of a recipe names.

    Args:
        name: What the recipe says.
        where: The path of its key, for errors.

    Raises:
        RecipeError: It cannot be imported here, or is no function.
    """
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(
            f"{name!r} cannot be imported: {error}; write module:function, of a module that every process finds "
            "(PYTHONPATH, or an installed package)",
            where,
        ) from error
    if not callable(found):
        raise RecipeError(f"{name!r} is {type(found).__name__}, not a function", where)
    function: Callable[..., Any] = found
    return function


# --- A function of the user's that has a version.
#
# Only a recipe names one: no catalog, state or message does. Its module is looked for in the recipe's folder first,
# then where Python looks. Cost: importing it, once in each process.


def own_function(words: str, directory: Path, where: str, *, changes: str) -> tuple[Callable[..., Any], str]:
    """Import a function.

    Args:
        words: `module:function`, as the recipe's check lets pass.
        directory: The recipe's folder.
        where: Path of keys in the recipe, for errors.
        changes: When its author gives it another version, and what follows, for errors.

    Returns:
        The function, and what its author calls this version.

    Raises:
        RecipeError: There is no such module or function, or it has no version.
    """
    module_name, _, path = words.partition(":")
    found: Any = _imported_from(module_name, directory, where)
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
            f"gives {changes}",
            where,
        )
    return found, str(version)


def _imported_from(name: str, directory: Path, where: str) -> Any:
    """The module, from the recipe's folder if it is there."""
    here = directory.absolute() / Path(*name.split("."))
    own = next((file for file in (here.with_name(here.name + ".py"), here / "__init__.py") if file.is_file()), None)
    folder = str(directory.absolute())
    sys.path.insert(0, folder)
    try:
        invalidate_caches()
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
