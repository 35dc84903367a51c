"""What steps cost loaders: tokens of each source by its share, at the price of its profile.

In: a part with its catalog and profile; steps, and what the run has decided so far. Out: the load of each source, in
integers, mean of these steps. Must hold: a pure function, of steps that have not come yet, too; a stream of several
sources shares its tokens among them by their sizes, and one of some rows of a source counts for that source. Cost: some
operations a source.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from msgspec.structs import replace

from torchmix.catalog.store import Catalog
from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.planner.shares_of_step import NOT_DECIDED, SharesOfStep
from torchmix.planner.stream_order import tokens_of_streams
from torchmix.reader.page_batches import BATCH_BYTES
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.streams import row_sets_of
from torchmix.service.routing import run_pages
from torchmix.service.scale.partition import SourceLoad
from torchmix.service.scale.placing import SourceTraffic, traffic_of
from torchmix.service.scale.profile import CostProfile, SourceProfile

MOST_KEPT = 1024
NOTHING_GONE: frozenset[str] = frozenset()


class ComingLoads:
    """What the steps of a part cost loaders."""

    def __init__(self, part: Part, catalog: Catalog, profile: CostProfile) -> None:
        """Nothing is read.

        Args:
            part: What is planned.
            catalog: Of the part, open.
            profile: Of this catalog.
        """
        self._part, self._catalog, self._profile = part, catalog, profile
        sizes = {name: source.sizes for name, source in catalog.sources.items()}
        denied = {
            s: rows for s, name in enumerate(sorted(sizes)) if (rows := catalog.denied_rows.get(name)) is not None
        }
        self._shares = SharesOfStep(part, tokens_of_streams(part, sizes, catalog.views, denied))
        self._streams = sorted(part.streams)
        self._parts = [_sources_of_stream(part, catalog, name) for name in self._streams]
        self._found: dict[tuple[bytes, int, int], list[SourceLoad]] = {}
        self._loads = [_unused(catalog, name, profile.sources[name]) for name in catalog.sources]

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
        self._found[key] = [
            replace(load, cost=cost_of(self._profile.sources[load.name], of_source[load.name], tokens, stop - start))
            for load in self._loads
        ]
        return self._found[key]

    def traffic(self, start: int, stop: int) -> list[SourceTraffic]:
        """What each source moves in a step, mean over steps [start, stop)."""
        return traffic_of(self.mean(start, stop), self._catalog, self._profile)


def cost_of(profile: SourceProfile, share: Fraction, tokens: int, steps: int) -> int:
    """Nanoseconds of a loader, a step, for a source's share of 2^32 of the tokens of some steps."""
    return int(share * tokens * profile.busy_ns / (SHARE_ONE * max(1, profile.tokens) * steps))


def _unused(catalog: Catalog, name: str, profile: SourceProfile) -> SourceLoad:
    """A source of which no token is asked."""
    table = catalog.sources[name].pages
    at_once = max(1, BATCH_BYTES * table.num_pages // max(1, int(table.chunk_bytes.sum())))
    return SourceLoad(
        name=name,
        cost=0,
        state_bytes=profile.state_bytes,
        window_bytes=profile.window_bytes,
        most_loaders=max(1, -(-table.num_pages // run_pages(table.num_pages, at_once))),
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
