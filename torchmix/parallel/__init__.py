"""Who consumes: the places of the job's ranks, and the roads between them.

In reading order:

    topology.py       coordinates of a rank in (tp, cp, pp, dp)
    place_tree.py     who shares what at each axis, who leads, which role a rank has
    wire.py           what an exchange looks like as bytes
    groups.py         private gloo groups along the tree                                  (torch)
    local_groups.py   the same inside one process, for tests
    fan_out.py        one exchange per global batch, leader to peers; plans compared      (torch)
    ring.py           is the next rank alive: judged by beats and by the kernel
    liveness.py       heartbeats and the abort key: a lost rank is named by all others    (torch)

The names below need no torch. The torch files are imported from where they are defined.
"""

from __future__ import annotations

from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology

__all__ = ["ClientPlaceTree", "Role", "Topology"]
