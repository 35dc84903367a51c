"""What the user holds.

In reading order:

    arguments.py       what one call of build_loader asks for: checked here, and compared with the other ranks
    stream.py          StepStream: the steps of one replica as a torch dataset, made in this process or in a worker
    reports.py         losses from the trainer to the policy: reduced, decided upon by one rank, and logged
    serve.py           the path of a step from the replica's leader to this rank, and what another place of it needs
    feed.py            the feed: all processing of a step before the trainer asks for it, in a thread of its own
    loader.py          StatefulDataLoader: what the user holds. Iterate, save, load, ask, close
    shared_loaders.py  the shared loaders of a run: those that the recipe names, or those that the job starts
    leader.py          the stream of a leader: catalog, settings, the bound of memory, the worker, and the history
    open.py            build_loader: from a recipe and a topology to the loader of this rank
    tower.py           the units of a module -> what the encoder of a model takes, normalised
    doors.py           low-level doors of loading: the tokens of a plan for one consumer, and the tensors of one role
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchmix.lazy_names import lazy_name

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
    return lazy_name(__name__, _HOME_OF_LAZY_NAME, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
