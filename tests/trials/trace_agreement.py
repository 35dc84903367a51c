"""`torchmix trace` against `torchmix plan --out`, over random recipes with selections, children, flats and hold-outs.

    python -m tests.trials.trace_agreement --seed 1 --count 20 --steps 1000 --out agreement.json

In: a seed, a number of recipes and of steps. Out: for each recipe how many pieces were compared. Must hold: for every
document of every step both say the same sample, slot, stream, source, row, epoch and span; `--step` says it of some
steps by themselves; what the files hold is read by pyarrow alone. A run goes on where it stopped. Cost: some
milliseconds a step.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.support.trial import continued, trial_parser
from tests.trials.selection_coverage import make_recipe
from torchmix.cli.main import main as torchmix

COLUMNS = ("step", "sample", "slot", "stream", "source", "row", "epoch", "start", "stop")
REVERSED = 3
"""Steps that are asked for by themselves."""
Piece = tuple[Any, ...]


def try_recipe(seed: int, number: int, *, steps: int) -> dict[str, Any]:
    """Compare all documents of one recipe's steps.

    Raises:
        AssertionError: They differ.
    """
    draw = random.Random(f"{seed}/{number}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe, rows = make_recipe(draw, folder)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        if run("index", path) or run("plan", path, "--steps", steps, "--out", folder / "plan"):
            return {"refused": True}  # a stream without rows
        planned = pieces_of(pq.read_table(folder / "plan" / "pieces.parquet"))
        (folder / "rows").write_text("".join(f"web:{row}\n" for row in range(len(rows))))
        assert not run("trace", path, "--list", folder / "rows", "--steps", steps, "--out", folder / "found.parquet")
        found = pieces_of(pq.read_table(folder / "found.parquet"))
        assert found == planned, f"recipe {seed}/{number}: {len(found)} pieces traced, {len(planned)} planned"
        for step in draw.sample(range(steps), REVERSED):
            assert not run("trace", path, "--step", step, "--out", folder / "step.parquet")
            of_step = pieces_of(pq.read_table(folder / "step.parquet"))
            assert of_step == [piece for piece in planned if piece[0] == step], f"recipe {seed}/{number}: step {step}"
        return {"pieces": len(planned), "documents": len({piece[4:6] for piece in planned}), "steps": steps}


def pieces_of(table: pa.Table) -> list[Piece]:
    """Rows of a table of pieces, in the order of `COLUMNS`; a plan has tokens where a trace has `stop`."""
    columns = {name: table[name].to_pylist() for name in table.column_names}
    if "stop" not in columns:
        columns["stop"] = [start + n for start, n in zip(columns["start"], columns["tokens"], strict=True)]
    return list(zip(*(columns[name] for name in COLUMNS), strict=True))


def run(*words: object) -> int:
    """The exit code of a command, whose output goes nowhere."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return torchmix([*map(str, words), "--quiet"])


def main() -> None:
    """Try the recipes that are not in the file yet."""
    parser = trial_parser(__doc__, count=20)
    parser.add_argument("--steps", type=int, default=1000)
    asked = parser.parse_args()
    done = continued(asked, partial(try_recipe, steps=asked.steps), label=f"/{asked.steps}")
    compared = sum(one.get("pieces", 0) for one in done.values())
    refused = sum("refused" in one for one in done.values())
    print(f"{len(done)} recipes, {refused} refused, {compared:,} pieces compared", file=sys.stderr)


if __name__ == "__main__":
    main()
