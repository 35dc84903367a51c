"""The history of one run: which recipe it had, from which step on.

In: the catalog's folder, and a recipe or a state of the run. Out: segments for `RunFold`, from the run's beginning on.
Must hold: an edit follows the steps that its state was saved after, which digests tell; a recipe that several runs have
had is an error, never a guess. Cost: reading small files; where several runs may have come before an edit, planning of
their steps up to it.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from torchmix.errors import HistoryMissing, TorchmixError
from torchmix.mixture.denied import denied_fingerprint
from torchmix.planner.cursor import DecisionRecords
from torchmix.recipe.build import listed
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.steps.history.entries import HistoryEntry, entries_of, segment_of
from torchmix.steps.history.run_fold import RunFold, Segment
from torchmix.steps.state import LoaderState

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
        return [tree.segment(found[0])]
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
    return tree.opened(runs[0], whole=whole)


def segments_of_state(
    catalog_folder: Path, present: Segment, state: LoaderState, *, decisions: DecisionRecords | None = None
) -> list[Segment]:
    """Segments of a state's run from its beginning on, the last of them beginning at the state.

    Args:
        catalog_folder: Where the catalog lies.
        present: The state's recipe with its catalog.
        state: Of the run.
        decisions: The log of the run's policy, where it has one.

    Raises:
        HistoryMissing: The history is not whole, or not of this run. Where only the digest can tell, folding does.
    """
    if not state.streams:
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
        return [entry for entry in self._entries if (entry.recipe, entry.catalog, entry.denied) == prints]

    def chain(self, entry: HistoryEntry) -> list[HistoryEntry]:
        """Entries from a run's beginning to this one; from the first that is known, where earlier ones are missing."""
        parent = None if entry.before is None else self.parent(entry.before)
        return [entry] if parent is None else [*self.chain(parent), entry]

    def before(self, state: LoaderState) -> list[HistoryEntry]:
        """Entries that a state may have been saved after."""
        found = self.of(state.edited_from or state.recipe, state.catalog, state.denied)
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
        """What took hold; the recipe at hand, where it is of the same order, has the present balance and epochs."""
        if (entry.recipe, entry.catalog, entry.denied) == self.present:
            return replace(self._present, state=entry.before)
        return segment_of(self._folder, entry)
