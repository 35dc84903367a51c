"""A new recipe as YAML that a person goes on with: keys in reading order, each with what it stands for.

In: parts of sources with shares, sizes, and comments. Out: text. Must hold: `load_recipe` reads it; a name or path with
any printable character keeps it. Cost: none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
WORDS_OF_YAML = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSource:
    """One source of the recipe to be."""

    name: str
    path: str
    share: str
    """As 30%."""
    one_pass: bool = False
    """It gives each document once."""
    comment: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """What goes into the recipe."""

    head: Sequence[str]
    """Lines of comment at the top."""
    seed: int
    length: int
    samples: int | Sequence[tuple[int, int]]
    """A number, or stages of (first step, samples)."""
    parts: Mapping[str, Sequence[DraftSource]]
    """`train`, and `validation` and `test` where they have sources of their own."""
    split: Sequence[str] | None
    boundaries: str
    boundaries_comment: str


def yaml_of(draft: Draft) -> str:
    """The recipe's text."""
    lines = [*(f"# {line}".rstrip() for line in draft.head), "version: 1", f"seed: {draft.seed}", "batch:"]
    lines.append(f"  length: {draft.length}  # --seq-length")
    if isinstance(draft.samples, int):
        lines.append(f"  samples: {draft.samples}  # --global-batch-size")
    else:
        lines.append("  samples:  # the ramp of Megatron's flags, by steps")
        lines += [f"    - {{from_step: {step}, samples: {samples}}}" for step, samples in draft.samples]
    lines += ["catalog: ./catalog", *_part(draft.parts["train"], "")]
    if draft.split is not None:
        lines += [
            "# Train, validation and test: rows are cut where Megatron's --split cuts them.",
            f"split: [{', '.join(draft.split)}]",
        ]
    for part in ("validation", "test"):
        if part in draft.parts:
            lines += [f"{part}:", *_part(draft.parts[part], "  ")]
    lines += [
        "packing:",
        "  method: concat  # documents run on from sample to sample, as in Megatron's GPTDataset",
        f"  boundaries: {draft.boundaries}  # {draft.boundaries_comment}",
    ]
    return "\n".join(lines) + "\n"


def _part(sources: Sequence[DraftSource], indent: str) -> list[str]:
    lines = [f"{indent}sources:"]
    for source in sources:
        once = ", max_epochs: 1, on_exhausted: renormalise" if source.one_pass else ""
        comment = f"  # {source.comment}" if source.comment else ""
        entry = f"{{path: {_text(source.path)}, format: megatron{once}}}"
        lines.append(f"{indent}  {_text(source.name)}: {entry}{comment}")
    lines.append(f"{indent}mixture:")
    lines += [f"{indent}  {_text(source.name)}: {source.share}" for source in sources]
    return lines


def _text(text: str) -> str:
    """Text that YAML reads as this text."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS_OF_YAML:
        return text
    return json.dumps(text, ensure_ascii=False)
