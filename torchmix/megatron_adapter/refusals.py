"""Flags of Megatron that contradict torchmix, or that it does not serve: each is refused by name, with the reason.

In: Megatron's arguments and the recipe. Out: nothing, or one error that lists all of them. Must hold: what is refused
depends on arguments and recipe alone, so every rank refuses alike, before anything is read or any group is made; a flag
that some version of Megatron does not have is not given. Cost: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.source.resets import masks_resets, resets_attention, resets_positions, sources_with_resets
from torchmix.recipe.structs import Recipe


class _Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A flag that is refused whenever it is given."""

    flag: str
    reason: str
    is_given: Callable[[Any], bool] | None = None
    """Whether arguments have it; None: whether the attribute named like the flag is true."""

    def applies(self, args: Any) -> bool:
        if self.is_given is not None:
            return self.is_given(args)
        return bool(getattr(args, self.flag.lstrip("-").replace("-", "_"), None))


_DATA = "the recipe says what is read; leave the flag out (torchmix init --from-megatron writes a recipe from a blend)"
_BATCHES = "it takes batches apart that torchmix has planned as a whole; balance in the recipe does this work"

_REFUSALS = (
    *(
        _Refusal(flag=flag, reason=_DATA)
        for flag in (
            "--data-path",
            "--data-args-path",
            "--train-data-path",
            "--valid-data-path",
            "--test-data-path",
            "--per-split-data-args-path",
            "--per-dataset-sequences-path",
            "--mock-data",
        )
    ),
    _Refusal(
        flag="--dataloader-type",
        reason="torchmix is an external loader; leave the flag out",
        is_given=lambda args: args.dataloader_type != "external",
    ),
    _Refusal(
        flag="--yaml-cfg",
        reason="Megatron then forgets flags of the command line; give its arguments as flags",
        is_given=lambda args: getattr(args, "yaml_cfg", None) is not None,
    ),
    _Refusal(flag="--sft", reason="torchmix has no chat templates; a recipe packs documents by itself"),
    _Refusal(flag="--fim-data", reason="torchmix does not rewrite documents for fill-in-the-middle"),
    _Refusal(
        flag="--use-varlen-dataset",
        reason="it reads data by itself; a recipe packs documents of any length",
    ),
    _Refusal(flag="--perform-rl-step", reason="reinforcement learning makes its own batches"),
    _Refusal(flag="--hybrid-context-parallel", reason=_BATCHES),
    _Refusal(flag="--dynamic-context-parallel", reason=_BATCHES),
    _Refusal(flag="--sequence-packing-scheduler", reason=_BATCHES),
    *(
        _Refusal(
            flag=flag,
            reason="it pads packed samples in Megatron's own get_batch; those of a recipe have a fixed length, and "
            "packing.align_tokens pads their documents",
        )
        for flag in ("--pad-packed-seq-alignment", "--thd-max-packed-sequences")
    ),
    _Refusal(
        flag="--cp-partition-mode",
        reason="torchmix cuts zigzag slices; leave the flag out",
        is_given=lambda args: getattr(args, "cp_partition_mode", "zigzag") != "zigzag",
    ),
    _Refusal(flag="--phase-transition-iterations", reason="its phases count samples from 0 again, the data do not"),
    _Refusal(
        flag="--dataloader-inter-document-masking",
        reason="packing.boundaries: document in the recipe does this, and lets context parallelism cut each document",
    ),
    _Refusal(
        flag="--dataloader-save",
        reason="the state of the data travels in Megatron's own checkpoint, once for all ranks",
    ),
    _Refusal(
        flag="--inprocess-restart", reason="the exchange between ranks does not outlive Megatron's process groups"
    ),
    _Refusal(
        flag="--cuda-graph-impl local with a full-iteration graph",
        reason="the graph would copy batches by itself, outside of get_batch",
        is_given=lambda args: _has_iteration_graph(args),
    ),
)


def check_refusals(args: Any, recipe: Recipe, *, cp: int, pp: int) -> None:
    """Refuse what cannot work.

    Args:
        args: Megatron's arguments.
        recipe: The checked recipe.
        cp: Context-parallel ranks.
        pp: Pipeline stages.

    Raises:
        RecipeError: At least one flag is refused; names each.
    """
    faults = [f"{refusal.flag}: {refusal.reason}" for refusal in _REFUSALS if refusal.applies(args)]
    faults += _contradictions(args, recipe, cp=cp, pp=pp)
    if faults:
        raise RecipeError("with --data-recipe, Megatron cannot have\n  " + "\n  ".join(faults))


def _contradictions(args: Any, recipe: Recipe, *, cp: int, pp: int) -> Iterator[str]:
    """What depends on the recipe."""
    packing = recipe.packing
    if getattr(args, "reset_position_ids", False) and not resets_positions(packing):
        yield (
            "--reset-position-ids: in the recipe positions count through a sample; write packing.positions: document, "
            "which does not stop attention"
        )
    if getattr(args, "eod_mask_loss", False) and sources_with_resets(recipe.sources) and not masks_resets(packing):
        yield "--eod-mask-loss: the recipe says packing.reset_loss: keep; write mask"
    if not resets_attention(packing):
        if getattr(args, "reset_attention_mask", False):
            yield "--reset-attention-mask: the recipe says packing.boundaries: none; write boundaries: document"
    else:
        if args.micro_batch_size > 1 and pp > 1:
            yield (
                f"--micro-batch-size {args.micro_batch_size} with {pp} pipeline stages: packed samples travel as one "
                f"row, Megatron's stages agree on another shape; set --micro-batch-size 1, and a longer batch.length"
            )
        if packing.method == "concat" and cp > 1:
            yield (
                f"--context-parallel-size {cp}: attention cuts each document, packing.method: concat cuts each sample; "
                f"write method: best_fit with align_tokens, or boundaries: none"
            )
        if getattr(args, "overlap_moe_expert_parallel_comm", False):
            yield (
                "--overlap-moe-expert-parallel-comm: its schedule does not pass on where documents end; write "
                "packing.boundaries: none"
            )
    if recipe.per_token_loss == "require" and not getattr(args, "calculate_per_token_loss", False):
        yield (
            "a loss averaged by microbatch: they differ in tokens, and the recipe says per_token_loss: require; "
            "give --calculate-per-token-loss"
        )
    yield from _faults_of_validation_sets(args, recipe)
    if _evaluates(args) and not has_part(recipe, "validation"):
        yield (
            f"--eval-iters {getattr(args, 'eval_iters', 0)}"
            f"{' with --full-validation' if getattr(args, 'full_validation', False) else ''}: the recipe has no "
            f"validation; give it `split` or `validation`, or Megatron --eval-iters 0"
        )


def _faults_of_validation_sets(args: Any, recipe: Recipe) -> Iterator[str]:
    """Each source of validation is a set of its own; Megatron has no count for sets that go on, so all are whole."""
    if not getattr(args, "multiple_validation_sets", False):
        return
    if not getattr(args, "full_validation", False):
        yield "--multiple-validation-sets: Megatron has it only with --full-validation; give that too"
    if getattr(args, "virtual_pipeline_model_parallel_size", None) is not None:
        yield "--multiple-validation-sets with virtual pipeline stages: Megatron takes its model chunks for sets"
    names, given = names_of_validation_sets(recipe), getattr(args, "validation_set_names", None)
    if given and names and list(given) != names:
        yield (
            f"--validation-set-names {' '.join(given)}: the sets are the sources of the recipe's validation, in this "
            f"order: --validation-set-names {' '.join(names)}"
        )


def names_of_validation_sets(recipe: Recipe) -> list[str]:
    """The sources of validation, by name; each is a set where Megatron has several. None without validation."""
    return sorted(part_of(recipe, "validation").sources) if has_part(recipe, "validation") else []


def _evaluates(args: Any) -> bool:
    return bool(getattr(args, "full_validation", False) or (args.eval_iters or 0) > 0)


def _has_iteration_graph(args: Any) -> bool:
    """Whether Megatron captures whole iterations; its versions say so in three ways."""
    if getattr(args, "cuda_graph_impl", None) == "full_iteration":
        return True
    scopes = getattr(args, "cuda_graph_scope", None) or ()
    names = [scopes] if isinstance(scopes, str) else [getattr(scope, "name", scope) for scope in scopes]
    return "full_iteration" in names
