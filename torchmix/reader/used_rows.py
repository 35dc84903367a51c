"""The rows of a source that a part uses at all: of a decoded page, no others are kept.

In: the views of a part, and decoded pages. Out: pages that hold the used rows alone; other rows have no tokens there.
Must hold: a used row is what it was. Cost: a binary search and a copy of the used rows for each page.

A window of a selection has many more pages than one of its source, so that it holds as many rows. Their other rows
would push each other out of the cache, and a page would be decoded for nearly each of its rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.reader.decoded_page import PAGE_OVERHEAD_BYTES, DecodedPage
from torchmix.recipe.parts import Part
from torchmix.recipe.streams import row_sets_of

MOST_USED = 0.5
"""Part of a source's rows: where more are used, pages are kept whole, since a copy saves little."""


def used_rows(part: Part, catalog: Catalog) -> dict[str, NDArray[np.integer]]:
    """The used rows, ascending, of each source of which all streams are views with few rows.

    Args:
        part: What is planned.
        catalog: Its catalog, with views.
    """
    by_source: dict[str, list[str]] = {}
    for name, one in row_sets_of(part).items():
        by_source.setdefault(one.source, []).append(name)
    found: dict[str, NDArray[np.integer]] = {}
    for source, names in by_source.items():
        if not all(name in catalog.views for name in names):
            continue
        kept = [catalog.views[name].kept for name in names]
        if sum(map(len, kept)) <= MOST_USED * catalog.sources[source].num_documents:
            found[source] = kept[0] if len(kept) == 1 else np.unique(np.concatenate(kept))
    return found


class UsedRows:
    """The used rows of one source."""

    def __init__(self, rows: NDArray[np.integer], source: SourceCatalog) -> None:
        """`rows`: ascending, each once."""
        self._rows, self._sizes = rows, source.sizes

    def only(self, page: int, decoded: DecodedPage) -> DecodedPage:
        """A decoded page with its used rows alone."""
        if decoded.is_view or decoded.is_blank:
            return decoded
        rows, offsets = self._of_page(page), np.asarray(decoded.offsets)
        if 2 * len(rows) > len(offsets):
            return decoded
        starts, stops = offsets[rows], offsets[rows + 1]
        counts = np.zeros(len(offsets), np.int64)
        counts[rows + 1] = stops - starts
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        values = [decoded.values[start:stop] for start, stop in spans] or [decoded.values[:0].copy()]
        return DecodedPage(values=np.concatenate(values), offsets=counts.cumsum().data, is_part=True)

    def planned_bytes(self, pages: NDArray[np.int64]) -> list[int]:
        """Memory that each page will take; see `SourcePages.planned_bytes`."""
        first_row = self._sizes.first_row_of_page
        num_rows = (np.asarray(first_row[pages + 1]) - np.asarray(first_row[pages])).tolist()
        tokens = [
            int(self._sizes.tokens[first + self._of_page(page)].sum(dtype=np.int64))
            for page, first in zip(pages.tolist(), np.asarray(first_row[pages]).tolist(), strict=True)
        ]
        return [4 * n + 8 * (rows + 1) + PAGE_OVERHEAD_BYTES for n, rows in zip(tokens, num_rows, strict=True)]

    def _of_page(self, page: int) -> NDArray[np.int64]:
        """The used rows of a page, counted from its first row."""
        start, stop = (int(row) for row in self._sizes.first_row_of_page[page : page + 2])
        begin, end = np.searchsorted(self._rows, (start, stop))
        return np.asarray(self._rows[begin:end], np.int64) - start
