"""Trial: Megatron's own schedules at every layout of 1, 2, 4 and 8 CPU ranks, with both layouts of `get_batch`.

    python -m tests.trials.megatron_layouts --seed 1 --count 100 [--out megatron_layouts-1.json]

What each chunk is handed is compared with an oracle that knows nothing of torchmix, and the loss of every sample with
that of one rank alone. The layouts come in an order that the seed decides, eight of like size in a world of ranks. A
run that is started again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from tests.support.layouts import layout_of
from tests.support.megatron_layouts import SCRIPTS, check_training, training_layouts, write_corpus

SIZES = (1, 2, 4, 8)
AT_ONCE = 8


def worlds(seed: int) -> list[tuple[str, list[str]]]:
    """All layouts, by boundaries and names, at most AT_ONCE in a world of ranks of one size."""
    draw = np.random.default_rng(seed)
    found = []
    for boundaries in SCRIPTS:
        for size in SIZES:
            names = [layout.name for layout in training_layouts(size, boundaries)]
            names = [names[place] for place in draw.permutation(len(names))]
            found += [(boundaries, names[first : first + AT_ONCE]) for first in range(0, len(names), AT_ONCE)]
    return [found[place] for place in draw.permutation(len(found))]


def run_worlds(seed: int, count: int, out: Path) -> dict[str, object]:
    """Run worlds until `count` layouts are done, those that `out` counts included. Return the content of `out`."""
    said = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"seed": seed, "worlds": 0, "layouts": 0}
    assert said["seed"] == seed, f"{out} is of another seed"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = write_corpus(folder)
        for number, (boundaries, names) in enumerate(worlds(seed)):
            if number < said["worlds"] or said["layouts"] >= count:
                continue
            check_training(folder, documents, boundaries, [layout_of(each) for each in names], folder / f"{number}")
            said |= {"worlds": number + 1, "layouts": said["layouts"] + len(names)}
            out.write_text(json.dumps(said, indent=1), encoding="utf-8")
    return said


def main() -> None:
    """Run them; the first difference ends it with an error that names the layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000, help="layouts; all of them are fewer than the default")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    print(json.dumps(run_worlds(asked.seed, asked.count, asked.out or Path(f"megatron_layouts-{asked.seed}.json"))))


if __name__ == "__main__":
    main()
