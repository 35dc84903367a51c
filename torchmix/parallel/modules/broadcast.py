"""Ranks that a trainer serves itself: they fetch nothing, but boundaries.

In: a place tree, and the axis along which the trainer sends. Out: the tree in which ranks behind the first of that axis
have the role of a middle stage: spans and boundaries, no tokens and no labels. Must hold: every rank gets the same
tree. Cost: O(ranks) integers.
"""

from __future__ import annotations

from torchmix.parallel.place_tree import ClientPlaceTree, Role


def tree_with_broadcast(tree: ClientPlaceTree, axis: str | None) -> ClientPlaceTree:
    """The tree of a job whose trainer sends along an axis.

    Args:
        tree: As the job was given.
        axis: `TP`, or None: the trainer sends nothing.
    """
    if axis is None or tree.topology.tp == 1:
        return tree
    topology = tree.topology
    roles = dict(enumerate(tree.role_of_rank))
    for rank in range(topology.world_size):
        place = topology.coordinates_of(rank)
        if place.tp:
            roles[rank] = Role(stage="middle", cp_rank=place.cp)
    return ClientPlaceTree.from_topology(topology, leaders=dict(enumerate(tree.leader_of_rank)), roles=roles)
