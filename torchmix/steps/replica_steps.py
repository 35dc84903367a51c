"""The steps of one replica, or of several: planned, read and built, in blocks of one global batch or more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.catalog.sizes import TokenRuns
from torchmix.catalog.store import Catalog
from torchmix.constructor.arrays import BlockArrays, StepFacts
from torchmix.errors import HistoryMissing, OptionError, RecipeError, SourceExhausted, TorchmixError
from torchmix.modalities.table import decoder_of
from torchmix.parallel.place_tree import ONE_PLACE, Layout, RankPlaces
from torchmix.planner.cursor import Cursor, gone_by
from torchmix.planner.entering import MAX_STEPS
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.reader.items import decoded_at_rank
from torchmix.reader.piece_copy import num_unlabelled, tables_without_labels
from torchmix.reader.protocol import StepReader
from torchmix.recipe.items import kinds_of
from torchmix.recipe.parts import Part
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.scale.rule import ProgressLog
from torchmix.steps.ahead import Ahead
from torchmix.steps.blocks import Consumers, PlannedStep, ReadBlock, plan_blocks, read_blocks
from torchmix.steps.decisions import EndedLog, FollowedLog, log_of
from torchmix.steps.header import header_of
from torchmix.steps.history import RunFold, Segment, cursor_of_state, segments_of_recipe
from torchmix.steps.module_items import arrays_of_modules, tell_other_decoder
from torchmix.steps.replay import RecordedPlan, open_recorded_plan
from torchmix.steps.state import LoaderState

logger = logging.getLogger(__name__)

# --- The steps of one replica, or of several: planned, read and built, in blocks of one global batch or more.
#
# The same steps in whatever process or thread this runs, and whoever reads; no torch.


OWN_OPTIONS = ("look_ahead",)
"""Options of a rank's own: they may differ between ranks, and no other one sees it."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `build_loader` that go with the steps, to the worker and back; its docstring describes them."""

    look_ahead: int = 2
    max_steps: int | None = None
    start_step: int = 0
    padded_vocab_size: int | None = None

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            OptionError: Names the argument.
        """
        check_number("look_ahead", self.look_ahead)
        check_number("max_steps", self.max_steps, least=0, is_needed=False)
        check_number("start_step", self.start_step, least=0, most=MAX_STEPS)
        check_number("padded_vocab_size", self.padded_vocab_size, is_needed=False)


def check_number(
    name: str, value: int | None, *, least: int = 1, most: int | None = None, is_needed: bool = True
) -> None:
    """Refuse an argument of `build_loader` that is no int within its bounds; None is one that is not given.

    Raises:
        OptionError: Names the argument.
    """
    if value is None and not is_needed:
        return
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"an int of at least {least}" + (f" and at most {most}" if most is not None else "")
        raise OptionError(f"build_loader: {name}={value!r} must be {allowed}")


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream is made of; plain values, so that it can travel to a worker process."""

    part: Part
    """What is planned."""
    base: str
    """The folder that paths of files are relative to: the recipe's."""
    catalog_folder: str
    """Where the catalog lies."""
    cache_bytes: int
    """Decoded pages kept."""
    replica: int
    """Data-parallel rank, in [0, layout.dp)."""
    leader: int | None = None
    """The global rank that takes the steps, for itself and its peers; None: for all ranks of the replica."""
    layout: Layout
    options: StreamOptions = StreamOptions()
    catalog: str = ""
    """Fingerprint of the catalog, as it was when the loader was built; empty if it was not looked at."""
    places: RankPlaces = ONE_PLACE
    """Where ranks stand; for modules alone."""
    without_text: tuple[int, ...] = ()
    """Global ranks of leaders whose ranks get no tokens and labels."""
    decisions: str = ""
    """Folder of the log that the part's policy writes, where it has one."""
    replayed: str = ""
    """Folder or file of a log whose decisions are taken again in place of a policy's."""
    recorded: str = ""
    """Folder of a plan on disk, whose steps are given without being planned."""
    fleet: FleetSettings | None = None
    """Shared loaders to ask; None: files are read."""
    is_apart: bool = False
    """Whether there are replicas of which nothing is heard."""

    def of_node(self) -> StreamSettings:
        """What all leaders of a node have alike who take the same steps."""
        own = {name: getattr(StreamOptions(), name) for name in OWN_OPTIONS}
        return replace(self, replica=0, leader=None, options=replace(self.options, **own))


class SharedBlock(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Consecutive steps as several consumers get them."""

    steps: Sequence[int]
    order_digests: Sequence[bytes]
    """The digest of all steps up to each of these."""
    arrays: Mapping[int, BlockArrays]
    """By the number of the consumer."""


def shared_blocks(
    settings: StreamSettings,
    state: LoaderState,
    *,
    catalog: Catalog,
    reader: StepReader,
    consumers: Consumers,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Generator[SharedBlock, None, None]:
    """The steps of several consumers, each planned and read once for all of them.

    Args:
        settings: What the steps follow from; `replica` is not used.
        state: Where to begin, of the settings' part and layout.
        catalog: The part's.
        reader: The reader of the catalog's sources; the caller closes it, after these steps.
        consumers: Asked for each step.
        is_stopped: Asked while a far start is planned; True ends the steps before the first one.

    Raises:
        StateMismatch: The state is of another catalog.
        TorchmixError: A step cannot be planned or read.
    """
    log = log_of(settings.decisions, state.log_branch, replayed=settings.replayed, is_stopped=is_stopped)
    recorded: RecordedPlan | None = None
    try:
        planner = open_planner(settings.part, catalog, settings.layout, decisions=log)
        recorded = open_recorded_plan(settings.recorded, planner, catalog.fingerprint)
        yield from _blocks(
            settings, state, planner, recorded, log, catalog, reader, consumers=consumers, is_stopped=is_stopped
        )
    finally:
        for opened in (recorded, log):
            if opened is not None:
                opened.close()


def _blocks(
    settings: StreamSettings,
    start: LoaderState,
    planner: Planner,
    recorded: RecordedPlan | None,
    log: FollowedLog | EndedLog | None,
    catalog: Catalog,
    reader: StepReader,
    *,
    consumers: Consumers,
    is_stopped: Callable[[], bool],
) -> Generator[SharedBlock, None, None]:
    part = settings.part
    try:
        cursor = start_cursor(
            start,
            planner,
            catalog=catalog,
            catalog_folder=Path(settings.catalog_folder),
            recorded=recorded,
            is_stopped=is_stopped,
        )
    except SourceExhausted:
        if not part.one_pass:
            raise
        cursor = None  # the pass ends before its first step, as one that is resumed at its end
    if cursor is None:
        return
    _check_lists(part, catalog)
    at_rank = decoded_at_rank(part, catalog, has_loaders=settings.fleet is not None)
    kinds = kinds_of(part.sources)
    decoder = decoder_of(part.sources, Path(settings.base))
    tell_other_decoder(start, decoder, kinds)
    without_labels = tables_without_labels([catalog.sources[name] for name in planner.sources])
    branch, first_microbatch = log.branch if log else "", start.microbatch
    planned = plan_blocks(planner, cursor, settings.options.max_steps, recorded=recorded)
    if settings.fleet is not None and part.name == "train":
        planned = noted(planned, ProgressLog(settings.fleet.folders), consumers)
    blocks: Generator[ReadBlock, None, None] | Ahead[ReadBlock] = read_blocks(
        part,
        planned,
        planner,
        catalog,
        reader,
        consumers,
        branch=branch,
        decoder=decoder,
        without_text=settings.without_text,
    )
    if settings.fleet is not None:  # loaders are asked for a block while the one before it is handed over
        blocks = Ahead(blocks, depth=1, name="torchmix-ask")
    try:
        for read in blocks:
            finished: dict[int, list[StepFacts]] = {consumer: [] for consumer in read.arrays}
            error: TorchmixError | None = None
            for number, (plan, _, plan_s) in enumerate(read.planned):
                try:
                    modules, modules_s = modules_of_step(
                        settings, plan, read, number, reader, kinds=kinds, at_rank=at_rank
                    )
                except TorchmixError as raised:  # it belongs in the place of its step
                    error = raised
                    break
                header = header_of(
                    plan,
                    read.states[number],
                    recipe=start.recipe,
                    layout=settings.layout,
                    first_microbatch=first_microbatch,
                    num_unlabelled=_num_unlabelled(plan, without_labels) if settings.is_apart else 0,
                    most_bad_tokens=read.most_bad_tokens[number],
                    plan_s=plan_s,
                    read_s=read.read_s,
                    build_s=read.build_s + modules_s,
                    reading=read.reading,
                )
                first_microbatch = 0
                for consumer, block in read.arrays.items():
                    facts = block.steps[number]
                    bad = _by_name(plan.sources, facts.bad_tokens)
                    mine = replace(header, bad_tokens=bad) if bad else header
                    finished[consumer].append(replace(facts, modules=modules[consumer], header=mine))
            count = len(read.planned) if error is None else number
            if count:
                yield SharedBlock(
                    steps=[step.plan.step for step in read.planned[:count]],
                    order_digests=[step.plan.order_digest for step in read.planned[:count]],
                    arrays={
                        consumer: replace(block.part(0, count), steps=finished[consumer])
                        for consumer, block in read.arrays.items()
                    },
                )
            if error is not None:
                raise error
    finally:
        blocks.close()


def _num_unlabelled(plan: StepPlan, tables: Sequence[tuple[int, TokenRuns]]) -> int:
    """Tokens of all replicas that have no label, and that the plan counts among those with one."""
    pieces = plan.pieces
    return num_unlabelled(
        tables,
        source=pieces.source,
        row=pieces.row,
        start=pieces.start,
        tokens=pieces.tokens,
        ends_document=pieces.start + pieces.tokens == pieces.document_tokens,
    )


def noted(
    blocks: Iterable[list[PlannedStep]], progress: ProgressLog, consumers: Consumers
) -> Generator[list[PlannedStep], None, None]:
    """Blocks; before each is asked for, whoever starts loaders hears that it will be, by the first replica's reader."""
    for block in blocks:
        if any(one.replica == 0 for step in block for one in consumers(step.plan.step).values()):
            for step in block:
                progress.note(step.after.step, gone_by(step.after.decisions), step.after.decided.shares)
        yield block


def _check_lists(part: Part, catalog: Catalog) -> None:
    """Refuse lists of numbers beside ids where runs of ranks take documents apart: a rank has no row whole."""
    if part.balance.context is None:
        return
    for name in sorted(part.sources):
        if catalog.sources[name].lists is not None:
            message = (
                "gives lists of numbers beside ids, which no rank could use: packing.method: whole gives each rank "
                "parts of documents; use best_fit, or a map that gives ids alone"
            )
            raise RecipeError(message, f"sources.{name}.map")


def start_cursor(
    state: LoaderState,
    planner: Planner,
    *,
    catalog: Catalog,
    catalog_folder: Path,
    recorded: RecordedPlan | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Cursor | None:
    """The cursor to plan `state.step` from; None if `is_stopped` ended the planning of the steps before it.

    Args:
        state: The state of the planner's recipe, from `state_for`.
        planner: The planner of the recipe and the catalog in use.
        catalog: The part's.
        catalog_folder: With the history of its runs.
        recorded: A plan on disk, which has the cursors of its steps.
        is_stopped: Asked before each step.

    Raises:
        HistoryMissing: The state names a step alone, which lies before the edit that this recipe came with, or several
            runs have had the recipe.
        StateError, StateMismatch: As `cursor_of_state`.
        PlanFilesError: The plan on disk is damaged, or begins later.
        SourceExhausted: The state names a step alone, and there is no data left for it.
    """
    part = planner.part
    if recorded is not None and not (state.is_planned and state.step > recorded.manifest.stop_step):
        return recorded.cursor_of_state(state, is_stopped=is_stopped)
    if not state.is_planned and state.step and part.name == "train" and not part.one_pass:
        [last] = segments_of_recipe(catalog_folder, Segment(part=part, catalog=catalog), whole=False)
        if last.step > state.step:
            raise HistoryMissing(
                f"the run has had this recipe since step {last.step}, and was to begin at step {state.step} with it; "
                f"begin with the recipe of that step, or load a state of that step with accept_edit"
            )
        if last.state is not None:
            logger.info("planning steps %d to %d, since the edit at the first of them", last.step, state.step)
            fold = RunFold([last], planner.layout)
            return fold.cursor if fold.skip_to(state.step, is_stopped=is_stopped) else None
    return cursor_of_state(state, planner, catalog=catalog.fingerprint, is_stopped=is_stopped)


def modules_of_step(
    settings: StreamSettings,
    plan: StepPlan,
    read: ReadBlock,
    number: int,
    reader: StepReader,
    *,
    kinds: Collection[str] = (),
    at_rank: Collection[str] = (),
) -> tuple[dict[int, Mapping[str, NDArray[Any]]], float]:
    """What modules compute of the step of that number in a block, by consumer; and the seconds that this took."""
    if not plan.item_modules:
        return dict.fromkeys(read.replica_of, _NO_ARRAYS), 0.0
    began = time.perf_counter()
    found: dict[int, Mapping[str, NDArray[Any]]] = {
        consumer: arrays_of_modules(
            plan,
            part=settings.part,
            places=settings.places,
            replica=replica,
            leader=read.leader_of[consumer],
            documents=read.documents[number][replica],
            reader=reader,
            kinds=kinds,
            at_rank=at_rank,
        )
        for consumer, replica in read.replica_of.items()
    }
    return found, time.perf_counter() - began


_NO_ARRAYS: Mapping[str, NDArray[Any]] = {}


def _by_name(names: Sequence[str], tokens: NDArray[np.int64] | None) -> dict[str, int]:
    """Tokens of each source that has some."""
    return {} if tokens is None else {name: count for name, count in zip(names, tokens.tolist(), strict=True) if count}
