"""The tensors of one step and of one microbatch, as the trainer sees them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from torchmix.array_types import Int64Array
from torchmix.constructor.arrays import (
    FIELDS,
    RUN_FIELDS,
    SEQUENCE_FIELDS,
    BlockArrays,
    StepArrays,
    StepFacts,
    StepMemory,
    cut_fields,
    fill_ramps,
)
from torchmix.constructor.build import PARTS, SEPARATOR, is_of_rows, names_of_rows
from torchmix.constructor.modules import CP_RANK, PLACES, cut_for_ranks, module_names, of_module, slice_align
from torchmix.constructor.spans import PADDING, Spans, slice_spans
from torchmix.errors import OptionError, TopologyError
from torchmix.native.calls import Expand
from torchmix.native.load import Array, is_native, run
from torchmix.parallel.place_tree import Role
from torchmix.parallel.routes import Routes
from torchmix.recipe.structs import Packing

# --- Tensors as a step holds them -> tensors for a model: int64 ids and labels, loss mask, positions, sources.
#
# Values are those that `Microbatch` documents; nothing waits for a GPU. What torch does on any device is the
# reference of what the native library does in memory, in one pass: a mask takes a quarter of torch's time, positions a
# fifth.

Tensor = torch.Tensor


def expand_tokens(tokens: Tensor) -> Tensor:
    """int32 [B, T] ids -> int64."""
    return _placed_as(tokens, tokens.long())


def expand_labels(labels: Tensor) -> Tensor:
    """int32 [B, T] labels -> int64, 0 where there is no loss."""
    return _placed_as(labels, labels.long().clamp_(min=0))


def expand_loss_mask(labels: Tensor) -> Tensor:
    """int32 [B, T] labels -> float32, 1 where there is a loss, else 0."""
    if (made := _made_natively("mask", torch.float32, labels.shape, labels=labels)) is not None:
        return made
    return _placed_as(labels, (labels >= 0).float())


def expand_position_ids(spans: Tensor, shape: torch.Size) -> Tensor:
    """int32 [k, 3] spans of a microbatch -> int64 [B, T] positions, 0 in padding."""
    if (made := _made_natively("positions", torch.int64, shape, spans=spans)) is not None:
        return made
    num_tokens = shape.numel()
    start, position, source = spans.unbind(1)
    # A position is the token's place plus a level per span. The level of padding makes every position negative.
    level = torch.where(source == PADDING, -num_tokens, position - start)
    places = torch.arange(num_tokens, dtype=torch.int32, device=spans.device)
    positions = places.add_(_repeated(level, start, num_tokens)).clamp_(min=0).long()
    return _placed_as(spans, positions.view(shape))


def expand_source_index(spans: Tensor, shape: torch.Size) -> Tensor:
    """int32 [k, 3] spans of a microbatch -> int32 [B, T] numbers of sources, PADDING in padding."""
    if (made := _made_natively("source", torch.int32, shape, spans=spans)) is not None:
        return made
    return _placed_as(spans, _repeated(spans[:, 2], spans[:, 0], shape.numel()).view(shape))


def _made_natively(field: str, dtype: torch.dtype, shape: torch.Size, **held: Tensor) -> Tensor | None:
    """A field of `Expand`, pinned if what it is made of is; None without the library, or on another device."""
    ((name, compact),) = held.items()
    if not is_native() or compact.device.type != "cpu" or compact.dtype != torch.int32 or not compact.is_contiguous():
        return None
    made = torch.empty(shape, dtype=dtype, pin_memory=compact.is_pinned())
    call = Expand(padding=PADDING)
    for key, tensor in ((name, compact), (field, made)):
        setattr(call, key, Array(tensor.data_ptr(), tensor.numel()))
    run(call)
    return made


def _repeated(value: Tensor, start: Tensor, num_tokens: int) -> Tensor:
    """Each span's value at each of its tokens, [num_tokens]."""
    count = torch.diff(start, append=start.new_full((1,), num_tokens))
    # With the size given, torch need not wait for the GPU to learn it.
    return torch.repeat_interleave(value, count, output_size=num_tokens)


def _placed_as(held: Tensor, expanded: Tensor) -> Tensor:
    """Pin the result if the input is pinned, so that a copy to the GPU can be asynchronous."""
    return expanded.pin_memory() if held.is_pinned() else expanded


# --- What maps give beside ids, as tensors of one microbatch.
#
# The same on all ranks of a replica, whatever their stage and CP slice. Cost: views.


class RowLists(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Lists of numbers of the rows that begin in a microbatch; there may be none."""

    values: torch.Tensor
    """[v] the numbers of all rows, end to end; of the map's type, unsigned ones beyond uint8 as the next signed one."""
    lengths: torch.Tensor
    """int64 [k] how many each row has."""
    places: torch.Tensor
    """int64 [k] the row's first token among the micro_batch_size * length tokens, ascending; before any CP slice."""

    def rows(self) -> list[torch.Tensor]:
        """The numbers of each row."""
        return list(self.values.split_with_sizes(self.lengths.tolist()))

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> RowLists:
        """The same on another device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking) for name in ("values", "lengths", "places")
        }
        return RowLists(**moved)


def rows_of_microbatches(tensors: Mapping[str, torch.Tensor], num_microbatches: int) -> list[dict[str, RowLists]]:
    """The lists of each microbatch, by name.

    Args:
        tensors: By `NAME:PART`.
        num_microbatches: M of the step.
    """
    found: list[dict[str, RowLists]] = [{} for _ in range(num_microbatches)]
    for name in names_of_rows(tensors):
        values, lengths, places, stop = (tensors[f"{name}{SEPARATOR}{part}"] for part in PARTS)
        counts = stop.diff(prepend=stop.new_zeros(1)).tolist()
        lengths_of, places_of = lengths.split_with_sizes(counts), places.split_with_sizes(counts)
        values_of = values.split_with_sizes([int(one.sum()) for one in lengths_of])
        for index, parts in enumerate(zip(values_of, lengths_of, places_of, strict=True)):
            found[index][name] = RowLists(values=parts[0], lengths=parts[1], places=parts[2])
    return found


# --- Positions in three dimensions of the tokens of a microbatch, as Qwen2-VL's rotary embeddings take them.
#
# A text token has three equal positions, each one more than the largest before it; an item of f x h x w tokens begins
# at such a position t, and its token in frame i, row r and column c has (t + i, t + r, t + c); what follows resumes at
# t + max(f, h, w). An image is one frame. With seconds, frame i is at t + floor(i * s) in time, where s is the
# positions of a second times the seconds from one frame to the next.
# Positions restart where those of the text do, which need not be where attention stops: a token of position p has its
# stretch begin p tokens before it. Cost: a few operations on the tokens.
#
# The rule is `get_rope_index` of Qwen2-VL in transformers, for images: there two images without a token between them
# are taken for one, here they are two.

COLUMNS = ("microbatch", "token", "tokens", "frames", "rows", "columns", "milliseconds")
"""The table of items: first token in the microbatch at full length, tokens, and their grid, zeros where they lie in
none, as those of tiles; how long the frames last together, 0 where they do not follow each other in time."""


def mrope_position_ids(
    position_ids: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    places: torch.Tensor,
    *,
    cp_rank: int,
    tokens_per_second: float | None = None,
    past_time: bool = True,
) -> torch.Tensor:
    """Positions of a rank's tokens.

    Args:
        position_ids: int64 [B, T], counted from any token on, 0 in padding; T is a slice of a CP rank, or all.
        cu_seqlens_padded: int32 [segments + 1] at full length; context parallelism slices each of them.
        places: int32 [k, 7], see COLUMNS, of this microbatch, by their tokens.
        cp_rank: Which slice it is.
        tokens_per_second: See `Microbatch.mrope_position_ids`.
        past_time: Likewise.

    Returns:
        int64 [3, B, T].

    Raises:
        OptionError: An item has no grid of tokens.
    """
    flat = position_ids.reshape(-1)
    if not len(places):
        return position_ids.expand(3, *position_ids.shape).clone()
    _, first, tokens, frames, rows, columns, lasting = places.to(flat.device, torch.int64).T.contiguous().unbind(0)
    if bool((rows == 0).any()):
        raise OptionError(
            "mrope_position_ids: an image has no grid of tokens, since its source cuts tiles; remove tiles or anyres "
            "from the source, or use position_ids"
        )
    place = places_of_slice(cu_seqlens_padded.to(flat.device), len(flat), cp_rank)
    stretch = place - flat
    # By which positions run ahead less than tokens do.
    # Positions of a frame are its number times `ahead` over `parts`, which 64 bits hold exactly where a whole number of
    # them is a second: 32 bits make 24 of 3 * 100 / 12.
    ahead, parts = torch.ones_like(frames, dtype=torch.float64), torch.ones_like(frames)
    if tokens_per_second is not None:
        ahead = torch.where(lasting > 0, lasting.double() * tokens_per_second, ahead)
        parts = torch.where(lasting > 0, 1000 * frames, parts)
    last = torch.floor((frames - 1) * ahead / parts).long() + 1 if past_time else torch.ones_like(frames)
    gained = tokens - torch.maximum(last, torch.maximum(rows, columns))
    total = torch.cat([gained.new_zeros(1), torch.cumsum(gained, 0)])  # of the images before each
    num_before_stretch = torch.searchsorted(first, stretch)
    num_begun = torch.searchsorted(first, place, right=True)
    image = (num_begun - 1).clamp(min=0)
    local = place - first[image]
    is_inside = (num_begun > num_before_stretch) & (local < tokens[image])
    before = total[torch.where(is_inside, image, num_begun)] - total[num_before_stretch]
    text = flat - before
    start = text - local
    across, of_frame = columns[image], (rows * columns)[image]
    in_frame = local % of_frame
    time = torch.floor(local // of_frame * ahead[image] / parts[image]).long()
    found = [start + time, start + in_frame // across, start + in_frame % across]
    return torch.stack([torch.where(is_inside, axis, text) for axis in found]).reshape(3, *position_ids.shape)


def places_of_slice(cu_seqlens_padded: torch.Tensor, num_tokens: int, cp_rank: int) -> torch.Tensor:
    """int64 [num_tokens] where each token of a slice stands in the microbatch at full length.

    Args:
        cu_seqlens_padded: int32 [segments + 1] at full length; context parallelism slices each of them.
        num_tokens: The number of tokens of the slice: those of the microbatch over the ranks that share it.
        cp_rank: Which slice it is.
    """
    borders = cu_seqlens_padded.long()
    token = torch.arange(num_tokens, device=borders.device)
    cp = int(borders[-1]) // num_tokens
    if cp == 1:
        return token
    segment = torch.searchsorted(borders // cp, token, right=True) - 1
    chunk = borders.diff()[segment] // (2 * cp)
    local = token - borders[segment] // cp
    skipped = torch.where(local < chunk, cp_rank, 2 * (cp - 1) - cp_rank)  # chunks of other ranks before it
    return borders[segment] + skipped * chunk + local


# --- What a rank computes of a module in a microbatch, or in a whole step, as tensors.
#
# Items are in one order in all of its tensors, and the module's output has their rows in this order. Cost: views;
# boundaries are summed at first use.


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleBatch:
    """The items of one module that one rank computes together; there may be none."""

    units: torch.Tensor
    """int32 [n] units of each item: tokens of a document, patches of an image."""
    segments: torch.Tensor
    """int32 [n] segments of each item, into which its units divide evenly: tiles of an image; 1 of a document."""
    rows: torch.Tensor
    """int32 [n] rows that the module gives for each item."""
    arrays: Mapping[str, torch.Tensor]
    """By name: per item `source`, `row` and `number`, of documents also `start`; per unit `tokens` of documents."""
    routes: Routes
    """Where the rows go, for `torchmix.parallel.route`."""
    places: torch.Tensor | None = None
    """int32 [k, 7] items in the texts of this replica's step, see COLUMNS; None where items are documents."""
    cp_rank: int = 0
    """This rank's CP slice, where items are inside documents."""
    _moved: dict[str, ModuleBatch] = field(default_factory=dict, repr=False)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32, 0 and cumulative units: the segments within which units attend to each other.

        A segment is an item, or one of its `segments`: [segments.sum() + 1].
        """
        return _cumulative((self.units // self.segments.clamp(min=1)).repeat_interleave(self.segments))

    @cached_property
    def cu_rows(self) -> torch.Tensor:
        """int32 [n + 1], 0 and cumulative rows of the output."""
        return _cumulative(self.rows)

    @cached_property
    def max_seqlen(self) -> int:
        """Units of the largest segment; 0 without items."""
        return int(self.cu_seqlens.diff().max()) if len(self.units) else 0

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> ModuleBatch:
        """The same on another device; routes stay on the CPU. Batches of a whole step are moved once."""
        key = str(device)
        if key not in self._moved:

            def moved(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(device, non_blocking=non_blocking)

            arrays = {name: moved(tensor) for name, tensor in self.arrays.items()}
            self._moved[key] = dataclasses.replace(
                self,
                units=moved(self.units),
                segments=moved(self.segments),
                rows=moved(self.rows),
                arrays=arrays,
                _moved={},
            )
        return self._moved[key]


def modules_of_microbatches(tensors: Mapping[str, torch.Tensor], num_microbatches: int) -> list[dict[str, ModuleBatch]]:
    """The modules of each microbatch of one rank; those of a whole step are the same object in all of them.

    Args:
        tensors: By `MODULE.ARRAY`, of one rank.
        num_microbatches: M of the step.
    """
    found: list[dict[str, ModuleBatch]] = [{} for _ in range(num_microbatches)]
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for module in module_names(tensors):
        mine = {name: tensors[f"{module}.{name}"] for name in of_module(arrays, module)}
        assert len(mine["consumer_of_rank"]) == 1, "of one rank"
        batches = _batches(mine)
        for index, modules in enumerate(found):
            modules[module] = batches[index if len(batches) > 1 else 0]
    return found


def tensors_for_ranks(tensors: Mapping[str, torch.Tensor], ranks: list[int]) -> dict[str, torch.Tensor]:
    """`cut_for_ranks` on tensors; nothing is copied where these ranks are all."""
    if not tensors:
        return {}
    names = [name for name in tensors if name.endswith(".consumer_of_rank")]
    if all(ranks == list(range(len(tensors[name]))) for name in names):
        return dict(tensors)
    cut = cut_for_ranks({name: tensor.numpy() for name, tensor in tensors.items()}, ranks)
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in cut.items()}


def modules_by_sharing(
    tensors: Mapping[str, torch.Tensor], ranks: list[int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The arrays of modules of which all these ranks compute the same items, and those of the others."""
    joint: dict[str, torch.Tensor] = {}
    single: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        consumers = tensors[f"{name.partition('.')[0]}.consumer_of_rank"][ranks]
        (joint if bool((consumers == consumers[0]).all()) else single)[name] = tensor
    return joint, single


def _batches(tensors: Mapping[str, torch.Tensor]) -> list[ModuleBatch]:
    items_stop = tensors["items_stop"].tolist()
    units = torch.cat([tensors["units"].new_zeros(1, dtype=torch.int64), tensors["units"].cumsum(0)])
    roads_stop = {name: [0, *tensors[f"{name}_stop"].tolist()] for name in ("sends", "receives")}
    batches, places = [], tensors.get(PLACES)
    cp_rank = int(tensors[CP_RANK]) if CP_RANK in tensors else 0
    for number, (start, stop) in enumerate(zip([0, *items_stop[:-1]], items_stop, strict=True)):
        first, last = int(units[start]), int(units[stop])
        arrays = {name[5:]: tensor[start:stop] for name, tensor in tensors.items() if name.startswith("item/")}
        arrays |= {name[5:]: tensor[first:last] for name, tensor in tensors.items() if name.startswith("unit/")}
        rows = tensors["rows"][start:stop]
        sends, receives = (tensors[name][stops[number] : stops[number + 1]] for name, stops in roads_stop.items())
        routes = Routes(sends=sends, receives=receives, num_rows=int(rows.sum()))
        batches.append(
            ModuleBatch(
                units=tensors["units"][start:stop],
                segments=tensors["segments"][start:stop],
                rows=rows,
                arrays=arrays,
                routes=routes,
                places=places,
                cp_rank=cp_rank,
            )
        )
    return batches


def _cumulative(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])


# --- The tensors of one step and of one microbatch, as the trainer sees them.
#
#     tokens        int64    id of the token; 0 in padding
#     labels        int64    the next token of its document, also across a split; 0 where there is no loss
#     loss_mask     float32  1 where the label is real, else 0
#     position_ids  int64    offset in its piece (positions of documents) or in its sample; 0 in padding
#     source_index  int32    number of its source, sources sorted by name; -1 in padding
#
# A role that does not need a field has None there. Boundaries run over the micro_batch_size * length tokens of a
# microbatch, sample after sample, and are never cut by context parallelism. With `boundaries: document` each piece is
# a segment, and so is the padding at a sample's end, with a true length of 0; with `none` each sample is one segment.
# As the recipe says, a source's `reset_id` inside a piece begins another segment, restarts positions and has no label.
#
#     cu_seqlens         int32  0, then cumulative true lengths of the segments, without padding
#     cu_seqlens_padded  int32  0, then cumulative lengths with padding: where segments lie; ends at their total
#
# All sequence tensors of a step share one shape, since pipeline stages agree on shapes once; with runs of ranks those
# of a microbatch do, for all stages of a slice. Cost: no copies until a field is first used; then the cost of
# `fields.py`, once.
#
# M is the microbatches of the step, B the micro_batch_size, T the length / cp; with runs of ranks B is 1, and T the
# tokens of the bin / cp_size.


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
    """int32 [segments + 1], by padded lengths; the last entry is B * length, or the tokens of the bin."""
    max_seqlen: int
    """Tokens of the longest segment, with padding; no smaller than any true length."""
    step: int
    """Step of the global batch, from 0."""
    index: int
    """Place in the step, in [0, M)."""
    num_microbatches: int
    """M, microbatches of the step on each rank."""
    is_last_of_step: bool
    """Whether `index` is M - 1: time for the optimizer."""
    num_tokens_global: int
    """Sum of loss_mask over the global batch of all replicas: the divisor of a summed loss."""
    cp_ranks: range = range(1)
    """The ranks that share these samples, each with its slice, in the order of slices. Ranks of DP x CP are numbered by
    replica, then CP slice. With runs of ranks it is the run of this microbatch, else the ranks of the replica."""
    modules: Mapping[str, ModuleBatch] = {}
    """What this rank computes of each module of the recipe. Items of a whole step are in each of its microbatches."""
    rows: Mapping[str, RowLists] = {}
    """What maps of sources give beside ids, by their names for it, of the rows that begin here; the same on all ranks
    of the replica. A name that no row of the step has is missing."""

    @property
    def cp_size(self) -> int:
        """Ranks that share these samples."""
        return len(self.cp_ranks)

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

    def mrope_position_ids(
        self, *modules: str, tokens_per_second: float | None = None, past_time: bool = True
    ) -> torch.Tensor | None:
        """int64 [3, B, T]: time, row and column of each token, as Qwen2-VL's embeddings take them; first stage.

        Args:
            modules: The modules that encode the images and videos of the texts.
            tokens_per_second: Positions in time of a second of a video, as `tokens_per_second` of Qwen2.5-VL; None: a
                position a patch in time, as Qwen2-VL has it.
            past_time: Whether the text behind a video begins past its last position in time, as Qwen's own code and
                transformers 4 have it; False: past its rows and columns alone, as transformers 5 has it.

        Raises:
            KeyError: There is no such module.
            OptionError: No module is named, one computes no items of texts, or an item has no grid of tokens.
        """
        if not modules:
            raise OptionError("mrope_position_ids: name the modules that encode images and videos")
        tables = []
        for module in modules:
            places = self.modules[module].places
            if places is None:
                raise OptionError(f"mrope_position_ids: module {module!r} computes no images")
            tables.append(places[places[:, 0] == self.index])
        if self.position_ids is None:
            return None
        table = torch.cat(tables)
        return mrope_position_ids(
            self.position_ids,
            self.cu_seqlens_padded,
            table[table[:, 1].argsort()],
            cp_rank=self.modules[modules[0]].cp_rank,
            tokens_per_second=tokens_per_second,
            past_time=past_time,
        )

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
    """All microbatches of one step: of a whole replica after `build`, of one role after `batch_of_role`."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Tokens with a label over the global batch of all replicas; the planned number until the leaders have compared."""
    num_masked_tokens: int = 0
    """On a leader: tokens of its replica that `num_tokens_global` counts and that lost their label to bad rows."""
    tokens: torch.Tensor | None = None
    """int32 [M, B, T], with runs of ranks [N]."""
    labels: torch.Tensor | None = None
    """int32 [M, B, T], with runs of ranks [N]; -100 where there is no loss."""
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
    tokens_stop: torch.Tensor | None = None
    """int64 [M], where the tokens of each microbatch end; of a step with runs of ranks alone."""
    runs: torch.Tensor | None = None
    """int32 [M, 2], first rank and ranks of each microbatch's run; likewise."""
    modules: Mapping[str, torch.Tensor] = msgspec.field(default_factory=dict)
    """By `MODULE.ARRAY`, see `modules.py`; empty for a recipe without modules."""
    rows: Mapping[str, torch.Tensor] = msgspec.field(default_factory=dict)
    """By `NAME:PART`, see `build.py`; empty where no map gives more than ids."""
    header: Any = None
    """The loader's header, opaque here."""

    @property
    def num_microbatches(self) -> int:
        """M, microbatches of the step; of a replica with runs of ranks, those of all its CP slices."""
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
        return BlockTensors.of(self).microbatch(0, index)

    def microbatches(self, cp_ranks: range = range(1)) -> list[Microbatch]:
        """All microbatches, in order, as views into this step's tensors.

        Args:
            cp_ranks: The ranks of the replica, for a step without runs of ranks.
        """
        block = BlockTensors.of(self)
        return [block.microbatch(0, index, cp_ranks) for index in range(self.num_microbatches)]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """All fields except the header, as named tensors, for a transport of tensors only. Shares memory."""
        tensors = {"counts": torch.tensor([self.step, self.num_tokens_global], dtype=torch.int64)}
        held = {name: getattr(self, name) for name in FIELDS + RUN_FIELDS} | dict(self.modules) | dict(self.rows)
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
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, header: Any = None) -> StepTensors:
        """The inverse of `to_tensors`; a missing sequence field is None. Shares memory."""
        step, num_tokens_global = tensors["counts"].tolist()
        held: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in FIELDS + RUN_FIELDS}
        rows = {name: tensor for name, tensor in tensors.items() if is_of_rows(name)}
        modules = {name: tensor for name, tensor in tensors.items() if "." in name and name not in rows}
        counts = {"step": step, "num_tokens_global": num_tokens_global}
        return cls(**counts, header=header, modules=modules, rows=rows, **held)


class BlockTensors:
    """Consecutive steps of a replica, of as many microbatches each, whose fields lie end to end.

    Steps and microbatches are made when they are asked for, as views. The views of all microbatches are cut field by
    field, which takes a quarter of the time that microbatch by microbatch would take.
    """

    def __init__(self, fields: Mapping[str, Tensor | None], steps: Sequence[StepFacts]) -> None:
        """Take fields and steps as `BlockArrays` has them; arrays of steps may be tensors already."""
        self.fields, self.steps = fields, steps
        count = fields["max_seqlen"]
        assert count is not None, "each role has it"
        self.num_microbatches = len(count) // len(steps)
        """M, microbatches of a step."""
        self._cut: list[Sequence[Any]] = []
        self._of_step: tuple[int, list[dict[str, ModuleBatch]], list[dict[str, RowLists]]] | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @classmethod
    def from_arrays(cls, block: BlockArrays) -> BlockTensors:
        """A whole replica's steps; a missing sequence field is None. Shares memory."""
        return cls({name: torch.from_numpy(array) for name, array in block.fields.items()}, block.steps)

    @classmethod
    def of(cls, step: StepTensors) -> BlockTensors:
        """A block of one step."""
        names = StepFacts.__struct_fields__
        facts = StepFacts(**{name: getattr(step, name) for name in names if name != "bad_tokens"})
        return cls({name: getattr(step, name) for name in FIELDS + RUN_FIELDS}, (facts,))

    @property
    def is_of_text(self) -> bool:
        """Whether it has nothing for modules, and no runs of ranks."""
        return self.fields.get("runs") is None and not any(facts.modules for facts in self.steps)

    def with_steps(self, steps: Sequence[StepFacts], first: int = 0) -> BlockTensors:
        """As many steps from the first one on as there are facts, with these facts; fields are views."""
        if len(steps) == len(self.steps):
            return BlockTensors(self.fields, steps)
        held = {name: field.numpy() for name, field in self.fields.items() if field is not None}
        count = self.num_microbatches
        cut = cut_fields(held, first * count, (first + len(steps)) * count)
        fields = {name: torch.from_numpy(cut[name]) if name in cut else None for name in self.fields}
        return BlockTensors(fields, steps)

    def of_role(self, role: Role) -> BlockTensors:
        """The fields of a role that takes whole samples."""
        if role.is_first_stage and role.is_last_stage:
            return self
        dropped = {"tokens": None} if not role.is_first_stage else {}
        dropped |= {"labels": None} if not role.is_last_stage else {}
        return BlockTensors(dict(self.fields) | dropped, self.steps)

    def pinned(self) -> BlockTensors:
        """The same in pinned memory, from which a copy to a GPU can be asynchronous."""
        fields = {name: None if field is None else field.pin_memory() for name, field in self.fields.items()}
        steps = []
        for facts in self.steps:
            modules, rows = (
                {name: tensor.pin_memory() for name, tensor in _tensors(held).items()}
                for held in (facts.modules, facts.rows)
            )
            steps.append(replace(facts, modules=modules, rows=rows) if modules or rows else facts)
        return BlockTensors(fields, steps)

    def step(self, number: int) -> StepTensors:
        """One step."""
        facts, count = self.steps[number], self.num_microbatches
        cut: dict[str, Any] = dict(self.fields)
        if len(self.steps) > 1:
            held = {name: field.numpy() for name, field in self.fields.items() if field is not None}
            arrays = cut_fields(held, number * count, (number + 1) * count)
            cut = {name: torch.from_numpy(arrays[name]) if name in arrays else None for name in self.fields}
        return StepTensors(
            step=facts.step,
            num_tokens_global=facts.num_tokens_global,
            num_masked_tokens=facts.num_masked_tokens,
            modules=_tensors(facts.modules),
            rows=_tensors(facts.rows),
            header=facts.header,
            **cut,
        )

    def microbatch(self, number: int, index: int, cp_ranks: range = range(1)) -> Microbatch:
        """A microbatch of a step.

        Args:
            number: The step, in [0, len(self)).
            index: The microbatch, in [0, num_microbatches).
            cp_ranks: The ranks of the replica, for a step without runs of ranks.
        """
        if not self._cut:
            self._cut = self._views()
        facts, count = self.steps[number], self.num_microbatches
        modules: Mapping[str, ModuleBatch] = {}
        rows: Mapping[str, RowLists] = {}
        if facts.modules or facts.rows:
            if self._of_step is None or self._of_step[0] != number:
                modules_of, rows_of = _tensors(facts.modules), _tensors(facts.rows)
                self._of_step = (
                    number,
                    modules_of_microbatches(modules_of, count),
                    rows_of_microbatches(rows_of, count),
                )
            modules, rows = self._of_step[1][index], self._of_step[2][index]
        tokens, labels, spans, cu_seqlens, cu_seqlens_padded, max_seqlen, runs = self._cut
        at = number * count + index
        return Microbatch(
            tokens_int32=tokens[at],
            labels_int32=labels[at],
            spans=spans[at],
            cu_seqlens=cu_seqlens[at],
            cu_seqlens_padded=cu_seqlens_padded[at],
            max_seqlen=max_seqlen[at],
            step=facts.step,
            index=index,
            num_microbatches=count,
            is_last_of_step=index == count - 1,
            num_tokens_global=facts.num_tokens_global,
            cp_ranks=runs[at] if runs else cp_ranks,
            modules=modules,
            rows=rows,
        )

    def _views(self) -> list[Sequence[Any]]:
        """The fields of each microbatch of the block."""
        fields: dict[str, Any] = dict(self.fields)
        absent = [None] * len(fields["max_seqlen"])
        segments, runs = _sizes(fields["cu_seqlens_stop"]), fields.get("runs")
        return [
            *(absent if fields.get(name) is None else self._of_microbatches(fields[name]) for name in SEQUENCE_FIELDS),
            fields["spans"].split_with_sizes(_sizes(fields["spans_stop"])),
            fields["cu_seqlens"].split_with_sizes(segments),
            fields["cu_seqlens_padded"].split_with_sizes(segments),
            fields["max_seqlen"].tolist(),
            [] if runs is None else [range(first, first + size) for first, size in runs.tolist()],
        ]

    def _of_microbatches(self, field: Tensor) -> Sequence[Tensor]:
        """[B, T] of each microbatch."""
        if (tokens_stop := self.fields.get("tokens_stop")) is None:
            return field.unbind()
        return [part.view(1, -1) for part in field.split_with_sizes(_sizes(tokens_stop))]


def _tensors(held: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arrays as tensors, which share their memory; tensors as they are."""
    return {name: one if isinstance(one, Tensor) else torch.from_numpy(one) for name, one in held.items()}


def _sizes(stop: torch.Tensor) -> list[int]:
    """Number of entries of each microbatch."""
    sizes: list[int] = stop.diff(prepend=stop.new_zeros(1)).tolist()
    return sizes


# --- The batch of each role: the fields that its stage needs, and its zigzag slice of the sequence.
#
# With cp ranks, a stretch of tokens is cut into 2 * cp equal chunks. Rank r takes chunks r and 2 * cp - 1 - r: one
# early and one late, so that all ranks have the same work under a causal mask. Where documents are aligned (`best_fit`
# with `boundaries: document`) a stretch is a segment of cu_seqlens_padded, and a sample's tail of padding is one too.
# Otherwise a stretch is a whole sample. cu_seqlens and its companions stay whole, as Transformer Engine and Megatron
# expect them.
#
# The slices of all cp ranks partition the tokens, and each sample gives each rank length / cp tokens, in order.
#
# Sources: Megatron-LM `get_batch_on_this_cp_rank` (whole samples); Transformer Engine `thd_get_partitioned_indices`
# (packed documents, by cu_seqlens_padded).


class CpSlices(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens of a step that each CP rank takes, as c chunks. Computed once a step; empty arrays for cp = 1, and for
    a step with runs of ranks."""

    cp: int
    """Context-parallel ranks."""
    chunk_tokens: Int64Array
    """[c] tokens of each chunk."""
    chunk_start_in_slice: Int64Array
    """[c] first token of each chunk in a rank's slice, ascending."""
    chunk_start_of_rank: Int64Array
    """[cp, c] first token of each chunk in the step."""


def check_context_parallel(cp: int, *, length: int, packing: Packing, resetting: Sequence[str] = ()) -> None:
    """Refuse sizes that do not divide every stretch into 2 * cp equal chunks.

    Args:
        cp: Context-parallel ranks.
        length: Tokens of a sample.
        packing: The recipe's packing.
        resetting: Names of sources with a `reset_id`.

    Raises:
        TopologyError: `length` is no multiple of 2 * cp. Or each document is cut, and `align_tokens` is no multiple of
            2 * cp, or a `reset_id` ends documents at places that the plan does not know.
    """
    if cp == 1:
        return
    chunks = 2 * cp
    if length % chunks:
        raise TopologyError(
            f"context parallelism of cp={cp} cuts a sample into {chunks} equal chunks, but batch.length is {length}; "
            f"set length: {math.ceil(length / chunks) * chunks}, or choose a cp of which the double divides {length}"
        )
    if _slices_documents(packing) and resetting:
        raise TopologyError(
            f"context parallelism of cp={cp} cuts each document into {chunks} equal chunks, but documents of "
            f"{', '.join(resetting)} also end at each reset_id inside a row, where nothing is aligned; give each text "
            f"a row of its own, remove reset_id, write packing.boundaries: none, or use cp=1"
        )
    if _slices_documents(packing) and packing.align_tokens % chunks:
        raise TopologyError(
            f"context parallelism of cp={cp} cuts each document into {chunks} equal chunks, but packing.align_tokens "
            f"is {packing.align_tokens}; set align_tokens: {math.lcm(packing.align_tokens, chunks)} (it alters the "
            f"order of the data), or choose a cp of which the double divides {packing.align_tokens}"
        )


def cp_slices(tensors: StepTensors, cp: int, *, length: int, packing: Packing) -> CpSlices:
    """Slice all stretches of a step.

    Args:
        tensors: A step from `build`.
        cp: Context-parallel ranks.
        length: Tokens of a sample.
        packing: The recipe's packing, which decides whether documents or samples are stretches.

    Raises:
        TopologyError: As in `check_context_parallel`, which a loader calls before any data is read.
    """
    if tensors.runs is None:
        check_context_parallel(cp, length=length, packing=packing)
    if cp == 1 or tensors.runs is not None:  # with runs of ranks, each rank's slice is built as one
        none = np.zeros(0, np.int64)
        return CpSlices(cp=cp, chunk_tokens=none, chunk_start_in_slice=none, chunk_start_of_rank=none.reshape(1, 0))
    cu_seqlens, stop = tensors.cu_seqlens_padded.numpy().astype(np.int64), tensors.cu_seqlens_stop.numpy()
    if _slices_documents(packing):
        # The end of one microbatch and the 0 of the next one are neighbours, but they bound no stretch.
        stretch_tokens = np.delete(np.diff(cu_seqlens), stop[:-1] - 1)
    else:
        stretch_tokens = np.full(int(cu_seqlens[stop - 1].sum()) // length, length, np.int64)
    assert not (stretch_tokens % (2 * cp)).any(), "aligned documents and their tail divide into chunks"
    stretch_start = np.cumsum(stretch_tokens) - stretch_tokens
    chunk_tokens = stretch_tokens // (2 * cp)
    chunk_start_in_slice = np.repeat(stretch_start // cp, 2)
    chunk_start_in_slice[1::2] += chunk_tokens
    cp_rank = np.arange(cp)[:, None]
    early, late = (stretch_start + chunk * chunk_tokens for chunk in (cp_rank, 2 * cp - 1 - cp_rank))
    return CpSlices(
        cp=cp,
        chunk_tokens=np.repeat(chunk_tokens, 2),
        chunk_start_in_slice=chunk_start_in_slice,
        chunk_start_of_rank=np.stack([early, late], axis=2).reshape(cp, -1),
    )


def batch_of_role(
    tensors: StepTensors, role: Role, slices: CpSlices, *, memory: StepMemory | None = None
) -> StepTensors:
    """What the ranks of one role get of a step.

    First stages get tokens, last stages labels, a single stage both, middle stages neither. Spans, boundaries and
    header go to all.

    Args:
        tensors: A step from `build`, [M, B, length].
        role: The role; its cp_rank is in [0, slices.cp).
        slices: From `cp_slices` of the same step.
        memory: Lends memory to the slices; fresh memory if None.

    Returns:
        Tensors [M, B, length / cp]. With cp = 1, and with runs of ranks, they share memory with `tensors`.
    """
    if tensors.runs is not None:
        return _slice_of_runs(tensors, role, slices.cp)
    tokens = tensors.tokens if role.is_first_stage else None
    labels = tensors.labels if role.is_last_stage else None
    if slices.cp == 1:
        return replace(tensors, tokens=tokens, labels=labels)
    chunk_start = slices.chunk_start_of_rank[role.cp_rank]
    num_tokens = int(slices.chunk_tokens.sum())
    memory = memory or StepMemory()
    index = memory.empty(num_tokens, np.int64)
    if role.is_first_stage or role.is_last_stage:
        fill_ramps(slices.chunk_start_in_slice, chunk_start, slope=1, out=index)

    def slice_of(field: torch.Tensor | None) -> torch.Tensor | None:
        if field is None:
            return None
        part = memory.empty(num_tokens, field.numpy().dtype)
        np.take(field.numpy().reshape(-1), index, out=part, mode="clip")  # every other mode fills a copy first
        return torch.from_numpy(part).view(*field.shape[:2], -1)

    num_microbatches = tensors.num_microbatches
    tokens_of_microbatch = num_tokens // num_microbatches
    whole = Spans.from_array(tensors.spans.numpy(), tensors.spans_stop.numpy(), tokens_of_microbatch * slices.cp)
    spans, spans_stop = slice_spans(
        whole,
        chunk_start=chunk_start,
        chunk_tokens=slices.chunk_tokens,
        chunk_start_in_slice=slices.chunk_start_in_slice,
    ).to_array(np.arange(1, num_microbatches + 1) * tokens_of_microbatch)
    return replace(
        tensors,
        tokens=slice_of(tokens),
        labels=slice_of(labels),
        spans=torch.from_numpy(spans),
        spans_stop=torch.from_numpy(spans_stop),
    )


def _slice_of_runs(tensors: StepTensors, role: Role, cp: int) -> StepTensors:
    """The slices of one CP rank, which lie together."""
    assert tensors.tokens_stop is not None and tensors.runs is not None, "of a step with runs"
    count = tensors.num_microbatches // cp
    mine = slice(role.cp_rank * count, (role.cp_rank + 1) * count)

    def part_of(stop: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Where the microbatches' parts end, and which range they have of all."""
        first = int(stop[mine.start - 1]) if mine.start else 0
        return stop[mine] - first, slice(first, int(stop[mine.stop - 1]))

    tokens_stop, tokens = part_of(tensors.tokens_stop)
    spans_stop, spans = part_of(tensors.spans_stop)
    cu_seqlens_stop, boundaries = part_of(tensors.cu_seqlens_stop)
    return replace(
        tensors,
        tokens=tensors.tokens[tokens] if tensors.tokens is not None and role.is_first_stage else None,
        labels=tensors.labels[tokens] if tensors.labels is not None and role.is_last_stage else None,
        tokens_stop=tokens_stop,
        runs=tensors.runs[mine],
        spans=tensors.spans[spans],
        spans_stop=spans_stop,
        cu_seqlens=tensors.cu_seqlens[boundaries],
        cu_seqlens_padded=tensors.cu_seqlens_padded[boundaries],
        cu_seqlens_stop=cu_seqlens_stop,
        max_seqlen=tensors.max_seqlen[mine],
    )


def _slices_documents(packing: Packing) -> bool:
    """Whether stretches are documents: packing aligns them, and boundaries stop attention at them."""
    return slice_align(packing) is not None
