"""`torchmix init --from-megatron`: a recipe for the blend that a team trains on with Megatron."""

from __future__ import annotations

import argparse
import math
import os
import posixpath
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from msgspec.structs import replace

from torchmix.cli.init.megatron_blend import (
    Blend,
    InnerEnds,
    look_for_inner_ends,
    num_documents,
    parse_blend,
    samples_of_one_pass,
    share_texts,
    words_of,
    words_of_file,
    words_of_split_file,
)
from torchmix.cli.init.recipe_yaml import (
    Draft,
    DraftSource,
    check_is_free,
    free_name,
    parse_split,
    write_recipe,
    yaml_of,
)
from torchmix.cli.terminal import ExitCode, print_json, print_table
from torchmix.errors import OptionError, PlanError, RecipeError, SourceUnreadable
from torchmix.formats.megatron.files import find_datasets
from torchmix.megatron_adapter.flags import init_flags, refused_flags
from torchmix.planner.stream_order import check_rows_of_part
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import has_part
from torchmix.recipe.sources import PARTS, documents_of_split, tokenizer_kind
from torchmix.recipe.structs import Recipe
from torchmix.storage.stores import is_uri, place_of
from torchmix.transform.open_tokenizer import Tokenizers

# --- Megatron's flags of the global batch -> `batch.samples` of a recipe.
#
# Every step has as many samples as Megatron's calculator gives it. Cost: one pass over the stages, and none over
# steps.
#
# The rules are those of `RampupBatchsizeNumMicroBatchesCalculator` (core 0.16) and of
# `StepBatchsizeNumMicroBatchesCalculator` (core 0.20) in megatron/core/num_microbatches_calculator.py of Megatron-LM:
# the size of a step follows from the samples consumed before it.

MULTIPLES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

Stage = tuple[int, int]
"""First step, samples of a step."""


def ramp_stages(start: int, increment: int, ramp_samples: int, samples: int) -> list[Stage]:
    """Stages of `--rampup-batch-size START INCREMENT SAMPLES`.

    Args:
        start: Samples of the first step.
        increment: What each stage adds.
        ramp_samples: Samples over which the size grows.
        samples: `--global-batch-size`.

    Raises:
        OptionError: Megatron refuses these numbers.
    """
    flag = f"--rampup-batch-size {start} {increment} {ramp_samples}"
    if start < 1 or increment < 1 or ramp_samples < 0:
        raise OptionError(f"{flag}: start and increment are at least 1, samples at least 0")
    if samples < start or (samples - start) % increment:
        raise OptionError(f"{flag}: {increment} does not lead from {start} to --global-batch-size {samples}")
    if samples == start or ramp_samples == 0:
        return [(0, samples)]
    num_increments = (samples - start) // increment
    per_increment = ramp_samples / num_increments  # a double, as Megatron has it
    borders = [(0, start)]
    for number in range(1, num_increments + 1):
        consumed = math.floor(number * per_increment)  # or one beside it, as the division rounds
        while consumed <= ramp_samples and int(consumed / per_increment) < number:
            consumed += 1
        borders.append((consumed, start + number * increment))
    return _stages(borders)


def schedule_stages(schedule: str, seq_length: int) -> list[Stage]:
    """Stages of `--step-batch-size-schedule "TOKENS:SIZE TOKENS:SIZE ..."`; tokens and sizes may end in K, M, B or T.

    Raises:
        OptionError: Not such a schedule.
    """
    flag = f"--step-batch-size-schedule {schedule!r}"
    try:
        pairs = [entry.split(":", 1) for entry in schedule.replace(",", " ").split()]
        borders = sorted((_count(tokens) // seq_length, _count(size)) for tokens, size in pairs)
    except ValueError:
        raise OptionError(f'{flag} is no schedule, as "0:768 250B:1536"') from None
    befores = [before for before, _ in borders]
    if not borders or befores[0] != 0 or len(set(befores)) < len(befores) or min(size for _, size in borders) < 1:
        raise OptionError(f"{flag}: the first begins at 0, the next ones after it, and sizes are at least 1")

    return _stages(borders)


def _stages(borders: Sequence[tuple[int, int]]) -> list[Stage]:
    """Stages by step, from (samples consumed, size from there on), ascending; the first is at 0."""
    stages: list[Stage] = []
    step = consumed = 0
    for number, (_, size) in enumerate(borders):
        until = borders[number + 1][0] if number + 1 < len(borders) else consumed
        if number + 1 < len(borders) and until <= consumed:
            continue  # the size before has stepped over this one
        if not stages or stages[-1][1] != size:
            stages.append((step, size))
        steps = -(-(until - consumed) // size)
        step, consumed = step + steps, consumed + steps * size
    return stages


def _count(text: str) -> int:
    unit = text.strip().upper()[-1:]
    return int(float(text.strip()[:-1]) * MULTIPLES[unit]) if unit in MULTIPLES else int(float(text))


# --- Megatron's flags about the ends of documents -> what a recipe says of them.
#
# With one of these flags an EOD inside a document is written as `reset_id`, or it is said why not; without them
# nothing resets in Megatron, and no file is looked at.

FLAGS = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")


def with_reset_ids(
    parts: Mapping[str, Sequence[DraftSource]], arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, Sequence[DraftSource]], list[str]]:
    """The sources, those whose documents hold an EOD inside with a `reset_id`; and what to tell.

    Args:
        parts: Sources of each part; their paths are prefixes, relative to `folder`.
        arguments: The arguments of the command line.
        folder: The recipe's.

    Raises:
        OptionError: `--eod-id` alone.
        SourceUnreadable: A dataset that is none.
    """
    if not any(getattr(arguments, flag[2:].replace("-", "_")) for flag in FLAGS):
        if arguments.eod_id is not None and not arguments.fim_data:
            raise OptionError(f"--eod-id says which id resets; give it with {', '.join(FLAGS[:-1])} or {FLAGS[-1]}")
        return dict(parts), []
    seen: dict[str, InnerEnds] = {}
    found: dict[str, Sequence[DraftSource]] = {}
    warnings: list[str] = []
    for part, sources in parts.items():
        found[part] = []
        for source in sources:
            prefix = str(source.path)
            if prefix not in seen:
                seen[prefix] = look_for_inner_ends(folder / f"{prefix}.bin", end_id=arguments.eod_id)
                warnings += _warnings(source.name, seen[prefix], is_given=arguments.eod_id is not None)
            found[part] = [*found[part], _with_reset_id(source, seen[prefix])]
    return found, warnings


def packing_lines(parts: Mapping[str, Sequence[DraftSource]], arguments: argparse.Namespace) -> tuple[str, ...]:
    """The lines of `packing` that say what resets at documents."""
    attention, positions = arguments.reset_attention_mask, arguments.reset_position_ids
    lines = [
        "  boundaries: document  # attention stops at documents: --reset-attention-mask"
        if attention
        else "  boundaries: none  # attention goes over documents: Megatron without --reset-attention-mask"
    ]
    if positions != attention:
        lines.append(
            "  positions: document  # count from 0 in each document: --reset-position-ids"
            if positions
            else "  positions: sample  # count through a sample: Megatron without --reset-position-ids"
        )
    has_reset_ids = any(key == "reset_id" for sources in parts.values() for s in sources for key, _ in s.keys)
    if has_reset_ids and not arguments.eod_mask_loss:
        lines.append("  reset_loss: keep  # an EOD inside a document has a label: Megatron without --eod-mask-loss")
    return tuple(lines)


def _with_reset_id(source: DraftSource, ends: InnerEnds) -> DraftSource:
    if ends.end_id is None or (ends.is_whole and not ends.num_holding):
        return source
    comment = f"{ends.num_holding:,} of {ends.num_documents:,} documents looked at hold this EOD inside"
    return replace(
        source,
        keys=(*source.keys, ("reset_id", str(ends.end_id))),
        comment=f"{source.comment}; {comment}" if source.comment else comment,
    )


def _warnings(name: str, ends: InnerEnds, *, is_given: bool) -> list[str]:
    if ends.end_id is None:
        if not ends.num_documents:
            return []
        return [
            f"{name}: its documents end with different ids, so whether they hold EODs inside could not be told; give "
            f"--eod-id, or nothing resets inside them"
        ]
    if ends.num_holding and not is_given:
        return [
            f"{name}: the {ends.num_documents:,} documents looked at all end with id {ends.end_id}, and "
            f"{ends.num_holding:,} hold it inside, too: reset_id: {ends.end_id} is written. If that is not the "
            f"tokenizer's EOD, give --eod-id"
        ]
    return []


# --- Megatron's flags of fill in the middle -> `fim` of each source.
#
# A .bin holds ids, so names of tokens are looked up in a vocabulary. What is left out has Megatron's default (main,
# d98e8a6).

FIM_TOKENS = {
    "prefix_token": "<fim_prefix>",
    "middle_token": "<fim_middle>",
    "suffix_token": "<fim_suffix>",
    "eod_token": "<|endoftext|>",
}
FIM_RATE = 0.5


def with_fim(
    parts: Mapping[str, Sequence[DraftSource]], arguments: argparse.Namespace
) -> dict[str, Sequence[DraftSource]]:
    """The sources, with `fim` where `--fim-data` is given.

    Raises:
        OptionError: A rate that Megatron refuses, a flag that torchmix does not follow, or a name that no vocabulary
            tells the id of.
    """
    if not arguments.fim_data:
        return dict(parts)
    if arguments.fim_no_prefix is not None:
        raise OptionError(f"--fim-no-prefix: {refused_flags()['--fim-no-prefix'].error}")
    rates = [_rate(arguments, key) for key in ("rate", "spm_rate")]
    if arguments.fim_split_sample is not None and arguments.fim_fragment_rate is None:
        raise OptionError("--fim-split-sample needs --fim-fragment-rate, the part of the files that are cut")
    tokens = {key: getattr(arguments, f"fim_{key}") or default for key, default in FIM_TOKENS.items()}
    if arguments.eod_id is not None:
        tokens["eod_token"] = str(arguments.eod_id)
    if arguments.fim_split_sample is not None:
        tokens["split_sample"] = arguments.fim_split_sample
    ids = {key: _id(f"--fim-{key.replace('_', '-')}", token, arguments.tokenizer) for key, token in tokens.items()}
    marks = ", ".join(str(ids[key]) for key in ("prefix_token", "middle_token", "suffix_token"))
    told = f"rate: {rates[0]:g}, spm: {rates[1]:g}, ids: [{marks}], eod: {ids['eod_token']}"
    if "split_sample" in ids:
        told += f", split: {ids['split_sample']}, fragment_rate: {_rate(arguments, 'fragment_rate'):g}"
    return {
        part: [replace(source, keys=(*source.keys, ("fim", f"{{{told}}}"))) for source in sources]
        for part, sources in parts.items()
    }


def _rate(arguments: argparse.Namespace, key: str) -> float:
    given = getattr(arguments, f"fim_{key}")
    rate = FIM_RATE if given is None else float(given)
    if not 0 < rate <= 1:
        raise OptionError(f"--fim-{key.replace('_', '-')} {rate:g}: it is above 0 and at most 1")
    return rate


def _id(flag: str, token: str, tokenizer: str | None) -> int:
    """The id of a token that a flag names."""
    if token.isdigit():
        return int(token)
    if tokenizer is None or tokenizer_kind(tokenizer) not in ("file", "tiktoken"):
        raise OptionError(
            f"{flag} {token}: a .bin holds ids, so the recipe needs the token's; give the vocabulary by --tokenizer "
            "tokenizer.json, or the id in the place of the name"
        )
    try:
        found = Tokenizers(Path.cwd()).token_id("", tokenizer, token, "")
    except RecipeError as error:
        raise OptionError(f"{flag} {token}: --tokenizer {tokenizer}: {error.message}") from None
    assert found is not None, "a name has an id, or is an error"
    return found


# --- `torchmix init --from-megatron`: a recipe for the blend that a team trains on with Megatron.
#
# Shares are Megatron's, in tokens; nothing is overwritten without --force; what Megatron would refuse is refused.

ONE_PASS = (("max_epochs", "1"), ("on_exhausted", "renormalise"))
DEFAULT_SPLIT = "969, 30, 1"
"""What Megatron takes where --data-path has no --split."""
PREPROCESSED = "_text_document"
"""What Megatron's tools/preprocess_data.py adds to most names."""
COLUMNS = {
    "source": "the name of a source in the recipe",
    "part": "what reads it: train, validation or test; cut by split, a source of train is read by all three",
    "share": "of the tokens of this part, as Megatron's weight is of its samples",
    "dataset": "the prefix of its .bin and .idx",
}
PART_OF_FLAG = {"train_data_path": "train", "valid_data_path": "validation", "test_data_path": "test"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare Megatron's names, so that a launch script's flags can be pasted."""
    data = parser.add_argument_group("or a blend of Megatron's, by one of these; words as Megatron takes them")
    data.add_argument(
        "--from-megatron",
        "--data-path",
        nargs="+",
        metavar="WORD",
        help='as "0.3 /p/web 0.7 /p/code", or prefixes alone',
    )
    data.add_argument("--from-megatron-file", "--data-args-path", type=Path, metavar="FILE", help="holds these words")
    for flag, options in init_flags().items():
        data.add_argument(flag, **options)
    data.add_argument("--eod-id", type=int, metavar="ID", help="the tokenizer's EOD, where documents hold it inside")


def has_blend(arguments: argparse.Namespace) -> bool:
    """Whether any of the flags that name Megatron's data is given."""
    flags = ("from_megatron", "from_megatron_file", "per_split_data_args_path", *PART_OF_FLAG)
    return any(getattr(arguments, flag) for flag in flags)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Write the recipe.

    Raises:
        OptionError: Flags that Megatron refuses, or that say nothing, or a file that is there already.
        SourceUnreadable: A prefix that leads to no dataset.
    """
    target: Path = arguments.recipe
    if arguments.seq_length is None:
        raise OptionError("--seq-length is missing; it is the tokens of one sample")
    check_is_free(target, arguments.force)
    blends, split = _blends(arguments)
    taken: set[str] = set()
    found = {part: _sources(blend, part, split, taken, arguments) for part, blend in blends.items()}
    parts, about_resets = with_reset_ids(with_fim(found, arguments), arguments, target.absolute().parent)
    left_out = [
        f"{prefix} has weight 0 and is left out; Megatron fails on a weight of 0"
        for blend in blends.values()
        for prefix in blend.left_out
    ]
    samples = _samples(arguments)
    draft = Draft(
        head=[*_head(arguments), *left_out],
        seed=arguments.seed,
        length=arguments.seq_length,
        length_comment="--seq-length",
        samples=samples,
        samples_comment=(
            "--global-batch-size" if isinstance(samples, int) else "the ramp of Megatron's flags, by steps"
        ),
        parts=parts,
        split=split,
        split_comment="Train, validation and test: rows are cut where Megatron's --split cuts them.",
        tail=(
            "packing:",
            "  method: concat  # documents run on from sample to sample, as in Megatron's GPTDataset",
            *packing_lines(parts, arguments),
        ),
    )
    write_recipe(target, yaml_of(draft))
    warnings = [*left_out, *about_resets]
    if split is not None:
        warnings += _without_rows(load_recipe(target), parts["train"], target)
    if arguments.json:
        sources = [
            {"part": part, "name": source.name, "path": source.path, "share": source.share}
            for part, of_part in parts.items()
            for source in of_part
        ]
        print_json({"recipe": str(target), "sources": sources, "split": split, "warnings": warnings})
    else:
        rows = [(source.name, part, source.share, str(source.path)) for part in parts for source in parts[part]]
        print_table(COLUMNS, rows, explain=arguments.explain)
        for warning in warnings:
            print(f"\nwarning: {warning}")
        print(f"\n{target} is written; next: torchmix index {target}, then torchmix check {target}")
    return ExitCode.OK


def _blends(arguments: argparse.Namespace) -> tuple[dict[str, Blend], list[str] | None]:
    """Part -> blend, and the weights of the split where there is only one blend."""
    words: dict[str, list[str]] = {}
    per_part = {part: getattr(arguments, flag) for flag, part in PART_OF_FLAG.items() if getattr(arguments, flag)}
    ways = {
        "--from-megatron": arguments.from_megatron,
        "--from-megatron-file": arguments.from_megatron_file,
        "--train-data-path": per_part,
        "--per-split-data-args-path": arguments.per_split_data_args_path,
    }
    given = [flag for flag, value in ways.items() if value]
    if len(given) != 1:
        raise OptionError(f"{' and '.join(given) or 'no flag'} names the data; give one of {', '.join(ways)}")
    if arguments.from_megatron:
        words = {"train": words_of(arguments.from_megatron)}
    elif arguments.from_megatron_file:
        words = {"train": words_of_file(arguments.from_megatron_file)}
    elif per_part:
        words = {part: words_of(value) for part, value in per_part.items()}
    else:
        words = words_of_split_file(arguments.per_split_data_args_path)
    if "train" not in words:
        raise OptionError(f"{given[0]}: there is nothing to train on")
    blends = {part: parse_blend(found, f"{given[0]} ({part})") for part, found in words.items()}
    if given[0] not in ("--from-megatron", "--from-megatron-file"):
        if arguments.split is not None:
            raise OptionError(f"--split cuts one blend; {given[0]} names a blend for each part")
        return blends, None
    return blends, parse_split(DEFAULT_SPLIT if arguments.split is None else arguments.split)


def _without_rows(recipe: Recipe, sources: Sequence[DraftSource], target: Path) -> list[str]:
    """What torchmix would refuse when a part is read, and Megatron would not come to an end with."""
    folder = target.absolute().parent
    rows = {source.name: num_documents(place_of(folder, f"{source.path}.bin")) for source in sources}
    warnings = []
    for part in PARTS:
        if has_part(recipe, part):
            try:
                check_rows_of_part(recipe, part, rows)
            except PlanError as error:
                warnings.append(str(error))
    return warnings


def _samples(arguments: argparse.Namespace) -> int | list[tuple[int, int]]:
    if arguments.step_batch_size_schedule is not None:
        if arguments.global_batch_size is not None or arguments.rampup_batch_size is not None:
            raise OptionError("--step-batch-size-schedule stands alone, without --global-batch-size or a ramp-up")
        stages = schedule_stages(arguments.step_batch_size_schedule, arguments.seq_length)
    elif arguments.global_batch_size is None:
        raise OptionError("--global-batch-size is missing; it is the samples of one step over all ranks")
    elif arguments.rampup_batch_size is not None:
        start, increment, ramp_samples = arguments.rampup_batch_size
        stages = ramp_stages(start, increment, ramp_samples, arguments.global_batch_size)
    else:
        return int(arguments.global_batch_size)
    return stages[0][1] if len(stages) == 1 else stages


def _sources(
    blend: Blend, part: str, split: Sequence[str] | None, taken: set[str], arguments: argparse.Namespace
) -> list[DraftSource]:
    """The sources of one part, each prefix once."""
    paths = [_find(prefix) for prefix in blend.prefixes]
    weights = blend.weights or _sizes(blend, paths, split, arguments.seq_length)
    added: dict[str, Fraction] = {}
    for path, weight in zip(paths, weights, strict=True):
        added[path] = added.get(path, Fraction(0)) + weight
    folder = arguments.recipe.absolute().parent
    by_size = blend.weights is None and len(blend.prefixes) > 1
    prefixes = [blend.prefixes[paths.index(path)] for path in added]
    names = _names(prefixes, part, taken)
    groups = _groups(prefixes, part, taken)
    sources: list[DraftSource] = []
    for path, prefix, name, share in zip(added, prefixes, names, share_texts(list(added.values())), strict=True):
        times = paths.count(path)
        folder_of_prefix = posixpath.dirname(prefix.rstrip("/"))
        sources.append(
            DraftSource(
                name=name,
                path=prefix if is_uri(prefix) or Path(prefix).is_absolute() else os.path.relpath(prefix, folder),
                share=share,
                group="" if by_size else groups.get(folder_of_prefix, ""),
                keys=(("format", "megatron"), *(ONE_PASS if by_size else ())),
                comment=f"stands {times} times in the blend; its weights are added up" if times > 1 else "",
            )
        )
    return sources


def _find(prefix: str) -> str:
    """The .bin of a prefix, which is relative to where Megatron is started: here."""
    if prefix.endswith((".bin", ".idx")):
        raise OptionError(f"{prefix}: Megatron takes prefixes, without .bin or .idx")
    place = place_of(Path.cwd(), find_datasets(prefix, [prefix], Path.cwd())[0])
    return place if is_uri(place) else os.path.normpath(place)


def _sizes(blend: Blend, paths: Sequence[str], split: Sequence[str] | None, seq_length: int) -> list[Fraction]:
    """Weights of a list without: the samples that Megatron makes of one pass of each dataset's training part."""
    if len(paths) == 1:
        return [Fraction(1)]
    documents = documents_of_split([float(weight) for weight in split], "train") if split is not None else None
    sizes = [samples_of_one_pass(path, seq_length=seq_length, documents=documents) for path in paths]
    for prefix, size in zip(blend.prefixes, sizes, strict=True):
        if size == 0:
            raise SourceUnreadable(f"{prefix} has less than one sample of {seq_length} tokens; leave it out")
    return [Fraction(size) for size in sizes]


def _names(prefixes: Sequence[str], part: str, taken: set[str]) -> list[str]:
    """A name for each prefix: its last word, with its folder where another has the same, with the part where that is
    not train, and with a number where all that is taken. The names are added to `taken`."""
    stems = [Path(prefix).name.removesuffix(PREPROCESSED) or PREPROCESSED for prefix in prefixes]
    names: list[str] = []
    for prefix, stem in zip(prefixes, stems, strict=True):
        long = f"{Path(prefix).absolute().parent.name}-{stem}" if stems.count(stem) > 1 else stem
        names.append(free_name(long if part == "train" else f"{long}-{part}", taken))
    return names


def _groups(prefixes: Sequence[str], part: str, taken: set[str]) -> dict[str, str]:
    """A name for each folder that several prefixes share, unless all do. The names are added to `taken`."""
    folders = [posixpath.dirname(prefix.rstrip("/")) for prefix in prefixes]
    shared = [folder for folder in dict.fromkeys(folders) if 1 < folders.count(folder) < len(folders)]
    names = {folder: posixpath.basename(folder) or "data" for folder in shared}
    return {folder: free_name(name if part == "train" else f"{name}-{part}", taken) for folder, name in names.items()}


def _head(arguments: argparse.Namespace) -> list[str]:
    lines = [
        "Written by `torchmix init` from the data flags of a run with Megatron-LM.",
        "Shares are of tokens, as Megatron's weights are: each of its samples has --seq-length of them.",
        "Which documents come first is torchmix's own order, not Megatron's; docs/megatron.md says what differs.",
    ]
    if arguments.split is None and (arguments.from_megatron or arguments.from_megatron_file):
        lines.append(f"There was no --split: this is Megatron's default, {DEFAULT_SPLIT}.")
    if not arguments.eod_mask_loss:
        lines.append("The last token of a document has no label here, as with Megatron's --eod-mask-loss.")
    return lines
