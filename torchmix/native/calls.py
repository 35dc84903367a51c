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


def type_number(dtype: np.dtype[Any]) -> int:
    """The dtype of integers as C files have it: bytes of one, negative where they are signed."""
    return -dtype.itemsize if dtype.kind == "i" else dtype.itemsize
