"""The real `pretrain_gpt.py` on a torchmix recipe, at every layout: is the data what the plan says, and the loss equal?

In: a checkout of Megatron-LM. Out: a table with a line for each packing and layout, one with a line for each feature,
and exit code 1 if a check failed.

    python run_matrix.py ~/Megatron-LM
    python run_matrix.py ~/Megatron-LM --only "thd PP2 x VPP2" --only "ramp-up" --keep /tmp/matrix

For each packing, dense and THD, a single rank trains six steps without a stop: the reference. Then for each layout:

    plan            a run of six steps, saved after three, consumes in every step the very samples that torchmix plans
                    without Megatron; all ranks agree (`consumed.py`)
    loss            its losses are the reference's, to 1e-5 of their size
    resume          a single rank continues from that checkpoint, and consumes what the plan says, so what the
                    uninterrupted run consumed
    resumed loss    its losses are the reference's

All runs begin from one checkpoint's weights (`--pretrained-checkpoint`), because Megatron seeds initial weights by
pipeline stage. The features are those of `features.py`, `share_features.py`, `version_features.py`
and `run_features.py`.

Must hold: the checkout stays as it is; whatever is written is in a temporary folder. Every run has a deadline.

Cost: 45 short runs, some 15 s of two cores each.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
from pathlib import Path

import patch
from cells import LAYOUTS, PACKINGS, SINGLE, steps_flags
from corpus import write_corpus
from features import FEATURES, cell_of_feature
from launch import Runner
from matrix import Bench, cells_of_packing
from run_features import RUN_FEATURES
from share_features import SHARE_FEATURES
from table import FEATURE_CHECKS, LAYOUT_CHECKS, Cell, failures, table
from version_features import VERSION_FEATURES

ALL_FEATURES = {**FEATURES, **SHARE_FEATURES, **VERSION_FEATURES, **RUN_FEATURES}


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that ranks end, too
    logging.getLogger("torchmix").setLevel(logging.ERROR)  # that it makes the index is no news here
    with tempfile.TemporaryDirectory(prefix="torchmix-matrix-") as temporary:
        folder = options.keep.resolve() if options.keep else Path(temporary)
        script = patched_copy(options.checkout, folder)
        write_corpus(folder / "corpus")
        runner = Runner(
            script=script, checkout=options.checkout.resolve(), folder=folder, deadline_s=options.deadline_s
        )
        layout_cells, feature_cells = run_cells(runner, options.only)
    for cells, checks in ((layout_cells, LAYOUT_CHECKS), (feature_cells, FEATURE_CHECKS)):
        if cells:
            print("\n" + table(cells, checks))
    cells = [*layout_cells, *feature_cells]
    made = [cell for cell in cells if cell.problems_of_check]
    print(f"\n{sum(cell.is_fine for cell in made)} of {len(made)} lines passed")
    print(failures(made), end="")
    return 0 if made and all(cell.is_fine for cell in made) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a Megatron-LM checkout")
    parser.add_argument(
        "--only", action="append", metavar="LINE", help='a line of the tables, such as "thd CP2"; may be repeated'
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write everything here, and leave it; a new folder")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="of one run; then all ranks print their stacks")
    options = parser.parse_args()
    known = {*ALL_FEATURES, *(f"{packing} {layout.name}" for packing in PACKINGS for layout in LAYOUTS)}
    if unknown := set(options.only or ()) - known:
        parser.error(f"no line is called {sorted(unknown)}; there are {sorted(known)}")
    return options


def run_cells(runner: Runner, only: list[str] | None) -> tuple[list[Cell], list[Cell]]:
    """The lines of both tables, or those that are asked for."""
    weights = first_weights(runner)
    layout_cells: list[Cell] = []
    for packing in PACKINGS:
        layouts = [layout for layout in LAYOUTS if only is None or f"{packing} {layout.name}" in only]
        if layouts:
            layout_cells += cells_of_packing(Bench(runner=runner, packing=packing, weights=weights), layouts)
    bench = Bench(runner=runner, packing="thd", weights=weights)
    wanted = {name: check for name, check in ALL_FEATURES.items() if only is None or name in only}
    return layout_cells, [cell_of_feature(bench, name, check) for name, check in wanted.items()]


def first_weights(runner: Runner) -> Path:
    """A checkpoint of a single rank after one step, from whose weights all runs begin."""
    weights = runner.folder / "weights"
    bench = Bench(runner=runner, packing="dense", weights=weights)
    run = bench.train("weights", SINGLE, ["--save", str(weights), "--save-interval", "1"], schedule=steps_flags(1))
    if not run.is_fine:
        sys.exit(f"a single rank cannot train one step:\n{run.trouble}")
    return weights


def patched_copy(checkout: Path, folder: Path) -> Path:
    """The checkout's script with torchmix's lines, in `folder`."""
    original = checkout / "pretrain_gpt.py"
    if not original.is_file():
        sys.exit(f"{original} is not there; give the folder of a Megatron-LM checkout")
    try:
        text = patch.patched(original.read_text(encoding="utf-8"))
    except patch.AnchorMissing as error:
        sys.exit(f"{original}: {error}")
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "pretrain_gpt.py"
    script.write_text(text, encoding="utf-8")
    return script


if __name__ == "__main__":
    sys.exit(main())
