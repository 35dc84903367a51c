"""Where recipes took hold in runs: one small file for each beginning of a run, and for each edit that was accepted.

In: a recipe, the catalog's folder, and the state that a run goes on from. Out: files in `history`, and their entries.
Must hold: an entry is written before the first step that it holds for is made; a kill at any moment leaves it whole or
missing; equal entries are one file, so branches and repeated resumes need no order. A folder that cannot be written is
a warning, since the run itself needs no history. Cost: a few KB once a beginning or edit, and the size of a state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchmix.catalog.kept_manifests import (
    HISTORY_FOLDER,
    MANIFEST_SUFFIX,
    keep_file,
    kept_file,
    kept_manifest,
    manifest_of_run,
)
from torchmix.catalog.manifest import Manifest, read_manifest
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog, open_manifest
from torchmix.catalog.views.wanted import views_of
from torchmix.errors import CatalogError, HistoryMissing, RecipeError
from torchmix.mixture.denied import denied_fingerprint
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import Part, part_of
from torchmix.steps.history.run_fold import Segment
from torchmix.steps.state import LoaderState, encode_state, read_state

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
        """Keep where a run begins, or goes on with an edit; any other state needs nothing.

        Args:
            state: What the run goes on from.
            catalog: Fingerprint of the catalog that it has opened.
        """
        if state.streams and not state.edited_from:
            return
        try:
            manifest, found = self._opened(catalog)
            denied = denied_fingerprint(found.denied_rows)
            prints = recipe_fingerprint(self._part), catalog, denied
            is_known = state.step and not state.streams
            if is_known and any((one.recipe, one.catalog, one.denied) == prints for one in entries_of(self._folder)):
                return
            self._write(manifest, prints, state if state.edited_from else None)
        except (OSError, CatalogError, HistoryMissing) as error:
            logger.warning(
                "the history of this run is not kept (%s); after an edit `torchmix plan`, `show` and `trace` will need "
                "a state of the run",
                error,
            )

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


def catalog_of_state(catalog_folder: Path, state: LoaderState) -> Catalog | None:
    """The catalog that a state was saved with, with the denied documents of then; None if no run of it was kept.

    Raises:
        HistoryMissing: As `segment_of`.
    """
    prints = state.recipe, state.catalog, state.denied
    for entry in entries_of(catalog_folder):
        if (entry.recipe, entry.catalog, entry.denied) == prints:
            return segment_of(catalog_folder, entry).catalog
    return None


def segment_of(catalog_folder: Path, entry: HistoryEntry) -> Segment:
    """The recipe and the catalog that took hold, opened.

    Raises:
        HistoryMissing: A file of the history or of the catalog is gone, or was altered.
    """
    from torchmix.recipe.load import check_recipe  # with YAML, which is slow to load

    try:
        recipe = check_recipe(msgspec.json.decode(kept_file(catalog_folder, entry.recipe_file, RECIPE_SUFFIX)))
        part = part_of(recipe, "train")
        manifest = kept_manifest(catalog_folder, entry.manifest_file)
        catalog = open_manifest(catalog_folder, settings_of(part.sources, part.shuffle), manifest, views_of(part))
    except (CatalogError, RecipeError) as error:
        raise HistoryMissing(f"what the run had from step {entry.step} on cannot be opened again: {error}") from error
    found = recipe_fingerprint(part), catalog.fingerprint, denied_fingerprint(catalog.denied_rows)
    if found != (entry.recipe, entry.catalog, entry.denied):
        raise HistoryMissing(
            f"what the run had from step {entry.step} on gives another order in this version of torchmix; plan it "
            f"with the version that ran it"
        )
    return Segment(part=part, catalog=catalog, state=entry.before)
