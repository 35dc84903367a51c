"""A worker that is started before it is known who needs it, so that its imports run beside the trainer's.

At most one waits in a process; one that nobody can use is ended; nothing is started twice. Cost: a process that waits,
some 60 MB, and about half a second of a processor that nobody waits for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.loaders import limits_of_node, loaders_of
from torchmix.recipe.structs import Loaders
from torchmix.steps.memory_budget import processors
from torchmix.steps.worker.keeper import NodeKeeper, NodeOptions

logger = logging.getLogger(__name__)

LOCAL_RANK_VARIABLE = "LOCAL_RANK"
_early_lock = threading.Lock()
_waiting: list[tuple[NodeOptions, NodeKeeper]] = []
"""At most one."""


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


def options_of(means: Loaders, ignored_signals: Collection[int]) -> NodeOptions:
    """How workers run by the recipe's `loaders`."""
    means = limits_of_node(means)
    return NodeOptions(
        ignored_signals=tuple(sorted(ignored_signals)),
        spares=means.spares,
        cpu=means.cpu or processors(),
        memory_bytes=0 if means.memory is None else parse_bytes(means.memory, where="loaders.memory"),
    )


def is_first_here() -> bool:
    """Whether this is the first rank of its machine, as far as the launcher has said."""
    return os.environ.get(LOCAL_RANK_VARIABLE, "0") == "0"


def start_ahead(options: NodeOptions) -> None:
    """Start a worker for `keeper_of`, unless one with these options waits.

    Raises:
        OSError: It cannot be started.
    """
    with _early_lock:
        if not any(waiting == options and keeper.is_of_this_process for waiting, keeper in _waiting):
            _end_waiting()
            _waiting.append((options, NodeKeeper(options)))


def keeper_of(options: NodeOptions) -> NodeKeeper:
    """The keeper that waits, if it has these options, or a new one.

    Raises:
        OSError: A worker cannot be started.
    """
    with _early_lock:
        for waiting, keeper in _waiting:
            if waiting == options and keeper.is_of_this_process:
                _waiting.clear()
                return keeper
        _end_waiting()
        return NodeKeeper(options)


@contextmanager
def taking_what_waits() -> Iterator[None]:
    """Whoever runs inside may take the worker that waits; afterwards none waits, also where it has failed."""
    try:
        yield
    finally:
        end_waiting()


def end_waiting() -> None:
    """End the worker that waits, if one does: it is not needed here."""
    with _early_lock:
        _end_waiting()


def _end_waiting() -> None:
    for waiting, keeper in _waiting:
        if keeper.is_of_this_process:
            logger.info("the worker that was started early, process %d, %s, is not needed here", keeper.pid, waiting)
            keeper.end(farewell_s=0.0, patience_s=0.0)  # nobody has asked it for anything
    _waiting.clear()


def start_for_node(tree: ClientPlaceTree, options: NodeOptions, *, is_open: bool) -> None:
    """Start the worker that `open_node` will take, if this leader is likely to be the keeper of its node.

    Args:
        tree: The place tree as this rank sees it.
        options: How workers run.
        is_open: This process holds a worker with these options already; see `open_node.is_open`.

    Raises:
        OSError: It cannot be started.
    """
    is_likely = tree.topology.rank == tree.leaders[0] if LOCAL_RANK_VARIABLE not in os.environ else is_first_here()
    if tree.is_leader and not is_open and (tree.topology.world_size == 1 or is_likely):
        start_ahead(options)
