"""The tensors of one step and of one microbatch, as the trainer sees them.

In: the arrays that `build` filled or that the fan-out delivered: ids and labels in int32, spans and boundaries. Out:
`StepTensors`, all microbatches of one replica's step, and `Microbatch`, one of them as views. A microbatch makes the
tensors of a model at first use, on its own device:

    tokens        int64    id of the token; 0 in padding
    labels        int64    the next token of its document, also across a split; 0 where there is no loss
    loss_mask     float32  1 where the label is real, else 0
    position_ids  int64    offset in its piece (positions of documents) or in its sample; 0 in padding
    source_index  int32    number of its source, sources sorted by name; -1 in padding

A role that does not need a field has None there. Boundaries run over the micro_batch_size * length tokens of a
microbatch, sample after sample, and are never cut by context parallelism. With `boundaries: document` each piece is a
segment, and so is the padding at a sample's end, with a true length of 0; with `none` each sample is one segment. As
the recipe says, a source's `reset_id` inside a piece begins another segment, restarts positions and has no label.

    cu_seqlens         int32  0, then cumulative true lengths of the segments, without padding
    cu_seqlens_padded  int32  0, then cumulative lengths with padding: where segments lie; ends at their total

Must hold: all sequence tensors of a step share one shape, since pipeline stages agree on shapes once. Cost: no copies
until a field is first used; then the cost of `expand.py`, once.

M is the microbatches of the step, B the micro_batch_size, T the length / cp.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec
import torch

from torchmix.constructor.arrays import FIELDS, StepArrays
from torchmix.constructor.expand import (
    expand_labels,
    expand_loss_mask,
    expand_position_ids,
    expand_source_index,
    expand_tokens,
)
from torchmix.constructor.modules.batch import ModuleBatch, modules_of_microbatches
from torchmix.constructor.modules.mrope import mrope_position_ids
from torchmix.constructor.row_arrays import is_of_rows
from torchmix.constructor.row_batch import RowLists, rows_of_microbatches
from torchmix.errors import OptionError


class Microbatch(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True, dict=True):
    """The samples of one forward and backward of one rank.

    It holds compact fields, and makes `tokens`, `labels`, `loss_mask`, `position_ids` and `source_index` from them at
    first use, on its own device. Move the microbatch with `to`, rather than each tensor. A tensor that was made is
    kept, and may be written to.

    This is a Struct because a frozen dataclass of as many fields takes fifteen times as long to create.
    """

    tokens_int32: torch.Tensor | None
    """int32 [B, T]: compact ids; first stage."""
    labels_int32: torch.Tensor | None
    """int32 [B, T]: compact labels, -100 where there is no loss; last stage."""
    spans: torch.Tensor
    """int32 [k, 3]: where positions restart and sources change, see `constructor/spans.py`."""
    cu_seqlens: torch.Tensor
    """int32 [segments + 1], by true lengths."""
    cu_seqlens_padded: torch.Tensor
    """int32 [segments + 1], by padded lengths; the last entry is B * length."""
    max_seqlen: int
    """Tokens of the longest segment, with padding; no smaller than any true length."""
    step: int
    """Step of the global batch, from 0."""
    index: int
    """Place in the step, in [0, M)."""
    is_last_of_step: bool
    """Whether `index` is M - 1: time for the optimizer."""
    num_tokens_global: int
    """Sum of loss_mask over the global batch of all replicas: the divisor of a summed loss."""
    modules: Mapping[str, ModuleBatch] = {}
    """What this rank computes of each module of the recipe. Items of a whole step are in each of its microbatches."""
    rows: Mapping[str, RowLists] = {}
    """What maps of sources give beside ids, by their names for it, of the rows that begin here; the same on all ranks
    of the replica. A name that no row of the step has is missing."""

    @cached_property
    def tokens(self) -> torch.Tensor | None:
        """int64 [B, T]; first stage."""
        return None if self.tokens_int32 is None else expand_tokens(self.tokens_int32)

    @cached_property
    def labels(self) -> torch.Tensor | None:
        """int64 [B, T]; last stage."""
        return None if self.labels_int32 is None else expand_labels(self.labels_int32)

    @cached_property
    def loss_mask(self) -> torch.Tensor | None:
        """float32 [B, T]; last stage."""
        return None if self.labels_int32 is None else expand_loss_mask(self.labels_int32)

    @cached_property
    def position_ids(self) -> torch.Tensor | None:
        """int64 [B, T]; first stage."""
        return None if self.tokens_int32 is None else expand_position_ids(self.spans, self.tokens_int32.shape)

    def mrope_position_ids(self, module: str) -> torch.Tensor | None:
        """int64 [3, B, T]: time, row and column of each token, as Qwen2-VL's embeddings take them; first stage.

        Args:
            module: The module that encodes the images.

        Raises:
            KeyError: There is no such module.
            OptionError: It computes no images, or one of them has no grid of tokens.
        """
        batch = self.modules[module]
        if batch.images is None:
            raise OptionError(f"mrope_position_ids: module {module!r} computes no images")
        if self.position_ids is None:
            return None
        images = batch.images[batch.images[:, 0] == self.index]
        return mrope_position_ids(self.position_ids, self.cu_seqlens_padded, images, cp_rank=batch.cp_rank)

    @cached_property
    def source_index(self) -> torch.Tensor | None:
        """int32 [B, T]; last stage."""
        return None if self.labels_int32 is None else expand_source_index(self.spans, self.labels_int32.shape)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Microbatch:
        """The same microbatch on another device: compact fields are moved, 8 bytes a token; the others are made there.

        Args:
            device: The device, as `torch.Tensor.to` takes it.
            non_blocking: Do not wait for the copies. The loader's tensors are pinned where CUDA is present.
        """

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return msgspec.structs.replace(
            self,
            tokens_int32=None if self.tokens_int32 is None else moved(self.tokens_int32),
            labels_int32=None if self.labels_int32 is None else moved(self.labels_int32),
            spans=moved(self.spans),
            cu_seqlens=moved(self.cu_seqlens),
            cu_seqlens_padded=moved(self.cu_seqlens_padded),
            modules={name: batch.to(device, non_blocking=non_blocking) for name, batch in self.modules.items()},
            rows={name: lists.to(device, non_blocking=non_blocking) for name, lists in self.rows.items()},
        )


class StepTensors(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All microbatches of one step: of a whole replica after `build`, of one role after `share_of`."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Tokens with a label over the global batch of all replicas; the planned number until the leaders have compared."""
    num_masked_tokens: int = 0
    """On a leader: tokens of its replica that `num_tokens_global` counts and that lost their label to bad rows."""
    tokens: torch.Tensor | None = None
    """int32 [M, B, T]."""
    labels: torch.Tensor | None = None
    """int32 [M, B, T], -100 where there is no loss."""
    spans: torch.Tensor
    """int32 [K, 3], the microbatches' spans end to end."""
    spans_stop: torch.Tensor
    """int64 [M], where each microbatch's part of the spans ends."""
    cu_seqlens: torch.Tensor
    """int32, the microbatches' arrays end to end."""
    cu_seqlens_padded: torch.Tensor
    """int32, the microbatches' arrays end to end."""
    cu_seqlens_stop: torch.Tensor
    """int64 [M], where each microbatch's part of the two arrays above ends."""
    max_seqlen: torch.Tensor
    """int32 [M]."""
    modules: Mapping[str, torch.Tensor] = msgspec.field(default_factory=dict)
    """By `MODULE.ARRAY`, see `modules/arrays.py`; empty for a recipe without modules."""
    rows: Mapping[str, torch.Tensor] = msgspec.field(default_factory=dict)
    """By `NAME:PART`, see `row_arrays.py`; empty where no map gives more than ids."""
    header: bytes = b""
    """The loader's header, opaque here."""

    @property
    def num_microbatches(self) -> int:
        """M, microbatches of the step."""
        return len(self.max_seqlen)

    def microbatch(self, index: int) -> Microbatch:
        """One microbatch, as views into this step's tensors.

        Args:
            index: In [0, num_microbatches).

        Raises:
            IndexError: There is no such microbatch.
        """
        if not 0 <= index < self.num_microbatches:
            raise IndexError(f"step {self.step} has microbatches 0 to {self.num_microbatches - 1}, not {index}")
        return self.microbatches()[index]

    def microbatches(self) -> list[Microbatch]:
        """All microbatches, in order, as views into this step's tensors.

        Views are made field by field, which takes a quarter of the time that microbatch by microbatch would take.
        """
        count = self.num_microbatches
        absent = [None] * count
        tokens, labels = (absent if field is None else field.unbind() for field in (self.tokens, self.labels))
        spans = self.spans.split_with_sizes(_sizes(self.spans_stop))
        segments = _sizes(self.cu_seqlens_stop)
        cu_seqlens = self.cu_seqlens.split_with_sizes(segments)
        cu_seqlens_padded = self.cu_seqlens_padded.split_with_sizes(segments)
        max_seqlen = self.max_seqlen.tolist()
        modules = modules_of_microbatches(self.modules, count)
        rows = rows_of_microbatches(self.rows, count)
        return [
            Microbatch(
                tokens_int32=tokens[index],
                labels_int32=labels[index],
                spans=spans[index],
                cu_seqlens=cu_seqlens[index],
                cu_seqlens_padded=cu_seqlens_padded[index],
                max_seqlen=max_seqlen[index],
                step=self.step,
                index=index,
                is_last_of_step=index == count - 1,
                num_tokens_global=self.num_tokens_global,
                modules=modules[index],
                rows=rows[index],
            )
            for index in range(count)
        ]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """All fields except the header, as named tensors, for a transport of tensors only. Shares memory."""
        tensors = {"counts": torch.tensor([self.step, self.num_tokens_global], dtype=torch.int64)}
        held = {name: getattr(self, name) for name in FIELDS} | dict(self.modules) | dict(self.rows)
        return tensors | {name: tensor for name, tensor in held.items() if tensor is not None}

    @classmethod
    def from_arrays(cls, arrays: StepArrays) -> StepTensors:
        """A whole replica's step. Shares memory."""
        held: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.fields.items()}
        modules = {name: torch.from_numpy(array) for name, array in arrays.modules.items()}
        rows = {name: torch.from_numpy(array) for name, array in arrays.rows.items()}
        return cls(
            step=arrays.step,
            num_tokens_global=arrays.num_tokens_global,
            num_masked_tokens=arrays.num_masked_tokens,
            header=arrays.header,
            modules=modules,
            rows=rows,
            **held,
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, header: bytes = b"") -> StepTensors:
        """The inverse of `to_tensors`; a missing sequence field is None. Shares memory."""
        step, num_tokens_global = tensors["counts"].tolist()
        held: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in FIELDS}
        rows = {name: tensor for name, tensor in tensors.items() if is_of_rows(name)}
        modules = {name: tensor for name, tensor in tensors.items() if "." in name and name not in rows}
        counts = {"step": step, "num_tokens_global": num_tokens_global}
        return cls(**counts, header=header, modules=modules, rows=rows, **held)


def _sizes(stop: torch.Tensor) -> list[int]:
    """Number of entries of each microbatch."""
    sizes: list[int] = stop.diff(prepend=stop.new_zeros(1)).tolist()
    return sizes
