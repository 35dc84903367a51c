"""The example of images and text: it learns to look, and goes on at another layout as if nothing had happened."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.example import EXAMPLE
from tests.support.forks import TRAINING
from tests.support.processes import Processes

FOLDER = EXAMPLE.parent / "vlm"


def run(job: Path, *words: str, ranks: int, recipe: str = "threads.yaml") -> tuple[dict[int, float], float, float]:
    """Losses by step, and the held-out losses with the right images and with others."""
    folder = job / f"run-{len(list(job.iterdir()))}"
    folder.mkdir()
    script = str(FOLDER / "train_vlm.py")
    with Processes(folder) as processes:
        started = processes.start_ranks(script, str(job / recipe), *words, world_size=ranks, after=TRAINING)
        processes.wait_all(started, deadline_s=600)
        printed = started[0].stdout()
    steps = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", printed)}
    held_out = re.search(r"held out: loss (\S+), with other images (\S+)", printed)
    assert held_out is not None, printed
    return steps, float(held_out[1]), float(held_out[2])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and the example's recipe: `node.yaml` has batches of 4 samples, which a worker reads, and
    `threads.yaml` has batches of 8, which threads of the leaders read."""
    folder = tmp_path_factory.mktemp("vlm")
    spec = importlib.util.spec_from_file_location("make_pictures", FOLDER / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    make_pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_pictures)
    make_pictures.write_pictures(folder / "pictures", count=1500, seed=1)
    recipe = (FOLDER / "recipe.yaml").read_text(encoding="utf-8")
    for there, here in (("../../runs/vlm-catalog", "catalog"), ("../../runs/pictures", "pictures")):
        assert there in recipe
        recipe = recipe.replace(there, here)
    assert "{samples: 32," in recipe
    for name, samples, loaders in (("node", 4, "node"), ("threads", 8, "in_process")):
        text = recipe.replace("{samples: 32,", f"{{samples: {samples},") + f"loaders: {{where: {loaders}}}\n"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.system
@pytest.mark.examples
def test_it_learns_to_look(job: Path) -> None:
    losses, seen, blind = run(job, "--steps", "160", ranks=1, recipe="node.yaml")
    assert losses[159] < 0.2 * losses[0]
    assert blind > 1.5 * seen, "the loss is higher where the images are others"


@pytest.mark.system
@pytest.mark.examples
def test_it_goes_on_at_another_layout(job: Path) -> None:
    whole, seen, blind = run(job, "--steps", "4", ranks=1)
    half = str(job / "half.pt")
    run(job, "--steps", "2", "--save", half, ranks=2)
    rest, seen_then, blind_then = run(job, "--steps", "4", "--load", half, "--tp", "2", ranks=4)
    assert list(rest) == [3] and rest[3] == pytest.approx(whole[3], rel=1e-3)
    assert (seen_then, blind_then) == pytest.approx((seen, blind), rel=1e-3)
