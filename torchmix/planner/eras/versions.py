"""The rows of a stream, in the version that it has now or had before an edit.

In: a stream's members with the fingerprints of their rows. Out: its space, and which rows of which member it keeps.
Must hold: rows of a source have the same numbers in all versions, as files are only added behind the others. Cost: a
byte for each row of a source, for each member and version that is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.views.earlier import EarlierRows
from torchmix.errors import StateMismatch
from torchmix.mixture.spaces.space import Space
from torchmix.planner.stream_order import flat_space, space_of_rows
from torchmix.recipe.parts import Part
from torchmix.recipe.source.documents import rows_of

Mask = NDArray[np.bool_]


class StreamRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows of a stream in one version."""

    space: Space
    sources: Mapping[str, str]
    """Member -> source, by sorted name of the member."""
    first: Mapping[str, int]
    """Member -> number in the space of row 0 of its source."""
    kept: Mapping[str, Mask]
    """Member -> [rows of the source now] whether the stream has the row."""

    def by_member(self, rows: Int64Array) -> Iterator[tuple[str, Int64Array, Int64Array]]:
        """Members of rows of the space, the places of these rows in the array, and their rows in the source."""
        names, firsts = list(self.first), np.array(list(self.first.values()), np.int64)
        which = firsts.searchsorted(rows, side="right") - 1
        for number in np.unique(which).tolist():
            at = np.flatnonzero(which == number)
            yield names[number], at, rows[at] - firsts[number]

    def numbers_of(self, other: StreamRows, rows: Int64Array) -> Int64Array:
        """[n] numbers that rows of another version's space have in this one's, which has all members of that."""
        found: Int64Array = rows.copy()
        for name, at, of_source in other.by_member(rows):
            found[at] = of_source + self.first[name]
        return found


class Versions:
    """Versions of the streams of a part."""

    def __init__(self, part: Part, sizes: Mapping[str, SourceSizes], earlier: EarlierRows | None) -> None:
        """Take what the catalog has.

        Args:
            part: In use.
            sizes: Of its sources, as they are now.
            earlier: The rows that sources and views had before; None: nothing is known.
        """
        self._part, self._sizes, self._earlier = part, sizes, earlier
        self._found: dict[tuple[str, tuple[tuple[str, str], ...]], StreamRows] = {}

    def sources_of(self, members: tuple[tuple[str, str], ...]) -> set[str]:
        """Sources of members, of those whose rows the catalog has."""
        found = [] if self._earlier is None else [self._earlier.rows(*member) for member in members]
        return {one[0] for one in found if one is not None}

    def rows(self, stream: str, members: tuple[tuple[str, str], ...]) -> StreamRows:
        """A version of a stream.

        Args:
            stream: Its name; it may be one that the part has no more.
            members: Members with the fingerprints of their rows, by sorted name.

        Raises:
            StateMismatch: The catalog does not have these rows.
        """
        if (stream, members) not in self._found:
            self._found[stream, members] = self._made(stream, members)
        return self._found[stream, members]

    def _made(self, stream: str, members: tuple[tuple[str, str], ...]) -> StreamRows:
        spaces: list[Space] = []
        sources, first, kept, end = dict[str, str](), dict[str, int](), dict[str, Mask](), 0
        for name, fingerprint in members:
            if self._earlier is None:
                raise StateMismatch(f"without a catalog, the rows that {name!r} had before an edit are not known")
            source, sizes, view = self._earlier.found(name, fingerprint)
            mask = np.zeros(self._sizes[source].num_documents, np.bool_)
            spaces.append(space_of_rows(self._part, source, sizes, view))
            start, stop = rows_of(self._part.sources[source], sizes.num_documents)
            mask[slice(start, stop) if view is None else view.kept] = True
            mask[:start] = mask[stop:] = False
            sources[name], first[name], kept[name] = source, end, mask
            end += sizes.num_documents
        is_flat = [name for name, _ in members] != [stream]
        space = flat_space(self._part, spaces) if is_flat else spaces[0]
        return StreamRows(space=space, sources=sources, first=first, kept=kept)
