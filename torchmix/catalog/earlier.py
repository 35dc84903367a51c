"""Rows that a source or a view had before files were added or other rows were chosen.

Rows are found by their fingerprint alone, so what was altered is not taken for what it was. Cost: a source of before is
a prefix of its files, found by trying; a view of before is kept by the catalog, four bytes a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchmix.catalog.array_files import open_arrays
from torchmix.catalog.in_store import bring
from torchmix.catalog.manifest import ViewEntry, read_manifest, source_fingerprint
from torchmix.catalog.settings import SourceSettings
from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.store import ARRAYS_FOLDER, ROWS_OF_VIEW, Catalog, View
from torchmix.errors import StateMismatch


class EarlierRows:
    """The rows that sources and views of a part have, and had."""

    def __init__(self, catalog: Catalog, settings: Mapping[str, SourceSettings], part: str) -> None:
        """Take an open catalog.

        Args:
            catalog: With the views of a part.
            settings: What its sources were opened for.
            part: The part's name.
        """
        self._catalog, self._settings, self._part = catalog, settings, part
        self._entries: dict[str, list[ViewEntry]] | None = None
        self._sizes: dict[tuple[str, str], SourceSizes | None] = {}

    def num_rows(self, source: str) -> int:
        """Rows that a source has now."""
        return self._catalog.sources[source].sizes.num_documents

    def found(self, member: str, fingerprint: str) -> tuple[str, SourceSizes, View | None]:
        """As `rows`.

        Raises:
            StateMismatch: The catalog does not have these rows.
        """
        found = self.rows(member, fingerprint)
        if found is None:
            raise StateMismatch(
                f"the catalog does not have the rows that {member!r} had when the state was saved (fingerprint "
                f"{fingerprint}): files were changed or removed, or its rows were chosen too often. Files may "
                f"be added; restore the others, or start a new run"
            )
        return found

    def rows(self, member: str, fingerprint: str) -> tuple[str, SourceSizes, View | None] | None:
        """Source, sizes and view of rows; the view is None for all rows of a source. None: the catalog has none such.

        Args:
            member: Name of the source or view.
            fingerprint: The fingerprint of its rows.
        """
        view = self._catalog.views.get(member)
        if view is not None and view.fingerprint == fingerprint:
            return view.source, self._catalog.sources[view.source].sizes, view
        if member in self._catalog.sources and (sizes := self._sizes_of(member, fingerprint)) is not None:
            return member, sizes, None
        for entry in self._views_before(member):
            if entry.fingerprint != fingerprint or entry.source not in self._catalog.sources:
                continue
            sizes = self._sizes_of(entry.source, entry.source_fingerprint)
            if sizes is not None:
                bring(self._catalog.directory, [f"{ARRAYS_FOLDER}/{entry.file}"])
                path = f"{self._catalog.directory}/{ARRAYS_FOLDER}/{entry.file}"
                found = View(
                    source=entry.source,
                    kept=open_arrays(path, entry.arrays, {})[ROWS_OF_VIEW],
                    window_units=entry.window_units,
                    fingerprint=fingerprint,
                    longest_tokens=entry.max_document_tokens,
                    num_tokens=entry.num_tokens,
                )
                return entry.source, sizes, found
        return None

    def _views_before(self, member: str) -> list[ViewEntry]:
        if self._entries is None:
            manifest, self._entries = read_manifest(self._catalog.directory), {}
            for name, entry in manifest.views.get(self._part, {}).items():
                self._entries[name] = [entry]
            for name, entries in manifest.earlier_views.get(self._part, {}).items():
                self._entries.setdefault(name, []).extend(entries)
        return [entry for entry in self._entries.get(member, []) if entry.file is not None]

    def _sizes_of(self, source: str, fingerprint: str) -> SourceSizes | None:
        """A source as it is, or as it was with fewer files."""
        if (source, fingerprint) not in self._sizes:
            self._sizes[source, fingerprint] = self._prefix(source, fingerprint)
        return self._sizes[source, fingerprint]

    def _prefix(self, name: str, fingerprint: str) -> SourceSizes | None:
        source = self._catalog.sources[name]
        if fingerprint == source.fingerprint:
            return source.sizes
        num_pages = num_rows = num_tokens = 0
        for number, file in enumerate(source.files):
            tokens = source.sizes.tokens[num_rows : num_rows + file.num_rows]
            num_pages, num_rows = num_pages + file.num_pages, num_rows + file.num_rows
            num_tokens += int(tokens.sum(dtype=np.int64))
            window = self._settings[name].window_pages(num_pages=num_pages, num_tokens=num_tokens)
            files = source.files[: number + 1]
            if source_fingerprint(files, source.column, source.transform_id, window) == fingerprint:
                return SourceSizes(
                    first_row_of_page=np.asarray(source.sizes.first_row_of_page[: num_pages + 1], np.int64),
                    tokens=source.sizes.tokens[:num_rows],
                    window_pages=window,
                    longest_tokens=source.sizes.longest_tokens,
                    num_tokens=num_tokens,
                )
        return None
