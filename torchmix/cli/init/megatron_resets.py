"""Megatron's flags about the ends of documents -> what a recipe says of them.

In: `--reset-position-ids`, `--reset-attention-mask`, `--eod-mask-loss`, `--eod-id`, and the sources of the recipe to
be. Out: the lines of `packing`, a `reset_id` for sources whose documents hold an EOD inside, and what to tell the user.
Must hold: with one of these flags an EOD inside a document is written as `reset_id`, or it is said why not; without
them nothing resets in Megatron, and no file is looked at. Cost: that of `inner_ends.py` for each dataset.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from torchmix.cli.init.inner_ends import InnerEnds, look_for_inner_ends
from torchmix.cli.init.recipe_yaml import DraftSource
from torchmix.errors import OptionError

FLAGS = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    for flag in FLAGS:
        group.add_argument(flag, action="store_true")
    group.add_argument("--eod-id", type=int, metavar="ID", help="the tokenizer's EOD, where documents hold it inside")


def with_reset_ids(
    parts: Mapping[str, Sequence[DraftSource]], arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, Sequence[DraftSource]], list[str]]:
    """The sources, those whose documents hold an EOD inside with a `reset_id`; and what to tell.

    Args:
        parts: Sources of each part; their paths are prefixes, relative to `folder`.
        arguments: Of the command line.
        folder: The recipe's.

    Raises:
        OptionError: `--eod-id` alone.
        SourceUnreadable: A dataset that is none.
    """
    if not any(getattr(arguments, flag[2:].replace("-", "_")) for flag in FLAGS):
        if arguments.eod_id is not None:
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
