"""The arrays of one step of one replica, as numpy has them: what `build` fills, here or in a process without torch.

In and out: arrays by name, of which `StepTensors.from_arrays` makes tensors. Must hold: all fields are there, in these
dtypes and shapes. Cost: no copies; 8 bytes a token, and 12 a span.

    tokens             int32 [M, B, T]  id of the token; 0 in padding
    labels             int32 [M, B, T]  the next token of its document, also across a split; NO_LOSS where there is none
    spans              int32 [K, 3]     as `spans.py` has them: what positions and sources follow from
    spans_stop         int64 [M]        where each microbatch's part of `spans` ends
    cu_seqlens         int32            as `boundaries.py` has them: where attention stops
    cu_seqlens_padded  int32
    cu_seqlens_stop    int64 [M]        where each microbatch's part of the two ends
    max_seqlen         int32 [M]        the longest padded length of a segment

M is the microbatches of the step, B the micro_batch_size, T the tokens of a sample, or a rank's share of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEQUENCE_DTYPES: dict[str, type[np.generic]] = {"tokens": np.int32, "labels": np.int32}
"""Fields with a value per token; a rank gets those its stage needs, cut to its CP slice."""
SEQUENCE_FIELDS = tuple(SEQUENCE_DTYPES)
SPAN_FIELDS = ("spans", "spans_stop")
"""Where positions restart, and sources change, on the rank's CP slice."""
BOUNDARY_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "cu_seqlens_stop", "max_seqlen")
"""Fields that every rank gets whole."""
FIELDS = SEQUENCE_FIELDS + SPAN_FIELDS + BOUNDARY_FIELDS

NO_LOSS = -100
"""The label where there is no loss: the value that torch's `cross_entropy` ignores by default."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepArrays:
    """All fields of a replica's step."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Tokens with a label over the whole global batch, all replicas, as planned."""
    fields: Mapping[str, NDArray[Any]]
    """By name, `FIELDS`; writable."""
    num_masked_tokens: int = 0
    """Tokens of this replica that `num_tokens_global` counts, and whose label reading took away."""
    bad_tokens: NDArray[np.int64] | None = None
    """[S] tokens of each source in pieces that could not be read, and are blank; None if all could. Stays where the
    step is built."""
    header: bytes = b""
    """What the loader sends along; opaque here."""
