"""What a step of docs/formats.md draws, written again from its text; see `book_order`.

In: a job, its streams and where they stand. Out: pieces, and where the streams stand then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from tests.support.book_jobs import BookJob, Piece
from tests.support.book_order import bound, integer_shares
from tests.support.book_streams import BookStream


@dataclass
class Place:
    """Where a stream stands."""

    epoch: int = 0
    window: int = 0
    offset: int = 0
    debt: int = 0
    residue: int = 0


class Found(NamedTuple):
    """What one draw gives, if it counts."""

    pieces: list[Piece]
    places: dict[str, Place]
    asked: dict[str, int]
    ran_out: list[str]


def draw(
    job: BookJob,
    streams: Mapping[str, BookStream],
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
        taken, ran_out = draw_stream(job, streams[name], found.places[name], charge, step, found.asked)
        found.pieces.extend(taken)
        if ran_out:
            found.ran_out.append(name)
    return found


def draw_stream(
    job: BookJob, stream: BookStream, place: Place, charge: int, step: int, asked: dict[str, int]
) -> tuple[list[Piece], bool]:
    """Pieces of one stream in one draw, and whether it has run out. Moves `place`, adds to `asked`."""
    whole, place.residue = divmod(place.residue + charge, 2**32)
    asked[stream.name] += whole
    place.debt += whole
    taken: list[Piece] = []
    while place.debt > 0 and charge:
        if place.epoch >= job.max_epochs.get(stream.name, 2**62):
            place.debt = place.residue = 0
            return taken, True
        pieces = pieces_of_window(job, stream, place, step)
        longest = job.longest_of(stream.places[0][0], step)
        while place.offset < len(pieces):
            (row, start, tokens), count = given_together(pieces, place.offset, longest)
            if tokens >= 2 * place.debt:
                return taken, False
            if tokens:
                taken.append(Piece(stream.name, *at(stream, row, place.epoch), start, tokens, step))
            place.debt -= tokens
            place.offset += count
        place.offset, place.window = 0, place.window + 1
        if place.window == stream.num_windows:
            place.window, place.epoch = 0, place.epoch + 1
    return taken, False


def draw_documents(
    job: BookJob,
    streams: Mapping[str, BookStream],
    places: Mapping[str, Place],
    fractions: Mapping[str, Fraction],
    count: int,
    step: int,
) -> Found:
    """With `pad`: so many pieces, each from the stream that is owed most; fewer where that has run out."""
    found = Found([], {name: replace(place) for name, place in places.items()}, dict.fromkeys(places, 0), [])
    shares, owed, total = integer_shares(fractions), {}, 0
    for name, place in places.items():
        owed[name] = (place.debt << 32) + place.residue
    while len(found.pieces) < count and not found.ran_out:
        name = max((name for name in sorted(owed) if shares[name]), key=lambda name: owed[name])
        piece = next_piece(job, streams[name], found.places[name], step)
        if piece is None:
            found.ran_out.append(name)
            continue
        found.pieces.append(piece)
        total += piece.tokens
        owed = {each: debt + shares[each] * piece.tokens for each, debt in owed.items()}
        owed[name] -= piece.tokens << 32
    for name, place in found.places.items():
        found.asked[name] = (places[name].residue + shares[name] * total) >> 32
        place.debt, place.residue = divmod(0 if name in found.ran_out else owed[name], 2**32)
    return found


def next_piece(job: BookJob, stream: BookStream, place: Place, step: int) -> Piece | None:
    """The next piece with tokens, if there is one; moves `place`."""
    while place.epoch < job.max_epochs.get(stream.name, 2**62):
        pieces = pieces_of_window(job, stream, place, step)
        longest = job.longest_of(stream.places[0][0], step)
        while place.offset < len(pieces):
            (row, start, tokens), count = given_together(pieces, place.offset, longest)
            place.offset += count
            if tokens:
                return Piece(stream.name, *at(stream, row, place.epoch), start, tokens, step)
        place.offset, place.window = 0, place.window + 1
        if place.window == stream.num_windows:
            place.window, place.epoch = 0, place.epoch + 1
    return None


def pieces_of_window(job: BookJob, stream: BookStream, place: Place, step: int) -> list[tuple[int, int, int]]:
    """Row, start and tokens of each piece of the window in which a stream stands."""
    source = stream.places[0][0]
    most = job.longest_of(source, 0) if job.overflow_of(source) == "split" else 2**31
    return [
        (row, start, min(most, counted(job, stream, row, step) - start))
        for row in stream.window(job.seed, place.epoch, place.window)
        for start in range(0, max(1, counted(job, stream, row, step)), most)
    ]


def given_together(pieces: list[tuple[int, int, int]], first: int, longest: int) -> tuple[tuple[int, int, int], int]:
    """A piece with those of its document up to the next multiple of `longest` tokens; how many these are."""
    row, start, tokens = pieces[first]
    end, count = (start // longest + 1) * longest, 1
    for _, other, more in pieces[first + 1 :]:
        if not start < other < end:
            break
        tokens, count = tokens + more, count + 1
    return (row, start, tokens), count


def at(stream: BookStream, row: int, epoch: int) -> tuple[str, int, int]:
    """Source, epoch and row there, of a row of a stream."""
    source, number = stream.places[row]
    return source, epoch, number


def joined(pieces: list[Piece]) -> list[Piece]:
    """Stretches: pieces of one document that follow each other are one."""
    stretches: list[Piece] = []
    for piece in pieces:
        last = stretches[-1] if stretches else None
        if last and last[:4] == piece[:4] and piece.start and last.start + last.tokens == piece.start:
            stretches[-1] = last._replace(tokens=last.tokens + piece.tokens)
        else:
            stretches.append(piece)
    return stretches


def counted(job: BookJob, stream: BookStream, row: int, step: int) -> int:
    """Tokens of a document that count in a step, by the rows used and the overflow rule."""
    tokens, num_rows, source = stream.rows.tokens[row], len(stream.places), stream.places[row][0]
    start, stop = job.documents.get(stream.name, (Fraction(0), Fraction(1)))
    if not bound(start, num_rows) <= row < bound(stop, num_rows):
        return 0
    if job.overflow_of(source) == "truncate":
        return min(tokens, job.longest_of(source, step))
    return 0 if job.overflow_of(source) == "drop" and tokens > job.longest_of(source, step) else tokens
