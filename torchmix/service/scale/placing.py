"""Where the rows of a source are transformed: in loaders, or in the node worker, which then reads the source itself.

In: of each source what it costs, how its pages are made, and how often it comes; nodes and loaders. Out: a place for
each, with the bytes that travel and the time that is used in either. Must hold: a pure function in integers; a word of
the user's comes first; workers together get no more work than as many loaders have. Cost: some operations a source.

A loader reads a page once for all nodes and sends ids. A node worker sends nothing; but each node reads nearly every
page for the few of its rows that it needs, n (1 - (1 - 1/n)^r) times over n nodes for a page of r rows. So what pays is
decided by nodes, rows a page, and how ids compare to what they are made of. After the reordering of transforms in
MegaScale-Data, which moves those that make data larger behind the road.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

import msgspec

from torchmix.catalog.store import Catalog
from torchmix.service.scale.partition import SourceLoad
from torchmix.service.scale.profile import CostProfile

Place = Literal["loader", "worker"]
SEND_NS_OF_BYTE = 2
"""Time of processors of both sides for a byte of ids, encrypted: 2.0 to 2.3 s a GB as measured."""
MOST_ROWS = 4096
"""More rows of a page make no difference that counts."""


class SourceTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One source, for a step."""

    name: str
    read_bytes: int
    """Bytes of files, where each page is read once."""
    sent_bytes: int
    """Bytes of ids."""
    busy_ns: int
    """Time of a reading thread, where each page is read once."""
    page_rows: int
    """Rows of a page, mean; 1 or more."""
    is_by_row: bool
    """Whether the time is that of rows, as where text is tokenized; else it is that of pages."""
    has_images: bool = False
    """It stays with loaders, where its images are: `decode_at` of a module places these."""


class TransformPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source is transformed, and what it costs in either place, a step."""

    name: str
    place: Place
    loader_bytes: int
    worker_bytes: int
    loader_ns: int
    worker_ns: int


def transform_places(
    sources: Sequence[SourceTraffic],
    *,
    nodes: int,
    loaders: int,
    said: Mapping[str, str] | None = None,
) -> dict[str, TransformPlace]:
    """Where each source is transformed, by name.

    Args:
        sources: Their order means nothing.
        nodes: Node workers, 1 or more.
        loaders: Loaders, 1 or more.
        said: The user's word for some sources; `auto` is none.
    """
    said = {name: word for name, word in (said or {}).items() if word != "auto"}
    found = {source.name: _costs(source, nodes) for source in sources}
    total = sum(one.loader_ns for one in found.values())
    room = nodes * total // (nodes + loaders) - sum(
        one.worker_ns for name, one in found.items() if said.get(name) == "worker"
    )
    with_images = {source.name for source in sources if source.has_images}
    gains = sorted(found.values(), key=lambda one: (one.worker_bytes - one.loader_bytes, one.name))
    chosen = {name for name, place in said.items() if place == "worker"}
    for one in gains:
        pays = one.worker_bytes < one.loader_bytes and one.worker_ns <= one.loader_ns
        if one.name not in said and one.name not in with_images and pays and one.worker_ns <= room:
            room -= one.worker_ns
            chosen.add(one.name)
    return {
        name: TransformPlace(
            name=name,
            place="worker" if name in chosen else "loader",
            loader_bytes=one.loader_bytes,
            worker_bytes=one.worker_bytes,
            loader_ns=one.loader_ns,
            worker_ns=one.worker_ns,
        )
        for name, one in found.items()
    }


def traffic_of(loads: Sequence[SourceLoad], catalog: Catalog, profile: CostProfile) -> list[SourceTraffic]:
    """What sources move in a step.

    Args:
        loads: What they cost a step.
        catalog: Of these sources, open.
        profile: Of this catalog.
    """
    found = []
    for load in loads:
        source, cost = catalog.sources[load.name], profile.sources[load.name]
        found.append(
            SourceTraffic(
                name=load.name,
                read_bytes=load.cost * cost.read_bytes // max(1, cost.busy_ns),
                sent_bytes=load.cost * cost.sent_bytes // max(1, cost.busy_ns),
                busy_ns=load.cost,
                page_rows=max(1, source.num_documents // max(1, source.pages.num_pages)),
                is_by_row=source.tokenizer is not None or source.map is not None,
                has_images=source.images is not None,
            )
        )
    return found


def times_read(nodes: int, page_rows: int) -> Fraction:
    """How often a page is read where each node reads what it needs."""
    rows = min(max(1, page_rows), MOST_ROWS)
    return nodes * (1 - Fraction(nodes - 1, nodes) ** rows)


def _costs(source: SourceTraffic, nodes: int) -> TransformPlace:
    times = times_read(nodes, source.page_rows)
    return TransformPlace(
        name=source.name,
        place="loader",
        loader_bytes=source.read_bytes + source.sent_bytes,
        worker_bytes=int(source.read_bytes * times),
        loader_ns=source.busy_ns + SEND_NS_OF_BYTE * source.sent_bytes,
        worker_ns=source.busy_ns if source.is_by_row else int(source.busy_ns * times),
    )
