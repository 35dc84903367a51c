"""A new recipe as YAML that a person edits further: keys in reading order, each with what it stands for.

`load_recipe` reads it; a name or path with any printable character keeps it; nothing is overwritten unless the user
says so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import count
from pathlib import Path

import msgspec

from torchmix.errors import OptionError, naming
from torchmix.recipe.amounts import parse_share, share_text
from torchmix.recipe.load import load_recipe
from torchmix.recipe.structs import MAX_NAME_BYTES, RECIPE_VERSION
from torchmix.storage.stores import is_uri

PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
WORDS_OF_YAML = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class DraftSource(msgspec.Struct, frozen=True, kw_only=True):
    """One source of the recipe to be."""

    name: str
    path: str | tuple[str, ...]
    share: str
    """As 30%; of the whole mixture."""
    group: str = ""
    """Name of the group that it stands in; empty: in none."""
    keys: tuple[tuple[str, str], ...] = ()
    """Its other keys, with their values as YAML has them."""
    comment: str = ""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the recipe."""

    head: Sequence[str]
    """Lines of comment at the top."""
    seed: int
    length: int
    length_comment: str
    samples: int | Sequence[tuple[int, int]]
    """A number, or stages of (first step, samples)."""
    samples_comment: str
    parts: Mapping[str, Sequence[DraftSource]]
    """`train`, and `validation` and `test` where they have sources of their own."""
    sources_comment: str = ""
    mixture_comment: str = ""
    split: Sequence[str] | None = None
    split_comment: str = ""
    tail: Sequence[str] = ()
    """Lines that come after these, as they are."""


def yaml_of(draft: Draft) -> str:
    """The recipe's text."""
    lines = [*(f"# {line}".rstrip() for line in draft.head), f"version: {RECIPE_VERSION}", f"seed: {draft.seed}"]
    lines += ["batch:", f"  length: {draft.length}  # {draft.length_comment}"]
    if isinstance(draft.samples, int):
        lines.append(f"  samples: {draft.samples}  # {draft.samples_comment}")
    else:
        lines.append(f"  samples:  # {draft.samples_comment}")
        lines += [f"    - {{from_step: {step}, samples: {samples}}}" for step, samples in draft.samples]
    lines += ["catalog: ./catalog", *_part(draft, "train", "")]
    if draft.split is not None:
        lines += [f"# {draft.split_comment}", f"split: [{', '.join(draft.split)}]"]
    for part in ("validation", "test"):
        if part in draft.parts:
            lines += [f"{part}:", *_part(draft, part, "  ")]
    return "\n".join([*lines, *draft.tail]) + "\n"


def check_is_free(target: Path, force: bool) -> None:
    """Refuse to overwrite a recipe.

    Raises:
        OptionError: It is there, and `force` is False.
    """
    if target.exists() and not force:
        raise OptionError(f"{target} exists; name another file with --out, or overwrite it with --force")


def write_recipe(target: Path, text: str) -> None:
    """Write a recipe that loads, or nothing."""
    unfinished = target.with_name(target.name + ".new")
    try:
        with naming(target):
            unfinished.write_text(text, encoding="utf-8")
        load_recipe(unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def text_of(text: str) -> str:
    """Text that YAML reads as this text."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS_OF_YAML:
        return text
    return json.dumps(text, ensure_ascii=False)


def parse_split(text: str) -> list[str]:
    """Weights as Megatron finds them in the text of --split.

    Raises:
        OptionError: There are none, or more than three.
    """
    weights = re.findall(r"[.0-9]+", text)
    try:
        values = [float(weight) for weight in weights]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 3 or values[0] <= 0:
        raise OptionError(f"--split {text!r}: one to three weights, as 969,30,1, the first above 0")
    return [f"{value:g}" if float(f"{value:g}") == value else repr(value) for value in values]


def relative_path(path: str, target: Path, words: str) -> str:
    """A path from the recipe's folder, unless the user's words have it absolute; a URI as it is."""
    if is_uri(path) or (Path(path).is_absolute() and os.path.dirname(path) in words):  # noqa: PTH120 - a glob
        return path
    return os.path.relpath(Path.cwd() / path, target.absolute().parent)


def free_name(name: str, taken: set[str]) -> str:
    """The name as a recipe allows it, with a number where another source has it; it is added to `taken`."""
    plain = _valid(name)
    numbered = (plain if number == 1 else _valid(f"{plain}-{number}") for number in count(1))
    free = next(name for name in numbered if name not in taken)
    taken.add(free)
    return free


def _valid(name: str) -> str:
    clean = "".join(letter if letter.isprintable() and letter != "/" else "_" for letter in name.strip().lstrip("."))
    clean = clean.replace(".", "-").strip() or "data"
    while len(clean.encode()) > MAX_NAME_BYTES:
        clean = clean[1:]
    return clean


def _part(draft: Draft, part: str, indent: str) -> list[str]:
    sources = draft.parts[part]
    lines = [f"{indent}sources:{_behind(draft.sources_comment)}"]
    for source in sources:
        keys = "".join(f", {key}: {value}" for key, value in source.keys)
        lines.append(f"{indent}  {text_of(source.name)}: {{path: {_path(source.path)}{keys}}}{_behind(source.comment)}")
    lines.append(f"{indent}mixture:{_behind(draft.mixture_comment)}")
    return lines + _mixture(sources, f"{indent}  ")


def _mixture(sources: Sequence[DraftSource], indent: str) -> list[str]:
    """The shares, those of a group together where its first source stands."""
    lines: list[str] = []
    shares = {source.name: parse_share(source.share, source.name) for source in sources}
    for group in dict.fromkeys(source.group or source for source in sources):
        if isinstance(group, DraftSource):
            lines.append(f"{indent}{text_of(group.name)}: {group.share}")
            continue
        members = [source.name for source in sources if source.group == group]
        whole = sum((shares[name] for name in members), Fraction(0))
        lines += [f"{indent}{text_of(group)}:", f"{indent}  share: {share_text(whole)}", f"{indent}  children:"]
        lines += [f"{indent}    {text_of(name)}: {share_text(shares[name] / whole)}" for name in members]
    return lines


def _path(path: str | tuple[str, ...]) -> str:
    return text_of(path) if isinstance(path, str) else f"[{', '.join(map(text_of, path))}]"


def _behind(comment: str) -> str:
    return f"  # {comment}" if comment else ""
