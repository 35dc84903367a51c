"""Megatron's own schedules on torchmix's iterators, at layouts of 1, 4 and 8 CPU ranks.

Each two sizes of axes, of those that 4 ranks allow, are together in a layout; `tests.trials.megatron_layouts` runs all.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.support.layouts import SAMPLES, Layout, write_bytes_job
from tests.support.megatron_layouts import (
    ALIGN_TOKENS,
    SCRIPTS,
    Documents,
    check_training,
    expected_digests,
    run_world,
    training_layouts,
    write_corpus,
)
from torchmix.cli.main import main

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("layouts")
    return folder, write_corpus(folder)


def chosen(boundaries: str) -> list[Layout]:
    """Layouts of the most ranks that are cheap; together they hold each pair of sizes that some layout of 4 has."""
    if boundaries == "none":
        four = [{"tp": 2, "cp": 2}, {"tp": 2, "dp": 2}, {"cp": 2, "dp": 2}, {"pp": 4}]
        four += [{"tp": 2, "pp": 2, "vp": 2}, {"cp": 2, "pp": 2}, {"pp": 2, "dp": 2, "vp": 2}]
        eight = []
    else:
        four = [{"tp": 4}, {"cp": 4}, {"pp": 4, "vp": 2}, {"dp": 4}]
        eight = [
            {"tp": 2, "cp": 2, "pp": 2},
            {"cp": 2, "pp": 2, "dp": 2, "vp": 2},
            {"tp": 2, "pp": 2, "dp": 2, "vp": 2},
        ]
    possible = {sizes_of(layout): layout for size in (4, 8) for layout in training_layouts(size, boundaries)}
    return [possible[sizes_of(Layout(**sizes))] for sizes in [*four, *eight]]


def sizes_of(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((axis, getattr(layout, axis)) for axis in ("tp", "cp", "pp", "dp", "vp"))


def test_the_chosen_layouts_hold_each_pair_of_sizes() -> None:
    def pairs_of(layouts: list[Layout]) -> set[tuple[tuple[str, int], ...]]:
        return {pair for layout in layouts for pair in combinations(sizes_of(layout), 2)}

    possible = pairs_of([layout for size in (1, 2, 4) for layout in training_layouts(size, "document")])
    assert len(possible) > 50
    assert possible <= pairs_of([layout for boundaries in SCRIPTS for layout in chosen(boundaries)])


@pytest.mark.parametrize("boundaries", SCRIPTS)
def test_layouts_get_the_plan_and_compute_the_same_loss_of_every_sample(
    corpus: tuple[Path, Documents], boundaries: str, tmp_path: Path
) -> None:
    check_training(*corpus, boundaries, chosen(boundaries), tmp_path / "out")


def test_a_state_goes_on_at_another_layout_and_a_step_may_be_run_again(
    corpus: tuple[Path, Documents], tmp_path: Path
) -> None:
    folder, documents = corpus
    layouts = [
        Layout(dp=4, steps=2),
        Layout(tp=2, pp=2, vp=2, steps=1, resume=1),
        Layout(cp=2, dp=2, steps=1, resume=1, script="0.16"),
        Layout(pp=4, steps=2, resume=1, rerun=1),
    ]
    seen = run_world(folder, tmp_path / "out", "document", layouts)
    first_step = 0
    for number, layout in enumerate(layouts):
        steps, plan = range(first_step, first_step + layout.steps), folder / f"plan-document-{layout.dp}"
        expected = expected_digests(plan, documents, "document", layout, steps=steps, part="train")
        for rank, digests in enumerate(expected):
            found = seen[number][rank]["digests"]
            first_runs = {key.removeprefix("run 1/"): found[key] for key in found if key.startswith("run ")}
            assert {key: digest for key, digest in found.items() if not key.startswith("run ")} == digests, layout.name
            assert len(first_runs) == (SAMPLES if layout.rerun else 0)
            assert first_runs.items() <= digests.items(), "the step that was run again had other tensors before"
        first_step += layout.steps


def test_each_evaluation_of_all_of_validation_is_one_pass(corpus: tuple[Path, Documents], tmp_path: Path) -> None:
    _, documents = corpus
    folder = tmp_path / "split"
    recipe = write_bytes_job(folder, boundaries="document", align_tokens=ALIGN_TOKENS, extra="split: [95, 5, 0]")
    assert main(["index", str(recipe)]) == 0
    layouts = [Layout(pp=2, dp=2, steps=1, passes=3), Layout(tp=2, pp=2, vp=2, steps=1, passes=2)]
    seen = run_world(folder, tmp_path / "out", "document", layouts)
    for number, layout in enumerate(layouts):
        out = tmp_path / f"plan-{layout.dp}"
        plan = ["plan", str(recipe), "--part", "validation", "--one-pass", "--dp", str(layout.dp), "--out", str(out)]
        assert main(plan) == 0
        pieces = pq.read_table(out / "pieces.parquet")
        last = max(pieces["step"].to_pylist())
        # The last step is not full, which the oracle does not know.
        pq.write_table(pieces.filter(pc.less(pieces["step"], last)), out / "pieces.parquet")
        expected = expected_digests(out, documents, "document", layout, steps=range(last), part="validation")
        for rank, digests in enumerate(expected):
            found = seen[number][rank]["digests"]
            passes: dict[str, dict[str, str]] = {}
            for key, digest in found.items():
                run, is_validation, rest = key.rpartition("validation/")
                if is_validation:
                    passes.setdefault(run, {})[f"validation/{rest}"] = digest
            assert len(passes) == layout.passes
            for again in passes.values():
                assert again == passes[""], "another pass"
            whole = (layout.vp or 1) * SAMPLES // layout.dp
            assert len(passes[""]) == (last + 1) * whole
            assert digests.items() <= passes[""].items()
            assert len(digests) == last * whole
