"""The streams of docs/formats.md and the order of each, written again from its text; see `book_order`.

In: sources, the rows of selections, the members of flats. Out: streams, whose windows are lists of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.support.book_order import BookSource


@dataclass(frozen=True, kw_only=True)
class BookStream:
    """What holds a share: a source, or what is shuffled as one."""

    name: str
    rows: BookSource
    """All rows, those that it does not have included, in pages or units."""
    kept: frozenset[int]
    """The rows that it has."""
    places: Sequence[tuple[str, int]]
    """Source and row there of each row."""

    @property
    def num_windows(self) -> int:
        return self.rows.num_windows

    def window(self, seed: int, epoch: int, window: int) -> list[int]:
        """Section "Window order": those of the rows of a window that it has."""
        return [row for row in replace(self.rows, name=self.name).window(seed, epoch, window) if row in self.kept]


def stream_of(source: BookSource) -> BookStream:
    """A source that is a stream."""
    rows = range(len(source.tokens))
    places = [(source.name, row) for row in rows]
    return BookStream(name=source.name, rows=source, kept=frozenset(rows), places=places)


def selection_of(name: str, source: BookSource, kept: Sequence[int], window_pages: int) -> BookStream:
    """A selection, with the `window_pages` of its entry."""
    rows = replace(source, window_pages=window_pages)
    return BookStream(name=name, rows=rows, kept=frozenset(kept), places=stream_of(source).places)


def flat_of(name: str, members: Sequence[BookStream], window_pages: int) -> BookStream:
    """A flat of members by sorted name; `window_pages` is what a source of their pages and tokens would have."""
    windows = -(-sum(drawn_pages(member) for member in members) // window_pages)
    first, tokens, kept, places = [0], list[int](), set[int](), list[tuple[str, int]]()
    for member in members:
        base, count = len(tokens), len(member.places)
        if member.rows.num_pages < windows:
            first += [base + min(count, row) for row in range(16, max(1, count) + 16, 16)]
        else:
            first += [base + row for row in member.rows.first_row_of_page[1:]]
        kept |= {base + row for row in member.kept}
        tokens += member.rows.tokens
        places += member.places
    method = members[0].rows.method
    units = BookSource(name=name, first_row_of_page=first, tokens=tokens, window_pages=1, method=method)
    rows = replace(units, window_pages=-(-units.num_pages // max(1, windows)))
    return BookStream(name=name, rows=rows, kept=frozenset(kept), places=places)


def window_pages_of(members: Sequence[BookStream], most_pages: int, most_bytes: int = 2**26) -> int:
    """Section "Windows", for the pages and tokens of the members of a flat."""
    pages = sum(drawn_pages(member) for member in members)
    tokens = sum(member.rows.tokens[row] for member in members for row in member.kept)
    return min(max(1, most_bytes * pages // max(1, 4 * tokens)), most_pages)


def drawn_pages(member: BookStream) -> int:
    """The pages that a member counts for."""
    return -(-member.rows.num_pages * len(member.kept) // len(member.places))
