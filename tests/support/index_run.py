"""A process that indexes a recipe, and may kill itself at its n-th call that alters the disk.

    python -m tests.support.index_run RECIPE [--die-at N]

Prints `indexing` when it starts and `calls N fingerprint F` at its end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

ALTERING = ((os, "fsync"), (os, "pwrite"), (Path, "replace"), (Path, "mkdir"), (Path, "open"), (Path, "unlink"))


class CountedCalls:
    """Counts calls that alter the disk; one of them is not made, and ends the process as a power button does."""

    def __init__(self, die_at: int) -> None:
        self.count = 0
        self._die_at = die_at

    def wrap(self, owner: Any, name: str) -> None:
        """Count the calls of `owner.name`."""
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.count == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return original(*args, **kwargs)

        setattr(owner, name, call)


def main() -> None:
    """Index, counted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--die-at", type=int, default=-1)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    calls = CountedCalls(arguments.die_at)
    for owner, name in (*ALTERING, (shutil, "rmtree")):
        calls.wrap(owner, name)
    print("indexing", flush=True)
    catalog = index_recipe(recipe, arguments.recipe.parent)
    print(f"calls {calls.count} fingerprint {catalog.fingerprint}", flush=True)


if __name__ == "__main__":
    main()
