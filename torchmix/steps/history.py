"""Where recipes took hold in runs, kept in the catalog's folder, and which recipe a run had from which step on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from torchmix.catalog.manifest import (
    HISTORY_FOLDER,
    MANIFEST_SUFFIX,
    Manifest,
    keep_file,
    kept_file,
    kept_manifest,
    manifest_of_run,
    read_manifest,
)
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog, open_manifest, open_part, views_of
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale, HistoryMissing, RecipeError, TorchmixError
from torchmix.mixture.windows import denied_fingerprint
from torchmix.parallel.place_tree import Layout
from torchmix.planner.cursor import Cursor, DecisionRecords
from torchmix.planner.entering import check_bad_tokens, check_step, entered
from torchmix.planner.graph.dgraph import DrawnStep
from torchmix.planner.pack import Packed
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.recipe.build import listed
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import Part, part_of
from torchmix.steps.state import LoaderState, check_catalog, encode_state, read_state

# --- The steps of a run, planned one after another, each by the recipe that the run had then.
#
# They are the steps that the run was given, since the planner of the run makes them, and an edit goes the road that
# it goes in a loader. Cost: planning of every step from the first segment on, and opening the catalog of each
# segment.


class Segment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Steps of a run that one recipe made."""

    part: Part
    catalog: Catalog
    """The catalog of that time."""
    state: LoaderState | None = None
    """The accepted state at which the recipe took hold; None at the run's beginning."""

    @property
    def step(self) -> int:
        """Its first step."""
        return 0 if self.state is None else self.state.step


class RunFold:
    """Where planning stands, and the planner that is next."""

    def __init__(
        self, segments: Sequence[Segment], layout: Layout | None = None, *, decisions: DecisionRecords | None = None
    ) -> None:
        """Begin at the first segment.

        Args:
            segments: One or more, by ascending step.
            layout: What samples are placed on.
            decisions: The log of the run's policy, where it has one.

        Raises:
            StateError: The first segment's state does not fit its catalog.
        """
        self._layout, self._decisions = layout, decisions
        self.segments = tuple(segments)
        """All of them."""
        self._coming = list(segments)[::-1]
        self.planner: Planner
        """The planner of the step at the cursor."""
        self.cursor: Cursor
        """Before the next step."""
        self.segment: Segment
        """The recipe and the catalog of the planner."""
        self._open(self._coming.pop())

    @property
    def edits(self) -> tuple[int, ...]:
        """The steps, after the first one of the fold, at which an edit took hold."""
        return tuple(one.step for one in self.segments[1:] if one.state is not None and one.state.edited_from)

    def planners(self) -> list[Planner]:
        """A planner of each segment, in order."""
        now = len(self.segments) - 1 - len(self._coming)
        return [
            self.planner if number == now else open_planner(one.part, one.catalog, self._layout)
            for number, one in enumerate(self.segments)
        ]

    def before(self) -> Cursor:
        """The cursor that the next step is planned at, of the recipe that makes it."""
        self._turn()
        return self.cursor

    def plan(self) -> StepPlan:
        """The next step, placed; errors as `Planner.step`."""
        self._turn()
        plan, self.cursor = self.planner.step(self.cursor)
        return plan

    def draw(self) -> DrawnStep:
        """The next step, packed and not placed, for `planner.placed`; errors as `Planner.step`."""
        self._turn()
        drawn, self.cursor = self.planner.drawn(self.cursor)
        return drawn

    def pack(self) -> Packed:
        """The samples of the next step, not placed; errors as `Planner.step`."""
        self._turn()
        packed, _, _, self.cursor = self.planner.fold(self.cursor)
        return packed

    def skip_to(self, step: int, *, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Pass over the steps before one; False where `is_stopped` ended it."""
        while self.cursor.step < step:
            if is_stopped():
                return False
            self.pack()
        self._turn()
        return True

    def _turn(self) -> None:
        """Go over to the segment that begins at the cursor, if one does."""
        while self._coming and self._coming[-1].step == self.cursor.step:
            segment = self._coming.pop()
            assert segment.state is not None, "only a run's first segment begins without a state"
            found, wanted = self.cursor.order_digest.hex(), segment.state.order_digest.hex()
            if found != wanted:
                raise HistoryMissing(
                    f"the recipes that are known of the steps before step {segment.step} give other steps than the "
                    f"run had (digest {found}, the run's is {wanted}): "
                    f"the history in the catalog's folder was removed, or is of another run. Bring it back, or look at "
                    f"steps from {segment.step} on with a state from there"
                )
            self._open(segment)

    def _open(self, segment: Segment) -> None:
        decisions = None if segment.part.dynamic is None else self._decisions
        self.segment = segment
        self.planner = open_planner(segment.part, segment.catalog, self._layout, decisions=decisions)
        if segment.state is None:
            self.cursor = self.planner.start()
            return
        cursor = cursor_of_state(segment.state, self.planner, catalog=segment.catalog.fingerprint)
        assert cursor is not None, "nothing stops it"
        self.cursor = cursor


def cursor_of_state(
    state: LoaderState, planner: Planner, *, catalog: str, is_stopped: Callable[[], bool] = lambda: False
) -> Cursor | None:
    """The cursor to plan `state.step` from; None if `is_stopped` ended the planning of the steps before it.

    Args:
        state: The state of the planner's recipe; one that names a step alone is of a run without edits.
        planner: The planner of the recipe and the catalog in use.
        catalog: Fingerprint of that catalog.
        is_stopped: Asked before each step.

    Raises:
        StateMismatch, StateError: As `planner.entering.entered`; or the state belongs to another catalog.
        SourceExhausted: The state names a step alone, and there is no data left for it.
    """
    if state.is_planned:
        if not state.edited_from:
            check_catalog(state, catalog)
        cursor = entered(state.at, state.rows, planner, is_edited=bool(state.edited_from))
        bad_tokens = {name: tokens for name, tokens in state.bad_tokens.items() if name in planner.sources}
        check_bad_tokens(bad_tokens, state.step, planner)
        return cursor
    check_step(state.step)
    cursor = planner.start()
    if state.step:
        logger.info("planning %d steps, to begin at step %d", state.step, state.step)
    while cursor.step < state.step:
        if is_stopped():
            return None
        cursor = planner.skip(cursor)
    return cursor


# --- Where recipes took hold in runs: one small file for each beginning of a run, and for each edit that was
# accepted.
#
# An entry is written before the first step that it holds for is made; a kill at any moment leaves it whole or missing;
# equal entries are one file, so branches and repeated resumes need no order. A folder that cannot be written is a
# warning, since the run itself needs no history. Cost: a few KB once a beginning or edit, and the size of a state.

logger = logging.getLogger(__name__)

HISTORY_VERSION = 1
RUN_SUFFIX = ".run.json"
RECIPE_SUFFIX = ".recipe.json"


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recipe that took hold in a run."""

    version: int
    """HISTORY_VERSION of the code that wrote it."""
    recipe: str
    """Fingerprint of the recipe's part for training."""
    catalog: str
    """Fingerprint of the catalog then."""
    denied: str
    """Fingerprint of the documents that deny-lists named then; empty where there were none."""
    recipe_file: str
    """Name of the recipe in `history`, without its suffix."""
    manifest_file: str
    """Name of the manifest in `history`, without its suffix."""
    step: int
    """The first step that it holds for."""
    state: bytes
    """The accepted state at that step, base64 in JSON; empty where a run begins."""

    @property
    def prints(self) -> tuple[str, str, str]:
        """The fingerprints of recipe, catalog and denied documents."""
        return self.recipe, self.catalog, self.denied

    @property
    def order(self) -> tuple[str, str, str, bytes]:
        """What decides the steps: entries that are equal in it are of one run, started again with another balance."""
        return self.recipe, self.catalog, self.denied, self.state

    @property
    def before(self) -> LoaderState | None:
        """The state at which it took hold; None where a run begins."""
        return read_state(self.state) if self.state else None


_ENTRY = msgspec.json.Decoder(HistoryEntry)


class RunHistory:
    """The history of runs of one recipe's part for training, as a run writes it."""

    def __init__(self, catalog_folder: Path, recipe: Mapping[str, Any], part: Part) -> None:
        """Nothing is written before `keep`.

        Args:
            catalog_folder: Where the catalog lies.
            recipe: The checked recipe, as plain values.
            part: Its part for training.
        """
        self._folder, self._part = catalog_folder, part
        self._recipe = msgspec.json.format(msgspec.json.encode(recipe), indent=1)

    def keep(self, state: LoaderState, *, catalog: str) -> None:
        """Keep where a run begins, continues with an edit, or with other epochs of its streams than it had.

        Any other state needs nothing. Epochs are no part of a recipe's fingerprint, and decide what runs out.

        Args:
            state: What the run resumes from.
            catalog: Fingerprint of the catalog that it has opened.
        """
        try:
            if state.is_planned and not state.edited_from and not self._had_other_ends(state):
                return
            manifest, found = self._opened(catalog)
            denied = denied_fingerprint(found.denied_rows)
            prints = recipe_fingerprint(self._part), catalog, denied
            is_known = state.step and not state.is_planned
            if is_known and any(one.prints == prints for one in entries_of(self._folder)):
                return
            self._write(manifest, prints, _of_any_job(state) if state.is_planned else None)
        except (OSError, CatalogError, HistoryMissing) as error:
            logger.warning(
                "the history of this run is not kept (%s); after an edit `torchmix plan`, `show` and `trace` will need "
                "a state of the run",
                error,
            )

    def _had_other_ends(self, state: LoaderState) -> bool:
        """Whether a run of a state's recipe is known that bounded epochs in another way."""
        prints = state.recipe, state.catalog, state.rows.denied
        found = {one.recipe_file: one for one in entries_of(self._folder) if one.prints == prints}
        return any(_ends_of(part_of_entry(self._folder, one)) != _ends_of(self._part) for one in found.values())

    def _opened(self, fingerprint: str) -> tuple[Manifest, Catalog]:
        manifest = read_manifest(self._folder)
        found = open_manifest(
            self._folder, settings_of(self._part.sources, self._part.shuffle), manifest, views_of(self._part)
        )
        if found.fingerprint != fingerprint:
            raise CatalogError(f"the catalog at {self._folder} was indexed again since it was opened")
        return manifest, found

    def _write(self, manifest: Manifest, prints: tuple[str, str, str], state: LoaderState | None) -> None:
        content = manifest_of_run(manifest, part=self._part.name, sources=self._part.sources)
        recipe, catalog, denied = prints
        entry = HistoryEntry(
            version=HISTORY_VERSION,
            recipe=recipe,
            catalog=catalog,
            denied=denied,
            recipe_file=keep_file(self._folder, self._recipe, RECIPE_SUFFIX),
            manifest_file=keep_file(self._folder, content, MANIFEST_SUFFIX),
            step=0 if state is None else state.step,
            state=b"" if state is None else encode_state(state),
        )
        keep_file(self._folder, msgspec.json.format(msgspec.json.encode(entry), indent=1), RUN_SUFFIX)


def _of_any_job(state: LoaderState) -> LoaderState:
    """An accepted state without what it says of the ranks that took it and of their libraries, which decide no order.

    A job that is started again from one checkpoint, with as many ranks as are left, is the same run.
    """
    return replace(state, dp=1, micro_batch_size=1, decoder="")


def entries_of(catalog_folder: Path) -> list[HistoryEntry]:
    """All entries, by step.

    Raises:
        HistoryMissing: One is damaged or of another version.
    """
    found = []
    for path in sorted((catalog_folder / HISTORY_FOLDER).glob(f"*{RUN_SUFFIX}")):
        content = kept_file(catalog_folder, path.name.removesuffix(RUN_SUFFIX), RUN_SUFFIX)
        try:
            found.append(_ENTRY.decode(content))
        except msgspec.MsgspecError as error:
            raise HistoryMissing(f"{path} is of another version of torchmix ({error}); remove it") from None
    return sorted(found, key=lambda entry: entry.step)


def kept_with_state(catalog_folder: Path, state: LoaderState) -> Segment | None:
    """The recipe and the catalog that a state was saved with, with the denied documents of then; None if no run of it
    was kept.

    Raises:
        HistoryMissing: As `segment_of`.
    """
    prints = state.recipe, state.catalog, state.rows.denied
    for entry in entries_of(catalog_folder):
        if entry.prints == prints:
            return segment_of(catalog_folder, entry)
    return None


def catalog_of_run(catalog_folder: Path, part: Part, fingerprint: str) -> Catalog:
    """The catalog that a running job has opened, also where it was indexed again since.

    Args:
        catalog_folder: Where it lies.
        part: What the job plans.
        fingerprint: Of the catalog that is wanted; empty: the present one.

    Raises:
        CatalogError: The present one cannot be opened, or is another, and the history has none of this fingerprint.
    """
    present: Catalog | CatalogError
    try:
        present = open_part(catalog_folder, part)
        if fingerprint in ("", present.fingerprint):
            return present
    except CatalogMissing:
        raise
    except CatalogError as error:  # indexed for other settings, as those of a recipe that comes next
        present = error
    with suppress(HistoryMissing):
        for entry in entries_of(catalog_folder) if part.name == "train" else ():
            if (entry.recipe, entry.catalog) == (recipe_fingerprint(part), fingerprint):
                return segment_of(catalog_folder, entry).catalog
    if isinstance(present, CatalogError):
        raise present
    raise CatalogStale(
        f"the catalog at {catalog_folder} was indexed again while this job ran: it is {present.fingerprint}, and that "
        f"of the job, {fingerprint}, is not in its history; start the job again from its last checkpoint"
    )


def segment_of(catalog_folder: Path, entry: HistoryEntry) -> Segment:
    """The recipe and the catalog that took hold, opened.

    Raises:
        HistoryMissing: A file of the history or of the catalog is gone, or was altered.
    """
    part = part_of_entry(catalog_folder, entry)
    try:
        manifest = kept_manifest(catalog_folder, entry.manifest_file)
        catalog = open_manifest(catalog_folder, settings_of(part.sources, part.shuffle), manifest, views_of(part))
    except (CatalogError, RecipeError) as error:
        raise _not_opened(entry, error) from error
    found = recipe_fingerprint(part), catalog.fingerprint, denied_fingerprint(catalog.denied_rows)
    if found != (entry.recipe, entry.catalog, entry.denied):
        raise HistoryMissing(
            f"what the run had from step {entry.step} on gives another order in this version of torchmix; plan it "
            f"with the version that ran it"
        )
    return Segment(part=part, catalog=catalog, state=entry.before)


def part_of_entry(catalog_folder: Path, entry: HistoryEntry) -> Part:
    """The recipe that took hold, as it is planned.

    Raises:
        HistoryMissing: Its file is gone, or was altered.
    """
    from torchmix.recipe.load import check_recipe  # with YAML, which is slow to load

    try:
        recipe = check_recipe(msgspec.json.decode(kept_file(catalog_folder, entry.recipe_file, RECIPE_SUFFIX)))
        return part_of(recipe, "train")
    except (CatalogError, RecipeError) as error:
        raise _not_opened(entry, error) from error


def _not_opened(entry: HistoryEntry, error: Exception) -> HistoryMissing:
    return HistoryMissing(f"what the run had from step {entry.step} on cannot be opened again: {error}")


def _ends_of(part: Part) -> dict[str, tuple[int | None, str]]:
    """Where streams end."""
    return {name: (stream.max_epochs, stream.on_exhausted) for name, stream in part.streams.items()}


# --- The history of one run: which recipe it had, from which step on.
#
# An edit follows the steps that its state was saved after, which digests tell; a recipe that several runs have had is
# an error, never a guess. Cost: reading small files; where several runs may have come before an edit, planning of
# their steps up to it.

MOST_RUNS = 5
"""Runs that an error names."""


def segments_of_recipe(
    catalog_folder: Path, present: Segment, *, decisions: DecisionRecords | None = None, whole: bool = True
) -> list[Segment]:
    """Segments of the run that has a recipe now; the recipe alone, where no run of it was kept.

    Args:
        catalog_folder: Where the catalog lies.
        present: The recipe with its catalog.
        decisions: The log of the run's policy, where it has one.
        whole: From the run's beginning on; else the last segment is enough.

    Raises:
        HistoryMissing: Several runs have come to this recipe, or the history is not whole.
    """
    tree = _History(catalog_folder, present, decisions)
    found = list({entry.order: entry for entry in tree.of(*tree.present)}.values())
    if len(found) == 1 and not whole:
        return [tree.present_segment(found[0])]
    chains = [tree.chain(entry) for entry in found]
    earlier = {entry.order for chain in chains for entry in chain[:-1]}
    runs = [chain for chain in chains if chain[-1].order not in earlier]
    if len(runs) > 1:
        steps = listed((f"from step {run[-1].step} on" for run in runs), MOST_RUNS)
        raise HistoryMissing(
            f"{len(runs)} runs have had this recipe ({steps}), by {tree.place}; give --state FILE, a state of the run "
            f"that you mean, or remove the .run.json files of the others"
        )
    if not runs:
        return [present]
    *earlier_segments, _ = tree.opened(runs[0], whole=whole)
    return [*earlier_segments, tree.present_segment(runs[0][-1])]


def segments_of_state(
    catalog_folder: Path, present: Segment, state: LoaderState, *, decisions: DecisionRecords | None = None
) -> list[Segment]:
    """Segments of a state's run from its beginning on, the last of them beginning at the state.

    Args:
        catalog_folder: Where the catalog lies.
        present: The state's recipe with its catalog.
        state: The state of the run.
        decisions: The log of the run's policy, where it has one.

    Raises:
        HistoryMissing: The history is not whole, or not of this run. Where only the digest can tell, folding does.
    """
    if not state.is_planned:
        return segments_of_recipe(catalog_folder, present, decisions=decisions)
    tree = _History(catalog_folder, present, decisions)
    last = Segment(part=present.part, catalog=present.catalog, state=state)
    found = tree.before(state)
    if not found and not state.edited_from:  # a run of which nothing was kept: the digest tells whether it was edited
        return [present, last]
    parent = tree.parent(state)
    if parent is None:
        raise HistoryMissing(
            f"{tree.place} has no run of recipe {state.edited_from or state.recipe} with the steps of this state; "
            f"bring the history of the run back, or look at steps from {state.step} on"
        )
    return [*tree.opened(tree.chain(parent), whole=True), last]


class _History:
    """The entries of a catalog, and which follows which."""

    def __init__(self, catalog_folder: Path, present: Segment, decisions: DecisionRecords | None) -> None:
        self._folder, self._present, self._decisions = catalog_folder, present, decisions
        denied = denied_fingerprint(present.catalog.denied_rows)
        self.present = recipe_fingerprint(present.part), present.catalog.fingerprint, denied
        """Fingerprints of the recipe at hand."""
        self._entries = entries_of(catalog_folder)
        self.place = catalog_folder / "history"

    def of(self, *prints: str) -> list[HistoryEntry]:
        """Entries with the fingerprints of a recipe, a catalog and denied documents."""
        return [entry for entry in self._entries if entry.prints == prints]

    def chain(self, entry: HistoryEntry) -> list[HistoryEntry]:
        """Entries from a run's beginning to this one; from the first that is known, where earlier ones are missing."""
        parent = None if entry.before is None else self.parent(entry.before)
        return [entry] if parent is None else [*self.chain(parent), entry]

    def before(self, state: LoaderState) -> list[HistoryEntry]:
        """Entries that a state may have been saved after."""
        found = self.of(state.edited_from or state.recipe, state.catalog, state.rows.denied)
        return [entry for entry in found if entry.step < state.step or not entry.state]

    def parent(self, state: LoaderState) -> HistoryEntry | None:
        """The entry that a state was saved after; the latest, where several have had the same steps."""
        found = self.before(state)
        if len(found) == 1:
            return found[0]  # folding compares the digests
        faults = []
        for entry in reversed(found):
            try:
                fold = RunFold([self.segment(entry)], decisions=self._decisions)
                fold.skip_to(state.step)
            except TorchmixError as error:  # one of another run may have lost its files, or its data ends before
                faults.append(error)
                continue
            if fold.cursor.order_digest == state.order_digest:
                return entry
        if faults:
            raise faults[0]
        return None

    def opened(self, chain: list[HistoryEntry], *, whole: bool) -> list[Segment]:
        """The segments of a run."""
        first = chain[0].before
        if whole and first is not None:
            raise HistoryMissing(
                f"the run was edited at step {first.step}, and {self.place} does not have the recipe "
                f"{first.edited_from} that it had before; bring the files back, or give --state FILE of a later step "
                f"to look at steps from there on"
            )
        return [self.segment(entry) for entry in (chain if whole else chain[-1:])]

    def segment(self, entry: HistoryEntry) -> Segment:
        """What took hold; the recipe at hand, where it is of the same order, has the present balance."""
        if entry.prints != self.present:
            return segment_of(self._folder, entry)
        part = self._present.part
        with suppress(HistoryMissing):  # where epochs are those of then, nothing is missing; else the digest tells
            part = replace(part, streams=part_of_entry(self._folder, entry).streams)
        return replace(self._present, part=part, state=entry.before)

    def present_segment(self, entry: HistoryEntry) -> Segment:
        """The recipe at hand, which took hold with an entry, with its present epochs, too."""
        return replace(self._present, state=entry.before)
