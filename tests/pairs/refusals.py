"""Rows that hold what the matrix blocks, and the page that lists it.

    python -m tests.pairs.refusals

Writes docs/combinations.md again. In: the blocks of `columns.py`. Out: for each that is refused a row with all of its
values and no other fault, and a table for readers.
"""

from __future__ import annotations

from pathlib import Path

from tests.pairs.columns import BLOCKS, COLUMNS, DEFAULTS, Block, Row

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
INTRODUCTION = """\
# Combinations

Every key of a recipe works with every other one, in every mode of reading, at every layout and at every moment of a
run, except for the combinations on this page. Each is refused with an error that gives the reason. The page is made
from the table that the tests use: {columns} columns with {values} values make {pairs:,} pairs, and every pair that is
not listed here is run as a small job, whose tensors, order and shares are compared with independent computations.

`life` is the moment of a run (the first start, a resume at another layout, an edit, a stop inside a step, a replay, a
reshard, some ranks that go, a single pass, validation), `rows` is what the column of a source holds, and `layout` names
the axis of parallelism, or three ranks that do not divide the samples.

| values | beside | why | the error says |
|---|---|---|---|
"""
NAMES = {
    "mode": "loaders.where",
    "rows": "rows",
    "format": "format",
    "chat": "chat",
    "ends": "begin_id, end_id",
    "image_place": "images",
    "names": "properties",
    "parts": "parts",
    "cut": "sources.NAME.packing.method",
    "own_overflow": "sources.NAME.packing.overflow",
    "method": "packing.method",
    "overflow": "packing.overflow",
    "boundaries": "packing.boundaries",
    "positions": "packing.positions",
    "reset_loss": "packing.reset_loss",
    "balance": "balance.method",
    "cost": "balance.model",
    "module": "modules.items",
    "module_axis": "modules.axis",
    "module_method": "modules.method",
    "module_scope": "modules.scope",
    "near_text": "modules.near_text",
    "decode_at": "modules.decode_at",
    "encoder": "modules.model",
    "cap": "modules.cap",
    **{
        name: f"loaders.{name}"
        for name in ("processes", "spares", "cpu", "autoscale", "transform_at", "keys", "address")
    },
}


def refused() -> list[Block]:
    """The blocks that an error names."""
    return [block for block in BLOCKS if block.refused]


def row_of(block: Block) -> Row:
    """A row with the first values of a block, and with no other block, as near to the default as may be."""
    base = {**DEFAULTS, **{name: values[0] for name, values in block.of.items()}, **(block.using or {})}
    fixed = {*block.of, *(block.using or ())}
    for _ in range(3):
        for other in BLOCKS:
            if other is not block and other.holds(base):
                _mended(base, other, fixed)
    assert block.holds(base), block
    return base


def _mended(row: Row, block: Block, fixed: set[str]) -> None:
    """Give a column another value, so that the block no longer holds, if one is free."""
    for name in block.of:
        if name not in fixed:
            for value in COLUMNS[name]:
                after = {**row, name: value}
                if sum(one.holds(after) for one in BLOCKS) < sum(one.holds(row) for one in BLOCKS):
                    row[name] = value
                    return


def page() -> str:
    """The whole page."""
    values = sum(map(len, COLUMNS.values()))
    pairs = (values**2 - sum(len(one) ** 2 for one in COLUMNS.values())) // 2
    text = INTRODUCTION.format(columns=len(COLUMNS), values=values, pairs=pairs)
    for block in refused():
        first, *others = (f"`{NAMES.get(name, name)}`: {_words(name, held)}" for name, held in block.of.items())
        error = block.refused.split("|")[0]
        text += f"| {first} | {', '.join(others)} | {block.why} | {error} |\n"
    return text


def _words(name: str, values: tuple[str, ...]) -> str:
    left = [value for value in COLUMNS[name] if value not in values]
    if len(left) == 1 and len(values) > 2:
        return f"all but {left[0]}"
    return ", ".join(values)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
