"""The pictures of these pages, made from plans: `python docs/pictures/make_pictures.py [FOLDER]`.

In: nothing; a corpus of made-up lengths is written to a temporary folder. Out: `road.svg`, the road of a step, and
`balance.svg`, the work of each rank in each microbatch, in the folder (default: this one). Needs matplotlib.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import torchmix
from torchmix.cli.plan.report import ReportNumbers, heat_maps
from torchmix.planner.balance import cost_model
from torchmix.planner.graph.drawing import drawing_of

LENGTH = 32_768
SOURCES = {  # documents, median and spread of their tokens, share
    "books": (150, 20_000, 0.8, "25%"),
    "chat": (4_000, 300, 0.7, "5%"),
    "code": (3_000, 1_500, 1.3, "25%"),
    "web": (9_000, 600, 1.0, "45%"),
}
MODEL = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}


def write_corpus(folder: Path) -> None:
    """A file of each source; all tokens are 0."""
    random = np.random.default_rng(0)
    for name, (count, median, spread, _) in SOURCES.items():
        lengths = np.clip(random.lognormal(np.log(median), spread, count), 8, 2 * LENGTH).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(int(offsets[-1]), np.int32)))
        pq.write_table(pa.table({"input_ids": tokens}), folder / f"{name}.parquet")


def recipe_of(samples: int) -> dict[str, object]:
    """The recipe of a batch of so many samples."""
    return {
        "version": 1,
        "seed": 3,
        "batch": {"samples": samples, "length": LENGTH},
        "sources": {name: {"path": f"{name}.parquet", "tokens": "input_ids"} for name in SOURCES},
        "mixture": {name: share for name, (*_, share) in SOURCES.items()},
        "balance": {"method": "rows", "model": MODEL},
    }


def main(folder: Path) -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary)
        write_corpus(data)
        torchmix.index(recipe_of(8), directory=data)
        small = next(torchmix.plan(recipe_of(8), steps=1, dp=4, directory=data))
        # Its costliest microbatch has few pieces, and so the clearest picture.
        counts = np.bincount(small.placement.microbatch_of_sample[small.sample])
        (folder / "road.svg").write_text(drawing_of(small, int(counts.argmin())), encoding="utf-8")
        large = next(torchmix.plan(recipe_of(512), steps=1, dp=64, directory=data))
        model = torchmix.Model(**MODEL)
        numbers = ReportNumbers(cost_model(model, boundaries="document"), LENGTH)
        numbers.add(large)
        step = numbers.values()["shown_step"]
        chart = heat_maps(
            step["hash_order"], step["plan"], rows="data-parallel rank", columns="microbatch", columns_wait=True
        )
        (folder / "balance.svg").write_text(chart, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
