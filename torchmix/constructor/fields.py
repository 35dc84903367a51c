"""The tensors of one step and of one microbatch, as the trainer sees them.

In: what `build` filled, or what came over the fan-out: ids and labels in int32, spans and boundaries. Out:
`StepTensors`, all microbatches of one replica's step, and `Microbatch`, one of them as views. A microbatch makes what a
model takes when it is asked for it, on the device where it is:

    tokens        int64    id of the token; 0 in padding
    labels        int64    the next token of its document, also across a split; 0 where there is no loss
    loss_mask     float32  1 where the label is real, else 0
    position_ids  int64    offset in its piece (positions of documents) or in its sample; 0 in padding
    source_index  int32    number of its source, sources sorted by name; -1 in padding

A role that does not need a field has None there. Boundaries run over the micro_batch_size * length tokens of a
microbatch, sample after sample, and are never cut by context parallelism. With `boundaries: document` each piece is a
segment, and so is what is left at a sample's end, with a true length of 0; with `none` each sample is one segment. A
source's `reset_id` inside a piece begins another segment, restarts positions and has no label, as the recipe says.

    cu_seqlens         int32  0, then the true lengths of the segments, summed up: the tokens that are not padding
    cu_seqlens_padded  int32  0, then the lengths with padding, summed up: where segments lie; ends at their total

Must hold: all sequence tensors of a step share one shape, since pipeline stages agree on shapes once. Cost: no copies
until a field is asked for, and then that of `expand.py`, once.

M is the microbatches of the step, B the micro_batch_size, T the length / cp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


class Microbatch(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True, dict=True):
    """The samples of one forward and backward of one rank.

    It holds few bytes, and makes `tokens`, `labels`, `loss_mask`, `position_ids` and `source_index` of them at first
    use, on the device that it is on: move it with `to`, rather than each of them. What was made stays, and may be
    written to.

    A Struct, because making a frozen dataclass of as many fields costs fifteen times as much.
    """

    tokens_int32: torch.Tensor | None
    """int32 [B, T]: ids as they are held; first stage."""
    labels_int32: torch.Tensor | None
    """int32 [B, T]: labels as they are held, -100 where there is no loss; last stage."""
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
    """Sum of loss_mask over the whole global batch, all replicas: what to divide a summed loss by."""

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

    @cached_property
    def source_index(self) -> torch.Tensor | None:
        """int32 [B, T]; last stage."""
        return None if self.labels_int32 is None else expand_source_index(self.spans, self.labels_int32.shape)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Microbatch:
        """The same microbatch on another device: what is held is moved, 8 bytes a token; the rest is made there.

        Args:
            device: As `torch.Tensor.to` takes it.
            non_blocking: Not to wait for the copies; torchmix' tensors are pinned where CUDA is present.
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
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTensors:
    """All microbatches of one step: of a whole replica after `build`, of one role after `share_of`."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Tokens with a label over the whole global batch, all replicas; as planned until leaders have been heard."""
    num_masked_tokens: int = 0
    """Tokens of this replica that `num_tokens_global` counts, and whose label reading took away; on a leader."""
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
    header: bytes = b""
    """What the loader sends along with the tensors; opaque here."""

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

        Views are made a field at a time, which costs a quarter of what it costs one by one.
        """
        count = self.num_microbatches
        absent = [None] * count
        tokens, labels = (absent if field is None else field.unbind() for field in (self.tokens, self.labels))
        spans = self.spans.split_with_sizes(_sizes(self.spans_stop))
        segments = _sizes(self.cu_seqlens_stop)
        cu_seqlens = self.cu_seqlens.split_with_sizes(segments)
        cu_seqlens_padded = self.cu_seqlens_padded.split_with_sizes(segments)
        max_seqlen = self.max_seqlen.tolist()
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
            )
            for index in range(count)
        ]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Everything but the header, as named tensors, for a road that carries only tensors. Shares memory."""
        tensors = {"counts": torch.tensor([self.step, self.num_tokens_global], dtype=torch.int64)}
        held = {name: getattr(self, name) for name in FIELDS}
        return tensors | {name: tensor for name, tensor in held.items() if tensor is not None}

    @classmethod
    def from_arrays(cls, arrays: StepArrays) -> StepTensors:
        """A whole replica's step. Shares memory."""
        held: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.fields.items()}
        return cls(
            step=arrays.step,
            num_tokens_global=arrays.num_tokens_global,
            num_masked_tokens=arrays.num_masked_tokens,
            header=arrays.header,
            **held,
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, header: bytes = b"") -> StepTensors:
        """The inverse of `to_tensors`; a sequence field that is not there is None. Shares memory."""
        step, num_tokens_global = tensors["counts"].tolist()
        held: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name != "counts"}
        return cls(step=step, num_tokens_global=num_tokens_global, header=header, **held)


def _sizes(stop: torch.Tensor) -> list[int]:
    """How many entries each microbatch has."""
    sizes: list[int] = stop.diff(prepend=stop.new_zeros(1)).tolist()
    return sizes
