"""ADO in a job that trains by Megatron's own schedules: 50 steps, a kill, and a resume at another layout.

Which losses a rank has seen is written down by its loss function, beside torchmix; the log must have these.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.support.forks import MEGATRON
from tests.support.layouts import Layout, write_bytes_job
from tests.support.processes import Processes
from torchmix.catalog.store import open_part
from torchmix.indexing.scan import index_recipe
from torchmix.mixture.policy_log import records_of_branch
from torchmix.planner.planner import open_planner
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps.decisions import EndedLog, last_branch
from torchmix.steps.state import read_state

pytestmark = pytest.mark.system

STEPS, KILL_AT = 50, 31
OPTIONS = "{ignore_steps: 2, start_step: 9, refit_steps: 10, every: 1}"
DYNAMIC = f"dynamic: {{policy: ado, options: {OPTIONS}, every: 5 steps, lag: 4 steps, decisions: ./log}}"
DEADLINE_S = 400.0


def test_ado_decides_over_a_kill_and_another_layout(tmp_path: Path) -> None:
    recipe = write_bytes_job(tmp_path, boundaries="document", extra=DYNAMIC)
    index_recipe(load_recipe(recipe), tmp_path)
    first = Layout(pp=2, dp=2, rerun=1, steps=STEPS)
    second = Layout(tp=2, dp=1, steps=STEPS)
    with Processes(tmp_path) as processes:
        words = [recipe, tmp_path / "out", DEADLINE_S, STEPS, KILL_AT, first.name, second.name]
        child = processes.fork_python("-m", "tests.support.megatron_restart", *map(str, words), after=MEGATRON)
        assert child.wait(deadline_s=DEADLINE_S + 300.0) == 0, child.report()
        went_on_at = json.loads(child.stdout().splitlines()[-1])["went_on_at"]
    log = tmp_path / "log"
    assert len(list(log.glob("*.jsonl"))) == 2, "a branch a start"
    records = [record for record, _ in records_of_branch(log, last_branch(log))]
    assert [record.step for record in records] == list(range(STEPS)) and went_on_at >= KILL_AT - 5
    assert any(record.shares for record in records[:went_on_at]) and any(
        record.shares for record in records[went_on_at:]
    )

    # The steps are those that the log decides, and all tokens of a step have told their loss.
    part = part_of(load_recipe(recipe), "train")
    planner = open_planner(part, open_part(tmp_path / "catalog", part), decisions=EndedLog(log, last_branch(log)))
    cursor = planner.start()
    for record in records:
        plan, cursor = planner.step(cursor)
        assert sum(tokens for _, tokens in record.losses.values()) == plan.num_tokens_global, record.step
    state = read_state(base64.b64decode((tmp_path / "out" / "state").read_text()))
    assert (state.step, state.order_digest) == (STEPS, cursor.order_digest)

    # The losses are those of the loss function; ranks of a tensor-parallel group have the same ones.
    seen: dict[str, float] = {}
    for key, rows in json.loads((tmp_path / "out" / "losses-0.json").read_text()).items():
        step = key.split("/")[0]
        seen[step] = seen.get(step, 0.0) + sum(loss for loss, _ in rows)
    assert sorted(map(int, seen)) == list(range(went_on_at, STEPS))
    for step, loss in seen.items():
        assert sum(total for total, _ in records[int(step)].losses.values()) == pytest.approx(loss, rel=1e-4)
