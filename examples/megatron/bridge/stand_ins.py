"""What Megatron-Bridge imports, and a machine without a GPU lacks: packages whose names are there and compute nothing.

In: nothing. Out: after `enable()`, `import megatron.bridge` works where Transformer Engine and the like are missing.

Must hold: what is installed stays as it is, and Megatron core still finds that they are missing, so it computes by its
own local code. Bridge registers hundreds of models at its import, each with what that model needs; a run of GPT calls
none of it. Core cannot import `nvidia_resiliency_ext` before 0.6, so its module of checkpoints is hidden.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

MISSING_ON_A_CPU = frozenset(
    {"causal_conv1d", "comet_ml", "diffusers", "fast_hadamard_transform", "fla", "flashinfer", "mamba_ssm", "mlflow"}
    | {"mistral_common", "modelopt", "open_clip", "timm", "transformer_engine", "transformer_engine_torch", "wandb"}
)


def enable() -> None:
    """Stand in for what is missing. Call it before Megatron is imported."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is not None:
        import nvidia_resiliency_ext

        if not hasattr(nvidia_resiliency_ext, "__version__"):
            nvidia_resiliency_ext.__version__ = "0.4.1"
            sys.modules["nvidia_resiliency_ext.checkpointing.async_ckpt.core"] = None  # type: ignore[assignment]
    importlib.import_module("megatron.core.models.gpt")  # before a stand-in is there: what is imported, core finds, too
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]  # asked last, for what nobody else has


class _Finder:
    """Finds the missing packages for Bridge, and not for core."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in MISSING_ON_A_CPU or not _is_asked_by_bridge():
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def _is_asked_by_bridge() -> bool:
    """Whether Bridge imports it, and not core for itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("megatron.core", "megatron.bridge")):
            return bool(name.startswith("megatron.bridge"))
        frame = frame.f_back
    return False


class _StandIn(ModuleType):
    """A module whose every name is there: classes that may be derived from, and functions that do nothing."""

    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (torch.nn.Module,), {}) if name[0].isupper() else MagicMock(return_value=None)
        setattr(self, name, found)
        return found
