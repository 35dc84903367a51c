"""What every rank must be handed, worked out without torchmix: from a plan's rows and whole files, token by token.

In: `pieces.parquet` (a row per piece; docs/formats.md), the data files, and the job's numbers. Out: for each rank its
microbatches, as plain dicts of numpy arrays. Nothing here is shared with the package, and nothing is clever: files are
read whole by pyarrow, samples are Python lists, slices are cut by hand. It is slow, and meant to be read.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

END_OF_DOCUMENT = 256


@dataclass(frozen=True, kw_only=True)
class Job:
    """The numbers of a job that say what a rank gets."""

    length: int
    boundaries: str
    method: str
    align_tokens: int
    micro_batch_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    positions: str | None = None
    """Where positions count from 0; None: as `boundaries`."""
    reset_ids: Mapping[str, int] = field(default_factory=dict)
    """The id that ends a document inside a row, of the sources that have one."""
    reset_loss: str = "mask"
    broadcast_at: str | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


class Document(NamedTuple):
    """The ids of a row, where more is to be said of them than that each is trained on."""

    ids: Sequence[int]
    has_loss: Sequence[bool]
    """Whether a model is trained to predict each of them."""
    images: Mapping[int, tuple[float, int]]
    """First token of each image -> a number that tells it apart, and its tokens."""


@dataclass(frozen=True)
class Token:
    """All that is known of one place in a sample; the defaults are padding."""

    token: int = 0
    label: int = 0
    loss_mask: float = 0.0
    position_id: int = 0
    source_index: int = -1
    image: tuple[float, float] = (0.0, 0.0)
    """The image that it is of, and its number in it, from 1."""


@dataclass(frozen=True)
class Segment:
    """Places that attention sees together, and how many of them are real."""

    places: list[Token]
    true_length: int


def read_indexed_documents(paths: Sequence[Path]) -> list[list[int]]:
    """Documents of Megatron datasets in order of path, of one sequence each: token by token from .bin and .idx."""
    letter_of_code = {1: "B", 4: "i", 8: "H"}
    documents = []
    for path in sorted(paths):
        index, content = path.with_suffix(".idx").read_bytes(), path.read_bytes()
        code, count = struct.unpack_from("<BQ", index, 17)
        for i in range(count):
            (length,) = struct.unpack_from("<i", index, 34 + 4 * i)
            (pointer,) = struct.unpack_from("<q", index, 34 + 4 * count + 8 * i)
            documents.append(list(struct.unpack_from(f"<{length}{letter_of_code[code]}", content, pointer)))
    return documents


def read_text_documents(paths: Sequence[Path], column: str) -> list[list[int]]:
    """Rows of all files in order of path: UTF-8 bytes and 256; a null row has no tokens."""
    rows = [row for path in sorted(paths) for row in pq.read_table(path)[column].to_pylist()]
    return [[] if row is None else [*row.encode(), END_OF_DOCUMENT] for row in rows]


def read_token_documents(paths: Sequence[Path], column: str) -> list[list[int]]:
    """Rows of all files in order of path, as they are; a null row has no tokens."""
    rows = [row for path in sorted(paths) for row in pq.read_table(path)[column].to_pylist()]
    return [[] if row is None else row for row in rows]


def read_line_documents(paths: Sequence[Path], key: str) -> list[list[int]]:
    """Lines of all files in order of path, by the standard library: texts as bytes and 256, lists as they are."""
    documents = []
    for path in sorted(paths):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        values = [json.loads(line)[key] for line in content.decode("utf-8-sig").split("\n") if line.strip()]
        for value in values:
            documents.append([*value.encode(), END_OF_DOCUMENT] if isinstance(value, str) else value or [])
    return documents


def read_arrow_documents(paths: Sequence[Path], column: str) -> list[list[int]]:
    """Rows of Arrow streams in order of path, as they are; a null row has no tokens."""
    rows = [row for path in sorted(paths) for row in pa.ipc.open_stream(path).read_all()[column].to_pylist()]
    return [[] if row is None else row for row in rows]


def expected_microbatches(
    pieces_file: Path, documents: Mapping[str, Sequence[Sequence[int]]], job: Job
) -> list[list[dict[str, Any]]]:
    """The microbatches of every rank of a plan on disk; see `microbatches_of_steps`.

    Args:
        pieces_file: `pieces.parquet`, planned for the job's dp and micro_batch_size.
        documents: Token ids of each row of each source.
        job: The job's numbers.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    for piece in pq.read_table(pieces_file).to_pylist():
        steps.setdefault(piece["step"], []).append(piece)
    whole = {name: [Document(ids, [True] * len(ids), {}) for ids in rows] for name, rows in documents.items()}
    found = [microbatches_of_step(pieces, whole, job) for _, pieces in sorted(steps.items())]
    return [[microbatch for step in found for microbatch in step[rank]] for rank in range(job.world_size)]


def microbatches_of_step(
    pieces: Sequence[Mapping[str, Any]],
    documents: Mapping[str, Sequence[Document]],
    job: Job,
    *,
    samples: Sequence[tuple[int, int]] | None = None,
    has_images: bool = False,
) -> list[list[dict[str, Any]]]:
    """The microbatches of every rank, by global rank, in the order in which it gets them.

    Args:
        pieces: Rows of `pieces.parquet` of one step, planned for the job's dp and micro_batch_size.
        documents: By sorted name of the sources of the plan.
        job: The job's numbers.
        samples: (dp_rank, microbatch) of each sample of the step; None: each has a piece, which says so.
        has_images: Whether `placed` is given, too: [micro_batch_size, length / cp, 2] image and number of each token.

    Returns:
        Dicts with tokens, labels, loss_mask, position_ids, source_index [micro_batch_size, length / cp] (None where the
        rank's stage does not need them), cu_seqlens, cu_seqlens_padded, max_seqlen, step, index, is_last_of_step and
        num_tokens_global.
    """
    if samples is None:
        place_of = {piece["sample"]: (piece["dp_rank"], piece["microbatch"]) for piece in pieces}
        samples = [place_of[sample] for sample in range(len(place_of))]
    count = 1 + max(microbatch for _, microbatch in samples)
    built: dict[tuple[int, int], list[list[Segment]]] = {}
    for sample, place in enumerate(samples):  # those of a microbatch are in ascending order of their number
        own = [piece for piece in pieces if piece["sample"] == sample]
        built.setdefault(place, []).append(segments_of(own, documents, job))
    assert all(len(segments_of_sample) == job.micro_batch_size for segments_of_sample in built.values())
    places = [p for row in built.values() for segments in row for segment in segments for p in segment.places]
    num_tokens_global = int(sum(place.loss_mask for place in places))
    ranks: list[list[dict[str, Any]]] = []
    for rank in range(job.world_size):
        rest, tp_rank = divmod(rank, job.tp)
        rest, cp_rank = divmod(rest, job.cp)
        pp_rank, dp_rank = divmod(rest, job.dp)
        is_told, whole = told_to(job, tp=tp_rank, cp=cp_rank, pp=pp_rank)
        ranks.append([])
        for index in range(count):
            fields = fields_of_rank(
                built[dp_rank, index], whole, cp_rank=cp_rank % whole.cp, pp_rank=pp_rank, has_images=has_images
            )
            ranks[-1].append(
                {
                    **(fields if is_told else dict.fromkeys(fields)),
                    **boundaries_of(built[dp_rank, index]),
                    "step": pieces[0]["step"],
                    "index": index,
                    "is_last_of_step": index + 1 == count,
                    "num_tokens_global": num_tokens_global,
                }
            )
    return ranks


def told_to(job: Job, **place: int) -> tuple[bool, Job]:
    """Whether a rank gets tokens and labels, and the job whose fields they are, where a trainer sends along an axis."""
    axis = (job.broadcast_at or "TP").lower()
    is_told = job.broadcast_at is None or place[axis] == 0
    return is_told, job if axis == "tp" else replace(job, **{axis: 1})


def microbatches_of_runs(
    pieces: Sequence[Mapping[str, Any]],
    documents: Mapping[str, Sequence[Document]],
    job: Job,
    *,
    bins: Sequence[tuple[int, int, int]],
    bin_of_sample: Sequence[int],
    padded_tokens: Sequence[int],
) -> list[list[dict[str, Any]]]:
    """The microbatches of every rank of a step with runs of ranks, by global rank.

    Args:
        pieces: Rows of `pieces.parquet` of one step: a sample each.
        documents: By sorted name of the sources of the plan.
        job: The job's numbers; `align_tokens` is that of the runs.
        bins: (microbatch, first rank, ranks), by microbatch and first rank; ranks count replicas, then CP slices.
        bin_of_sample: The bin of each sample of the step.
        padded_tokens: Tokens of each sample in its bin.

    Returns:
        As `microbatches_of_step`, with `cp_ranks`.
    """
    built: list[list[Segment]] = [[] for _ in bins]
    for piece in sorted(pieces, key=lambda piece: piece["sample"]):
        sample = piece["sample"]
        alone = replace(job, length=piece["tokens"], align_tokens=1)
        [segment] = segments_of([piece], documents, alone)
        padding = [Token()] * (padded_tokens[sample] - piece["tokens"])
        built[bin_of_sample[sample]].append(Segment(segment.places + padding, segment.true_length))
    for segments, (_, _, size) in zip(built, bins, strict=True):
        if not segments:
            segments.append(Segment([Token()] * (job.align_tokens * (1 if size == 1 else 2 * size)), 0))
    num_tokens_global = int(sum(p.loss_mask for segments in built for segment in segments for p in segment.places))
    count = 1 + max(microbatch for microbatch, _, _ in bins)
    found: list[list[dict[str, Any]]] = []
    for rank in range(job.world_size):
        rest, tp_rank = divmod(rank, job.tp)
        pp_rank, place = divmod(rest, job.cp * job.dp)
        is_told, whole = told_to(job, tp=tp_rank, cp=0, pp=pp_rank)
        found.append([])
        for (index, first, size), segments in zip(bins, built, strict=True):
            if not first <= place < first + size:
                continue
            tokens = sum(len(segment.places) for segment in segments)
            in_run = replace(whole, length=tokens, cp=size)
            fields = fields_of_rank([segments], in_run, cp_rank=place - first, pp_rank=pp_rank)
            found[-1].append(
                {
                    **(fields if is_told else dict.fromkeys(fields)),
                    **boundaries_of([segments]),
                    "step": pieces[0]["step"],
                    "index": index,
                    "is_last_of_step": index + 1 == count,
                    "num_tokens_global": num_tokens_global,
                    "cp_ranks": range(first, first + size),
                }
            )
    return found


def segments_of(
    pieces: Sequence[Mapping[str, Any]], documents: Mapping[str, Sequence[Document]], job: Job
) -> list[Segment]:
    """One sample, place by place."""
    segments = []
    used = 0
    for piece in sorted(pieces, key=lambda piece: piece["slot"]):
        document = documents[piece["source"]][piece["row"]]
        assert piece["sample_offset"] == used
        assert piece["start"] + piece["tokens"] <= len(document.ids)
        stop = piece["start"] + piece["tokens"]  # an image that lies across an end of the piece is left out
        image_of = {
            first + i: (code, i + 1.0)
            for first, (code, count) in document.images.items()
            if piece["start"] <= first <= stop - count
            for i in range(count)
        }
        counts_from_document = (job.positions or job.boundaries) == "document"
        parts: list[list[Token]] = [[]]
        for i in range(piece["tokens"]):
            here = piece["start"] + i
            token, follows = document.ids[here], here + 1 < len(document.ids)
            is_reset = token == job.reset_ids.get(piece["source"])
            has_label = follows and document.has_loss[here + 1] and not (is_reset and job.reset_loss == "mask")
            parts[-1].append(
                Token(
                    token=token,
                    label=document.ids[here + 1] if has_label else 0,
                    loss_mask=float(has_label),
                    position_id=len(parts[-1]) if counts_from_document else used + i,
                    source_index=sorted(documents).index(piece["source"]),
                    image=image_of.get(here, (0.0, 0.0)),
                )
            )
            if is_reset and i + 1 < piece["tokens"]:
                parts.append([])
        true_lengths = [len(part) for part in parts]
        while job.method != "concat" and sum(map(len, parts)) % job.align_tokens != 0:
            parts[-1].append(Token())
        segments += [Segment(part, length) for part, length in zip(parts, true_lengths, strict=True)]
        used += sum(map(len, parts))
    assert used <= job.length
    if used < job.length:
        segments.append(Segment([Token()] * (job.length - used), 0))
    if job.boundaries == "none":
        return [Segment([place for segment in segments for place in segment.places], job.length)]
    return segments


def boundaries_of(segments_of_sample: Sequence[Sequence[Segment]]) -> dict[str, Any]:
    """The boundaries of a microbatch; every rank has them whole."""
    true_sums, padded_sums = [0], [0]
    for segments in segments_of_sample:
        for segment in segments:
            true_sums.append(true_sums[-1] + segment.true_length)
            padded_sums.append(padded_sums[-1] + len(segment.places))
    return {
        "cu_seqlens": np.array(true_sums, np.int32),
        "cu_seqlens_padded": np.array(padded_sums, np.int32),
        "max_seqlen": max(len(segment.places) for segments in segments_of_sample for segment in segments),
    }


def fields_of_rank(
    segments_of_sample: Sequence[Sequence[Segment]], job: Job, *, cp_rank: int, pp_rank: int, has_images: bool = False
) -> dict[str, Any]:
    """The fields of a rank: its stage's, of its slice of each sample."""
    rows = []
    for segments in segments_of_sample:
        if job.method != "concat" and job.boundaries == "document":
            row = [place for segment in segments for place in slice_of(segment.places, job.cp, cp_rank)]
        else:
            row = slice_of([place for segment in segments for place in segment.places], job.cp, cp_rank)
        assert len(row) == job.length // job.cp
        rows.append(row)
    is_first, is_last = pp_rank == 0, pp_rank == job.pp - 1
    placed = {}
    if has_images:
        placed = {"placed": np.array([[p.image for p in row] for row in rows]) if is_first else None}
    return {
        **placed,
        "tokens": np.array([[p.token for p in row] for row in rows], np.int64) if is_first else None,
        "position_ids": np.array([[p.position_id for p in row] for row in rows], np.int64) if is_first else None,
        "labels": np.array([[p.label for p in row] for row in rows], np.int64) if is_last else None,
        "loss_mask": np.array([[p.loss_mask for p in row] for row in rows], np.float32) if is_last else None,
        "source_index": np.array([[p.source_index for p in row] for row in rows], np.int32) if is_last else None,
    }


def slice_of(places: list[Token], cp: int, cp_rank: int) -> list[Token]:
    """One rank's part of a stretch: of 2 * cp equal parts, its own from the front and its own from the back."""
    if cp == 1:
        return places
    assert len(places) % (2 * cp) == 0
    size = len(places) // (2 * cp)
    parts = [places[i * size : (i + 1) * size] for i in range(2 * cp)]
    return parts[cp_rank] + list(reversed(parts))[cp_rank]
