"""A plan as Parquet: every piece of every step, and what each stream gave in each step.

In: `StepPlan`s, one after another. Out: `pieces.parquet`, a row per piece in (step, sample, slot) order, and
`steps.parquet`, a row per step and stream. Must hold: the files appear together and whole, or not at all: they are
written aside and renamed. Cost: memory of one row group, about 100,000 rows; `docs/formats.md` has the columns.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.planner.plan import StepPlan

ROW_GROUP_ROWS = 100_000

PIECES_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("sample", pa.int64()),
        ("slot", pa.int64()),
        ("sample_offset", pa.int64()),
        ("stream", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("epoch", pa.int64()),
        ("start", pa.int64()),
        ("tokens", pa.int64()),
        ("drawn_step", pa.int64()),
        ("age", pa.int64()),
        ("dp_rank", pa.int64()),
        ("microbatch", pa.int64()),
    ]
)
STEPS_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("stream", pa.string()),
        ("asked_tokens", pa.int64()),
        ("drawn_tokens", pa.int64()),
        ("delivered_tokens", pa.int64()),
        ("pool_tokens", pa.int64()),
        ("capacity_tokens", pa.int64()),
        ("order_digest", pa.string()),
        ("plan_digest", pa.string()),
        ("lower_bound", pa.int64()),
        ("ratio", pa.float64()),
        ("hash_order_cost", pa.int64()),
    ]
)


class PlanFiles:
    """Writes the two files, a row group at a time."""

    def __init__(self, pieces: pq.ParquetWriter, steps: pq.ParquetWriter) -> None:
        self._writers = {"pieces": pieces, "steps": steps}
        self._waiting: dict[str, list[pa.Table]] = {"pieces": [], "steps": []}

    def add(self, plan: StepPlan) -> None:
        """Append one step; steps come in ascending order."""
        self._append("pieces", pa.table(_columns_of_pieces(plan), schema=PIECES_SCHEMA))
        self._append("steps", pa.table(_columns_of_step(plan), schema=STEPS_SCHEMA))

    def flush(self) -> None:
        """Write what waits."""
        for name, tables in self._waiting.items():
            if tables:
                self._writers[name].write_table(pa.concat_tables(tables))
                tables.clear()

    def _append(self, name: str, table: pa.Table) -> None:
        waiting = self._waiting[name]
        waiting.append(table)
        if sum(len(each) for each in waiting) >= ROW_GROUP_ROWS:
            self._writers[name].write_table(pa.concat_tables(waiting))
            waiting.clear()


def paths_of(folder: Path) -> tuple[Path, Path]:
    """Where the two files lie in a folder: pieces, steps."""
    return folder / "pieces.parquet", folder / "steps.parquet"


@contextmanager
def write_plan_files(folder: Path) -> Iterator[PlanFiles]:
    """Open the two files of a plan, and publish them where the block ends well.

    Args:
        folder: Made if missing. Files of an earlier plan in it stay until the new ones are whole.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "is a file; name a folder for the plan", str(folder)) from None
    asides = [(path.with_name(f".{path.name}.partial"), path) for path in paths_of(folder)]
    try:
        with (
            pq.ParquetWriter(asides[0][0], PIECES_SCHEMA) as pieces,
            pq.ParquetWriter(asides[1][0], STEPS_SCHEMA) as steps,
        ):
            files = PlanFiles(pieces, steps)
            yield files
            files.flush()
        for aside, path in asides:
            aside.replace(path)
    finally:
        for aside, _ in asides:
            aside.unlink(missing_ok=True)


def _columns_of_pieces(plan: StepPlan) -> Mapping[str, Any]:
    pieces, placement = plan.pieces, plan.placement
    return {
        "step": np.full(len(pieces), plan.step, np.int64),
        "sample": plan.sample,
        "slot": plan.slot,
        "sample_offset": plan.sample_offset,
        "stream": np.array(plan.streams, object)[pieces.stream],
        "source": np.array(plan.sources, object)[pieces.source],
        "row": pieces.row,
        "epoch": pieces.epoch,
        "start": pieces.start,
        "tokens": pieces.tokens,
        "drawn_step": pieces.drawn_step,
        "age": plan.step - pieces.drawn_step,
        "dp_rank": placement.dp_rank_of_sample[plan.sample],
        "microbatch": placement.microbatch_of_sample[plan.sample],
    }


def _columns_of_step(plan: StepPlan) -> Mapping[str, Any]:
    count = len(plan.streams)
    return {
        "step": np.full(count, plan.step, np.int64),
        "stream": list(plan.streams),
        "asked_tokens": plan.asked_tokens,
        "drawn_tokens": plan.drawn_tokens,
        "delivered_tokens": plan.delivered_tokens,
        "pool_tokens": plan.pool_tokens,
        "capacity_tokens": np.full(count, plan.capacity_tokens, np.int64),
        "order_digest": [plan.order_digest.hex()] * count,
        "plan_digest": [plan.plan_digest.hex()] * count,
        "lower_bound": np.full(count, plan.balance.lower_bound, np.int64),
        "ratio": np.full(count, plan.balance.ratio),
        "hash_order_cost": np.full(count, plan.balance.hash_order_cost, np.int64),
    }
