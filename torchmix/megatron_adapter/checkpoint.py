"""The state of the data inside Megatron's checkpoint, and where a run begins."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from torchmix.catalog.in_store import fetch_catalog
from torchmix.catalog.store import open_part
from torchmix.errors import RecipeError, StateError, StateMismatch
from torchmix.parallel.agreement import agree
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import samples_before, step_after_samples
from torchmix.recipe.structs import Batch
from torchmix.steps.edits import state_for
from torchmix.steps.state import LoaderState, decode_state, read_state

# --- The identity of the data, where Megatron's offline distillation looks for it.
#
# Two runs have one hash only where each rank gets the same samples in the same microbatches.
#
# A teacher (`--logits-save-dir`) writes the hash beside its logits, a student (`--logits-load-dir`) compares it with
# its own, so that it does not learn from the logits of other tokens. Megatron takes the blend from `--data-path`; with
# a recipe there is none, and every run has the hash of mock data. Here the blend is the recipe: what decides the
# order, the catalog, what decides to which rank and microbatch a sample goes, and how attention sees it. Megatron's
# hash has `--seed`, `--seq-length` and the number of samples, too.
#
# Megatron can read a teacher's logits at another data-parallel size where microbatches are dealt in turn. torchmix
# deals samples by their cost or their hash, so the sizes are part of the identity.
#
# Cost: opening the catalog, once for each hash, which the ranks of the last stage make.

LOGITS_FLAGS = ("--logits-save-dir", "--logits-load-dir")
BESIDE_ATTENTION = frozenset(
    {"path", "tokenizer", "max_epochs", "on_exhausted", "bad_rows", "max_bad", "id", "properties", "split_by"}
)
"""Words of a source that alter nothing, or that the catalog or the order has already."""


def identify_data(arguments: Sequence[str] | None = None) -> None:
    """Let Megatron's hash of a dataset cover the recipe, where the command line asks for logits of a teacher.

    Args:
        arguments: Stands in for `sys.argv[1:]`.

    Raises:
        RecipeError: This version of Megatron makes the hash in another way.
    """
    given = sys.argv[1:] if arguments is None else arguments
    flags = [flag for flag in LOGITS_FLAGS if any(each.partition("=")[0] == flag for each in given)]
    if not flags:
        return
    from megatron.training.distillation import utils_logits

    if not (hasattr(utils_logits, "_blend_identifiers") and hasattr(utils_logits, "compute_dataset_hash")):
        raise RecipeError(
            f"{' and '.join(flags)}: this version of Megatron makes its hash of a dataset in a way that torchmix does "
            f"not know, so logits of other data would not be noticed; leave the flag out"
        )
    utils_logits._blend_identifiers = blend_of_recipe


def blend_of_recipe(args: Any) -> dict[str, Any]:
    """What Megatron hashes in the place of the blend.

    Args:
        args: Megatron's arguments.

    Returns:
        Texts and numbers by name, for JSON.

    Raises:
        CatalogError: The recipe is not indexed.
    """
    path = Path(args.data_recipe)
    recipe = load_recipe(path)
    part = part_of(recipe, "train")
    catalog = open_part(fetch_catalog(recipe_directory(path), recipe.catalog), part)
    return {
        "kind": "torchmix",
        "recipe": recipe_fingerprint(part),
        "catalog": catalog.fingerprint,
        "attention": _digest(_attention(part)),
        "placement": {
            "balance": _digest(msgspec.to_builtins(part.balance)),
            "data_parallel_size": args.data_parallel_size,
            "context_parallel_size": args.context_parallel_size,
            "micro_batch_size": args.micro_batch_size,
        },
    }


def _attention(part: Part) -> Any:
    """What decides over which tokens attention goes, where positions begin again, and which tokens have a loss.

    Of a source, all words but those that `BESIDE_ATTENTION` names: a word that a recipe learns later counts.
    """
    sources = {
        name: {key: value for key, value in msgspec.to_builtins(source).items() if key not in BESIDE_ATTENTION}
        for name, source in part.sources.items()
    }
    return [msgspec.to_builtins(part.packing), sources]


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


# --- The state of the data inside Megatron's checkpoint, and where a run begins.
#
# Megatron stores its arguments in every checkpoint, whatever the format: in what is common to all ranks
# (`torch_dist`), or in each rank's file (`torch`). So the state of the data, which is small and equal on all ranks,
# travels there as `args.torchmix_state`: text (base64), since every format of Megatron loads text, also
# `weights_only`. It is written when the last microbatch of a step is consumed; the state before that step stays beside
# it, because Megatron's rerun state machine saves a step that it suspects of a fault *unfinished*, to compute it again
# in another job. The state that agrees with Megatron's consumed samples is the one that counts.
#
# What is continued from agrees with Megatron's own count of consumed samples; a checkpoint without a state is an error
# that says what to do, never a silent fresh start.
#
# Megatron hands a loaded checkpoint's arguments to `check_checkpoint_args` in each of its formats and ways to load.
# `watch_checkpoints` looks over its shoulder there: nothing is read a second time, and the state is that of the very
# checkpoint that was loaded. With `--finetune`, or a `--load` folder that holds none, nothing is handed over.
#
# Cost: base64 of some KB a step.

ATTRIBUTE = "torchmix_state"
"""Name among Megatron's arguments: the state after the last step."""
ATTRIBUTE_BEFORE = "torchmix_state_before"
"""The state before that step."""
FRESH_FLAG = "--data-start-fresh"


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """Where the data of this run begin."""

    step: int
    """The first step to be consumed."""
    state: bytes | None
    """State of a loader to continue from; None to plan the steps before `step`, if any."""
    reason: str
    """For the log."""


class LoadedCheckpoint:
    """What `watch_checkpoints` has seen: nothing, or the arguments of the checkpoint that Megatron has loaded."""

    def __init__(self) -> None:
        self.was_loaded = False
        self.states: list[str] = []
        """After its last step, and before it."""

    def note(self, checkpoint_args: Any) -> None:
        """Keep the state of a checkpoint's arguments; the last one loaded counts."""
        self.was_loaded = True
        states = [getattr(checkpoint_args, name, None) for name in (ATTRIBUTE, ATTRIBUTE_BEFORE)]
        self.states = [state for state in states if state is not None]


def carry(args: Any, checkpoint_args: Any) -> None:
    """Give the state of a loaded checkpoint to what is saved before there are data: `--ckpt-convert-format` does so."""
    for name in (ATTRIBUTE, ATTRIBUTE_BEFORE):
        setattr(args, name, getattr(checkpoint_args, name, None))


def watch_checkpoints(checkpointing: Any) -> LoadedCheckpoint:
    """Learn what Megatron loads from now on.

    Args:
        checkpointing: The module `megatron.training.checkpointing`. Watching it twice is watching it once.

    Raises:
        StateError: This Megatron has no `check_checkpoint_args`.
    """
    original = getattr(checkpointing, "check_checkpoint_args", None)
    if original is None:
        raise StateError(
            "this Megatron has no megatron.training.checkpointing.check_checkpoint_args, through which torchmix sees "
            "the arguments of a loaded checkpoint; it was built for core 0.16 to 0.20"
        )
    watched: LoadedCheckpoint | None = getattr(original, "torchmix_loaded", None)
    if watched is not None:
        return watched
    loaded = LoadedCheckpoint()

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *rest: Any, **named: Any) -> Any:
        loaded.note(checkpoint_args)
        carry(checkpointing.get_args(), checkpoint_args)
        return original(checkpoint_args, *rest, **named)

    check_checkpoint_args.torchmix_loaded = loaded  # type: ignore[attr-defined]
    checkpointing.check_checkpoint_args = check_checkpoint_args
    return loaded


def remember(args: Any, state: bytes) -> None:
    """Let Megatron's next checkpoint hold this state, and the one that was the last.

    Args:
        args: Megatron's arguments.
        state: From `loader.state_dict()`, equal on all ranks.
    """
    setattr(args, ATTRIBUTE_BEFORE, getattr(args, ATTRIBUTE, None))
    setattr(args, ATTRIBUTE, base64.b64encode(state).decode("ascii"))


def start_of_run(args: Any, batch: Batch, loaded: LoadedCheckpoint, *, recipe: str | Part) -> RunStart:
    """Decide where the data begin.

    Args:
        args: Megatron's arguments, after it has loaded its checkpoint.
        batch: The batch of the recipe.
        loaded: What it has loaded.
        recipe: The recipe's fingerprint.

    Raises:
        StateError: The checkpoint has no state, or one that does not agree with Megatron's counts.
    """
    consumed = int(args.consumed_train_samples)
    if args.data_start_fresh:
        return _planned(batch, consumed, f"{FRESH_FLAG} was given")
    if getattr(args, "override_ckpt_iteration", None) is not None:
        return _planned(batch, consumed, "--override-ckpt-iteration was given")
    if not loaded.was_loaded:
        if consumed:
            raise StateError(
                f"Megatron begins after {consumed} samples, but no checkpoint with arguments was loaded; give "
                f"{FRESH_FLAG} to let the data begin there, too"
            )
        reason = "no checkpoint was loaded" if getattr(args, "load", None) else "a new run"
        return RunStart(step=0, state=None, reason=reason)
    if not loaded.states:
        if not consumed:
            return RunStart(step=0, state=None, reason="the checkpoint has trained on nothing yet")
        raise StateError(
            f"the checkpoint of {consumed} samples was not trained with torchmix: it has no state of the data. To go "
            f"on with it on purpose, give {FRESH_FLAG} once: the data then begin at the step after as many samples of "
            f"the recipe, whatever the run has read before. For new weights from an old checkpoint, use --finetune"
        )
    found = []
    for text in loaded.states:
        data = _bytes_of(text)
        state = _decoded(data, recipe, getattr(args, "data_accept_edit", None))
        samples = samples_before(batch, state.step)
        if samples == consumed and state.microbatch == 0:
            return RunStart(step=state.step, state=data, reason="continuing from the checkpoint")
        found.append(f"step {state.step} (after {samples} samples)")
    raise StateMismatch(
        f"the checkpoint's data are before {' or '.join(found)}, Megatron's consumed_train_samples is {consumed}. "
        f"Weights and data of this checkpoint do not belong together; use another checkpoint, or {FRESH_FLAG} to "
        f"follow Megatron's count"
    )


def agree_on_start(start: RunStart) -> None:
    """All ranks begin at the same place, from the same state. A collective.

    Raises:
        RecipeError: This rank begins elsewhere than rank 0.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    digest = "none" if start.state is None else hashlib.sha256(start.state).hexdigest()[:16]
    store = dist.distributed_c10d._get_default_store()
    facts = {"first step": str(start.step), "digest of the checkpoint's data state": digest}
    agree(store, rank=dist.get_rank(), world_size=dist.get_world_size(), facts=facts)


_CALL_TO_ACCEPT = re.compile(r"call load_state_dict\(state, accept_edit='(\w+)'\), or give .*? loads the state")
"""What an error says to whoever loads states; with Megatron that is this adapter."""


@contextmanager
def naming_the_flag() -> Iterator[None]:
    """An edit that is refused inside is accepted by Megatron's flag."""
    try:
        yield
    except StateMismatch as error:
        raise StateMismatch(_CALL_TO_ACCEPT.sub(r"give --data-accept-edit \1", str(error))) from error


def _decoded(data: bytes, recipe: str | Part, accept_edit: str | None) -> LoaderState:
    try:
        with naming_the_flag():
            if isinstance(recipe, Part):
                return state_for(read_state(data), recipe, accept_edit=accept_edit)
            return decode_state(data, recipe=recipe)
    except StateMismatch as error:
        raise StateMismatch(
            f"{error}. {FRESH_FLAG} continues with this recipe, at the step of Megatron's count"
        ) from error


def _planned(batch: Batch, consumed: int, reason: str) -> RunStart:
    try:
        step = step_after_samples(batch, consumed)
    except RecipeError as error:
        raise StateError(f"{reason}, but {error.message}") from error
    return RunStart(step=step, state=None, reason=reason)


def _bytes_of(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise StateError(f"the checkpoint's {ATTRIBUTE} is no base64 text: {error}; use another checkpoint") from error
