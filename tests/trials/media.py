"""Trial: items of each kind over all readers, places and layouts, and odd files of each kind.

    python -m tests.trials.media readers --kind sound --seed 1 --count 80
    python -m tests.trials.media odd --kind sound --seed 1 --count 3000
    python -m tests.trials.media sizes --kind video --seed 1 --count 2000

`readers`: a case is one of {5 containers} x {4 readers and places} x {7 layouts}, in an order that the seed decides;
every value of every rank is compared with that of other code, and so are those after a resume with another layout.
`odd`: damaged files are refused by name, or read; what is read has the units that were planned. `sizes`: frames and
sizes of videos against transformers, where it is installed; `tests.trials.drawn_files` has those of files. A run that
is started again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.loaders import run_job
from tests.support.media import CONTAINERS, MediaKind, check_media, mutated, write_media_project
from tests.support.pictures import IMAGE
from tests.support.sounds import SOUND
from tests.support.trial import continued, trial_parser
from tests.support.videos import VIDEO
from torchmix.errors import ItemUnreadable
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.modality import Alter, Modality
from torchmix.modalities.table import open_modality
from torchmix.parallel.topology import Topology
from torchmix.recipe.build import build
from torchmix.recipe.items import KINDS as RECIPE_KINDS
from torchmix.recipe.load import load_recipe

KINDS: dict[str, MediaKind] = {"image": IMAGE, "sound": SOUND, "video": VIDEO}
LENGTH = 1024
READERS = {
    "rank": ("rank", "in_process"),
    "worker": ("worker", "node"),
    "rank of node": ("rank", "node"),
    "loaders": ("loader", "job,processes=2"),
}
LAYOUTS = {
    "dp 4": Topology(dp=4),
    "tp 2 dp 2": Topology(tp=2, dp=2),
    "cp 2 dp 2": Topology(cp=2, dp=2),
    "pp 2 dp 2": Topology(pp=2, dp=2),
    "tp 2 pp 2 dp 2": Topology(tp=2, pp=2, dp=2),
    "tp 2 cp 2 dp 2": Topology(tp=2, cp=2, dp=2),
    "cp 2 pp 2 dp 2": Topology(cp=2, pp=2, dp=2),
}
STEPS = 2
CASES = tuple(product(CONTAINERS, READERS, LAYOUTS))


def try_readers(
    kind: MediaKind, seed: int, number: int, *, cases: tuple[tuple[str, str, str], ...] = CASES, resumes: bool = True
) -> Any:
    """One case; how many items came."""
    container, reader, layout = cases[int(np.random.default_rng(seed).permutation(len(cases))[number])]
    place, loaders = READERS[reader]
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        rows = write_media_project(folder, kind, [container], length=LENGTH, decode_at=place)
        recipe, topology = folder / "recipe.yaml", LAYOUTS[layout]
        index_recipe(load_recipe(recipe), folder)
        items = check_media(recipe, rows, kind, topology, STEPS, loaders=loaders)
        if not resumes:
            return {"case": f"{container}, {reader}, {layout}", "items": sum(map(len, items))}
        other = list(LAYOUTS)[(list(LAYOUTS).index(layout) + 1 + number % (len(LAYOUTS) - 1)) % len(LAYOUTS)]
        state = run_job(recipe, topology, steps=1, keep=False, max_steps=STEPS, loaders=loaders)[0].state
        elsewhere = {"rank": "node", "worker": "in_process"}.get(reader, loaders)
        told = {"before": 1, "state": state, "loaders": elsewhere}
        rest = check_media(recipe, rows, kind, LAYOUTS[other], STEPS, **told)
        assert rest == items[1:], f"resumed with {other}, {elsewhere}"
    return {"case": f"{container}, {reader}, {layout}, then {other}", "items": sum(map(len, (*items, *rest)))}


def modality_of(kind: MediaKind, words: Mapping[str, Any] | None = None) -> Modality:
    """The kind as torchmix opens it."""
    told = {"column": "items", "token": 1, **(kind.words if words is None else words)}
    return open_modality("source", build(RECIPE_KINDS[kind.kind].words, told, "items"))


def units_or_reason(modality: Modality, content: bytes, alter: Alter | None = None) -> np.ndarray | str:
    """What the units of a file are, as index and decoder find them, and altered; or why there are none."""
    try:
        measures = modality.measure(lambda offset, count: content[offset : offset + count], len(content))
        assert all(1 <= measure < 1 << 31 for measure in measures), "as the catalog keeps them"
        sizes = modality.sizes({name: np.array([one]) for name, one in zip(modality.measured, measures, strict=True)})
        units = modality.decode(content, measures, alter)
    except ItemUnreadable as error:
        return str(error)
    assert units.shape == (int(sizes.columns[modality.units][0]), modality.unit_values), "as the plan has it"
    assert units.dtype == modality.unit_type and int(sizes.tokens[0]) >= 1
    assert modality.segments is None or len(units) % int(sizes.columns[modality.segments][0]) == 0
    return units


def try_odd(kind: MediaKind, seed: int, number: int) -> Any:
    """One damaged file: why it is refused, or how many units it has; seconds, and the most memory so far."""
    rng = np.random.default_rng([seed, number])
    content = mutated(rng, kind.make(rng, number))
    began = time.process_time()
    found = units_or_reason(modality_of(kind), content)
    cpu_s = round(time.process_time() - began, 3)
    assert cpu_s < 60, "a damaged file of some kilobytes costs no minute"
    told = {"refused": found} if isinstance(found, str) else {"units": len(found)}
    return {**told, "cpu_s": cpu_s, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}


def try_sizes(kind: MediaKind, seed: int, number: int) -> Any:
    """Some sizes against transformers."""
    assert kind.sizes_against_transformers is not None, "tests.trials.image_processors has those of images"
    return kind.sizes_against_transformers(np.random.default_rng([seed, number]), number)


TRIES = {"readers": try_readers, "odd": try_odd, "sizes": try_sizes}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("what", choices=TRIES)
    parser.add_argument("--kind", choices=KINDS, default="sound")
    mine, rest = parser.parse_known_args()
    asked = trial_parser(__doc__, count=len(CASES), out="media.json").parse_args(rest)
    try_one, kind = TRIES[mine.what], KINDS[mine.kind]
    most = len(CASES) if mine.what == "readers" else None
    label = f"/{mine.kind}/{mine.what}"
    found = continued(asked, lambda seed, number: try_one(kind, seed, number), label=label, most=most)
    mine_found = [one for key, one in found.items() if key.endswith(label)]
    print({"tried": len(mine_found), "refused": sum("refused" in one for one in mine_found)})
    for key in ("items", "values", "different", "sizes", "ends"):
        if any(key in one for one in mine_found):
            print({key: sum(one.get(key, 0) for one in mine_found)})
    for key in ("cpu_s", "peak_mib", "apart"):
        if any(key in one for one in mine_found):
            print({f"most {key}": max(one.get(key, 0) for one in mine_found)})


if __name__ == "__main__":
    main()
