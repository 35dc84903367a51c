"""One step's result: which pieces, in which samples, on which rank, in which microbatch.

In: packed samples and their placement. Out: a frozen `StepPlan` and two digests. Must hold: pieces are sorted by
(sample, slot); the *order digest* is chained over steps and covers no ranks, so it is equal at every layout; the
*plan digest* covers one step's placement, so it is equal on every leader of one layout. Cost: one SHA-256 over 56 bytes
a piece.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.parallel.layout import GridAxis, Layout
from torchmix.planner.balance import BalanceReport, Placement
from torchmix.planner.items import Items
from torchmix.planner.pack import Packed, Pieces
from torchmix.recipe.balance.modules import BACKBONE

ORDER_VERSION = 1
"""Version of the rules that decide which pieces are in which sample of which step."""
START_DIGEST = hashlib.sha256(f"torchmix-order-{ORDER_VERSION}".encode()).digest()[:8]
"""Order digest before step 0."""


class ModulePlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one module of the model computes of a step, on a grid of consumers of its own."""

    layout: Layout
    placement: Placement
    """Which rank and microbatch of the grid each sample is for."""
    balance: BalanceReport


class ItemPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a module of the recipe computes of a step: its n items, each at one consumer. Arrays int64 [n].

    With `items` and the placement of the backbone it is the routing table: item -> (consumer, replica, microbatch,
    sample, offset).
    """

    unit: str
    """What an item is: `document` or `image`."""
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
        """G."""
        return len(self.placement.dp_rank_of_sample)

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.capacity_tokens // self.num_samples

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each data-parallel rank."""
        return self.num_samples // self.layout.row_samples

    @property
    def fill(self) -> float:
        """Share of the capacity that holds tokens, in [0, 1]."""
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
    return hashlib.sha256(order + struct.pack("<qq", layout.dp, layout.micro_batch_size) + table.tobytes()).digest()[:8]
