"""The plans of a block + documents -> the microbatches of replicas, at full length."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import MOST_ID
from torchmix.constructor.arrays import (
    NO_LOSS,
    SEQUENCE_DTYPES,
    SEQUENCE_FIELDS,
    BlockArrays,
    StepArrays,
    StepFacts,
    StepMemory,
    cut_fields,
)
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
from torchmix.planner.plan import StepPlan
from torchmix.reader.piece_copy import fill_from, write_padding
from torchmix.reader.protocol import BlankPiece, Filled, Filling, OtherRows, Tokens, WantedPieces
from torchmix.recipe.sources import masks_resets, resets_attention, resets_positions
from torchmix.recipe.structs import Packing

# --- The plans of a block + documents -> the microbatches of replicas, at full length.
#
# A pure function of its arguments, so every leader that builds a piece builds the same bytes. One table has the pieces
# of all steps and replicas, so what is built costs as many calls as for one step of one replica. No Python loop runs
# over pieces or tokens; a reader has written tokens and labels.
#
# n is pieces, R replicas, K steps, S samples of a replica in a step, N = R * K * S * length tokens with padding, M
# microbatches of a step, B the micro_batch_size. With runs of ranks a sample is what one rank has of a microbatch, of
# any length, and a piece is a chunk of a document.


class BlockPieces(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The pieces of some replicas in consecutive steps, sorted by replica, step, microbatch, sample, slot."""

    steps: tuple[int, ...]
    """[K] steps of the global batch, from 0."""
    num_tokens_global: tuple[int, ...]
    """[K] sum of loss_mask over the global batch of all replicas."""
    num_replicas: int = 1
    """R."""
    num_samples: int
    """S; a sample may have no piece."""
    micro_batch_size: int
    """B, which divides S."""
    sample: Int64Array
    """[n] number of the piece's sample: ((replica * K + step) * M + microbatch) * B + index in it; ascending."""
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

    @property
    def total_samples(self) -> int:
        """Those of all steps and replicas."""
        return self.num_replicas * len(self.steps) * self.num_samples

    def tokens_stop(self, length: int) -> Int64Array:
        """[total_samples] where the tokens of each sample end; samples have `length` tokens, but with runs."""
        return np.arange(1, self.total_samples + 1) * length if self.runs is None else self.runs.tokens_stop

    def num_places(self, length: int) -> int:
        """N."""
        return self.total_samples * length if self.runs is None else int(self.runs.tokens_stop[-1])

    def places(self, length: int) -> Int64Array:
        """[n] first token of each piece among the N tokens; samples have `length` tokens, but with runs."""
        if self.runs is None:
            return self.sample * length + self.sample_offset
        stop = self.runs.tokens_stop
        return np.concatenate([np.zeros(1, np.int64), stop[:-1]])[self.sample] + self.sample_offset

    def wanted(self, length: int) -> WantedPieces:
        """What a reader is asked for: all tokens of the samples, of `length` tokens each."""
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


def pieces_of_replica(plan: StepPlan, replica: int) -> BlockPieces:
    """The pieces of one replica in one step; see `pieces_of_block`."""
    return pieces_of_block([plan], [replica])


def pieces_of_block(plans: Sequence[StepPlan], replicas: Sequence[int]) -> BlockPieces:
    """Select the pieces of some replicas, in the order in which their samples are consumed.

    Args:
        plans: [K] consecutive steps of one layout and one number of samples.
        replicas: [R] data-parallel ranks, each once, in [0, layout.dp).

    With runs of ranks there is one plan and one replica, since each replica has slices of lengths of its own.
    """
    if plans[0].contexts is not None:
        [plan], [replica] = plans, replicas
        return _chunks(plan, replica)
    first_plan, count = plans[0], plans[0].num_samples
    layout = first_plan.layout
    of_replica, size = count // layout.dp, layout.micro_batch_size
    number_of_rank = np.full(layout.dp, -1)
    number_of_rank[list(replicas)] = np.arange(len(replicas))
    step = np.repeat(np.arange(len(plans)), count)
    placements = [plan.placement for plan in plans]
    number = number_of_rank[_of_all([placement.dp_rank_of_sample for placement in placements])]
    in_step = _of_all([placement.microbatch_of_sample for placement in placements]) * size
    in_step += _of_all([placement.slot_of_sample for placement in placements])
    samples = np.flatnonzero(number >= 0)
    sample_at_place = np.empty(len(samples), np.int64)
    sample_at_place[((number * len(plans) + step) * of_replica + in_step)[samples]] = samples
    # Plans are sorted by sample, so a sample's pieces are one range of their rows.
    sample = _of_all([plan.sample for plan in plans]) + np.repeat(
        np.arange(len(plans)) * count, [len(plan.sample) for plan in plans]
    )
    pieces_of_sample = np.bincount(sample, minlength=len(plans) * count)
    first, num_pieces = (
        (pieces_of_sample.cumsum() - pieces_of_sample)[sample_at_place],
        pieces_of_sample[sample_at_place],
    )
    chosen = ranges(first, num_pieces)

    def column(name: str) -> Int64Array:
        return _of_all([getattr(plan.pieces, name) for plan in plans])[chosen]

    start, tokens = column("start"), column("tokens")
    return BlockPieces(
        steps=tuple(plan.step for plan in plans),
        num_tokens_global=tuple(plan.num_tokens_global for plan in plans),
        num_replicas=len(replicas),
        num_samples=of_replica,
        micro_batch_size=size,
        sample=np.repeat(np.arange(len(samples)), num_pieces),
        sample_offset=_of_all([plan.sample_offset for plan in plans])[chosen],
        source=column("source").astype(np.int32),
        row=column("row"),
        start=start,
        tokens=tokens,
        ends_document=start + tokens == column("document_tokens"),
        epoch=column("epoch"),
        source_names=first_plan.sources,
    )


def _chunks(plan: StepPlan, replica: int) -> BlockPieces:
    """The chunks that the ranks of a replica have of their bins."""
    chunks = chunks_of_replica(plan, replica)
    pieces, piece = plan.pieces, chunks.piece
    start = pieces.start[piece] + chunks.slices.position
    return BlockPieces(
        steps=(plan.step,),
        num_tokens_global=(plan.num_tokens_global,),
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


def _of_all(columns: Sequence[Int64Array]) -> Int64Array:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def memory_of_block(pieces: BlockPieces, memories: Sequence[StepMemory], length: int) -> list[Filling]:
    """[R] where tokens and labels of each replica go."""
    num_tokens = pieces.num_places(length) // pieces.num_replicas
    dtypes = list(SEQUENCE_DTYPES.values())
    return [Filling(*memory.empty_together(num_tokens, dtypes)) for memory in memories]


def build_block(
    pieces: BlockPieces,
    outs: Sequence[Filling] | None,
    filled: Filled,
    *,
    length: int,
    packing: Packing,
    reset_ids: Int64Array | None = None,
    masked: Collection[str] = (),
) -> list[BlockArrays]:
    """Every field of the steps of each replica.

    Args:
        pieces: From `pieces_of_block`.
        outs: [R] tokens and labels of each replica's steps, as a reader has written them; None: nothing was read, and
            these fields are missing.
        filled: What the reader has found.
        length: Tokens of a sample.
        packing: The recipe's packing; `method` and `align_tokens` decide where pieces lie, the other fields decide
            what resets at documents.
        reset_ids: [S] id that ends a document inside a row, by number of source, or NO_RESET; None: no source has one.
        masked: Names of sources whose unreadable pieces are blank: ids of 0, without loss. A piece is unreadable if
            one of its values is no token id; the reader marks the pieces that it could not read in this way.

    Returns:
        [R] blocks; sequence fields are [K * M, B, length], with runs of ranks [N].

    Raises:
        CorruptPage: A source that is not in `masked` has a value that is no token id.
    """
    _check_masked(filled.blank, pieces, masked)
    num_steps, size = len(pieces.steps), pieces.micro_batch_size
    bad = np.array([one.piece for one in filled.blank], np.int64)
    step_tokens = pieces.num_places(length) // (pieces.num_replicas * num_steps)
    num_masked = np.zeros(pieces.num_replicas * num_steps, np.int64)
    np.add.at(num_masked, pieces.sample[bad] // pieces.num_samples, (pieces.tokens - pieces.ends_document)[bad])
    num_microbatches = pieces.total_samples // size
    tokens_stop = pieces.tokens_stop(length)[size - 1 :: size]
    resets: Int64Array | None = None
    if pieces.runs is not None:
        assert reset_ids is None, "a recipe of whole has no source that resets"
        position, boundaries = pieces.runs.position, pieces.runs.boundaries
        spans = spans_of_pieces(pieces.places(length), pieces.tokens, position, pieces.source, tokens_stop=tokens_stop)
    else:
        resets, parts = _resets(outs or (), pieces, bad, length, packing, reset_ids)
        spans = _spans(pieces, parts, length, packing, tokens_stop)
        boundaries = _boundaries(pieces, parts, length, packing)
    for places in (resets if masks_resets(packing) else None, filled.unlabelled):
        if places is not None and len(places):
            _mask(outs or (), places, num_masked, step_tokens)
    span_array, spans_stop = spans.to_array(tokens_stop)
    fields: dict[str, NDArray[Any]] = {
        "spans": span_array,
        "spans_stop": spans_stop,
        "cu_seqlens": boundaries.cu_seqlens,
        "cu_seqlens_padded": boundaries.cu_seqlens_padded,
        "cu_seqlens_stop": boundaries.stop,
        "max_seqlen": boundaries.max_seqlen,
    }
    if pieces.runs is not None:
        fields |= {"tokens_stop": pieces.runs.tokens_stop, "runs": pieces.runs.run}
    bad_tokens = _tokens_of_source(pieces, bad)
    count = num_microbatches // (pieces.num_replicas * num_steps)
    rows: list[dict[str, NDArray[Any]]] = [{}] * len(num_masked)
    if filled.others:
        rows = cut_rows(arrays_of_rows(filled.others, pieces, length), range(0, num_microbatches + 1, count))
    shape = (num_steps * count, size, length) if pieces.runs is None else (-1,)
    sequences: list[dict[str, NDArray[Any]]] = [{}] * pieces.num_replicas
    if outs is not None:
        sequences = [
            {name: field.reshape(shape) for name, field in zip(SEQUENCE_FIELDS, out, strict=True)} for out in outs
        ]
    return [
        BlockArrays(
            steps=[
                StepFacts(
                    step=step,
                    num_tokens_global=pieces.num_tokens_global[k],
                    num_masked_tokens=int(num_masked[replica * num_steps + k]),
                    bad_tokens=bad_tokens.get(replica * num_steps + k),
                    rows=rows[replica * num_steps + k],
                )
                for k, step in enumerate(pieces.steps)
            ],
            fields={
                **of_tokens,
                **cut_fields(fields, replica * num_steps * count, (replica + 1) * num_steps * count),
            },
        )
        for replica, of_tokens in enumerate(sequences)
    ]


def build(
    pieces: BlockPieces,
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
    """Every field of one replica's step, from values; what is not named here is as in `build_block`.

    Args:
        pieces: Of one step of one replica.
        values: [N] token ids of any integer dtype, each piece at its place; values in padding are arbitrary. `build`
            keeps no reference.
        successors: [n] the token that follows each piece in its document; arbitrary where the document ends.
        unlabelled: Places of the N tokens that have no label, because no model is trained on the next token; None: all
            have one.
        memory: Lends memory to the sequence fields; fresh memory if None.
    """
    wanted = pieces.wanted(length)
    assert len(values) == wanted.num_places, "a value per token, padding included"
    outs = memory_of_block(pieces, [memory or StepMemory()], length)
    write_padding(wanted, outs)
    blank = fill_from(wanted, Tokens(values=values, successors=successors), ~pieces.ends_document, outs)
    filled = Filled(blank=blank, unlabelled=unlabelled)
    [block] = build_block(pieces, outs, filled, length=length, packing=packing, reset_ids=reset_ids, masked=masked)
    return block.step(0)


def _resets(
    outs: Sequence[Filling],
    pieces: BlockPieces,
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
        resets = find_resets([out.tokens for out in outs], start, pieces.tokens, id_of_piece)
    align_tokens = packing.align_tokens if packing.method != "concat" else 1
    padded_tokens = -(-pieces.tokens // align_tokens) * align_tokens
    return resets, cut_pieces(start, pieces.tokens, padded_tokens, resets)


def _spans(pieces: BlockPieces, parts: CutPieces, length: int, packing: Packing, tokens_stop: Int64Array) -> Spans:
    if resets_positions(packing):
        source, zeros = pieces.source[parts.piece], np.zeros_like(parts.start)
        return spans_of_pieces(parts.start, parts.tokens, zeros, source, tokens_stop=tokens_stop)
    offset = pieces.sample_offset
    return spans_of_pieces(pieces.places(length), pieces.tokens, offset, pieces.source, tokens_stop=tokens_stop)


def _mask(outs: Sequence[Filling], places: Int64Array, num_masked: Int64Array, step_tokens: int) -> None:
    """Remove the labels at some places; counts how many of these places had a label, by replica and step."""
    first = 0
    for out in outs:
        mine = places[(places >= first) & (places < first + len(out.labels))]
        had_one = mine[out.labels[mine - first] != NO_LOSS]
        out.labels[mine - first] = NO_LOSS
        np.add.at(num_masked, had_one // step_tokens, 1)
        first += len(out.labels)


def _check_masked(blank: Sequence[BlankPiece], pieces: BlockPieces, masked: Collection[str]) -> None:
    """Raise a CorruptPage for the first blank piece whose source is not masked."""
    for i, place, value in blank:
        if masked and pieces.source_names[int(pieces.source[i])] in masked:
            continue
        raise CorruptPage(
            f"source {pieces.source_name(i)}: row {pieces.row[i]} has {value} as token {pieces.start[i] + place} "
            f"of its document; token ids are 0 to {MOST_ID}. Write the file again, then run torchmix index"
        )


def _tokens_of_source(pieces: BlockPieces, chosen: Int64Array) -> dict[int, Int64Array]:
    """[S] tokens of some pieces, by source; by replica and step, of those that have some."""
    found: dict[int, Int64Array] = {}
    number = pieces.sample[chosen] // pieces.num_samples
    for one in np.unique(number).tolist():
        mine = chosen[number == one]
        found[one] = np.zeros(len(pieces.source_names), np.int64)
        np.add.at(found[one], pieces.source[mine], pieces.tokens[mine])
    return found


def ranges(start: Int64Array, count: Int64Array) -> Int64Array:
    """The numbers of several ranges, end to end."""
    found: Int64Array = np.arange(count.sum()) + np.repeat(start - (np.cumsum(count) - count), count)
    return found


def _boundaries(pieces: BlockPieces, parts: CutPieces, length: int, packing: Packing) -> Boundaries:
    sizes = {"num_samples": pieces.total_samples, "length": length, "micro_batch_size": pieces.micro_batch_size}
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


def arrays_of_rows(others: Sequence[OtherRows], pieces: BlockPieces, length: int) -> dict[str, NDArray[Any]]:
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
    num_microbatches = pieces.total_samples // pieces.micro_batch_size
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
