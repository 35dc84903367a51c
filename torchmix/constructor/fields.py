"""The tensors of one step and of one microbatch, as the trainer sees them.

In: what `build` filled, or what came over the fan-out. Out: `StepTensors`, all microbatches of one replica's step, and
`Microbatch`, one of them as views. A role that does not need a sequence field has None there.

    tokens        int64    id of the token; 0 in padding
    labels        int64    the next token of its document, also across a split; 0 after its last one and in padding
    loss_mask     float32  1 where the label is real, else 0
    position_ids  int64    offset in its piece (`boundaries: document`) or in its sample (`none`); 0 in padding
    source_index  int32    number of its source, sources sorted by name; -1 in padding

Boundaries run over the micro_batch_size * length tokens of a microbatch, sample after sample, and are never cut by
context parallelism. With `boundaries: document` each piece is a segment, and so is what is left at a sample's end, with
a true length of 0; with `none` each sample is one segment.

    cu_seqlens         int32  0, then the true lengths of the segments, summed up: the tokens that are not padding
    cu_seqlens_padded  int32  0, then the lengths with padding, summed up: where segments lie; ends at their total

Must hold: all sequence tensors of a step share one shape, since pipeline stages agree on shapes once. Cost: no copies.

M is the microbatches of the step, B the micro_batch_size, T the length / cp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from torchmix.constructor.arrays import BOUNDARY_FIELDS, SEQUENCE_FIELDS, StepArrays


class Microbatch(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """The samples of one forward and backward of one rank.

    A Struct, because making a frozen dataclass of as many fields costs fifteen times as much.
    """

    tokens: torch.Tensor | None
    """int64 [B, T]; first stage."""
    labels: torch.Tensor | None
    """int64 [B, T]; last stage."""
    loss_mask: torch.Tensor | None
    """float32 [B, T]; last stage."""
    position_ids: torch.Tensor | None
    """int64 [B, T]; first stage."""
    source_index: torch.Tensor | None
    """int32 [B, T]; last stage."""
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTensors:
    """All microbatches of one step: of a whole replica after `build`, of one role after `share_of`."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Sum of loss_mask over the whole global batch, all replicas."""
    tokens: torch.Tensor | None = None
    """int64 [M, B, T]."""
    labels: torch.Tensor | None = None
    """int64 [M, B, T]."""
    loss_mask: torch.Tensor | None = None
    """float32 [M, B, T]."""
    position_ids: torch.Tensor | None = None
    """int64 [M, B, T]."""
    source_index: torch.Tensor | None = None
    """int32 [M, B, T]."""
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
        fields = [getattr(self, name) for name in SEQUENCE_FIELDS]
        views = zip(*([None] * count if field is None else field.unbind() for field in fields), strict=True)
        entries = self.cu_seqlens_stop.diff(prepend=self.cu_seqlens_stop.new_zeros(1)).tolist()
        cu_seqlens = self.cu_seqlens.split_with_sizes(entries)
        cu_seqlens_padded = self.cu_seqlens_padded.split_with_sizes(entries)
        max_seqlen = self.max_seqlen.tolist()
        return [
            Microbatch(
                tokens=tokens,
                labels=labels,
                loss_mask=loss_mask,
                position_ids=position_ids,
                source_index=source_index,
                cu_seqlens=cu_seqlens[index],
                cu_seqlens_padded=cu_seqlens_padded[index],
                max_seqlen=max_seqlen[index],
                step=self.step,
                index=index,
                is_last_of_step=index == count - 1,
                num_tokens_global=self.num_tokens_global,
            )
            for index, (tokens, labels, loss_mask, position_ids, source_index) in enumerate(views)
        ]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Everything but the header, as named tensors, for a road that carries only tensors. Shares memory."""
        tensors = {"counts": torch.tensor([self.step, self.num_tokens_global], dtype=torch.int64)}
        for name in SEQUENCE_FIELDS + BOUNDARY_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = tensor
        return tensors

    @classmethod
    def from_arrays(cls, arrays: StepArrays) -> StepTensors:
        """A whole replica's step. Shares memory."""
        return cls(
            step=arrays.step,
            num_tokens_global=arrays.num_tokens_global,
            header=arrays.header,
            **{name: torch.from_numpy(array) for name, array in arrays.fields.items()},
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, header: bytes = b"") -> StepTensors:
        """The inverse of `to_tensors`; a sequence field that is not there is None. Shares memory."""
        step, num_tokens_global = tensors["counts"].tolist()
        return cls(
            step=step,
            num_tokens_global=num_tokens_global,
            tokens=tensors.get("tokens"),
            labels=tensors.get("labels"),
            loss_mask=tensors.get("loss_mask"),
            position_ids=tensors.get("position_ids"),
            source_index=tensors.get("source_index"),
            cu_seqlens=tensors["cu_seqlens"],
            cu_seqlens_padded=tensors["cu_seqlens_padded"],
            cu_seqlens_stop=tensors["cu_seqlens_stop"],
            max_seqlen=tensors["max_seqlen"],
            header=header,
        )
