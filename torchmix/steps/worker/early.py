"""A worker that is started before it is known who needs it, or that has served others and waits for who comes next.

At most one waits in a process; one that nobody can use is ended; nothing is started twice. Cost: a process that waits,
some 60 MB, and about half a second of a processor that nobody waits for.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.recipe.loaders import loaders_of
from torchmix.recipe.structs import Loaders
from torchmix.steps.worker.keeper import NodeOptions, is_kept, options_of, start_ahead

LOCAL_RANK_VARIABLE = "LOCAL_RANK"


def start_worker(
    loaders: str | Loaders | Mapping[str, Any] | None = None, *, worker_ignores: Collection[int] = ()
) -> None:
    """Start the worker of this node now, so that its imports run beside those of the trainer and its model's set-up.

    Call it as early as the script can, before `import torch`. The next `build_loader` of this process takes the worker
    if it keeps the worker of this node and has the same options; otherwise it ends it, and says so in the log. Without
    this call `build_loader` starts the worker itself. Where `LOCAL_RANK` is not 0, or the loaders are `in_process`,
    nothing is started.

    Args:
        loaders: As the recipe's `loaders`, or as `build_loader` gets them; None: as a recipe without this key.
        worker_ignores: As `build_loader` gets them.

    Raises:
        OptionError: A value of `loaders` is wrong.
        OSError: The process cannot be started.
    """
    means = loaders_of("start_worker", Loaders(), loaders)
    if means.where != "in_process" and is_first_here():
        start_ahead(options_of(means, worker_ignores))


def is_first_here() -> bool:
    """Whether this is the first rank of its machine, as far as the launcher has said."""
    return os.environ.get(LOCAL_RANK_VARIABLE, "0") == "0"


def start_for_node(tree: ClientPlaceTree, options: NodeOptions) -> None:
    """Start the worker that `open_node` will take, if this leader is likely to keep that of its node and keeps none.

    Args:
        tree: The place tree as this rank sees it.
        options: How workers run.

    Raises:
        OSError: It cannot be started.
    """
    is_likely = tree.topology.rank == tree.leaders[0] if LOCAL_RANK_VARIABLE not in os.environ else is_first_here()
    if tree.is_leader and not is_kept(options) and (tree.topology.world_size == 1 or is_likely):
        start_ahead(options)
