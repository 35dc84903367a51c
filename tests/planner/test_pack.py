from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.pieces import name_hashes, pieces_of
from torchmix.planner.pack import (
    Packed,
    Pieces,
    aligned,
    best_fit,
    concat,
    fill,
    piece_hashes,
    renumber,
    sample_numbers,
    split_long,
)

STEP = 50


def random_ties(rng: random.Random, count: int) -> np.ndarray:
    """Hashes that differ in their high bits: low ones may be dropped to make room for lengths."""
    return np.array(rng.sample(range(1 << 14), count), np.uint64) << np.uint64(50)


def rows(pieces: Pieces) -> list[tuple[int, ...]]:
    names = [name for name in pieces.__struct_fields__ if name != "stream"]
    return list(zip(*(getattr(pieces, name).tolist() for name in names), strict=True))


@dataclass
class Case:
    """One call of `best_fit`, in units of `align_tokens`."""

    pool_units: list[int]
    pool_ages: list[int]
    new_units: list[int]
    num_samples: int
    unit_capacity: int
    align_tokens: int
    seed: int

    def pack(self, numbers: np.ndarray | None = None) -> tuple[Packed, Pieces, np.ndarray]:
        rng = random.Random(self.seed)
        # Lengths lie anywhere in their last unit.
        spread = [
            units * self.align_tokens - rng.randrange(self.align_tokens) for units in self.pool_units + self.new_units
        ]
        pool = pieces_of(spread[: len(self.pool_units)], drawn_step=[STEP - age for age in self.pool_ages])
        new = pieces_of(spread[len(self.pool_units) :], drawn_step=STEP, first_row=len(pool))
        tie = random_ties(rng, len(pool) + len(new)) if self.seed % 5 else np.zeros(len(pool) + len(new), np.uint64)
        packed = best_fit(
            Pieces.concatenate([pool, new]),
            len(pool),
            tie,
            num_samples=self.num_samples,
            length=self.unit_capacity * self.align_tokens,
            align_tokens=self.align_tokens,
            step=STEP,
            number_of_sample=numbers,
        )
        return packed, Pieces.concatenate([pool, new]), tie


def random_case(seed: int) -> Case:
    """Lengths that are awkward for best fit: ties, halves, thirds, whole samples, single units, skewed ones."""
    rng = random.Random(seed)
    unit_capacity = rng.choice([1, 2, 7, 16, 60, 128])
    half, third = unit_capacity // 2 + 1, unit_capacity // 3 + 1
    kinds = {
        "any": range(1, unit_capacity + 1),
        "few": [rng.randint(1, unit_capacity) for _ in range(3)],
        "above half": range(half, unit_capacity + 1),
        "about a third": [third, third, max(third - 1, 1)],
        "whole or one": [unit_capacity, 1],
        "short": range(1, max(unit_capacity // 8, 1) + 1),
        "skewed": [1, 1, 1, 1, 2, 2, 3, third, half, unit_capacity],
    }
    num_samples = rng.choice([1, 2, 5, 16, 40])
    wanted = num_samples * unit_capacity * rng.choice([0.3, 0.95, 1.0, 1.02, 1.2, 1.6])
    units: list[int] = []
    while sum(units) < wanted:
        lengths = kinds[rng.choice(list(kinds))]
        units += [min(rng.choice(lengths), unit_capacity) for _ in range(rng.randint(1, 12))]
    rng.shuffle(units)
    pooled = rng.choice([0, 0, len(units) // 10, len(units) // 2, len(units)])
    ages = [rng.choice([1, 1, 1, 2, 3, 4, 9]) for _ in range(pooled)]
    return Case(units[:pooled], ages, units[pooled:], num_samples, unit_capacity, rng.choice([1, 8, 24]), seed)


CASES = [random_case(seed) for seed in range(400)]


def slow_best_fit(case: Case, pieces: Pieces, tie: np.ndarray) -> tuple[dict[int, int], list[int]]:
    """The rule, one piece at a time: (sample of each placed piece, pieces left over in order)."""
    units = case.pool_units + case.new_units
    hashes, num_pool = tie.tolist(), len(case.pool_units)
    surplus = sum(units) - case.num_samples * case.unit_capacity
    held: set[int] = set()
    for piece in sorted(range(num_pool, len(units)), key=lambda piece: (hashes[piece], piece)):
        if sum(units[other] for other in held) + units[piece] > surplus:
            break
        held.add(piece)
    ages = [min(age, 3) for age in case.pool_ages] + [0] * len(case.new_units)
    ready = [piece for piece in range(len(units)) if piece not in held]
    ready.sort(key=lambda piece: (-ages[piece], -units[piece], hashes[piece], piece))
    room = [case.unit_capacity] * case.num_samples
    sample_of: dict[int, int] = {}
    for piece in ready:
        fitting = [sample for sample in range(case.num_samples) if room[sample] >= units[piece]]
        if fitting:
            sample = min(fitting, key=lambda sample: (room[sample], sample))
            room[sample] -= units[piece]
            sample_of[piece] = sample
    return sample_of, [piece for piece in range(len(units)) if piece not in sample_of]


def test_best_fit_places_every_piece_where_least_room_is_left_one_by_one():
    some_unplaced = 0
    for case in CASES:
        packed, pieces, tie = case.pack()
        sample_of, left = slow_best_fit(case, pieces, tie)
        hashes = tie.tolist()
        expected = sorted(sample_of, key=lambda piece: (sample_of[piece], hashes[piece], piece))
        assert packed.pieces.row.tolist() == expected, case
        assert packed.sample.tolist() == [sample_of[piece] for piece in expected], case
        assert packed.pool.row.tolist() == left, case
        some_unplaced += bool(left)
    assert some_unplaced > 100, "the cases are too easy"


def check_packed(packed: Packed, pieces: Pieces, *, num_samples: int, length: int, align_tokens: int) -> None:
    """What holds of any packing: nothing lost, nothing over capacity, pieces beside each other in slot order."""
    assert sorted(rows(packed.pieces) + rows(packed.pool)) == sorted(rows(pieces))
    assert np.all(np.diff(packed.sample) >= 0)
    assert len(packed.sample) == 0 or (packed.sample[0] >= 0 and packed.sample[-1] < num_samples)
    for sample in np.unique(packed.sample).tolist():
        inside = packed.sample == sample
        assert packed.slot[inside].tolist() == list(range(np.count_nonzero(inside)))
        starts = packed.sample_offset[inside].tolist()
        stop = 0
        for start, tokens in zip(starts, packed.pieces.tokens[inside].tolist(), strict=True):
            assert start == stop, "pieces overlap or leave a hole"
            stop = start + -(-tokens // align_tokens) * align_tokens
        assert stop <= length


def test_best_fit_loses_nothing_and_exceeds_no_sample():
    for case in CASES:
        packed, pieces, _ = case.pack()
        length = case.unit_capacity * case.align_tokens
        check_packed(packed, pieces, num_samples=case.num_samples, length=length, align_tokens=case.align_tokens)
        assert packed.sample_offset.dtype == packed.sample.dtype == packed.slot.dtype == np.int64


def test_best_fit_of_a_large_batch_is_the_same_rule():
    rng = random.Random(41)
    units = [max(1, min(512, int(2 ** rng.uniform(0, 9.2)))) for _ in range(900)]
    num_samples = sum(units) // 512
    case = Case(units[:90], [1 + i % 2 for i in range(90)], units[90:], num_samples, 512, 8, seed=1)
    packed, pieces, tie = case.pack()
    sample_of, left = slow_best_fit(case, pieces, tie)
    assert dict(zip(packed.pieces.row.tolist(), packed.sample.tolist(), strict=True)) == sample_of
    assert packed.pool.row.tolist() == left


def test_a_pool_of_at_most_half_a_batch_is_gone_in_one_step_whatever_comes_with_it():
    checked = 0
    for seed in range(400, 1000):
        case = random_case(seed)
        capacity = case.num_samples * case.unit_capacity
        while sum(case.pool_units) > capacity / 2:
            case.pool_units.pop()
            case.pool_ages.pop()
        if not case.pool_units:
            continue
        checked += 1
        packed, _, _ = case.pack()
        assert packed.pool.drawn_step.tolist() == [STEP] * len(packed.pool), case
    assert checked > 200


def test_if_any_piece_is_deferred_more_than_half_the_batch_is_delivered():
    for case in CASES:
        packed, _, _ = case.pack()
        # One sample alone may hold a short old piece and leave no room for a long new one.
        if len(packed.pool) and case.num_samples > 1:
            units = -(-packed.pieces.tokens // case.align_tokens)
            assert 2 * int(units.sum()) > case.num_samples * case.unit_capacity, case


def test_of_pieces_that_would_all_fit_alone_the_oldest_are_placed():
    # One sample of 10; every piece takes 6, so one of them is placed.
    for ages in ([1, 2, 3], [3, 2, 1], [2, 1, 2], [9, 3, 1]):
        case = Case([6, 6, 6], ages, [6, 6], 1, 10, 1, seed=3)
        packed, _, tie = case.pack()
        oldest = max(min(age, 3) for age in ages)
        first = min((i for i in range(3) if min(ages[i], 3) == oldest), key=lambda i: int(tie[i]))
        assert packed.pieces.row.tolist() == [first], ages


def test_the_surplus_is_held_back_by_hash_and_not_by_length():
    # Single units pack without loss: exactly the surplus stays, and it is the new pieces with the lowest hashes.
    case = Case([1] * 7, [1] * 7, [1] * 93, 9, 10, 8, seed=2)
    packed, _, tie = case.pack()
    by_hash = sorted(range(7, 100), key=lambda piece: int(tie[piece]))
    assert packed.pool.row.tolist() == sorted(by_hash[:10])


def test_a_pool_that_is_itself_more_than_the_batch_is_worked_off_oldest_first():
    units = [10] * 20
    ages = [1 + i % 4 for i in range(20)]
    packed, _, _ = Case(units, ages, [10] * 3, 5, 10, 1, seed=7).pack()
    # Five of age 3 and five of age 4 are one class; younger ones and new ones wait.
    assert set((STEP - packed.pieces.drawn_step).tolist()) <= {3, 4}
    assert len(packed.pieces) == 5 and len(packed.pool) == 18


def test_documents_are_split_into_whole_samples_and_a_rest():
    lengths = [1, 99, 100, 101, 200, 250, 1000, 5]
    pieces = replace(pieces_of(lengths, source=2), epoch=np.arange(8))
    parts = split_long(pieces, np.full(len(pieces), 100))
    expected = []
    for row, tokens in enumerate(lengths):
        for start in range(0, tokens, 100):
            expected.append((2, row, row, start, min(100, tokens - start), 0, tokens))
    assert rows(parts) == expected


def test_documents_that_fit_are_not_copied_and_none_stay_none():
    pieces = pieces_of([100, 3, 99])
    assert split_long(pieces, np.full(len(pieces), 100)) is pieces
    assert len(split_long(Pieces.empty(), np.zeros(0, np.int64))) == 0


def test_lengths_are_rounded_up_to_the_alignment():
    assert aligned(np.array([1, 7, 8, 9, 16, 17]), 8).tolist() == [8, 8, 8, 16, 16, 24]
    assert aligned(np.array([1, 7, 8]), 1).tolist() == [1, 7, 8]


def slow_concat(stream: list[tuple[int, ...]], num_samples: int, length: int) -> tuple[list, list]:
    """Fill sample after sample, token by token as it were: (sample, slot, offset, row, start, tokens), rest."""
    waiting = [(piece[2], piece[3], piece[4]) for piece in stream]
    placed = []
    for sample in range(num_samples):
        filled = slot = 0
        while filled < length:
            row, start, tokens = waiting.pop(0)
            taken = min(tokens, length - filled)
            placed.append((sample, slot, filled, row, start, taken))
            filled, slot = filled + taken, slot + 1
            if taken < tokens:
                waiting.insert(0, (row, start + taken, tokens - taken))
    return placed, waiting


STREAMS = {
    "any": lambda rng, length: rng.randint(1, 2 * length),
    "exactly a sample": lambda rng, length: length,
    "halves and wholes": lambda rng, length: rng.choice([length // 2, length, 2 * length]),
    "single tokens": lambda rng, length: 1,
    "longer than batches": lambda rng, length: rng.choice([1, 40 * length + 3]),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_concat_is_a_stream_cut_at_every_sample_over_many_steps(kind):
    rng = random.Random(43)
    for num_samples, length in ((1, 8), (3, 16), (7, 32)):
        pool, first_row = Pieces.empty(), 0
        for step in range(12):
            lengths = []
            while sum(lengths) + int(pool.tokens.sum()) < num_samples * length * rng.choice([1, 1, 1.5]):
                lengths.append(STREAMS[kind](rng, length))
            new = pieces_of(lengths, drawn_step=step, first_row=first_row)
            first_row += len(new)
            tie = random_ties(rng, len(new))
            packed = concat(pool, new, tie, num_samples=num_samples, length=length)
            by_hash = sorted(range(len(new)), key=lambda piece: int(tie[piece]))
            stream = rows(pool) + [rows(new)[piece] for piece in by_hash]
            placed, left = slow_concat(stream, num_samples, length)
            columns = (packed.sample, packed.slot, packed.sample_offset)
            columns += (packed.pieces.row, packed.pieces.start, packed.pieces.tokens)
            assert list(zip(*(column.tolist() for column in columns), strict=True)) == placed
            columns = (packed.pool.row, packed.pool.start, packed.pool.tokens)
            assert list(zip(*(column.tolist() for column in columns), strict=True)) == left
            whole = {row: (drawn, tokens) for _, _, row, _, _, drawn, tokens in stream}
            for _, _, row, _, _, drawn, tokens in rows(packed.pieces) + rows(packed.pool):
                assert (drawn, tokens) == whole[row]
            pool = packed.pool


def test_the_hash_of_a_piece_depends_on_its_name_place_step_and_seed_alone():
    pieces = replace(pieces_of([5, 6, 7], drawn_step=3), source=np.array([0, 1, 1]), epoch=np.array([0, 0, 4]))
    names = name_hashes(("a", "b"), pieces)
    hashes = piece_hashes(7, 9, names, pieces)
    # A source more, at another index, and what is known of the piece besides its place: no matter.
    moved = replace(pieces, source=np.array([1, 2, 2]), tokens=pieces.tokens + 1, drawn_step=pieces.drawn_step + 1)
    assert np.array_equal(piece_hashes(7, 9, name_hashes(("0", "a", "b"), moved), moved), hashes)
    others = [
        piece_hashes(8, 9, names, pieces),
        piece_hashes(7, 10, names, pieces),
        piece_hashes(7, 9, name_hashes(("b", "a"), pieces), pieces),
    ]
    for column in ("epoch", "row", "start"):
        others.append(piece_hashes(7, 9, names, replace(pieces, **{column: getattr(pieces, column) + 1})))
    for other in others:
        assert not np.any(other == hashes)


def test_samples_are_renumbered_without_a_trace_of_their_lengths():
    packed, _, _ = Case([], [], [32] * 64 + [4] * 512, 64, 64, 1, seed=1).pack()
    renumbered = renumber(packed, sample_numbers(seed=3, step=8, num_samples=64))
    before: dict[int, list] = {}
    after: dict[int, list] = {}
    for made, samples in ((packed, before), (renumbered, after)):
        columns = (made.slot.tolist(), made.sample_offset.tolist(), rows(made.pieces))
        for sample, *piece in zip(made.sample.tolist(), *columns, strict=True):
            samples.setdefault(sample, []).append(piece)
    assert sorted(after) == list(range(64))
    assert sorted(before.values()) == sorted(after.values())
    assert list(before.values()) != list(after.values())
    assert np.all(np.diff(renumbered.sample) >= 0)
    assert renumbered.pool is packed.pool
    # Long pieces fill the first half as packed; afterwards they are anywhere.
    has_long = np.array([any(piece[2][4] == 32 for piece in after[sample]) for sample in range(64)])
    assert np.count_nonzero(has_long) == 32
    assert 9 <= np.count_nonzero(has_long[:32]) <= 23
    other = renumber(packed, sample_numbers(seed=3, step=9, num_samples=64))
    assert other.pieces.row.tolist() != renumbered.pieces.row.tolist()


def test_samples_that_are_numbered_as_they_are_packed_are_those_numbered_afterwards():
    for seed in range(40):
        case = random_case(seed)
        numbers = sample_numbers(seed=seed, step=STEP, num_samples=case.num_samples)
        at_once, afterwards = case.pack(numbers)[0], renumber(case.pack()[0], numbers)
        for name in ("sample", "slot", "sample_offset"):
            assert np.array_equal(getattr(at_once, name), getattr(afterwards, name)), (seed, name)
        assert rows(at_once.pieces) == rows(afterwards.pieces)
        assert rows(at_once.pool) == rows(afterwards.pool)


@pytest.mark.parametrize("seed", range(40))
def test_whole_pieces_lie_as_if_alone_and_the_others_fill_all_that_they_leave(seed: int) -> None:
    case = random_case(seed)
    alone, whole, tie = case.pack(numbers := np.random.default_rng(seed).permutation(case.num_samples))
    rng = random.Random(seed)
    align, length = case.align_tokens, case.unit_capacity * case.align_tokens
    cut = pieces_of([rng.randint(1, 3 * length) for _ in range(rng.randint(1, 9))], drawn_step=STEP, first_row=10**6)
    both, num_deferred = Pieces.concatenate([whole, cut]), len(case.pool_units)
    packed = fill(
        both,
        np.arange(len(both)) >= len(whole),
        num_deferred,
        np.concatenate([tie, random_ties(rng, len(cut))]),
        hashes=lambda parts: parts.start.astype(np.uint64) << np.uint64(40),
        num_samples=case.num_samples,
        length=length,
        align_tokens=align,
        step=STEP,
        number_of_sample=numbers,
    )
    is_cut = packed.pieces.row >= 10**6

    def placed(packed: Packed, mine: np.ndarray) -> list[tuple[int, int]]:
        return sorted(zip(packed.pieces.row[mine].tolist(), packed.sample[mine].tolist(), strict=True))

    assert placed(packed, ~is_cut) == placed(alone, np.ones(len(alone.pieces), np.bool_))
    assert rows(packed.pool)[: len(alone.pool)] == rows(alone.pool)
    units = -(-packed.pieces.tokens // align)
    used = np.bincount(packed.sample, units, case.num_samples)
    waits = packed.pool.row >= 10**6
    assert used.max(initial=0) <= case.unit_capacity
    assert not waits.any() or used.min() == case.unit_capacity, "what waits has filled every sample"
    spans = sorted(
        zip(
            *(
                getattr(Pieces.concatenate([packed.pieces, packed.pool]), name).tolist()
                for name in ("row", "start", "tokens")
            ),
            strict=True,
        )
    )
    found = {row: 0 for row, _, _ in spans}
    for row, start, tokens in spans:
        assert start == found[row], "parts follow each other"
        found[row] += tokens
    assert [found[row] for row in both.row.tolist()] == both.tokens.tolist()
    ends = packed.sample_offset + units * align
    follows = np.flatnonzero(np.diff(packed.sample) == 0)
    assert (packed.sample_offset[follows + 1] == ends[follows]).all()
    assert (packed.sample_offset % align == 0).all()
