"""torchmix top and torchmix doctor, on this process and on processes of a run."""

from __future__ import annotations

import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.loaders import write_job
from torchmix.boards import board
from torchmix.cli.main import main
from torchmix.cli.watch.top import _title
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader


def top(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["top", "--interval", "0.05", *words]) == 0
    return capsys.readouterr().out


def own_processes(output: str) -> list[tuple[str, dict[str, Any]]]:
    runs = json.loads(output)["runs"]
    return [(run["run"], one) for run in runs for one in run["processes"] if one["pid"] == os.getpid()]


def test_top_shows_what_a_loader_in_this_process_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path)
    monkeypatch.setattr(board.own_board, "_figures", {})  # of loaders that other tests in this process have not closed
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        [(run, before)] = own_processes(top(capsys, "--json"))
        assert run.startswith(str(job)) and before["figures"]["train"] == {"step": -1}
        for microbatch in islice(loader, 24):
            last = microbatch.step
        assert loader._header is not None
        monkeypatch.setattr(board, "SHOW_S", 0.0)
        loader._shown.step(loader._header, workers_lost=0)
        [(_, found)] = own_processes(top(capsys, "--json"))
        assert found["kind"] == "trainer" and found["state"] == "running"
        assert found["facts"] == {"rank": 0, "world_size": 1}
        figures = found["figures"]["train"]
        assert figures["step"] == last
        assert figures["total_tokens"] > 0 and figures["total_data_wait_s"] > 0
        assert figures["decode_amplification"] >= 1
        text = top(capsys, "--once", "--explain")
        assert re.search(rf"trainer 0 +{os.getpid()} +running +[\d,]+ MiB", text)
        assert "part of the time that training waited" in text
    assert [one["figures"] for _, one in own_processes(top(capsys, "--json"))] == [{}]


def test_people_see_a_recipe_from_where_they_are_and_a_short_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = "a8a1138f-6ff2-4bef-b5be-d5ea8245f053"
    assert _title(f"{tmp_path}/runs/recipe.yaml {job}") == "runs/recipe.yaml a8a1138f"
    assert _title("/recipe.yaml job-17") == "/recipe.yaml job-17", "the shorter of both names"


def test_an_interval_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--interval", "soon"]) == 2
    assert main(["top", "--interval", "0"]) == 2
    assert "between 0.05 and 3600" in capsys.readouterr().err
