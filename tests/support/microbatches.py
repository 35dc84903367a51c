"""Microbatches written out by hand, for tests of what takes them."""

from __future__ import annotations

from typing import Any

import torch

from torchmix.constructor.fields import Microbatch


def make_microbatch(**fields: Any) -> Microbatch:
    """A microbatch of a middle stage, with one span and one segment of 8 tokens, but for what is given."""
    boundaries = torch.tensor([0, 8], dtype=torch.int32)
    plain = {
        "tokens_int32": None,
        "labels_int32": None,
        "spans": torch.tensor([[0, 0, 0]], dtype=torch.int32),
        "cu_seqlens": boundaries,
        "cu_seqlens_padded": boundaries,
        "max_seqlen": 8,
        "step": 0,
        "index": 0,
        "num_microbatches": 1,
        "is_last_of_step": True,
        "num_tokens_global": 8,
    }
    return Microbatch(**{**plain, **fields})
