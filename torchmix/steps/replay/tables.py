"""The columns of a plan's files.

In: `StepPlan`s, and the state before each step. Out: Arrow tables: a row per piece in (step, sample, slot) order, a row
per step and stream, a row per state. Must hold: `docs/formats.md` has these columns; all rows of a step lie in one row
group. Cost: that of filling arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchmix.planner.plan import StepPlan

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
STATES_SCHEMA = pa.schema([("step", pa.int64()), ("state", pa.binary())])
SCHEMAS = {"pieces.parquet": PIECES_SCHEMA, "steps.parquet": STEPS_SCHEMA, "states.parquet": STATES_SCHEMA}
MANIFEST = "plan.json"


def paths_of(folder: Path) -> list[Path]:
    """Where the files of a plan lie in a folder."""
    return [folder / name for name in (*SCHEMAS, MANIFEST)]


def columns_of_pieces(plan: StepPlan) -> Mapping[str, Any]:
    """The rows of a step in `pieces.parquet`."""
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


def columns_of_step(plan: StepPlan) -> Mapping[str, Any]:
    """The rows of a step in `steps.parquet`."""
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
