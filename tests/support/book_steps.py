"""The step of docs/formats.md, written again from its text: draw, pack, renumber, digest.

In: a job's numbers and the sizes of its sources. Out: one `BookStep` after another, as plain values. Like `book_order`
it shares nothing with the package: an independent planner, slow and short, for jobs of a few hundred documents.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tests.support.book_contexts import BookRuns, placed_in_runs
from tests.support.book_draw import Place, draw, draw_documents, joined
from tests.support.book_jobs import BookJob, Piece, name_hash
from tests.support.book_order import BookSource, keyed_order, named_key
from tests.support.book_pack import Row, best_fit, concat, pad, whole
from tests.support.book_placement import cost_of_step, costs_of_samples, placed_by_number, placed_by_rows, plan_digest
from tests.support.book_streams import BookStream, stream_of


@dataclass(frozen=True, kw_only=True)
class BookStep:
    """One step; pieces are in the order of (sample, slot)."""

    step: int
    rows: list[Row]
    pool: list[Piece]
    asked: dict[str, int]
    drawn: list[Piece]
    decisions: list[list[int | str]]
    """[step, name] of each source that has run out, up to and with this step."""
    num_tokens_global: int
    place_of_sample: list[tuple[int, int]]
    """(dp_rank, microbatch)."""
    cost: int
    hash_order_cost: int
    lower_bound: int
    order_digest: str
    plan_digest: str

    def vector(self) -> dict[str, Any]:
        """As the step stands in docs/vectors.json."""
        pieces = [[sample, slot, offset, *piece[1:]] for sample, slot, offset, piece in self.rows]
        return {
            "step": self.step,
            "pieces": pieces,
            "stream_of_piece": [piece.stream for _, _, _, piece in self.rows],
            "dp_rank_of_sample": [rank for rank, _ in self.place_of_sample],
            "microbatch_of_sample": [microbatch for _, microbatch in self.place_of_sample],
            "asked_tokens": list(self.asked.values()),
            "drawn_tokens": self.by_stream(self.drawn),
            "delivered_tokens": self.by_stream([piece for _, _, _, piece in self.rows]),
            "pool_tokens": self.by_stream(self.pool),
            "num_tokens_global": self.num_tokens_global,
            "cost": self.cost,
            "hash_order_cost": self.hash_order_cost,
            "lower_bound": self.lower_bound,
            "order_digest": self.order_digest,
            "plan_digest": self.plan_digest,
        }

    def by_stream(self, pieces: list[Piece]) -> list[int]:
        """Tokens of each stream."""
        sums = dict.fromkeys(self.asked, 0)
        for piece in pieces:
            sums[piece.stream] += piece.tokens
        return list(sums.values())


def steps(job: BookJob, given: Mapping[str, BookSource | BookStream]) -> Iterator[BookStep]:
    """The steps of a job, from 0 on; a source that is given is a stream."""
    streams = {name: stream_of(one) if isinstance(one, BookSource) else one for name, one in given.items()}
    lengths = {source: stream.rows.tokens[i] for stream in streams.values() for i, source in enumerate(stream.places)}
    names = sorted(streams)
    places = {name: Place() for name in names}
    fractions = dict(job.shares)
    pool: list[Piece] = []
    raw = aligned = 1
    decisions: list[list[int | str]] = []
    digest = hashlib.sha256(b"torchmix-order-1").digest()[:8]
    step = 0
    while True:
        asked = dict.fromkeys(names, 0)
        new: list[Piece] = []
        unit = 1 if job.method in ("concat", "whole") else job.align_tokens
        samples, length = job.samples(step), job.length_of(step)
        capacity = samples * length
        least = 0
        while job.method == "pad" and len(new) < samples and (any(fractions.values()) or not job.one_pass):
            found = draw_documents(job, streams, places, fractions, samples - len(new), step)
            places, new = found.places, new + found.pieces
            for name in names:
                asked[name] += found.asked[name]
            for name in found.ran_out:
                fractions[name] = Fraction(0)
                decisions.append([step, name])
        while job.method != "pad" and (have := aligned_tokens(pool + new, unit)) < capacity:
            if job.one_pass and not any(fractions.values()):
                break
            need = max(capacity - have, least)
            ask = max(1, -(-need * raw // aligned))
            while True:
                found = draw(job, streams, places, fractions, ask, step)
                tokens, units = sum(piece.tokens for piece in found.pieces), aligned_tokens(found.pieces, unit)
                if units - max(tokens, need) <= capacity // 4:
                    break
                less = need * tokens // units
                if not 1 <= less < ask:
                    break
                ask = less
            raw, aligned = raw + tokens, aligned + units
            while aligned > 2**40:
                raw, aligned = raw // 2, aligned // 2
            places = found.places
            new += found.pieces
            for name in names:
                asked[name] += found.asked[name]
            for name in found.ran_out:
                fractions[name] = Fraction(0)
                decisions.append([step, name])
            least = length
        if not pool + new:
            return
        new = joined(sorted(new, key=lambda piece: piece.stream))  # stable: each stream's own order stays
        if job.method == "pad":
            placed, pool = pad(job, new, step)
        elif job.method == "concat":
            placed, pool = concat(job, pool, new, step)
        elif job.method == "whole":
            placed, pool = whole(job, pool, new, step)
            samples = len(placed)
        else:
            placed, pool = best_fit(job, pool, new, step)
        number = {old: new for new, old in enumerate(keyed_order(named_key(job.seed, "samples", step), samples))}
        rows = sorted((number[sample], slot, offset, piece) for sample, slot, offset, piece in placed)
        message = digest + struct.pack("<q", step)
        for sample, slot, _, piece in rows:
            message += struct.pack("<qqQ", sample, slot, name_hash(piece.stream, piece.source))
            message += struct.pack("<qqqq", piece.epoch, piece.row, piece.start, piece.tokens)
        digest = hashlib.sha256(message).digest()[:8]
        ends = [piece.start + piece.tokens == lengths[piece.source, piece.row] for _, _, _, piece in rows]
        if job.runs is not None:
            yield _in_runs(job, job.runs, step, rows, pool, asked, new, decisions, sum(ends), digest)
            step += 1
            continue
        layout = (job.dp, job.micro_batch_size)
        samples += -samples % (job.dp * job.micro_batch_size)
        sizes = [(sample, piece.tokens) for sample, _, _, piece in rows]
        costs = costs_of_samples(job.cost, length, samples, sizes)
        placed_on, by_number = placed_by_rows(*layout, costs), placed_by_number(*layout, samples)
        if cost_of_step(costs, placed_on) > cost_of_step(costs, by_number):
            placed_on = by_number
        yield BookStep(
            step=step,
            rows=rows,
            pool=pool,
            asked=asked,
            drawn=new,
            decisions=list(decisions),
            num_tokens_global=sum(piece.tokens for _, _, _, piece in rows) - sum(ends),
            place_of_sample=placed_on,
            cost=cost_of_step(costs, placed_on),
            hash_order_cost=cost_of_step(costs, by_number),
            lower_bound=max(-(-sum(costs) // job.dp), *costs, 1),
            order_digest=digest.hex(),
            plan_digest=plan_digest(*layout, placed_on, digest),
        )
        step += 1


def _in_runs(
    job: BookJob,
    runs: BookRuns,
    step: int,
    rows: list[Row],
    pool: list[Piece],
    asked: dict[str, int],
    new: list[Piece],
    decisions: list[list[int | str]],
    num_ends: int,
    digest: bytes,
) -> BookStep:
    """The step of samples of any length."""
    tokens = [piece.tokens for _, _, _, piece in rows]
    placed = placed_in_runs(runs, tokens)
    cp = runs.ranks // job.dp
    of_sample = [placed.bins[number] for number in placed.bin_of_sample]
    return BookStep(
        step=step,
        rows=rows,
        pool=pool,
        asked=asked,
        drawn=new,
        decisions=list(decisions),
        num_tokens_global=sum(tokens) - num_ends,
        place_of_sample=[(rank // cp, microbatch) for microbatch, rank, _ in of_sample],
        cost=placed.cost,
        hash_order_cost=placed.by_number_cost,
        lower_bound=placed.lower_bound,
        order_digest=digest.hex(),
        plan_digest=placed.digest(digest, job.dp, cp),
    )


def aligned_tokens(pieces: list[Piece], unit: int) -> int:
    """Tokens of pieces, each rounded up to a multiple."""
    return sum(-(-piece.tokens // unit) * unit for piece in pieces)
