"""Names that a package re-exports are imported when they are first used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


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
