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
from torchmix.boards.find import SeenProcess, runs_of
from torchmix.cli.main import main
from torchmix.cli.top import COLUMNS, LOADER_COLUMNS, _title, print_runs, run_values
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


def test_top_shows_loaders_of_a_fleet_and_what_has_happened(capsys: pytest.CaptureFixture[str]) -> None:
    def seen(kind: str, pid: int, at_s: float, figures: dict[str, Any], *events: str) -> SeenProcess:
        text = board.BoardText(
            kind=kind,
            pid=pid,
            started="1",
            parent_pid=5 if kind == "loader" else 1,
            parent_started="1",
            run="" if kind == "loader" else "job 7",
            since_s=at_s - 60,
            shown_s=at_s,
            facts={"rank": 0} if kind == "trainer" else {},
            figures={"serving" if kind == "loader" else "train": figures},
            events=[board.BoardEvent(at_s, event) for event in events],
        )
        return SeenProcess(board=text, state="running", pss_bytes=64 << 20, cpu_s=at_s / 2)

    def look(at_s: float) -> list[SeenProcess]:
        served = {"clients": 4, "requests_replies": 100 * at_s, "bytes_sent": at_s * (8 << 20), "clients_seen": 9}
        lost = ("loader 8 at tcp://a:1 was killed", "the node worker 9 is gone: a new one goes on")
        loader = seen("loader", 6, at_s, {**served, "decode_amplification": 1.25})
        return [seen("trainer", 5, at_s, {"step": int(at_s), "total_data_wait_s": at_s / 4}, *lost), loader]

    [run] = runs_of(look(12.0))
    values = run_values(run, look(10.0), 2.0)
    assert values["pss_bytes"] == 128 << 20
    trainer, loader = values["processes"]
    assert [event["text"] for event in trainer["events"]] == [
        "loader 8 at tcp://a:1 was killed",
        "the node worker 9 is gone: a new one goes on",
    ]
    assert (trainer["cpu"], trainer["figures"]["train"]["wait_fraction"]) == (0.5, 0.25)
    assert loader["figures"]["serving"]["replies_per_s"] == 100
    print_runs([values], explain=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("job 7: 2 processes, 128 MiB")
    assert lines[1].split() == [*COLUMNS, *LOADER_COLUMNS]
    assert lines[3].split()[-11:] == ["6", "running", "64", "MiB", "0.50", "serving", "1.25", "4", "100", "8", "MiB"]
    assert [line.split(": ", 1)[1] for line in lines[4:6]] == [event["text"] for event in trainer["events"]]
