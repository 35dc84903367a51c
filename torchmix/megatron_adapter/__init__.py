"""Megatron's names and hooks; nothing else in torchmix knows them.

In reading order:

    packed_seq.py   the boundaries of a microbatch as Megatron's PackedSeqParams   (torch)

The names below are imported when they are first used: they need torch, and Megatron when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmix.megatron_adapter.packed_seq import packed_seq_params

__all__ = ["packed_seq_params"]


def __getattr__(name: str) -> Any:
    if name == "packed_seq_params":
        from torchmix.megatron_adapter.packed_seq import packed_seq_params

        return packed_seq_params
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
