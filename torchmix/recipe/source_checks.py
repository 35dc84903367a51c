"""What the values of one source, or of a selection of its rows, must mean.

In: Structs of the right shape, and where they stand. Out: nothing, or the first fault with its path of keys. Must hold:
as checks.py; what an expression of SQL means is checked where DuckDB is at hand, when the source is indexed. Cost:
microseconds a source.
"""

from __future__ import annotations

from collections.abc import Collection

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.shares import parse_fraction
from torchmix.recipe.source.bad_rows import masks_bad_rows
from torchmix.recipe.source.chat import check_layout
from torchmix.recipe.source.format import FORMATS, converted_csv, format_of, paths_of
from torchmix.recipe.source.images import check_images
from torchmix.recipe.source.properties import check_properties
from torchmix.recipe.source.row_map import check_map
from torchmix.recipe.source.tokenizer_kind import tokenizer_kind
from torchmix.recipe.structs import MAX_NAME_BYTES, Selection, Source

COLUMN_KEYS = ("text", "tokens", "messages", "interleaved")
TOKENIZERS = "bytes, tiktoken:NAME, or the path of a tokenizer.json"


def check_range(value: int, where: str, lowest: int, highest: int | None = None) -> None:
    if value < lowest or (highest is not None and value > highest):
        bounds = f"at least {lowest}" if highest is None else f"in [{lowest}, {highest}]"
        raise RecipeError(f"{value} is out of range; it must be {bounds}", where)


def check_source(name: str, source: Source, where: str) -> None:
    """Check one source, which stands at `where`; raises a RecipeError at the first fault."""
    _check_name(name, where)
    paths = paths_of(source)
    if not paths or not all(paths) or any("\0" in path for path in paths):
        raise RecipeError("is empty; name a file or a glob", f"{where}.path")
    if source.format is not None and source.format not in FORMATS:
        message = f"{source.format!r} is not one of {', '.join(FORMATS)}{nearest(source.format, FORMATS)}"
        if source.format.lower() in ("csv", "tsv"):
            message = f"CSV is not read; DuckDB makes Parquet of it: {converted_csv(paths[0])}"
        raise RecipeError(message, f"{where}.format")
    format = FORMATS[format_of(source)]
    if not format.has_columns:
        for key in (*COLUMN_KEYS, "loss_mask", "tokenizer", "begin_id", "end_id", "map", "keep"):
            if getattr(source, key) is not None:
                message = f"{format.title} files hold tokens and have no columns; remove the key"
                raise RecipeError(message, f"{where}.{key}")
    else:
        _check_column(source, where)
        _check_tokenizer(source, where)
        check_map(source, where)
    if source.reset_id is not None:
        check_range(source.reset_id, f"{where}.reset_id", 0, 2**31 - 1)
    if source.documents is not None:
        start, stop = (parse_fraction(text, f"{where}.documents[{i}]") for i, text in enumerate(source.documents))
        if not 0 <= start < stop <= 1:
            message = (
                f"{' to '.join(source.documents)} is no part of the rows; as [0%, 96.9%], the first below the second"
            )
            raise RecipeError(message, f"{where}.documents")
    if source.max_epochs is not None:
        check_range(source.max_epochs, f"{where}.max_epochs", 1)
    _check_bad_rows(source, where)
    check_layout(source, where)
    check_images(source, where)
    check_properties(source, where)


def check_selection(name: str, selection: Selection, sources: Collection[str], where: str) -> None:
    """Check one selection of rows of one of `sources`; raises a RecipeError at the first fault."""
    _check_name(name, where)
    if name in sources:
        raise RecipeError("the name is that of a source", where)
    if selection.source not in sources:
        hint = nearest(selection.source, sources)
        raise RecipeError(f"there is no source {selection.source!r} with files{hint}", f"{where}.from")
    if not selection.where.strip():
        raise RecipeError("is empty; write an SQL expression, as \"lang = 'de'\"", f"{where}.where")
    if selection.max_epochs is not None:
        check_range(selection.max_epochs, f"{where}.max_epochs", 1)


def _check_name(name: str, where: str) -> None:
    if not name.strip() or name != name.strip() or not name.isprintable() or "/" in name or "." in name:
        message = f"the name {name!r} is not usable: printable text without '/', '.' or outer spaces"
        raise RecipeError(message, where)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise RecipeError(f"the name has {len(name.encode())} bytes, at most {MAX_NAME_BYTES}", where)


def _check_bad_rows(source: Source, where: str) -> None:
    if source.max_bad is None:
        return
    if not masks_bad_rows(source):
        message = "bounds what bad_rows: mask leaves out; write bad_rows: mask, or remove it"
        raise RecipeError(message, f"{where}.max_bad")
    if not 0 <= parse_fraction(source.max_bad, f"{where}.max_bad") <= 1:
        raise RecipeError(f"{source.max_bad} is out of range; it must be from 0% to 100%", f"{where}.max_bad")


def _check_column(source: Source, where: str) -> None:
    given = [key for key in COLUMN_KEYS if getattr(source, key) is not None]
    if len(given) != 1:
        found = {0: "neither is given", 2: "both are given"}.get(len(given), f"{', '.join(given)} are given")
        hint = "" if given else " (a prefix of Megatron's .bin and .idx needs format: megatron)"
        words = "text and tokens" if set(given) <= {"text", "tokens"} else ", ".join(COLUMN_KEYS)
        raise RecipeError(f"exactly one of {words} names the column; {found}{hint}", where)
    if not getattr(source, given[0]):
        raise RecipeError("is empty; name a column", f"{where}.{given[0]}")


def _check_tokenizer(source: Source, where: str) -> None:
    if source.tokens is None and source.tokenizer is None and source.map is None:
        raise RecipeError(f"a text column needs a tokenizer; write {TOKENIZERS}", f"{where}.tokenizer")
    for key in ("tokenizer", "begin_id", "end_id"):
        if source.tokens is not None and source.map is None and getattr(source, key) is not None:
            message = f"a column of tokens is used as it is; remove {key}, or name the column by text"
            raise RecipeError(message, f"{where}.{key}")
    kind = "bytes" if source.tokenizer is None else tokenizer_kind(source.tokenizer)
    if kind is None:
        raise RecipeError(f"{source.tokenizer!r} is no tokenizer; write {TOKENIZERS}", f"{where}.tokenizer")
    for key in ("begin_id", "end_id"):
        token = getattr(source, key)
        if token is not None and kind == "bytes":
            message = "bytes has no ids of a vocabulary, and ends each document with 256; remove the key"
            raise RecipeError(message, f"{where}.{key}")
        if isinstance(token, int):
            check_range(token, f"{where}.{key}", 0, 2**31 - 1)
        elif token == "":
            raise RecipeError("is empty; name a token, or give its id", f"{where}.{key}")
