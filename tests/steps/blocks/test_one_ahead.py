"""The next item is made while the present one is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support.deadlines import LONG_S
from tests.support.fleets import running
from tests.support.loaders import write_job
from torchmix.catalog.store import open_part
from torchmix.parallel.place_tree import Layout
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.open_fleet import FleetSettings
from torchmix.steps import replica_steps
from torchmix.steps.blocks import one_ahead
from torchmix.steps.local_steps import local_steps
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.state import start_state


def numbers(closed: threading.Event, *, fails_at: int = -1) -> Iterator[int]:
    try:
        for number in range(5):
            if number == fails_at:
                raise ValueError("no")
            yield number
    finally:
        closed.set()


def test_all_items_come_in_order_and_an_error_in_its_place() -> None:
    closed = threading.Event()
    assert list(one_ahead(numbers(closed))) == [0, 1, 2, 3, 4]
    assert closed.is_set()
    failing = one_ahead(numbers(closed, fails_at=2))
    assert [next(failing), next(failing)] == [0, 1]
    with pytest.raises(ValueError, match="no"):
        next(failing)


def test_closing_closes_the_items_and_leaves_no_thread() -> None:
    closed, before = threading.Event(), threading.active_count()
    items = one_ahead(numbers(closed))
    assert next(items) == 0
    items.close()
    assert closed.is_set() and threading.active_count() == before


def test_loaders_are_asked_for_a_step_while_the_one_before_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path)
    recipe = load_recipe(job)
    part = part_of(recipe, "train")
    catalog = open_part(tmp_path / recipe.catalog, part)
    layout = Layout(dp=1, micro_batch_size=1)
    state = start_state(layout, recipe=part)
    build, read, asked = replica_steps.build_step, FleetReader.read, threading.Semaphore(0)

    def noted(self, *arguments, **options):
        asked.release()
        return read(self, *arguments, **options)

    def patient(settings, plan, *arguments, **options):
        if plan.step == 0:
            assert asked.acquire(timeout=LONG_S) and asked.acquire(timeout=LONG_S), "the next one is not asked for"
        return build(settings, plan, *arguments, **options)

    monkeypatch.setattr(FleetReader, "read", noted)
    monkeypatch.setattr(replica_steps, "build_step", patient)

    def settings(fleet: FleetSettings | None) -> StreamSettings:
        return StreamSettings(
            part=part,
            base=str(tmp_path),
            catalog_folder=str(tmp_path / recipe.catalog),
            cache_bytes=1 << 24,
            replica=0,
            layout=layout,
            max_steps=12,
            fleet=fleet,
        )

    with running(catalog, tmp_path, seed=recipe.seed) as server:
        fleet = FleetSettings(endpoints=(server.endpoint,), lost_s=LONG_S)
        given = [step.fields["tokens"].copy() for step in local_steps(settings(fleet), state)]
    monkeypatch.setattr(replica_steps, "build_step", build)
    expected = [step.fields["tokens"].copy() for step in islice(local_steps(settings(None), state), 20)]
    assert len(given) == len(expected) == 12
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_array_equal(one, other)
