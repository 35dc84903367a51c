"""Changes of the schedule that began at an epoch, over edits: what has begun stays begun, and a ramp goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.stateful.test_edits import go_on
from tests.stateful.test_eras import given, make_file, source, write
from tests.support.loaders import Rank, run_job
from torchmix.parallel.topology import Topology
from torchmix.steps.state import read_state

ALONE = Topology()
SMALL = range(10_000, 10_040)
CHANGE = "{from: {epochs: 1, of: b}, to: 10 steps, set: {a: 90%}}"


def recipe(folder: Path, schedule: str = CHANGE, *, mixture: str = "{a: 50%, b: 50%}", more: str = "") -> Path:
    lines = source("a", "a/0.parquet") + source("b", "b/0.parquet") + source("c", "c/0.parquet") * ("c" in mixture)
    return write(folder, lines, mixture, more=f"schedule: [{schedule}]\n{more}")


def files(folder: Path) -> None:
    make_file(folder, "a/0.parquet", 0)
    make_file(folder, "b/0.parquet", 0, SMALL)
    make_file(folder, "c/0.parquet", 20_000)


def begun(rank: Rank) -> list[tuple[int, str, int]]:
    state = read_state(rank.state["torchmix_state"])
    return [(one.step, one.name, one.epochs) for one in state.at.decisions if one.kind == "stage"]


def share(ranks: list[Any], lowest: int, highest: int) -> float:
    counts = given(ranks)
    return sum(n for number, n in counts.items() if lowest <= number < highest) / sum(counts.values())


@pytest.mark.parametrize("steps_on_the_ramp", [4, 30])
def test_a_denied_document_restarts_no_ramp(tmp_path: Path, steps_on_the_ramp: int) -> None:
    files(tmp_path)
    path = recipe(tmp_path)
    [whole] = run_job(path, ALONE, steps=60)
    [(begins, _, _)] = begun(whole)
    assert 4 < begins < 25
    [first] = run_job(path, ALONE, steps=begins + steps_on_the_ramp)
    pq.write_table(pa.table({"source": ["b"], "row": pa.array([5], pa.int64())}), tmp_path / "deny.parquet")
    recipe(tmp_path, more="deny: [deny.parquet]")
    [after] = go_on(path, first.state, 6)
    assert begun(after) == [(begins, "b", 1)]
    late = [one for one in whole.microbatches if 0 <= one.step - begins - steps_on_the_ramp < 6]
    [unedited] = [share([Rank(microbatches=late)], 0, 200)]
    assert share([after], 0, 200) == pytest.approx(unedited, abs=0.1)
    assert share([after], 0, 200) > (0.6 if steps_on_the_ramp == 4 else 0.85)


@pytest.mark.parametrize(
    ("schedule", "mixture", "kept", "lowest"),
    [
        (CHANGE.replace("90%", "80%"), "{a: 50%, b: 50%}", True, 0.75),  # other shares, of the same change
        (CHANGE.replace("a: 90%", "a: 80%"), "{a: 40%, b: 40%, c: 20%}", True, 0.75),  # a source more
        (CHANGE.replace("{epochs: 1, of: b}", "{epochs: 3, of: b}"), "{a: 50%, b: 50%}", False, 0.4),
        (
            "{from: {epochs: 1, of: b}, set: {a: 30%}}, " + CHANGE.replace("epochs: 1", "epochs: 9"),
            "{a: 50%, b: 50%}",
            True,
            0.2,
        ),
        (f"{CHANGE}, {{from: 1 steps, set: {{a: 70%}}}}", "{a: 50%, b: 50%}", False, 0.6),  # overtakes it
    ],
)
def test_what_the_edited_schedule_still_has_stays_begun(
    tmp_path: Path, schedule: str, mixture: str, kept: bool, lowest: float
) -> None:
    files(tmp_path)
    path = recipe(tmp_path)
    [first] = run_job(path, ALONE, steps=35)
    [decision] = begun(first)
    assert decision[0] < 22, "the ramp is over"
    recipe(tmp_path, schedule, mixture=mixture)
    [after] = go_on(path, first.state, 8)
    assert begun(after) == ([decision] if kept else [])
    assert lowest < share([after], 0, 200) < lowest + 0.2
