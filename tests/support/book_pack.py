"""How pieces become samples, written again from docs/formats.md; see `book_order`.

In: the pool and the new pieces of a step. Out: where each piece lies, and the next pool.
"""

from __future__ import annotations

from tests.support.book_jobs import BookJob, Piece, name_hash
from tests.support.book_order import hash_columns, keyed_order, named_key, order_by

Row = tuple[int, int, int, Piece]
"""Sample, slot, offset in the sample, piece."""


def piece_hash(job: BookJob, step: int, piece: Piece) -> int:
    key = named_key(job.seed, "pack", step)
    return hash_columns(key, name_hash(piece.stream, piece.source), piece.epoch, piece.row, piece.start)


def pad(job: BookJob, new: list[Piece], step: int) -> tuple[list[Row], list[Piece]]:
    """A sample for each piece."""
    return [(i, 0, 0, piece) for i, piece in enumerate(parts_of(job, new, step))], []


def parts_of(job: BookJob, stretches: list[Piece], step: int) -> list[Piece]:
    """Stretches split where a multiple of the longest tokens of their document ends."""
    parts = []
    for piece in stretches:
        start, stop, length = piece.start, piece.start + piece.tokens, job.longest_of(piece.source, step)
        while start < stop:
            end = min(stop, (start // length + 1) * length)
            parts.append(piece._replace(start=start, tokens=end - start))
            start = end
    return parts


def concat(job: BookJob, pool: list[Piece], new: list[Piece], step: int) -> tuple[list[Row], list[Piece]]:
    """Lay end to end, cut every `length` tokens."""
    order = order_by([0] * len(new), [piece_hash(job, step, piece) for piece in new], 0)
    stream, length = pool + [new[i] for i in order], job.length_of(step)
    placed: list[Row] = []
    sample = slot = used = 0
    while sample < job.samples(step) and stream:
        piece = stream.pop(0)
        tokens = min(piece.tokens, length - used)
        placed.append((sample, slot, used, piece._replace(tokens=tokens)))
        if tokens < piece.tokens:
            stream.insert(0, piece._replace(start=piece.start + tokens, tokens=piece.tokens - tokens))
        slot, used = slot + 1, used + tokens
        if used == length:
            sample, slot, used = sample + 1, 0, 0
    return placed, stream


def whole(job: BookJob, pool: list[Piece], new: list[Piece], step: int) -> tuple[list[Row], list[Piece]]:
    """A sample of its own length for each piece, oldest first, until they have as many tokens as a batch."""
    pieces = parts_of(job, pool, step) + parts_of(job, new, step)
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].drawn_step, piece_hash(job, step, pieces[i]), i))
    taken: list[int] = []
    while order and sum(pieces[i].tokens for i in taken) < job.samples(step) * job.length_of(step):
        taken.append(order.pop(0))
    placed = [(sample, 0, 0, pieces[i]) for sample, i in enumerate(taken)]
    return placed, [piece for i, piece in enumerate(pieces) if i not in taken]


def best_fit(job: BookJob, pool: list[Piece], new: list[Piece], step: int) -> tuple[list[Row], list[Piece]]:
    """Whole pieces where best fit puts them; then those of sources that are cut, in what is left, by number."""
    whole = [[piece for piece in pieces if piece.source not in job.cut] for pieces in (pool, new)]
    flows = [[piece for piece in pieces if piece.source in job.cut] for pieces in (pool, new)]
    placed, left = fitted(job, *whole, step)
    samples, align = job.samples(step), job.align_tokens
    room = [job.length_of(step)] * samples
    for sample, piece in placed:
        room[sample] -= -(-piece.tokens // align) * align
    waiting, new = with_what_goes_on(*flows)
    order = order_by([0] * len(new), [piece_hash(job, step, piece) for piece in new], 0)
    stream = waiting + [new[i] for i in order]
    for sample in keyed_order(named_key(job.seed, "samples", step), samples):
        while room[sample] and stream:
            piece = stream.pop(0)
            tokens = min(piece.tokens, room[sample])
            placed.append((sample, piece._replace(tokens=tokens)))
            room[sample] -= -(-tokens // align) * align
            if tokens < piece.tokens:
                stream.insert(0, piece._replace(start=piece.start + tokens, tokens=piece.tokens - tokens))
    return in_slots(job, placed, step), left + stream


def with_what_goes_on(pool: list[Piece], new: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The pool's stretches, each with the new one that begins where it ends; and the other new ones."""
    longer = {}
    for piece in new:
        for i, before in enumerate(pool):
            if before[:4] == piece[:4] and before.start + before.tokens == piece.start:
                longer[i] = piece
    waiting = [p._replace(tokens=p.tokens + longer[i].tokens) if i in longer else p for i, p in enumerate(pool)]
    return waiting, [piece for piece in new if piece not in longer.values()]


def fitted(job: BookJob, pool: list[Piece], new: list[Piece], step: int) -> tuple[list[tuple[int, Piece]], list[Piece]]:
    """Oldest class first, longest first, each where least room is left."""
    pool, parts = parts_of(job, pool, step), parts_of(job, new, step)
    pieces = pool + parts
    units = [-(-piece.tokens // job.align_tokens) for piece in pieces]
    room_of_sample = job.length_of(step) // job.align_tokens
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
    placed = [(sample_of[i], pieces[i]) for i in sorted(sample_of)]
    return placed, [piece for i, piece in enumerate(pieces) if i not in sample_of]


def in_slots(job: BookJob, placed: list[tuple[int, Piece]], step: int) -> list[Row]:
    """The pieces of a sample by hash, each at a multiple of `align_tokens`."""
    bits = max(1, (job.samples(step) - 1).bit_length())
    order = order_by([sample for sample, _ in placed], [piece_hash(job, step, piece) for _, piece in placed], bits)
    rows: list[Row] = []
    slots, offsets = [0] * job.samples(step), [0] * job.samples(step)
    for sample, piece in (placed[i] for i in order):
        rows.append((sample, slots[sample], offsets[sample], piece))
        slots[sample] += 1
        offsets[sample] += -(-piece.tokens // job.align_tokens) * job.align_tokens
    return rows
