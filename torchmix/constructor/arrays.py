"""The arrays of one step of one replica, as numpy has them: what `build` fills, here or in a process without torch.

In and out: arrays by name, of which `StepTensors.from_arrays` makes tensors; fields.py says what each name means. Must
hold: all fields are there, in the dtypes and shapes of fields.py. Cost: no copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEQUENCE_DTYPES: dict[str, type[np.generic]] = {
    "tokens": np.int64,
    "labels": np.int64,
    "loss_mask": np.float32,
    "position_ids": np.int64,
    "source_index": np.int32,
}
"""Fields with a value per token; a rank gets those its stage needs, cut to its CP slice."""
SEQUENCE_FIELDS = tuple(SEQUENCE_DTYPES)
BOUNDARY_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "cu_seqlens_stop", "max_seqlen")
"""Fields that every rank gets whole."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepArrays:
    """All fields of a replica's step."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Sum of loss_mask over the whole global batch, all replicas."""
    fields: Mapping[str, NDArray[Any]]
    """By name, `SEQUENCE_FIELDS + BOUNDARY_FIELDS`; writable."""
    header: bytes = b""
    """What the loader sends along; opaque here."""
