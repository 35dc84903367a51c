"""The next item is made while the present one is used."""

from __future__ import annotations

import threading
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
from torchmix.steps.local_steps import local_blocks
from torchmix.steps.replica_steps import StreamOptions, StreamSettings
from torchmix.steps.state import start_state


def test_loaders_are_asked_for_a_step_while_the_one_before_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path)
    recipe = load_recipe(job)
    part = part_of(recipe, "train")
    catalog = open_part(tmp_path / recipe.catalog, part)
    layout = Layout(dp=1, micro_batch_size=1)
    state = start_state(layout, recipe=part)
    made, fill, asked = replica_steps.modules_of_step, FleetReader.fill, threading.Semaphore(0)

    def noted(self, *arguments, **options):
        asked.release()
        return fill(self, *arguments, **options)

    def patient(settings, plan, *arguments, **options):
        if plan.step == 0:
            assert asked.acquire(timeout=LONG_S) and asked.acquire(timeout=LONG_S), "the next one is not asked for"
        return made(settings, plan, *arguments, **options)

    monkeypatch.setattr(FleetReader, "fill", noted)
    monkeypatch.setattr(replica_steps, "modules_of_step", patient)

    def settings(fleet: FleetSettings | None) -> StreamSettings:
        return StreamSettings(
            part=part,
            base=str(tmp_path),
            catalog_folder=str(tmp_path / recipe.catalog),
            cache_bytes=1 << 24,
            replica=0,
            layout=layout,
            options=StreamOptions(max_steps=12),
            fleet=fleet,
        )

    with running(catalog, tmp_path, seed=recipe.seed) as server:
        fleet = FleetSettings(endpoints=(server.endpoint,), lost_s=LONG_S)
        given = [block.fields["tokens"].copy() for block in local_blocks(settings(fleet), state)]
    monkeypatch.setattr(replica_steps, "modules_of_step", made)
    expected = [block.fields["tokens"].copy() for block in islice(local_blocks(settings(None), state), 20)]
    assert sum(map(len, given)) == sum(map(len, expected)) == 12 * 8
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_array_equal(one, other)
