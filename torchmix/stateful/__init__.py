"""What the user holds.

In reading order:

    stream.py          StepStream: the steps as a torch dataset, made in this process or in a worker
    serve.py           a leader's exchange with its peers; the steps that a peer receives
    ahead.py           an iterator, run in a thread
    waiting.py         waits that notice lost ranks and log what they wait for
    feed.py            all processing of a step before the trainer asks for it, in a thread
    reports.py         losses from the trainer to the recipe's policy, and the log of its decisions
    step_in_use.py     the step that is being consumed
    shown.py           what a trainer shows of its steps to torchmix top
    reshard.py         what a rank needs to stand in another place of the job
    loader.py          StatefulDataLoader
    metrics.py         the figures of stats(), flat or for Prometheus
    shared_loaders.py  the shared loaders that a run asks, and those that its job starts
    open.py            build_loader
    doors.py           tokens and tensors of a plan, for those who program the parts directly
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
