"""Row numbers as a user gives them -> an array of them.

In: a number, numbers, or a mask of all rows. Out: int64. Must hold: every number is a row that there is; what is no
whole number is an error, and is never rounded. Cost: one pass over them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchmix.errors import OptionError


def row_numbers(rows: ArrayLike, num_rows: int) -> NDArray[np.int64]:
    """The row numbers that `rows` means.

    Args:
        rows: One whole number, [n] of them, or a mask: [num_rows] bools.
        num_rows: N, rows that there are.

    Returns:
        [n] of [0, N).

    Raises:
        OptionError: Other values or shapes.
        IndexError: There is no such row.
    """
    try:
        given = np.asarray(rows)
    except (TypeError, ValueError) as error:  # lists of several lengths
        raise OptionError(f"rows: {error}; give whole numbers, or a mask of {num_rows} bools") from error
    if given.ndim > 1:
        raise OptionError(f"rows have the shape {given.shape}; give one axis, as rows.ravel() has")
    if given.dtype == np.bool_:
        if given.shape != (num_rows,):
            text = f"rows are a mask of the shape {given.shape}; a mask has one bool for each of the {num_rows} rows"
            raise OptionError(text)
        return np.flatnonzero(given).astype(np.int64, copy=False)
    if given.size == 0:  # NumPy makes float64 of an empty list
        return np.zeros(0, np.int64)
    numbers = np.atleast_1d(given)
    if numbers.dtype == object and all(type(number) is int for number in numbers):  # some are beyond 64 bits
        raise _no_such_row(next(number for number in numbers if not 0 <= number < num_rows), num_rows)
    if not np.issubdtype(numbers.dtype, np.integer):
        text = (
            f"rows are {numbers.dtype}, the first is {numbers[0]!r}; give whole numbers, or a mask of {num_rows} bools"
        )
        raise OptionError(text)
    is_wrong = (numbers < 0) | (numbers >= num_rows)
    if is_wrong.any():
        raise _no_such_row(int(numbers[np.argmax(is_wrong)]), num_rows)
    return numbers.astype(np.int64, copy=False)


def _no_such_row(row: int, num_rows: int) -> IndexError:
    return IndexError(f"row {row}: the files have {num_rows} rows, from 0 on")
