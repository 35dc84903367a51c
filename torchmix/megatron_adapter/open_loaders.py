"""The loaders of a run of Megatron or of Megatron-Bridge: opened where its counts stand, closed at its end.

They are closed when the interpreter ends, since neither has a hook there that always runs, before the threads that
watch other ranks end. After an error they stay open, and those threads tell the other ranks.

`--inprocess-restart` calls Megatron's training again, in the same process, once it has destroyed all process groups.
Then the next run opens the same loaders at their places among its ranks, from where it begins: what has been read, and
the worker of the node, stay. A process that was in reserve opens its own beside them.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from torchmix.constructor.fields import Microbatch
from torchmix.errors import RankLost
from torchmix.megatron_adapter.batch_sizes import (
    check_of_validation,
    check_whole_microbatches,
    validation_micro_batch_size,
    validation_samples,
)
from torchmix.megatron_adapter.checkpoint import (
    LoadedCheckpoint,
    agree_on_start,
    naming_the_flag,
    remember,
    start_of_run,
)
from torchmix.megatron_adapter.evaluation import first_step, recipe_of_evaluation
from torchmix.megatron_adapter.microbatches import SharedMicrobatches
from torchmix.parallel.agreement import announcing_failures
from torchmix.parallel.place_tree import ClientPlaceTree, Layout
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.steps.state import encode_state, read_state, start_state

logger = logging.getLogger(__name__)


class _Opened(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A loader, and what it was asked for beside its place."""

    loader: StatefulDataLoader
    recipe: Recipe
    options: dict[str, Any]


class OpenLoaders:
    """The loaders of this process."""

    def __init__(self) -> None:
        """None is open."""
        self._whole: Recipe | None = None
        self._opened: list[_Opened] = []
        self._kept: list[_Opened] = []
        """Those of the run before this one that this one has not opened yet."""

    def begin(self, whole: Recipe) -> None:
        """A run begins. Loaders of another recipe are closed.

        Args:
            whole: The recipe as its file has it.
        """
        if whole != self._whole:
            self.close()
        self._whole = whole
        self._kept, self._opened = [*self._kept, *self._opened], []

    def open(
        self,
        recipe: Recipe,
        tree: ClientPlaceTree,
        *,
        micro_batch_size: int,
        step: int = 0,
        state: bytes | None = None,
        accept_edit: str | None = None,
        part: str = "train",
        one_pass: bool = False,
        **options: Any,
    ) -> StatefulDataLoader:
        """A loader that stands before a step. A collective; arguments and errors are those of `build_loader`.

        Args:
            recipe: That of the run, or one that is made of it.
            tree: The ranks of the run.
            micro_batch_size: Samples of a microbatch.
            step: The first step to be given.
            state: Of a loader before that step; None: the steps before it are planned.
            accept_edit: See `load_state_dict`.
            part: The part to read.
            one_pass: Give each document once.
            options: More for `build_loader`.
        """
        planned = part_of(recipe, part, one_pass=one_pass)
        begin = encode_state(start_state(Layout(), recipe=planned, step=step)) if state is None else state
        options = {"part": part, "one_pass": one_pass, **options}
        kept = next((one for one in self._kept if (one.recipe, one.options) == (recipe, options)), None)
        if kept is not None:
            self._kept.remove(kept)
            if read_state(begin).recipe == recipe_fingerprint(planned):
                self._opened.append(kept)
                kept.loader.reshard(tree, step, micro_batch_size=micro_batch_size, state_dict={"torchmix_state": begin})
                return kept.loader
            kept.loader.close()  # the edit is accepted, where no step with it was saved
        loader = build_loader(recipe, topology=tree, micro_batch_size=micro_batch_size, **options)
        self._opened.append(_Opened(loader=loader, recipe=recipe, options=options))
        if state is not None or step:
            with naming_the_flag():
                loader.load_state_dict({"torchmix_state": begin}, accept_edit=accept_edit)
        return loader

    def close(self) -> None:
        """Close all; all ranks do so alike."""
        loaders = [one.loader for one in (*self._kept, *self._opened)]
        self._kept, self._opened = [], []
        for loader in loaders:
            loader.close()


open_loaders = OpenLoaders()


def telling_the_others() -> AbstractContextManager[None]:
    """While loaders are opened: the other ranks of the job, if there are any, learn that this one has failed."""
    is_job = dist.is_initialized() and dist.get_world_size() > 1
    store = dist.distributed_c10d._get_default_store() if is_job else None
    return announcing_failures(store, rank=dist.get_rank() if is_job else 0)


class DataOfRun:
    """What a run in this process has of its data; what is below it says how Megatron or Bridge asks for them."""

    _tree: ClientPlaceTree
    """Set before a loader is opened, as the next one."""
    _options: dict[str, Any]
    """What the run's arguments say of all its loaders, for `build_loader`."""

    def __init__(self, args: Any, recipe: str, opened: OpenLoaders) -> None:
        """A run begins.

        Args:
            args: Megatron's arguments, or what has their names.
            recipe: Its file.
            opened: Where its loaders are kept.
        """
        path = Path(recipe)
        self._args, self._opened = args, opened
        self._recipe, self._folder = load_recipe(path), recipe_directory(path)
        opened.begin(self._recipe)
        self._sizes = args
        """Has `seq_length` in the recipe's sense."""

    def leave(self) -> None:
        """Take no part any more; the loaders stay."""
        atexit.unregister(self._at_exit)

    def close(self) -> None:
        """Close all loaders; all ranks do so alike."""
        self.leave()
        self._opened.close()

    def _close_at_exit(self) -> None:
        """Called after the loaders are open, whose threads register too: last in, first called."""
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is not None:  # an error ended the main thread; liveness tells the others
            return
        try:
            self.close()
        except RankLost as error:  # named on stderr already, and there is nothing left to stop
            logger.warning("%s", error)

    @property
    def _is_packed(self) -> bool:
        return self._recipe.packing.boundaries == "document"

    def _ways_of(self, loader: StatefulDataLoader) -> dict[str, Any]:
        """How microbatches come, as arguments of `SharedMicrobatches`."""
        return {}

    def _open_loader(self, recipe: Recipe, **options: Any) -> StatefulDataLoader:
        """A loader of this rank, with what the arguments say of all of them."""
        if recipe.balance.context is None:
            part, size = options.get("part", "train"), options["micro_batch_size"]
            check_whole_microbatches(recipe.batch, micro_batch_size=size, dp=self._tree.topology.dp, part=part)
        return self._opened.open(recipe, self._tree, directory=self._folder, **self._options, **options)

    def _open_where_it_stands(
        self, loaded: LoadedCheckpoint, counts: Any, say: Callable[[str], None], **options: Any
    ) -> StatefulDataLoader:
        """The loader of training at the step where the run begins.

        Args:
            loaded: The checkpoint that the run goes on from.
            counts: What a checkpoint is made of; has the loader's state from here on.
            say: Prints a line on the first rank.
            options: More for `build_loader`.
        """
        args, part = self._args, part_of(self._recipe, "train")
        start = start_of_run(args, part.batch, loaded, recipe=part)
        agree_on_start(start)
        say(f" > torchmix: the data begin at step {start.step}: {start.reason}")
        loader = self._open_loader(
            self._recipe,
            micro_batch_size=args.micro_batch_size,
            step=start.step,
            state=start.state,
            accept_edit=args.data_accept_edit,
            **options,
        )
        remember(counts, loader.state_dict()["torchmix_state"])  # a checkpoint may be written before the first step
        return loader

    def _share_training(
        self, loader: StatefulDataLoader, counts: Any, on_microbatch: Callable[[Microbatch], None]
    ) -> SharedMicrobatches:
        """The microbatches of training, whose states `counts` gets as steps are consumed; the first one is here."""
        shared = SharedMicrobatches(
            iter(loader),
            part="train",
            packed=self._is_packed,
            **self._ways_of(loader),
            on_microbatch=on_microbatch,
            state_of_step=lambda: loader.state_dict()["torchmix_state"],
            on_step_consumed=lambda state: remember(counts, state),
        )
        if self._args.iteration < (getattr(self._args, "train_iters", None) or sys.maxsize):
            shared.await_first()
        return shared

    def _recipe_of_evaluation(self, num_sets: int = 1) -> Recipe:
        samples, length = validation_samples(self._args), self._sizes.seq_length
        return recipe_of_evaluation(self._recipe, samples=samples, length=length, num_sets=num_sets)

    def _share_evaluation(self, part: str) -> SharedMicrobatches:
        """The microbatches of validation, which go on where Megatron's count stands, or of test."""
        args = self._args
        goes_on = part == "validation" and not args.skip_train
        step = first_step(int(args.consumed_valid_samples), samples=validation_samples(args)) if goes_on else 0
        size = validation_micro_batch_size(args)
        loader = self._open_loader(self._recipe_of_evaluation(), part=part, micro_batch_size=size, step=step)
        check = check_of_validation(args, start_step=step) if part == "validation" else None
        ways = self._ways_of(loader)
        return SharedMicrobatches(iter(loader), part=part, packed=self._is_packed, on_microbatch=check, **ways)
