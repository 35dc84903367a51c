"""Megatron's own schedules on torchmix's iterators, at layouts of 1, 2, 4 and 8 CPU ranks.

Layouts of 8 ranks are here those over three axes; `tests.trials.megatron_layouts` runs the others, too.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.support.layouts import SAMPLES, Layout, write_bytes_job
from tests.support.megatron_layouts import (
    ALIGN_TOKENS,
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


@pytest.mark.parametrize("boundaries", ["document", "none"])
def test_layouts_get_the_plan_and_compute_the_same_loss_of_every_sample(
    corpus: tuple[Path, Documents], boundaries: str, tmp_path: Path
) -> None:
    layouts = training_layouts(4, boundaries)
    if boundaries == "document":
        large = [each for each in training_layouts(8, boundaries) if [each.tp, each.cp, each.pp, each.dp].count(1) == 1]
        layouts = training_layouts(2, boundaries) + layouts + large
        assert {(each.tp, each.cp, each.pp, each.dp) for each in large} == {
            (1, 2, 2, 2),
            (2, 1, 2, 2),
            (2, 2, 1, 2),
            (2, 2, 2, 1),
        }
    check_training(*corpus, boundaries, layouts, tmp_path / "out")


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
