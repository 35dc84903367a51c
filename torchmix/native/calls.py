"""The structs of the calls, as the C files have them; each function and its rules are described there."""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import numpy as np

from torchmix.native.load import Array, Call


class Locate(Call):
    """`tm_locate` of gather.c."""

    FUNCTION = "tm_locate"
    _fields_ = (
        ("sources", Array),
        ("source", Array),
        ("row", Array),
        ("start", Array),
        ("tokens", Array),
        ("order", Array),
        ("columns", Array),
        ("goes_on", Array),
        ("first_piece", Array),
        ("num_pages", c_int64),
    )


class Gather(Call):
    """`tm_gather` of gather.c."""

    FUNCTION = "tm_gather"
    OTHER_ROWS = 1
    ODD_LIMIT, ODD_NO_ID = 1, 2
    _fields_ = (
        ("runs", Array),
        ("outs", Array),
        ("piece", Array),
        ("run", Array),
        ("begin", Array),
        ("row", Array),
        ("start", Array),
        ("length", Array),
        ("place", Array),
        ("goes_on", Array),
        ("limit", Array),
        ("successor", Array),
        ("odd", Array),
        ("gap_place", Array),
        ("gap_length", Array),
        ("num_odd", c_int64),
        ("blanks", c_int64),
        ("type", c_int64),
        ("no_loss", c_int64),
    )


class Expand(Call):
    """`tm_expand` of gather.c."""

    FUNCTION = "tm_expand"
    _fields_ = (
        ("labels", Array),
        ("spans", Array),
        ("mask", Array),
        ("positions", Array),
        ("source", Array),
        ("padding", c_int64),
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


class Fold(Call):
    """`tm_fold` of fold.h."""

    FUNCTION = "tm_fold"
    _fields_ = (
        ("windows", Array),
        ("shares", Array),
        ("samples", Array),
        ("pack_key", Array),
        ("sample_key", Array),
        ("source_of_stream", Array),
        ("name_of_stream", Array),
        ("pair", Array),
        ("name_of_pair", Array),
        ("at", Array),
        ("position", Array),
        ("marks", Array),
        ("pool", Array),
        ("drawn", Array),
        ("pieces", Array),
        ("digested", Array),
        ("sums", Array),
        ("left", Array),
        ("needed", Array),
        ("cuts", Array),
        ("work", Array),
        ("num_streams", c_int64),
        ("num_sources", c_int64),
        ("first_step", c_int64),
        ("length", c_int64),
        ("align_tokens", c_int64),
        ("method", c_int64),
        ("charge", c_int64),
        ("ends_at_epoch", c_int64),
        ("num_done", c_int64),
        ("num_needed", c_int64),
    )


FOLD_WINDOW = 19
"""int64 of a struct tm_window of fold.h: address and entries of six arrays, then seven numbers."""
NOT_AT_HAND, NO_WINDOW = -1, -2
"""In place of the number of a window: it is not in the table; the stream has given its epochs."""
NEEDS_WINDOWS, NEEDS_ROOM, BY_REFERENCE = 1, 2, 3
"""What ends a fold early; 4, at an epoch, asks for nothing."""
POOL_END, DRAWN_END, PIECES_END, RAW, ALIGNED, NUM_SAMPLES, NUM_LABELLED, NUM_MARKS = 0, 1, 2, 3, 4, 5, 6, 8
"""Columns of `marks`."""
FOLD_METHODS = {"concat": 0, "best_fit": 1, "pad": 2, "whole": 3}
FEW_SAMPLES = 64
"""A step of more samples needs memory for each room that a sample can have."""


class PlaceSamples(Call):
    """`tm_place` of place.c."""

    FUNCTION = "tm_place"
    _fields_ = (
        ("tokens", Array),
        ("sample", Array),
        ("placed", Array),
        ("digested", Array),
        ("work", Array),
        ("per_token", c_int64),
        ("per_pair", c_int64),
        ("whole_sample", c_int64),
        ("length", c_int64),
        ("dp", c_int64),
        ("micro_batch_size", c_int64),
        ("stages", c_int64),
        ("method", c_int64),
        ("objective", c_int64),
        ("microbatches", c_int64),
        ("cost", c_int64),
        ("hash_order_cost", c_int64),
        ("lower_bound", c_int64),
        ("took_hash_order", c_int64),
    )


PLACE_METHODS = {"none": 0, "rows": 1}
PLACE_OBJECTIVES = {"rows": 0, "max": 1, "rank": 2, "pipeline": 3}
PLACE_MICROBATCHES = {"unimodal": 0, "descending": 1, "keep": 2}
PLACE_WORK = 14
"""int64 of memory for each sample."""


class FitItems(Call):
    """`tm_fit` of place.c."""

    FUNCTION = "tm_fit"
    _fields_ = (
        ("cost", Array),
        ("home", Array),
        ("bin", Array),
        ("least", Array),
        ("num_bins", c_int64),
        ("num_homes", c_int64),
        ("limit", c_int64),
        ("takes_first", c_int64),
        ("num_placed", c_int64),
    )


def dtype_of(number: int) -> np.dtype[Any]:
    """The inverse of `type_number`."""
    return np.dtype(f"{'i' if number < 0 else 'u'}{abs(number)}")
