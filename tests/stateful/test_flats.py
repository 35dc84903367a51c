"""A flat from a recipe to tensors: its rows are those of its members, each once an epoch, also over a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.loaders import run_job, write_job
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology

FLAT = "{web: 20%, all: {share: 80%, flat: [prose, tiny, web]}}"


def flat_job(folder: Path) -> Path:
    path = write_job(folder, samples=16)
    path.write_text(path.read_text().replace("{web: 60%, prose: 38%, tiny: 2%}", FLAT))
    return path


def test_a_flat_is_planned_trained_and_resumed(tmp_path: Path) -> None:
    job = flat_job(tmp_path)
    whole = run_job(job, Topology(), steps=12)[0]
    assert main(["plan", str(job), "--steps", "12", "--out", str(tmp_path / "plan")]) == 0
    steps = pq.read_table(tmp_path / "plan" / "steps.parquet").to_pylist()
    assert {row["stream"] for row in steps} == {"all", "web"}
    assert whole.digests[-1] == steps[-1]["order_digest"]
    first = run_job(job, Topology(), steps=5)[0]
    rest = run_job(job, Topology(dp=2), steps=7, state=first.state)[0]
    assert first.digests + rest.digests == whole.digests
    seen = {int(source) for each in whole.microbatches for source in np.unique(each.source_index.numpy())}
    assert {0, 2} <= seen, "prose and web are there, by source"


def test_the_tokens_of_a_flat_are_those_of_the_rows_that_the_plan_names(tmp_path: Path) -> None:
    job = flat_job(tmp_path)
    main(["plan", str(job), "--steps", "3", "--out", str(tmp_path / "plan")])
    pieces = pq.read_table(tmp_path / "plan" / "pieces.parquet").to_pylist()
    files = [pq.read_table(tmp_path / name)["input_ids"].to_pylist() for name in ("web-0.parquet", "web-1.parquet")]
    documents = [*files[0], *files[1]]
    rank = run_job(job, Topology(), steps=3)[0]
    tokens = {}
    for each in rank.microbatches:
        for place in range(each.tokens.shape[0]):
            tokens.setdefault(each.step, []).append(each.tokens[place].numpy())
    sample_of = {}
    for step in range(3):
        placed = sorted({(piece["microbatch"], piece["sample"]) for piece in pieces if piece["step"] == step})
        sample_of |= {(step, sample): tokens[step][at] for at, (_, sample) in enumerate(placed)}
    checked = 0
    for piece in pieces:
        if piece["stream"] == "all" and piece["source"] == "web":
            row = sample_of[piece["step"], piece["sample"]]
            found = row[piece["sample_offset"] :][: piece["tokens"]].tolist()
            assert found == documents[piece["row"]][piece["start"] :][: piece["tokens"]]
            checked += 1
    assert checked > 10


def test_check_and_show_know_flats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = flat_job(tmp_path)
    assert main(["check", str(job), "--steps", "20"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("all"))
    assert line.split()[1:3] == ["80", "%"] and "2,109" in line, "900 + 500 + 700 + 9 documents"
    assert main(["show", str(job), "--step", "1", "--json"]) == 0
    assert '"stream": "all"' in capsys.readouterr().out


def test_a_split_gives_a_flat_the_used_rows_of_each_part(tmp_path: Path) -> None:
    job = flat_job(tmp_path)
    job.write_text(job.read_text() + "split: [90, 10]\n")
    given: dict[str, list[tuple[str, int, int, str]]] = {}
    for part, more in (("train", ["--steps", "20"]), ("validation", ["--one-pass"])):
        out = tmp_path / part
        assert main(["plan", str(job), "--part", part, *more, "--out", str(out)]) == 0
        pieces = pq.read_table(out / "pieces.parquet").to_pylist()
        given[part] = [(one["source"], one["row"], one["start"], one["stream"]) for one in pieces]
    held = {(source, row) for source, row, _, _ in given["validation"]}
    assert not held & {(source, row) for source, row, _, _ in given["train"]}
    in_flat = [place for place in given["validation"] if place[3] == "all"]
    assert len(in_flat) == len(set(in_flat)), "no piece comes twice in a pass"
    rows = {name: {row for source, row, _, stream in in_flat if source == name} for name in ("prose", "tiny", "web")}
    assert rows["prose"] == set(range(630, 700)) and rows["tiny"] == {8}
    documents = [len(one) for name in ("web-0", "web-1") for one in tokens_of(tmp_path / f"{name}.parquet")]
    assert rows["web"] == {row for row in range(1260, 1400) if documents[row]}


def tokens_of(path: Path) -> list[list[int]]:
    return pq.read_table(path)["input_ids"].to_pylist()
