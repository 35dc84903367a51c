"""The provider of train, validation and test data: what Megatron calls instead of a builder of datasets.

All ranks call it, as often and in the same order, since it opens the exchange between them; one process opens its
loaders once, however many chunks ask; each loader prepares ahead from here on, because the first stage gets no data
before all stages listen.

Cost: opening the catalog and groups, once.
"""

from __future__ import annotations

import signal
from typing import Any

from torchmix.constructor.fields import Microbatch
from torchmix.errors import RecipeError
from torchmix.megatron_adapter import vision
from torchmix.megatron_adapter.batch import losses_of_part, needs_of_stage, scripts_with_losses, tree_of_job
from torchmix.megatron_adapter.batch_sizes import (
    check_batch_sizes,
    check_training,
    restarts_in_process,
    take_over_skipping,
    validation_micro_batch_size,
)
from torchmix.megatron_adapter.bins import items_of_step, take_over
from torchmix.megatron_adapter.checkpoint import watch_checkpoints
from torchmix.megatron_adapter.evaluation import (
    Passes,
    fails_in_full_validation,
    from_rank_0,
    recipe_of_set,
    steps_of_pass,
)
from torchmix.megatron_adapter.flags import check_refusals, names_of_validation_sets, without_effect
from torchmix.megatron_adapter.losses import FirstStepTokens, SourceLosses, StepReports
from torchmix.megatron_adapter.microbatches import MicrobatchIterator, SharedMicrobatches, as_one_row
from torchmix.megatron_adapter.open_loaders import DataOfRun, open_loaders, telling_the_others
from torchmix.megatron_adapter.runs import has_several_sizes, recipe_for, way_of
from torchmix.mixture.policies import function_of_step
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.structs import Recipe
from torchmix.stateful.loader import StatefulDataLoader

Iterators = tuple[
    MicrobatchIterator | None, MicrobatchIterator | list[MicrobatchIterator] | None, MicrobatchIterator | None
]

_job: _Job | None = None


def provider(train_val_test_num_samples: Any = None, vp_stage: int | None = None) -> Iterators:
    """Megatron's `train_valid_test_datasets_provider`: iterators of one model chunk.

    Args:
        train_val_test_num_samples: Not used; a stream has no end that would have to be known.
        vp_stage: The virtual stage that asks; Megatron calls once for each.

    Returns:
        Train, validation and test; None where Megatron asks for none or the recipe has none. With
        `--multiple-validation-sets` a list for validation, an iterator for each of its sources, by name.

    Raises:
        RecipeError: Flags or sizes contradict the recipe, or torchmix does not serve them.
        StateError: The loaded checkpoint has no state of the data, or another one than its weights.
        RankLost: Another rank failed before its loaders were built.
    """
    from megatron.training import get_args

    global _job
    del train_val_test_num_samples, vp_stage
    args = get_args()
    if _job is not None and _job.restarts_with(args):
        job, _job = _job, None
        job.leave()
    if _job is None:
        with telling_the_others():
            _job = _Job(args)
    return _job.new_iterators()


provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron: call it on all ranks, not on tp rank 0 alone


def close() -> None:
    """Close what the provider has opened; all ranks do so alike. At the interpreter's end it happens by itself."""
    global _job
    if _job is not None:
        job, _job = _job, None
        job.close()


class _Job(DataOfRun):
    """What a run of Megatron in this process has of its data."""

    def __init__(self, args: Any) -> None:
        from megatron.training import training

        super().__init__(args, args.data_recipe, open_loaders)
        self._passes: list[Passes] = []
        check_refusals(args, self._recipe, cp=args.context_parallel_size, pp=args.pipeline_model_parallel_size)
        self._images: dict[str, str] = {}
        if vision.at_hand is not None:
            self._sizes = vision.at_hand.sizes_of(args)
            self._images = {"images": vision.open_images(args, self._recipe, vision.at_hand, self._folder)}
        check_batch_sizes(self._sizes, self._recipe.batch)
        self._way = way_of(args)
        if self._way is not None:
            take_over(self._way)
            self._recipe = recipe_for(args, self._recipe)
            args.dataloader_type = "external"  # Megatron has asked for `single`, whose samplers want a dataset
        self._has_sets = bool(args.full_validation and getattr(args, "multiple_validation_sets", False))
        self._check_full_validation()
        if self._is_packed and args.pipeline_model_parallel_size > 1:
            training.get_forward_backward_func = as_one_row(training.get_forward_backward_func)
        self._tree = tree_of_job(args)
        self._options = {
            "loaders": args.data_loaders,
            "look_ahead": args.data_look_ahead,
            "patience_s": args.data_patience,
            "padded_vocab_size": getattr(args, "padded_vocab_size", None),
            "elastic": self._is_elastic,
        }
        self._tell_what_has_no_effect()
        self._batch = part_of(self._recipe, "train").batch
        for left in (losses_of_part, needs_of_stage, items_of_step):  # by a run before it in this process
            left.clear()
        self._train = None if args.skip_train else self._open_train()
        evaluates = bool(args.full_validation or (args.eval_iters or 0) > 0)
        self._validation: list[SharedMicrobatches] = []
        if evaluates:
            self._validation = self._open_sets() if self._has_sets else [self._open_evaluation("validation")]
        tests = evaluates and has_part(self._recipe, "test") and not self._has_sets
        self._test = self._open_evaluation("test") if tests else None
        self._close_at_exit()

    def new_iterators(self) -> Iterators:
        """Iterators for one more chunk."""
        train, test = (None if shared is None else shared.new_iterator() for shared in (self._train, self._test))
        sets = [shared.new_iterator() for shared in self._validation]
        return train, sets if self._has_sets else sets[0] if sets else None, test

    def restarts_with(self, args: Any) -> bool:
        """Whether Megatron has aborted this run, and begun another one in this process: its arguments are new then."""
        return self._is_elastic and args is not self._args

    def leave(self) -> None:
        """Take no part any more; the loaders stay."""
        super().leave()
        for passes in self._passes:
            passes.settle()
        self._passes = []

    @property
    def _is_elastic(self) -> bool:
        """Whether a lost rank is Megatron's to deal with."""
        return restarts_in_process(self._args)

    def _check_full_validation(self) -> None:
        from megatron.training import training

        if self._args.full_validation and not self._has_sets and fails_in_full_validation(training):
            raise RecipeError(
                "--full-validation: Megatron itself fails at its first evaluation (it takes eval_iters[0] of a "
                "number), with its own data too; add --multiple-validation-sets, which evaluates each source of the "
                "recipe's validation by itself"
            )

    def _tell_what_has_no_effect(self) -> None:
        from megatron.training.utils import print_rank_0

        flags = without_effect()
        if flags:
            print_rank_0(f" > torchmix: no effect with a recipe: {', '.join(flags)}")
        if self._args.seed != self._recipe.seed:
            print_rank_0(
                f" > torchmix: the order of the data comes from the recipe's seed {self._recipe.seed}; --seed "
                f"{self._args.seed} is the model's"
            )

    def _open_train(self) -> SharedMicrobatches:
        from megatron.training import checkpointing, training
        from megatron.training.utils import print_rank_0

        args = self._args
        part = part_of(self._recipe, "train")
        needs_losses = part.dynamic is not None and function_of_step(part.dynamic) is None
        if needs_losses and not scripts_with_losses:  # the trainer would wait for decisions for ever
            raise RecipeError(
                "a policy needs the losses of each step, and the script has no `loss_func` of its own that torchmix "
                "could listen to; call get_batch(globals()) in a script with `loss_func`, or leave `dynamic` out",
                "dynamic",
            )
        loader = self._open_where_it_stands(
            watch_checkpoints(checkpointing),
            args,
            print_rank_0,
            # Whoever signals a whole job means: finish the step and save. The worker's data are needed for it.
            worker_ignores=(_number_of_signal(args),) if getattr(args, "exit_signal_handler", False) else (),
        )
        reports = None
        if needs_losses and self._tree.role.is_last_stage:
            reports = StepReports(sorted(part.sources), loader.report)
        self._report_sources("train", self._recipe, reports)
        tokens = FirstStepTokens() if self._counts_tokens() else None

        def on_microbatch(microbatch: Microbatch) -> None:
            if microbatch.index == 0:
                check_training(self._sizes, self._batch, dp=self._tree.topology.dp, step=microbatch.step)
            if tokens is not None:
                tokens.note(microbatch)

        shared = self._share_training(loader, args, on_microbatch)
        if getattr(args, "iterations_to_skip", None):
            take_over_skipping(training, lambda: _skip(shared, reports))
        return shared

    def _open_evaluation(self, part: str) -> SharedMicrobatches:
        recipe = self._recipe_of_evaluation()
        self._report_sources(part, recipe)
        is_pass = part == "validation" and self._args.full_validation
        return self._open_pass(recipe, part) if is_pass else self._share_evaluation(part)

    def _open_sets(self) -> list[SharedMicrobatches]:
        """A pass over each source of validation. Megatron says the loss of each itself, so it is not said twice."""
        from megatron.training.utils import print_rank_0

        names = names_of_validation_sets(self._recipe)
        print_rank_0(f" > torchmix: the validation sets are {', '.join(names)}")
        if has_part(self._recipe, "test"):
            print_rank_0(" > torchmix: no test, which Megatron cannot do with --multiple-validation-sets")
        recipe = self._recipe_of_evaluation(num_sets=len(names))
        return [self._open_pass(recipe_of_set(recipe, name), "train") for name in names]

    def _open_pass(self, recipe: Recipe, part: str) -> SharedMicrobatches:
        """One pass over a part of a recipe of evaluations, again and again."""
        loader = self._open_loader(
            recipe, part=part, micro_batch_size=validation_micro_batch_size(self._args), one_pass=True
        )
        num_steps = from_rank_0(lambda: steps_of_pass(recipe, part, self._folder))
        passes = Passes(loader, num_steps=num_steps)
        self._passes.append(passes)
        ways = self._ways_of(loader)
        return SharedMicrobatches(passes, part="validation", packed=self._is_packed, num_steps=num_steps, **ways)

    def _ways_of(self, loader: StatefulDataLoader) -> dict[str, Any]:
        """How microbatches come where they have images, and where samples have runs of ranks."""
        if self._way is None:
            return dict(self._images)

        def sizes() -> tuple[int, int]:
            figures = loader.stats()
            return figures["delivered_tokens"], figures["squared_tokens"]

        sizes_of_job = self._tree.topology
        return {
            "by_step": self._way == "steps",
            "num_ranks": sizes_of_job.dp * sizes_of_job.cp,
            "tells_cp_size": has_several_sizes(self._args),
            "sizes": sizes,
        }

    def _counts_tokens(self) -> bool:
        """Whether this rank is the one to look at how unequal microbatches are."""
        role, place = self._tree.role, self._tree.topology.coordinates
        is_first = place.tp == place.cp == place.dp == 0 and place.pp == self._tree.topology.pp - 1
        return role.is_last_stage and is_first and not getattr(self._args, "calculate_per_token_loss", False)

    def _report_sources(self, part: str, recipe: Recipe, reports: StepReports | None = None) -> None:
        """Let `get_batch` add up the losses of a part by source, for the log and for a policy."""
        args, is_logged = self._args, bool(self._args.data_source_loss)
        if not is_logged and reports is None:
            return
        steps = {"seen": 0}

        def is_due_in_training() -> bool:
            return is_logged and bool((args.curr_iteration + 1) % args.log_interval == 0)

        def is_due_in_evaluation() -> bool:
            steps["seen"] += 1
            return bool(steps["seen"] % args.eval_iters == 0)

        losses_of_part[part] = SourceLosses(
            part=part,
            names=sorted(part_of(recipe, part).sources),
            is_due=is_due_in_training if part == "train" else is_due_in_evaluation,
            reports=reports,
        )


def _skip(shared: SharedMicrobatches, reports: StepReports | None) -> None:
    """Let all chunks pass over a step, and tell the policy."""
    step = shared.skip_step()
    if reports is not None:
        reports.skip(step)


def _number_of_signal(args: Any) -> int:
    """The signal after which Megatron saves and exits."""
    value = getattr(args, "exit_signal", signal.SIGTERM)
    return int(getattr(signal, value) if isinstance(value, str) else value)
