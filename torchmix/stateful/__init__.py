"""What the user holds.

Files in reading order: state.py, header.py, ahead.py, waiting.py, windows_ahead.py, stream.py, serve.py, worker.py,
feed.py, loader.py, open.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmix.stateful.loader import StatefulDataLoader
    from torchmix.stateful.open import build_loader
    from torchmix.stateful.stream import StepStream

__all__ = ["StatefulDataLoader", "StepStream", "build_loader"]

_HOME_OF_LAZY_NAME = {
    "StatefulDataLoader": "torchmix.stateful.loader",
    "StepStream": "torchmix.stateful.stream",
    "build_loader": "torchmix.stateful.open",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF_LAZY_NAME:
        return getattr(import_module(_HOME_OF_LAZY_NAME[name]), name)
    raise AttributeError(f"module 'torchmix.stateful' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
