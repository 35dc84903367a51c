"""The example of FSDP2 and TP: steps that depend neither on the mesh nor on a change of it between two runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.example import EXAMPLE
from tests.support.files import make_text_file, random_texts
from tests.support.forks import TRAINING
from tests.support.processes import Processes

SCRIPT = EXAMPLE.parent / "fsdp" / "train_fsdp.py"


def run(job: Path, *words: str, ranks: int) -> list[tuple[int, float, str]]:
    """Steps of a run as rank 0 prints them: number, loss, digest."""
    folder = job / f"run-{len(list(job.iterdir()))}"
    folder.mkdir()
    with Processes(folder) as processes:
        started = processes.start_ranks(str(SCRIPT), str(job / "recipe.yaml"), *words, world_size=ranks, after=TRAINING)
        processes.wait_all(started, deadline_s=180)
        printed = started[0].stdout()
    lines = re.findall(r"step (\d+) loss (\S+) digest (\w+)", printed)
    return [(int(step), float(loss), digest) for step, loss, digest in lines]


def test_it_is_a_template() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.examples
@pytest.mark.system
def test_a_run_goes_on_at_another_mesh_as_if_nothing_had_happened(tmp_path: Path) -> None:
    make_text_file(tmp_path / "prose.parquet", random_texts(1, 300))
    (tmp_path / "recipe.yaml").write_text(
        "{version: 1, seed: 1, batch: {samples: 8, length: 64}, mixture: {prose: 100%}, "
        "sources: {prose: {path: prose.parquet, text: text, tokenizer: bytes}}}",
        encoding="utf-8",
    )
    whole = run(tmp_path, "--steps", "3", ranks=1)
    assert [step for step, *_ in whole] == list(range(3))
    step_1, step_2 = str(tmp_path / "step-1"), str(tmp_path / "step-2")
    parts = [  # meshes of dp 2 x tp 2, dp 2, tp 2
        *run(tmp_path, "--tp", "2", "--steps", "1", "--save", step_1, ranks=4),
        *run(tmp_path, "--micro-batch-size", "2", "--steps", "2", "--load", step_1, "--save", step_2, ranks=2),
        *run(tmp_path, "--tp", "2", "--steps", "3", "--load", step_2, ranks=2),
    ]
    assert [(step, digest) for step, _, digest in parts] == [(step, digest) for step, _, digest in whole]
    assert [loss for _, loss, _ in parts] == pytest.approx([loss for _, loss, _ in whole], abs=1e-4)
