"""The loaders of a run; those of a run that was aborted in this process go on in the next one.

`--inprocess-restart` calls Megatron's training again, in the same process, once it has destroyed all process groups.
Then the next run opens the same loaders at their places among its ranks, from where it begins: what has been read, and
the worker of the node, stay. A process that was in reserve opens its own beside them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchmix.megatron_adapter.checkpoint import naming_the_flag
from torchmix.parallel.place_tree import ClientPlaceTree, Layout
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.steps.state import encode_state, read_state, start_state


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
