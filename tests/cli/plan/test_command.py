"""`torchmix plan`: the table, JSON and files say what the planner plans, and appear whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.catalogs import open_catalog
from tests.support.command_line import values_of
from tests.support.projects import make_indexed_project, make_project
from torchmix import build_loader
from torchmix.cli.main import main
from torchmix.errors import OptionError
from torchmix.parallel.place_tree import Layout
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import open_planner
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps import replay as plan_files

PIECE_COLUMNS = [
    "step",
    "sample",
    "slot",
    "sample_offset",
    "stream",
    "source",
    "row",
    "epoch",
    "start",
    "tokens",
    "drawn_step",
    "age",
    "dp_rank",
    "microbatch",
]
STEP_COLUMNS = [
    "step",
    "stream",
    "asked_tokens",
    "drawn_tokens",
    "delivered_tokens",
    "pool_tokens",
    "capacity_tokens",
    "order_digest",
    "plan_digest",
    "lower_bound",
    "ratio",
    "hash_order_cost",
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_indexed_project(tmp_path)


def plans_of(recipe: Path, num_steps: int, *, dp: int = 1, micro_batch_size: int = 1) -> list[StepPlan]:
    loaded = load_recipe(recipe)
    planner = open_planner(
        part_of(loaded, "train"), open_catalog(loaded, recipe.parent), Layout(dp=dp, micro_batch_size=micro_batch_size)
    )
    cursor, plans = planner.start(), []
    for _ in range(num_steps):
        plan, cursor = planner.step(cursor)
        plans.append(plan)
    return plans


def plan(recipe: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return values_of(capsys, "plan", recipe, *words)


def test_pieces_are_those_of_the_plan(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    layout = {"dp": 4, "micro_batch_size": 2}
    values = plan(recipe, capsys, "--steps", "6", "--dp", "4", "--micro-batch-size", "2", "--out", str(out))
    assert values["files"] == [
        str(out / name) for name in ("pieces.parquet", "steps.parquet", "states.parquet", "places.parquet", "plan.json")
    ]
    table = pq.read_table(out / "pieces.parquet")
    assert table.column_names == PIECE_COLUMNS
    assert all(
        field.type == (pa.string() if field.name in ("stream", "source") else pa.int64()) for field in table.schema
    )
    plans = plans_of(recipe, 6, **layout)
    assert table.num_rows == sum(len(one.pieces) for one in plans)
    for one in plans:
        rows = table.filter(pa.compute.equal(table["step"], one.step))
        column = {name: rows[name].to_numpy() for name in rows.column_names}
        for name in ("sample", "slot", "sample_offset"):
            np.testing.assert_array_equal(column[name], getattr(one, name))
        for name in ("row", "epoch", "start", "tokens", "drawn_step"):
            np.testing.assert_array_equal(column[name], getattr(one.pieces, name))
        assert [one.sources[s] for s in one.pieces.source] == column["source"].tolist()
        np.testing.assert_array_equal(column["age"], one.step - one.pieces.drawn_step)
        np.testing.assert_array_equal(column["dp_rank"], one.placement.dp_rank_of_sample[one.sample])
        np.testing.assert_array_equal(column["microbatch"], one.placement.microbatch_of_sample[one.sample])
    assert set(table["dp_rank"].to_pylist()) == {0, 1, 2, 3}
    assert set(table["microbatch"].to_pylist()) == {0, 1}


def test_steps_are_those_of_the_plan(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(recipe, capsys, "--steps", "5", "--dp", "2", "--out", str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out" / "steps.parquet")
    assert table.column_names == STEP_COLUMNS
    rows = table.to_pylist()
    assert [(row["step"], row["stream"]) for row in rows] == [
        (step, source) for step in range(5) for source in ("code", "tiny", "web")
    ]
    for one in plans_of(recipe, 5, dp=2):
        own = rows[3 * one.step : 3 * one.step + 3]
        for name in ("asked_tokens", "drawn_tokens", "delivered_tokens", "pool_tokens"):
            assert [row[name] for row in own] == getattr(one, name).tolist()
        for row in own:
            assert row["capacity_tokens"] == 16 * 256
            assert (row["order_digest"], row["plan_digest"]) == (one.order_digest.hex(), one.plan_digest.hex())
            assert (row["lower_bound"], row["hash_order_cost"]) == (
                one.balance.lower_bound,
                one.balance.hash_order_cost,
            )
            assert row["ratio"] == one.balance.ratio >= 1


def test_start_gives_the_later_steps_of_the_same_plan(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = plan(recipe, capsys, "--steps", "7", "--out", str(tmp_path / "whole"))
    late = plan(recipe, capsys, "--steps", "3", "--start", "4", "--out", str(tmp_path / "late"))
    assert (late["first_step"], late["num_steps"]) == (4, 3)
    assert late["order_digest"] == whole["order_digest"]
    assert [one["epochs"] for one in late["sources"]] == [one["epochs"] for one in whole["sources"]]
    for name in ("pieces.parquet", "steps.parquet"):
        table = pq.read_table(tmp_path / "whole" / name)
        expected = table.filter(pa.compute.greater_equal(table["step"], 4))
        assert pq.read_table(tmp_path / "late" / name).equals(expected)


def test_many_row_groups_hold_the_same_rows(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(recipe, capsys, "--steps", "6", "--out", str(tmp_path / "one"))
    monkeypatch.setattr(plan_files, "ROW_GROUP_ROWS", 10)
    plan(recipe, capsys, "--steps", "6", "--out", str(tmp_path / "many"))
    for name in ("pieces.parquet", "steps.parquet"):
        assert pq.ParquetFile(tmp_path / "one" / name).num_row_groups == 1
        assert pq.ParquetFile(tmp_path / "many" / name).num_row_groups > 1
        assert pq.read_table(tmp_path / "one" / name).equals(pq.read_table(tmp_path / "many" / name))


def test_json_sums_the_steps(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = plan(recipe, capsys, "--steps", "9", "--dp", "2")
    plans = plans_of(recipe, 9, dp=2)
    delivered = sum(one.delivered_tokens for one in plans)
    assert [one["name"] for one in values["sources"]] == ["code", "tiny", "web"]
    assert [one["share"] for one in values["sources"]] == pytest.approx([0.2, 0.01, 0.79], abs=1e-9)
    assert [one["delivered_tokens"] for one in values["sources"]] == delivered.tolist()
    assert [one["pool_tokens"] for one in values["sources"]] == plans[-1].pool_tokens.tolist()
    for s, one in enumerate(values["sources"]):
        assert one["delivered_share"] == pytest.approx(delivered[s] / delivered.sum())
        assert one["epochs"] == pytest.approx(sum(each.drawn_tokens[s] for each in plans) / one["epoch_tokens"])
    assert values["sources"][1]["epochs"] > 1
    assert values["fill"] == pytest.approx(delivered.sum() / (9 * 4096))
    assert values["lowest_fill"] == min(one.fill for one in plans)
    assert plans[values["lowest_fill_step"]].fill == values["lowest_fill"]
    bound = sum(one.balance.lower_bound for one in plans)
    assert values["balance_ratio"] == pytest.approx(sum(one.balance.cost for one in plans) / bound)
    assert values["hash_order_ratio"] == pytest.approx(sum(one.balance.hash_order_cost for one in plans) / bound)
    assert values["worst_balance_ratio"] == max(one.balance.ratio for one in plans)
    assert values["order_digest"] == plans[-1].order_digest.hex()
    assert 0 < values["planning_ms"]["median"] <= values["planning_ms"]["p95"] <= values["planning_ms"]["max"]


def test_where_all_steps_are_full_the_first_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    recipe.write_text(recipe.read_text() + "packing: {method: concat}\n")
    assert main(["index", str(recipe)]) == 0
    capsys.readouterr()
    values = plan(recipe, capsys, "--steps", "3")
    assert (values["lowest_fill"], values["lowest_fill_step"]) == (1.0, 0)


def test_the_table_is_what_a_person_asks(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "--steps", "9", "--dp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"steps 0 to 8 of {recipe}: 16 samples x 256 tokens, dp 2")
    assert lines[2].split() == ["source", "share", "given", "tokens", "epochs", "an", "epoch", "deferred"]
    assert [line.split()[0] for line in lines[3:6]] == ["code", "tiny", "web"]
    assert [line.split()[0] for line in lines[7:12]] == ["fill", "balance", "deferred", "planning", "digest"]
    assert plans_of(recipe, 9)[-1].order_digest.hex() in lines[11]


def test_a_layout_that_does_not_divide_is_exit_code_2(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "--steps", "1", "--dp", "3"]) == 2
    assert "does not divide" in capsys.readouterr().err


def test_where_the_data_ends_the_steps_before_are_shown_and_no_file_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path, ("tokenizer: bytes", "tokenizer: bytes, max_epochs: 1"))
    assert main(["index", str(recipe)]) == 0
    out = tmp_path / "out"
    plan(recipe, capsys, "--steps", "2", "--out", str(out))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(["plan", str(recipe), "--steps", "10000", "--out", str(out)]) == 3
    output = capsys.readouterr()
    assert "source 'code' has given its max_epochs (1)" in output.err
    assert "fill" in output.out
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(before) == ["pieces.parquet", "places.parquet", "plan.json", "states.parquet", "steps.parquet"]


def test_a_plan_is_not_written_beside_data(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "beside"
    out.mkdir()
    (out / "web.parquet").write_bytes(b"PAR1")
    (out / ".pieces.parquet.partial").write_bytes(b"of a plan that was interrupted")
    assert main(["plan", str(recipe), "--steps", "1", "--out", str(out)]) == 2
    assert f"the folder {out} for the plan holds web.parquet, which is of no plan" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == {"web.parquet", ".pieces.parquet.partial"}
    (out / "web.parquet").unlink()
    for _ in range(2):  # also over an earlier plan
        plan(recipe, capsys, "--steps", "1", "--out", str(out))


def test_without_a_catalog_the_remedy_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(make_project(tmp_path)), "--steps", "1"]) == 3
    assert "run torchmix index" in capsys.readouterr().err


def test_a_catalog_of_other_settings_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text().replace("text: text, tokenizer: bytes", "tokens: id"))
    assert main(["plan", str(recipe), "--steps", "1"]) == 3
    assert "source 'code'" in capsys.readouterr().err


@pytest.mark.parametrize("view", ["--tree", "--loaders"])
@pytest.mark.parametrize(
    "words", [("--state", "s"), ("--accept-edit", "w"), ("--decisions", "d"), ("--out", "o"), ("--report", "r")]
)
def test_options_of_steps_are_refused_where_no_step_is_planned(tmp_path, capsys, view, words):
    assert main(["plan", str(make_project(tmp_path)), view, *words]) == 2
    assert f"{view} plans no steps, so {words[0]} would do nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "with_which"),
    [
        (("--leaders", "node"), "--tree"),
        (("--ranks-per-node", "4"), "--tree"),
        (("--cpu", "2", "--tree"), "--loaders"),
        (("--nodes", "2"), "--loaders"),
        (("--memory", "1GiB"), "--loaders"),
        (("--processes", "2"), "--loaders"),
        (("--tflops", "100"), "--simulate"),
    ],
)
def test_options_of_a_view_are_refused_without_it(recipe, capsys, words, with_which):
    assert main(["plan", str(recipe), "--steps", "1", *words]) == 2
    assert f"{words[0]} goes with {with_which}" in capsys.readouterr().err


def test_a_log_of_decisions_is_refused_where_nobody_decides(recipe, capsys):
    assert main(["plan", str(recipe), "--steps", "1", "--decisions", "log"]) == 2
    assert "the recipe has no `dynamic`" in capsys.readouterr().err
    with pytest.raises(OptionError, match="the recipe has no `dynamic`"):
        build_loader(recipe, loaders="in_process", decisions="log")


def test_one_view_is_shown_at_a_time(tmp_path, capsys):
    assert main(["plan", str(make_project(tmp_path)), "--tree", "--loaders"]) == 2
    assert "give one of them" in capsys.readouterr().err
