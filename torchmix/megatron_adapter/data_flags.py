"""What becomes of each flag of Megatron that concerns data, when a recipe is given.

In: nothing. Out: `DATA_FLAGS`, from which the table of `docs/megatron_flags.md` is made; and which flags on a command
line have no effect, which the log names at the start. Must hold: every flag about data of every version that torchmix
runs with is here once (a test compares with Megatron's own parsers), and the table says what `refusals.py` and
`batch_sizes.py` do with it.

    refused     an error at the start where the flag is given, or has a value that cannot work
    compared    an error at the start where it differs from the recipe
    followed    it means with a recipe what it means to Megatron
    model       it is about the model or the vocabulary; its part in Megatron's own data has no effect
    no effect   it steers Megatron's data builder, which does not run; the log names it at the start

Cost: none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import msgspec

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
