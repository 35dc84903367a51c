"""Names that are imported when they are used: what a package re-exports, rows of tables, functions of recipes."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
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
