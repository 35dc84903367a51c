"""What Megatron-LM imports, and a machine without a GPU may lack: stand-ins for names that are never called there.

In: nothing. Out: after `enable()`, `import triton` and `from typing import override` work.

Must hold: what is installed stays as it is; only what is missing is stood in for. Core 0.16 imports triton at its top
level to decorate kernels that this run never starts; the package is a gigabyte, made for GPUs. Current Megatron-LM
takes `typing.override`, which Python has from 3.12 on; with this line 3.10 and 3.11 do too. Functions that Megatron
gives to `torch.compile` run as they are written: their compiler needs a C++ tool chain or a GPU.

Cost: none.
"""

from __future__ import annotations

import importlib.util
import sys
import typing
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.utils._triton
import typing_extensions


def enable() -> None:
    """Stand in for what is missing. Call it before Megatron is imported."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    torch.compile = as_written
    if importlib.util.find_spec("triton") is None:
        torch.utils._triton.has_triton_package = lambda: False
        language = _StandIn("triton.language")
        sys.modules["triton"] = _StandIn(
            "triton", jit=as_written, autotune=as_written, language=language, __version__="3.4.0"
        )
        sys.modules["triton.language"] = language


def as_written(function: Any = None, **options: Any) -> Any:
    """`@triton.jit`, `@torch.compile`, with or without options: the function as it is."""
    return function if function is not None else as_written


class _StandIn(ModuleType):
    """A module whose every name is there, and does nothing."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        self.__path__: list[str] = []
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")
