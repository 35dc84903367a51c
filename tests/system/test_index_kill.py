"""An index run is killed at random moments; the next run ends with the same catalog and leaves nothing behind."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.catalogs import make_world, open_catalog
from tests.support.files import random_texts, random_tokens
from tests.support.indexing import names_in
from tests.support.processes import Processes
from torchmix.catalog.manifest import read_manifest
from torchmix.errors import CatalogError
from torchmix.indexing.scan import index_recipe, index_sources
from torchmix.recipe.structs import Recipe

pytestmark = pytest.mark.system

SEED = 20261121
RUNS = 12
DEADLINE_S = 120.0


def make_corpus(tmp_path: Path) -> Recipe:
    """Eleven files of two sources, named by absolute paths, so that every run's folder can name them."""
    world = make_world(
        tmp_path / "data",
        {
            "peps": [random_texts(seed, 150) for seed in range(3)],
            "web": [random_tokens(seed, 200, mean_tokens=60) for seed in range(8)],
        },
    )
    sources = {
        name: msgspec.structs.replace(source, path=str(world.directory / name / "*.parquet"))
        for name, source in world.recipe.sources.items()
    }
    return msgspec.structs.replace(world.recipe, sources=sources)


def with_fewer_files(recipe: Recipe) -> Recipe:
    """The recipe when only the first three files of `web` were there."""
    path = recipe.sources["web"].path.replace("*", "[0-2]")
    sources = {**recipe.sources, "web": msgspec.structs.replace(recipe.sources["web"], path=path)}
    return msgspec.structs.replace(recipe, sources=sources)


def write_recipe(recipe: Recipe, folder: Path) -> Path:
    folder.mkdir()
    path = folder / "recipe.yaml"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(recipe, catalog="catalog")))
    return path


def fingerprint(recipe: Recipe, folder: Path) -> str | None:
    """Of the catalog that is published for a recipe; None if there is none."""
    try:
        catalog = open_catalog(recipe, folder)
    except CatalogError:
        return None
    for source in catalog.sources.values():
        source.sizes.check()
        source.pages.check()
    return catalog.fingerprint


def beside_arrays(names: set[str]) -> set[str]:
    """Files of a catalog but for those of arrays, whose names are random."""
    return {name for name in names if not name.startswith("arrays/")}


def test_a_killed_index_run_leaves_a_valid_catalog_and_the_next_one_finishes_it(tmp_path):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    recipe = make_corpus(tmp_path)
    few = with_fewer_files(recipe)
    resumed_files = published_before_kill = 0
    with Processes(tmp_path) as processes:
        whole = processes.fork_python("-m", "tests.support.index_run", str(write_recipe(recipe, tmp_path / "whole")))
        whole.wait_for_line("indexing", deadline_s=DEADLINE_S)
        began_s = time.monotonic()
        words = whole.wait_for_line("calls", deadline_s=DEADLINE_S).split()
        duration_s = time.monotonic() - began_s
        num_calls, wanted = int(words[1]), words[3]
        names = beside_arrays(names_in(tmp_path / "whole" / "catalog"))
        for run in range(RUNS):
            folder = tmp_path / f"run-{run}"
            path = write_recipe(recipe, folder)
            before = index_recipe(few, folder).fingerprint if run % 2 else None
            die_at = ("--die-at", str(rng.randrange(num_calls))) if run % 4 < 2 else ()
            killed = processes.fork_python("-m", "tests.support.index_run", str(path), *die_at)
            if not die_at:
                killed.wait_for_line("indexing", deadline_s=DEADLINE_S)
                time.sleep(rng.random() * duration_s)  # the moment of the kill; nothing waits for it
                killed.send_signal(signal.SIGKILL)
            code = killed.wait(deadline_s=DEADLINE_S)
            assert code in (-signal.SIGKILL, 0), processes.report()

            after = fingerprint(recipe, folder)
            assert after in (None, wanted), f"run {run}: a catalog of neither state"
            if after is None:
                assert fingerprint(few, folder) == before, f"run {run}: the catalog from before is not whole"
            published_before_kill += after is not None
            report = index_sources(recipe, folder)
            resumed_files += report.resumed_files
            assert report.catalog.fingerprint == wanted, f"run {run}"
            left = names_in(folder / "catalog")
            manifest = read_manifest(folder / "catalog")
            known = {entry.file for entry in manifest.sources.values()} | set(manifest.superseded)
            assert beside_arrays(left) == names, f"run {run}: {left}"
            assert {name.split("/")[1] for name in left if name.startswith("arrays/")} == known, f"run {run}: {left}"
    # The moments were spread: some runs were killed after files had been scanned, not all after the end.
    assert resumed_files > 0 and published_before_kill < RUNS
