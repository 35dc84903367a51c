"""Megatron's sizes and counts against the recipe's: length, micro-batch, global batch, consumed samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, pairwise
from typing import Any

from torchmix.constructor.fields import Microbatch
from torchmix.errors import RecipeError, StateError, StateMismatch
from torchmix.recipe.ramp import length_of_step, lengths_of, samples_before, samples_of_step, stages_of
from torchmix.recipe.structs import Batch, RampStage

# --- The sizes that Megatron's flags and the recipe both name: length, micro-batch, global batch at every step.
#
# Every step of Megatron has as many samples as the same step of the recipe, so that `consumed_train_samples` and the
# step of the data plane say the same for ever. Megatron's own calculator is asked for its sizes, step by step until
# both are constant.
#
#     core 0.16    --global-batch-size, --rampup-batch-size START INCREMENT SAMPLES
#     core 0.20    --global-batch-size, or --step-batch-size-schedule "TOKENS:SIZE TOKENS:SIZE ..."
#
# Cost: a few microseconds for each step of a ramp, once.


def check_batch_sizes(args: Any, batch: Batch) -> None:
    """Compare Megatron's sizes with the recipe's.

    Args:
        args: Megatron's arguments.
        batch: The recipe's.

    Raises:
        RecipeError: They differ; says where, with both values.
    """
    lengths = lengths_of(batch)
    if args.seq_length not in lengths:
        listed = " or ".join(map(str, lengths))
        has = f"batch.length is {listed}" if len(lengths) == 1 else f"samples have {listed} tokens"
        raise RecipeError(
            f"--seq-length is {args.seq_length}, the recipe's {has}; a sample is one sequence, so set both to the same",
            "batch.length",
        )
    decoder_length = getattr(args, "decoder_seq_length", None)
    if decoder_length not in (None, args.seq_length):
        raise RecipeError(
            f"--decoder-seq-length is {decoder_length}, the recipe's batch.length is {args.seq_length}; Megatron's "
            f"pipeline stages then agree on another shape: leave the flag out",
            "batch.length",
        )
    if getattr(args, "decrease_batch_size_if_needed", False):
        raise RecipeError(
            "--decrease-batch-size-if-needed trains on fewer samples than planned; choose a global batch that "
            "micro-batch-size x data-parallel size divides",
            "batch.samples",
        )
    last = _last_size(batch)
    if not _is_ramped(args):
        if last.from_step or args.global_batch_size != last.samples:
            raise RecipeError(
                f"--global-batch-size is {args.global_batch_size}, the recipe's batch.samples is {_text(batch)}; give "
                f"Megatron what the recipe says{_hint(batch)}",
                "batch.samples",
            )
        return
    stages: list[tuple[int, int]] = []
    """Megatron's, as (from step, samples)."""
    different: tuple[int, int, int, int] | None = None
    consumed = 0
    for step, (samples, is_final) in enumerate(_sizes_of_megatron(args)):
        if not stages or stages[-1][1] != samples:
            stages.append((step, samples))
        planned = samples_of_step(batch, step)
        if planned != samples and different is None:
            different = step, consumed, samples, planned
        consumed += samples
        if is_final and (step >= last.from_step or different is not None):
            break
    if different is not None:
        step, before, samples, planned = different
        raise RecipeError(
            f"step {step} (after {before} samples) has {samples} samples by Megatron's flags ({_flags(args)}) and "
            f"{planned} by the recipe, whose batch.samples is {_text(batch)}. Megatron's flags are, in a recipe: "
            f"samples: {_ramp_text(stages)}",
            "batch.samples",
        )
    for (_, before), (step, samples) in pairwise(stages):
        if samples < before:
            raise RecipeError(
                f"the batch falls from {before} to {samples} samples at step {step}; Megatron ends a run there (an "
                f"assertion of its training loop: the number of microbatches must not fall)",
                "batch.samples",
            )


def check_whole_microbatches(batch: Batch, *, micro_batch_size: int, dp: int, part: str) -> None:
    """Refuse steps whose ranks would have masked samples, also in loaders of ranks that come and go.

    Megatron counts whole microbatches, of the real global batch, and averages over them; nothing tells it of more.

    Args:
        batch: Of the part that is read.
        micro_batch_size: Samples of a microbatch.
        dp: Data-parallel size.
        part: Which part, for the message.

    Raises:
        RecipeError: The samples of a step do not divide.
    """
    for stage in stages_of(batch):
        if stage.samples % (micro_batch_size * dp):
            raise RecipeError(
                f"a step of {part} has {stage.samples} samples from step {stage.from_step} on, which do not divide by "
                f"micro batches of {micro_batch_size} x {dp} data-parallel ranks; Megatron counts whole microbatches, "
                f"and has no place for masked ones. Use a number of ranks that divides the samples (with "
                f"--inprocess-restart, --inprocess-active-world-size), or train by a loop that takes masked ones",
                "batch.samples",
            )


def restarts_in_process(args: Any) -> bool:
    """Whether Megatron begins its training again in this process: without the package for that it warns, and does not.

    Args:
        args: Megatron's arguments.
    """
    if not getattr(args, "inprocess_restart", False):
        return False
    from megatron.training import inprocess_restart

    return inprocess_restart.inprocess is not None


def validation_samples(args: Any) -> int:
    """Samples of a global batch of validation and test: Megatron's, which knows no ramp there.

    Args:
        args: Megatron's arguments.
    """
    samples = getattr(args, "eval_global_batch_size", None)  # core 0.20
    return int(args.global_batch_size if samples is None else samples)


def validation_micro_batch_size(args: Any) -> int:
    """Samples of a microbatch of validation and test."""
    samples = getattr(args, "eval_micro_batch_size", None)  # core 0.20
    return int(args.micro_batch_size if samples is None else samples)


def _is_ramped(args: Any) -> bool:
    from megatron.core import num_microbatches_calculator as megatron

    if getattr(args, "step_batch_size_schedule", None) is not None:
        return True
    # Where Megatron no longer has this class it takes the flag, says that it is deprecated, and ignores it.
    knows_rampup = hasattr(megatron, "RampupBatchsizeNumMicroBatchesCalculator")
    return knows_rampup and getattr(args, "rampup_batch_size", None) is not None


def _sizes_of_megatron(args: Any) -> Iterator[tuple[int, bool]]:
    """Samples of each step by Megatron's own calculator, and whether that is the size for ever."""
    from megatron.core import num_microbatches_calculator as megatron

    if getattr(args, "step_batch_size_schedule", None) is not None:
        calculator = megatron.StepBatchsizeNumMicroBatchesCalculator(
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
            decrease_batch_size_if_needed=False,
            rank=-1,  # rank 0 would log it a second time
            schedule=args.step_batch_size_schedule,
            seq_length=args.seq_length,  # its thresholds are tokens
        )
        end = calculator.schedule[-1][0]
    else:
        start, increment, ramp_samples = (int(value) for value in args.rampup_batch_size)
        calculator = megatron.RampupBatchsizeNumMicroBatchesCalculator(
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
            decrease_batch_size_if_needed=False,
            rank=-1,
            start_global_batch_size=start,
            batch_size_increment=increment,
            ramup_samples=ramp_samples,
        )
        end = ramp_samples + 1
    consumed = 0
    for _ in count():
        calculator.update(consumed, consistency_check=False, verbose=False)
        samples = int(calculator.get_current_global_batch_size())
        yield samples, consumed >= end
        consumed += samples


def _last_size(batch: Batch) -> RampStage:
    """The stage in which the number of samples changes last; later ones only make samples longer."""
    last, *later = stages_of(batch)
    for stage in later:
        last = stage if stage.samples != last.samples else last
    return last


def _flags(args: Any) -> str:
    schedule = getattr(args, "step_batch_size_schedule", None)
    if schedule is not None:
        return f'--step-batch-size-schedule "{schedule}"'
    ramp = " ".join(str(value) for value in args.rampup_batch_size)
    return f"--rampup-batch-size {ramp} --global-batch-size {args.global_batch_size}"


def _text(batch: Batch) -> str:
    if isinstance(batch.samples, int):
        return str(batch.samples)
    return _ramp_text((stage.from_step, stage.samples) for stage in batch.samples)


def _ramp_text(stages: Iterable[tuple[int, int]]) -> str:
    return "[" + ", ".join(f"{{from_step: {start}, samples: {samples}}}" for start, samples in stages) + "]"


def _hint(batch: Batch) -> str:
    if isinstance(batch.samples, int):
        return f": --global-batch-size {batch.samples}"
    return ", a ramp: --rampup-batch-size (core 0.16) or --step-batch-size-schedule (newer)"


# --- Megatron's counts against the plan's: consumed samples, microbatches of a step, and steps that it passes over.
#
# A run cannot drift from its data unnoticed, in training or in validation; a step that Megatron skips is skipped by
# all ranks and chunks. Cost: a comparison of integers in each step.


def check_training(args: Any, batch: Batch, *, dp: int, step: int) -> None:
    """Compare, before a step of training.

    Args:
        args: Megatron's arguments.
        batch: The recipe's.
        dp: Data-parallel size.
        step: Whose first microbatch is about to be used.

    Raises:
        StateMismatch: Megatron has consumed another number of samples, or means another number of microbatches or
            another length of samples.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    length = length_of_step(batch, step)
    if args.seq_length != length:
        raise StateMismatch(
            f"step {step} has samples of {length} tokens by the recipe, and --seq-length is {args.seq_length}; save a "
            f"checkpoint before this step (--train-samples {samples_before(batch, step)} ends a run there), and "
            f"continue from it with --seq-length {length} --max-position-embeddings {length}"
        )
    planned = samples_before(batch, step)
    if args.consumed_train_samples != planned:
        raise StateMismatch(
            f"Megatron has consumed {args.consumed_train_samples} samples, the data are at step {step}, after "
            f"{planned}: something has taken microbatches, or steps, that the other did not count. Restart from the "
            f"last checkpoint"
        )
    microbatches = samples_of_step(batch, step) // (dp * args.micro_batch_size)
    if get_num_microbatches() != microbatches:
        raise StateMismatch(
            f"step {step} has {microbatches} microbatches by the recipe, {get_num_microbatches()} by Megatron; let "
            f"Megatron's batch-size flags say what the recipe says"
        )


def check_of_validation(args: Any, *, start_step: int) -> Callable[[Microbatch], None]:
    """What to call with each microbatch of validation, before it is used.

    Args:
        args: Megatron's arguments, before the first evaluation of this run.
        start_step: Where validation begins in this run.

    Returns:
        A function that raises StateMismatch where this rank has taken other steps than Megatron has counted.
    """
    samples, counted_before = validation_samples(args), int(args.consumed_valid_samples)

    def check(microbatch: Microbatch) -> None:
        taken = (microbatch.step - start_step) * samples
        counted = args.consumed_valid_samples - counted_before
        if microbatch.index == 0 and counted != taken:
            raise StateMismatch(
                f"Megatron has evaluated {counted} samples in this run, this rank has taken {taken} of validation: "
                f"something besides get_batch has taken some, as a process_non_loss_data_func does; evaluate without it"
            )

    return check


def take_over_skipping(training: Any, skip_step: Callable[[], None]) -> None:
    """Let Megatron's loop pass over whole steps, on all ranks and for all chunks.

    Its own function takes microbatches on the first rank of each tensor-parallel group alone, which then tells the
    others; here every rank has its own, so the others would fall behind. And it takes no lists of iterators.

    Args:
        training: The module `megatron.training.training`.
        skip_step: Lets every chunk of this rank pass over a step.

    Raises:
        StateError: This Megatron has no `dummy_train_step`.
    """
    if not hasattr(training, "dummy_train_step"):
        raise StateError(
            "--iterations-to-skip: this Megatron has no megatron.training.training.dummy_train_step to take over"
        )

    def dummy_train_step(data_iterator: Any) -> None:
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            skip_step()

    training.dummy_train_step = dummy_train_step
