"""What each source costs a loader, and what that makes of loaders: their number, sources and places."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from fractions import Fraction
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from torchmix.catalog.array_files import write_whole
from torchmix.catalog.in_store import address_of, put_file
from torchmix.catalog.manifest import flush_folder
from torchmix.catalog.store import Catalog, SourceCatalog, open_part
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale
from torchmix.mixture.shares import SHARE_ONE
from torchmix.planner.drawing import NOT_DECIDED, SharesOfStep
from torchmix.planner.stream_order import tokens_of_streams
from torchmix.reader.items import bytes_of_items, decoded_by_loaders, most_item_bytes
from torchmix.reader.source_pages import BATCH_BYTES
from torchmix.recipe.parts import Part, most_steps_of_block
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.streams import row_sets_of
from torchmix.recipe.structs import Autoscale
from torchmix.service.routing import run_pages
from torchmix.service.scale.partition import LoaderBudget, LoaderPlace, SourceLoad, partition
from torchmix.service.scale.rule import ScaleBounds
from torchmix.service.served import transforms_digest

# --- What of the sources, and of the cache, each loader has.
#
# Integers alone; nodes have loaders one by one in turn, so that each has its part of the work; a loader's cache is in
# proportion to the pages that it is to keep, and all caches together are not more than there is. Cost: some operations
# a loader.

LEAST_PART = 8
"""A loader has at least this part of an even split of the cache: pages of other sources are asked of it, too, where
their loaders are lost."""


class LoaderSources(msgspec.Struct, frozen=True, kw_only=True):
    """What one loader has."""

    sources: dict[str, int]
    """Parts of each source, by name."""
    page_bytes: int
    """Decoded pages of these."""


def sources_of_nodes(places: Sequence[LoaderPlace], nodes: int) -> list[list[LoaderSources]]:
    """The loaders of each node."""
    assert len(places) % nodes == 0
    loaders = [LoaderSources(sources=dict(sorted(one.parts.items())), page_bytes=one.page_bytes) for one in places]
    return [loaders[node::nodes] for node in range(nodes)]


def shared_cache(cache_bytes: int, page_bytes: Sequence[int]) -> list[int]:
    """The cache of each loader."""
    count, total = len(page_bytes), sum(page_bytes)
    if not total:
        return [cache_bytes // count] * count
    least = cache_bytes // (LEAST_PART * count)
    left = cache_bytes - least * count
    return [least + left * one // total for one in page_bytes]


# --- What each source of a recipe costs a loader, kept beside its catalog.
#
# The file is replaced in one step; a profile of another catalog, or of other transforms, is refused by name. All
# values are integers, so that whatever follows from a profile is the same on every machine. Cost: one small file.

PROFILE_NAME = "profile.json"
PROFILE_VERSION = 1


class ItemProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What some items of a kind have cost; counts and sums over those items."""

    items: int
    """Items that were read and decoded."""
    tokens: int
    """Tokens that they stand for."""
    source_tokens: int
    """As many of the tokens of the source as these are of its items of the kind."""
    read_ns: int
    """Time to read their bytes, as `busy_ns`."""
    decode_ns: int
    """Time to make units of these, of one thread, as `busy_ns`."""
    file_bytes: int
    """Bytes of their files."""
    unit_bytes: int
    """Bytes of their units."""


class SourceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What some rows of a source have cost; counts and sums over those rows."""

    tokens: int
    """Tokens that were read, 0 where the source has none."""
    busy_ns: int
    """Time that the reading thread took for them, without waiting for a processor: what bounds a loader."""
    cpu_ns: int
    """Time of processors, of all threads."""
    read_bytes: int
    """Bytes read from files."""
    decoded_bytes: int
    """Bytes of decoded pages, or of texts."""
    sent_bytes: int
    """Bytes of ids that a loader would send."""
    window_bytes: int
    """Decoded pages that are kept while a window of the source is read and the next one is made ready."""
    state_bytes: int
    """Memory of a loader for having the source open: what a process took for it beside decoded pages."""
    pages: int
    """Pages of the whole source."""
    items: dict[str, ItemProfile] = msgspec.field(default_factory=dict)
    """Its items, by kind."""


class CostProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the sources of a catalog cost."""

    version: int = PROFILE_VERSION
    catalog: str
    """Fingerprint of the catalog that was measured."""
    transforms: str
    """Digest of the transforms from rows to tokens, in hex."""
    sources: dict[str, SourceProfile]
    """By name."""


def profile_of(catalog: Catalog, seed: int, sources: dict[str, SourceProfile]) -> CostProfile:
    """The profile of a catalog whose sources have been measured."""
    return CostProfile(
        catalog=catalog.fingerprint,
        transforms=transforms_digest(catalog, seed).hex(),
        sources={name: sources[name] for name in sorted(sources)},
    )


def write_profile(folder: Path, profile: CostProfile) -> str:
    """Put a profile into a catalog's folder in one step; returns its path, or its address in a store.

    Raises:
        OSError: The disk is full or the folder cannot be written; the profile that was there stays.
        CatalogError: The catalog lies in a store, which does not take it.
    """
    path = folder / PROFILE_NAME
    content = msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
    if put_file(folder, PROFILE_NAME, content):
        return f"{address_of(folder)}/{PROFILE_NAME}"
    write_whole(path, content)
    flush_folder(folder)
    return str(path)


_decode_profile = msgspec.json.Decoder(CostProfile).decode


def read_profile(folder: Path, catalog: Catalog, seed: int) -> CostProfile:
    """The profile of a catalog.

    Args:
        folder: The catalog's.
        catalog: What the profile must be of.
        seed: The recipe's; maps may draw from it.

    Raises:
        CatalogMissing: There is none.
        CatalogStale: It is of another catalog, other transforms or another version of the format.
        CatalogError: It is damaged or cannot be read.
    """
    path = folder / PROFILE_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CatalogMissing(f"there is no {path}; run torchmix profile to measure what the sources cost") from error
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    try:
        found = _decode_profile(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path} is damaged ({error}); run torchmix profile again") from error
    if found.version != PROFILE_VERSION:
        raise CatalogStale(f"{path} has version {found.version}, this torchmix reads {PROFILE_VERSION}; run it again")
    if found.catalog != catalog.fingerprint:
        raise CatalogStale(
            f"{path} was measured with catalog {found.catalog}, this is catalog {catalog.fingerprint}; run torchmix "
            "profile again"
        )
    transforms = transforms_digest(catalog, seed).hex()
    if found.transforms != transforms:
        raise CatalogStale(
            f"{path} was measured with transforms {found.transforms}, these are {transforms}; run torchmix profile "
            "again"
        )
    if missing := sorted(catalog.sources.keys() - found.sources.keys()):
        raise CatalogStale(f"{path} lacks source {missing[0]!r}; run torchmix profile again")
    return found


# --- Where the rows of a source are transformed: in loaders, or in the node worker, which then reads the source
# itself.
#
# A pure function in integers; a word of the user's comes first; workers together get no more work than as many loaders
# have. Cost: some operations a source.
#
# A loader reads a page once for all nodes and sends ids. A node worker sends nothing; but each node reads nearly every
# page for the few of its rows that it needs, n (1 - (1 - 1/n)^r) times over n nodes for a page of r rows. So what pays
# is decided by nodes, rows a page, and how ids compare to what they are made of. After the reordering of transforms in
# MegaScale-Data, which moves those that make data larger behind the road.

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
    has_items: bool = False
    """It stays with loaders, where its items are: `decode_at` of a module places these."""


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
    with_items = {source.name for source in sources if source.has_items}
    gains = sorted(found.values(), key=lambda one: (one.worker_bytes - one.loader_bytes, one.name))
    chosen = {name for name, place in said.items() if place == "worker"}
    for one in gains:
        pays = one.worker_bytes < one.loader_bytes and one.worker_ns <= one.loader_ns
        if one.name not in said and one.name not in with_items and pays and one.worker_ns <= room:
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
        catalog: The catalog of these sources, open.
        profile: The profile of this catalog.
    """
    found = []
    for load in loads:
        source, cost = catalog.sources[load.name], profile.sources[load.name]
        found.append(
            SourceTraffic(
                name=load.name,
                read_bytes=(load.cost - load.item_cost) * cost.read_bytes // max(1, cost.busy_ns),
                sent_bytes=(load.cost - load.item_cost) * cost.sent_bytes // max(1, cost.busy_ns),
                busy_ns=load.cost,
                page_rows=max(1, source.num_documents // max(1, source.pages.num_pages)),
                is_by_row=source.tokenizer is not None or source.map is not None or source.fim is not None,
                has_items=bool(source.items),
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


# --- What steps cost loaders: tokens of each source by its share, at the price of its profile.
#
# A pure function, of steps that have not come yet, too; a stream of several sources shares its tokens among them by
# their sizes, and one of some rows of a source counts for that source. Items cost a loader what reading their bytes
# takes, and decoding where loaders decode their kind. Cost: some operations a source.

MOST_KEPT = 1024
NOTHING_GONE: frozenset[str] = frozenset()


class ComingLoads:
    """What the steps of a part cost loaders."""

    def __init__(self, part: Part, catalog: Catalog, profile: CostProfile) -> None:
        """Nothing is read.

        Args:
            part: What is planned.
            catalog: The catalog of the part, open.
            profile: The profile of this catalog.
        """
        self._part, self._catalog, self._profile = part, catalog, profile
        self.block_steps = most_steps_of_block(part)
        """As of `ScaleBounds`."""
        sizes = {name: source.sizes for name, source in catalog.sources.items()}
        denied = {
            s: rows for s, name in enumerate(sorted(sizes)) if (rows := catalog.denied_rows.get(name)) is not None
        }
        self._shares = SharesOfStep(part, tokens_of_streams(part, sizes, catalog.views, denied))
        self._streams = sorted(part.streams)
        self._parts = [_sources_of_stream(part, catalog, name) for name in self._streams]
        self._found: dict[tuple[bytes, int, int], list[SourceLoad]] = {}
        decoded = decoded_by_loaders(part, catalog, has_loaders=True)
        self._loads = [_unused(catalog.sources[name], profile.sources[name], decoded) for name in catalog.sources]
        self._prices = {
            name: _prices(catalog.sources[name], profile.sources[name], decoded) for name in catalog.sources
        }

    def mean(
        self,
        start: int,
        stop: int,
        gone: frozenset[str] = NOTHING_GONE,
        decided: Mapping[str, int] = NOT_DECIDED,
    ) -> list[SourceLoad]:
        """The load of each source, by sorted name: the mean over steps [start, stop), one or more.

        Args:
            start, stop: The steps.
            gone: Streams that have run out; their shares go to others.
            decided: Shares that a policy has given; see `SharesOfStep.at`.
        """
        shares = self._shares.mean(start, stop, gone, decided)
        tokens = tokens_before(self._part.batch, stop) - tokens_before(self._part.batch, start)
        key = (b"" if shares is None else shares.tobytes(), tokens, stop - start)
        if key in self._found:  # most intervals of a run are alike
            return self._found[key]
        of_source = dict.fromkeys(self._catalog.sources, Fraction(0))
        for share, parts in zip([] if shares is None else shares.tolist(), self._parts, strict=False):
            for name, part in parts.items():
                of_source[name] += share * part
        if len(self._found) >= MOST_KEPT:
            self._found.clear()
        found = []
        for load in self._loads:
            of_step = of_source[load.name] * tokens / (SHARE_ONE * (stop - start))
            texts, items = (int(of_step * price) for price in self._prices[load.name])
            found.append(replace(load, cost=texts + items, item_cost=items))
        self._found[key] = found
        return found

    def traffic(self, start: int, stop: int) -> list[SourceTraffic]:
        """What each source moves in a step, mean over steps [start, stop)."""
        return traffic_of(self.mean(start, stop), self._catalog, self._profile)


def _prices(source: SourceCatalog, profile: SourceProfile, decoded: Set[str]) -> tuple[Fraction, Fraction]:
    """Nanoseconds of a loader for a token of a source: for its texts, and for the items among them."""
    items = Fraction(0)
    for kind, one in profile.items.items():
        is_read = kind in decoded or source.items[kind].folder is None  # else the node opens the files
        items += Fraction(one.read_ns * is_read + one.decode_ns * (kind in decoded), max(1, one.source_tokens))
    return Fraction(profile.busy_ns, max(1, profile.tokens)), items


def _unused(source: SourceCatalog, profile: SourceProfile, decoded: Set[str]) -> SourceLoad:
    """A source of which no token is asked."""
    table = source.pages
    at_once = max(1, BATCH_BYTES * table.num_pages // max(1, int(table.chunk_bytes.sum())))
    most_loaders = -(-table.num_pages // run_pages(table.num_pages, at_once))
    item_bytes = unit_bytes = 0
    for kind in decoded & source.items.keys():  # an item is decoded by one loader, whichever has its text
        most_loaders = max(most_loaders, len(source.sizes.items[kind].tokens))
        item_bytes += most_item_bytes(source, kind)
        unit_bytes += bytes_of_items(source, kind)[1]
    return SourceLoad(
        name=source.name,
        cost=0,
        state_bytes=profile.state_bytes + item_bytes,
        window_bytes=profile.window_bytes,
        most_loaders=max(1, most_loaders),
        unit_bytes=unit_bytes,
    )


def _sources_of_stream(part: Part, catalog: Catalog, name: str) -> dict[str, Fraction]:
    """Which part of a stream's tokens lies in which source."""
    rows, tokens = row_sets_of(part), dict[str, int]()
    for member in part.streams[name].members:
        source = rows[member].source
        held = catalog.views[member].num_tokens if member in catalog.views else catalog.sources[source].num_tokens
        tokens[source] = tokens.get(source, 0) + held
    total = sum(tokens.values())
    return {source: Fraction(held, total) if total else Fraction(1, len(tokens)) for source, held in tokens.items()}


# --- How many loaders a run may have, and what is known of their work, from what the user says.
#
# A number of loaders needs no profile; `auto` and `autoscale` do. Cost: a partition.

FIRST_STEPS = 100
"""Whose load decides how many loaders `auto` is."""
_EVEN_TOKENS = 1000


def coming_loads(part: Part, folder: Path, *, is_profile_needed: bool = True) -> ComingLoads:
    """What the steps of a part cost.

    Args:
        part: That of training.
        folder: The catalog's.
        is_profile_needed: Whether each token of every source must not count alike where there is no profile.

    Raises:
        CatalogMissing, CatalogStale: There is no profile, or it is of another catalog.
    """
    catalog = open_part(folder, part)
    try:
        return ComingLoads(part, catalog, read_profile(folder, catalog, part.seed))
    except CatalogMissing:
        if is_profile_needed:
            raise
    return ComingLoads(part, catalog, _even_profile(catalog, part.seed))


def bounds_of(
    processes: int | Literal["auto"], autoscale: Autoscale | None, coming: ComingLoads, budget: LoaderBudget
) -> ScaleBounds:
    """How many loaders there may be: as `autoscale` says, else one number.

    Raises:
        OptionError: The budget does not suffice.
    """
    if autoscale is not None:
        return ScaleBounds(least=autoscale.min, most=autoscale.max, budget=budget, block_steps=coming.block_steps)
    count = len(partition(coming.mean(0, FIRST_STEPS), budget).loaders) if processes == "auto" else processes
    return ScaleBounds(least=count, most=count, budget=budget, block_steps=coming.block_steps)


def bounds_of_nodes(
    scale: Autoscale, part: Part, budget: LoaderBudget, *, nodes: int, read_first: Collection[str]
) -> ScaleBounds:
    """How many loaders there may be on the nodes of a job, by what each may have.

    Args:
        scale: For each node.
        part: That of training.
        budget: Of all nodes together.
        nodes: 1 or more.
        read_first: Sources that the nodes read before they ask loaders.
    """
    beside = nodes if read_first else 0
    return ScaleBounds(
        least=scale.min * nodes,
        most=scale.max * nodes,
        budget=budget,
        nodes=nodes,
        beside=beside,
        block_steps=most_steps_of_block(part),
    )


def budget_of_cluster(cpu: int | None, memory_bytes: int | None, resources: Mapping[str, float]) -> LoaderBudget:
    """What loaders on a Ray cluster may take: what the recipe says, or else all of the cluster.

    Args:
        cpu, memory_bytes: The recipe's, if it says so.
        resources: The cluster's, as Ray names them: `CPU`, and `memory` in bytes.
    """
    return LoaderBudget(
        cpu=cpu or max(1, int(resources.get("CPU", 1))),
        memory_bytes=memory_bytes or int(resources.get("memory", 1 << 62)),
    )


def _even_profile(catalog: Catalog, seed: int) -> CostProfile:
    """A profile by which a token of every source costs the same, and memory is no matter."""
    one = SourceProfile(
        tokens=_EVEN_TOKENS,
        busy_ns=_EVEN_TOKENS,
        cpu_ns=0,
        read_bytes=0,
        decoded_bytes=0,
        sent_bytes=0,
        window_bytes=0,
        state_bytes=0,
        pages=1,
    )
    return profile_of(catalog, seed, dict.fromkeys(catalog.sources, one))
