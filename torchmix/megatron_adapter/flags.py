"""What becomes of each flag of Megatron that concerns data, and which are refused, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from torchmix.errors import RecipeError
from torchmix.megatron_adapter.runs import conflicts_of_runs, way_of
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
# parsers). A row has all of it: the line of docs/megatron_flags.md, the error where the flag is given or contradicts
# the recipe, and how `torchmix init --from-megatron` takes it. Sizes of batches are compared by `batch_sizes.py`,
# which asks Megatron's own calculator.
#
#     refused     an error at the start where the flag is given, or has a value that cannot work
#     compared    an error at the start where it differs from the recipe
#     followed    it means with a recipe what it means to Megatron
#     model       it is about the model or the vocabulary; its part in Megatron's own data has no effect
#     no effect   it steers Megatron's data builder, which does not run; the log names it at the start

Fate = Literal["refused", "compared", "followed", "model", "no effect"]


class FlagGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Flags that share their fate."""

    flags: str
    """With spaces between."""
    fate: Fate
    note: str
    """Why, or what stands in for it; Markdown."""
    error: str = ""
    """What is told where one of them is given, behind its name; empty: given alone they are no error here."""
    is_given: Callable[[Any], bool] | None = None
    """Whether Megatron's arguments have the flag; None: whether the attribute named like it is true."""
    title: str = ""
    """What the error calls the flag; empty: by its name."""
    conflicts: Callable[[MegatronJob], Iterator[str]] | None = None
    """What of the recipe contradicts these flags: a whole message for each."""
    in_init: Mapping[str, Any] | None = None
    """How `torchmix init --from-megatron` declares them, as keywords of argparse; None: not by their own names."""


class MegatronJob(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What decides whether flags and recipe agree. Every rank has the same."""

    args: Any
    """Megatron's arguments; a version may lack some."""
    recipe: Recipe
    cp: int
    """Context-parallel ranks."""
    pp: int
    """Pipeline stages."""

    def has(self, name: str) -> bool:
        """Whether an argument is given, and true."""
        return bool(getattr(self.args, name, None))


# --- What contradicts a recipe: each function is named in a row of the table.
#
# What is refused depends on arguments and recipe alone, so every rank refuses alike, before anything is read or any
# group is made; a flag that some version of Megatron does not have is not given.


def _positions(job: MegatronJob) -> Iterator[str]:
    if job.has("reset_position_ids") and not resets_positions(job.recipe.packing):
        yield (
            "--reset-position-ids: in the recipe positions count through a sample; write packing.positions: document, "
            "which does not stop attention"
        )


def _label_of_ends(job: MegatronJob) -> Iterator[str]:
    masks = masks_resets(job.recipe.packing)
    if job.has("eod_mask_loss") and sources_with_resets(job.recipe.sources) and not masks:
        yield "--eod-mask-loss: the recipe says packing.reset_loss: keep; write mask"


def _attention(job: MegatronJob) -> Iterator[str]:
    if job.has("reset_attention_mask") and not resets_attention(job.recipe.packing):
        yield "--reset-attention-mask: the recipe says packing.boundaries: none; write boundaries: document"


def _chats(job: MegatronJob) -> Iterator[str]:
    if job.has("sft") and not resets_attention(job.recipe.packing):
        yield "--sft: Megatron's chats do not see each other; write packing.boundaries: document, or leave the flag out"


def _cut_documents(job: MegatronJob) -> Iterator[str]:
    packing = job.recipe.packing
    if resets_attention(packing) and packing.method == "concat" and job.cp > 1:
        yield (
            f"--context-parallel-size {job.cp}: attention cuts each document, packing.method: concat cuts each sample; "
            f"write method: best_fit with align_tokens, or boundaries: none"
        )


def _schedule_without_ends(job: MegatronJob) -> Iterator[str]:
    if resets_attention(job.recipe.packing) and job.has("overlap_moe_expert_parallel_comm"):
        yield (
            "--overlap-moe-expert-parallel-comm: its schedule does not pass on where documents end; write "
            "packing.boundaries: none"
        )


def _loss_by_token(job: MegatronJob) -> Iterator[str]:
    if job.recipe.per_token_loss == "require" and not job.has("calculate_per_token_loss"):
        yield (
            "a loss averaged by microbatch: they differ in tokens, and the recipe says per_token_loss: require; "
            "give --calculate-per-token-loss"
        )


def _lengths(job: MegatronJob) -> Iterator[str]:
    if not job.has("use_varlen_dataset"):
        return
    if job.recipe.balance.context is None:
        yield (
            "--use-varlen-dataset: the recipe plans samples of one length; write packing.method: whole and "
            "balance.context, or leave the flag out, since best_fit packs documents of any length"
        )
    if job.has("varlen_sbhd_validation"):
        yield "--varlen-sbhd-validation: it pads each sample to one length; leave the flag out"


def _fim(job: MegatronJob) -> Iterator[str]:
    if not job.has("fim_data"):
        return
    args = job.args
    asked = {"rate": getattr(args, "fim_rate", None), "spm": getattr(args, "fim_spm_rate", None)}
    split, of_files = getattr(args, "fim_split_sample", None), getattr(args, "fim_fragment_rate", None)
    names = [getattr(args, f"fim_{part}_token", None) for part in ("prefix", "middle", "suffix")]
    files = "" if split is None else f", split: the id of {split}, fragment_rate: {of_files}"
    wanted = f"{{rate: {asked['rate']}, spm: {asked['spm']}, ids: [those of {', '.join(map(str, names))}]{files}}}"
    for name, source in sorted(job.recipe.sources.items()):
        fim = source.fim
        if fim is None:
            yield (
                f"--fim-data: sources.{name} has no fim, and Megatron would cut all data; write fim: {wanted}, or "
                "leave the flag out, since the recipe says which sources are cut"
            )
            continue
        for key, value in asked.items():
            if getattr(fim, key) != value:
                flag = "--fim-rate" if key == "rate" else "--fim-spm-rate"
                yield f"{flag} {value}: the recipe says sources.{name}.fim.{key}: {getattr(fim, key)}"
        if (split is None) != (fim.split is None):
            yield f"--fim-split-sample {split}: the recipe says sources.{name}.fim.split: {fim.split}"
        elif split is not None and fim.fragment_rate != of_files:
            found = f"sources.{name}.fim.fragment_rate: {fim.fragment_rate}"
            yield f"--fim-fragment-rate {of_files}: the recipe says {found}"
        for part, token, given in zip(("prefix", "middle", "suffix"), names, fim.ids, strict=True):
            if isinstance(given, str) and given != token:
                yield f"--fim-{part}-token {token}: the recipe says {given} in sources.{name}.fim.ids"


def _served_by_trainer(job: MegatronJob) -> Iterator[str]:
    axis = job.recipe.balance.broadcast_at
    tp = getattr(job.args, "tensor_model_parallel_size", 1)
    if axis is not None and {"TP": tp, "CP": job.cp, "PP": job.pp}[axis] > 1:
        yield f"balance.broadcast_at: {axis}: torchmix's get_batch sends nothing, and serves each rank; remove the key"


def _runs(job: MegatronJob) -> Iterator[str]:
    yield from conflicts_of_runs(job.args, job.recipe, cp=job.cp, pp=job.pp)


def _no_validation(job: MegatronJob) -> Iterator[str]:
    if _evaluates(job.args) and not has_part(job.recipe, "validation"):
        yield (
            f"--eval-iters {getattr(job.args, 'eval_iters', 0)}"
            f"{' with --full-validation' if job.has('full_validation') else ''}: the recipe has no "
            f"validation; give it `split` or `validation`, or Megatron --eval-iters 0"
        )


def _validation_sets(job: MegatronJob) -> Iterator[str]:
    """Each source of validation is a set of its own; Megatron has no count for sets that continue, so all are whole."""
    args, recipe = job.args, job.recipe
    if not job.has("multiple_validation_sets"):
        return
    if not job.has("full_validation"):
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


# --- The table.

_READ = "the recipe says what is read"
_DATA = f"{_READ}; leave the flag out (torchmix init --from-megatron writes a recipe from a blend)"
_SAMPLES = "it makes or rewrites samples"
_GRAPH = "where whole iterations are captured: batches would be copied outside of `get_batch`"
_SIZES = "`batch.samples`, at every step"
_SWITCH = {"action": "store_true"}
_FIM = "`fim` of each source with `--fim-data`, see [Fill in the middle](megatron.md#fill-in-the-middle)"

DATA_FLAGS: tuple[FlagGroup, ...] = (
    FlagGroup(flags="--data-path --data-args-path", fate="refused", note=_READ, error=_DATA),
    FlagGroup(
        flags="--train-data-path --valid-data-path --test-data-path",
        fate="refused",
        note=_READ,
        error=_DATA,
        in_init={"nargs": "+", "metavar": "WORD"},
    ),
    FlagGroup(
        flags="--per-split-data-args-path",
        fate="refused",
        note=_READ,
        error=_DATA,
        in_init={"type": Path, "metavar": "FILE", "help": "JSON of train, valid and test"},
    ),
    FlagGroup(flags="--per-dataset-sequences-path --mock-data", fate="refused", note=_READ, error=_DATA),
    FlagGroup(
        flags="--dataloader-type",
        fate="refused",
        note="unless `external`, which a recipe makes the default; `single` with context parallelism of several sizes",
        error="torchmix is an external loader; leave the flag out",
        is_given=lambda args: args.dataloader_type not in ("external", "single" if way_of(args) else "external"),
        conflicts=_served_by_trainer,
    ),
    FlagGroup(
        flags="--dataloader-inter-document-masking",
        fate="refused",
        note="`boundaries: document` of the recipe does it",
        error="packing.boundaries: document in the recipe does this, and lets context parallelism cut each document",
    ),
    FlagGroup(
        flags="--sft",
        fate="compared",
        note="`packing.boundaries: document`; chats are `messages` of sources. See [Chats](megatron.md#chats)",
        conflicts=_chats,
    ),
    FlagGroup(flags="--fim-data", fate="compared", note=_FIM, conflicts=_fim, in_init=_SWITCH),
    FlagGroup(
        flags="--fim-rate --fim-spm-rate --fim-fragment-rate",
        fate="compared",
        note=_FIM,
        in_init={"type": float, "metavar": "P"},
    ),
    FlagGroup(
        flags="--fim-split-sample --fim-prefix-token --fim-middle-token --fim-suffix-token",
        fate="compared",
        note=_FIM,
        in_init={"metavar": "TOKEN", "help": "a name in the vocabulary of --tokenizer, or an id"},
    ),
    FlagGroup(
        flags="--fim-no-prefix",
        fate="refused",
        note="it looks at the text of ids; a `map` may leave such rows out",
        error="it looks at the text that ids become; leave such rows to a source without fim, or to a map",
        in_init={"metavar": "TEXT"},
    ),
    FlagGroup(
        flags="--use-varlen-dataset --varlen-sbhd-validation",
        fate="compared",
        note="`packing.method: whole`, see [Long beside short](long_context.md); the second is refused",
        conflicts=_lengths,
    ),
    FlagGroup(
        flags="--perform-rl-step",
        fate="refused",
        note=_SAMPLES,
        error="reinforcement learning makes its own batches",
    ),
    FlagGroup(
        flags="--hybrid-context-parallel --dynamic-context-parallel --sequence-packing-scheduler "
        "--max-seqlen-per-dp-cp-rank --min-dynamic-context-parallel-size",
        fate="compared",
        note="`balance.context`, and its `rank_tokens` and `sizes`, see [Long beside short](long_context.md)",
        conflicts=_runs,
    ),
    FlagGroup(
        flags="--pad-packed-seq-alignment --thd-max-packed-sequences",
        fate="refused",
        note="batches have a fixed length, and `packing.align_tokens` pads documents",
        error="it pads packed samples in Megatron's own get_batch; those of a recipe have a fixed length, and "
        "packing.align_tokens pads their documents",
    ),
    FlagGroup(
        flags="--cp-partition-mode",
        fate="refused",
        note="unless it is `zigzag`, the default, as slices are cut",
        error="torchmix cuts zigzag slices; leave the flag out",
        is_given=lambda args: getattr(args, "cp_partition_mode", "zigzag") != "zigzag",
    ),
    FlagGroup(
        flags="--tensor-parallel-num-weight-shards",
        fate="refused",
        note="where it makes an axis of ranks that torchmix does not know",
    ),
    FlagGroup(
        flags="--phase-transition-iterations",
        fate="refused",
        note="its phases count samples from 0 again",
        error="its phases count samples from 0 again, the data do not",
    ),
    FlagGroup(flags="--decrease-batch-size-if-needed", fate="refused", note="it trains on fewer samples than planned"),
    FlagGroup(
        flags="--inprocess-restart",
        fate="followed",
        note="loaders and the node worker stay; see [In-process restarts](megatron.md#in-process-restarts)",
    ),
    FlagGroup(
        flags="--cuda-graph-impl",
        fate="refused",
        note=_GRAPH,
        error="the graph would copy batches by itself, outside of get_batch; capture layers "
        "(--cuda-graph-impl transformer_engine)",
        is_given=lambda args: _has_iteration_graph(args),
        title="--cuda-graph-impl local with a full-iteration graph",
    ),
    FlagGroup(flags="--cuda-graph-scope", fate="refused", note=_GRAPH),
    FlagGroup(
        flags="--overlap-moe-expert-parallel-comm",
        fate="refused",
        note="with `boundaries: document`, which its schedule does not pass on",
        conflicts=_schedule_without_ends,
    ),
    FlagGroup(flags="--batch-size", fate="refused", note="by Megatron itself"),
    FlagGroup(
        flags="--yaml-cfg",
        fate="refused",
        note="Megatron then forgets the command line",
        error="Megatron then forgets flags of the command line; give its arguments as flags",
        is_given=lambda args: getattr(args, "yaml_cfg", None) is not None,
    ),
    FlagGroup(flags="--seq-length --encoder-seq-length --decoder-seq-length", fate="compared", note="`batch.length`"),
    FlagGroup(flags="--global-batch-size", fate="compared", note=_SIZES),
    FlagGroup(
        flags="--rampup-batch-size",
        fate="compared",
        note=_SIZES,
        in_init={"type": int, "nargs": 3, "metavar": ("START", "INCREMENT", "SAMPLES")},
    ),
    FlagGroup(
        flags="--step-batch-size-schedule",
        fate="compared",
        note=_SIZES,
        in_init={"metavar": "SCHEDULE", "help": 'as "0:768 250B:1536"'},
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
        conflicts=_cut_documents,
    ),
    FlagGroup(
        flags="--reset-position-ids",
        fate="compared",
        note="`packing.positions`, see [Resets](megatron.md#resets)",
        conflicts=_positions,
        in_init=_SWITCH,
    ),
    FlagGroup(
        flags="--reset-attention-mask",
        fate="compared",
        note="`packing.boundaries`, see [Resets](megatron.md#resets)",
        conflicts=_attention,
        in_init=_SWITCH,
    ),
    FlagGroup(
        flags="--eod-mask-loss",
        fate="compared",
        note="`packing.reset_loss`, see [Resets](megatron.md#resets)",
        conflicts=_label_of_ends,
        in_init=_SWITCH,
    ),
    FlagGroup(
        flags="--calculate-per-token-loss",
        fate="compared",
        note="`per_token_loss`, see [Loss weights](megatron.md#loss-weights)",
        conflicts=_loss_by_token,
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
        conflicts=_no_validation,
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
        conflicts=_validation_sets,
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
        flags="--fim-pad-token --fim-eod-token",
        fate="no effect",
        note="documents are measured as they are cut, so none is padded; where they end is `fim.eod` of a source",
        in_init={"metavar": "TOKEN"},
    ),
    FlagGroup(
        flags="--sft-tokenizer-prompt-format --sft-mock-dataset-config-json --varlen-mock-dataset-config-json",
        fate="no effect",
        note="what Megatron's own chats and lengths are made of; `chat.template` of the recipe says what chats become",
    ),
    FlagGroup(
        flags="--thd-tail-padding-policy --cuda-graph-dynamic-microbatches",
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
SCRIPT_FLAGS = (
    FlagGroup(
        flags="--dataloader-save",
        fate="refused",
        note="the state travels in Megatron's own checkpoint",
        error="the state of the data travels in Megatron's own checkpoint, once for all ranks",
    ),
)
"""Flags that scripts of users add, and no version of Megatron has."""


def refused_flags() -> dict[str, FlagGroup]:
    """By flag, the rows that refuse it wherever it is given."""
    return {flag: group for group in (*DATA_FLAGS, *SCRIPT_FLAGS) if group.error for flag in group.flags.split()}


def init_flags() -> dict[str, Mapping[str, Any]]:
    """By flag, how `torchmix init` declares it."""
    return {flag: group.in_init for group in DATA_FLAGS if group.in_init for flag in group.flags.split()}


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
    job = MegatronJob(args=args, recipe=recipe, cp=cp, pp=pp)
    faults = [
        f"{group.title or flag}: {group.error}"
        for flag, group in refused_flags().items()
        if (group.is_given(args) if group.is_given is not None else job.has(flag[2:].replace("-", "_")))
    ]
    faults += [message for group in DATA_FLAGS if group.conflicts is not None for message in group.conflicts(job)]
    if faults:
        raise RecipeError("with --data-recipe, Megatron cannot have\n  " + "\n  ".join(faults))
