"""The rows of the matrix: few rows in which every pair of values stands that may stand together.

    python -m tests.pairs.covering

Writes rows.jsonl, a row a line, beside this file: greedily, from the same seed always. Rows that are there and still
valid stay, so that a change of `columns.py` changes few rows; without the file all are made again. A row begins with a
pair that no row has yet; each further column takes the value that brings most new pairs and leaves every other column a
value.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

from tests.pairs.columns import BLOCKS, COLUMNS, Row, all_pairs, is_valid, pairs_of

PLACE = Path(__file__).with_name("rows.jsonl")
CANDIDATES = 12
"""Rows that are tried for each one that is taken."""
Domains = dict[str, tuple[str, ...]]
Pair = tuple[tuple[str, str], tuple[str, str]]
_blocks_of = {name: [block for block in BLOCKS if name in block.of] for name in COLUMNS}


def narrowed(domains: Domains, column: str, value: str) -> Domains | None:
    """The values that are left to all columns when one has a value; None where one has none left."""
    found = {**domains, column: (value,)}
    waiting = [column]
    while waiting:
        for block in _blocks_of[waiting.pop()]:
            open_columns = [name for name, values in block.of.items() if not set(found[name]) <= set(values)]
            if len(open_columns) > 1:
                continue
            if not open_columns:
                return None
            [name] = open_columns
            left = tuple(one for one in found[name] if one not in block.of[name])
            if left != found[name]:
                found[name] = left
                waiting.append(name)
    return found


def completed(domains: Domains, order: list[str], wanted: dict[tuple[str, str], set[tuple[str, str]]]) -> Row | None:
    """A row within the domains that has many of the wanted pairs; None where there is none."""
    for column in order:
        best: tuple[int, int, Domains] | None = None
        fixed = [(name, values[0]) for name, values in domains.items() if len(values) == 1 and name != column]
        for place, value in enumerate(domains[column]):
            after = narrowed(domains, column, value)
            if after is None:
                continue
            new = wanted.get((column, value), set())
            score = sum(one in new for one in fixed)
            if best is None or (score, -place) > best[:2]:
                best = score, -place, after
        if best is None:
            return None
        domains = best[2]
    return {name: domains[name][0] for name in COLUMNS}


@cache
def possible_pairs() -> frozenset[Pair]:
    """Pairs of which some valid row has both."""
    return frozenset(pair for pair in all_pairs() if row_with(dict(pair)) is not None)


def row_with(values: dict[str, str], draw: random.Random | None = None) -> Row | None:
    """A valid row that has some values; the others are as near to the default as may be, or random."""
    domains: Domains | None = dict(COLUMNS)
    for column, value in values.items():
        assert value in COLUMNS[column]
        domains = None if domains is None or value not in domains[column] else narrowed(domains, column, value)
    if domains is None:
        return None
    if draw is None:
        return completed(domains, list(COLUMNS), {})
    for _ in range(20):
        order = draw.sample(list(COLUMNS), len(COLUMNS))
        mixed = {name: tuple(draw.sample(domains[name], len(domains[name]))) for name in COLUMNS}
        row = completed(mixed, order, {})
        if row is not None:
            assert is_valid(row)
            return row
    return None


def covering(kept: list[Row], seed: int = 1) -> list[Row]:
    """Rows that have every possible pair, some of which are there."""
    draw, rows = random.Random(seed), list(kept)
    wanted: dict[tuple[str, str], set[tuple[str, str]]] = {}
    left = set(possible_pairs()) - {pair for row in rows for pair in pairs_of(row)}
    for one, other in left:
        wanted.setdefault(one, set()).add(other)
        wanted.setdefault(other, set()).add(one)
    while left:
        best: tuple[int, Row] | None = None
        pairs = sorted(left)
        for _ in range(CANDIDATES):
            pair = pairs[draw.randrange(len(pairs))]
            domains: Domains | None = dict(COLUMNS)
            for column, value in pair:
                assert domains is not None
                domains = narrowed(domains, column, value)
            assert domains is not None
            busy = {name: sum(len(wanted.get((name, value), ())) for value in COLUMNS[name]) for name in COLUMNS}
            order = sorted(COLUMNS, key=lambda name: (-busy[name] * draw.uniform(0.7, 1.0), name))
            row = completed(domains, order, wanted)
            if row is None:
                continue
            new = sum(each in left for each in pairs_of(row))
            if best is None or new > best[0]:
                best = new, row
        if best is None:
            pair = min(left)
            row = row_with(dict(pair))
            assert row is not None
            best = 1, row
        rows.append(best[1])
        for one, other in pairs_of(best[1]):
            left.discard((one, other))
            wanted.get(one, set()).discard(other)
            wanted.get(other, set()).discard(one)
    return rows


def needless(rows: list[Row]) -> list[Row]:
    """The rows without those whose pairs all stand in others."""
    kept = list(rows)
    count: dict[Pair, int] = {}
    for row in kept:
        for pair in pairs_of(row):
            count[pair] = count.get(pair, 0) + 1
    for row in list(kept):
        if all(count[pair] > 1 for pair in pairs_of(row)):
            kept.remove(row)
            for pair in pairs_of(row):
                count[pair] -= 1
    return kept


def read_rows() -> list[tuple[Row, bool]]:
    """The committed rows, and whether each is run with real processes."""
    found = [json.loads(line) for line in PLACE.read_text(encoding="utf-8").splitlines()]
    return [({name: one[name] for name in COLUMNS}, bool(one.get("real"))) for one in found]


def with_real(rows: list[Row], count: int = 15) -> list[int]:
    """Numbers of the rows that run real processes: of each mode that has some, and of each life."""
    chosen: list[int] = []
    modes = ("node", "job", "remote", "node_remote")  # Ray is a stand-in here
    for turn in range(count):
        seen = {(column, rows[number][column]) for number in chosen for column in ("life", "parts", "rows", "layout")}
        mode = modes[turn % len(modes)]
        free = [
            n for n, row in enumerate(rows) if row["mode"] == mode and n not in chosen and row["processes"] != "auto"
        ]
        chosen.append(
            max(free, key=lambda n: (len({(c, rows[n][c]) for c in ("life", "parts", "rows", "layout")} - seen), -n))
        )
    return sorted(chosen)


def main() -> None:
    kept = []
    for line in PLACE.read_text(encoding="utf-8").splitlines() if PLACE.exists() else ():
        row = {name: json.loads(line).get(name, values[0]) for name, values in COLUMNS.items()}
        if is_valid(row) and all(row[name] in COLUMNS[name] for name in COLUMNS):
            kept.append(row)
    rows = needless(covering(kept))
    real = with_real(rows)
    lines = [json.dumps({**row, **({"real": True} if number in real else {})}) for number, row in enumerate(rows)]
    PLACE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    covered = {pair for row in rows for pair in pairs_of(row)}
    print(f"{len(rows)} rows, {len(covered)} pairs of {len(all_pairs())}, {len(real)} with processes")


if __name__ == "__main__":
    main()
