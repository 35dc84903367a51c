"""The files of examples/megatron as modules: they are scripts that import each other by plain names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron"


def example_module(name: str) -> ModuleType:
    """Import examples/megatron/`name`.py as it is imported when train.py runs."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLE))
