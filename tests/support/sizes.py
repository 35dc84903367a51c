"""Synthetic catalogs: sizes of sources made from integers alone, equal on every machine."""

from __future__ import annotations

import numpy as np

from torchmix.catalog.sizes import SourceSizes


def synthetic_sizes(
    num_documents: int, *, shortest: int, longest: int, rows_per_page: int = 50, window_pages: int = 64, salt: int = 1
) -> SourceSizes:
    """Documents of skewed lengths in [shortest, longest]: integer arithmetic, no generator."""
    row = np.arange(num_documents, dtype=np.int64)
    prime = 1_000_003
    scattered = (row * 2654435761 + salt * 40503) % prime
    # The cube makes short documents common and long ones rare; rounded at each power, to stay in 64 bits.
    cubed = scattered * scattered // prime * scattered // prime
    tokens = shortest + (longest - shortest) * cubed // prime
    first_row = np.append(np.arange(0, num_documents, rows_per_page), num_documents)
    return SourceSizes(
        first_row_of_page=first_row.astype(np.int64), tokens=tokens.astype(np.int32), window_pages=window_pages
    )
