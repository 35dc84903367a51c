"""A text with markers -> its parts, with the place of an image at each marker.

In: texts. Out: their parts. Must hold: a text without markers has its images before it. Cost: a few operations on
arrays.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.transform.documents.row_parts import AN_IMAGE, NOTHING, RowParts, RowsToCut


class MarkedText(msgspec.Struct, frozen=True):
    """Implements `RowCutter`."""

    marker: str

    @property
    def cut_id(self) -> str:
        """See `RowCutter`."""
        return f"marked-1:{self.marker}"

    @property
    def highest_id(self) -> int:
        """See `RowCutter`."""
        return -1

    @property
    def places(self) -> str:
        """See `RowCutter`."""
        return f"markers {self.marker!r}"

    def cut(self, rows: RowsToCut) -> RowParts:
        """See `RowCutter`."""
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        texts, counts = rows.texts, rows.num_images
        markers = pc.fill_null(pc.count_substring(texts, self.marker), 0).to_numpy(zero_copy_only=False)
        is_null = texts.is_null().to_numpy(zero_copy_only=False)
        is_bare = (markers == 0) & (counts > 0) & ~is_null
        if is_bare.any():
            before = pa.array([self.marker * int(n) if b else "" for n, b in zip(counts, is_bare, strict=True)])
            empty = pa.scalar("", pa.large_string())
            texts = pc.binary_join_element_wise(before.cast(pa.large_string()), texts, empty)
        parts = pc.split_pattern(texts, self.marker).flatten().cast(pa.large_string())
        num_parts = np.where(is_null, 0, np.where(is_bare, counts, markers) + 1).astype(np.int64)
        behind = np.full(len(parts), AN_IMAGE, np.int64)
        behind[np.cumsum(num_parts)[num_parts > 0] - 1] = NOTHING
        return RowParts(parts=parts, num_parts=num_parts, behind=behind, has_loss=None, behind_has_loss=None)
