"""The numpy arrays of one step of one replica. `build` fills them, here or in a process without torch.

In and out: arrays by name; `StepTensors.from_arrays` makes tensors of them. Must hold: all fields are present, in these
dtypes and shapes. Cost: no copies; 8 bytes a token, and 12 bytes a span.

    tokens             int32 [M, B, T]  id of the token; 0 in padding
    labels             int32 [M, B, T]  the next token of its document, also across a split; NO_LOSS where there is none
    spans              int32 [K, 3]     described in `spans.py`; positions and sources follow from them
    spans_stop         int64 [M]        where each microbatch's part of `spans` ends
    cu_seqlens         int32            described in `boundaries.py`: where attention stops
    cu_seqlens_padded  int32
    cu_seqlens_stop    int64 [M]        where each microbatch's part of the two ends
    max_seqlen         int32 [M]        the longest padded length of a segment

M is the microbatches of the step, B the micro_batch_size, T the tokens of a sample, or a rank's share of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

SEQUENCE_DTYPES: dict[str, type[np.generic]] = {"tokens": np.int32, "labels": np.int32}
"""Fields with a value per token; a rank gets the fields that its stage needs, cut to its CP slice."""
SEQUENCE_FIELDS = tuple(SEQUENCE_DTYPES)
SPAN_FIELDS = ("spans", "spans_stop")
"""Where positions restart, and sources change, on the rank's CP slice."""
BOUNDARY_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "cu_seqlens_stop", "max_seqlen")
"""Fields that every rank gets whole."""
FIELDS = SEQUENCE_FIELDS + SPAN_FIELDS + BOUNDARY_FIELDS

NO_LOSS = -100
"""The label where there is no loss: the value that torch's `cross_entropy` ignores by default."""


class StepArrays(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All fields of a replica's step."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Planned tokens with a label, over the global batch of all replicas."""
    fields: Mapping[str, NDArray[Any]]
    """Writable arrays by name, one for each of `FIELDS`."""
    num_masked_tokens: int = 0
    """Tokens of this replica that `num_tokens_global` counts and that lost their label to bad rows."""
    bad_tokens: NDArray[np.int64] | None = None
    """[S] tokens of each source in blank pieces, which could not be read; None if all pieces could be read. This array
    does not leave the process that builds the step."""
    modules: Mapping[str, NDArray[Any]] = msgspec.field(default_factory=dict)
    """Writable arrays by `MODULE.ARRAY`, see `modules/arrays.py`; empty for a recipe without modules."""
    rows: Mapping[str, NDArray[Any]] = msgspec.field(default_factory=dict)
    """Writable arrays by `NAME:PART`, see `row_arrays.py`; empty where no map gives more than ids."""
    header: bytes = b""
    """The loader's header, opaque here."""
