"""Which loaders read which sources: a pure function of what the sources cost and of what loaders may take.

Every source has a loader; the budgets hold, or an error says by how much they do not; the answer depends on nothing
else, ties go by name, and all of it is integers. Cost: some 20 ns for each source, part of one and loader; 306 sources
on 64 loaders take 20 ms.

Three stages, after MegaScale-Data (section 5.1):

1. Sources, sorted by cost, are cut into clusters where neighbours differ most.
2. A source of the cheapest cluster has one worker, and one of another as many as its cluster costs more, within the
   bound of the source. All workers share what is left of the budget beside the node worker. So there are as many
   loaders as there are workers, or as the budget allows, if that is less.
3. Each source is cut into parts of about an eighth of a loader's work, and the parts go to the least loaded loaders,
   large ones first: on those that have the source already, as long as they have room. A source whose pages do not fit
   beside the others is cut further, which is where memory decides instead of cost.

The paper gives each source loaders of its own. Here small sources share one, since a loader has no state that a change
of the mixture could disturb.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from torchmix.errors import OptionError
from torchmix.reader.items import KEPT_BYTES
from torchmix.recipe.amounts import bytes_text

CLUSTERS = 4
"""Most clusters of sources: the paper found no gain beyond (Figure 19)."""
PARTS_OF_LOADER = 8
"""A part of a source is about this part of a loader's work, so that no loader has much more than the mean."""
SLACK = Fraction(17, 16)
"""A loader continues with a source up to this much of the mean work."""
LOADER_BYTES = 64 << 20
"""Memory of a loader's process with its imports."""


class SourceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One source, as loaders see it."""

    name: str
    cost: int
    """Nanoseconds of a loader that a step takes, mean; 0 or more."""
    item_cost: int = 0
    """What items take of these."""
    state_bytes: int
    """Memory of each loader that has it open."""
    window_bytes: int
    """Decoded pages, shared out among its loaders."""
    most_loaders: int
    """That may share it, 1 or more: it has no more runs of pages."""
    unit_bytes: int = 0
    """Units of all its items that loaders decode."""


def bytes_of_process(loads: Sequence[SourceLoad]) -> int:
    """Memory of a loader whatever its sources are: its process, and the units that it gave last, which may be of any
    source where other loaders are lost."""
    return LOADER_BYTES + min(KEPT_BYTES, sum(load.unit_bytes for load in loads))


class LoaderBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What loaders may take, all together."""

    cpu: int
    """Processors; a loader keeps one busy."""
    memory_bytes: int
    node_cpu: int = 0
    """Processors of these that are the node worker's."""
    node_bytes: int = 0
    """Memory of this that is the node worker's."""
    loader_bytes: int | None = None
    """Most memory of one loader, as a pod has it; None: no bound of its own."""

    @property
    def most_processes(self) -> int:
        """Loaders that have a processor each."""
        return self.cpu - self.node_cpu

    def bytes_of_loader(self, processes: int) -> int:
        """What each of some loaders may hold, with its process."""
        each = (self.memory_bytes - self.node_bytes) // processes
        return each if self.loader_bytes is None else min(each, self.loader_bytes)


class LoaderPlace(msgspec.Struct):
    """What one loader is to do."""

    cost: int = 0
    """Nanoseconds a step."""
    memory_bytes: int = 0
    """Beside its process."""
    page_bytes: int = 0
    """Decoded pages in that; the rest are states of sources."""
    parts: dict[str, int] = msgspec.field(default_factory=dict)
    """Parts of each source that it reads, by name; a source has as many parts as all its loaders have together."""


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """Loaders and their sources."""

    clusters: tuple[tuple[str, ...], ...]
    """Names of sources, from the costliest cluster on."""
    workers: dict[str, int]
    """Workers of each source, by the second stage."""
    loaders: tuple[LoaderPlace, ...]

    @property
    def ratio(self) -> Fraction:
        """Cost of the slowest loader over the mean; 1 where nothing costs anything."""
        total = sum(one.cost for one in self.loaders)
        return Fraction(max(one.cost for one in self.loaders) * len(self.loaders), total) if total else Fraction(1)

    def loaders_of(self, name: str) -> list[int]:
        """The loaders of a source."""
        return [number for number, one in enumerate(self.loaders) if name in one.parts]


def partition(
    loads: Sequence[SourceLoad],
    budget: LoaderBudget,
    *,
    processes: int | None = None,
    least: int = 1,
    most: int | None = None,
) -> Partition:
    """Give each source its loaders.

    Args:
        loads: The sources, one or more; their order means nothing.
        budget: What loaders may take.
        processes: Loaders; None: as the sources ask for, within the budget.
        least: Loaders at least, where `processes` is None.
        most: Loaders at most, where `processes` is None; None: as many as have a processor.

    Raises:
        OptionError: The budget has too few processors, or too little memory.
    """
    assert loads and len({load.name for load in loads}) == len(loads), "each source once"
    loads = sorted(loads, key=lambda load: (-load.cost, load.name))
    if budget.most_processes < max(1, least, processes or 0):
        raise OptionError(
            f"{max(1, least, processes or 0)} loader(s) need a processor each beside {budget.node_cpu} of the node "
            f"worker, and the budget has {budget.cpu}; give loaders.cpu more, or ask for fewer loaders"
        )
    clusters = _clusters(loads)
    workers = _workers(clusters)
    ceiling = min(budget.most_processes, budget.most_processes if most is None else most)
    wanted = processes or max(least, min(ceiling, sum(workers.values())))
    counts = [wanted] if processes else _counts(wanted, least, ceiling)
    process = bytes_of_process(loads)
    for count in counts:
        places = _places(loads, count, budget.bytes_of_loader(count) - process)
        if places is not None:
            return Partition(
                clusters=tuple(tuple(load.name for load in cluster) for cluster in clusters),
                workers=workers,
                loaders=tuple(places),
            )
    needed = sum(load.state_bytes + load.window_bytes for load in loads)
    largest = max(loads, key=lambda load: (load.state_bytes + load.window_bytes, load.name))
    each = "" if budget.loader_bytes is None else f", {bytes_text(budget.loader_bytes)} a loader,"
    raise OptionError(
        f"{bytes_text(budget.memory_bytes - budget.node_bytes)} of memory{each} do not hold the sources in "
        f"{' or '.join(map(str, sorted(set(counts))))} loaders: their pages and states are {bytes_text(needed)} at "
        f"least, {bytes_text(largest.state_bytes + largest.window_bytes)} of them those of {largest.name!r}, and a "
        f"process is {bytes_text(process)}; give loaders.memory more, or lower shuffle.window_bytes"
    )


def partition_of_nodes(
    loads: Sequence[SourceLoad], budget: LoaderBudget, *, nodes: int, read_first: Collection[str] = ()
) -> Partition:
    """Give each source its loaders, of which each of some nodes has as many.

    Args:
        loads: As of `partition`.
        budget: The budget of all nodes together.
        nodes: 1 or more.
        read_first: Sources that the nodes read before they ask loaders, each as much as a loader.

    Raises:
        OptionError: The budget has too few processors, or too little memory.
    """
    count = len(partition(loads, budget, least=min(nodes, budget.most_processes)).loaders)
    total = sum(load.cost for load in loads)
    shared = sum(load.cost for load in loads if load.name in read_first)
    taken = min(shared, total * nodes // count)
    if taken:
        loads = [
            replace(load, cost=load.cost - load.cost * taken // shared) if load.name in read_first else load
            for load in loads
        ]
        count = -(-count * (total - taken) // total)
    each = max(1, min(-(-count // nodes), budget.most_processes // nodes))
    return partition(loads, budget, processes=each * nodes)


def _clusters(loads: Sequence[SourceLoad]) -> list[list[SourceLoad]]:
    """Sources in descending order of cost, cut where a source costs the most times its next."""
    gaps = [(Fraction(max(1, one.cost), max(1, other.cost)), -i) for i, (one, other) in enumerate(pairwise(loads))]
    cuts = sorted(1 - i for gap, i in sorted(gaps, reverse=True)[: CLUSTERS - 1] if gap > 1)
    return [list(loads[start:stop]) for start, stop in pairwise([0, *cuts, len(loads)])]


def _workers(clusters: Sequence[Sequence[SourceLoad]]) -> dict[str, int]:
    """Workers of each source: the mean cost of its cluster over that of the cheapest one, to the nearest number."""
    least = _mean(clusters[-1])
    found = {}
    for cluster in clusters:
        level = max(1, int(_mean(cluster) / least + Fraction(1, 2)))
        found.update({load.name: min(level, load.most_loaders) for load in cluster})
    return found


def _mean(cluster: Sequence[SourceLoad]) -> Fraction:
    return Fraction(max(1, sum(load.cost for load in cluster)), len(cluster))


def _counts(wanted: int, least: int, ceiling: int) -> list[int]:
    """Numbers of loaders in the order in which they are tried: more where memory lacks in each, then fewer."""
    found = [wanted]
    while found[-1] < ceiling:
        found.append(min(ceiling, 2 * found[-1]))
    fewer = wanted
    while fewer > least:
        fewer = max(least, fewer // 2)
        found.append(fewer)
    return found


def _places(loads: Sequence[SourceLoad], count: int, room_bytes: int) -> list[LoaderPlace] | None:
    """What each of some loaders does; None where memory lacks."""
    total = sum(load.cost for load in loads)
    unit = max(1, -(-total // (PARTS_OF_LOADER * count)))
    cut = []
    for load in loads:
        of_memory = _least_loaders(load, room_bytes)
        if of_memory is None or of_memory > min(count, load.most_loaders):
            return None
        is_whole = load.most_loaders == 1 or count == 1
        cut.append((load, 1 if is_whole else max(of_memory, min(-(-load.cost // unit), PARTS_OF_LOADER * count))))
    cut.sort(key=lambda one: (-Fraction(one[0].cost, one[1]), one[0].name))
    places = [LoaderPlace() for _ in range(count)]
    limit = SLACK * Fraction(total, count)
    for load, parts in cut:
        holders: list[int] = []
        for part in range(parts):
            cost = load.cost * (part + 1) // parts - load.cost * part // parts
            pages = load.window_bytes * (part + 1) // parts - load.window_bytes * part // parts
            at = _next_place(places, holders, load, parts, cost, pages, limit, room_bytes)
            if at is None:
                return None
            if at not in holders:
                holders.append(at)
                places[at].memory_bytes += load.state_bytes
            place = places[at]
            place.cost += cost
            place.memory_bytes += pages
            place.page_bytes += pages
            place.parts[load.name] = place.parts.get(load.name, 0) + 1
    return places


def _next_place(
    places: Sequence[LoaderPlace],
    holders: Sequence[int],
    load: SourceLoad,
    parts: int,
    cost: int,
    pages: int,
    limit: Fraction,
    room_bytes: int,
) -> int | None:
    """The loader of the next part of a source; None where no loader has the memory."""
    fit = [at for at in holders if places[at].memory_bytes + pages <= room_bytes]
    light = [at for at in fit if places[at].cost + cost <= limit]
    if light:
        return light[0]
    if len(holders) < load.most_loaders:
        more = pages + load.state_bytes
        others = [at for at in range(len(places)) if at not in holders and places[at].memory_bytes + more <= room_bytes]
        lightest = min(others, key=lambda at: (places[at].cost, places[at].memory_bytes, at), default=None)
        if lightest is not None and (parts > 1 or places[lightest].cost + cost > limit):
            fit.append(lightest)
        elif lightest is not None:
            # A small source goes where the memory is, as long as the work stays even.
            fit = [at for at in others if places[at].cost + cost <= limit]
            return min(fit, key=lambda at: (places[at].memory_bytes, places[at].cost, at))
    return min(fit, key=lambda at: (places[at].cost, at), default=None)


def _least_loaders(load: SourceLoad, room_bytes: int) -> int | None:
    """Loaders that hold a source's pages together; None where not even its state fits one."""
    left = room_bytes - load.state_bytes
    if left < 0 or (left == 0 and load.window_bytes):
        return None
    return max(1, -(-load.window_bytes // left)) if left else 1
