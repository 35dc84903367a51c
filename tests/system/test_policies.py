"""Real ranks with a policy: losses reduced over gloo, decisions followed by the node's worker, a resume elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stateful.test_reports import DYNAMIC, digests
from tests.support.loaders import write_job
from tests.support.processes import Processes

STOP = 14
DEADLINE_S = 120.0


@pytest.mark.system
@pytest.mark.parametrize("where", ["in_process", "node"])
def test_a_job_of_real_ranks_decides_as_one_process_does_and_goes_on_elsewhere(where: str, tmp_path: Path) -> None:
    expected = [
        f"step {step} digest {digest}"
        for step, digest in enumerate(digests(write_job(tmp_path / "alone", extra=DYNAMIC), stop=STOP))
    ]
    recipe = write_job(tmp_path, extra=DYNAMIC)
    found: list[list[str]] = []
    for number, words in enumerate([(where, "1", "9"), (where, "2", str(STOP), str(tmp_path / "state-1"))]):
        (tmp_path / f"start-{number}").mkdir()
        with Processes(tmp_path / f"start-{number}") as processes:
            ranks = processes.start_ranks("-m", "tests.support.policy_rank", str(recipe), *words, world_size=2)
            processes.wait_all(ranks, deadline_s=DEADLINE_S)
            lines = [rank.stdout().splitlines() for rank in ranks]
        assert lines[0] == lines[1]
        found.append(lines[0])
    assert [*found[0], *found[1]] == expected
    assert len(list((tmp_path / "log").glob("*.jsonl"))) == 2, "a branch a start"
    assert (tmp_path / "state-0").read_bytes() == (tmp_path / "state-1").read_bytes()
