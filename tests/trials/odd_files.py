"""Trial: odd, broken and hostile files of each kind, at indexing and at reading.

    python -m tests.trials.odd_files --seed 1 --count 750

Files come in turn of images, sounds and videos: first those of `tests/support/odd_files.py`, which claim sizes, tables,
times and loops that their bytes do not hold, then damaged ones. A source has such a file between two good ones. It is
indexed, and read where the index takes it; the same with `bad_rows: mask`; and the file takes the place of a good one
behind an index. Each time it must come as it was planned, or be masked, or be named with its source and row by an error
of torchmix, and the good ones must come as ever. Each file is tried in a process of its own, which may take so much
memory and processor time and no more. A run that is started again goes on where it stopped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import torchmix
from tests.support.deadlines import stretched
from tests.support.media import MediaKind, MediaRow, write_media
from tests.support.odd_files import hostile, odd_file
from tests.support.pictures import IMAGE
from tests.support.sounds import SOUND
from tests.support.trial import continued, trial_parser
from tests.support.videos import VIDEO
from torchmix.errors import TorchmixError
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.modality import PlannedItem
from torchmix.reader.items import ItemReader
from torchmix.recipe.load import load_recipe

KINDS: tuple[MediaKind, ...] = (
    replace(IMAGE, words={**IMAGE.words, "most_pixels": 1 << 20}),
    replace(SOUND, words={**SOUND.words, "most_seconds": 60}),
    replace(VIDEO, words={**VIDEO.words, "most_pixels": 1 << 20, "most_seconds": 600}),
)
CONTAINERS = ("files", "lists")
MOST_BYTES = 192 << 20
"""Resident memory that a file may cost, beside what the process had."""
ROOM_BYTES = 3 << 30
"""Addresses that a process may take beside; a file that asks for more is wrong as well."""
MOST_CPU_S, DEADLINE_S = 20, 120.0
LENGTH = 2048


def in_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a fork of this process finds; `wrong` says what ended it instead. It adds seconds and MiB."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            mine = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mine + ROOM_BYTES, mine + ROOM_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            try:
                found = work()
            except BaseException as error:
                found = {"wrong": f"{type(error).__name__}: {error}", "stack": traceback.format_exc()[-3000:]}
            taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            found |= {"cpu_s": round(time.process_time() - began, 2), "mib": taken >> 10}
            os.write(writing, json.dumps(found).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    told, ended = _read_until(reading, time.monotonic() + stretched(DEADLINE_S))
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not ended:
        return {"wrong": f"not within {DEADLINE_S} s"}
    if not told:
        return {"wrong": f"ended with {os.waitstatus_to_exitcode(status)}"}
    found = json.loads(told)
    if found["mib"] << 20 > MOST_BYTES:
        found.setdefault("wrong", f"it costs {found['mib']} MiB")
    return dict(found)


def _read_until(reading: int, deadline: float) -> tuple[bytes, bool]:
    import select

    told, ended = b"", False
    while not ended and time.monotonic() < deadline:
        if select.select([reading], [], [], 1.0)[0]:
            part = os.read(reading, 1 << 16)
            told, ended = told + part, not part
    os.close(reading)
    return told, ended


def write_source(folder: Path, kind: MediaKind, container: str, items: list[bytes], bad_rows: str) -> Path:
    """A recipe of a source whose rows have an item each."""
    folder.mkdir()
    rows = [MediaRow(texts=(f"{row};", "."), items=(item,)) for row, item in enumerate(items)]
    source = write_media(folder, "odd", container, rows, kind)
    source |= {"bad_rows": bad_rows} | ({"max_bad": "90%"} if bad_rows == "mask" else {})
    recipe = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": 3, "length": LENGTH},
        "packing": {"method": "pad"},
        "sources": {"odd": source},
        "mixture": {"odd": 1},
        "modules": {"tower": {"items": kind.kind, "sizes": kind.sizes}},
        "loaders": {"where": "in_process"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def refused(what: Callable[[], Any]) -> str | None:
    """What an error of torchmix says, which names source and row; None: there was none."""
    try:
        what()
    except TorchmixError as error:
        assert re.search(r"'odd'", str(error)) and re.search(r"row 1\b", str(error)), f"not named: {error}"
        return str(error)
    return None


def units_by_row(recipe: Path, kind: MediaKind) -> dict[int, np.ndarray]:
    """The units of each row that comes in two steps."""
    found: dict[int, np.ndarray] = {}
    with torchmix.build_loader(str(recipe), micro_batch_size=3, max_steps=2) as loader:
        for microbatch in loader:
            batch = microbatch.modules["tower"]
            units = np.split(batch.arrays[kind.unit_array].numpy(), np.cumsum(batch.units.numpy())[:-1])
            found.update(zip(batch.arrays["row"].tolist(), units, strict=True))
    return found


def try_policies(kind: MediaKind, container: str, odd: bytes, good: list[bytes]) -> dict[str, Any]:
    """A file in the middle of a source, with both policies; then in the place of a good one behind the index."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        recipe = write_source(folder / "error", kind, container, [good[0], odd, good[1]], "error")
        message = refused(lambda: index_recipe(load_recipe(recipe), recipe.parent))
        told["indexed"] = message or "taken"
        if message is None:
            told["read"] = refused(lambda: check_rows(recipe, kind, good)) or "taken"
        recipe = write_source(folder / "mask", kind, container, [good[0], odd, good[1]], "mask")
        index_recipe(load_recipe(recipe), recipe.parent)
        rows = check_rows(recipe, kind, good)
        told["masked"] = "left out" if 1 not in rows else "comes"
        assert (message is None) == (1 in rows), "a row that the index refuses does not come"
        if container == "files":
            told["behind"] = refused(lambda: check_behind(folder, "error", kind, odd, good)) or "taken"
            assert 1 in check_behind(folder, "mask", kind, odd, good), "it is stood in for"
    return {key: value[:300] for key, value in told.items()}


def check_behind(folder: Path, bad_rows: str, kind: MediaKind, odd: bytes, good: list[bytes]) -> dict[int, np.ndarray]:
    """What comes of a file that takes the place of a good one after it was indexed."""
    recipe = write_source(folder / f"behind-{bad_rows}", kind, "files", [good[0], good[1], good[1]], bad_rows)
    index_recipe(load_recipe(recipe), recipe.parent)
    (recipe.parent / "odd" / f"1-0.{kind.suffix}").write_bytes(odd)
    return check_rows(recipe, kind, good)


def check_rows(recipe: Path, kind: MediaKind, good: list[bytes]) -> dict[int, np.ndarray]:
    """What comes: rows 0 and 2 as ever, row 1 as it was planned, or not at all."""
    rows = units_by_row(recipe, kind)
    catalog = index_recipe(load_recipe(recipe), recipe.parent)
    reader = ItemReader(catalog, recipe.parent)
    table, modality = reader.table("odd", kind.kind), reader.modality("odd", kind.kind)
    for row, units in rows.items():
        planned = PlannedItem.of("odd", modality, table, int(table.first_run_of_row[row]))
        counted = int(table.sizes[modality.units][int(table.first_run_of_row[row])])
        assert units.shape == (counted, modality.unit_values), "as the plan has it"
        if row != 1:
            wanted = modality.units_of(planned, good[row // 2], is_masked=False)
            assert np.array_equal(units, wanted), f"row {row} has other values"
    reader.close()
    assert {0, 2} <= set(rows)
    return rows


def try_one(seed: int, number: int) -> dict[str, Any]:
    """One file."""
    kind, number = KINDS[number % len(KINDS)], number // len(KINDS)
    name, odd = odd_file(kind, seed, number)
    rng = np.random.default_rng(seed)
    good = [kind.make(rng, 0), kind.make(rng, 4)]
    container = CONTAINERS[0] if number % 4 else CONTAINERS[1]
    found = in_process(lambda: try_policies(kind, container, odd, good))
    return {"kind": kind.kind, "name": name, "bytes": len(odd), **found}


def prepared() -> None:
    """Imports and their first use, which each fork would pay."""
    logging.getLogger("torchmix").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    for kind in KINDS:
        hostile(kind.kind)
        good = [kind.make(rng, 0), kind.make(rng, 4)]
        kind.units(good[0])


def main() -> None:
    """Run from the command line."""
    asked = trial_parser(__doc__, count=750, out="odd_files.json").parse_args()
    prepared()
    found = continued(asked, try_one, again=lambda one: "wrong" in one)
    for kind in KINDS:
        mine = [one for one in found.values() if one["kind"] == kind.kind]
        refusals = {key: sum(one.get(key, "taken") != "taken" for one in mine) for key in ("indexed", "read", "behind")}
        most = {key: max((one.get(key, 0) for one in mine), default=0) for key in ("mib", "cpu_s")}
        print(kind.kind, {"files": len(mine), "refused": refusals, "most": most})
    wrong = {f"{one['kind']}: {one['name']}": one["wrong"] for one in found.values() if "wrong" in one}
    print(json.dumps(wrong, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
