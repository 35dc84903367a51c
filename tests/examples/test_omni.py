"""The example of four kinds: each source is learned, on two ranks, and what is heard decides."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.example import EXAMPLE
from tests.support.forks import TRAINING
from tests.support.processes import Processes

FOLDER = EXAMPLE.parent / "omni"
STEPS = 60


@pytest.mark.system
@pytest.mark.examples
def test_each_kind_is_learned(tmp_path: Path) -> None:
    for package in ("av", "soundfile", "soxr"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("make_items", FOLDER / "make_items.py")
    assert spec is not None and spec.loader is not None
    make_items = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_items)
    make_items.write_items(tmp_path / "omni", count=300, seed=1)
    recipe = (FOLDER / "recipe.yaml").read_text(encoding="utf-8")
    for there, here in (("../../runs/omni-catalog", "catalog"), ("../../runs/omni/", "omni/"), (": 32,", ": 8,")):
        assert there in recipe
        recipe = recipe.replace(there, here)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe + "loaders: {where: in_process}\n", encoding="utf-8")
    words = (str(path), "--steps", str(STEPS), "--held-out-steps", "3")
    with Processes(tmp_path) as processes:
        started = processes.start_ranks(str(FOLDER / "train_omni.py"), *words, world_size=2, after=TRAINING)
        processes.wait_all(started, deadline_s=600)
        printed = started[0].stdout()
    pattern = r"held out (\w+): loss (\S+) before, (\S+) after, (\S+) with other items"
    found = {source: [float(one) for one in rest] for source, *rest in re.findall(pattern, printed)}
    assert sorted(found) == ["clips", "pictures", "sounds", "texts"], printed
    for source, (before, after, _) in found.items():
        assert after < 0.25 * before, (source, printed)
    assert found["sounds"][2] > 1.5 * found["sounds"][1], "others are heard"
    assert found["texts"][2] == pytest.approx(found["texts"][1], rel=1e-3), "texts have no items"
