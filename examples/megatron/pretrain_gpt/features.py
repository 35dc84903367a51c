"""What Megatron does beside plain steps, each with the data of a recipe: a run or two, and what must follow.

In: a `Bench`. Out: for each feature a list of what is wrong, empty if it works. Must hold: each check reads what the
model was given (`record.py`) or what a user sees, the log and the exit code; nothing of torchmix's inside. Cost: one or
two runs each.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from cells import LAYOUT_OF_NAME, SAVE_AT, SINGLE, STEPS, steps_flags
from consumed import Line, planned_samples, read_records
from corpus import LENGTH, SAMPLES
from launch import Run, Runner, wait
from matrix import Bench, problems_of_lines, problems_of_run, unequal_losses
from table import Cell

PIPELINE, TENSORS, CONTEXT = LAYOUT_OF_NAME["PP2"], LAYOUT_OF_NAME["TP2"], LAYOUT_OF_NAME["CP2"]
SOURCES = ("code", "notes", "web")
ASKS_FOR_RESTART = 16
"""Megatron's exit code after it has saved a step that it suspects of a fault."""
NOTICE_S = 15.0
"""In which all ranks must have ended after one was killed."""


def cell_of_feature(bench: Bench, name: str, check: Callable[[Bench], list[str] | None]) -> Cell:
    """Check one feature; one that the version lacks is not noted, so that it is no pass."""
    cell = Cell(packing=bench.packing, name=name)
    started_s = time.monotonic()
    problems = check(bench)
    if problems is None:
        print(f"{bench.packing} {name}: this version lacks it", flush=True)
        return cell
    cell.note("works", problems)
    cell.wall_s = time.monotonic() - started_s
    print(cell.verdict, flush=True)
    return cell


def validation(bench: Bench) -> list[str]:
    """Two steps of validation after every two of training, and of test at the end; losses by source are shown.

    Training must not notice, and validation continues in its own data, from one time to the next.
    """
    board = bench.runner.folder / "tensorboard"
    flags = ["--eval-interval", "2", "--eval-iters", "2", "--tensorboard-dir", str(board)]
    run = bench.train("validation", PIPELINE, [*bench.first_weights, *flags])
    problems = problems_of_run(run, PIPELINE, planned_samples(bench.recipe(), STEPS))
    if not run.is_fine:
        return problems
    evaluations = STEPS // 2 + 1  # one more at the end
    plan = planned_samples(bench.recipe(), 2 * evaluations, part="validation")
    test = planned_samples(bench.recipe(), 2, part="test")
    plan |= {2 * evaluations + step: samples for step, samples in test.items()}
    problems += problems_of_lines(evaluation_lines(run), PIPELINE, plan)
    for iteration in range(2, STEPS + 1, 2):
        if f"validation loss at iteration {iteration}" not in run.log:
            problems.append(f"no validation loss at iteration {iteration} in the log")
    problems += [f"no line {text!r} in the log" for text in missing(run, "loss by source at iteration 2", *SOURCES)]
    return problems + missing_tags(
        board, [f"{kind}/{name}" for kind in ("loss", "validation loss") for name in SOURCES]
    )


def evaluation_lines(run: Run) -> list[Line]:
    """The lines of validation and test, which have no step, numbered as steps in the order of each chunk."""
    taken: dict[tuple[int, ...], int] = {}
    lines = []
    for line in read_records(run.records):
        if line["step"] is None:
            who = tuple(line[name] for name in ("tp", "cp", "pp", "dp", "chunk"))
            taken[who] = taken.get(who, -1) + 1
            lines.append({**line, "step": taken[who] // SAMPLES})  # packed: one sample a microbatch, one replica
    return lines


def missing_tags(board: Path, wanted: list[str]) -> list[str]:
    """Scalars that are not in TensorBoard's files."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return ["tensorboard is not installed: pip install tensorboard"]
    events = EventAccumulator(str(board))
    events.Reload()
    return [f"no scalar {tag!r} in TensorBoard" for tag in wanted if tag not in events.Tags()["scalars"]]


def ramp_up(bench: Bench) -> list[str]:
    """4 samples a step, from step 2 on 8; Megatron saves where the size changes, and a run continues from there."""
    calculator = bench.runner.checkout / "megatron" / "core" / "num_microbatches_calculator.py"
    if "StepBatchsize" in calculator.read_text(encoding="utf-8"):
        schedule = ["--train-iters", str(STEPS), "--lr-decay-iters", str(STEPS)]
        schedule += ["--step-batch-size-schedule", f"0:4 {8 * LENGTH}:8"]  # thresholds are tokens
    else:
        schedule = ["--train-samples", "40", "--lr-decay-samples", "40"]  # this version ramps up only then
        schedule += ["--rampup-batch-size", "4", "4", "8", "--global-batch-size", "8"]
    saved = bench.checkpoints("ramp")
    plan = planned_samples(bench.recipe("-ramp"), STEPS)
    more = [*bench.first_weights, "--save", str(saved), "--save-interval", "100"]
    run = bench.train("ramp-up", SINGLE, more, variant="-ramp", schedule=schedule)
    problems = problems_of_run(run, SINGLE, plan)
    if problems:
        return problems
    resumed = bench.train(
        "ramp-up resumed", TENSORS, ["--load", str(saved), "--ckpt-step", "2"], variant="-ramp", schedule=schedule
    )
    return problems_of_run(resumed, TENSORS, plan, first=2)


def packed_rows(bench: Bench) -> list[str]:
    """Packed microbatches of two samples pass all chunks of a pipeline as one row; `--sft` alters nothing of them."""
    layout = LAYOUT_OF_NAME["PP2 x VPP2"]
    alone = bench.train("rows alone", SINGLE, bench.first_weights)
    rows = bench.train("rows", layout, [*bench.first_weights, "--micro-batch-size", "2", "--sft"])
    problems = problems_of_run(rows, layout, planned_samples(bench.recipe(), STEPS))
    return [*problems, *unequal_losses(alone, rows, range(1, STEPS + 1))]


def exit_interval(bench: Bench) -> list[str]:
    """A run at TP2 x PP2 ends itself after three steps; another at CP2 continues."""
    layout, saved = LAYOUT_OF_NAME["TP2 x PP2"], bench.checkpoints("exit")
    plan = planned_samples(bench.recipe(), STEPS)
    run = bench.train("exit", layout, [*bench.first_weights, *ends_saved(saved)])
    problems = problems_of_run(run, layout, {step: plan[step] for step in range(SAVE_AT)})
    if problems:
        return problems
    resumed = bench.train("exit resumed", CONTEXT, ["--load", str(saved)])
    return problems_of_run(resumed, CONTEXT, plan, first=SAVE_AT)


def ends_saved(folder: Path) -> list[str]:
    """Flags of a run that saves and ends itself after step `SAVE_AT` of `STEPS`."""
    return ["--exit-interval", str(SAVE_AT), "--save", str(folder), "--save-interval", "100"]


def asynchronous_save(bench: Bench) -> list[str]:
    """The checkpoint is written beside the next steps, and holds the state of its own step."""
    saved = bench.checkpoints("async")
    plan = planned_samples(bench.recipe(), STEPS)
    flags = [*async_flags(bench.runner), "--save", str(saved), "--save-interval", str(SAVE_AT)]
    run = bench.train("async save", SINGLE, [*bench.first_weights, *flags])
    problems = problems_of_run(run, SINGLE, plan)
    if problems:
        return problems
    resumed = bench.train("async save resumed", SINGLE, ["--load", str(saved), "--ckpt-step", str(SAVE_AT)])
    return problems_of_run(resumed, SINGLE, plan, first=SAVE_AT)


def async_flags(runner: Runner) -> list[str]:
    """Save beside the next steps, by Megatron's own means; newer versions take those of another package otherwise."""
    checkpointing = runner.checkout / "megatron" / "training" / "checkpointing.py"
    has_choice = "async_strategy" in checkpointing.read_text(encoding="utf-8")
    return ["--async-save", *(("--async-strategy", "mcore") if has_choice else ())]


def skipped_iterations(bench: Bench) -> list[str]:
    """`--iterations-to-skip 2 3`: these steps are passed over on all ranks, the others are as planned."""
    plan = planned_samples(bench.recipe(), STEPS)
    training = (bench.runner.checkout / "megatron" / "training" / "training.py").read_text()
    counts_from = 1 if "(iteration + 1) in args.iterations_to_skip" in training else 0  # of later versions: from 1
    run = bench.train("skipped", PIPELINE, [*bench.first_weights, "--iterations-to-skip", "2", "3"])
    return problems_of_run(run, PIPELINE, plan, skipped=(2 - counts_from, 3 - counts_from))


def rerun(bench: Bench) -> list[str]:
    """Megatron suspects a loss, and computes the step twice: with the same samples, and then the next ones."""
    plan = planned_samples(bench.recipe(), STEPS)
    # A spiky loss is the one suspicion after which Megatron continues.
    suspect = ["--check-for-spiky-loss", "--no-check-for-nan-in-loss-and-grad"]
    inject = ["--error-injection-rate", "10", "--error-injection-type", "transient_error"]
    run = bench.train("rerun", PIPELINE, [*bench.first_weights, *suspect, *inject])
    if not run.is_fine:
        return problems_of_run(run, PIPELINE, plan)
    lines = [line for line in read_records(run.records) if line["step"] is not None]
    once = first_times(lines)
    problems = problems_of_lines(once, PIPELINE, plan)
    if len(once) == len(lines):
        problems.append("no step was computed twice, so nothing was checked")
    return problems + [f"step {line['step']}: others when computed again" for line in lines if line not in once]


def first_times(lines: list[Line]) -> list[Line]:
    """The lines of each step's first computation: as many as packed samples, in each chunk."""
    taken: dict[tuple[int, ...], int] = {}
    once = []
    for line in lines:
        who = tuple(line[name] for name in ("step", "tp", "cp", "pp", "dp", "chunk"))
        taken[who] = taken.get(who, 0) + 1
        if taken[who] <= SAMPLES:
            once.append(line)
    return once


def rerun_elsewhere(bench: Bench) -> list[str]:
    """A fault that comes again: Megatron saves the step unfinished, with its microbatches, for another job to try.

    Here the other job has no other GPU, so it computes the step once more and asks for a restart again. A third one
    does not mind, and continues.
    """
    saved = bench.checkpoints("rerun")
    plan = planned_samples(bench.recipe(), STEPS)
    inject = ["--error-injection-rate", "20", "--error-injection-type", "persistent_error"]
    save = ["--save", str(saved), "--save-interval", "100"]
    asking = [bench.train("rerun saved", TENSORS, [*bench.first_weights, *inject, *save])]
    asking.append(bench.train("rerun again", TENSORS, ["--load", str(saved)]))
    for run in asking:
        if set(run.exit_codes) != {ASKS_FOR_RESTART}:
            return [f"exit codes {run.exit_codes} instead of {ASKS_FOR_RESTART}, which asks for a restart", run.trouble]
    again = first_times(read_records(asking[1].records))
    faulty = again[0]["step"]
    problems = problems_of_lines(again, TENSORS, {faulty: plan[faulty]})
    run = bench.train("rerun no more", TENSORS, ["--load", str(saved), "--rerun-mode", "disabled"])
    return problems + problems_of_run(run, TENSORS, plan, first=faulty)


def checkpoint_without_state(bench: Bench) -> list[str]:
    """A checkpoint that torchmix has not written is an error that says what to do; with the flag it says, it loads."""
    saved = bench.checkpoints("forgotten")
    run = bench.train("forgotten", SINGLE, [*bench.first_weights, *ends_saved(saved)], FORGET_STATE="1")
    if not run.is_fine:
        return [run.trouble]
    refused = bench.train("forgotten resumed", SINGLE, ["--load", str(saved)])
    problems = missing(refused, "StateError", "was not trained with torchmix", "--data-start-fresh")
    if refused.is_fine:
        problems.append("the run continued")
    fresh = bench.train("forgotten fresh", SINGLE, ["--load", str(saved), "--data-start-fresh"])
    return problems + problems_of_run(fresh, SINGLE, planned_samples(bench.recipe(), STEPS), first=SAVE_AT)


def other_recipe(bench: Bench) -> list[str]:
    """A checkpoint of another mixture is an error that names both."""
    saved = bench.checkpoints("other")
    run = bench.train("other", SINGLE, [*bench.first_weights, *ends_saved(saved)], variant="-other")
    if not run.is_fine:
        return [run.trouble]
    refused = bench.train("other resumed", SINGLE, ["--load", str(saved)])
    return missing(refused, "StateMismatch", "recipe") + (["the run continued"] if refused.is_fine else [])


def killed_rank(bench: Bench) -> list[str]:
    """`kill -9` of either rank of a pipeline: the other ends within 15 s, and names it."""
    problems = []
    for victim in range(PIPELINE.ranks):
        name = f"{bench.packing} killed {victim}"
        arguments = bench.arguments(PIPELINE, bench.first_weights, schedule=steps_flags(10_000))
        with bench.runner.started(name, arguments, ranks=PIPELINE.ranks) as processes:
            print(f"{name} ...", flush=True)
            end_s = time.monotonic() + bench.runner.deadline_s
            while 2 not in bench.runner.result(name, [None] * PIPELINE.ranks).loss_of_iteration:
                if time.monotonic() > end_s or any(process.poll() is not None for process in processes):
                    break
                time.sleep(0.1)
            os.kill(processes[victim].pid, signal.SIGKILL)
            killed_s = time.monotonic()
            wait(processes, 4 * NOTICE_S)
            took_s = time.monotonic() - killed_s
            run = bench.runner.result(name, [process.poll() for process in processes])
        print(f"{name}: the other rank ended after {took_s:.1f} s", flush=True)
        if took_s > NOTICE_S or run.exit_codes[1 - victim] == 0:
            problems.append(f"rank {1 - victim} ended after {took_s:.1f} s, exit codes {run.exit_codes}")
        if not re.search(rf"torchmix: rank {victim} lost: rank {victim} ", run.logs[1 - victim]):
            problems += [f"rank {1 - victim} does not name rank {victim}", run.trouble]
    return problems


def missing(run: Run, *texts: str) -> list[str]:
    """Texts that are not in the log of a run, with what is there."""
    absent = [text for text in texts if text not in run.log]
    return [*(f"the log does not say {text!r}" for text in absent), *([run.trouble] if absent else [])]


FEATURES: dict[str, Callable[[Bench], list[str]]] = {
    "validation": validation,
    "ramp-up": ramp_up,
    "packed rows": packed_rows,
    "exit-interval": exit_interval,
    "async save": asynchronous_save,
    "skipped iterations": skipped_iterations,
    "rerun": rerun,
    "rerun elsewhere": rerun_elsewhere,
    "no state": checkpoint_without_state,
    "other recipe": other_recipe,
    "killed rank": killed_rank,
}
"""By the name of their line."""
