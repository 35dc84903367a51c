"""Replay: a loader gives the steps of a plan on disk, without planning, at any layout, and goes on behind them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.stateful.test_runs_of_ranks import with_runs
from tests.support.loaders import Rank, open_job, run_job, same_microbatches, take, write_job
from tests.support.plans_by_hand import reversed_plans
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import open_catalog
from torchmix.cli.main import main
from torchmix.errors import OptionError, PlanError, PlanFilesError, StateMismatch
from torchmix.parallel.place_tree import Layout, Role
from torchmix.parallel.topology import Topology
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner, open_planner
from torchmix.reader.reader import Reader
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful.doors import constructor_do_plan, loader_do_plan
from torchmix.stateful.open import build_loader
from torchmix.steps.replay import file_of_plan, write_plan_files
from torchmix.steps.state import encode_state, read_state
from torchmix.storage import random_access as file_ends

STEPS = 6
ALONE = Topology()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def plan(recipe: Path) -> Path:
    return planned(recipe)


def planned(recipe: Path, *words: str, steps: int = STEPS) -> Path:
    folder = recipe.parent / "plan"
    assert main(["plan", str(recipe), "--quiet", "--steps", str(steps), "--dp", "2", "--out", str(folder), *words]) == 0
    return folder


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that a planner was asked for; it draws and packs for nothing else, though then some steps ahead."""
    made: list[int] = []

    def counted(asked: Callable[[Planner, Cursor], Any]) -> Callable[[Planner, Cursor], Any]:
        def count(self: Planner, cursor: Cursor) -> Any:
            made.append(cursor.step)
            return asked(self, cursor)

        return count

    # `skip` asks `fold`; `step` does not.
    monkeypatch.setattr(Planner, "step", counted(Planner.step))
    monkeypatch.setattr(Planner, "fold", counted(Planner.fold))
    return made


@pytest.mark.parametrize("layout", [Topology(dp=2), Topology(dp=4), Topology(tp=2, dp=2), Topology(cp=2), ALONE])
def test_a_replay_gives_what_a_planned_run_gives_and_plans_nothing(
    layout: Topology, recipe: Path, plan: Path, folds: list[int]
) -> None:
    expected = run_job(recipe, layout, steps=STEPS - 1)
    assert folds
    folds.clear()
    ranks = run_job(recipe, layout, steps=STEPS - 1, replay=plan, max_steps=STEPS)
    assert folds == []
    for rank, wanted in zip(ranks, expected, strict=True):
        assert same_microbatches(rank.microbatches, wanted.microbatches)
        assert (rank.digests, rank.state) == (wanted.digests, wanted.state)


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_it_resumes_at_another_layout_and_goes_on_by_planning_behind_the_last_step(
    method: str, tmp_path: Path, folds: list[int]
) -> None:
    recipe = write_job(tmp_path, method=method)
    plan = planned(recipe)
    expected = run_job(recipe, ALONE, steps=STEPS + 4)[0]
    folds.clear()
    first = run_job(recipe, Topology(dp=2), steps=3, replay=plan, max_steps=STEPS)[0]
    second = run_job(recipe, ALONE, steps=1, replay=plan, state=first.state, max_steps=STEPS)[0]
    assert folds == []
    third = run_job(recipe, ALONE, steps=4, replay=plan, state=second.state, max_steps=STEPS + 4)[0]
    fourth = run_job(recipe, ALONE, steps=2, replay=plan, state=third.state, max_steps=STEPS + 6)[0]
    assert set(folds) == set(range(STEPS, max(folds) + 1)) and max(folds) < STEPS + 6
    assert [*first.digests, *second.digests, *third.digests, *fourth.digests] == expected.digests
    assert fourth.state == expected.state
    one_rank = [*second.microbatches, *third.microbatches, *fourth.microbatches]
    assert same_microbatches(one_rank, [each for each in expected.microbatches if each.step >= 3])


def test_a_start_far_from_the_beginning_is_on_disk(recipe: Path, plan: Path, folds: list[int]) -> None:
    found = run_job(recipe, ALONE, steps=1, replay=plan, start_step=4, max_steps=STEPS)[0]
    assert folds == []
    assert same_microbatches(found.microbatches, run_job(recipe, ALONE, steps=1, start_step=4)[0].microbatches)


def test_a_start_behind_the_plan_is_planned_from_its_end(recipe: Path, plan: Path, folds: list[int]) -> None:
    expected = run_job(recipe, ALONE, steps=1, start_step=STEPS + 2)[0]
    folds.clear()
    found = run_job(recipe, ALONE, steps=1, replay=plan, start_step=STEPS + 2, max_steps=STEPS + 3)[0]
    assert folds == [STEPS, STEPS + 1, STEPS + 2]
    assert found.state == expected.state


def test_a_state_inside_a_step_goes_on_in_it(recipe: Path, plan: Path, folds: list[int]) -> None:
    expected = run_job(recipe, ALONE, microbatches=30)[0]
    folds.clear()
    first = run_job(recipe, ALONE, microbatches=11, replay=plan, max_steps=STEPS)[0]
    second = run_job(recipe, ALONE, microbatches=19, replay=plan, state=first.state, max_steps=STEPS)[0]
    assert folds == []
    assert same_microbatches([*first.microbatches, *second.microbatches], expected.microbatches)


def test_one_pass_ends_where_the_plan_does(tmp_path: Path, folds: list[int]) -> None:
    recipe = write_job(tmp_path, samples=64, length=256)
    plan = planned(recipe, "--one-pass", steps=1000)
    expected = run_job(recipe, ALONE, one_pass=True)[0]
    assert 2 < len(expected.digests) < 1000
    folds.clear()
    found = run_job(recipe, ALONE, one_pass=True, replay=plan)[0]
    assert folds == [len(expected.digests)], "the planner is asked once, and says that there is no more"
    assert same_microbatches(found.microbatches, expected.microbatches)


def test_a_replay_in_the_worker_of_a_node(recipe: Path, plan: Path) -> None:
    expected = run_job(recipe, ALONE, steps=2)[0]
    found = run_job(recipe, ALONE, steps=2, replay=plan, loaders="node", max_steps=STEPS)[0]
    assert same_microbatches(found.microbatches, expected.microbatches)
    assert found.state == expected.state


def test_modules_are_placed_anew(tmp_path: Path, folds: list[int]) -> None:
    extra = "modules: {query: {sources: [prose], method: lpt, axis: WORLD}}"
    recipe = write_job(tmp_path, extra=extra)
    plan = planned(recipe)
    expected = run_job(recipe, Topology(dp=4), steps=2)
    folds.clear()
    for rank, wanted in zip(run_job(recipe, Topology(dp=4), steps=2, replay=plan, max_steps=4), expected, strict=True):
        for one, other in zip(rank.microbatches, wanted.microbatches, strict=True):
            assert one.modules.keys() == other.modules.keys() == {"query"}
            assert one.modules["query"].cu_seqlens.tolist() == other.modules["query"].cu_seqlens.tolist()
    assert folds == []


# --- Plans by hand, of `plan_raw`, as files that a loader gives.


@pytest.mark.slow
@pytest.mark.parametrize(("method", "loaders"), [("best_fit", "in_process"), ("whole", "node")])
def test_plans_by_hand_are_given_as_they_are(method: str, loaders: str, tmp_path: Path) -> None:
    layout = Topology(dp=2, cp=2)
    recipe = write_job(tmp_path) if method == "best_fit" else with_runs(write_job(tmp_path))
    folder, plans = reversed_plans(recipe, layout)
    catalog = open_catalog(tmp_path / "catalog", settings_of(load_recipe(recipe).sources, load_recipe(recipe).shuffle))
    reader, part = Reader(catalog, tmp_path, cache_bytes=1 << 24), part_of(load_recipe(recipe), "train")
    options = {"replay": str(folder), "loaders": loaders, "max_steps": 4}
    ranks = run_job(recipe, layout, steps=4, **options)
    for number, rank in enumerate(ranks):
        role, expected = Role(stage="only", cp_rank=number % 2), []
        for plan in plans:
            tensors = constructor_do_plan(plan, loader_do_plan(plan, reader, number // 2), role, part=part, cp=2)
            expected += tensors.microbatches()
        assert same_microbatches(rank.microbatches, expected)
        assert [one.cp_ranks for one in rank.microbatches if method == "whole"] == (
            [range(4)] * len(expected) if method == "whole" else []
        )
        assert rank.digests == [plan.order_digest.hex() for plan in plans]
    reader.close()
    inside = len([one for one in ranks[0].microbatches if one.step == 0]) + 1
    before = run_job(recipe, layout, microbatches=inside, **options)
    rest = run_job(recipe, layout, microbatches=len(ranks[0].microbatches) - inside, state=before[0].state, **options)
    for rank, one, other in zip(ranks, before, rest, strict=True):
        assert same_microbatches(rank.microbatches, one.microbatches + other.microbatches), "it resumes inside a step"
    with pytest.raises(PlanFilesError, match=r"step 0 .* is placed by hand for dp 2, cp 2, .* this job has dp 4, cp 1"):
        run_job(recipe, Topology(dp=4), steps=1, **options)
    behind = run_job(recipe, Topology(dp=4), steps=1, **{**options, "start_step": 4, "max_steps": 5})
    assert behind[0].microbatches[0].step == 4, "behind the plan the recipe goes on, at any layout"


def test_plans_by_hand_with_modules_are_refused(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, extra="modules: {query: {sources: [prose], method: lpt, axis: WORLD}}")
    checked = load_recipe(recipe)
    part = part_of(checked, "train")
    catalog = open_catalog(recipe.parent / checked.catalog, settings_of(part.sources, part.shuffle))
    planner = open_planner(part, catalog, Layout(dp=2))
    plan, after = planner.step(planner.start())
    with (
        pytest.raises(PlanError, match="step 0 has the modules query: items are not among the files"),
        write_plan_files(tmp_path / "by-hand", planner, catalog.fingerprint) as files,
    ):
        files.add(plan, planner.start(), after, by_hand=True)


def test_forged_places_are_refused(recipe: Path) -> None:
    folder, _ = reversed_plans(recipe, Topology(dp=2))
    _forge(folder, "microbatch", 1, file="places.parquet")
    with pytest.raises(PlanFilesError, match=r"step 0 of the plan .* is damaged: sample 6 has microbatch 4"):
        run_job(recipe, Topology(dp=2), steps=1, replay=str(folder), max_steps=4)


def _damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def _flip(at: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = int(len(data) * at)
        return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]

    return change


def _forge(folder: Path, name: str, amount: int, *, file: str = "pieces.parquet") -> None:
    """Other numbers in files that are whole, and that the manifest knows."""
    path = folder / file
    table = pq.read_table(path)
    column = table.column_names.index(name)
    pq.write_table(table.set_column(column, name, [table[name].to_numpy() + amount]), path)
    manifest = json.loads((folder / "plan.json").read_text())
    about = file_of_plan(path)
    manifest["files"][file] = {"bytes": about.bytes, "ends": about.ends}
    (folder / "plan.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "plan.json").unlink(), "holds no plan"),
        (lambda folder: (folder / "steps.parquet").unlink(), "steps.parquet cannot be read"),
        (_damage("plan.json", lambda data: data[:-40]), "plan.json is damaged"),
        (_damage("plan.json", lambda data: data.replace(b'"version": 1', b'"version": 2')), "has version 2"),
        (_damage("pieces.parquet", lambda data: data[:-100]), "pieces.parquet is cut"),
        (_damage("states.parquet", lambda data: data + b"more"), "is another file"),
        (_damage("states.parquet", _flip(0.5)), "states.parquet is another file"),
        (lambda folder: _forge(folder, "epoch", 1), "step 0 of the plan .* its pieces have order digest"),
        (lambda folder: _forge(folder, "row", 1 << 40), "step 0 of the plan .* no stream, source or row"),
    ],
)
def test_damaged_and_cut_plans_are_refused(damage: Any, words: str, recipe: Path, plan: Path) -> None:
    damage(plan)
    with pytest.raises(PlanFilesError, match=words):
        run_job(recipe, ALONE, steps=STEPS, replay=plan, max_steps=STEPS)


def test_damage_in_the_middle_of_a_long_file_is_met_before_its_step_is_given(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_ends, "HASHED_BYTES", 1000)
    plan = planned(recipe, steps=60)
    path = plan / "pieces.parquet"
    path.write_bytes(_flip(0.5)(path.read_bytes()))
    with pytest.raises(PlanFilesError, match=r"pieces\.parquet is damaged"):
        run_job(recipe, ALONE, replay=plan, max_steps=60, keep=False)


@pytest.mark.parametrize(
    ("edit", "what"),
    [(("seed: 5", "seed: 6"), "recipe"), (("tiny: 2%", "tiny: 2%"), "one_pass"), (("web-*", "web-0"), "catalog")],
)
def test_plans_of_another_recipe_catalog_or_part_are_refused(
    edit: tuple[str, str], what: str, recipe: Path, plan: Path
) -> None:
    recipe.write_text(recipe.read_text().replace(*edit))
    if what == "catalog":
        assert main(["index", str(recipe), "--quiet"]) == 0
    with pytest.raises(PlanFilesError, match=f"is of {what} "):
        build_loader(recipe, topology=ALONE, replay=plan, loaders="in_process", one_pass=what == "one_pass")


def test_balance_may_differ_from_the_plans(recipe: Path, plan: Path, folds: list[int]) -> None:
    recipe.write_text(recipe.read_text().replace("method: rows, model", "method: lpt, model"))
    expected = run_job(recipe, Topology(dp=2), steps=2)
    folds.clear()
    found = run_job(recipe, Topology(dp=2), steps=2, replay=plan, max_steps=STEPS)
    assert folds == []
    for rank, wanted in zip(found, expected, strict=True):
        assert same_microbatches(rank.microbatches, wanted.microbatches)


def test_a_state_of_another_run_is_refused(recipe: Path, plan: Path) -> None:
    state = run_job(recipe, ALONE, steps=2)[0].state
    other = planned(recipe, "--start", "3")
    with pytest.raises(PlanFilesError, match="begins at step 3, and the loader is at step 2"):
        run_job(recipe, ALONE, steps=1, replay=other, state=state)
    found = run_job(recipe, ALONE, steps=1, replay=other, start_step=3)[0]
    assert same_microbatches(found.microbatches, run_job(recipe, ALONE, steps=1, start_step=3)[0].microbatches)


def test_a_state_with_another_digest_is_refused(recipe: Path, plan: Path) -> None:
    state = run_job(recipe, ALONE, steps=2)[0].state
    saved = read_state(state["torchmix_state"])
    at = msgspec.structs.replace(saved.at, order_digest=b"12345678")
    forged = msgspec.structs.replace(saved, at=at)
    with pytest.raises(StateMismatch, match="they are of different runs"):
        run_job(recipe, ALONE, steps=1, replay=plan, state={"torchmix_state": encode_state(forged)})


def test_a_recipe_with_a_policy_is_refused(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, extra="dynamic: {policy: odm, every: 2 steps, lag: 2 steps}")
    with pytest.raises(OptionError, match="without a policy"):
        build_loader(recipe, topology=ALONE, replay=tmp_path, loaders="in_process")


def test_a_job_that_is_resharded_goes_on_from_the_plan(recipe: Path, plan: Path, folds: list[int]) -> None:
    expected = run_job(recipe, ALONE, steps=3)[0]
    folds.clear()
    with open_job(recipe, ALONE, replay=plan, max_steps=STEPS)[0] as loader:
        rank = Rank()
        take(loader, rank, None, steps=2)
        loader.reshard(ALONE, 2, micro_batch_size=2)
        take(loader, rank, None, steps=3)
    assert folds == []
    assert rank.digests == expected.digests


def test_a_plan_of_other_denied_documents_is_refused(recipe: Path, plan: Path) -> None:
    pq.write_table(pa.table({"source": ["web"], "row": [0]}), recipe.parent / "takedown.parquet")
    recipe.write_text(recipe.read_text() + "deny: [takedown.parquet]\n")
    assert main(["index", str(recipe), "--quiet"]) == 0
    with pytest.raises(PlanFilesError, match=r"is of other denied documents \(none\)"):
        run_job(recipe, ALONE, steps=1, replay=plan)
    again = planned(recipe)
    found = run_job(recipe, ALONE, steps=2, replay=again, max_steps=STEPS)[0]
    assert same_microbatches(found.microbatches, run_job(recipe, ALONE, steps=2)[0].microbatches)


@pytest.mark.parametrize("method", ["best_fit", "concat", "pad"])
def test_samples_may_become_longer_in_the_plan_and_behind_it(method: str, tmp_path: Path, folds: list[int]) -> None:
    stages = (
        "[{from_step: 0, samples: 8}, {from_step: 3, samples: 8, length: 128}, {from_step: 8, samples: 4, length: 256}]"
    )
    recipe = write_job(tmp_path, samples=stages, method=method)
    plan = planned(recipe)
    expected = run_job(recipe, ALONE, steps=STEPS + 4)[0]
    folds.clear()
    first = run_job(recipe, Topology(dp=2), steps=4, replay=plan, max_steps=STEPS)[0]
    assert folds == []
    second = run_job(recipe, ALONE, steps=STEPS, replay=plan, state=first.state)[0]
    assert [*first.digests, *second.digests] == expected.digests
    assert second.state == expected.state
    assert same_microbatches(second.microbatches, [each for each in expected.microbatches if each.step >= 4])
