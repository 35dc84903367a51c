"""Start a worker process without running the user's script again in it.

A spawned process imports the script that started it, under another name, so that pickled objects find their classes.
What a torchmix worker gets is torchmix's own; importing a training script there costs seconds and hundreds of
megabytes, and fails for scripts without an `if __name__ == "__main__"` guard. Hidden for the moment of the start.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_main_module() -> Iterator[None]:
    """While inside, `multiprocessing` sees an empty `__main__`, which it does not import in the child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
