"""What a recipe says of the rows of a source: its checks, and what of it decides tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from shlex import quote
from typing import Literal

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.amounts import parse_fraction, percent_text
from torchmix.recipe.build import nearest
from torchmix.recipe.structs import Chat, Overflow, Packing, PathProperty, Quantiles, RowLayout, Source, Turn

# --- What kind of tokenizer a source's `tokenizer` names.
#
# The words alone decide, before anything is opened.
#
# The recipe's fingerprint holds only the kind of a tokenizer: the path of a vocabulary must not decide the order, and
# its content is in the catalog's fingerprint.

TokenizerKind = Literal["bytes", "file", "tiktoken"]

TIKTOKEN = "tiktoken:"
"""Prefix of the name of a tiktoken encoding."""
FILE_SUFFIX = ".json"


def tokenizer_kind(tokenizer: str) -> TokenizerKind | None:
    """`bytes`; `file` for the path of a tokenizer.json; `tiktoken` for the name of an encoding; else None."""
    if tokenizer == "bytes":
        return "bytes"
    if tokenizer.startswith(TIKTOKEN) and tokenizer != TIKTOKEN:
        return "tiktoken"
    if tokenizer.endswith(FILE_SUFFIX) and "\0" not in tokenizer:
        return "file"
    return None


# --- What happens to rows that cannot be read, and how many there may be.

DEFAULT_MAX_BAD = "0.1%"


def masks_bad_rows(source: Source) -> bool:
    """Whether rows that cannot be read are left out of training; else the first one is an error."""
    return source.bad_rows == "mask"


def masked_sources(sources: Mapping[str, Source]) -> frozenset[str]:
    """Names of the sources that mask bad rows."""
    return frozenset(name for name, source in sources.items() if masks_bad_rows(source))


def max_bad_of(source: Source) -> Fraction:
    """The part of a checked source that may be bad, in [0, 1]; 0 where the first bad row is an error."""
    if not masks_bad_rows(source):
        return Fraction(0)
    return parse_fraction(source.max_bad or DEFAULT_MAX_BAD, "max_bad")


# --- The function that rows of a source go through, and whether their ids are kept: `map` and `keep` of a recipe.

_WORDS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_map(source: Source, where: str) -> None:
    """Check `map` and `keep` of a source with columns, which stands at `where`; RecipeError at the first fault."""
    if source.keep is not None and source.tokens is not None and source.map is None:
        message = "lists of tokens are ids already, so there is nothing to keep; remove the key"
        raise RecipeError(message, f"{where}.keep")
    if source.map is not None:
        check_words(source.map, "mine.clean:licence", f"{where}.map")


def check_words(words: str, example: str, where: str) -> None:
    """Check what names a function, which stands at `where`; RecipeError if it cannot."""
    if not _WORDS.fullmatch(words):
        raise RecipeError(f"{words!r} names no function; write module:function, as {example}", where)


def maps_of(sources: Mapping[str, Source]) -> dict[str, str]:
    """The words of the function of each source that has one, by the source's name."""
    return {name: source.map for name, source in sources.items() if source.map is not None}


def takes_of(source: Source) -> Literal["text", "tokens"]:
    """What the column of a source holds."""
    return "tokens" if source.tokens is not None else "text"


# --- Which documents of a source are too long, what happens to these, and which ones are cut anywhere.


def overflow_of(source: Source, packing: Packing) -> Overflow:
    """What happens to documents of a source that are too long."""
    return source.packing.overflow or packing.overflow


def longest_of(source: Source, length: int) -> int:
    """Tokens of the longest document that is not too long, where samples have `length` tokens."""
    return min(source.packing.max_length or length, length)


def flows(source: Source) -> bool:
    """Whether its documents flow into what whole ones leave, and are cut anywhere."""
    return source.packing.method == "concat"


# --- What restarts where a document ends, and where a token inside a row ends one.
#
# Each of the three can be set without the others, like Megatron's `--reset-attention-mask`, `--reset-position-ids` and
# `--eod-mask-loss`.


def resets_attention(packing: Packing) -> bool:
    """Whether attention stops at the end of a document."""
    return packing.boundaries == "document"


def resets_positions(packing: Packing) -> bool:
    """Whether positions count from 0 in each document; else they count through a sample."""
    return (packing.positions or packing.boundaries) == "document"


def masks_resets(packing: Packing) -> bool:
    """Whether a `reset_id` has no label."""
    return packing.reset_loss == "mask"


def sources_with_resets(sources: Mapping[str, Source]) -> dict[str, int]:
    """The `reset_id` of each source that has one."""
    return {name: source.reset_id for name, source in sources.items() if source.reset_id is not None}


# --- Which rows of a source are used, and how a split cuts them.
#
# The rows of adjacent parts touch and never overlap; a split cuts where Megatron's `--split` with the same weights
# does, to the row, so both use doubles as it does.

PARTS = ("train", "validation", "test")
"""What a recipe can be used for, in the order of `split`."""


def fractions_of(source: Source) -> tuple[Fraction, Fraction]:
    """Where the used rows begin and end, as exact parts of all rows."""
    if source.documents is None:
        return Fraction(0), Fraction(1)
    start, stop = (parse_fraction(text, "documents") for text in source.documents)
    return start, stop


def rows_of(source: Source, num_rows: int) -> tuple[int, int]:
    """Rows used, as (start, stop).

    Each bound is the double nearest to its fraction, times the rows as a double, rounded half to even.
    `_build_megatron_dataset_splits` of Megatron-LM rounds in the same way (blended_megatron_dataset_builder.py).
    """
    start, stop = (round(float(bound) * float(num_rows)) for bound in fractions_of(source))
    return start, stop


def documents_of_split(split: Sequence[int | float], part: str) -> tuple[str, str] | None:
    """The `documents` of a part of a split; None where its weight is 0.

    The weights are divided by their sum and added up from the left, in doubles, as `parse_and_normalize_split` and
    `convert_split_vector_to_split_matrix` of Megatron-LM do (blended_megatron_dataset_config.py).
    """
    total = 0.0
    for weight in split:  # not `sum`, which rounds differently since Python 3.12
        total += float(weight)
    bounds = [0.0]
    for weight in split:
        bounds.append(bounds[-1] + float(weight) / total)
    place = PARTS.index(part)
    if place >= len(split) or bounds[place + 1] <= bounds[place]:
        return None
    # The shortest decimal that reads back as the same double.
    start, stop = (percent_text(Fraction(repr(bound))) for bound in bounds[place : place + 2])
    return start, stop


# --- What the files of a source are: said by its `format`, or by their names.
#
# Decided by the recipe alone, before anything is opened, so that all ranks and the fingerprint agree.
#
# `FORMATS` is the part of the table of formats that a recipe needs. How files of each are found, scanned and read is
# in the other part, `formats/table.py`.


class FormatNames(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe, and its reader, knows of a format."""

    title: str
    """What messages call its files."""
    suffixes: tuple[str, ...]
    """How the paths of a source end that does not say its `format`."""
    has_columns: bool = True
    """A source names the column that holds its documents, and what turns text into ids."""
    pages_as_one: int = 1
    """Pages that count as one of `shuffle.window_pages`, where a page is a single row."""


FORMATS: dict[str, FormatNames] = {
    "parquet": FormatNames(title="Parquet", suffixes=(".parquet", ".pq")),
    "megatron": FormatNames(title="Megatron's", suffixes=(".bin", ".idx"), has_columns=False),
    "jsonl": FormatNames(
        title="JSON lines",
        suffixes=tuple(f"{lines}{codec}" for lines in (".jsonl", ".ndjson", ".json") for codec in ("", ".gz", ".zst")),
    ),
    "arrow": FormatNames(title="Arrow", suffixes=(".arrow", ".feather", ".ipc")),
    "webdataset": FormatNames(title="WebDataset", suffixes=(".tar",), pages_as_one=64),
}
"""By the word that a recipe and the catalog use."""
DEFAULT_FORMAT = "parquet"
"""The format of a source without the key `format` whose files have other names, or names of several formats."""


UNPACKED_BY = {".gz": "gunzip", ".zst": "unzstd", ".bz2": "bunzip2", ".xz": "unxz", ".lz4": "unlz4", ".zip": "unzip"}
"""Programs that decompress files, by their suffix."""


def converted_csv(path: str) -> str:
    """The line of a shell that makes a file of Parquet of one or several of CSV, which are not read."""
    made = f"{path.partition('.csv')[0].partition('.tsv')[0].replace('*', 'all')}.parquet"
    return f"python -c \"import duckdb; duckdb.read_csv('{path}').write_parquet('{made}')\""


def how_to_convert(path: str) -> str | None:
    """Why a file is not read, by its name, and the line of a shell that makes one of it that is; None: it may be."""
    name = path.lower()
    packed = next((suffix for suffix in UNPACKED_BY if name.endswith(suffix)), None)
    if packed is not None:
        is_read = name.endswith(tuple(suffix for format in FORMATS.values() for suffix in format.suffixes))
        line = f"{UNPACKED_BY[packed]} {quote(path)}"
        return None if is_read else f"compressed files are JSON lines of .gz or .zst, and no others; unpack it: {line}"
    if name.endswith((".csv", ".tsv")):
        return f"CSV is not read; DuckDB makes Parquet of it: {converted_csv(path)}"
    if name.endswith((".txt", ".md")):
        made = f"{path.rpartition('.')[0].replace('*', 'all')}.jsonl"
        return (
            "plain text is not read, since nothing says where a document ends; if each line is one: "
            f"jq -cR '{{text: .}}' {quote(path)} > {quote(made)}"
        )
    return None


def paths_of(source: Source) -> tuple[str, ...]:
    """The paths and globs of a source, as the recipe gives them."""
    return (source.path,) if isinstance(source.path, str) else tuple(source.path)


def format_of(source: Source) -> str:
    """A key of `FORMATS`. Without a `format`, it is the one whose suffixes all paths have."""
    if source.format is not None:
        return source.format
    paths = paths_of(source)
    named = [name for name, format in FORMATS.items() if all(path.endswith(format.suffixes) for path in paths)]
    return named[0] if named and paths else DEFAULT_FORMAT


# --- What a source says of the properties of its rows: which columns, which parts of paths.
#
# One name is one property.

TOKENS = "tokens"
"""A property of every row: the number of its tokens."""
FOLDERS = "dir"
"""The word of `split_by` that makes a child of each folder."""
MOST_QUANTILES = 1000


def columns_of(source: Source) -> dict[str, str]:
    """Properties that are columns of the files: name to column, by sorted name. The `id` is one."""
    given = source.properties or ()
    columns = {name: name for name in given} if isinstance(given, tuple) else {}
    if isinstance(given, dict):
        columns = {name: column for name, column in given.items() if isinstance(column, str)}
    if source.id is not None:
        columns.setdefault(source.id, source.id)
    return {name: columns[name] for name in sorted(columns)}


def path_properties_of(source: Source) -> dict[str, str]:
    """Properties that follow from the path: name to regular expression, by sorted name."""
    given = source.properties
    if not isinstance(given, dict):
        return {}
    return {name: one.path for name, one in sorted(given.items()) if isinstance(one, PathProperty)}


def check_properties(source: Source, where: str) -> None:
    """Check what a source, which stands at `where`, says of properties.

    Raises:
        RecipeError: The first fault.
    """
    columns, paths = columns_of(source), path_properties_of(source)
    if isinstance(source.properties, tuple) and len(set(source.properties)) < len(source.properties):
        raise RecipeError("names a column twice", f"{where}.properties")
    for name, column in columns.items():
        if not name or not column:
            raise RecipeError("is empty; name a column", f"{where}.{'id' if source.id == '' else 'properties'}")
    for name in [*columns, *paths]:
        if name == TOKENS:
            message = "every row has the property tokens, the number of its tokens; give this one another name"
            raise RecipeError(message, f"{where}.properties")
    for name, pattern in paths.items():
        place = f"{where}.properties.{name}.path"
        if name == source.id:
            raise RecipeError("is the name of the id, too", place)
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise RecipeError(f"{pattern!r} is no regular expression: {error}", place) from None
        if groups != 1:
            raise RecipeError(f"{pattern!r} has {groups} groups; put what is to be the value in one (...)", place)
    cut = source.split_by
    if isinstance(cut, str) and cut != FOLDERS:
        message = f"{cut!r} is not {FOLDERS!r}; write it, or {{column: NAME, quantiles: 4}}"
        raise RecipeError(message, f"{where}.split_by")
    if isinstance(cut, Quantiles):
        if not 2 <= cut.quantiles <= MOST_QUANTILES:
            message = f"{cut.quantiles} is out of range; it must be in [2, {MOST_QUANTILES}]"
            raise RecipeError(message, f"{where}.split_by.quantiles")
        if not cut.column:
            raise RecipeError(f"is empty; name a property{nearest('', columns)}", f"{where}.split_by.column")


# --- What a recipe says of rows that are no plain text or ids: checks, templates by name, and what decides tokens.
#
# The words decide, before anything is opened.
#
# Templates follow the chat templates of the models that they are named after: ChatML is Qwen's, without a system
# message of its own. `plain` needs no special tokens.

ROLES = ("assistant", "system", "tool", "user")
"""Roles of the templates below."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the messages of a document."""

    turns: dict[str, Turn]
    """By role."""
    separator: str = ""
    """Behind each turn."""
    tokens: tuple[str, ...] = ()
    """Special tokens that it needs."""


TEMPLATES = {
    "plain": Template(turns={role: Turn(before=f"{role.capitalize()}: ", after="\n") for role in ROLES}),
    "chatml": Template(
        turns={role: Turn(before=f"<|im_start|>{role}\n", after="<|im_end|>") for role in ROLES},
        separator="\n",
        tokens=("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": Template(
        turns={
            role: Turn(
                before=f"<|start_header_id|>{'ipython' if role == 'tool' else role}<|end_header_id|>\n\n",
                after="<|eot_id|>",
            )
            for role in ROLES
        },
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
}


TEMPLATE_SUFFIXES = (".json", ".jinja")


def is_template_file(chat: Chat) -> bool:
    """Whether a template is that of a file."""
    return chat.template is not None and chat.template.endswith(TEMPLATE_SUFFIXES)


def template_of(chat: Chat) -> Template:
    """The template of a checked source, which is none of a file."""
    if chat.turns is not None:
        return Template(turns=chat.turns, separator=chat.separator or "")
    return TEMPLATES[chat.template or "plain"]


def layout_of(source: Source) -> RowLayout | None:
    """How rows of a checked source become documents; None for plain texts and ids."""
    if source.messages is not None:
        return RowLayout(rows="messages", chat=source.chat or Chat())
    if source.interleaved is not None:
        return RowLayout(rows="interleaved")
    return None if source.loss_mask is None else RowLayout(rows="tokens", loss_mask=source.loss_mask)


def column_of(source: Source) -> str | None:
    """The column that holds the documents; None in formats without columns."""
    return source.text or source.tokens or source.messages or source.interleaved


def check_layout(source: Source, where: str) -> None:
    """Check `messages`, `chat`, `interleaved` and `loss_mask` of a source; RecipeError at the first fault."""
    if source.chat is not None and source.messages is None:
        raise RecipeError("is of messages; name their column by messages, or remove it", f"{where}.chat")
    if source.loss_mask is not None:
        if source.tokens is None or source.map is not None:
            message = "says which ids of a column of tokens have loss; name that by tokens, without a map, or remove it"
            raise RecipeError(message, f"{where}.loss_mask")
        if not source.loss_mask:
            raise RecipeError("is empty; name a column", f"{where}.loss_mask")
    if source.chat is not None:
        _check_chat(source.chat, f"{where}.chat")


def _check_chat(chat: Chat, where: str) -> None:
    if chat.turns is not None and chat.template is not None:
        raise RecipeError("has a template by name and turns of its own; remove one", where)
    if chat.separator is not None and chat.turns is None:
        raise RecipeError("stands behind turns of one's own; add turns, or remove it", f"{where}.separator")
    if chat.turns is not None and not chat.turns:
        raise RecipeError("is empty; write before and after of each role", f"{where}.turns")
    if not chat.loss:
        raise RecipeError("is empty; name a role, as assistant", f"{where}.loss")
    if is_template_file(chat):
        return
    for key in ("tools", "variables"):
        if getattr(chat, key) is not None:
            message = "is for the template of a file; name that by template, or remove it"
            raise RecipeError(message, f"{where}.{key}")
    if chat.template is not None and chat.template not in TEMPLATES:
        known = sorted(TEMPLATES)
        raise RecipeError(
            f"{chat.template!r} is no template{nearest(chat.template, known)}; write {', '.join(known)}, or the "
            "path of a tokenizer_config.json or of a .jinja file",
            f"{where}.template",
        )
    roles = sorted(template_of(chat).turns)
    for role in chat.loss:
        if role not in roles:
            message = f"{role!r} is no role of the template, which has {', '.join(roles)}{nearest(role, roles)}"
            raise RecipeError(message, f"{where}.loss")


def order_of_layout(source: Source) -> list[object]:
    """What of it decides which tokens a document has; nothing for plain texts and ids. Loss decides no token."""
    layout = layout_of(source)
    if layout is None or layout.rows == "tokens":
        return []
    kept: dict[str, object] = {"rows": layout.rows, "column": column_of(source)}
    if layout.chat is not None and is_template_file(layout.chat):
        kept |= {"template": "file", "variables": layout.chat.variables}  # its content is in the catalog's transform
    elif layout.chat is not None:
        template = template_of(layout.chat)
        turns = {role: [turn.before, turn.after] for role, turn in template.turns.items()}
        kept |= {"turns": turns, "separator": template.separator}
    return [msgspec.to_builtins(kept)]
