"""Modules that stand in for others while a test runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Inside, an import of each name gives its module; afterwards what was there before.

    What else is imported inside stays, unlike with `patch.dict(sys.modules, ...)`, which forgets it: it would be loaded
    again by the next test, and a library that may be loaded only once ends the process then.
    """
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
