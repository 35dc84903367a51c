"""What reading takes of a node's memory at most, and what the kernel lets this job use."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchmix.catalog.manifest import most_lists
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.errors import RecipeError
from torchmix.formats.table import row_of
from torchmix.parallel.place_tree import ClientPlaceTree, GridAxis, Layout
from torchmix.parallel.topology import Topology
from torchmix.reader.items import (
    BEGUN_BYTES,
    CACHE_BYTES,
    KEPT_BYTES,
    bytes_of_items,
    decode_threads,
    decoded_at_rank,
    decoded_by_loaders,
    items_of_sources,
    most_item_bytes,
)
from torchmix.reader.open_documents import MEMORY_BYTES
from torchmix.recipe.amounts import bytes_text, parse_bytes
from torchmix.recipe.loaders import limits_of_node
from torchmix.recipe.modules import DOCUMENT
from torchmix.recipe.parts import BLOCK_TOKENS, Part
from torchmix.recipe.ramp import most_length, most_samples, most_tokens
from torchmix.recipe.structs import Batch, Loaders, Read
from torchmix.service.scale.partition import LoaderBudget
from torchmix.steps.replica_steps import StreamOptions

# --- What the kernel lets this job use of a machine: processors and memory.
#
# A limit that cannot be read is no limit. Cost: some small files of /proc and /sys.

GROUPS = Path("/sys/fs/cgroup")


def processors(groups: Path = GROUPS) -> int:
    """Processors that this process may use, at least 1: of its affinity, and of its control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _folders(groups):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            count = min(count, max(1, math.ceil(int(quota) / int(period))))  # "max" is no number
    with suppress(OSError, ValueError, ZeroDivisionError):  # the first version of control groups
        quota_us = int((groups / "cpu" / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            period_us = int((groups / "cpu" / "cpu.cfs_period_us").read_text())
            count = min(count, max(1, math.ceil(quota_us / period_us)))
    return count


def memory_bytes(groups: Path = GROUPS) -> int:
    """Bytes of memory that this job may use: of the machine, and of its control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _folders(groups):
        with suppress(OSError, ValueError):
            limits.append(int((folder / "memory.max").read_text()))
    with suppress(OSError, ValueError):
        limits.append(int((groups / "memory" / "memory.limit_in_bytes").read_text()))
    return min(limits)


def _folders(groups: Path) -> list[Path]:
    """The control group of this process, and those around it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                own = groups / path.lstrip("/")
                return [own, *(parent for parent in own.parents if parent.is_relative_to(groups))]
    return [groups]


# --- What reading takes of a node's memory at most, added up before the run.
#
# Every term is an upper bound, except the first, which is measured, and those of items, which have the mean items of
# the densest source; the catalog and mapped files are the kernel's, and are not counted. Cost: some operations a
# source.

PROCESS_BYTES = 96 << 20
"""A worker process with its imports, its buffers and the allocator's slack; measured 40 to 90 MiB."""
COMPANION_BYTES = 128 << 20
"""Bytes of dictionary pages and the like, which a reader keeps beside the pages that it decodes."""
DECODED_BYTES = 8
"""Most bytes of a token in a decoded page."""
STEP_TOKEN_BYTES = 10
"""Bytes of a token of a built step: 8 of tokens and labels, and what spans take."""
BLOCK_COPIES = 5
"""Copies of the lists of a block of steps, from the map to the message; measured 3.4."""
STEPS_HELD = 6
"""Built steps of a node worker at the usual look-ahead of 2."""
ROW_BYTES = 24
"""Bytes of a row in the order of a window."""
ITEMS = "items read here"
ITEM_BYTES = CACHE_BYTES
"""Most that a node which reads first holds of pages, and of units, of items."""
ROW_WINDOW = 16_384
"""Rows of a window that is not made of pages."""


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a node, in bytes, and what there is."""

    terms: dict[str, int]
    limit_bytes: int
    is_given: bool
    """Whether the recipe or a call says the limit; else it is what the job may use."""
    cache_bytes: int = 0
    """Decoded pages that whoever reads keeps: read.cache; or what the other terms leave of it, where loaders are asked
    for the rest."""
    item_bytes: int = 0
    """Where a node reads first: what each of its readers of items may hold, in `ITEMS`."""
    spills: bool = False
    """Whether a node reads first."""

    @property
    def sum_bytes(self) -> int:
        """All terms."""
        return sum(self.terms.values())

    def text(self) -> str:
        """The sum, spelled out."""
        parts = " + ".join(f"{name} {bytes_text(value)}" for name, value in self.terms.items())
        return f"{parts} = {bytes_text(self.sum_bytes)}"

    def check(self) -> None:
        """Refuse a budget that cannot hold.

        Raises:
            RecipeError: With all terms.
        """
        if self.sum_bytes <= self.limit_bytes:
            return
        what = f"loaders.memory is {bytes_text(self.limit_bytes)}"
        if not self.is_given:
            what = f"this job may use {bytes_text(self.limit_bytes)} (its control group, or the machine)"
        lower = "look_ahead" if self.spills else "read.cache, look_ahead"
        message = (
            f"reading may take {self.text()} of a node, and {what}. Lower {lower} or "
            f"shuffle.window_bytes (which changes the order), or give it more"
        )
        raise RecipeError(message, "loaders.memory")


def memory_budget(
    part: Part,
    catalog: Catalog,
    read: Read,
    loaders: Loaders,
    *,
    samples_here: int,
    num_leaders: int,
    options: StreamOptions,
    samples_of_items: int | None = None,
    num_peers: int = 0,
    layout: Layout | None = None,
) -> MemoryBudget:
    """What the reading of a part may take of a node.

    Args:
        part: What is read.
        catalog: The part's.
        read: The recipe's.
        loaders: As they are used.
        samples_here: Samples of a global batch that the node's leaders get together.
        num_leaders: Leaders on the node that read texts.
        options: The options of each rank.
        samples_of_items: Samples whose items are read here, once each; None: as `samples_here`.
        num_peers: Ranks on the node that get their steps from a leader.
        layout: Sizes of the job; None: one rank.
    """
    is_node, spills = loaders.where != "in_process", loaders.is_node_first
    shared = (loaders.num_told or 0) if loaders.asked == "job" else 0  # others are sized by what is left
    readers = num_leaders
    if is_node:
        readers = shared + 1 if spills else max(1, shared)
    caches = 1 if is_node else num_leaders  # the loaders of a node share one
    sources = [catalog.sources[name] for name in part.sources]
    decoded = sum(source.num_tokens for source in sources if row_of(source.format).type_in_file is None)
    cache = min(parse_bytes(read.cache, where="read.cache"), DECODED_BYTES * decoded)
    rows = sum(_rows_of_window(source, by_page=part.shuffle.method == "page") for source in sources)
    length, steps_held = most_length(part.batch), 2 * options.look_ahead + 2
    has_items = any(module.items != DOCUMENT for module in part.modules.values())
    samples_held = samples_here if has_items else max(samples_here, BLOCK_TOKENS // length)  # of blocks of small steps
    terms = {
        "processes": PROCESS_BYTES * (1 + loaders.spares + shared) if is_node else 0,
        "read.cache": caches * cache,
        "dictionaries": readers * min(COMPANION_BYTES, DECODED_BYTES * decoded),
        "kept documents": readers * min(MEMORY_BYTES, DECODED_BYTES * decoded),
        "orders of windows": readers * 2 * ROW_BYTES * rows,
        "steps": steps_held * STEP_TOKEN_BYTES * samples_held * length,
    }
    if (lists := most_lists(source.lists for source in sources)) is not None:
        copies = steps_held + BLOCK_COPIES
        terms["lists beside ids"] = copies * samples_held * (length * lists.of_token + lists.of_row)
    look_ahead, tokens = options.look_ahead, samples_here * length
    at_peers = _AtPeers(layout or Layout(), num_leaders, num_peers, steps=look_ahead + 2)
    terms["steps at peers"] = math.ceil(STEP_TOKEN_BYTES * tokens * at_peers.copies("CP"))  # each has a slice
    if has_items:
        terms |= _item_terms(
            part,
            catalog,
            loaders,
            at_peers,
            tokens=tokens if samples_of_items is None else samples_of_items * length,
            num_leaders=num_leaders,
            look_ahead=look_ahead,
        )
        most = parse_bytes(read.cache, where="read.cache") if shared else CACHE_BYTES
        if shared or not spills:  # what a node holds that reads first is counted below
            terms["pages of items"] = caches * min(most, _bytes_in_columns(part, catalog))
    limit = memory_bytes() if loaders.memory is None else parse_bytes(loaders.memory, where="loaders.memory")
    item_bytes = 0
    if spills:  # the node keeps what the rest leaves, and loaders of the job have theirs
        terms["cache of loaders"] = cache if loaders.asked == "job" else 0
        left = max(0, limit - sum(terms.values()) + terms["read.cache"])
        num_readers = _readers_of_items(part, catalog)
        item_bytes = min(ITEM_BYTES, left // 2 // num_readers) if num_readers else 0
        terms[ITEMS] = num_readers * item_bytes
        cache = terms["read.cache"] = min(cache, left - terms[ITEMS])
    return MemoryBudget(
        terms={name: value for name, value in terms.items() if value},
        limit_bytes=limit,
        is_given=loaders.memory is not None,
        cache_bytes=cache if spills else parse_bytes(read.cache, where="read.cache"),
        item_bytes=item_bytes,
        spills=spills,
    )


def budget_of_node(
    part: Part,
    catalog: Catalog,
    read: Read,
    loaders: Loaders,
    *,
    here: tuple[int, int],
    layout: Layout,
    options: StreamOptions,
) -> MemoryBudget:
    """What the reading of a part may take of a node, by its ranks: for a run, and for `torchmix check` before it.

    Args:
        part: What is read.
        catalog: The part's.
        read: The recipe's.
        loaders: The recipe's, or what stands in their place.
        here: Leaders on the node that read texts, and peers there, as `ranks_here` and `ranks_of_nodes` count them.
        layout: Sizes of the job.
        options: The options of each rank.
    """
    leaders, peers = here
    return memory_budget(
        part,
        catalog,
        read,
        limits_of_node(loaders),
        samples_here=samples_of_leaders(part, dp=layout.dp, num_leaders=leaders),
        samples_of_items=samples_of_leaders(part, dp=layout.dp, num_leaders=min(leaders, layout.dp)),
        num_leaders=leaders,
        options=options,
        num_peers=peers,
        layout=layout,
    )


class _AtPeers(NamedTuple):
    """How often items that leaders have are held for their peers, too."""

    layout: Layout
    num_leaders: int
    num_peers: int
    """On the node."""
    steps: int
    """That a peer holds."""

    def copies(self, axis: GridAxis) -> Fraction:
        """How often all items of the leaders are held on peers here, and in what a leader sends.

        A rank holds what its consumer computes. While a step is sent, the leader holds a cut and a message for each
        peer, or for the peers of a role together where these are one consumer.
        """
        layout = self.layout
        of_replica = layout.tp * layout.cp * layout.pp
        messages = of_replica - 1
        if axis != "WORLD":
            messages = min(messages, layout.cp * min(layout.pp, 3))  # stages: first, between, last
        held = self.steps * self.num_peers + 2 * self.num_leaders * messages
        if not self.num_leaders:
            return Fraction(0)
        return Fraction(held, self.num_leaders * layout.consumers_of_replica(axis))


def _readers_of_items(part: Part, catalog: Catalog) -> int:
    """What keeps pages of items, and units of a call, on a node that reads first."""
    kinds = {kind for _, kind in items_of_sources(catalog)} if catalog else set()
    units = decoded_by_loaders(part, catalog, has_loaders=True) & kinds
    return (kinds > units) + 2 * bool(units)


def _item_terms(
    part: Part,
    catalog: Catalog,
    loaders: Loaders,
    at_peers: _AtPeers,
    *,
    tokens: int,
    num_leaders: int,
    look_ahead: int,
) -> dict[str, int]:
    """What items take, such as decoded frames and waveforms.

    Steps have the items of their densest source in all of their tokens: files where ranks decode, else units; a rank
    that decodes holds the units of steps that are ready for it. Whoever decodes holds the largest item on each thread.

    Args:
        at_peers: What peers hold.
        tokens: Of a step, of the node's leaders.
        num_leaders: Leaders on the node.
        look_ahead: Of each rank.
    """
    has_loaders = bool(loaders.asked)
    at_rank = decoded_at_rank(part, catalog, has_loaders=has_loaders)
    by_loaders = decoded_by_loaders(part, catalog, has_loaders=has_loaders)
    waiting = ready = sent = decoded_here = decoded_at_ranks = decoded_there = 0
    for name, source in catalog.sources.items():
        of_steps, of_ready, of_peers = 0, 0, Fraction(0)
        for key, module in part.modules.items():
            kind = module.items
            if kind not in source.items or (module.sources is not None and name not in module.sources):
                continue
            files, units = bytes_of_items(source, kind)
            of_steps += files if key in at_rank else units
            of_ready += units if key in at_rank else 0
            of_peers += (files if key in at_rank else units) * at_peers.copies(module.axis)
            largest = most_item_bytes(source, kind)
            if key in at_rank:
                decoded_at_ranks = max(decoded_at_ranks, largest)
            elif kind in by_loaders:
                decoded_there = max(decoded_there, largest)
            if key not in at_rank and (kind not in by_loaders or loaders.is_node_first):
                decoded_here = max(decoded_here, largest)
        whole = max(1, source.num_tokens)
        waiting = max(waiting, -(-of_steps * tokens // whole))
        ready = max(ready, -(-of_ready * tokens // whole))
        sent = max(sent, -(-of_peers * tokens // whole))
    processes = 1 if loaders.where != "in_process" else num_leaders
    decoding = decode_threads() * (processes * decoded_here + num_leaders * decoded_at_ranks)
    of_loaders = (loaders.num_told or 0) if loaders.asked == "job" and by_loaders else 0
    return {
        "items of steps": (2 * look_ahead + 2) * waiting,
        "items at ranks": (look_ahead + 2) * ready,
        "items at peers": sent,
        "decoding": decoding + of_loaders * max(KEPT_BYTES, min(BEGUN_BYTES, num_leaders * decoded_there)),
    }


def _bytes_in_columns(part: Part, catalog: Catalog) -> int:
    """Files of the items that modules compute and that lie in columns, whose pages readers keep."""
    kinds = {module.items for module in part.modules.values()}
    return sum(
        bytes_of_items(source, kind)[0]
        for source in catalog.sources.values()
        for kind in kinds & source.items.keys()
        if source.items[kind].folder is None
    )


def loader_budget(loaders: Loaders, batch: Batch, *, nodes: int) -> LoaderBudget:
    """What shared loaders may take, all together. Where they are on the machines of the run, a processor of each, and
    the memory of built steps of a whole global batch, are the node worker's.

    Args:
        loaders: The recipe's; what it does not say is what this machine has, which stands for all of them.
        batch: The recipe's.
        nodes: Machines that run loaders.
    """
    is_shared = loaders.asked in ("", "job")
    memory = memory_bytes() if loaders.memory is None else parse_bytes(loaders.memory, where="loaders.memory")
    return LoaderBudget(
        cpu=nodes * (loaders.cpu or processors()),
        memory_bytes=nodes * memory,
        node_cpu=nodes if is_shared else 0,
        node_bytes=nodes * (PROCESS_BYTES + STEPS_HELD * STEP_TOKEN_BYTES * most_tokens(batch)) if is_shared else 0,
    )


def samples_of_leaders(part: Part, *, dp: int, num_leaders: int) -> int:
    """Samples of the largest global batch that some leaders get; those of one replica hold its samples each.

    With runs of ranks a replica may have more than its part: then it is taken twice, and a document for what a step has
    beyond its batch.
    """
    most = most_samples(part.batch)
    samples = -(-most * num_leaders // dp)
    if part.balance.context is None:
        return samples
    copies = max(1, -(-num_leaders // dp))
    return min(2 * samples, copies * most) + copies


def ranks_here(tree: ClientPlaceTree, *, is_job: bool, unread: Collection[int] = ()) -> tuple[int, int]:
    """Leaders and peers on this machine: by torchrun's variables where ranks are processes, else all of the job.

    Leaders in `unread` hold no tokens, and neither do their peers: these are not counted.
    """
    world = range(tree.topology.world_size)

    def counted(ranks: range) -> tuple[int, int]:  # a process that is held in reserve is no rank
        mine = [rank for rank in ranks if rank in world and tree.leader_of_rank[rank] not in unread]
        return sum(rank in tree.leaders for rank in mine), sum(rank not in tree.leaders for rank in mine)

    if not is_job:
        return counted(world)
    try:
        first = tree.topology.rank - int(os.environ["LOCAL_RANK"])
        ranks = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        ranks = range(0)
    if not any(rank in ranks for rank in tree.leaders):  # not known: this rank and those that it leads
        leader = tree.leader_of(tree.topology.rank)
        return (0, 0) if leader in unread else (1, sum(tree.leader_of(rank) == leader for rank in world) - 1)
    return counted(ranks)


def ranks_of_nodes(layout: Layout, node_ranks: int | None) -> list[tuple[int, int]]:
    """Leaders and peers of each kind of node that has a leader, where each replica has one.

    Args:
        layout: Sizes of the job.
        node_ranks: Ranks of a node, numbered node by node; None: one has all.
    """
    tree = ClientPlaceTree.from_topology(Topology(dp=layout.dp, tp=layout.tp, cp=layout.cp, pp=layout.pp))
    size = tree.topology.world_size
    each = min(size, node_ranks or size)
    counts = [0] * -(-size // each)
    for rank in tree.leaders:
        counts[rank // each] += 1
    ranks = [min(size, start + each) - start for start in range(0, size, each)]
    return sorted({(count, here - count) for count, here in zip(counts, ranks, strict=True) if count})


def _rows_of_window(source: SourceCatalog, *, by_page: bool) -> int:
    if not by_page:
        return min(ROW_WINDOW, source.num_documents)
    num_pages = max(1, source.sizes.num_pages)
    return -(-source.num_documents * min(num_pages, source.sizes.window_pages) // num_pages)
