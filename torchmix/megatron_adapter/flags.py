"""What becomes of each flag of Megatron that concerns data, and which are refused, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.sources import (
    masks_resets,
    resets_attention,
    resets_positions,
    sources_with_resets,
)
from torchmix.recipe.structs import Recipe

# --- What becomes of each flag of Megatron that concerns data, when a recipe is given.
#
# Every flag about data of every version that torchmix runs with is here once (a test compares with Megatron's own
# parsers), and the table says what `flags.py` and `batch_sizes.py` do with it.
#
#     refused     an error at the start where the flag is given, or has a value that cannot work
#     compared    an error at the start where it differs from the recipe
#     followed    it means with a recipe what it means to Megatron
#     model       it is about the model or the vocabulary; its part in Megatron's own data has no effect
#     no effect   it steers Megatron's data builder, which does not run; the log names it at the start

Fate = Literal["refused", "compared", "followed", "model", "no effect"]


class FlagGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Flags that share their fate."""

    flags: str
    """With spaces between."""
    fate: Fate
    note: str
    """Why, or what stands in for it; Markdown."""


DATA_FLAGS = (
    FlagGroup(
        flags="--data-path --data-args-path --train-data-path --valid-data-path --test-data-path "
        "--per-split-data-args-path --per-dataset-sequences-path --mock-data",
        fate="refused",
        note="the recipe says what is read",
    ),
    FlagGroup(flags="--dataloader-type", fate="refused", note="unless `external`, which a recipe makes the default"),
    FlagGroup(
        flags="--dataloader-inter-document-masking", fate="refused", note="`boundaries: document` of the recipe does it"
    ),
    FlagGroup(
        flags="--sft --fim-data --use-varlen-dataset --perform-rl-step",
        fate="refused",
        note="it makes or rewrites samples",
    ),
    FlagGroup(
        flags="--hybrid-context-parallel --dynamic-context-parallel --sequence-packing-scheduler",
        fate="refused",
        note="it takes planned batches apart",
    ),
    FlagGroup(
        flags="--pad-packed-seq-alignment --thd-max-packed-sequences",
        fate="refused",
        note="batches have a fixed length, and `packing.align_tokens` pads documents",
    ),
    FlagGroup(
        flags="--cp-partition-mode", fate="refused", note="unless it is `zigzag`, the default, as slices are cut"
    ),
    FlagGroup(
        flags="--tensor-parallel-num-weight-shards",
        fate="refused",
        note="where it makes an axis of ranks that torchmix does not know",
    ),
    FlagGroup(flags="--phase-transition-iterations", fate="refused", note="its phases count samples from 0 again"),
    FlagGroup(flags="--decrease-batch-size-if-needed", fate="refused", note="it trains on fewer samples than planned"),
    FlagGroup(
        flags="--inprocess-restart", fate="refused", note="the exchange between ranks ends with Megatron's groups"
    ),
    FlagGroup(
        flags="--cuda-graph-impl --cuda-graph-scope",
        fate="refused",
        note="where whole iterations are captured: batches would be copied outside of `get_batch`",
    ),
    FlagGroup(
        flags="--overlap-moe-expert-parallel-comm",
        fate="refused",
        note="with `boundaries: document`, which its schedule does not pass on",
    ),
    FlagGroup(flags="--batch-size", fate="refused", note="by Megatron itself"),
    FlagGroup(flags="--yaml-cfg", fate="refused", note="Megatron then forgets the command line"),
    FlagGroup(flags="--seq-length --encoder-seq-length --decoder-seq-length", fate="compared", note="`batch.length`"),
    FlagGroup(
        flags="--global-batch-size --rampup-batch-size --step-batch-size-schedule",
        fate="compared",
        note="`batch.samples`, at every step",
    ),
    FlagGroup(
        flags="--micro-batch-size",
        fate="compared",
        note="times data-parallel ranks it divides `batch.samples`",
    ),
    FlagGroup(
        flags="--context-parallel-size",
        fate="compared",
        note="`batch.length` and `packing.align_tokens` are multiples of its double",
    ),
    FlagGroup(
        flags="--reset-position-ids",
        fate="compared",
        note="`packing.positions`, see [Resets](megatron.md#resets)",
    ),
    FlagGroup(
        flags="--reset-attention-mask",
        fate="compared",
        note="`packing.boundaries`, see [Resets](megatron.md#resets)",
    ),
    FlagGroup(
        flags="--eod-mask-loss",
        fate="compared",
        note="`packing.reset_loss`, see [Resets](megatron.md#resets)",
    ),
    FlagGroup(
        flags="--calculate-per-token-loss",
        fate="compared",
        note="`per_token_loss`, see [Loss weights](megatron.md#loss-weights)",
    ),
    FlagGroup(
        flags="--train-iters --train-samples --exit-interval",
        fate="followed",
        note="they end a run, and alter no order",
    ),
    FlagGroup(
        flags="--load --finetune --pretrained-checkpoint --ckpt-step --override-ckpt-iteration",
        fate="followed",
        note="they say where the data begin, see [Checkpoints](megatron.md#checkpoints)",
    ),
    FlagGroup(flags="--iterations-to-skip", fate="followed", note="whole steps are passed over"),
    FlagGroup(
        flags="--eval-iters --eval-interval --start-eval-at-iter --skip-train",
        fate="followed",
        note="see [Validation and test](megatron.md#validation-and-test)",
    ),
    FlagGroup(
        flags="--eval-global-batch-size --eval-micro-batch-size",
        fate="followed",
        note="the batch of validation and test",
    ),
    FlagGroup(
        flags="--full-validation --multiple-validation-sets --validation-set-names",
        fate="followed",
        note="see [Validation and test](megatron.md#validation-and-test); the first two only together",
    ),
    FlagGroup(
        flags="--no-create-attention-mask-in-dataloader",
        fate="followed",
        note="a recipe makes it the default: there is no dense mask",
    ),
    FlagGroup(
        flags="--logits-save-dir --logits-load-dir",
        fate="followed",
        note="Megatron's hash of the data covers the recipe, see [Distillation](megatron.md#distillation)",
    ),
    FlagGroup(
        flags="--use-tp-pp-dp-mapping --exit-signal --exit-signal-handler",
        fate="followed",
        note="the order of ranks; what torchmix's processes ignore",
    ),
    FlagGroup(
        flags="--seed",
        fate="model",
        note="weights and dropout; the order of the data comes from the recipe's `seed`",
    ),
    FlagGroup(
        flags="--vocab-size --padded-vocab-size --make-vocab-size-divisible-by --no-pad-vocab-size "
        "--disable-pad-vocab-size --vocab-file --merge-file --vocab-extra-ids --tokenizer-type --tokenizer-model "
        "--tokenizer-metadata --tokenizer-special-tokens --legacy-tokenizer --tiktoken-pattern "
        "--tiktoken-num-special-tokens --tiktoken-special-tokens --tokenizer-sentencepiece-legacy "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-use-fast "
        "--tokenizer-hf-no-use-fast --tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens "
        "--trust-remote-code --null-tokenizer-eod-id --null-tokenizer-pad-id --chat-template --use-gigatoken "
        "--no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args "
        "--no-save-tokenizer-assets --disable-save-tokenizer-assets",
        fate="model",
        note="the size of the vocabulary; documents are tokenised as the recipe says",
    ),
    FlagGroup(flags="--split", fate="no effect", note="`split` of the recipe"),
    FlagGroup(
        flags="--num-workers --exit-signal-handler-for-dataloader",
        fate="no effect",
        note="`--data-loaders` and `--data-look-ahead`",
    ),
    FlagGroup(
        flags="--data-cache-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--num-dataset-builder-threads --mid-level-dataset-surplus",
        fate="no effect",
        note="no index of samples is built; the catalog is at `catalog` of the recipe",
    ),
    FlagGroup(
        flags="--no-mmap-bin-files",
        fate="no effect",
        note="torchmix's own reader reads `.bin` files",
    ),
    FlagGroup(
        flags="--object-storage-cache-path --enable-msc --disable-msc",
        fate="no effect",
        note="torchmix's own reader reads object stores, by the catalog",
    ),
    FlagGroup(
        flags="--allow-ambiguous-pad-tokens",
        fate="no effect",
        note="padding is known by its place, never by its id, so a padding id inside a document keeps its loss",
    ),
    FlagGroup(
        flags="--fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix --fim-prefix-token "
        "--fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token",
        fate="no effect",
        note="nor without a recipe, unless `--fim-data` is given, which is refused",
    ),
    FlagGroup(
        flags="--sft-tokenizer-prompt-format --sft-mock-dataset-config-json --varlen-sbhd-validation "
        "--varlen-mock-dataset-config-json",
        fate="no effect",
        note="nor without a recipe, unless `--sft` or `--use-varlen-dataset` is given, which are refused",
    ),
    FlagGroup(
        flags="--max-seqlen-per-dp-cp-rank --min-dynamic-context-parallel-size --thd-tail-padding-policy "
        "--cuda-graph-dynamic-microbatches",
        fate="no effect",
        note="it goes with flags that are refused",
    ),
    FlagGroup(
        flags="--sample-rate --no-data-sharding --mask-prob --short-seq-prob --classes-fraction "
        "--data-per-class-fraction --mask-type --mask-factor --iter-per-epoch --titles-data-path --query-in-block-prob "
        "--use-one-sent-docs --evidence-data-path --block-data-path --embedding-path --indexer-batch-size",
        fate="no effect",
        note="nor without a recipe: it is for scripts of other models, or for none",
    ),
)


def fate_of_flag() -> dict[str, FlagGroup]:
    """By flag, what becomes of it.

    Raises:
        ValueError: A flag stands twice.
    """
    groups: dict[str, FlagGroup] = {}
    for group in DATA_FLAGS:
        for flag in group.flags.split():
            if flag in groups:
                raise ValueError(f"{flag} stands twice")
            groups[flag] = group
    return groups


def without_effect(arguments: Sequence[str] | None = None) -> list[str]:
    """The flags of a command line that have no effect, in its order.

    Megatron's parser takes no abbreviations, so a flag is on the command line as it is called.

    Args:
        arguments: Stands in for `sys.argv[1:]`.
    """
    given = sys.argv[1:] if arguments is None else arguments
    fates = fate_of_flag()
    flags = dict.fromkeys(argument.partition("=")[0] for argument in given)
    return [flag for flag in flags if flag in fates and fates[flag].fate == "no effect"]


# --- Flags of Megatron that contradict torchmix, or that it does not serve: each is refused by name, with the reason.
#
# What is refused depends on arguments and recipe alone, so every rank refuses alike, before anything is read or any
# group is made; a flag that some version of Megatron does not have is not given.


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
    """Each source of validation is a set of its own; Megatron has no count for sets that continue, so all are whole."""
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
