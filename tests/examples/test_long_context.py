"""The example of runs of ranks: eight ranks learn what one does, with documents over one, two or more of them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.example import EXAMPLE
from tests.support.forks import TRAINING
from tests.support.processes import Processes

FOLDER = EXAMPLE.parent / "long_context"
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and two recipes: of the example, and of a rank that holds the longest document alone."""
    folder = tmp_path_factory.mktemp("long")
    spec = importlib.util.spec_from_file_location("make_texts", FOLDER / "make_texts.py")
    assert spec is not None and spec.loader is not None
    make_texts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_texts)
    make_texts.write_texts(folder / "texts", FOLDER.parents[1] / "torchmix")
    recipe = (FOLDER / "recipe.yaml").read_text(encoding="utf-8")
    changes = {
        "../../runs/long-catalog": "catalog",
        "../../runs/texts": "texts",
        "samples: 4, length: 4096": "samples: 4, length: 512",
        "rank_tokens: 1024": "rank_tokens: 128",
    }
    for there, here in changes.items():
        assert there in recipe
        recipe = recipe.replace(there, here)
    recipe += "loaders: {where: in_process}\n"
    (folder / "runs.yaml").write_text(recipe, encoding="utf-8")
    alone = recipe.replace("rank_tokens: 128", "rank_tokens: 512")
    (folder / "alone.yaml").write_text(alone, encoding="utf-8")
    return folder


def run(job: Path, recipe: str, *words: str, ranks: int) -> tuple[dict[int, float], str]:
    """Losses by step, and all that rank 0 has printed."""
    folder = job / f"run-{len(list(job.iterdir()))}"
    folder.mkdir()
    with Processes(folder) as processes:
        started = processes.start_ranks(
            str(FOLDER / "train_long.py"), str(job / recipe), "--double", *words, world_size=ranks, after=TRAINING
        )
        processes.wait_all(started, deadline_s=DEADLINE_S)
        printed = started[0].stdout()
    steps = re.findall(r"step (\d+): \d+ microbatches, loss (\S+)", printed)
    return {int(step): float(loss) for step, loss in steps}, printed


@pytest.mark.examples
@pytest.mark.system
def test_eight_ranks_learn_what_one_does_and_go_on_as_four(job: Path) -> None:
    alone, _ = run(job, "alone.yaml", "--steps", "3", ranks=1)
    half = str(job / "half.pt")
    first, printed = run(job, "runs.yaml", "--steps", "2", "--cp", "2", "--save", half, ranks=8)
    assert len(re.findall(r"\d+ of \d+", printed.splitlines()[-1])) > 1, printed
    rest, _ = run(job, "runs.yaml", "--steps", "3", "--load", half, ranks=4)
    assert (first | rest).keys() == alone.keys() == {0, 1, 2}
    for step, loss in (first | rest).items():
        assert loss == pytest.approx(alone[step], rel=1e-7)
