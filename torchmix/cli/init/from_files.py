"""`torchmix init FILE...`: a recipe for data files as they lie.

In: files, folders, globs and URIs. Out: a commented recipe, read back before success is told, and a table of its
sources. Must hold: what was guessed is said, where the user can change it; a tokenizer is given or asked for, never
guessed. Cost: one look at one file of each source.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from torchmix.cli.init.choose_images import IMAGE_KINDS, MODULE, choose_images, image_keys, image_tokens
from torchmix.cli.init.choose_tokenizer import TOKENIZERS, choose_tokenizer, tokenizer_keys, tokens_among
from torchmix.cli.init.data_files import FileGroup, find_groups
from torchmix.cli.init.look import look_at, sizes_of
from torchmix.cli.init.recipe_yaml import (
    Draft,
    DraftSource,
    check_is_free,
    free_name,
    parse_split,
    relative_path,
    text_of,
    write_recipe,
    yaml_of,
)
from torchmix.cli.terminal import ExitCode, print_json, print_table
from torchmix.errors import OptionError, SourceUnreadable
from torchmix.formats.found_column import ID_BYTES, FoundColumn
from torchmix.formats.images.look import is_path
from torchmix.recipe.build import nearest
from torchmix.recipe.byte_sizes import bytes_text
from torchmix.recipe.load import load_recipe
from torchmix.recipe.source.documents import PARTS
from torchmix.recipe.source.format import DEFAULT_FORMAT, FORMATS

LENGTH, SAMPLES = 512, 16
"""Small enough that a laptop trains on the first batch."""
USUAL_COLUMNS = (
    *("input_ids", "tokens", "token_ids", "ids", "text", "content", "raw_content", "body", "document"),
    *("messages", "conversations", "caption", "txt", "json.caption", "json.text"),
)
"""From the likeliest on; a column of tokens needs no tokenizer."""
ID_COLUMNS = ("id", "_id", "uuid", "doc_id", "document_id", "url")
"""Columns of strings that usually differ from row to row."""
CHAT = ("<|im_start|>", "<|im_end|>")
"""Tokens of the template `chatml`."""
SHARE_UNITS = 10_000
"""Parts of the whole in which shares by size are given: hundredths of a percent."""
TAIL = """\
# split: [99, 1, 0]           # train, validation and test: cuts the rows of every source
# vocab_size: 50257           # of the model; then check compares it with tokenizers and with the ids of the data
packing:
  method: best_fit            # documents stay whole where they fit a sample; concat cuts the stream every length tokens
  overflow: split             # of longer documents; or truncate, drop, error
  boundaries: document        # attention and positions stop where a document does; none lets them go on
  align_tokens: 8             # of each piece; 2 x cp or a multiple lets context parallelism slice each document
# balance: {method: rows, model: {layers: 32, hidden: 4096, ffn: 11008, heads: 32}}   # like work on all ranks
shuffle: {window_pages: 256, window_bytes: 64MiB}   # how far rows travel; fixed when the source is indexed
read: {cache: 1GiB}           # decoded pages kept in each process that reads; no part of the order
"""
COLUMNS = {
    "source": "the name of a source in the recipe",
    "part": "what reads it: train, validation or test; with split, a source of train is read by all three",
    "format": "what its files are",
    "column": "the column that is read, and that of its images; -: there are none, as in Megatron's .bin",
    "files": "its files",
    "size": "of these files, with columns that are not read",
    "share": "of the tokens of this part: by size, as far as the column takes it",
}


class _FoundGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of files, looked at."""

    group: FileGroup
    name: str
    num_bytes: int
    column: FoundColumn
    others: tuple[str, ...]
    """Columns that could be meant, too."""
    images: FoundColumn | None
    """The column of its images."""

    @property
    def is_text(self) -> bool:
        """Whether a tokenizer makes its ids."""
        return self.column.kind in ("text", "messages")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for files."""
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="Parquet, JSON lines, Arrow, .bin, WebDataset: files, folders, globs, hf:// or s3://",
    )
    files = parser.add_argument_group("of files")
    column = files.add_mutually_exclusive_group()
    column.add_argument("--text", metavar="COLUMN", help="column of text, where it is not the obvious one")
    column.add_argument("--tokens", metavar="COLUMN", help="column of lists of ids, likewise")
    column.add_argument("--messages", metavar="COLUMN", help="column of conversations, likewise")
    files.add_argument("--images", metavar="COLUMN", help="column of images, or of their paths, likewise")
    files.add_argument("--image-token", metavar="T", help="token that stands for a part of an image, likewise")
    files.add_argument("--tokenizer", metavar="T", help=f"of text: {TOKENIZERS}; asked for on a terminal")
    files.add_argument("--end-id", metavar="ID", help="token after each text (default: the usual ones are tried)")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Write the recipe.

    Raises:
        OptionError: Flags that go with nothing, or a file that is there already.
        SourceUnreadable: Files that are missing, cannot be read, or hold nothing to train on.
    """
    target: Path = arguments.recipe
    check_is_free(target, arguments.force)
    groups, left_out = find_groups(arguments.files)
    taken: set[str] = set()
    found = [_look(group, arguments, taken) for group in groups]
    if not any(one.group.part == "train" for one in found):
        raise OptionError("all files are of validation or test by their names; rename those to train on")
    with_text = [one.name for one in found if one.is_text]
    if arguments.tokenizer is not None and not with_text:
        raise OptionError("--tokenizer: no source has text; the columns hold ids already")
    tokenizer = choose_tokenizer(arguments.tokenizer, with_text) if with_text else None
    keys = tokenizer_keys(tokenizer, arguments.end_id, target) if tokenizer is not None else ()
    has_images = any(one.images is not None for one in found)
    tokens = image_tokens(tokenizer, arguments.image_token) if has_images and tokenizer is not None else ()
    if not has_images and (arguments.images or arguments.image_token):
        raise OptionError("--images: no images were found: neither bytes that begin as images do, nor their paths")
    of_part = {part: [one for one in found if one.group.part == part] for part in PARTS}
    parts = {part: _sources(some, keys, tokens, tokenizer, arguments) for part, some in of_part.items() if some}
    if arguments.split is not None and len(parts) > 1:
        raise OptionError(f"--split: {' and '.join(list(parts)[1:])} have files of their own here")
    draft = Draft(
        head=(
            "Written by `torchmix init`. Each line may be changed; docs/formats.md has every key.",
            "Paths are relative to this file. Next: torchmix index, then torchmix check.",
        ),
        seed=arguments.seed,
        length=arguments.seq_length or LENGTH,
        length_comment="tokens of a sample; this default suits a laptop",
        samples=arguments.global_batch_size or SAMPLES,
        samples_comment="samples of a step, over all ranks, likewise",
        parts=parts,
        sources_comment="a source's name is its identity: another name is another order",
        mixture_comment="shares of trained tokens; here by size, so that all sources last about equally long",
        split=None if arguments.split is None else parse_split(arguments.split),
        split_comment="Train, validation and test: the rows of every source are cut in this ratio.",
        tail=[
            *TAIL.splitlines()[arguments.split is not None or len(parts) > 1 :],
            *(MODULE.splitlines() if has_images else ()),
        ],
    )
    write_recipe(target, yaml_of(draft))
    _tell(arguments, parts, found, left_out)
    return ExitCode.OK


def _look(group: FileGroup, arguments: argparse.Namespace, taken: set[str]) -> _FoundGroup:
    seen = look_at(group.files[0], group.format)
    images = choose_images(seen, group.files[0], arguments.images)
    columns = [column for column in seen if column.kind not in IMAGE_KINDS]
    column = _choose(columns, group, arguments, images)
    if column.kind == "tokens":
        images = None
    return _FoundGroup(
        group=group,
        name=free_name(group.name if group.part == "train" else f"{group.name}-{group.part}", taken),
        num_bytes=sizes_of(group.files),
        column=column,
        others=tuple(other.name for other in seen if other is not column and other is not images),
        images=images,
    )


def _choose(
    columns: Sequence[FoundColumn], group: FileGroup, arguments: argparse.Namespace, images: FoundColumn | None
) -> FoundColumn:
    """The column that is meant."""
    if not FORMATS[group.format].has_columns:
        return columns[0]
    file = group.files[0]
    names = [column.name for column in columns]
    held = ", ".join(f"{column.name} ({column.kind})" for column in columns)
    for kind, what in (("text", "text"), ("tokens", "a list of ids"), ("messages", "conversations")):
        wanted = getattr(arguments, kind)
        if wanted is None:
            continue
        chosen = next((column for column in columns if column.name == wanted and column.kind == kind), None)
        if chosen is None:
            message = f"{file} has no column {wanted!r} of {what}{nearest(wanted, names)}; it has {held or 'neither'}"
            raise SourceUnreadable(message)
        return chosen
    if not columns and images is not None:
        message = f"{file} has images in {images.name}, and no text beside them; images are trained on with a text"
        raise SourceUnreadable(f"{message}: write one for each, as a caption, or leave it out")
    if not columns:
        raise SourceUnreadable(f"{file} has no column of text, or of lists of integers; leave it out")
    usual = [column for name in USUAL_COLUMNS for column in columns if column.name == name]
    if not usual and len(columns) > 1:
        raise OptionError(f"{file} has {held}; say which one to train on with --text, --tokens or --messages")
    return (usual or list(columns))[0]


def _sources(
    found: Sequence[_FoundGroup],
    keys: tuple[tuple[str, str], ...],
    tokens_of_images: tuple[tuple[str, str], ...],
    tokenizer: str | None,
    arguments: argparse.Namespace,
) -> list[DraftSource]:
    """The sources of one part."""
    words = " ".join(arguments.files)
    tokens = [_num_tokens(one, tokenizer) for one in found]
    sources = []
    for one, size, share in zip(found, tokens, _shares(tokens), strict=True):
        group, column = one.group, one.column
        held = f"{len(group.files)} files, " if len(group.files) > 1 else ""
        notes = [f"{held}{bytes_text(one.num_bytes)}, about {_about(size)} tokens"]
        if one.others:
            notes.append(f"it also has {', '.join(one.others[:6])}{', ...' if len(one.others) > 6 else ''}")
        if named := [name for name in ID_COLUMNS if name in one.others]:
            notes.append(f"with `id: {text_of(named[0])}` trace and deny-lists name its rows by {named[0]}")
        if one.is_text and tokenizer != "bytes" and not any(key == "end_id" for key, _ in keys):
            notes.append("end_id: the token after each text, which was not found")
        format_key = (("format", group.format),) if not _is_named(group) else ()
        column_keys = ((column.kind, text_of(column.name)), *(keys if one.is_text else ()))
        if column.kind == "messages" and tokenizer is not None:
            chat = "chatml" if tokens_among(tokenizer, CHAT) == set(CHAT) else "plain"
            column_keys = (*column_keys, ("chat", f"{{template: {chat}}}"))
        if one.images is not None:
            value, note = image_keys(one.images, group.files[0], tokens_of_images, arguments.recipe, words)
            column_keys = (*column_keys, ("images", value))
            notes.append(note)
        sources.append(
            DraftSource(
                name=one.name,
                path=_path(group, arguments),
                share=share,
                keys=(*format_key, *(column_keys if FORMATS[group.format].has_columns else ())),
                comment="; ".join(notes),
            )
        )
    return sources


def _shares(sizes: Sequence[int]) -> list[str]:
    """Percentages by size, rounded; each is above 0, and the largest takes what makes their sum 100 %."""
    total = max(1, sum(sizes))
    units = [max(1, round(SHARE_UNITS * size / total)) for size in sizes]
    units[units.index(max(units))] += SHARE_UNITS - sum(units)
    return [f"{unit / 100:g}%" for unit in units]


def _is_named(group: FileGroup) -> bool:
    """Whether a recipe knows the format by the names of the files."""
    is_lower = FORMATS[group.format].has_columns and group.files[0] == group.files[0].lower()
    return group.format == DEFAULT_FORMAT or is_lower


def _num_tokens(found: _FoundGroup, tokenizer: str | None) -> int:
    held = found.num_bytes * found.column.share
    if found.is_text and tokenizer != "bytes":
        held /= ID_BYTES
    return round(held + (0 if found.images is None else found.num_bytes * found.images.share))


def _path(group: FileGroup, arguments: argparse.Namespace) -> str | tuple[str, ...]:
    """What the recipe says of a group's files."""
    words = " ".join(arguments.files)
    if group.pattern is not None:
        return relative_path(group.pattern, arguments.recipe, words)
    paths = tuple(relative_path(file, arguments.recipe, words) for file in group.files)
    return paths[0] if len(paths) == 1 else paths


def _about(count: int) -> str:
    """A count in words of two digits: 1.2M."""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 100 * size else f"{count // size}{unit}"
    return str(count)


def _tell(
    arguments: argparse.Namespace,
    parts: dict[str, list[DraftSource]],
    found: Sequence[_FoundGroup],
    left_out: Sequence[str],
) -> None:
    target, by_name = arguments.recipe, {one.name: one for one in found}
    named = [(part, source, by_name[source.name]) for part, sources in parts.items() for source in sources]
    recipe = load_recipe(target)
    if arguments.json:
        print_json(
            {
                "recipe": str(target),
                "sources": [
                    {
                        "part": part,
                        "name": source.name,
                        "path": source.path,
                        "format": one.group.format,
                        "column": one.column.name or None,
                        "images": None if one.images is None else one.images.name,
                        "num_files": len(one.group.files),
                        "num_bytes": one.num_bytes,
                        "share": source.share,
                    }
                    for part, source, one in named
                ],
                "left_out": list(left_out),
                "length": recipe.batch.length,
            }
        )
        return
    print_table(
        COLUMNS,
        [
            (
                source.name,
                part,
                one.group.format,
                " + ".join([one.column.name or "-", *([one.images.name] if one.images is not None else [])]),
                str(len(one.group.files)),
                bytes_text(one.num_bytes),
                source.share,
            )
            for part, source, one in named
        ],
        explain=arguments.explain,
    )
    left_out = [file for file in left_out if not (is_path(file) and any(one.images is not None for one in found))]
    if left_out:
        shown = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
        print(f"\nleft out, as no data by their names: {shown}")
    print(f"\n{target} is written; next: torchmix index {target}, then torchmix check {target}")
