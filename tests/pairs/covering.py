"""The rows of the matrix: few rows in which every pair of values stands that may stand together.

    python -m tests.pairs.covering
    python -m tests.pairs.covering --moves 300000

The first takes seconds. It keeps the rows of rows.jsonl that are valid, changes them where that brings pairs which no
row has yet, adds rows for the pairs that are left, and drops rows that became needless. The second also searches for
fewer rows: it takes a row away, and gives other rows other values until each pair stands again. Both give the same rows
from the same file and table.

A line of rows.jsonl has the values that are not a column's first one. Lines are sorted, so that two changes which add
rows seldom touch the same place.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.pairs.columns import BLOCKS, COLUMNS, DEFAULTS, Row, all_pairs, is_valid, pairs_of

PLACE = Path(__file__).with_name("rows.jsonl")
REAL = 10
"""Rows that are run with processes: as many as there are lives, and two of each mode that has processes."""
Pair = tuple[int, int]
"""The numbers of two values."""
CANDIDATES = 12
"""Rows that are tried for each one that is added."""
TEMPERATURE = 0.4
"""In pairs: a move that loses so many is kept once in e times."""
NEAR = 0.8
"""The part of the moves that change a row which has one of the two values."""

# A set of values is an int with a bit for each: what a row may still be, or, with one value of each column, a row.
VALUES = [(name, value) for name, values in COLUMNS.items() for value in values]
_NUMBER = {value: number for number, value in enumerate(VALUES)}
_OF_COLUMN = {name: sum(1 << _NUMBER[name, value] for value in values) for name, values in COLUMNS.items()}
_COLUMN_OF = [_OF_COLUMN[name] for name, _ in VALUES]
_ALL = sum(_OF_COLUMN.values())
_BLOCKS = [
    [(_OF_COLUMN[name], sum(1 << _NUMBER[name, value] for value in values)) for name, values in block.of.items()]
    for block in BLOCKS
]
_BLOCKS_OF = {column: [block for block in _BLOCKS if any(one == column for one, _ in block)] for column in _COLUMN_OF}


def _numbers(values: int) -> list[int]:
    found = []
    while values:
        low = values & -values
        found.append(low.bit_length() - 1)
        values ^= low
    return found


def _set_of(row: Row) -> int:
    return sum(1 << _NUMBER[name, value] for name, value in row.items())


def _row_of(values: int) -> Row:
    return dict(VALUES[number] for number in _numbers(values))


def _narrowed(values: int, number: int) -> int:
    """What a row may still be when it has a value; 0 where a block leaves a column nothing."""
    column = _COLUMN_OF[number]
    values = values & ~column | 1 << number
    waiting = [column]
    while waiting:
        for block in _BLOCKS_OF[waiting.pop()]:
            open_column, blocked = 0, 0
            for column, of in block:
                if values & column & ~of:
                    if open_column:
                        break
                    open_column, blocked = column, of
            else:
                if not open_column:
                    return 0
                if values & blocked:
                    values &= ~blocked
                    waiting.append(open_column)
    return values


def _with(values: int, numbers: Iterable[int]) -> int:
    """What a row may still be when it has some values; 0 where it cannot."""
    for number in numbers:
        values = values & 1 << number and _narrowed(values, number)
    return values


def _completed(values: int, order: list[int], sort: Callable[[list[int], int], None] | None = None) -> int:
    """A row within some values, 0 where there is none: column by column the first value that leaves a row.

    `sort` brings the values of a column into the order in which they are tried, beside those that are decided.
    """
    for place, column in enumerate(order):
        left = values & column
        if left & left - 1 == 0:
            continue
        tried = _numbers(left)
        if sort is not None:
            sort(tried, sum(one for one in (values & each for each in _OF_COLUMN.values()) if one & one - 1 == 0))
        for number in tried:
            after = _narrowed(values, number)
            row = after and _completed(after, order[place + 1 :], sort)
            if row:
                return row
        return 0
    return values


def row_with(values: Row, draw: random.Random | None = None) -> Row | None:
    """A valid row that has some values, None where there is none; the others are the default's, or random."""
    order = list(_OF_COLUMN.values())
    left = _with(_ALL, (_NUMBER[one] for one in values.items()))
    if draw is None:
        row = left and _completed(left, order)
    else:
        row = left and _completed(left, draw.sample(order, len(order)), lambda tried, _: draw.shuffle(tried))
    return _row_of(row) if row else None


class _Matrix:
    """Rows, how many of them have each pair, and which pairs none has."""

    def __init__(self, rows: Iterable[int], draw: random.Random) -> None:
        self.draw = draw
        self.rows: list[int] = []
        self.count = [[0] * len(VALUES) for _ in VALUES]
        self.missing = [0] * len(VALUES)  # by a value: those with which it stands in no row
        self.once = [0] * len(VALUES)  # and those with which it stands in one
        self.left: set[Pair] = set()
        for one, other in all_pairs():
            self._set(_NUMBER[one], _NUMBER[other], 0)
        for row in rows:
            self.add(row)
        self.left = set(self.left)  # small again: a set is as slow as it was large
        for one, other in sorted(self.left):
            if row_with(dict((VALUES[one], VALUES[other]))) is None:
                self.left.remove((one, other))
                self.missing[one] &= ~(1 << other)
                self.missing[other] &= ~(1 << one)

    def _set(self, one: int, other: int, count: int) -> None:
        self.count[one][other] = self.count[other][one] = count
        if count == 0:
            self.missing[one] |= 1 << other
            self.missing[other] |= 1 << one
            self.left.add((one, other) if one < other else (other, one))
        elif count <= 2:
            self.left.discard((one, other) if one < other else (other, one))
            self.missing[one] &= ~(1 << other)
            self.missing[other] &= ~(1 << one)
        if count == 1:
            self.once[one] |= 1 << other
            self.once[other] |= 1 << one
        elif count <= 2:
            self.once[one] &= ~(1 << other)
            self.once[other] &= ~(1 << one)

    def _change(self, changed: int, row: int, by: int) -> None:
        """Count the pairs of a row in which some of its values stand."""
        others = _numbers(row)
        for one in _numbers(changed):
            counts = self.count[one]
            for other in others:
                if other != one and not (changed >> other & 1 and other < one):
                    self._set(one, other, counts[other] + by)

    def add(self, row: int) -> None:
        """A row more."""
        self.rows.append(row)
        self._change(row, row, 1)

    def pop(self, place: int) -> int:
        """A row less."""
        row = self.rows.pop(place)
        self._change(row, row, -1)
        return row

    def replace(self, place: int, row: int) -> None:
        """Another row in a place."""
        before, self.rows[place] = self.rows[place], row
        self._change(before & ~row, before, -1)
        self._change(row & ~before, row, 1)

    def alone(self, row: int, changed: int | None = None) -> int:
        """How many pairs no other row has: those in which some of its values stand."""
        return _pairs_in(self.once, row, row if changed is None else changed)

    def gain(self, before: int, after: int) -> int:
        """How many pairs fewer would be missing after a change of a row."""
        return _pairs_in(self.missing, after, after & ~before) - self.alone(before, before & ~after)

    def near(self, row: int, pair: Pair) -> int:
        """A row that has a pair, and else the values of another as far as it may."""
        one, other = pair
        found = row & ~(_COLUMN_OF[one] | _COLUMN_OF[other]) | 1 << one | 1 << other
        if not any(_holds(block, found) for number in pair for block in _BLOCKS_OF[_COLUMN_OF[number]]):
            return found
        values, kept = _with(_ALL, pair), _numbers(row)
        self.draw.shuffle(kept)
        for number in kept:
            if values >> number & 1:
                values = _narrowed(values, number) or values
        return self.filled(values)

    def filled(self, values: int) -> int:
        """A row within some values, in which many missing pairs stand; 0 where there is none."""
        missing = self.missing
        busy = dict.fromkeys(_OF_COLUMN.values(), 0.0)
        for number in _numbers(values):
            busy[_COLUMN_OF[number]] -= missing[number].bit_count() * self.draw.uniform(0.7, 1.0)
        return _completed(
            values,
            sorted(busy, key=busy.__getitem__),
            lambda tried, decided: tried.sort(key=lambda number: -(missing[number] & decided).bit_count()),
        )


def _holds(block: list[tuple[int, int]], row: int) -> bool:
    return all(row & of for _, of in block)


def _pairs_in(of: list[int], row: int, changed: int) -> int:
    twice = 0
    count = 0
    for number in _numbers(changed):
        count += (of[number] & row).bit_count()
        twice += (of[number] & changed).bit_count()
    return count - twice // 2


def covering(kept: Iterable[Row], seed: int = 1) -> list[Row]:
    """Rows that have every possible pair, near to some that are there."""
    matrix = _Matrix(map(_set_of, kept), random.Random(seed))
    tried: set[Pair] = set()
    while matrix.rows and matrix.left - tried:  # first in rows that are there, where nothing is lost by it
        pair = min(matrix.left - tried)
        tried.add(pair)
        changes = [(place, row, matrix.near(row, pair)) for place, row in enumerate(matrix.rows)]
        free = [
            (matrix.gain(row, new), -place, new) for place, row, new in changes if not matrix.alone(row, row & ~new)
        ]
        if free:
            _, place, after = max(free)
            matrix.replace(-place, after)
    while matrix.left:
        pairs = [matrix.draw.choice(sorted(matrix.left)) for _ in range(CANDIDATES)]
        rows = [matrix.filled(_with(_ALL, pair)) for pair in pairs]
        matrix.add(max(rows, key=lambda row: matrix.gain(0, row)))
    _drop_needless(matrix)
    return list(map(_row_of, matrix.rows))


def _drop_needless(matrix: _Matrix) -> None:
    for row in list(matrix.rows):
        if not matrix.alone(row):
            matrix.pop(matrix.rows.index(row))


def fewer(rows: Iterable[Row], moves: int, seed: int = 1) -> list[Row]:
    """Fewer rows with the same pairs, by simulated annealing: after each row that is taken away, others take its pairs.

    A move gives a row a pair that is missing; the change is kept if fewer pairs are missing then, and sometimes if not.
    """
    matrix = _Matrix(map(_set_of, rows), random.Random(seed))
    found = list(matrix.rows)
    draw = matrix.draw
    for _ in range(moves):
        if not matrix.left:
            found = list(matrix.rows)
            matrix.pop(min(range(len(found)), key=lambda place: matrix.alone(found[place])))
            if not matrix.left:
                continue
        pair = draw.choice(sorted(matrix.left))
        either = 1 << pair[0] | 1 << pair[1]
        places = [place for place, row in enumerate(matrix.rows) if row & either]
        place = draw.choice(places) if places and draw.random() < NEAR else draw.randrange(len(matrix.rows))
        before = matrix.rows[place]
        after = matrix.near(before, pair)
        gain = matrix.gain(before, after)
        if gain >= 0 or draw.random() < math.exp(gain / TEMPERATURE):
            matrix.replace(place, after)
    return list(map(_row_of, found))


def read_rows() -> list[tuple[Row, bool]]:
    """The committed rows, and whether each is run with real processes."""
    found = [json.loads(line) for line in PLACE.read_text(encoding="utf-8").splitlines()]
    return [({**DEFAULTS, **{name: one[name] for name in one if name in COLUMNS}}, "real" in one) for one in found]


def with_real(rows: list[Row], kept: list[Row]) -> list[Row]:
    """The rows that run real processes: some of each mode that has any, and of each life; those that did first."""
    modes = ("node", "job", "remote", "node_remote")  # Ray is a stand-in here
    columns = ("life", "parts", "rows", "layout")
    chosen: list[Row] = []
    for turn in range(REAL):
        seen = {(name, row[name]) for row in chosen for name in columns}
        mode = modes[turn % len(modes)]
        free = [row for row in rows if row["mode"] == mode and row not in chosen and row["processes"] != "auto"]
        news = [{(name, row[name]) for name in columns} - seen for row in free]
        worth = [(("life", row["life"]) in new, len(new), row in kept) for row, new in zip(free, news, strict=True)]
        chosen.append(free[worth.index(max(worth))])
    return chosen


def _changed(row: Row) -> Row:
    return {name: value for name, value in row.items() if value != DEFAULTS[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=0, help="search for fewer rows with so many moves")
    moves = parser.parse_args().moves
    before = read_rows() if PLACE.exists() else []
    kept = [row for row, _ in before if all(row[name] in COLUMNS[name] for name in COLUMNS) and is_valid(row)]
    rows = fewer(covering(kept), moves)
    real = with_real(rows, [row for row, is_real in before if is_real])
    lines = sorted(json.dumps({**_changed(row), **({"real": True} if row in real else {})}) for row in rows)
    PLACE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    covered = {pair for row in rows for pair in pairs_of(row)}
    print(f"{len(rows)} rows, {len(covered)} pairs of {len(all_pairs())}, {len(real)} with processes")


if __name__ == "__main__":
    main()
