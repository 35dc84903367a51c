"""`torchmix init FILE...`: a recipe for data files as they lie."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from glob import escape, has_magic
from pathlib import Path, PurePosixPath
from shlex import quote

import msgspec
import pyarrow as pa
from pyarrow import fs

from torchmix.cli.init.choose import (
    TOKENIZERS,
    ItemTokens,
    chat_template,
    choose_items,
    choose_tokenizer,
    item_keys,
    item_tokens,
    tokenizer_keys,
)
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
from torchmix.formats.jsonl.frames import codec_of_name
from torchmix.formats.look import FIRST_BYTES, ID_BYTES, known_by, open_input
from torchmix.formats.source import FoundColumn
from torchmix.formats.table import refuse_other_names, row_of
from torchmix.modalities.table import KINDS, kind_named
from torchmix.recipe.amounts import apportioned, bytes_text
from torchmix.recipe.build import nearest
from torchmix.recipe.items import key_of_items, option_of_items
from torchmix.recipe.load import load_recipe
from torchmix.recipe.sources import DEFAULT_FORMAT, FORMATS, PARTS, how_to_convert
from torchmix.storage.find_files import find_files, objects_below
from torchmix.storage.stores import is_uri, open_store

# --- A look at one file of a source: its columns, and how much of it is what one trains on.
#
# Only a footer, a schema or the first lines are read. Cost: one or two reads.


def look_at(file: str, format: str) -> list[FoundColumn]:
    """The columns of a file, in its order; of a Megatron dataset one without a name.

    Raises:
        SourceUnreadable: It cannot be opened, or is of another format.
    """
    if format == DEFAULT_FORMAT:
        refuse_other_names(file, file)
    try:
        return list(row_of(format).look(file))
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise SourceUnreadable(f"{file}: cannot be looked at as {format}: {_known(file, format) or reason}") from None


def _known(file: str, format: str) -> str:
    """What a file that cannot be looked at is in truth; nothing where that is not known."""
    if not is_uri(file) and Path(file).is_symlink() and not Path(file).exists():
        return f"it is a link to {Path(file).readlink()}, which is missing"
    try:
        with open_input(file) as stream:
            return known_by(stream.read(FIRST_BYTES), codec_of_name(file) or format)
    except OSError:
        return ""


def sizes_of(files: Sequence[str]) -> list[int]:
    """Bytes of each file, of one store or of this machine; 0 of a link to nowhere."""
    if is_uri(files[0]):
        store = open_store(files[0])
        return [info.size or 0 for info in store.system.get_file_info([store.path(file) for file in files])]
    return [info.size or 0 for info in fs.LocalFileSystem().get_file_info(list(files))]


# --- Files, folders, globs and URIs of a command line -> the sources that they seem to be.
#
# Files are of one group if they lie in one folder, are of one format, and their names differ in numbers alone, as the
# shards of one data set do; nothing is opened. Cost: one listing of each folder.

MANY_USES = (".json", ".json.gz", ".json.zst", ".bin")
"""In a folder these are often something else; they are taken where they are named, and .bin where its .idx is."""
CACHES = re.compile(r"cache-[0-9a-f]{16}.*\.arrow")
"""What Hugging Face's `datasets` keeps beside a data set: rows of it in another order, or mapped, once more."""
OF_NUMBERS = re.compile(r"\d+|of|[a-z]?\d{3,}|(?=[a-f]*\d)[0-9a-f]{8,}|snappy|zstd|gzip|lz4|brotli", re.IGNORECASE)
"""A word of a file's name that only tells shards apart, or how they are compressed: 00001, of, c000, a hash."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
SAYS_NOTHING = {"", "data", "part", "file", "files", "shard", "chunk", "train", "training", "output", "text", "default"}
PART_OF_WORD = dict.fromkeys(("validation", "valid", "val", "dev"), "validation") | {"test": "test"}
PREPROCESSED = "_text_document"
"""What Megatron's tools/preprocess_data.py adds to most names."""


class FileGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Files that seem to be one source."""

    name: str
    """What they are called; another group may be called the same."""
    part: str
    """`train`, or `validation` or `test` where their names say so."""
    format: str
    files: tuple[str, ...]
    """Absolute paths or URIs, sorted."""
    pattern: str | None
    """A glob that matches these and no others; None if there is no simple one."""
    is_chosen: bool = True
    """Whether the user named them, or a glob of them, and not a folder that has them."""


def find_groups(words: Sequence[str]) -> tuple[list[FileGroup], list[str]]:
    """The groups of all files that are named, and the files in named folders that are no data.

    Raises:
        SourceUnreadable: A word leads to no file, with the names that come nearest.
    """
    found: dict[str, bool] = {}
    """By file, whether the user named it."""
    left_out: list[str] = []
    for word in words:
        files, others, is_folder = _files_of(word)
        found |= {file: found.get(file, False) or not is_folder for file in files}
        left_out += others
    by_key: dict[tuple[str, str, str], list[str]] = {}
    for file in sorted(found):
        folder, name = os.path.split(file)
        by_key.setdefault((folder, format_of_name(name), _stem(name)), []).append(file)
    for folder, format, stem in sorted(by_key):  # web0, web1: digits at the end of a word, if there are several
        short = (folder, format, stem.rstrip("0123456789"))
        alike = [key for key in by_key if (*key[:2], key[2].rstrip("0123456789")) == short]
        if len(alike) > 1:
            by_key[short] = sorted(file for key in alike for file in by_key.pop(key))
    split = _split_by_name(by_key)
    groups = [
        FileGroup(
            name=split[folder, format, stem][0] if (folder, format, stem) in split else _name(folder, stem),
            part=split[folder, format, stem][1] if (folder, format, stem) in split else _part(folder, stem),
            format=format,
            files=tuple(files),
            pattern=_pattern(files, words),
            is_chosen=any(found[file] for file in files),
        )
        for (folder, format, stem), files in sorted(by_key.items())
    ]
    return groups, sorted(set(left_out) - set(found))


def format_of_name(name: str) -> str:
    """The format that a file's name tells; what has no known end is taken for Parquet."""
    return next((format for format, held in FORMATS.items() if name.lower().endswith(held.suffixes)), DEFAULT_FORMAT)


def _suffixes() -> list[str]:
    return [suffix for format in FORMATS.values() for suffix in format.suffixes]


def _files_of(word: str) -> tuple[list[str], list[str], bool]:
    """Files that a word names, those of a folder that it names which are no data, and whether it names a folder."""
    if is_uri(word):
        below = objects_below(word)
    else:
        path = Path(word).expanduser()
        below = _files_below(path) if path.is_dir() else None
        word = str(path)
    if below is not None:
        files = [file for file in below if _is_data(file, below)]
        if not files:
            shown = ", ".join(sorted(PurePosixPath(file).name for file in below)[:5])
            ends = ", ".join(suffix for suffix in _suffixes() if suffix not in (*MANY_USES, ".idx"))
            raise SourceUnreadable(
                f"{word}: the folder holds no data files ({shown or 'it is empty'}); data files end in {ends}, or are "
                f"a .bin beside its .idx{_way_out(below)}"
            )
        known = set(files) | {file.removesuffix(".bin") + ".idx" for file in files}
        return files, [file for file in below if file not in known], True
    try:
        matches = find_files(word, [word], Path.cwd())
    except SourceUnreadable as error:
        raise SourceUnreadable(str(error).removeprefix(f"source {word!r}: ")) from None
    files = [file if is_uri(file) else os.path.normpath(Path.cwd() / file) for file in matches]
    return [file.removesuffix(".idx") + ".bin" if file.endswith(".idx") else file for file in files], [], False


def _way_out(files: Sequence[str]) -> str:
    """What to do with files of which none is data by its name."""
    for file in files:
        several = str(PurePosixPath(file).with_name(f"*{''.join(PurePosixPath(file).suffixes)}"))
        if file.lower().endswith(MANY_USES) and not file.lower().endswith(".bin"):
            return f". What ends in .json is taken where it is named: torchmix init {quote(several)}"
        if (converted := how_to_convert(several)) is not None:
            return f". {converted[:1].upper()}{converted[1:]}"
    return ""


def _files_below(folder: Path) -> list[str]:
    """All files below a folder whose names, and those of their folders, do not begin with a dot."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.abspath(os.path.join(place, name)) for name in names if not name.startswith(".")]  # noqa: PTH100, PTH118
    return sorted(found)


def _is_data(file: str, others: Iterable[str]) -> bool:
    name = file.lower()
    if name.endswith(".bin"):
        return file.removesuffix(".bin") + ".idx" in others
    if CACHES.fullmatch(PurePosixPath(name).name):
        return False
    return not name.endswith((*MANY_USES, ".idx")) and name.endswith(tuple(_suffixes()))


def _stem(name: str) -> str:
    """A file's name without its format and what only tells shards apart."""
    ends = sorted(_suffixes(), key=len, reverse=True)
    stem = next((name[: -len(end)] for end in ends if name.lower().endswith(end)), name).removesuffix(PREPROCESSED)
    kept = re.split(r"([-_.]+)", UUID.sub("0", stem))
    words = [(word, kept[i - 1] if i else "") for i, word in enumerate(kept) if i % 2 == 0]
    words = [(word, before) for word, before in words if not OF_NUMBERS.fullmatch(word)]
    return "".join(before * bool(i) + word for i, (word, before) in enumerate(words)).strip("-_.")


def _name(folder: str, stem: str) -> str:
    """The stem, or where it says nothing the nearest folder's name that says something."""
    for name in (stem, *reversed(PurePosixPath(folder.replace(os.sep, "/")).parts)):
        if name.lower() not in SAYS_NOTHING | PART_OF_WORD.keys() and name.strip("/:."):
            return name
    return stem or "data"


OF_PART = re.compile(rf"(.+)[-_.](train|training|{'|'.join(PART_OF_WORD)})", re.IGNORECASE)
"""A stem that ends with a part's name: wikitext-train, wikitext-validation."""


def _split_by_name(keys: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Name and part of each file that belongs to a part: wiki-validation does where wiki-train stands beside it."""
    alike: dict[tuple[str, str, str], dict[tuple[str, str, str], str]] = {}
    for folder, format, stem in keys:
        if (match := OF_PART.fullmatch(stem)) is not None:
            part = PART_OF_WORD.get(match[2].lower(), "train")
            alike.setdefault((folder, format, match[1]), {})[folder, format, stem] = part
    return {
        key: (beginning[2], part)
        for beginning, parts in alike.items()
        if "train" in parts.values()
        for key, part in parts.items()
        if len(parts) > 1
    }


def _part(folder: str, stem: str) -> str:
    for word in (stem.lower(), PurePosixPath(folder).name.lower()):
        if word in PART_OF_WORD:
            return PART_OF_WORD[word]
    return "train"


def _pattern(files: Sequence[str], words: Sequence[str]) -> str | None:
    """A glob for files of one folder, if it matches nothing else."""
    if len(files) == 1:
        return None
    folder = os.path.dirname(files[0])  # noqa: PTH120 - a URI may be no path
    names = [os.path.basename(file) for file in files]  # noqa: PTH119
    begin = _shared_begin(names)
    end = _shared_begin([name[len(begin) :][::-1] for name in names])[::-1]
    guesses = [word for word in words if has_magic(word) and is_uri(word)]
    guesses.append(f"{folder}/{escape(begin)}*{escape(end)}")
    for guess in guesses:
        try:
            matches = find_files("", [guess], Path.cwd())
        except SourceUnreadable:
            continue
        if sorted(matches) == list(files):
            return guess
    return None


def _shared_begin(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    first, last = min(texts), max(texts)
    differs = (i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(differs, min(len(first), len(last)))]


# --- `torchmix init FILE...`: a recipe for data files as they lie.
#
# What was guessed is said, where the user can change it; a tokenizer is given or asked for, never guessed. Cost: one
# look at one file of each source.

LENGTH, SAMPLES = 512, 16
"""Small enough that a laptop trains on the first batch."""
USUAL_COLUMNS = (
    *("input_ids", "tokens", "token_ids", "ids", "text", "content", "raw_content", "body", "document"),
    *("messages", "conversations", "caption", "txt", "json.caption", "json.text"),
)
"""From the likeliest on; a column of tokens needs no tokenizer."""
ID_COLUMNS = ("id", "_id", "uuid", "doc_id", "document_id", "url")
"""Columns of strings that usually differ from row to row."""
SHARE_UNITS = 10_000
"""Parts of the whole in which shares by size are given: hundredths of a percent."""
TAIL = """\
# split: [99, 1, 0]           # train, validation and test: cuts the rows of every source
# vocab_size: 50257           # of the model; then check compares it with tokenizers and with the ids of the data
packing:
  method: best_fit            # documents stay whole where they fit a sample; concat cuts the stream every length tokens
  overflow: split             # of longer documents; or truncate, drop, error
  boundaries: document        # attention and positions stop where a document does; none lets them continue
  align_tokens: 8             # of each piece; 2 x cp or a multiple lets context parallelism slice each document
# balance: {method: rows, model: {layers: 32, hidden: 4096, ffn: 11008, heads: 32}}   # like work on all ranks
shuffle: {window_pages: 256, window_bytes: 64MiB}   # how far rows travel; fixed when the source is indexed
read: {cache: 1GiB}           # decoded pages kept in each process that reads; no part of the order
"""
COLUMNS = {
    "source": "the name of a source in the recipe",
    "part": "what reads it: train, validation or test; with split, a source of train is read by all three",
    "format": "what its files are",
    "column": "the column that is read, and those of its images; -: there are none, as in Megatron's .bin",
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
    items: dict[str, FoundColumn]
    """The columns of its items, by kind."""

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
    for kind in sorted(KINDS):
        named = f"column of {kind}s, or of their paths, likewise"
        files.add_argument(f"--{option_of_items(kind)}", metavar="COLUMN", help=named)
        files.add_argument(f"--{kind}-token", metavar="T", help=f"token that stands for a part of one {kind}, likewise")
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
    found, empty, other = list[_FoundGroup](), list[str](), list[str]()
    for group in groups:
        seen = _seen(group)
        if seen is None:
            empty += group.files
        elif not seen[1] and not group.is_chosen:
            other += group.files
        else:
            found.append(_look(group, *seen, arguments, taken))
    if not found:
        raise SourceUnreadable(_nothing(empty, other))
    if not any(one.group.part == "train" for one in found):
        raise OptionError("all files are of validation or test by their names; rename those to train on")
    with_text = [one.name for one in found if one.is_text]
    if arguments.tokenizer is not None and not with_text:
        raise OptionError("--tokenizer: no source has text; the columns hold ids already; leave it out")
    tokenizer = choose_tokenizer(arguments.tokenizer, with_text) if with_text else None
    keys = tokenizer_keys(tokenizer, arguments.end_id, target) if tokenizer is not None else ()
    kinds = sorted({kind for one in found for kind in one.items})
    given = {kind: _given(arguments, f"{kind}-token") for kind in kinds}
    tokens = item_tokens(tokenizer, given) if tokenizer is not None else {}
    for kind in sorted(KINDS):
        option = option_of_items(kind)
        if kind not in kinds and (_given(arguments, option) or _given(arguments, f"{kind}-token")):
            raise OptionError(
                f"--{option}: no {kind}s were found: neither bytes that begin as {kind}s do, nor their paths"
            )
    modules = [f"  {line}" for kind in kinds for line in kind_named(kind).draft.module]
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
        length=arguments.seq_length or _length(found),
        length_comment="tokens of a sample"
        if arguments.seq_length
        else "tokens of a sample; this default suits a laptop"
        if _length(found) == LENGTH
        else "tokens of a sample, in which the items that were seen have room",
        samples=arguments.global_batch_size or SAMPLES,
        samples_comment="samples of a step, over all ranks"
        + ("" if arguments.global_batch_size else "; this default suits a laptop"),
        parts=parts,
        sources_comment="a source's name is its identity: another name is another order",
        mixture_comment="shares of trained tokens; here by size, so that all sources last about equally long",
        split=None if arguments.split is None else parse_split(arguments.split),
        split_comment="Train, validation and test: the rows of every source are cut in this ratio.",
        tail=[
            *TAIL.splitlines()[arguments.split is not None or len(parts) > 1 :],
            *(["modules:"] if modules else ()),
            *modules,
        ],
    )
    write_recipe(target, yaml_of(draft))
    _tell(
        arguments,
        parts,
        found,
        {"no data by their names": left_out, "empty": empty, "without text, ids or messages": other},
    )
    return ExitCode.OK


def _length(found: Sequence[_FoundGroup]) -> int:
    """Tokens of a sample: the default, doubled until a usual item is at most four fifths of it."""
    of_items = [
        column.item_tokens or kind_named(kind).usual_tokens(b"") for one in found for kind, column in one.items.items()
    ]
    length = LENGTH
    while length < 1.25 * max(of_items, default=0):
        length *= 2
    return length


def _given(arguments: argparse.Namespace, option: str) -> str | None:
    """What an option of a kind of items says."""
    value: str | None = getattr(arguments, option.replace("-", "_"))
    return value


LOOKED_AT_FILES = 8
"""Files of a source that are looked at, until one has rows of something to train on."""


def _seen(group: FileGroup) -> tuple[str, list[FoundColumn], int] | None:
    """The file of a group that is looked at, its columns, and the bytes of all; None: all are empty."""
    sizes = sizes_of(group.files)
    files = [file for file, size in zip(group.files, sizes, strict=True) if size or _is_link(file)]
    seen: tuple[str, list[FoundColumn], int] | None = None
    for file in files[:LOOKED_AT_FILES]:
        columns = look_at(file, group.format)
        if columns or seen is None:
            seen = file, columns, sum(sizes)
        if any(column.per_byte or column.kind == "item paths" for column in columns):
            break
    return seen


def _is_link(file: str) -> bool:
    return not is_uri(file) and Path(file).is_symlink()


def _nothing(empty: Sequence[str], other: Sequence[str]) -> str:
    """Why no file can be trained on."""
    if not other:
        return f"{_some(empty)}: empty; write something into a file, or name others"
    return f"{_some(other)}: no column of text, of lists of integers, or of messages; name other files"


def _some(files: Sequence[str]) -> str:
    return ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")


def _look(
    group: FileGroup,
    file: str,
    seen: Sequence[FoundColumn],
    num_bytes: int,
    arguments: argparse.Namespace,
    taken: set[str],
) -> _FoundGroup:
    items: dict[str, FoundColumn] = {}
    for kind in sorted(KINDS):
        chosen = choose_items(seen, kind, file, _given(arguments, option_of_items(kind)))
        if chosen is not None:
            items[kind] = chosen
    column = _choose([column for column in seen if not column.items], group, file, arguments, items)
    if column.kind == "tokens":
        items = {}
    return _FoundGroup(
        group=group,
        name=free_name(group.name if group.part == "train" else f"{group.name}-{group.part}", taken),
        num_bytes=num_bytes,
        column=column,
        others=tuple(other.name for other in seen if other is not column and other not in items.values()),
        items=items,
    )


def _choose(
    columns: Sequence[FoundColumn],
    group: FileGroup,
    file: str,
    arguments: argparse.Namespace,
    items: Mapping[str, FoundColumn],
) -> FoundColumn:
    """The column that is meant."""
    if not FORMATS[group.format].has_columns:
        return columns[0]
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
    if not columns and items:
        kind, of_kind = next(iter(items.items()))
        message = f"{file} has {kind}s in {of_kind.name}, and no text beside them; {kind}s are trained on with a text"
        raise SourceUnreadable(f"{message}: write one for each, as a caption, or leave it out")
    if not columns:
        raise SourceUnreadable(f"{file} has no column of text, or of lists of integers; leave it out")
    usual = [column for name in USUAL_COLUMNS for column in columns if column.name == name]
    if not usual and len(columns) > 1:
        raise OptionError(
            f"{file} has {held}; say which one to train on with --text, --tokens or --messages. Columns are not "
            "joined: a prompt and its answer are written as one column, messages: docs/moving.md#hugging-face-datasets"
        )
    return (usual or list(columns))[0]


def _sources(
    found: Sequence[_FoundGroup],
    keys: tuple[tuple[str, str], ...],
    tokens_of_items: Mapping[str, ItemTokens],
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
            chat = chat_template(tokenizer, arguments.recipe, has_items=bool(one.items))
            column_keys = (*column_keys, ("chat", f"{{template: {chat}}}"))
        own: list[str] = []
        """Kinds below `items`."""
        for kind, of_items in one.items.items():
            value, note = item_keys(of_items, group.files[0], tokens_of_items[kind], arguments.recipe, words)
            if key_of_items(kind) == option_of_items(kind):
                column_keys = (*column_keys, (key_of_items(kind), value))
            else:
                own.append(f"{kind}: {value}")
            notes += [note] if note else []
        if own:
            column_keys = (*column_keys, ("items", "{" + ", ".join(own) + "}"))
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
    """Percentages by size; each is above 0."""
    sizes = [max(1, size) for size in sizes]
    units = apportioned([SHARE_UNITS * size for size in sizes], sum(sizes), SHARE_UNITS)
    return [f"{unit / 100:g}%" for unit in units]


def _is_named(group: FileGroup) -> bool:
    """Whether a recipe knows the format by the names of the files."""
    is_lower = FORMATS[group.format].has_columns and group.files[0] == group.files[0].lower()
    return group.format == DEFAULT_FORMAT or is_lower


def _num_tokens(found: _FoundGroup, tokenizer: str | None) -> int:
    held = found.num_bytes * found.column.per_byte
    if found.is_text and tokenizer != "bytes":
        held /= ID_BYTES
    return round(held + sum(found.num_bytes * one.per_byte for one in found.items.values()))


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
    left_out: Mapping[str, Sequence[str]],
) -> None:
    """Say what was written; `left_out`: by the reason, files that no source has."""
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
                        "items": {kind: of_items.name for kind, of_items in one.items.items()},
                        "num_files": len(one.group.files),
                        "num_bytes": one.num_bytes,
                        "share": source.share,
                    }
                    for part, source, one in named
                ],
                "left_out": sorted(file for files in left_out.values() for file in files),
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
                " + ".join([one.column.name or "-", *(of_items.name for of_items in one.items.values())]),
                str(len(one.group.files)),
                bytes_text(one.num_bytes),
                source.share,
            )
            for part, source, one in named
        ],
        explain=arguments.explain,
    )
    of_items = {kind for one in found for kind in one.items}
    print()
    for reason, files in left_out.items():
        shown = [file for file in files if not any(kind_named(kind).seems_path(file) for kind in of_items)]
        if shown:
            print(f"left out, as {reason}: {_some(shown)}")
    print(f"{target} is written; next: torchmix index {target}, then torchmix check {target}")
