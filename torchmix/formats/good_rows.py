"""Rows as documents, where some rows cannot be read; and how large the lists are that maps give."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pyarrow as pa

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.manifest import MOST_ID, BadRows, ListBytes
from torchmix.errors import CatalogError, SourceUnreadable
from torchmix.formats.column import Kind, count_tokens, see_rows, to_documents
from torchmix.formats.source import Documents, PageRun, SeenIds, join_seen
from torchmix.transform.tokenizer import Tokenizer

# --- Rows as documents, where some rows cannot be read: those have no tokens.
#
# A row is bad or not by itself, whatever rows are beside it; a page decodes to the lengths that the index found.


def look_at_rows(
    array: pa.Array,
    kind: Kind,
    first_row: int,
    tokenizer: Tokenizer,
    bad: BadRows | None,
    *,
    num_opening: int = 0,
) -> tuple[Int64Array, SeenIds | None]:
    """Tokens of each row, [rows], and what is seen of their ids; bad rows have none.

    Args:
        array, kind, first_row, tokenizer: As `column.count_tokens`.
        bad: Takes the bad rows, those with ids that no model has too; None: the first one is an error, and the
            answer says which ids no model has.
        num_opening: Ids before all others that are not the file's.

    Raises:
        SourceUnreadable: A row is bad, and nobody takes it.
    """
    try:
        tokens = count_tokens(array, kind, first_row, tokenizer, num_opening=num_opening)
        seen = see_rows(array, kind, first_row, num_opening=num_opening)
        if bad is not None and seen is not None and seen.outside is not None:
            raise SourceUnreadable(f"holds the token {seen.outside.token}; ids go from 0 to {MOST_ID}")
        return tokens, seen
    except SourceUnreadable as error:
        if bad is None:
            raise
        if len(array) == 1:
            bad.add(first_row, reason_of(error))
            return np.zeros(1, np.int64), None
    half = len(array) // 2
    first, second = (
        look_at_rows(
            array.slice(start, stop - start),
            kind,
            first_row + start,
            tokenizer,
            bad,
            num_opening=0 if start else num_opening,
        )
        for start, stop in pairwise((0, half, len(array)))
    )
    return np.concatenate([first[0], second[0]]), join_seen([first[1], second[1]])


def reason_of(error: CatalogError) -> str:
    """What is wrong with a row, on one line, without its source and file."""
    return " ".join(error.message.split())


def documents_of_run(arrays: list[pa.Array], kind: Kind, run: PageRun) -> Documents:
    """The rows of a run; of a file with bad rows, lists without tokens are not looked at.

    Args:
        arrays, kind: As `column.to_documents`.
        run: Which the arrays were read from.

    Raises:
        SourceUnreadable: A row is bad that was not when it was indexed.
    """
    is_free = kind != "tokens"  # whose bytes may be any
    if is_free or run.tokens is None or not passes_over_rows(run) or sum(map(len, arrays)) != len(run.tokens):
        return to_documents(arrays, kind, run.first_row)
    parts: list[Documents] = []
    lengths = np.zeros(len(run.tokens), np.int64)
    row = 0
    for array in arrays:
        for start, stop in _with_tokens(run.tokens[row : row + len(array)]):
            part = to_documents([array.slice(start, stop - start)], kind, run.first_row + row + start)
            lengths[row + start : row + stop] = np.diff(part.offsets)
            parts.append(part)
        row += len(array)
    values = np.concatenate([part.values for part in parts]) if parts else np.zeros(0, np.int32)
    return Documents(values=values, offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def passes_over_rows(run: PageRun) -> bool:
    """Whether rows of a run may be bad: those that the catalog says have no tokens, in a file that has bad rows."""
    return run.has_bad_rows and run.tokens is not None and not run.tokens.all()


def _with_tokens(tokens: Int32Array) -> list[tuple[int, int]]:
    """Ranges of consecutive rows that have tokens."""
    borders = np.flatnonzero(np.diff(tokens > 0, prepend=False, append=False)).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))


# --- How large the lists are that maps give beside ids.
#
# A step of T tokens in S samples, of a source whose lists are so large, has at most T x `of_token` + S x `of_row`
# bytes of lists, since a row that begins in a sample ends in it, or is the one that continues. Cost: some array
# operations a list.

ROW_BYTES = 16
"""A row's length and place, int64 each, in each of the lists."""


def see_lists(lists: Mapping[str, pa.Array], tokens: Int64Array) -> ListBytes | None:
    """Look at the lists of some rows.

    Args:
        lists: By name, [n] lists of numbers.
        tokens: [n] tokens of each row; one without any is in no step.
    """
    has_tokens = tokens > 0
    if not lists or not has_tokens.any():
        return None
    num_bytes = np.full(len(tokens), ROW_BYTES * len(lists), np.int64)
    for array in lists.values():
        kind = np.dtype(array.type.value_type.to_pandas_dtype())
        is_widened = kind.kind == "u" and kind.itemsize in (2, 4)  # torch has no such types everywhere
        num_bytes += np.diff(array.offsets.to_numpy()) * (kind.itemsize << is_widened)
    found = num_bytes[has_tokens]
    return ListBytes(of_row=int(found.max()), of_token=int((-(-found // tokens[has_tokens])).max()))
