"""Rows that could not be read when their file was indexed: how many, the first few with what was wrong, and the bound.

In: rows of a file with reasons, as a scan meets them. Out: a count, and a list of at most MOST_LISTED rows. Must hold:
a catalog whose source has more bad rows than its recipe allows is neither published nor opened. Cost: 8 bytes a bad row
while its file is scanned, and some 100 bytes in the catalog for each listed row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import msgspec

from torchmix.errors import CatalogStale, TooManyBadRows

MOST_LISTED = 10
"""Most bad rows of a file that are listed; the others are only counted."""
MOST_REASON = 200
"""Most characters of a reason."""


class BadRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """A row that could not be read; a list in JSON."""

    row: int
    """Row of the file, from 0."""
    reason: str


class BadRows:
    """The bad rows of one file, as a scan meets them."""

    def __init__(self) -> None:
        self.rows = array("q")
        """Row in the file of each bad row."""
        self._listed: list[BadRow] = []

    def add(self, row: int, reason: str) -> None:
        """Add a bad row. The same row twice in succession is one row, in which the scan met another bad part."""
        if self.rows and self.rows[-1] == row:
            return
        self.rows.append(row)
        if len(self._listed) < MOST_LISTED:
            self._listed.append(BadRow(row=row, reason=reason[:MOST_REASON]))

    def extend(self, others: BadRows) -> None:
        """Add bad rows that were collected separately."""
        self.rows.extend(others.rows)
        self._listed += others._listed[: MOST_LISTED - len(self._listed)]

    @property
    def listed(self) -> tuple[BadRow, ...]:
        """The first ones, at most MOST_LISTED."""
        return tuple(sorted(self._listed))


class IndexedFile(Protocol):
    """What the check needs to know of an indexed file."""

    @property
    def num_bad_rows(self) -> int:
        """Rows that could not be read."""

    @property
    def bad_rows(self) -> tuple[BadRow, ...]:
        """The first of these rows."""


def listed_text(files: Sequence[tuple[str, IndexedFile]], most: int) -> str:
    """The first bad rows of files, as `PATH row 5: reason; PATH row 9: reason`; `files` with their paths."""
    listed = [f"{path} row {bad.row}: {bad.reason}" for path, file in files for bad in file.bad_rows]
    more = sum(file.num_bad_rows for _, file in files) - len(listed[:most])
    return "; ".join(listed[:most]) + (f"; and {more} more" if more else "")


def check_bad_rows(
    name: str,
    files: Sequence[tuple[str, IndexedFile]],
    *,
    num_rows: int,
    is_masked: bool,
    max_bad: Fraction,
    is_fresh: bool = False,
) -> None:
    """Refuse a source with bad rows that its recipe does not allow.

    Args:
        name: The source.
        files: Its files, with their paths.
        num_rows: Rows of all of them, bad ones included.
        is_masked: Whether the recipe masks bad rows.
        max_bad: Part of all rows that may be bad.
        is_fresh: Whether the files were indexed just now.

    Raises:
        CatalogStale: Bad rows are an error now, but were masked when the source was indexed.
        TooManyBadRows: More rows are bad than `max_bad` allows.
    """
    num_bad = sum(file.num_bad_rows for _, file in files)
    if not num_bad:
        return
    fact = f"source {name!r}: {num_bad} of {num_rows} rows {'cannot be read' if is_fresh else 'could not be indexed'}"
    if not is_masked:
        raise CatalogStale(
            f"{fact} ({listed_text(files, 1)}), and they are an error now; write bad_rows: mask, or mend them and "
            "run torchmix index"
        )
    if num_bad > max_bad * num_rows:
        raise TooManyBadRows(
            f"{fact}, which is {num_bad / num_rows:.4%}, and max_bad is {float(max_bad):.4%}: {listed_text(files, 3)}. "
            "Mend them and run torchmix index, or raise max_bad"
        )
