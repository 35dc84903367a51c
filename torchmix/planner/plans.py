"""Planning as calls: the plans of a recipe's steps, and plans of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.in_store import fetch_catalog
from torchmix.catalog.store import open_part
from torchmix.errors import OptionError, PlanError, SourceExhausted
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import Placement, report
from torchmix.planner.contexts import RunCosts, plan_of_runs
from torchmix.planner.cursor import Cursor
from torchmix.planner.graph.dgraph import DrawnStep, module_of_contexts
from torchmix.planner.graph.items import slots_of
from torchmix.planner.graph.plan_check import check_placement, check_plan
from torchmix.planner.graph.strategy import backbone_cost, runs_of
from torchmix.planner.pack import Packed, Pieces, aligned
from torchmix.planner.plan import ItemPlan, ModulePlan, StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.recipe.modules import BACKBONE
from torchmix.recipe.parts import part_of
from torchmix.recipe.ramp import length_of_step, samples_of_step
from torchmix.recipe.structs import Recipe

# --- The plans of a recipe's steps, one by one, without data.
#
# They are the plans that a loader of the same layout makes. Cost: planning alone; steps before the first one that is
# asked for are planned, not placed.


def plan(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *,
    steps: int | None = None,
    start_step: int = 0,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    micro_batch_size: int = 1,
    elastic: bool = False,
    part: str = "train",
    one_pass: bool = False,
    directory: str | Path | None = None,
) -> Iterator[StepPlan]:
    """Plan steps of a recipe that is indexed; no data is read.

    Args:
        recipe: A YAML file, a `Recipe` or a mapping with its keys.
        steps: How many; None for ever, or to the end of a single pass.
        start_step: The first one, from 0.
        dp, micro_batch_size: The layout that samples are placed on.
        tp, cp, pp: Ranks of a replica. They decide where the items of modules are computed, and which runs of ranks
            share a document of `packing.method: whole`; samples of one length are placed alike for all of them.
        elastic: Masked samples fill the last microbatch where the samples do not divide, as `build_loader` has it.
        part: `train`, `validation` or `test`.
        one_pass: Each document once, and then the end.
        directory: What paths in a `Recipe` are relative to; the current directory if not given.

    Yields:
        The plan of each step, in order.

    Raises:
        OptionError: `steps` or `start_step` is below 0, a size of the layout is below 1, or there is no such part.
        CatalogError: There is no catalog that fits; `torchmix.index` makes one.
        PlanError: A step cannot be planned, as when a source has run out.
    """
    from torchmix.recipe.load import recipe_and_directory  # imports YAML, which workers do not need

    for name, value in (("steps", steps), ("start_step", start_step)):
        if value is not None and (type(value) is not int or value < 0):
            raise OptionError(f"plan: {name}={value!r} must be an int of at least 0")
    sizes = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "micro_batch_size": micro_batch_size}
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise OptionError(f"plan: {name}={value!r} must be an int of at least 1")
    checked, folder = recipe_and_directory("plan", recipe, directory)
    planned = part_of(checked, part, one_pass=one_pass)
    catalog = open_part(fetch_catalog(folder, checked.catalog), planned)
    planner = open_planner(
        planned, catalog, Layout(**sizes, broadcast_at=checked.balance.broadcast_at, elastic=elastic)
    )
    return _plans(planner, start_step, steps, one_pass=one_pass)


def _plans(planner: Planner, start_step: int, steps: int | None, *, one_pass: bool) -> Iterator[StepPlan]:
    cursor = planner.start()
    try:
        for _ in range(start_step):
            cursor = planner.skip(cursor)
        for _ in count() if steps is None else range(steps):
            made, cursor = planner.step(cursor)
            yield made
    except SourceExhausted:
        if not one_pass:
            raise


# --- Low-level doors of planning: what is at hand for a step as columns, and a plan of one's own from it.
#
# The draw is the recipe's, since other steps depend on it; a plan made here keeps every rule that those behind it rely
# on, or is an error that names the first broken one.
#
# A plan that packs otherwise than the recipe has another order digest, so a job resumes such steps only by this road.

DEFERRED = -1
"""The sample of a piece that waits for the next step."""


class SampleRuns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where samples of `packing.method: whole` are computed; int64 [n] each, by number of the sample."""

    microbatch: Int64Array
    """From 0."""
    first_rank: Int64Array
    """The first of its run, numbered by replica, then CP slice: a multiple of the size."""
    size: Int64Array
    """Ranks of its run."""


class Summary(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The pieces at hand for a step: the pool's and the drawn ones, as the recipe cuts them."""

    columns: Mapping[str, NDArray[Any]]
    """[n] each, int64 but `source`, which is text: `source`, `row`, `epoch`, `start`, `tokens`, `drawn_step`,
    `document_tokens`; and the recipe's own packing: `sample`, DEFERRED for what waits, and `slot`."""
    num_samples: int
    """G of the step, with masked ones; with `packing.method: whole` as many as the recipe takes, and a plan may have
    more or fewer."""
    length: int
    """Tokens of a sample, at most with `whole`."""
    planner: Planner
    cursor: Cursor
    pieces: Pieces
    drawn: Pieces
    asked_tokens: Int64Array
    after: Cursor
    """The cursor after the step with the recipe's packing."""


def summary_buffer(planner: Planner, cursor: Cursor) -> Summary:
    """What is at hand for the step at a cursor.

    Raises:
        SourceExhausted: As `Planner.step`.
    """
    packed, drawn, asked, after = planner.fold(cursor)
    pieces = Pieces.concatenate([packed.pieces, packed.pool])
    waiting = np.full(len(packed.pool), DEFERRED, np.int64)
    columns: dict[str, NDArray[Any]] = {
        name: getattr(pieces, name) for name in Pieces.__struct_fields__ if name not in ("source", "stream")
    }
    columns["source"] = np.array(planner.sources)[pieces.source]
    columns["sample"] = np.concatenate([packed.sample, waiting])
    columns["slot"] = np.concatenate([packed.slot, waiting])
    return Summary(
        columns=columns,
        num_samples=len(packed.pieces)
        if _is_whole(planner)
        else planner.layout.num_places(samples_of_step(planner.part.batch, cursor.step)),
        length=length_of_step(planner.part.batch, cursor.step),
        planner=planner,
        cursor=cursor,
        pieces=pieces,
        drawn=drawn,
        asked_tokens=asked,
        after=after,
    )


def plan_raw(
    summary: Summary,
    sample_of_piece: Int64Array,
    placements: Mapping[str, Placement | SampleRuns | ItemPlan],
    *,
    slot_of_piece: Int64Array | None = None,
) -> StepPlan:
    """The plan in which each piece is in the sample that one says, and each sample where one says.

    Args:
        summary: From `summary_buffer`.
        sample_of_piece: int64 [n] in [0, G), or DEFERRED. With `packing.method: whole` each piece is a sample of its
            own: the k pieces that do not wait have the numbers 0 to k - 1.
        placements: `backbone`: where each sample is computed, a `Placement`, with `whole` a `SampleRuns`. Other
            modules: an `ItemPlan`, from `DGraph.item_plan`.
        slot_of_piece: int64 [n] order of the pieces in their samples; None: as in the columns.

    Raises:
        PlanError: A rule is broken; names the first piece, sample or bin that breaks it.
    """
    planner = summary.planner
    try:
        packed = _packed(summary, sample_of_piece, slot_of_piece)
        if BACKBONE not in placements:
            raise PlanError(f"placements lack {BACKBONE!r}, which computes the samples")
        if not _is_whole(planner):
            check_placement(placements[BACKBONE], summary.num_samples, planner.layout)
        return _planned(summary, packed, placements)
    except PlanError as error:
        raise PlanError(f"plan_raw, step {summary.cursor.step}: {error}") from None


def _is_whole(planner: Planner) -> bool:
    return planner.part.packing.method == "whole"


def _planned(summary: Summary, packed: Packed, placements: Mapping[str, Placement | SampleRuns | ItemPlan]) -> StepPlan:
    planner = summary.planner
    digest = planner.order_digest_of(summary.cursor.order_digest, summary.cursor.step, packed)
    tokens = planner.tokens_of_step(packed, summary.drawn, summary.asked_tokens)
    return _checked(planner, planner.drawn_step(summary.cursor, packed, tokens, digest), placements)


def placed_by_hand(
    planner: Planner, drawn: DrawnStep, *, microbatch: Int64Array, first_rank: Int64Array, ranks: Int64Array
) -> StepPlan:
    """The plan of a step whose samples lie where somebody says; for files of plans.

    Args:
        planner: Of the layout that they are placed on.
        drawn: The step.
        microbatch: int64 [n] of each sample.
        first_rank: int64 [n] the first rank of dp x cp that computes it.
        ranks: int64 [n] how many ranks compute it; without `packing.method: whole` cp.

    Raises:
        PlanError: A rule is broken, as `plan_raw` says.
    """
    if _is_whole(planner):
        runs = SampleRuns(microbatch=microbatch, first_rank=first_rank, size=ranks)
        return _checked(planner, drawn, {BACKBONE: runs})
    placement = placement_of(first_rank // planner.layout.cp, microbatch)
    check_placement(placement, drawn.num_samples, planner.layout)
    return _checked(planner, drawn, {BACKBONE: placement})


def _checked(
    planner: Planner, drawn: DrawnStep, placements: Mapping[str, Placement | SampleRuns | ItemPlan]
) -> StepPlan:
    context = planner.part.balance.context
    runs = None if context is None else runs_of(planner.part, context, planner.layout)
    backbone = _backbone(placements[BACKBONE], planner, drawn, runs)
    modules = {name: module for name, module in placements.items() if name != BACKBONE}
    for name, module in modules.items():
        if not isinstance(module, ItemPlan):
            raise PlanError(f"module {name} needs an ItemPlan, not {type(module).__name__}")
    return check_plan(drawn.planned(backbone, modules), drawn, runs)  # type: ignore[arg-type]


def _backbone(
    placed: Placement | SampleRuns | ItemPlan, planner: Planner, drawn: DrawnStep, runs: RunCosts | None
) -> ModulePlan:
    packed = drawn.packed
    if runs is not None:
        if not isinstance(placed, SampleRuns):
            raise PlanError(f"{BACKBONE} needs SampleRuns, not {type(placed).__name__}: packing.method is whole")
        contexts, found = plan_of_runs(packed.pieces.tokens, placed.microbatch, placed.first_rank, placed.size, runs)
        return module_of_contexts(contexts, found, planner.layout)
    assert isinstance(placed, Placement), "it was checked"
    cost = backbone_cost(planner.part).of_samples(
        packed.pieces.tokens, packed.sample, num_samples=drawn.num_samples, length=drawn.length
    )
    return ModulePlan(layout=planner.layout, placement=placed, balance=report(cost, placed, planner.layout))


def cursor_after(summary: Summary, plan: StepPlan, sample_of_piece: Int64Array) -> Cursor:
    """The cursor behind a step that `plan_raw` has planned: what was deferred is in its pool.

    Raises:
        PlanError: `sample_of_piece` is not what the plan was made with, so pieces would be lost or come twice.
    """
    sample = _integers("sample_of_piece", sample_of_piece, len(summary.pieces))
    waits, placed = np.flatnonzero(sample == DEFERRED), np.flatnonzero(sample != DEFERRED)
    names = ("source", "stream", "epoch", "row", "start", "tokens")
    kept, given = (
        np.sort(np.rec.fromarrays([of, *(getattr(pieces, name) for name in names)]))
        for of, pieces in ((sample[placed], summary.pieces.take(placed)), (plan.sample, plan.pieces))
    )
    if not np.array_equal(kept, given):
        raise PlanError(
            f"cursor_after, step {plan.step}: sample_of_piece places {len(kept)} pieces otherwise than the plan, which "
            f"has {len(given)}; give the array that the plan was made with"
        )
    return replace(summary.after, pool=summary.pieces.take(waits), order_digest=plan.order_digest)


def placement_of(dp_rank_of_sample: Int64Array, microbatch_of_sample: Int64Array) -> Placement:
    """A placement from the rank and microbatch of each sample; slots follow the numbers of samples."""
    rank, microbatch = (np.asarray(column, np.int64) for column in (dp_rank_of_sample, microbatch_of_sample))
    place = rank * (int(microbatch.max(initial=0)) + 1) + microbatch
    return Placement(dp_rank_of_sample=rank, microbatch_of_sample=microbatch, slot_of_sample=slots_of(place))


def _packed(summary: Summary, sample_of_piece: Int64Array, slot_of_piece: Int64Array | None) -> Packed:
    count, is_whole = len(summary.pieces), _is_whole(summary.planner)
    sample = _integers("sample_of_piece", sample_of_piece, count)
    num_samples = np.count_nonzero(sample != DEFERRED) if is_whole else summary.num_samples
    slot = np.arange(count) if slot_of_piece is None else _integers("slot_of_piece", slot_of_piece, count)
    outside = (sample < DEFERRED) | (sample >= num_samples)
    if outside.any():
        piece = int(np.argmax(outside))
        raise PlanError(f"piece {piece} is in sample {sample[piece]}; samples are 0 to {num_samples - 1}")
    placed = np.flatnonzero(sample != DEFERRED)
    placed = placed[np.lexsort((placed, slot[placed], sample[placed]))]
    pieces, sample_of_placed = summary.pieces.take(placed), sample[placed]
    if is_whole and not (num_samples and np.array_equal(sample_of_placed, np.arange(num_samples))):
        raise PlanError(
            f"{num_samples} pieces do not wait, and each is a sample: their numbers are 0 to that, once each"
        )
    tokens = aligned(pieces.tokens, summary.planner.align_tokens)
    ends = np.cumsum(tokens)
    first = np.searchsorted(sample_of_placed, sample_of_placed)
    offset = ends - tokens - (ends - tokens)[first] if len(placed) else ends
    too_long = offset + tokens > summary.length
    if too_long.any():
        at = int(np.argmax(too_long))
        raise PlanError(
            f"sample {sample_of_placed[at]} holds more than {summary.length} tokens with piece "
            f"{placed[at]}, which ends at {int(offset[at] + tokens[at])}, aligned to {summary.planner.align_tokens}"
        )
    return Packed(
        pieces=pieces,
        sample=sample_of_placed,
        slot=np.arange(len(placed)) - first,
        sample_offset=offset,
        pool=summary.pieces.take(np.flatnonzero(sample == DEFERRED)),
    )


def _integers(name: str, values: Any, count: int) -> Int64Array:
    found = np.asarray(values)
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise PlanError(f"{name} is {found.dtype} {list(found.shape)}, not a whole number for each of {count}")
    return found.astype(np.int64)
