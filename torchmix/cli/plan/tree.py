"""`torchmix plan --tree`: who reads in a job, and who is served.

In: parallel sizes, and the choice of leaders. Out: the place tree, axis by axis, as text or as values. Must hold: it is
the tree that `build_loader` makes of the same sizes. Cost: O(ranks); neither the catalog nor data are opened.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from torchmix.cli.layout import layout_of_arguments
from torchmix.cli.terminal import at_least, count_text
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import stages_of

MOST_REPLICAS = 4
"""That are printed; the others have the same form."""


def add_tree(parser: argparse.ArgumentParser) -> None:
    """Declare --tree and what it needs beside the sizes of a job."""
    parser.add_argument("--tree", action="store_true", help="show which ranks read and whom they serve, and no steps")
    parser.add_argument(
        "--leaders", choices=("replica", "node", "stage"), default="replica", help="for --tree: which ranks read"
    )
    parser.add_argument("--ranks-per-node", type=at_least(1), metavar="N", help="for --tree: ranks of every node")


def tree_of(arguments: argparse.Namespace, part: Part) -> ClientPlaceTree:
    """The tree of the job that the arguments describe.

    Raises:
        TopologyError: The sizes do not fit each other, the nodes, or a global batch.
    """
    layout = layout_of_arguments(arguments, part)
    for stage in stages_of(part.batch):
        layout.num_microbatches(stage.samples)
    topology = Topology(tp=arguments.tp, cp=arguments.cp, pp=arguments.pp, dp=layout.dp)
    return ClientPlaceTree.from_topology(
        topology, leaders=arguments.leaders, ranks_per_node=arguments.ranks_per_node or topology.world_size
    )


def tree_values(tree: ClientPlaceTree) -> dict[str, Any]:
    """The tree as values for --json; every list is by global rank."""
    sizes = tree.topology
    return {
        **{axis: getattr(sizes, axis) for axis in ("tp", "cp", "pp", "dp")},
        "leaders": list(tree.leaders),
        "leader_of_rank": list(tree.leader_of_rank),
        "replica_of_rank": list(tree.replica_of_rank),
        "stage_of_rank": [role.stage for role in tree.role_of_rank],
        "cp_rank_of_rank": [role.cp_rank for role in tree.role_of_rank],
    }


def tree_lines(tree: ClientPlaceTree) -> list[str]:
    """The tree as text: a line for each place of a replica, slice and stage, with its ranks; leaders have a star."""
    sizes = tree.topology
    served = Counter(tree.leader_of_rank)
    lines = [
        f"{count_text(sizes.world_size)} ranks: dp {sizes.dp} x cp {sizes.cp} x pp {sizes.pp} x tp {sizes.tp}; "
        f"{count_text(len(tree.leaders))} of them read, each for {_range_text(list(served.values()))} ranks"
    ]
    ranks_of_place: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(sizes.world_size):
        at = sizes.coordinates_of(rank)
        ranks_of_place.setdefault((at.dp, at.cp, at.pp), []).append(rank)
    above: tuple[int, ...] = ()
    for place in sorted(ranks_of_place):
        dp, cp, pp = place
        if dp == MOST_REPLICAS:
            lines.append(f"... and {count_text(sizes.dp - dp)} more replicas")
            break
        if place[:1] != above[:1]:
            lines.append(f"dp {dp}")
        if place[:2] != above[:2]:
            lines.append(f"  cp {cp}")
        above = place
        ranks = ranks_of_place[place]
        leaders = sorted({tree.leader_of_rank[rank] for rank in ranks})
        stars = " ".join(f"{rank}*" if rank in tree.leaders else str(rank) for rank in ranks)
        stage = tree.role_of_rank[ranks[0]].stage
        name = "only" if stage == "only" else f"{pp} ({stage})"
        lines.append(f"    pp {name}  ranks {stars}  read by {' '.join(map(str, leaders))}")
    return lines


def _range_text(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
