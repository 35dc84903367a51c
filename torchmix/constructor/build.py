"""StepPlan + documents -> the microbatches of one replica, at full length."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.manifest import MOST_ID
from torchmix.constructor.arrays import NO_LOSS, SEQUENCE_DTYPES, SEQUENCE_FIELDS, StepArrays, StepMemory
from torchmix.constructor.runs import RunSlices, chunks_of_replica
from torchmix.constructor.spans import (
    NO_RESET,
    Boundaries,
    CutPieces,
    Spans,
    boundaries_of_documents,
    boundaries_of_samples,
    cut_pieces,
    find_resets,
    spans_of_pieces,
)
from torchmix.errors import CorruptPage
from torchmix.native.calls import Fill, type_number
from torchmix.native.load import array_of, is_native, run
from torchmix.planner.plan import StepPlan
from torchmix.reader.protocol import OtherRows, WantedPieces
from torchmix.recipe.sources import masks_resets, resets_attention, resets_positions
from torchmix.recipe.structs import Packing

# --- StepPlan + documents -> the microbatches of one replica, at full length.
#
# A pure function of its arguments, so every leader that builds a piece builds the same bytes.
#
# Cost: 0.9 to 2.5 ns a token on one core for 8 bytes written (64 x 8192 tokens, pieces of 800 and of 60 tokens on
# average) in reused memory; fresh memory may cost three times as much. No Python loop runs over pieces or tokens.
#
# n is pieces, S samples of the replica, N = S * length tokens with padding, M microbatches, B the micro_batch_size.
# With runs of ranks a sample is what one rank has of a microbatch, of any length, and a piece is a chunk of a document.


class ReplicaPieces(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The pieces of one replica's step, sorted by microbatch, place in the microbatch, slot in the sample."""

    step: int
    """Step of the global batch, from 0."""
    num_tokens_global: int
    """Sum of loss_mask over the global batch of all replicas."""
    num_samples: int
    """S; a sample may have no piece."""
    micro_batch_size: int
    """B, which divides S."""
    sample: Int64Array
    """[n] index of the piece's sample in the replica: microbatch * B + index in the microbatch; ascending."""
    sample_offset: Int64Array
    """[n] first token of the piece in its sample; ascending within a sample."""
    source: NDArray[np.int32]
    """[n] number of the source, sources sorted by name."""
    row: Int64Array
    """[n] row in the source."""
    start: Int64Array
    """[n] first token of the piece in its document."""
    tokens: Int64Array
    """[n] tokens of the piece, 1 or more."""
    ends_document: NDArray[np.bool_]
    """[n] whether the piece's last token is its document's."""
    epoch: Int64Array
    """[n] pass over the source in which the piece was drawn."""
    source_names: tuple[str, ...] = ()
    """Sorted names, for error messages."""
    runs: RunSlices | None = None
    """With `packing: {method: whole}`: the slices of the replica's ranks, which stand for its samples."""

    def tokens_stop(self, length: int) -> Int64Array:
        """[S] where the tokens of each sample end; samples have `length` tokens, but with runs."""
        return np.arange(1, self.num_samples + 1) * length if self.runs is None else self.runs.tokens_stop

    def num_places(self, length: int) -> int:
        """N."""
        return self.num_samples * length if self.runs is None else int(self.runs.tokens_stop[-1])

    def places(self, length: int) -> Int64Array:
        """[n] first token of each piece among the N tokens of the replica; samples have `length` tokens, but with
        runs."""
        if self.runs is None:
            return self.sample * length + self.sample_offset
        stop = self.runs.tokens_stop
        return np.concatenate([np.zeros(1, np.int64), stop[:-1]])[self.sample] + self.sample_offset

    def wanted(self, length: int) -> WantedPieces:
        """What a reader is asked for: all tokens of the replica's samples, of `length` tokens each."""
        return WantedPieces(
            source=self.source,
            row=self.row,
            epoch=self.epoch,
            start=self.start,
            tokens=self.tokens,
            places=self.places(length),
            num_places=self.num_places(length),
        )

    def source_name(self, piece: int) -> str:
        """Name of a piece's source, for error messages."""
        number = int(self.source[piece])
        return repr(self.source_names[number]) if self.source_names else f"number {number}"


def pieces_of_replica(plan: StepPlan, replica: int) -> ReplicaPieces:
    """Select one replica's pieces, in the order in which its samples are consumed.

    Args:
        plan: The step.
        replica: Data-parallel rank, in [0, plan.layout.dp).
    """
    if plan.contexts is not None:
        return _chunks(plan, replica)
    placement = plan.placement
    samples = np.flatnonzero(placement.dp_rank_of_sample == replica)
    place = placement.microbatch_of_sample[samples] * plan.layout.micro_batch_size + placement.slot_of_sample[samples]
    sample_at_place = np.empty(len(samples), np.int64)
    sample_at_place[place] = samples
    # The plan is sorted by sample, so a sample's pieces are one range of its rows.
    first = np.searchsorted(plan.sample, sample_at_place, side="left")
    count = np.searchsorted(plan.sample, sample_at_place, side="right") - first
    chosen = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    start, tokens = plan.pieces.start[chosen], plan.pieces.tokens[chosen]
    return ReplicaPieces(
        step=plan.step,
        num_tokens_global=plan.num_tokens_global,
        num_samples=len(samples),
        micro_batch_size=plan.layout.micro_batch_size,
        sample=np.repeat(np.arange(len(samples)), count),
        sample_offset=plan.sample_offset[chosen],
        source=plan.pieces.source[chosen].astype(np.int32),
        row=plan.pieces.row[chosen],
        start=start,
        tokens=tokens,
        ends_document=start + tokens == plan.pieces.document_tokens[chosen],
        epoch=plan.pieces.epoch[chosen],
        source_names=plan.sources,
    )


def _chunks(plan: StepPlan, replica: int) -> ReplicaPieces:
    """The chunks that the ranks of a replica have of their bins."""
    chunks = chunks_of_replica(plan, replica)
    pieces, piece = plan.pieces, chunks.piece
    start = pieces.start[piece] + chunks.slices.position
    return ReplicaPieces(
        step=plan.step,
        num_tokens_global=plan.num_tokens_global,
        num_samples=len(chunks.slices.tokens_stop),
        micro_batch_size=1,
        sample=chunks.slice_of_chunk,
        sample_offset=chunks.offset,
        source=pieces.source[piece].astype(np.int32),
        row=pieces.row[piece],
        start=start,
        tokens=chunks.tokens,
        ends_document=start + chunks.tokens == pieces.document_tokens[piece],
        epoch=pieces.epoch[piece],
        source_names=plan.sources,
        runs=chunks.slices,
    )


def build(
    pieces: ReplicaPieces,
    values: NDArray[np.integer[Any]],
    successors: Int64Array,
    *,
    length: int,
    packing: Packing,
    reset_ids: Int64Array | None = None,
    unlabelled: Int64Array | None = None,
    memory: StepMemory | None = None,
    masked: Collection[str] = (),
) -> StepArrays:
    """Fill every field of a replica's step.

    Args:
        pieces: From `pieces_of_replica`.
        values: [N] token ids of any integer dtype, in [0, 2**31), each piece at its place (`ReplicaPieces.places`).
            Values in padding are arbitrary. `build` keeps no reference.
        successors: [n] the token that follows each piece in its document; arbitrary where the document ends.
        length: Tokens of a sample.
        packing: The recipe's packing; `method` and `align_tokens` decide where pieces lie, the other fields decide
            what resets at documents.
        reset_ids: [S] id that ends a document inside a row, by number of source, or NO_RESET; None: no source has one.
        unlabelled: Places of the N tokens that have no label, because no model is trained on the next token; None: all
            have one.
        memory: Lends memory to the sequence fields; fresh memory if None.
        masked: Names of sources whose unreadable pieces become blank: ids of 0, without loss. A piece is unreadable
            if one of its values is no token id; the reader marks the pieces that it could not read in this way.

    Returns:
        Every field; sequence fields are [M, B, length], with runs of ranks [N].

    Raises:
        CorruptPage: A source that is not in `masked` has a value that is no token id.
    """
    num_tokens = pieces.num_places(length)
    assert len(values) == num_tokens, "a value per token, padding included"
    arrays = (memory or StepMemory()).empty_together(num_tokens, list(SEQUENCE_DTYPES.values()))
    sequence = dict(zip(SEQUENCE_FIELDS, arrays, strict=True))
    bad = fill(values, successors, pieces, pieces.places(length), **sequence)
    _check_masked(bad, pieces, values, length, masked)
    num_masked_tokens = int((pieces.tokens - pieces.ends_document)[bad].sum())
    if pieces.runs is not None:
        assert reset_ids is None, "a recipe of whole has no source that resets"
        if unlabelled is not None:
            num_masked_tokens += _mask(sequence["labels"], unlabelled)
        return _step_arrays(pieces, num_masked_tokens, bad, {**sequence, **_fields_of_runs(pieces, pieces.runs)})
    resets, parts = _resets(values, pieces, bad, length, packing, reset_ids)
    if masks_resets(packing):
        num_masked_tokens += _mask(sequence["labels"], resets)
    if unlabelled is not None:
        num_masked_tokens += _mask(sequence["labels"], unlabelled)
    spans = _spans(pieces, parts, length, packing)
    boundaries = _boundaries(pieces, parts, length, packing)
    num_microbatches = pieces.num_samples // pieces.micro_batch_size
    shape = (num_microbatches, pieces.micro_batch_size, length)
    tokens_stop = np.arange(1, num_microbatches + 1) * (pieces.micro_batch_size * length)
    shaped = {name: field.reshape(shape) for name, field in sequence.items()}
    return _step_arrays(pieces, num_masked_tokens, bad, {**shaped, **_places(spans, tokens_stop, boundaries)})


def _fields_of_runs(pieces: ReplicaPieces, runs: RunSlices) -> dict[str, NDArray[Any]]:
    """The fields of slices, beside their tokens and labels."""
    places = pieces.places(0)
    spans = spans_of_pieces(places, pieces.tokens, runs.position, pieces.source, tokens_stop=runs.tokens_stop)
    return {
        **_places(spans, runs.tokens_stop, runs.boundaries),
        "tokens_stop": runs.tokens_stop,
        "runs": runs.run,
    }


def _places(spans: Spans, tokens_stop: Int64Array, boundaries: Boundaries) -> dict[str, NDArray[Any]]:
    """The fields that say where documents are."""
    span_array, spans_stop = spans.to_array(tokens_stop)
    return {
        "spans": span_array,
        "spans_stop": spans_stop,
        "cu_seqlens": boundaries.cu_seqlens,
        "cu_seqlens_padded": boundaries.cu_seqlens_padded,
        "cu_seqlens_stop": boundaries.stop,
        "max_seqlen": boundaries.max_seqlen,
    }


def _step_arrays(
    pieces: ReplicaPieces, num_masked_tokens: int, bad: Int64Array, fields: dict[str, NDArray[Any]]
) -> StepArrays:
    return StepArrays(
        step=pieces.step,
        num_tokens_global=pieces.num_tokens_global,
        num_masked_tokens=num_masked_tokens,
        bad_tokens=_tokens_of_source(pieces, bad) if len(bad) else None,
        fields=fields,
    )


def _resets(
    values: NDArray[np.integer[Any]],
    pieces: ReplicaPieces,
    bad: Int64Array,
    length: int,
    packing: Packing,
    reset_ids: Int64Array | None,
) -> tuple[Int64Array, CutPieces]:
    """The places of ids that end a document inside a piece, and the resulting parts; blank pieces have none."""
    start, resets = pieces.places(length), np.zeros(0, np.int64)
    if reset_ids is not None:
        id_of_piece = reset_ids[pieces.source]
        id_of_piece[bad] = NO_RESET
        resets = find_resets(values, start, pieces.tokens, id_of_piece)
    align_tokens = packing.align_tokens if packing.method != "concat" else 1
    padded_tokens = -(-pieces.tokens // align_tokens) * align_tokens
    return resets, cut_pieces(start, pieces.tokens, padded_tokens, resets)


def _spans(pieces: ReplicaPieces, parts: CutPieces, length: int, packing: Packing) -> Spans:
    tokens_stop = pieces.tokens_stop(length)[pieces.micro_batch_size - 1 :: pieces.micro_batch_size]
    if resets_positions(packing):
        source, zeros = pieces.source[parts.piece], np.zeros_like(parts.start)
        return spans_of_pieces(parts.start, parts.tokens, zeros, source, tokens_stop=tokens_stop)
    offset = pieces.sample_offset
    return spans_of_pieces(pieces.places(length), pieces.tokens, offset, pieces.source, tokens_stop=tokens_stop)


def fill(
    values: NDArray[np.integer[Any]],
    successors: Int64Array,
    pieces: ReplicaPieces,
    places: Int64Array,
    *,
    tokens: Int32Array,
    labels: Int32Array,
) -> Int64Array:
    """Write [N] tokens from the reader's values, and [N] labels, the values that follow them in their documents.

    Padding has tokens of 0 without labels, and so have blank pieces.

    Returns:
        Numbers of the blank pieces, which have a value that is no token id; ascending.
    """
    if not is_native():
        return fill_plainly(values, successors, pieces, places, tokens=tokens, labels=labels)
    ends, bad = pieces.ends_document.view(np.uint8), np.empty(len(places), np.int64)
    call = Fill(
        values=array_of(values, values.dtype),
        place=array_of(places, np.int64),
        length=array_of(pieces.tokens, np.int64),
        ends=array_of(ends, np.uint8),
        successor=array_of(successors, np.int64),
        tokens=array_of(tokens, np.int32),
        labels=array_of(labels, np.int32),
        bad=array_of(bad, np.int64),
        value_type=type_number(values.dtype),
        no_loss=NO_LOSS,
    )
    run(call)
    return bad[: call.num_bad]


def fill_plainly(
    values: NDArray[np.integer[Any]],
    successors: Int64Array,
    pieces: ReplicaPieces,
    places: Int64Array,
    *,
    tokens: Int32Array,
    labels: Int32Array,
) -> Int64Array:
    """The reference of `fill`."""
    stops = places + pieces.tokens
    tokens[:] = values
    labels[:-1] = values[1:]
    labels[stops - 1] = np.where(pieces.ends_document, NO_LOSS, successors)
    bad = np.zeros(0, np.int64)
    if _has_no_id(values):  # the value may lie in padding, where values are arbitrary
        spans = zip(places.tolist(), stops.tolist(), strict=True)
        bad = np.flatnonzero([_has_no_id(values[start:stop]) for start, stop in spans])
    without = np.concatenate([_gaps(places, stops, len(tokens)), ranges(places[bad], pieces.tokens[bad])])
    tokens[without] = 0
    labels[without] = NO_LOSS
    return bad


def _mask(labels: Int32Array, places: Int64Array) -> int:
    """Remove the labels at some places; returns how many of these places had a label."""
    num_masked = int(np.count_nonzero(labels[places] != NO_LOSS))
    labels[places] = NO_LOSS
    return num_masked


def _has_no_id(values: NDArray[np.integer[Any]]) -> bool:
    """Whether a value is no token id: negative, where a label would mean no loss, or too large for int32."""
    is_negative = values.dtype.kind == "i" and values.min() < 0
    return bool(is_negative or (values.dtype.itemsize >= 4 and values.max() > MOST_ID))


def _check_masked(
    bad: Int64Array, pieces: ReplicaPieces, values: NDArray[np.integer[Any]], length: int, masked: Collection[str]
) -> None:
    """Raise a CorruptPage for the first blank piece whose source is not masked."""
    for i in bad.tolist():
        if masked and pieces.source_names[int(pieces.source[i])] in masked:
            continue
        place = int(pieces.places(length)[i])
        piece = values[place : place + int(pieces.tokens[i])]
        at = int(np.flatnonzero((piece < 0) | (piece > MOST_ID))[0])
        raise CorruptPage(
            f"source {pieces.source_name(i)}: row {pieces.row[i]} has {piece[at]} as token {pieces.start[i] + at} "
            f"of its document; token ids are 0 to {MOST_ID}. Write the file again, then run torchmix index"
        )


def _tokens_of_source(pieces: ReplicaPieces, chosen: Int64Array) -> Int64Array:
    """[S] tokens of some pieces, by source."""
    found = np.zeros(len(pieces.source_names), np.int64)
    np.add.at(found, pieces.source[chosen], pieces.tokens[chosen])
    return found


def _gaps(places: Int64Array, stops: Int64Array, num_tokens: int) -> Int64Array:
    """Every token of padding, ascending."""
    start = np.append(np.zeros(1, np.int64), stops)
    return ranges(start, np.append(places, num_tokens) - start)


def ranges(start: Int64Array, count: Int64Array) -> Int64Array:
    """The numbers of several ranges, end to end."""
    found: Int64Array = np.arange(count.sum()) + np.repeat(start - (np.cumsum(count) - count), count)
    return found


def _boundaries(pieces: ReplicaPieces, parts: CutPieces, length: int, packing: Packing) -> Boundaries:
    sizes = {"num_samples": pieces.num_samples, "length": length, "micro_batch_size": pieces.micro_batch_size}
    if not resets_attention(packing):
        return boundaries_of_samples(**sizes)
    return boundaries_of_documents(pieces.sample[parts.piece], parts.tokens, parts.padded_tokens, **sizes)


# --- What maps give beside ids, as numpy arrays of a replica's step.
#
# Rows lie in the order of their first tokens, and each microbatch has those that begin in it; a row that continues in
# another microbatch, sample or step has its lists where it begins. Cost: copies of the lists.
#
#     NAME:values    [v]          the numbers of all rows, end to end
#     NAME:lengths   int64 [k]    how many each row has
#     NAME:places    int64 [k]    the row's first token in its microbatch of B * length tokens, before any CP slice
#     NAME:stop      int64 [M]    where the rows of each microbatch end
#
# M is the microbatches of the step, B the micro_batch_size. Where several sources give lists of one name, numbers
# are of the type that holds all of them. Torch has no unsigned types beyond uint8 everywhere, so they become signed
# ones.

SEPARATOR = ":"
"""No array of a step or of a module has it in its name."""
PARTS = ("values", "lengths", "places", "stop")
_SIGNED = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


def arrays_of_rows(others: Sequence[OtherRows], pieces: ReplicaPieces, length: int) -> dict[str, NDArray[Any]]:
    """The arrays of a replica's step.

    Args:
        others: From the reader; pieces are numbered as the replica's.
        pieces: The replica's.
        length: Tokens of a sample.
    """
    of_name: dict[str, list[OtherRows]] = {}
    for other in others:
        of_name.setdefault(other.name, []).append(other)
    found: dict[str, NDArray[Any]] = {}
    tokens_of_microbatch = pieces.micro_batch_size * length
    num_microbatches = pieces.num_samples // pieces.micro_batch_size
    for name in sorted(of_name):
        values, lengths, piece = _joined(of_name[name])
        if not len(piece):
            continue
        places = pieces.places(length)[piece]
        borders = np.arange(1, num_microbatches + 1) * tokens_of_microbatch
        found |= {
            f"{name}{SEPARATOR}values": values,
            f"{name}{SEPARATOR}lengths": lengths,
            f"{name}{SEPARATOR}places": places % tokens_of_microbatch,
            f"{name}{SEPARATOR}stop": np.searchsorted(places, borders).astype(np.int64),
        }
    return found


def cut_rows(arrays: Mapping[str, NDArray[Any]], borders: range) -> list[dict[str, NDArray[Any]]]:
    """The arrays of parts of a step: of the microbatches between each two borders."""
    found: list[dict[str, NDArray[Any]]] = [{} for _ in borders[:-1]]
    for name in names_of_rows(arrays):
        values, lengths, places, stop = (arrays[f"{name}{SEPARATOR}{part}"] for part in PARTS)
        value_stop = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        for index, first in enumerate(borders[:-1]):
            begin, end = int(stop[first - 1]) if first else 0, int(stop[first + borders.step - 1])
            if begin == end:  # a name that no row of a step has is missing
                continue
            parts = (
                values[value_stop[begin] : value_stop[end]],
                lengths[begin:end],
                places[begin:end],
                stop[first : first + borders.step] - begin,
            )
            found[index] |= {f"{name}{SEPARATOR}{part}": array for part, array in zip(PARTS, parts, strict=True)}
    return found


def is_of_rows(name: str) -> bool:
    """Whether an array is one of these, by its name."""
    return SEPARATOR in name


def names_of_rows(arrays: Mapping[str, Any]) -> list[str]:
    """The maps' names for them."""
    return list(dict.fromkeys(name.rpartition(SEPARATOR)[0] for name in arrays))


def _joined(others: Sequence[OtherRows]) -> tuple[NDArray[Any], Int64Array, Int64Array]:
    """Values, lengths and first pieces of rows, in the order of their pieces."""
    piece = np.concatenate([other.piece for other in others])
    order = np.argsort(piece, kind="stable")
    parts = [_of_lists(other.values) for other in others]
    lengths = np.concatenate([lengths for _, lengths in parts])
    kind = np.result_type(*(values.dtype for values, _ in parts))
    # Row by row: an index of all numbers would take 8 bytes of each, and a list may be the bytes of a picture.
    rows = [row for values, of_rows in parts for row in _rows(values, of_rows)]
    chosen = [rows[at] for at in order.tolist()] or [np.zeros(0, kind)]
    values = np.concatenate(chosen, dtype=_SIGNED.get(kind, kind), casting="unsafe")
    return values, lengths[order], piece[order]


def _rows(values: NDArray[Any], lengths: Int64Array) -> list[NDArray[Any]]:
    """A view of each row's numbers."""
    stops = np.cumsum(lengths).tolist()
    return [values[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _of_lists(lists: pa.Array) -> tuple[NDArray[Any], Int64Array]:
    """Values end to end, and the length of each list; `lists` are large_list without nulls inside."""
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return values, np.diff(offsets)


# --- Several steps of one replica as one, and cut again.
#
# Each step's arrays are those that it would have alone. Cost: copies of the columns of pieces; the arrays of steps are
# views, so the memory of all of them returns together. A call of numpy costs about a microsecond, `build` makes some
# hundred, and a step of 32,768 tokens has some 40 pieces.


def join_pieces(steps: Sequence[ReplicaPieces]) -> ReplicaPieces:
    """The pieces of all steps, whose samples follow each other; of steps with as many samples each."""
    first = steps[0]
    if len(steps) == 1:
        return first

    def of_all(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(step, name) for step in steps])

    samples_before = np.repeat(np.arange(len(steps)) * first.num_samples, [len(step.row) for step in steps])
    return ReplicaPieces(
        step=first.step,
        num_tokens_global=0,
        num_samples=first.num_samples * len(steps),
        micro_batch_size=first.micro_batch_size,
        sample=of_all("sample") + samples_before,
        sample_offset=of_all("sample_offset"),
        source=of_all("source"),
        row=of_all("row"),
        start=of_all("start"),
        tokens=of_all("tokens"),
        ends_document=of_all("ends_document"),
        epoch=of_all("epoch"),
        source_names=first.source_names,
    )


def cut_steps(joined: StepArrays, steps: Sequence[ReplicaPieces]) -> list[StepArrays]:
    """The arrays of each step.

    Args:
        joined: Built from `join_pieces(steps)`, with no token masked.
        steps: The pieces of each.
    """
    fields = joined.fields
    count = len(fields["max_seqlen"]) // len(steps)
    borders = range(0, count * len(steps) + 1, count)
    cut = {name: _by_microbatch(fields[name], borders) for name in ("tokens", "labels", "max_seqlen")}
    cut["spans_stop"], cut["spans"] = _by_stop(fields["spans_stop"], [fields["spans"]], borders)
    boundaries = [fields["cu_seqlens"], fields["cu_seqlens_padded"]]
    cut["cu_seqlens_stop"], cut["cu_seqlens"], cut["cu_seqlens_padded"] = _by_stop(
        fields["cu_seqlens_stop"], boundaries, borders
    )
    rows = cut_rows(joined.rows, borders)
    return [
        StepArrays(
            step=step.step,
            num_tokens_global=step.num_tokens_global,
            fields={name: cut[name][index] for name in fields},
            rows=rows[index],
        )
        for index, step in enumerate(steps)
    ]


def _by_microbatch(array: NDArray[Any], borders: range) -> list[NDArray[Any]]:
    return [array[start : start + borders.step] for start in borders[:-1]]


def _by_stop(stop: NDArray[np.int64], arrays: Sequence[NDArray[Any]], borders: range) -> list[list[NDArray[Any]]]:
    """The stops of each step, counted from its own first entry, and its part of each array."""
    ends = [0, *stop[borders.step - 1 :: borders.step].tolist()]
    stops = [part - begin for part, begin in zip(_by_microbatch(stop, borders), ends[:-1], strict=True)]
    return [stops, *([array[start:end] for start, end in pairwise(ends)] for array in arrays)]
