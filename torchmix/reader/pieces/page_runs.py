"""Pieces -> the runs to copy from mapped files, and from each page once it is decoded.

In: pieces by page. Out: tokens, and where in them consecutive pieces begin. Must hold: pieces keep their order; rests
of open documents are kept when their page is at hand. Cost: Python's lists of all pieces are made once, and cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError
from torchmix.reader.decoded_page import DecodedPage
from torchmix.reader.mapped_files import MappedFiles
from torchmix.reader.pieces.locate import Located
from torchmix.reader.pieces.open_documents import OpenDocuments
from torchmix.reader.pieces.piece_copy import Run


def mapped_runs(at: Located, mapped_of_source: Sequence[MappedFiles], token_bytes: Int64Array) -> list[Run]:
    """Runs of pieces in mapped files.

    Args:
        at: The pieces.
        mapped_of_source: The files of each source.
        token_bytes: [S] bytes of a token in sources whose files are mapped, 0 for all others; set to 0 where files
            cannot be mapped.
    """
    found: list[tuple[NDArray[np.integer[Any]], int, int]] = []
    for s, start, stop in at.ranges if token_bytes.any() else ():
        mapped = mapped_of_source[s]
        if mapped.whole is not None:
            found.append((mapped.whole, start, stop))
            mapped.verify(at.page[start:stop])
        elif (files := mapped.files_of_pages(at.page[start:stop])) is not None:
            mapped.verify(at.page[start:stop])
            borders = [*(start + first for first, _ in files), stop]
            found += [(values, *span) for (_, values), span in zip(files, pairwise(borders), strict=True)]
        else:
            token_bytes[s] = mapped.token_bytes  # 0 from now on, if the files could not be mapped
    begins = at.begin_in_file.tolist() if found else []
    return [(values, start, begins[start:stop]) for values, start, stop in found]


class PageRuns:
    """Pieces of pages that must be decoded."""

    def __init__(self, at: Located, chosen: NDArray[np.bool_], documents: OpenDocuments) -> None:
        """`chosen`: [Q] the pages to decode, as a mask; `documents` have begun this call."""
        first = at.first_piece[chosen]
        self._first = first.tolist()
        self._stop = np.append(at.first_piece, len(at.order))[1:][chosen].tolist()
        self._rows: list[int] = at.row_in_page.tolist() if len(first) else []
        self._starts: list[int] = at.start.tolist() if len(first) else []
        self._documents, self._sizes = documents, at.tokens
        self.source = at.source[first]
        """Source of each page."""
        self.page = at.page[first]
        """Number of each page in its source."""

    def run(self, k: int, page: DecodedPage) -> Run:
        """The pieces of the k-th page."""
        first, stop, offsets = self._first[k], self._stop[k], page.offsets
        self._documents.keep(first, page)
        rows, starts = self._rows[first:stop], self._starts[first:stop]
        if page.is_part:
            self._check_used(k, page)
        return page.values, first, [offsets[row] + start for row, start in zip(rows, starts, strict=True)]

    def _check_used(self, k: int, page: DecodedPage) -> None:
        """Raise a PlanError where a piece is of a row that the page was not kept for."""
        first, stop = self._first[k], self._stop[k]
        for row, start, size in zip(
            self._rows[first:stop], self._starts[first:stop], self._sizes[first:stop].tolist(), strict=True
        ):
            if start + size > page.offsets[row + 1] - page.offsets[row]:
                raise PlanError(
                    f"row {row} of page {self.page[k]} of source {self.source[k]} is asked for, and no stream of the "
                    "part has it; the plan belongs to another catalog"
                )
