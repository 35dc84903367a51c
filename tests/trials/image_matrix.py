"""Trial: images of every kind of source, size rule, layout and loader, against Pillow and numpy on whole files.

    python -m tests.trials.image_matrix --seed 1 --count 192

A case is one of {4 kinds of sources} x {4 size rules} x {4 layouts} x {3 loaders}, in an order that the seed decides;
each kind has its own boundaries and positions.
Each tensor of each rank is rebuilt from the files, each image is decoded once in the job, and its pixels are on one
rank. The ranks are threads of this process, and their rows travel by a loop of sends; real ranks are tried by
tests/system/test_images.py. A run that is started again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np

from tests.support.decode_log import decoded, install, site_folder, starting_with
from tests.support.image_oracle import check, write_project
from tests.support.image_sources import RULES, ImageRow
from tests.support.image_world import records
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe

KINDS = {
    "Parquet": ["lists", "struct"],
    "WebDataset": ["members", "webdataset"],
    "JSON lines": ["jsonl", "paths"],
    "interleaved": ["obelics", "interleaved", "mmc4", "mmc4-shards"],
}
LAYOUTS = {
    "dp 4": Topology(dp=4),
    "tp 2 dp 2": Topology(tp=2, dp=2),
    "cp 2 dp 2": Topology(cp=2, dp=2),
    "pp 2 dp 2": Topology(pp=2, dp=2),
}
BOUNDARIES = (("document", "document"), ("none", "document"), ("document", "sample"), ("none", "sample"))
PACKING = {
    kind: {"boundaries": boundaries, "positions": positions}
    for kind, (boundaries, positions) in zip(KINDS, BOUNDARIES, strict=True)
}
"""Each kind has another pair of where attention stops and where positions restart."""
LOADERS = {"in_process": "in_process", "node": "node", "job": "job,processes=2"}
CASES = tuple(product(KINDS, RULES, LAYOUTS, LOADERS))
STEPS = 2


class Matrix:
    """Projects, made once for each kind and rule."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[tuple[str, str], dict[str, dict[str, ImageRow]]] = {}

    def project(self, kind: str, rule: str) -> tuple[Path, dict[str, dict[str, ImageRow]]]:
        """A folder with an index, and its rows."""
        folder = self._folder / f"{kind}-{rule}"
        if (kind, rule) not in self._rows:
            folder.mkdir()
            packing = {"overflow": "error", **PACKING[kind]}
            self._rows[kind, rule] = write_project(folder, KINDS[kind], rule=rule, packing=packing)
            index_recipe(load_recipe(folder / "recipe.yaml"), folder)
        return folder, self._rows[kind, rule]

    def check(self, case: tuple[str, str, str, str]) -> int:
        """Check one case; how many images it had."""
        kind, rule, layout, loaders = case
        folder, rows = self.project(kind, rule)
        log, site = folder / "decoded", folder / "site"
        for each in (log, site):
            shutil.rmtree(each, ignore_errors=True)
        site_folder(site, log)
        undo = install(str(log))
        try:
            with starting_with(site):
                found = records(
                    folder / "recipe.yaml",
                    LAYOUTS[layout],
                    STEPS,
                    with_mrope=rule in ("dynamic", "own"),
                    loaders=LOADERS[loaders],
                )
        finally:
            undo()
        return check(found, decoded(log), rows, rule, positions_at=PACKING[kind]["positions"], least=5)


def run(seed: int, count: int, *, loaders: tuple[str, ...] = tuple(LOADERS), out: Path | None = None) -> dict[str, int]:
    """Check `count` cases; how many images each of them had, by its words."""
    order = np.random.default_rng(seed).permutation(len(CASES)).tolist()
    cases = [CASES[i] for i in order if CASES[i][3] in loaders][:count]
    done: dict[str, int] = {}
    if out is not None and out.exists():
        held = json.loads(out.read_text())
        done = held["images"] if held["seed"] == seed else {}
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        for case in cases:
            words = ", ".join(case)
            if words not in done:
                done[words] = matrix.check(case)
                if out is not None:
                    out.write_text(json.dumps({"seed": seed, "cases": len(done), "of": len(CASES), "images": done}))
    return done


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=len(CASES))
    parser.add_argument("--out", type=Path, default=Path("image_matrix.json"))
    asked = parser.parse_args()
    found = run(asked.seed, asked.count, out=asked.out)
    print({"cases": len(found), "of": len(CASES), "images": Counter(found).total()})


if __name__ == "__main__":
    main()
