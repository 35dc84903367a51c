"""The step of docs/formats.md, written again from its text: draw, pack, renumber, digest.

In: a job's numbers and the sizes of its sources. Out: one `BookStep` after another, as plain values. Like `book_order`
it shares nothing with the package: an independent planner, slow and short, for jobs of a few hundred documents.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from tests.support.book_order import BookSource, bound, hash_columns, integer_shares, keyed_order, named_key, order_by
from tests.support.book_placement import cost_of_step, costs_of_samples, placed_by_number, placed_by_rows, plan_digest


class Piece(NamedTuple):
    """A part of a document; `source` is its name."""

    source: str
    epoch: int
    row: int
    start: int
    tokens: int
    drawn_step: int


Row = tuple[int, int, int, Piece]
"""Sample, slot, offset in the sample, piece."""


@dataclass(frozen=True, kw_only=True)
class BookJob:
    """What the order depends on, and a layout."""

    seed: int
    ramp: Sequence[tuple[int, int]]
    """(from_step, samples) of each stage."""
    length: int
    method: str
    overflow: str
    align_tokens: int
    shares: Mapping[str, Fraction]
    max_epochs: Mapping[str, int] = field(default_factory=dict)
    """Of those sources that have one; they renormalise."""
    documents: Mapping[str, tuple[Fraction, Fraction]] = field(default_factory=dict)
    """Of those sources of which not all rows are used."""
    one_pass: bool = False
    """What is left when all sources have run out still makes steps."""
    dp: int = 1
    micro_batch_size: int = 1
    cost: tuple[int, int, int] = (1, 0, 0)
    """Per token, per pair of tokens of a piece, and per pair of tokens of a sample."""

    def samples(self, step: int) -> int:
        """Section "Ramp"."""
        return [samples for from_step, samples in self.ramp if from_step <= step][-1]


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
        pieces = [[sample, slot, offset, *piece] for sample, slot, offset, piece in self.rows]
        return {
            "step": self.step,
            "pieces": pieces,
            "dp_rank_of_sample": [rank for rank, _ in self.place_of_sample],
            "microbatch_of_sample": [microbatch for _, microbatch in self.place_of_sample],
            "asked_tokens": list(self.asked.values()),
            "drawn_tokens": self.by_source(self.drawn),
            "delivered_tokens": self.by_source([piece for _, _, _, piece in self.rows]),
            "pool_tokens": self.by_source(self.pool),
            "num_tokens_global": self.num_tokens_global,
            "cost": self.cost,
            "hash_order_cost": self.hash_order_cost,
            "lower_bound": self.lower_bound,
            "order_digest": self.order_digest,
            "plan_digest": self.plan_digest,
        }

    def by_source(self, pieces: list[Piece]) -> list[int]:
        """Tokens of each source."""
        sums = dict.fromkeys(self.asked, 0)
        for piece in pieces:
            sums[piece.source] += piece.tokens
        return list(sums.values())


@dataclass
class Place:
    """Where a source stands."""

    epoch: int = 0
    window: int = 0
    offset: int = 0
    debt: int = 0
    residue: int = 0


def name_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def steps(job: BookJob, sources: Mapping[str, BookSource]) -> Iterator[BookStep]:
    """The steps of a job, from 0 on."""
    names = sorted(sources)
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
        unit = 1 if job.method == "concat" else job.align_tokens
        samples = job.samples(step)
        capacity = samples * job.length
        least = 0
        while (have := aligned_tokens(pool + new, unit)) < capacity:
            if job.one_pass and not any(fractions.values()):
                break
            need = max(capacity - have, least)
            ask = max(1, -(-need * raw // aligned))
            while True:
                found = draw(job, sources, places, fractions, ask, step)
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
            least = job.length
        if not pool + new:
            return
        new = joined(sorted(new, key=lambda piece: piece.source))  # stable: each source's own order stays
        if job.method == "concat":
            placed, pool = concat(job, pool, new, step)
        else:
            placed, pool = best_fit(job, pool, new, step)
        number = {old: new for new, old in enumerate(keyed_order(named_key(job.seed, "samples", step), samples))}
        rows = sorted((number[sample], slot, offset, piece) for sample, slot, offset, piece in placed)
        message = digest + struct.pack("<q", step)
        for sample, slot, _, piece in rows:
            message += struct.pack("<qqQ", sample, slot, name_hash(piece.source))
            message += struct.pack("<qqqq", piece.epoch, piece.row, piece.start, piece.tokens)
        digest = hashlib.sha256(message).digest()[:8]
        layout = (job.dp, job.micro_batch_size)
        sizes = [(sample, piece.tokens) for sample, _, _, piece in rows]
        costs = costs_of_samples(job.cost, job.length, samples, sizes)
        placed_on = placed_by_rows(*layout, costs)
        whole = [piece.start + piece.tokens == sources[piece.source].tokens[piece.row] for _, _, _, piece in rows]
        yield BookStep(
            step=step,
            rows=rows,
            pool=pool,
            asked=asked,
            drawn=new,
            decisions=list(decisions),
            num_tokens_global=sum(piece.tokens for _, _, _, piece in rows) - sum(whole),
            place_of_sample=placed_on,
            cost=cost_of_step(costs, placed_on),
            hash_order_cost=cost_of_step(costs, placed_by_number(*layout, samples)),
            lower_bound=max(-(-sum(costs) // job.dp), *costs, 1),
            order_digest=digest.hex(),
            plan_digest=plan_digest(*layout, placed_on, digest),
        )
        step += 1


def aligned_tokens(pieces: list[Piece], unit: int) -> int:
    """Tokens of pieces, each rounded up to a multiple."""
    return sum(-(-piece.tokens // unit) * unit for piece in pieces)


class Found(NamedTuple):
    """What one draw gives, if it counts."""

    pieces: list[Piece]
    places: dict[str, Place]
    asked: dict[str, int]
    ran_out: list[str]


def draw(
    job: BookJob,
    sources: Mapping[str, BookSource],
    places: Mapping[str, Place],
    fractions: Mapping[str, Fraction],
    tokens: int,
    step: int,
) -> Found:
    """Draw so many tokens; moves nothing."""
    found = Found([], {name: replace(place) for name, place in places.items()}, dict.fromkeys(places, 0), [])
    shares = integer_shares(fractions)
    for name in places:
        charge = shares[name] * tokens
        taken, ran_out = draw_source(job, sources[name], found.places[name], charge, step, found.asked)
        found.pieces.extend(taken)
        if ran_out:
            found.ran_out.append(name)
    return found


def draw_source(
    job: BookJob, source: BookSource, place: Place, charge: int, step: int, asked: dict[str, int]
) -> tuple[list[Piece], bool]:
    """Pieces of one source in one draw, and whether it has run out. Moves `place`, adds to `asked`."""
    whole, place.residue = divmod(place.residue + charge, 2**32)
    asked[source.name] += whole
    place.debt += whole
    taken: list[Piece] = []
    while place.debt > 0 and charge:
        if place.epoch >= job.max_epochs.get(source.name, 2**62):
            place.debt = place.residue = 0
            return taken, True
        pieces = [
            (row, start, min(job.length, counted(job, source, row) - start))
            for row in source.window(job.seed, place.epoch, place.window)
            for start in range(0, max(1, counted(job, source, row)), job.length)
        ]
        while place.offset < len(pieces):
            row, start, tokens = pieces[place.offset]
            if tokens >= 2 * place.debt:
                return taken, False
            if tokens:
                taken.append(Piece(source.name, place.epoch, row, start, tokens, step))
            place.debt -= tokens
            place.offset += 1
        place.offset, place.window = 0, place.window + 1
        if place.window == source.num_windows:
            place.window, place.epoch = 0, place.epoch + 1
    return taken, False


def joined(pieces: list[Piece]) -> list[Piece]:
    """Stretches: pieces of one document that follow each other are one."""
    stretches: list[Piece] = []
    for piece in pieces:
        last = stretches[-1] if stretches else None
        if last and last[:3] == piece[:3] and piece.start and last.start + last.tokens == piece.start:
            stretches[-1] = last._replace(tokens=last.tokens + piece.tokens)
        else:
            stretches.append(piece)
    return stretches


def counted(job: BookJob, source: BookSource, row: int) -> int:
    """Tokens of a document that count, by the rows used and the overflow rule."""
    tokens, num_rows = source.tokens[row], len(source.tokens)
    start, stop = job.documents.get(source.name, (Fraction(0), Fraction(1)))
    if not bound(start, num_rows) <= row < bound(stop, num_rows):
        return 0
    if job.overflow == "truncate":
        return min(tokens, job.length)
    return 0 if job.overflow == "drop" and tokens > job.length else tokens


def piece_hash(job: BookJob, step: int, piece: Piece) -> int:
    key = named_key(job.seed, "pack", step)
    return hash_columns(key, name_hash(piece.source), piece.epoch, piece.row, piece.start)


def concat(job: BookJob, pool: list[Piece], new: list[Piece], step: int) -> tuple[list[Row], list[Piece]]:
    """Lay end to end, cut every `length` tokens."""
    order = order_by([0] * len(new), [piece_hash(job, step, piece) for piece in new], 0)
    stream = pool + [new[i] for i in order]
    placed: list[Row] = []
    sample = slot = used = 0
    while sample < job.samples(step) and stream:
        piece = stream.pop(0)
        tokens = min(piece.tokens, job.length - used)
        placed.append((sample, slot, used, piece._replace(tokens=tokens)))
        if tokens < piece.tokens:
            stream.insert(0, piece._replace(start=piece.start + tokens, tokens=piece.tokens - tokens))
        slot, used = slot + 1, used + tokens
        if used == job.length:
            sample, slot, used = sample + 1, 0, 0
    return placed, stream


def best_fit(job: BookJob, pool: list[Piece], new: list[Piece], step: int) -> tuple[list[Row], list[Piece]]:
    """Oldest class first, longest first, each where least room is left."""
    parts = [
        piece._replace(start=piece.start + done, tokens=min(job.length, piece.tokens - done))
        for piece in new
        for done in range(0, piece.tokens, job.length)
    ]
    pieces = pool + parts
    units = [-(-piece.tokens // job.align_tokens) for piece in pieces]
    room_of_sample = job.length // job.align_tokens
    tie = [piece_hash(job, step, piece) for piece in pieces]
    surplus = sum(units) - job.samples(step) * room_of_sample
    held: set[int] = set()
    for i in order_by([0] * len(parts), tie[len(pool) :], 0):
        surplus -= units[len(pool) + i]
        if surplus < 0:
            break
        held.add(len(pool) + i)
    ready = [i for i in range(len(pieces)) if i not in held]
    bits = room_of_sample.bit_length()
    major = [(3 - min(step - pieces[i].drawn_step, 3)) << bits | room_of_sample - units[i] for i in ready]
    room: list[int] = []  # of each sample that holds something
    sample_of: dict[int, int] = {}
    for r in order_by(major, [tie[i] for i in ready], 2 + bits):
        i = ready[r]
        fitting = [(left, sample) for sample, left in enumerate(room) if left >= units[i]]
        if fitting:
            sample_of[i] = min(fitting)[1]
        elif len(room) < job.samples(step):
            sample_of[i] = len(room)
            room.append(room_of_sample)
        else:
            continue
        room[sample_of[i]] -= units[i]
    chosen = sorted(sample_of)
    bits = max(1, (job.samples(step) - 1).bit_length())
    order = order_by([sample_of[i] for i in chosen], [tie[i] for i in chosen], bits)
    placed: list[Row] = []
    slots, offsets = [0] * job.samples(step), [0] * job.samples(step)
    for i in (chosen[c] for c in order):
        sample = sample_of[i]
        placed.append((sample, slots[sample], offsets[sample], pieces[i]))
        slots[sample] += 1
        offsets[sample] += units[i] * job.align_tokens
    return placed, [piece for i, piece in enumerate(pieces) if i not in sample_of]


def fraction(percent: str) -> Fraction:
    """A share as the recipe writes it."""
    return Fraction(percent.removesuffix("%")) / 100


def job_of_run(run: dict[str, Any]) -> BookJob:
    """The job of a run of docs/vectors.json."""
    model = run["model"]
    per_token = model["layers"] * (2 * model["hidden"] + 2 * model["hidden"] + 3 * model["ffn"])
    whole = run["boundaries"] == "none"  # then every sample costs the same
    return BookJob(
        seed=run["seed"],
        ramp=run["samples"] if isinstance(run["samples"], list) else [(0, run["samples"])],
        length=run["length"],
        method=run["method"],
        overflow=run["overflow"],
        align_tokens=run["align_tokens"],
        shares={name: Fraction(share) for name, share in run["shares"].items()},
        max_epochs=run["max_epochs"],
        documents={name: tuple(map(fraction, part)) for name, part in run.get("documents", {}).items()},
        one_pass=run.get("one_pass", False),
        dp=run["dp"],
        micro_batch_size=run["micro_batch_size"],
        cost=(per_token, *((0, model["layers"]) if whole else (model["layers"], 0))),
    )
