"""Mutated files: every row that is delivered is right, or an error of torchmix says what is wrong.

    python -m tests.trials.mutations --seed 1 --count 3000 [--out mutations-1.json]

Each mutation changes bytes, regions, pages or frames of one file of some format. From a file changed *before* it is
indexed, torchmix must read what a reader without torchmix reads, or raise an error of its own. In one changed
*after*, every row must be as it was, or an error of torchmix's; of a .bin of Megatron's, which has no checksums, a row
may also be what now lies in its place.

A process of its own judges, with a limit of time for each. Mutation i follows from the seed and i alone, so a trial
that was stopped goes on where it was, and any one can be looked at again:

    python -m tests.trials.mutations --seed 1 --only 17
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.judge_process import judged_trial
from tests.support.mutated_files import Base, Refused, Rows, change, make_bases, rows_of
from tests.support.recipes import make_recipe
from torchmix.catalog.store import Catalog
from torchmix.errors import TorchmixError
from torchmix.formats.arrow import column as slices
from torchmix.formats.jsonl import lines as jsonl_pages
from torchmix.formats.megatron import source as documents
from torchmix.indexing.scan import index_recipe
from torchmix.reader.reader import Reader
from torchmix.recipe.structs import Recipe
from torchmix.storage import random_access as file_ends

MODULE = "tests.trials.mutations"
TIME_S = 120.0
"""For one mutation, which takes some hundredths of a second."""
SMALL_PAGE_BITS = 9
"""Pages are cut small, so that small files have many of them."""
HASHED_BYTES = 16
"""So much of both ends of a file is hashed: with the usual number, each change to a small file would be seen."""


class Wrong(Exception):
    """What must not be."""


def recipe_of(base: Base) -> Recipe:
    """A recipe of this file alone."""
    return make_recipe({"s": "100%"}, sources={"s": base.keys})


def read(catalog: Catalog, folder: Path) -> tuple[dict[int, list[int]], Counter[str]]:
    """Rows by number, and errors of pages that gave none."""
    found: dict[int, list[int]] = {}
    errors: Counter[str] = Counter()
    source = catalog.sources["s"]
    first_row = source.pages.first_row
    try:
        reader = Reader(catalog, folder, cache_bytes=0)
    except TorchmixError as error:
        return found, Counter([type(error).__name__])
    with contextlib.closing(reader):
        for page in range(source.pages.num_pages):
            try:
                decoded = reader.page(0, page)
            except TorchmixError as error:
                errors[type(error).__name__] += 1
                continue
            offsets, begin = np.asarray(decoded.offsets), int(first_row[page])
            if len(offsets) - 1 != int(first_row[page + 1]) - begin:
                raise Wrong(f"page {page} has {len(offsets) - 1} rows")
            rows = [decoded.values[a:b].tolist() for a, b in pairwise(offsets.tolist())]
            found |= dict(enumerate(rows, begin))
    return found, errors


def compare(found: dict[int, list[int]], *allowed: Rows) -> None:
    """Raise unless each row is that of one of some readings."""
    for row, ids in found.items():
        if all(row >= len(rows) or rows[row] != ids for rows in allowed):
            wanted = allowed[0][row] if row < len(allowed[0]) else None
            raise Wrong(f"row {row} is {ids[:50]}, not {wanted and wanted[:50]}")


class Judge:
    """Judges mutations of the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._bases = make_bases(folder)
        self._catalogs: dict[Path, Catalog] = {}
        self._rows: dict[Path, Rows] = {}

    def judge(self, seed: int, number: int) -> dict[str, Any]:
        """What becomes of one mutation."""
        chance = random.Random(f"{seed}/{number}")
        base, is_before = chance.choice(self._bases), chance.random() < 0.5
        rows, catalog = self._known(base)
        part = chance.choice(base.parts)
        place = catalog.sources["s"].pages.place(np.arange(catalog.sources["s"].pages.num_pages))
        pages = list(zip(place.offset.tolist(), place.num_bytes.tolist(), strict=True))
        content = part.read_bytes()
        changed, done = change(content, pages if part == base.path else [], chance)
        told = {"file": part.name, "when": "before" if is_before else "after", "done": done}
        if changed == content:
            return {**told, "verdict": "the same bytes"}
        part.write_bytes(changed)
        try:
            verdict = self._before(base, rows) if is_before else self._after(base, rows, catalog)
        except Exception as error:
            verdict = f"WRONG {type(error).__name__}: {error}\n{traceback.format_exc()}"
        finally:
            part.write_bytes(content)
        return {**told, "verdict": verdict}

    def _known(self, base: Base) -> tuple[Rows, Catalog]:
        if base.path not in self._rows:
            self._rows[base.path] = rows_of(base)
            self._catalogs[base.path] = index_recipe(recipe_of(base), base.path.parent)
            found, errors = read(self._catalogs[base.path], base.path.parent)
            compare(found, self._rows[base.path])
            assert not errors and len(found) == len(self._rows[base.path]), f"{base.path}: {errors}"
        return self._rows[base.path], self._catalogs[base.path]

    def _before(self, base: Base, rows: Rows) -> str:
        """What the other reader refuses may be read, if it is what was there before: it may have looked at more."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for part in base.parts:
                shutil.copy(part, folder / part.name)
            try:
                catalog = index_recipe(recipe_of(base), folder)
            except TorchmixError as error:
                return f"refused by the index: {type(error).__name__}"
            found, errors = read(catalog, folder)
            try:
                others = rows_of(base)
            except Refused as error:
                try:
                    compare(found, rows)
                except Wrong as wrong:
                    raise Wrong(f"the other reader refuses it ({error}); {wrong}") from None
                return "read as it was, refused by the other reader"
            compare(found, others)
            if errors:
                raise Wrong(f"indexed, and then refused: {dict(errors)}")
            if len(found) != len(others) and found:
                raise Wrong(f"{len(found)} rows, the other reader has {len(others)}")
            return "read as by the other reader" + ("" if others != rows else ", as it was")

    def _after(self, base: Base, rows: Rows, catalog: Catalog) -> str:
        found, errors = read(catalog, base.path.parent)
        allowed = [rows]
        if base.format == "megatron":
            with contextlib.suppress(Refused):
                allowed.append(rows_of(base))
        compare(found, *allowed)
        if found and any(ids != rows[row] for row, ids in found.items()):
            return "read as a .bin now is"
        if errors:
            return f"refused: {', '.join(sorted(errors))}" + (", other pages read" if found else "")
        return "read as it was"


def judge_numbers(seed: int) -> None:
    """Judge the numbers that come on stdin, one a line; a line of JSON for each goes to stdout."""
    logging.disable(logging.CRITICAL)
    jsonl_pages.PAGE_BYTES = slices.PAGE_BYTES = 1 << SMALL_PAGE_BITS
    documents.PAGE_BITS = SMALL_PAGE_BITS
    file_ends.HASHED_BYTES = HASHED_BYTES
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(judge.judge(seed, int(line))), flush=True)


if __name__ == "__main__":
    judged_trial(MODULE, __doc__, judge_numbers, count=3000, limit_s=TIME_S)
