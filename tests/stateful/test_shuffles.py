"""Shuffling by page, by row and not at all, in whole jobs: the order, resumes, and what each decodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.catalogs import open_catalog
from tests.support.files import make_tokens_file, random_tokens
from tests.support.loaders import run_job, write_job
from torchmix.cli.findings import sources_findings
from torchmix.indexing.scan import index_recipe
from torchmix.mixture import windows as row_windows
from torchmix.parallel.topology import Topology
from torchmix.planner.planner import open_planner
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps.windows_ahead import WindowsAhead

STEPS = 6


@pytest.fixture(autouse=True)
def _short_windows_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_windows, "WINDOW_ROWS", 128)


@pytest.fixture(scope="module", params=["row", "none"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_job(tmp_path_factory.mktemp(request.param))
    text = path.read_text()
    path.write_text(text.replace("window_pages: 3", f"method: {request.param}, window_pages: 3"))
    return path


def test_a_resume_at_other_layouts_continues_the_order(job: Path) -> None:
    whole = run_job(job, Topology(dp=2), steps=STEPS, keep=False)[0].digests
    found: list[str] = []
    state = None
    for topology, steps in ((Topology(), 1), (Topology(dp=4), 2), (Topology(pp=2, dp=2), STEPS - 3)):
        ranks = run_job(job, topology, steps=steps, state=state, keep=False)
        found += ranks[0].digests
        state = ranks[-1].state
    assert found == whole


def test_every_source_gives_its_rows_as_the_recipe_says(job: Path) -> None:
    recipe = load_recipe(job)
    catalog = open_catalog(recipe, job.parent)
    planner = open_planner(part_of(recipe, "train"), catalog)
    cursor = planner.start()
    drawn: dict[str, list[tuple[int, int]]] = {name: [] for name in planner.sources}
    for _ in range(160):
        plan, cursor = planner.step(cursor)
        pieces = plan.pieces
        first = (pieces.start == 0) & (pieces.drawn_step == plan.step)
        columns = (pieces.source[first].tolist(), pieces.epoch[first].tolist(), pieces.row[first].tolist())
        for source, epoch, row in zip(*columns, strict=True):
            drawn[planner.sources[source]].append((epoch, row))
    for name, order in zip(planner.sources, planner.orders, strict=True):
        tokens = catalog.sources[name].sizes.tokens
        assert len(set(drawn[name])) == len(drawn[name]), "a document comes once an epoch"
        for epoch in range(max(epoch for epoch, _ in drawn[name])):
            assert {row for e, row in drawn[name] if e == epoch} <= set(np.flatnonzero(tokens).tolist())
        rows = np.concatenate([order.window(0, window).rows for window in range(order.num_windows)])
        if recipe.shuffle.method == "none":
            assert np.array_equal(rows, np.arange(len(tokens)))
        else:
            assert np.array_equal(np.sort(rows), np.arange(len(tokens))) and (np.diff(rows) < 0).any()
    assert max(epoch for epoch, _ in drawn["tiny"]) >= 1


def scattered(folder: Path, method: str, cache: str) -> Path:
    """One source of 4000 documents, 100 a page, whose windows of pages fit the cache."""
    # With ids that need 4 bytes, as check assumes.
    documents = random_tokens(1, 4000, mean_tokens=40, empty=0, vocabulary=10**6)
    make_tokens_file(folder / "web.parquet", documents, page_bytes=18_000)
    path = folder / "recipe.yaml"
    path.write_text(
        f"version: 1\nseed: 1\nbatch: {{samples: 8, length: 256}}\n"
        f"sources: {{web: {{path: web.parquet, tokens: input_ids}}}}\nmixture: {{web: 100%}}\n"
        f"shuffle: {{method: {method}, window_pages: 6}}\nread: {{cache: {cache}}}\n"
    )
    index_recipe(load_recipe(path), folder)
    return path


def steps_read(path: Path, num_steps: int) -> Iterator[dict[str, int | float]]:
    """What the reader did up to each step's end, as the loader reads it: pages ahead of need after the step."""
    recipe = load_recipe(path)
    catalog = open_catalog(recipe, path.parent)
    planner = open_planner(part_of(recipe, "train"), catalog)
    reader = Reader(catalog, path.parent, cache_bytes=parse_bytes(recipe.read.cache, where="read.cache"))
    windows = WindowsAhead(planner, reader)
    cursor = planner.start()
    for _ in range(num_steps):
        plan, cursor = planner.step(cursor)
        pieces = plan.pieces
        wanted = WantedPieces.end_to_end(
            source=pieces.source, row=pieces.row, epoch=pieces.epoch, start=pieces.start, tokens=pieces.tokens
        )
        reader.read(wanted)
        yield reader.stats()
        windows.follow(cursor)
    reader.close()


def test_by_page_no_step_but_the_first_waits_for_pages_and_each_is_decoded_once(tmp_path: Path) -> None:
    path = scattered(tmp_path, "page", "1MiB")
    source = open_catalog(load_recipe(path), tmp_path).sources["web"]
    assert source.pages.num_pages > 30 and source.sizes.window_pages == 6
    num_steps = source.num_tokens // (8 * 256)
    figures = list(steps_read(path, num_steps))
    missed = np.diff([figure["cache_misses"] for figure in figures])
    assert figures[0]["cache_misses"] == 6
    assert missed.max() <= 1, "the border of a window costs nothing"
    assert figures[-1]["pages_decoded"] <= source.pages.num_pages + 6, "and a window ahead"
    assert 1.0 <= figures[-1]["decode_amplification"] < 1.25


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.05, 0.5])
def test_by_row_every_step_costs_as_much_and_check_tells_how_much(tmp_path: Path, kept: float) -> None:
    path = scattered(tmp_path, "row", "1MiB")
    recipe = load_recipe(path)
    source = open_catalog(recipe, tmp_path).sources["web"]
    path = scattered(tmp_path, "row", str(int(kept * 2 * source.num_tokens)))  # ids below 65,536
    figures = list(steps_read(path, 80))
    missed = np.diff([figure["cache_misses"] for figure in figures])[20:]
    assert missed.max() < 3 * missed.mean(), "no window has a border"
    recipe = load_recipe(path)
    [note] = sources_findings(part_of(recipe, "train"), open_catalog(recipe, tmp_path), recipe.read)
    told = float(note.message.split("about ")[1].split()[0])
    assert note.where == "shuffle.method"
    served = figures[-1]["bytes_served"] - figures[20]["bytes_served"]
    decoded = figures[-1]["bytes_decoded"] - figures[20]["bytes_decoded"]
    assert 0.5 * told < decoded / served < 1.2 * told, (told, decoded / served)


def test_nothing_is_told_where_nothing_is_decoded_twice(tmp_path: Path) -> None:
    for method in ("row", "none"):
        path = scattered(tmp_path, method, "16MiB")
        recipe = load_recipe(path)
        catalog = open_catalog(recipe, tmp_path)
        assert list(sources_findings(part_of(recipe, "train"), catalog, recipe.read)) == []
        figures = list(steps_read(path, 2 * catalog.sources["web"].num_tokens // 2048))
        assert figures[-1]["pages_decoded"] == catalog.sources["web"].pages.num_pages


def test_unshuffled_each_page_is_decoded_once_with_hardly_a_cache(tmp_path: Path) -> None:
    path = scattered(tmp_path, "none", "64KiB")
    source = open_catalog(load_recipe(path), tmp_path).sources["web"]
    figures = list(steps_read(path, source.num_tokens // 2048))
    assert figures[-1]["decode_amplification"] < 1.1
    assert np.diff([figure["cache_misses"] for figure in figures]).max() <= 2
