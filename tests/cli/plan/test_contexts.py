"""`plan`, `check`, `show` and `trace` of a recipe with runs of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.planner.test_contexts import costs_of
from tests.support.command_line import values_of
from tests.support.projects import make_indexed_project
from torchmix.cli.main import main
from torchmix.cli.plan.command import ContextSums, sizes_text
from torchmix.planner.contexts import ContextPlan, place_in_contexts
from torchmix.planner.plans import plan

JOB = ("--world", "32", "--cp", "4", "--pp", "2")
"""16 ranks of dp x cp."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_indexed_project(
        tmp_path, ("balance: {method: rows, ", "packing: {method: whole}\nbalance: {context: {rank_tokens: 96}, ")
    )


def test_a_summary_has_runs_padding_and_the_slowest_rank(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of(capsys, "plan", str(recipe), "--steps", "6", *JOB)
    found = values["contexts"]
    assert len(found["bins_by_ranks"]) > 1 and 0 <= found["padding"] < 0.2
    assert 1 <= found["slowest_over_mean"] < 1.3
    assert 2 <= found["microbatches"]["least"] <= found["microbatches"]["mean"] <= found["microbatches"]["most"]
    assert 1 <= values["balance_ratio"] < 1.2 < values["hash_order_ratio"] and 1 <= values["fill"] < 1.1
    assert main(["plan", str(recipe), "--steps", "6", *JOB]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "padding; the slowest rank has 1." in lines["runs"] and "microbatches a step" in lines["rows"]
    of_last = found["sizes_of_last_step"]
    assert found["microbatches"]["least"] <= len(of_last) <= found["microbatches"]["most"]
    assert all(len(sizes) >= 1 and sum(sizes) <= 16 for sizes in of_last)
    assert sizes_text(of_last) in lines["sizes"]
    plain = values_of(capsys, "plan", str(make_indexed_project(recipe.parent / "plain")), "--steps", "2")
    assert plain["contexts"] is None


def ranks_of_bin(runs: ContextPlan) -> int:
    """The ranks of the one bin that has a document."""
    [size] = runs.size_of_bin[runs.tokens_of_bin > 0].tolist()
    return int(size)


def test_sizes_are_told_by_microbatch() -> None:
    text = sizes_text([[8, 4, 4], [1, 1], [1, 1], [], [2]])
    assert text == "1 x 8 + 2 x 4; 2 x 1 (2 times); none; 1 x 2, by microbatch of the last step"
    sums, (runs, _) = ContextSums(), place_in_contexts(np.array([1]), costs_of(8))
    sums.add(runs, 1)
    values = sums.values()
    assert values is not None and values["empty_bins"] and values["sizes_of_last_step"] == [[ranks_of_bin(runs)]]
    assert sizes_text([[1], [2]] * 5).endswith("1 x 2; and 4 more, by microbatch of the last step")


def test_without_sizes_the_job_is_the_smallest_that_holds_a_document(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = values_of(capsys, "plan", str(recipe), "--steps", "2")
    assert set(values["contexts"]["bins_by_ranks"]) <= {"1", "2", "4"}, "256 tokens fit 4 ranks of 96"
    assert main(["plan", str(recipe), "--steps", "2", "--dp", "2"]) == 2
    assert "does not fit the longest run of this job, 2 of its 2 ranks" in capsys.readouterr().err
    assert main(["check", str(recipe), "--steps", "2", "--dp", "2"]) == 2
    assert "does not fit the longest run of this job, 2 of its 2 ranks" in capsys.readouterr().err
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(
        text.replace("method: whole", "method: whole, overflow: drop").replace("length: 256", "length: 2")
    )
    assert main(["check", str(recipe), "--steps", "2"]) == 1
    assert "'tiny' would give no tokens: `overflow: drop` drops all beyond 2 tokens" in capsys.readouterr().out


def test_a_simulation_has_every_fixed_size(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = values_of(capsys, "plan", str(recipe), "--simulate", "--steps", "4", *JOB)["simulation"]
    names = list(found["orders"])
    assert names == ["hash order", "runs of 4", "runs of 8", "runs of 16", "this plan"]
    ideal = {name: one["each_microbatch"]["over_ideal"] for name, one in found["orders"].items()}
    assert all(1 <= ideal["this plan"] <= 1.001 * other for other in ideal.values())
    assert found["world"] == 32 and found["orders"]["this plan"]["at_end"]["seconds"] is not None
    assert main(["plan", str(recipe), "--simulate", "--steps", "1", *JOB, "--explain"]) == 0
    assert "- runs of 8: runs of this many ranks alone" in capsys.readouterr().out


def test_a_fixed_size_that_is_too_short_for_a_step_is_left_out(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the sum of the steps that it holds would stand beside sums of all."""
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("samples: 16", "samples: 1"))
    longest = [int(one.pieces.tokens.max()) for one in plan(recipe, steps=8, dp=16)]
    assert min(longest) <= 192 < max(longest), "runs of 2 hold some of the steps"
    found = values_of(capsys, "plan", str(recipe), "--simulate", "--steps", "8", *JOB)["simulation"]
    assert list(found["orders"]) == ["hash order", "runs of 4", "runs of 8", "runs of 16", "this plan"]
    assert all(one["each_microbatch"]["over_ideal"] >= 1 for one in found["orders"].values())


def test_a_report_draws_the_grid_of_ranks_and_microbatches(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    assert main(["plan", str(recipe), "--steps", "3", *JOB, "--simulate", "--report", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    content = text.split('<script type="application/json" id="values">')[1].split("</script>")[0]
    shown = json.loads(content)["shown"]["shown_step"]
    assert len(shown["plan"]) == len(shown["hash_order"]) == 16 and shown["ranks_are"] == "rank of dp x cp"
    assert all(max(column) > 0 for column in zip(*shown["plan"], strict=True))
    runs = shown["runs"]
    assert len(runs) > 5 and min(size for _, _, size in runs) > 1 and all(first % size == 0 for _, first, size in runs)
    for microbatch, first, size in runs:
        assert len({shown["plan"][rank][microbatch] for rank in range(first, first + size)}) == 1, "ranks of one bin"
    [group] = re.findall(r'<g id="runs">(.*?)</g>', text, re.DOTALL)
    assert group.count("<path") == len(runs) and "Frames are runs of ranks" in text


def test_show_names_the_ranks_of_a_document(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = values_of(capsys, "show", str(recipe), "--step", "1", *JOB)["samples"]
    runs = [sample["run"] for sample in every]
    assert {run["ranks"] for run in runs} > {1} and all(run["first_rank"] % run["ranks"] == 0 for run in runs)
    assert all(sample["tokens"] <= sample["run"]["padded_tokens"] for sample in every)
    of_two = values_of(capsys, "show", str(recipe), "--step", "1", "--dp-rank", "1", *JOB)["samples"]
    wanted = [
        one["sample"]
        for one in every
        if one["run"]["first_rank"] < 8 and one["run"]["first_rank"] + one["run"]["ranks"] > 4
    ]
    assert [one["sample"] for one in of_two] == wanted
    assert main(["show", str(recipe), "--step", "1", "--sample", str(every[0]["sample"]), *JOB]) == 0
    assert "of dp x cp, microbatch" in capsys.readouterr().out


def test_check_prints_the_overdraw_and_trace_finds_documents(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recipe), "--steps", "20"]) == 0
    out = capsys.readouterr().out
    assert "overdraw: at most " in out and "so a document waits" in out
    assert values_of(capsys, "check", str(recipe), "--steps", "20")["overdraw_tokens"] > 0
    found = next(iter(plan(recipe, steps=1, dp=8)))
    row = int(found.pieces.row[found.pieces.source == found.sources.index("web")][0])
    assert main(["trace", str(recipe), "--row", f"web:{row}", "--steps", "2"]) == 0
    assert "0" in capsys.readouterr().out


def test_check_says_when_all_ranks_wait_for_one_document(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def messages(*words: str) -> list[str]:
        main(["check", str(recipe), "--steps", "4", "--json", *words])
        return [
            one["message"]
            for one in json.loads(capsys.readouterr().out)["findings"]
            if one["where"] == "balance.context"
        ]

    assert messages("--world", "4", "--cp", "4") == []
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace("rank_tokens: 96", "rank_tokens: 256, sizes: [1]"), encoding="utf-8")
    [message] = messages("--world", "64", "--cp", "1")
    assert "all 64 ranks wait for it" in message and "times as long as an even share" in message


def test_plans_on_disk_replay_to_the_same_digests(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = values_of(capsys, "plan", str(recipe), "--steps", "4", "--out", str(tmp_path / "plans"), *JOB)
    again = values_of(capsys, "plan", str(recipe), "--steps", "4", "--dp", "8")
    assert first["order_digest"] == again["order_digest"]
