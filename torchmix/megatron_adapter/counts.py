"""Megatron's counts against the plan's: consumed samples, microbatches of a step, and steps that it passes over.

In: Megatron's arguments, and the first microbatch of each step as it is taken. Out: nothing, or an error with both
counts. Must hold: a run cannot drift from its data unnoticed, in training or in validation; a step that Megatron skips
is skipped by all ranks and chunks. Cost: a comparison of integers in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmix.constructor.fields import Microbatch
from torchmix.errors import StateError, StateMismatch
from torchmix.megatron_adapter.batch_sizes import validation_samples
from torchmix.recipe.ramp import length_of_step, samples_before, samples_of_step
from torchmix.recipe.structs import Batch


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
            f"checkpoint before this step (--train-samples {samples_before(batch, step)} ends a run there), and go on "
            f"from it with --seq-length {length} --max-position-embeddings {length}"
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
