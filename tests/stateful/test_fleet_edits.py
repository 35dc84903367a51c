"""Edits of a run whose pages lie with loaders: those started before read the newer catalog, or say why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.stateful.test_edits import go_on
from tests.stateful.test_eras import ALONE, ROWS, given, make_file, source, stream_of, write
from tests.support.fleets import running
from tests.support.loaders import run_job, same_microbatches
from torchmix.catalog.store import open_part
from torchmix.errors import LoaderLost
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.main import parts_to_serve
from torchmix.service.open_fleet import FleetSettings

LINES = source("a", '"a/*.parquet"') + source("b", '"b/*.parquet"')
SHARES = "{a: 80%, b: 20%}"


@contextmanager
def loaders(recipe: Path) -> Iterator[None]:
    """Two loaders of a recipe as it is now; leaders that are opened here ask them, and see no file."""
    part = part_of(load_recipe(recipe), "train")
    now = partial(parts_to_serve, {"train": part}, recipe.parent / "catalog", recipe.parent)
    catalog = open_part(recipe.parent / "catalog", part)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        options = {"seed": part.seed, "parts_now": now}
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
