"""Who consumes: the places of the job's ranks, and the roads between them.

In reading order:

    topology.py      where one rank stands in the training job: coordinates in (tp, cp, pp, dp)
    place_tree.py    who shares what at each axis of the job, and who leads: the ClientPlaceTree of MegaScale-Data
                     (section 4.1)
    routes.py        rows that travel from the ranks that compute them to those that need them, and their gradients
                     back
    wire.py          what travels: forms of arrays and errors in any message, without values of the one and anything
                     executable of the other; and an exchange, a fixed envelope of integers, then one payload of bytes
    agreement.py     all ranks of a job were given the same, and leaders plan the same steps
    groups.py        private gloo groups along the place tree, those of runs of ranks that share documents, and those of
                     a whole world inside one process, whose ranks are threads
    fan_out.py       leader to peers: one exchange per global batch and leader; each rank gets the batch of its role
    liveness/        which ranks live: a rank that is killed, stopped or fails is named by all others, which then end
    children.py      processes that work for a rank: how they start, what they may take, and whether they are alive
    keeper.py        one keeper of what works for a process: seats are started, watched, started again later each time,
                     and ended

Names that need torch are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchmix.lazy_names import lazy_name
from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology

if TYPE_CHECKING:
    from torchmix.parallel.fan_out import FanOut, apart, local_world, open_fan_out
    from torchmix.parallel.groups import ContextGroup, ContextGroups, context_groups, whole_replicas
    from torchmix.parallel.routes import HeldRows, Routes, place_rows, route

__all__ = [
    "ClientPlaceTree",
    "ContextGroup",
    "ContextGroups",
    "FanOut",
    "HeldRows",
    "Role",
    "Routes",
    "Topology",
    "apart",
    "context_groups",
    "local_world",
    "open_fan_out",
    "place_rows",
    "route",
    "whole_replicas",
]

_HOME_OF_LAZY_NAME = {
    "ContextGroup": "torchmix.parallel.groups",
    "ContextGroups": "torchmix.parallel.groups",
    "context_groups": "torchmix.parallel.groups",
    "FanOut": "torchmix.parallel.fan_out",
    "apart": "torchmix.parallel.fan_out",
    "HeldRows": "torchmix.parallel.routes",
    "Routes": "torchmix.parallel.routes",
    "local_world": "torchmix.parallel.fan_out",
    "open_fan_out": "torchmix.parallel.fan_out",
    "place_rows": "torchmix.parallel.routes",
    "route": "torchmix.parallel.routes",
    "whole_replicas": "torchmix.parallel.groups",
}


def __getattr__(name: str) -> Any:
    return lazy_name(__name__, _HOME_OF_LAZY_NAME, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
