"""Features that not every version of Megatron has, or not every version can run: what a run must do where it can.

In: a `Bench`. Out: for each feature a list of what is wrong, as in `features.py`, or None where the version lacks it.
Must hold: a feature that was not run is no pass. Cost: up to three runs each.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable

from cells import LAYOUT_OF_NAME, SAVE_AT, SINGLE, STEPS, Layout, steps_flags
from consumed import Samples, planned_samples, read_records
from features import PIPELINE, SOURCES, async_flags, evaluation_lines, missing
from matrix import Bench, problems_of_lines, problems_of_run

TEACHER_TOP = 8
"""Log-probabilities of each token that a teacher keeps."""
REPLICAS, RESERVE = LAYOUT_OF_NAME["DP2"], Layout(name="DP2 and one in reserve", dp=3)
RESTARTS = ("--inprocess-restart", "--inprocess-granularity", "rank", "--inprocess-active-world-size", "2")


def distillation(bench: Bench) -> list[str] | None:
    """A student learns from a teacher's logits; one whose recipe is another is refused by Megatron.

    Megatron compares hashes of the two runs' data.
    """
    checkpointing = bench.runner.checkout / "megatron" / "training" / "checkpointing.py"
    if "get_logits_saver" not in checkpointing.read_text(encoding="utf-8"):
        return None  # core 0.18 and older; dev of August 2026 gathers logits, and never writes them
    logits, schedule = bench.runner.folder / "logits", steps_flags(SAVE_AT)
    save = ["--logits-save-dir", str(logits), "--logits-save-top-k", str(TEACHER_TOP)]
    save += [*async_flags(bench.runner), "--use-persistent-ckpt-worker"]  # Megatron asserts both
    save += ["--save", str(bench.checkpoints("teacher")), "--save-interval", str(SAVE_AT)]
    teacher = bench.train("teacher", SINGLE, [*bench.first_weights, *save], schedule=schedule)
    if not teacher.is_fine:
        return [teacher.trouble]
    load = [*bench.first_weights, "--logits-load-dir", str(logits)]
    student = bench.train("student", SINGLE, load, schedule=schedule)
    problems = missing(student, "logits distillation loss") if student.is_fine else [student.trouble]
    other = bench.train("student of other data", SINGLE, load, variant="-other", schedule=schedule)
    problems += missing(other, "Data does not align")
    return [*problems, *(["the run on other data continued"] if other.is_fine else [])]


def full_validation(bench: Bench) -> list[str] | None:
    """Each source of validation is evaluated by itself, all of it, after every second step and at the end.

    `--full-validation` alone is refused where Megatron itself fails in it.
    """
    flags = ["--eval-interval", "2", "--full-validation", "--multiple-validation-sets"]
    training = bench.runner.checkout / "megatron" / "training"
    has_names = any("validation_set_names" in file.read_text() for file in training.rglob("training_config.py"))
    if has_names:
        flags += ["--validation-set-names", *SOURCES]
    problems = []
    for layout in (SINGLE, PIPELINE):
        run = bench.train(f"full validation {layout.name}", layout, [*bench.first_weights, *flags])
        problems += problems_of_run(run, layout, planned_samples(bench.recipe(), STEPS))
        if not run.is_fine:
            continue
        per_source = [one_pass_of(bench, name) for name in SOURCES]
        one_time = [samples for steps in per_source for samples in steps]
        times = STEPS // 2 + 1  # one more at the end
        plan = dict(enumerate(one_time * times))
        problems += problems_of_lines(evaluation_lines(run), layout, plan)
        for name in SOURCES if has_names else "012":
            problems += missing(run, f"validation-{name} loss at iteration 2")
    alone = bench.train("full validation alone", SINGLE, [*bench.first_weights, *flags[:3]])
    if not alone.is_fine:
        problems += missing(alone, "--full-validation: Megatron itself fails")
    return problems


def one_pass_of(bench: Bench, source: str) -> list[Samples]:
    """The samples of each step of one pass over what a source has for validation."""
    from torchmix.megatron_adapter.evaluation import recipe_of_set
    from torchmix.recipe.load import load_recipe

    recipe = recipe_of_set(load_recipe(bench.recipe()), source)
    return list(planned_samples(recipe, None, one_pass=True, directory=bench.recipe().parent).values())


def inprocess_restart(bench: Bench) -> list[str] | None:
    """Behind a checkpoint a rank raises an error, or is killed; Megatron trains again in the processes that are there.

    Needs nvidia-resiliency-ext. Core 0.17 and newer hide the number of the restart from its wrapper, and since 0.18 the
    arguments do not outlive the end of a run.
    """
    training = bench.runner.checkout / "megatron" / "training" / "training.py"
    has_package = importlib.util.find_spec("nvidia_resiliency_ext") is not None
    if not has_package or "Optional[CallWrapper]" not in training.read_text(encoding="utf-8"):
        return None
    plan, problems = planned_samples(bench.recipe(), STEPS), []
    for how, layout, is_killed in (("error", REPLICAS, False), ("error", PIPELINE, False), ("kill", RESERVE, True)):
        name = f"{how} {layout.name}"
        saved = str(bench.checkpoints(name))
        flags = ["--save", saved, "--load", saved, "--save-interval", str(SAVE_AT), *RESTARTS]
        fault = f"1:{SAVE_AT + 1}:{how}"
        run = bench.train(name, layout, [*bench.first_weights, *flags], FAIL_ONCE=fault, TORCH_CPP_LOG_LEVEL="error")
        if run.exit_codes != (0, -signal.SIGKILL if is_killed else 0, *[0] * (layout.ranks - 2)):
            problems += [f"exit codes {run.exit_codes}", run.trouble]
            continue
        lines = [line for line in read_records(run.records) if line["step"] is not None]
        before = [line for line in lines if not line["began"] and line["step"] <= SAVE_AT]
        problems += problems_of_lines(before, layout, {step: plan[step] for step in range(SAVE_AT + 1)})
        after = [line for line in lines if line["began"]]
        problems += problems_of_lines(after, layout, {step: plan[step] for step in range(SAVE_AT, STEPS)})
    return problems


VERSION_FEATURES: dict[str, Callable[[Bench], list[str] | None]] = {
    "distillation": distillation,
    "full validation": full_validation,
    "in-process restart": inprocess_restart,
}
"""By the name of their line."""
