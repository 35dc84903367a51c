"""The files of examples/megatron, and of its folders, as modules: scripts that import each other by plain names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron"
PRETRAIN_GPT = EXAMPLE / "pretrain_gpt"


def example_module(name: str, folder: Path = EXAMPLE) -> ModuleType:
    """Import `name`.py of an example's folder as it is imported when a script beside it runs."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
