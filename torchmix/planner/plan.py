"""One step's result: which pieces, in which samples, on which rank, in which microbatch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import Column, SourceSizes, TokenRuns
from torchmix.errors import RecipeError
from torchmix.modalities.table import kind_named
from torchmix.parallel.place_tree import GridAxis, Layout
from torchmix.planner.balance import BalanceReport, Placement
from torchmix.planner.contexts import ContextPlan
from torchmix.planner.pack import Packed, Pieces
from torchmix.recipe.build import nearest
from torchmix.recipe.modules import BACKBONE, DOCUMENT
from torchmix.recipe.structs import Module

# --- The items of a step that a module computes: pieces of documents, or items in them.
#
# An item lies in one piece, so in one sample; its order follows from the samples alone, so it is equal at every
# layout. Cost: a few array operations; none for a recipe without modules.


class Items(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """n items of a step, sorted by (sample, offset). All arrays int64 [n]."""

    piece: Int64Array
    """Index of the piece that holds the item in the plan's pieces."""
    item: Int64Array
    """Number of the item among those of its kind in its source; 0 for a document."""
    sample: Int64Array
    offset: Int64Array
    """First token of the item in its sample."""
    tokens: Int64Array
    """Tokens of the sample that it stands for: the rows that the module gives for it."""
    size: Int64Array
    """What its cost is a function of: the module's column of sizes."""
    segments: Int64Array
    """Parts of it whose units attend to each other, as tiles of an image, grids of a video in time, and chunks of a
    sound: the size divides evenly into them. 1 where the size does not count units."""

    def __len__(self) -> int:
        return len(self.piece)

    def take(self, order: Int64Array) -> Items:
        """The items at some places."""
        return Items(**{name: getattr(self, name)[order] for name in Items.__struct_fields__})


class ItemsOfModule:
    """Finds the items of one module in the pieces of a step."""

    def __init__(self, name: str, module: Module, sources: tuple[str, ...], sizes: Sequence[SourceSizes]) -> None:
        """Look the module's columns up.

        Args:
            name: The module's name, for errors.
            module: From the recipe.
            sources: [S] sorted names of the sources of the part.
            sizes: [S] of each of them.

        Raises:
            RecipeError: A source lacks the column, or no source has such items.
        """
        self.name = name
        self.module = module
        self._sources = sources
        chosen = [s for s, source in enumerate(sources) if module.sources is None or source in module.sources]
        self._columns: dict[int, Int64Array | None] = {}
        """A column of sizes for each source with documents for the module; None: tokens."""
        self._tables: dict[int, tuple[TokenRuns, Int64Array, Column | None]] = {}
        """Items of a source, with their sizes and segments."""
        for s in chosen:
            of_source = sizes[s]
            if module.items == DOCUMENT:
                self._columns[s] = None if module.sizes == "tokens" else self._column(s, of_source.columns)
            elif table := of_source.items.get(module.items):
                column = self._column(s, {"tokens": table.tokens, **table.sizes})
                kind = kind_named(module.items)
                segments = table.sizes.get(kind.segments or "") if module.sizes == kind.units else None
                self._tables[s] = table, column, segments
        if module.sources is not None and module.items != DOCUMENT:
            for s in chosen:
                if s not in self._tables:
                    where = f"modules.{name}.sources"
                    raise RecipeError(f"source {sources[s]!r} has no {module.items}s in its catalog", where)

    def _column(self, source: int, columns: Mapping[str, object]) -> Int64Array:
        wanted = self.module.sizes
        if wanted not in columns:
            valid = sorted({"tokens", *columns})
            raise RecipeError(
                f"{wanted!r} is no column of sizes of source {self._sources[source]!r}{nearest(wanted, valid)}; it has "
                f"{', '.join(valid)}",
                f"modules.{self.name}.sizes",
            )
        column: Int64Array = columns[wanted]  # type: ignore[assignment]
        return column

    def of_step(self, pieces: Pieces, sample: Int64Array, sample_offset: Int64Array) -> Items:
        """The module's items in the samples of a step.

        Args:
            pieces: [n] sorted by (sample, slot).
            sample: [n] sample of each.
            sample_offset: [n] its first token in the sample.

        """
        if self.module.items == DOCUMENT:
            return self._documents(pieces, sample, sample_offset)
        found = [self._inside(s, pieces, sample, sample_offset) for s in sorted(self._tables)]
        joined = {
            name: np.concatenate([np.zeros(0, np.int64), *(getattr(part, name) for part in found)])
            for name in Items.__struct_fields__
        }
        return Items(**joined).take(np.lexsort((joined["offset"], joined["sample"])))

    def _documents(self, pieces: Pieces, sample: Int64Array, sample_offset: Int64Array) -> Items:
        chosen = np.flatnonzero(np.isin(pieces.source, list(self._columns)))
        tokens = pieces.tokens[chosen]
        size = tokens.copy()
        for s, column in self._columns.items():
            if column is None:
                continue
            mine = np.flatnonzero(pieces.source[chosen] == s)
            whole = np.maximum(pieces.document_tokens[chosen[mine]], 1)
            of_document = np.asarray(column[pieces.row[chosen[mine]]], np.int64)
            size[mine] = -(-of_document * tokens[mine] // whole)  # a part of a document counts for its part, rounded up
        return Items(
            piece=chosen,
            item=np.zeros(len(chosen), np.int64),
            sample=sample[chosen],
            offset=sample_offset[chosen],
            tokens=tokens,
            size=size,
            segments=np.ones(len(chosen), np.int64),
        )

    def _inside(self, source: int, pieces: Pieces, sample: Int64Array, sample_offset: Int64Array) -> Items:
        """Items that lie inside the pieces of one source; one across the end of a piece is left out."""
        table, column, segments = self._tables[source]
        piece = np.flatnonzero(pieces.source == source)
        row = pieces.row[piece]
        first = np.asarray(table.first_run_of_row[row], np.int64)
        count = np.asarray(table.first_run_of_row[row + 1], np.int64) - first
        item = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        piece = np.repeat(piece, count)
        offset = np.asarray(table.offset[item], np.int64)
        tokens = np.asarray(table.tokens[item], np.int64)
        start, stop = pieces.start[piece], pieces.start[piece] + pieces.tokens[piece]
        is_inside = (offset >= start) & (offset + tokens <= stop)
        item, piece, offset, tokens = item[is_inside], piece[is_inside], offset[is_inside], tokens[is_inside]
        return Items(
            piece=piece,
            item=item,
            sample=sample[piece],
            offset=sample_offset[piece] + offset - pieces.start[piece],
            tokens=tokens,
            size=np.asarray(column[item], np.int64),
            segments=np.ones(len(item), np.int64) if segments is None else np.asarray(segments[item], np.int64),
        )


# --- `StepPlan`, and its digests.
#
# Pieces are sorted by (sample, slot); the *order digest* is chained over steps and covers no ranks, so it is equal at
# every layout; the *plan digest* covers one step's placement, so it is equal on every leader of one layout. Cost: one
# SHA-256 over 56 bytes a piece.

ORDER_VERSION = 1
"""Version of the rules that decide which pieces are in which sample of which step."""
START_DIGEST = hashlib.sha256(f"torchmix-order-{ORDER_VERSION}".encode()).digest()[:8]
"""Order digest before step 0."""


class ModulePlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one module of the model computes of a step, on a grid of consumers of its own."""

    layout: Layout
    placement: Placement
    """Which rank and microbatch of the grid each sample is for; with `contexts`, the replica of a run's first rank."""
    balance: BalanceReport
    contexts: ContextPlan | None = None
    """With `packing: {method: whole}`: the runs of ranks, and which samples each computes."""


class ItemPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a module of the recipe computes of a step: its n items, each at one consumer. Arrays int64 [n].

    With `items` and the placement of the backbone it is the routing table: item -> (consumer, replica, microbatch,
    sample, offset).
    """

    unit: str
    """What an item is: `document`, or a kind of items as `image`."""
    axis: GridAxis
    """Whose consumers they are."""
    num_consumers: int
    num_bins: int
    """Bins of a consumer: the microbatches of the backbone, or 1 where a whole step is computed together."""
    items: Items
    consumer_of_item: Int64Array
    """In [0, num_consumers), numbered by replica, CP slice, stage and TP rank."""
    bin_of_item: Int64Array
    """In [0, num_bins)."""
    slot_of_item: Int64Array
    """Index in the bin of its consumer; items of a bin are in ascending order."""
    cost_of_item: Int64Array
    balance: BalanceReport


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step. n pieces, G samples, S streams; all arrays int64."""

    step: int
    streams: tuple[str, ...]
    """[S] sorted names of what holds a share, which `pieces.stream` counts."""
    sources: tuple[str, ...]
    """Sorted names of where rows lie, which `pieces.source` counts."""
    pieces: Pieces
    """[n] sorted by (sample, slot)."""
    sample: Int64Array
    """[n] sample of each piece."""
    slot: Int64Array
    """[n] index of the piece in its sample."""
    sample_offset: Int64Array
    """[n] first token of the piece in its sample."""
    modules: Mapping[str, ModulePlan | ItemPlan]
    """What each module of the model computes of this step, and where: BACKBONE samples, the recipe's modules items."""
    length: int
    """Most tokens of a sample, and all that it has room for but with `packing: {method: whole}`."""
    capacity_tokens: int
    asked_tokens: Int64Array
    """[S] tokens charged to each stream in this step; with `unit: documents`, 64ths of a document."""
    drawn_tokens: Int64Array
    """[S] tokens drawn in this step."""
    delivered_tokens: Int64Array
    """[S] tokens in this step's samples."""
    pool_tokens: Int64Array
    """[S] tokens deferred to the next step."""
    num_tokens_global: int
    """Tokens of the global batch that have a label: the loss is a mean over these."""
    order_digest: bytes
    """8 bytes over all steps up to and including this one."""
    plan_digest: bytes
    """8 bytes over this step's order digest and placement."""

    @property
    def backbone(self) -> ModulePlan:
        """Where the samples are computed."""
        module = self.modules[BACKBONE]
        assert isinstance(module, ModulePlan), "the backbone computes samples"
        return module

    @property
    def item_modules(self) -> dict[str, ItemPlan]:
        """The recipe's modules, sorted by name; empty for most recipes."""
        if len(self.modules) == 1:  # the backbone
            return {}
        return {name: plan for name, plan in sorted(self.modules.items()) if isinstance(plan, ItemPlan)}

    @property
    def layout(self) -> Layout:
        """The backbone's grid."""
        return self.backbone.layout

    @property
    def placement(self) -> Placement:
        """Where the backbone's samples go."""
        return self.backbone.placement

    @property
    def balance(self) -> BalanceReport:
        """How even the backbone's consumers are."""
        return self.backbone.balance

    @property
    def num_samples(self) -> int:
        """G, with the masked samples that fill the last microbatch: they have the highest numbers, and no piece."""
        return len(self.placement.dp_rank_of_sample)

    @property
    def contexts(self) -> ContextPlan | None:
        """Runs of ranks; None where each sample is computed by one replica."""
        return self.backbone.contexts

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each data-parallel rank."""
        if self.contexts is not None:
            return self.contexts.num_microbatches
        return self.num_samples // self.layout.row_samples

    @property
    def fill(self) -> float:
        """Tokens over the capacity, in [0, 1]; with `packing: {method: whole}` up to a document above 1."""
        return float(self.delivered_tokens.sum()) / self.capacity_tokens

    def rows_that_travel(self, module: str) -> int:
        """Rows of a module that one replica computes and another one trains on."""
        placed = self.item_modules[module]
        replica = placed.consumer_of_item // self.layout.consumers_of_replica(placed.axis)
        is_away = replica != self.placement.dp_rank_of_sample[placed.items.sample]
        return int(placed.items.tokens[is_away].sum())

    def tokens_of_source(self) -> Int64Array:
        """int64 [number of sources] tokens of each source in this step's samples."""
        sums = np.zeros(len(self.sources), np.int64)
        np.add.at(sums, self.pieces.source, self.pieces.tokens)
        return sums


def name_hash(stream: str, source: str) -> int:
    """64-bit hash of the names of a stream and of a source that it draws from: the head of a SHA-256, little endian.

    Of the source's name alone where the stream has the same one, else of the stream's, a zero byte and the source's.
    """
    text = source if stream == source else f"{stream}\0{source}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def order_digest(previous: bytes, step: int, packed: Packed, name_hash: NDArray[np.uint64]) -> bytes:
    """8-byte digest of every step so far.

    SHA-256 over the previous digest, the step, and for each piece in (sample, slot) order seven
    little-endian int64: sample, slot, name hash, epoch, row, start, tokens.

    Args:
        previous: The digest before the step.
        step: The step.
        packed: Its samples; n pieces.
        name_hash: uint64 [n] hash of each piece's stream and source.
    """
    pieces = packed.pieces
    table = np.empty((len(pieces), 7), "<i8")
    columns = (packed.sample, packed.slot, name_hash.view(np.int64), pieces.epoch)
    for column, values in enumerate((*columns, pieces.row, pieces.start, pieces.tokens)):
        table[:, column] = values
    return hashlib.sha256(previous + struct.pack("<q", step) + table.tobytes()).digest()[:8]


def plan_digest_of_modules(backbone: bytes, modules: Mapping[str, ItemPlan]) -> bytes:
    """8-byte digest of a plan with modules beside the backbone; that of the backbone where there are none.

    SHA-256 over the backbone's plan digest, and for each module by name: its name, a zero byte, its axis, a zero byte,
    its consumers and bins, and for each item five little-endian int64: sample, offset, consumer, bin, slot.
    """
    if not modules:
        return backbone
    digest = hashlib.sha256(backbone)
    for name, plan in sorted(modules.items()):
        digest.update(f"{name}\0{plan.axis}\0".encode() + struct.pack("<qq", plan.num_consumers, plan.num_bins))
        columns = (plan.items.sample, plan.items.offset, plan.consumer_of_item, plan.bin_of_item, plan.slot_of_item)
        digest.update(np.stack(columns, axis=1).astype("<i8").tobytes())
    return digest.digest()[:8]


def plan_digest(order: bytes, placement: Placement, layout: Layout) -> bytes:
    """8-byte digest of one step's order digest and placement."""
    table = np.empty((len(placement.slot_of_sample), 3), "<i8")
    table[:, 0] = placement.dp_rank_of_sample
    table[:, 1] = placement.microbatch_of_sample
    table[:, 2] = placement.slot_of_sample
    return plan_digest_of_places(order, table, layout)


def plan_digest_of_places(order: bytes, places: Int64Array, layout: Layout) -> bytes:
    """The same of int64 [G, 3]: rank, microbatch and slot of each sample."""
    return hashlib.sha256(order + struct.pack("<qq", layout.dp, layout.micro_batch_size) + places.tobytes()).digest()[
        :8
    ]


def plan_digest_of_contexts(order: bytes, contexts: ContextPlan, layout: Layout) -> bytes:
    """8-byte digest of one step's order digest and its runs of ranks.

    SHA-256 over the order digest, dp, cp and the number of bins, for each bin its microbatch, first rank and size, and
    for each sample its bin and its padded tokens, all as little-endian int64.
    """
    bins = np.stack([contexts.microbatch_of_bin, contexts.first_rank_of_bin, contexts.size_of_bin], axis=1)
    samples = np.stack([contexts.bin_of_sample, contexts.padded_tokens], axis=1)
    sizes = struct.pack("<qqq", layout.dp, layout.cp, len(bins))
    return hashlib.sha256(order + sizes + bins.astype("<i8").tobytes() + samples.astype("<i8").tobytes()).digest()[:8]


# --- The names of pieces, as hashes.
#
# No index enters a hash, so adding a stream or a source changes no other's. Cost: a SHA-256 a pair of names, once; a
# table access a piece, and a binary search for a piece of a stream with several sources.


class PieceNames:
    """The hashes of all pairs of a stream and one of its sources."""

    def __init__(self, sources_of_stream: Mapping[str, Sequence[str]], sources: Sequence[str]) -> None:
        """Take the names.

        Args:
            sources_of_stream: Sources of each stream, by sorted name of the stream; sorted.
            sources: All sources, sorted.
        """
        number = {name: s for s, name in enumerate(sources)}
        self._num_sources = len(sources)
        only: list[int] = []
        pairs: list[tuple[int, int]] = []
        for s, (stream, members) in enumerate(sources_of_stream.items()):
            hashes = [name_hash(stream, source) for source in members]
            only.append(hashes[0])
            if len(members) > 1:
                pairs += [
                    (s * len(sources) + number[source], each) for source, each in zip(members, hashes, strict=True)
                ]
        self.only = np.array(only, np.uint64)
        """[S] hash of a stream with its first source."""
        self.pairs = np.array([pair for pair, _ in pairs], np.int64)
        """Streams with several sources: stream * number of sources + source, ascending."""
        self.hashes = np.array([each for _, each in pairs], np.uint64)
        """Those of `pairs`."""

    def of(self, pieces: Pieces) -> NDArray[np.uint64]:
        """uint64 [n] hash of each piece's stream and source."""
        hashes: NDArray[np.uint64] = self.only[pieces.stream]
        if len(self.pairs):
            pair = pieces.stream * self._num_sources + pieces.source
            at = np.minimum(self.pairs.searchsorted(pair), len(self.pairs) - 1)
            hashes = np.where(self.pairs[at] == pair, self.hashes[at], hashes)
        return hashes
