"""Edits of a run whose pages lie with loaders: which catalogs those serve that started before, or start later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.stateful.test_edits import go_on
from tests.stateful.test_eras import ALONE, ROWS, given, make_file, source, stream_of, write
from tests.support.fleets import fleet_reader, hello_of, running
from tests.support.loaders import run_job, same_microbatches
from torchmix.boards.socket_folders import socket_folder
from torchmix.catalog.store import Catalog, open_part
from torchmix.errors import CatalogStale, LoaderLost
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service import main as service_main
from torchmix.service.main import LoaderStart, parts_with_catalog
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.served import transforms_digest

LINES = source("a", '"a/*.parquet"') + source("b", '"b/*.parquet"')
SHARES = "{a: 80%, b: 20%}"


@contextmanager
def loaders(recipe: Path) -> Iterator[None]:
    """Two loaders of a recipe as it is now; leaders that are opened here ask them, and see no file."""
    part = part_of(load_recipe(recipe), "train")
    parts = partial(parts_with_catalog, {"train": part}, recipe.parent / "catalog", recipe.parent)
    catalog = open_part(recipe.parent / "catalog", part)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        options = {"seed": part.seed, "parts_with": parts}
        some = [stack.enter_context(running(catalog, recipe.parent, **options)) for _ in range(2)]
        settings = FleetSettings(endpoints=tuple(sorted(one.endpoint for one in some)), lost_s=60)
        patch.setattr("torchmix.stateful.leader.remote_loaders", lambda *_: settings)
        patch.setattr("torchmix.steps.local_steps.Reader", unreadable)
        yield


def unreadable(*_: object, **__: object) -> None:
    raise LoaderLost("this trainer sees no data")


def test_files_that_are_added_come_from_loaders_that_were_started_before(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    make_file(tmp_path, "b/0.parquet", 10_000)
    path = write(tmp_path, LINES, SHARES)
    with loaders(path):
        [first] = run_job(path, ALONE, steps=15)
        make_file(tmp_path, "a/1.parquet", ROWS)
        write(tmp_path, LINES, SHARES)
        [after] = go_on(path, first.state, 25)
        [late] = run_job(path, ALONE, steps=5, state=after.state)
    assert stream_of(after, "a").era == 1
    assert sum(ROWS <= number < 2 * ROWS for number in given([after])) > 20
    [again] = go_on(path, first.state, 25)
    assert same_microbatches(after.microbatches, again.microbatches)
    assert same_microbatches(late.microbatches, run_job(path, ALONE, steps=5, state=again.state)[0].microbatches)


@pytest.mark.slow
def test_sources_that_are_added_need_loaders_of_the_new_recipe(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    make_file(tmp_path, "b/0.parquet", 10_000)
    make_file(tmp_path, "c/0.parquet", 20_000)
    path = write(tmp_path, LINES, SHARES)
    with loaders(path):
        [first] = run_job(path, ALONE, steps=5)
        write(tmp_path, LINES + source("c", "c/0.parquet"), "{a: 60%, b: 20%, c: 20%}")
        with pytest.raises(LoaderLost, match="before the recipe was edited is started again"):
            go_on(path, first.state, 5)
    with loaders(path):
        [after] = go_on(path, first.state, 5)
    [again] = go_on(path, first.state, 5)
    assert same_microbatches(after.microbatches, again.microbatches)
    assert any(number >= 20_000 for number in given([after]))


def test_shares_that_change_need_no_other_loaders(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    make_file(tmp_path, "b/0.parquet", 10_000)
    path = write(tmp_path, LINES, SHARES)
    with loaders(path):
        [first] = run_job(path, ALONE, steps=5)
        write(tmp_path, LINES, "{a: 20%, b: 80%}")
        [after] = go_on(path, first.state, 5)
    assert same_microbatches(after.microbatches, go_on(path, first.state, 5)[0].microbatches)


@pytest.mark.parametrize("edit", ["files", "settings"])
def test_a_loader_that_starts_beside_a_newer_catalog_serves_those_of_runs(tmp_path: Path, edit: str) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    make_file(tmp_path, "b/0.parquet", 10_000)
    path = write(tmp_path, LINES, SHARES)
    folder, part = tmp_path / "catalog", part_of(load_recipe(path), "train")
    of_runs = []
    for first in (ROWS, 2 * ROWS):
        of_runs.append(open_part(folder, part))
        run_job(path, ALONE, steps=1, keep=False)
        make_file(tmp_path, f"a/{first}.parquet", first)
        write(tmp_path, LINES, SHARES)
    if edit == "settings":
        write(tmp_path, LINES.replace('"a/', '"./a/'), SHARES)
    parts = partial(parts_with_catalog, {"train": part}, folder, tmp_path)
    now = parts()["train"].catalog  # with other settings, any that a run has had
    assert (now.fingerprint in [one.fingerprint for one in of_runs]) is (edit == "settings")
    options = {"seed": part.seed, "parts_with": parts}
    with running(now, tmp_path, **options) as loader:
        for one in of_runs:
            rows = np.arange(one.sources["a"].num_documents)
            tokens = one.sources["a"].sizes.tokens.astype(np.int64)
            asked = WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=tokens)
            with (
                fleet_reader(one, [loader.endpoint], seed=part.seed) as reader,
                closing(Reader(one, tmp_path, cache_bytes=1 << 20, seed=part.seed)) as here,
            ):
                assert np.array_equal(reader.read(asked).values, here.read(asked).values)
    assert [one.sources["a"].num_documents for one in of_runs] == [ROWS, 2 * ROWS]


def test_a_catalog_that_no_run_has_had_is_refused_by_name(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    make_file(tmp_path, "b/0.parquet", 10_000)
    path = write(tmp_path, LINES, SHARES)
    folder, part = tmp_path / "catalog", part_of(load_recipe(path), "train")
    of_run = open_part(folder, part)
    run_job(path, ALONE, steps=1, keep=False)
    of_none: Catalog | None = None
    for first in (ROWS, 2 * ROWS):
        make_file(tmp_path, f"a/{first}.parquet", first)
        write(tmp_path, LINES, SHARES)
        of_none = of_none or open_part(folder, part)
    assert of_none is not None
    with ExitStack() as stack:
        start = LoaderStart(
            parts={"train": part},
            base=str(tmp_path),
            catalog_folder=str(folder),
            cache_bytes=1 << 20,
            bind=f"ipc://{stack.enter_context(socket_folder())}/0",
        )
        server = service_main._open(start, stack)
        said, nothing = (
            server._served.refusal(hello_of(one, transforms=transforms_digest(one, part.seed)))
            for one in (of_none, of_run)
        )
        server.stop()
        server.run()  # which closes what it listens at
        now = open_part(folder, part).fingerprint
        assert of_none.fingerprint in said and f"serves {now} (train), and no run" in said and not nothing
    path.write_text(path.read_text().replace('"a/', '"./a/'))
    other = part_of(load_recipe(path), "train")
    with pytest.raises(CatalogStale, match="was built with path"):
        parts_with_catalog({"train": other}, folder, tmp_path)
