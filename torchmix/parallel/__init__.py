"""Who consumes: the places of the job's ranks, and the roads between them.

In reading order:

    topology.py       coordinates of a rank in (tp, cp, pp, dp)
    layout.py         data-parallel ranks x samples of a microbatch
    places/           a DeviceMesh as a topology; the leader of each rank
    place_tree.py     who shares what at each axis, who leads, which role a rank has
    modules/          where ranks stand, and rows that travel between the ranks of modules (torch)
    array_form.py     name, dtype and shape of an array in a message
    error_form.py     class, text and arguments of an error in a message
    shares/           what a rank gets of a global batch, as bytes and as tensors             (torch)
    comparison.py     what leaders tell each other of a step
    agreement.py      do all ranks mean the same job
    groups.py         private gloo groups along the tree                                  (torch)
    local_groups.py   the same inside one process, for tests
    fan_out.py        one exchange per global batch, leader to peers; plans compared      (torch)
    liveness/         a rank that is killed, stopped or fails is named by all others      (torch)
    children/         processes that a rank starts and watches

Names that need torch are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology

if TYPE_CHECKING:
    from torchmix.parallel.fan_out import FanOut, local_world, open_fan_out
    from torchmix.parallel.modules.route import HeldRows, Routes, place_rows, route

__all__ = [
    "ClientPlaceTree",
    "FanOut",
    "HeldRows",
    "Role",
    "Routes",
    "Topology",
    "local_world",
    "open_fan_out",
    "place_rows",
    "route",
]

_HOME_OF_LAZY_NAME = {
    "FanOut": "torchmix.parallel.fan_out",
    "HeldRows": "torchmix.parallel.modules.route",
    "Routes": "torchmix.parallel.modules.route",
    "local_world": "torchmix.parallel.fan_out",
    "open_fan_out": "torchmix.parallel.fan_out",
    "place_rows": "torchmix.parallel.modules.route",
    "route": "torchmix.parallel.modules.route",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF_LAZY_NAME:
        return getattr(import_module(_HOME_OF_LAZY_NAME[name]), name)
    raise AttributeError(f"module 'torchmix.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
