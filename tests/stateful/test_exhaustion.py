"""The end of a source: an error that a recipe with more epochs can go on from, or a decision that the state keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loaders import Rank, run_job, take, write_job
from torchmix.errors import SourceExhausted
from torchmix.parallel.topology import Topology
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.steps.state import decode_state


def job_with(directory: Path, exhaustion: str) -> Path:
    path = write_job(directory)
    text = path.read_text().replace("{path: tiny.parquet,", "{path: tiny.parquet, " + exhaustion)
    path.write_text(text.replace("prose: 38%, tiny: 2%", "prose: 30%, tiny: 10%"))
    return path


def run_until_exhausted(job: Path) -> Rank:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        with pytest.raises(SourceExhausted, match=r"'tiny'.*max_epochs \(1\)"):
            take(loader, rank, None)

    return run_job(job, Topology(), program=program)[0]


def test_a_run_that_ran_out_goes_on_with_more_epochs_as_if_it_had_had_them(tmp_path: Path) -> None:
    unlimited = run_job(job_with(tmp_path, ""), Topology(), steps=50)[0]
    stopped = run_until_exhausted(job_with(tmp_path, "max_epochs: 1,"))
    num_steps = len(stopped.digests)
    assert 10 < num_steps < 45
    rest = run_job(job_with(tmp_path, "max_epochs: 9,"), Topology(), steps=50 - num_steps, state=stopped.state)[0]
    assert stopped.digests + rest.digests == unlimited.digests


def test_a_source_that_gave_its_share_away_stays_away_after_a_resume(tmp_path: Path) -> None:
    job = job_with(tmp_path, "max_epochs: 1, on_exhausted: renormalise,")
    whole = run_job(job, Topology(), steps=50)[0]
    first = run_job(job, Topology(), steps=42)[0]
    state = decode_state(first.state["torchmix_state"], recipe=recipe_fingerprint(load_recipe(job)))
    assert [decision.name for decision in state.at.decisions] == ["tiny"]
    rest = run_job(job, Topology(dp=2), steps=8, state=first.state)[0]
    assert first.digests + rest.digests == whole.digests
    late = [m for m in whole.microbatches if m.step > state.at.decisions[0].step + 1]
    assert late and not any((m.source_index == 1).any() for m in late)  # prose 0, tiny 1, web 2
