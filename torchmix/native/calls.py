"""The structs of the calls, as the C files have them; each function and its rules are described there."""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import numpy as np

from torchmix.native.load import Array, Call


class Fill(Call):
    """`tm_fill` of fill.c."""

    FUNCTION = "tm_fill"
    _fields_ = (
        ("values", Array),
        ("place", Array),
        ("length", Array),
        ("ends", Array),
        ("successor", Array),
        ("tokens", Array),
        ("labels", Array),
        ("bad", Array),
        ("num_bad", c_int64),
        ("value_type", c_int64),
        ("no_loss", c_int64),
    )


class Contexts(Call):
    """`tm_contexts` of contexts.c."""

    FUNCTION = "tm_contexts"
    _fields_ = (
        ("tokens", Array),
        ("sizes", Array),
        ("bin_of_sample", Array),
        ("row_of_bin", Array),
        ("size_of_bin", Array),
        ("load_of_bin", Array),
        ("tokens_of_bin", Array),
        ("per_token", c_int64),
        ("per_pair", c_int64),
        ("per_exchanged", c_int64),
        ("per_microbatch", c_int64),
        ("rank_tokens", c_int64),
        ("align", c_int64),
        ("num_ranks", c_int64),
        ("stages", c_int64),
        ("microbatches_of", c_int64),
        ("num_bins", c_int64),
        ("num_rows", c_int64),
        ("cost", c_int64),
        ("lower_bound", c_int64),
        ("in_order_cost", c_int64),
        ("in_order_size", c_int64),
    )


def type_number(dtype: np.dtype[Any]) -> int:
    """The dtype of integers as C files have it: bytes of one, negative where they are signed."""
    return -dtype.itemsize if dtype.kind == "i" else dtype.itemsize
