"""Megatron's PackedSeqParams from a microbatch, with a stand-in for Megatron's dataclass."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.deadlines import LONG_S
from tests.support.microbatches import make_microbatch
from torchmix.megatron_adapter import packed_seq_params

MICROBATCH = make_microbatch(
    cu_seqlens=torch.tensor([0, 5, 12, 12], dtype=torch.int32),
    cu_seqlens_padded=torch.tensor([0, 8, 16, 24], dtype=torch.int32),
)


@dataclass
class OlderPackedSeqParams:
    """A Megatron that knows no padded boundaries."""

    qkv_format: str | None = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None


@dataclass
class PackedSeqParams(OlderPackedSeqParams):
    """A Megatron that knows more fields than torchmix fills."""

    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    cp_group: Any = None


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the installed Megatron: importing the real one takes seconds, and tests may run without it."""
    module = ModuleType("megatron.core.packed_seq_params")
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_boundaries_are_the_same_for_queries_and_keys(megatron: ModuleType) -> None:
    megatron.PackedSeqParams = PackedSeqParams  # type: ignore[attr-defined]
    params = packed_seq_params(MICROBATCH)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 5, 12, 12]
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 8, 16, 24]
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (8, 8)
    assert params.cp_group is None


def test_fields_that_this_megatron_does_not_know_are_left_out(megatron: ModuleType) -> None:
    megatron.PackedSeqParams = OlderPackedSeqParams  # type: ignore[attr-defined]
    assert packed_seq_params(MICROBATCH).cu_seqlens_q.tolist() == [0, 5, 12, 12]


def test_boundaries_move_to_the_device_that_is_asked_for(megatron: ModuleType) -> None:
    megatron.PackedSeqParams = PackedSeqParams  # type: ignore[attr-defined]
    params = packed_seq_params(MICROBATCH, device="meta")
    assert params.cu_seqlens_kv.device.type == params.cu_seqlens_q_padded.device.type == "meta"


def test_importing_the_room_imports_neither_torch_nor_megatron() -> None:
    program = "import sys, torchmix.megatron_adapter; print([n for n in ('torch', 'megatron') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=LONG_S)
    assert result.stdout.strip() == "[]"
