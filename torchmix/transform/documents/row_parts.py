"""What a row is cut into, before it becomes a document.

In: texts, ids and places of images, in the order of a document. Out: arrays. Must hold: a part is a text that is
encoded by itself, and behind it stands one thing at most; what has loss and what has none never share a part. The last
part of a row has nothing behind it. Cost: Python objects, one for each part.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

NOTHING = -1
AN_IMAGE = -2


class RowParts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The parts of R rows, P in all."""

    parts: pa.Array
    """[P] large_string without nulls."""
    num_parts: Int64Array
    """[R] parts of each row; 0 for a row that is null, else at least 1."""
    behind: Int64Array
    """[P] what stands behind each part: an id, AN_IMAGE, or NOTHING."""
    has_loss: NDArray[np.bool_] | None
    """[P] whether the tokens of a part are trained on; None: all are."""
    behind_has_loss: NDArray[np.bool_] | None
    """[P] the same of what stands behind it."""

    def num_places(self) -> Int64Array:
        """[R] places of images in each row."""
        stops = np.cumsum(self.num_parts)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.behind == AN_IMAGE)])
        return np.asarray(before[stops] - before[stops - self.num_parts], np.int64)


class RowsToCut(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Consecutive rows of a source."""

    texts: pa.Array
    """[R] large_string: a text, or JSON."""
    num_images: Int64Array
    """[R]"""
    roles: list[list[int]] | None = None
    """[R] the role of each turn, where `texts` has contents alone."""
    first_row: int
    """Row of the file that the first one is, for messages."""


class RowCutter(Protocol):
    """Cuts the rows of a source; pure and row by row."""

    @property
    def cut_id(self) -> str:
        """What it does, with its version."""

    @property
    def highest_id(self) -> int:
        """The highest id between parts; -1 where there is none."""

    @property
    def places(self) -> str:
        """What messages call the places of images."""

    def cut(self, rows: RowsToCut) -> RowParts:
        """Cut rows.

        Raises:
            SourceUnreadable: A row is not what it should be.
        """


class PartsWriter(msgspec.Struct, kw_only=True):
    """Takes the contents of rows in order."""

    _texts: list[str] = msgspec.field(default_factory=list)
    _num_parts: list[int] = msgspec.field(default_factory=list)
    _behind: list[int] = msgspec.field(default_factory=list)
    _has_loss: list[bool] = msgspec.field(default_factory=list)
    _behind_has_loss: list[bool] = msgspec.field(default_factory=list)
    _open: list[str] = msgspec.field(default_factory=list)
    _open_has_loss: bool = True
    _first: int = 0

    def text(self, text: str, *, has_loss: bool = True) -> None:
        """Add a text; texts in a row that have loss, or have none, are one part."""
        if text:
            if self._open and has_loss != self._open_has_loss:
                self._close(NOTHING, has_loss=has_loss)
            self._open.append(text)
            self._open_has_loss = has_loss

    def id(self, token: int, *, has_loss: bool = True) -> None:
        """Add an id."""
        self._close(token, has_loss=has_loss)

    def image(self) -> None:
        """Add the place of an image."""
        self._close(AN_IMAGE, has_loss=False)

    def end_row(self, *, has_loss: bool = True) -> None:
        """End a row; `has_loss`: whether what ends its document is trained on."""
        self._close(NOTHING, has_loss=has_loss)
        self._num_parts.append(len(self._texts) - self._first)
        self._first, self._open_has_loss = len(self._texts), True

    def null_row(self) -> None:
        """A row without a document."""
        self._num_parts.append(0)

    def _close(self, behind: int, *, has_loss: bool) -> None:
        self._texts.append("".join(self._open))
        self._has_loss.append(self._open_has_loss)
        self._behind.append(behind)
        self._behind_has_loss.append(has_loss)
        self._open.clear()

    def row_parts(self, *, has_losses: bool) -> RowParts:
        """All rows; `has_losses`: some of it may be without loss."""
        return RowParts(
            parts=pa.array(self._texts, pa.large_string()),
            num_parts=np.array(self._num_parts, np.int64),
            behind=np.array(self._behind, np.int64),
            has_loss=np.array(self._has_loss, np.bool_) if has_losses else None,
            behind_has_loss=np.array(self._behind_has_loss, np.bool_) if has_losses else None,
        )
