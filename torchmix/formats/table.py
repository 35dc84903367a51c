"""The table of formats: how files of each are found, scanned and read.

A format that cannot be read is named before anything is opened.

A new format is a folder whose `source.py` implements `FormatSource` and has a `FORMAT`, and a row of the table: its
half in `recipe/sources.py` says what a recipe needs to know, its half here where the module is. A format is imported
when it is first met, so that a process without such files does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np

from torchmix.catalog.settings import ITEM_BYTES, MapEntry, SourceSettings
from torchmix.errors import CatalogStale, SourceUnreadable
from torchmix.formats.column import Kind
from torchmix.formats.documents import CutIds, IndexedItems, LaidOutTexts, LossMasked
from torchmix.formats.items import ItemColumn, placed_column
from torchmix.formats.kept_ids import FORMAT as KEPT_IDS
from torchmix.formats.source import FormatRow, FormatSource
from torchmix.lazy_names import of_table
from torchmix.modalities.table import open_modalities, open_modality
from torchmix.recipe.sources import DEFAULT_FORMAT, FORMATS, how_to_convert
from torchmix.recipe.structs import Fim, ItemWords, RowLayout
from torchmix.storage.stores import place_of
from torchmix.transform.bytes_tokenizer import BYTES, RawBytes
from torchmix.transform.documents.layout import LossFlags, open_layout
from torchmix.transform.fim import FimOfIds
from torchmix.transform.maps import MapEncoder, RowMap
from torchmix.transform.open_tokenizer import Tokenizers
from torchmix.transform.tokenizer import Tokenizer

READ_AS: dict[str, str] = {
    "parquet": "torchmix.formats.parquet.source:FORMAT",
    "megatron": "torchmix.formats.megatron.source:FORMAT",
    "jsonl": "torchmix.formats.jsonl.source:FORMAT",
    "arrow": "torchmix.formats.arrow.source:FORMAT",
    "webdataset": "torchmix.formats.webdataset.source:FORMAT",
}
"""By the keys of the recipe's `FORMATS`: module and name of a `FormatRow`."""

NOT_READ = {
    ".csv": "CSV",
    ".tsv": "CSV",
    ".txt": "text",
    ".md": "text",
    ".npy": "NumPy",
    ".mds": "MDS",
    ".zip": "zip",
    ".orc": "ORC",
    ".avro": "Avro",
}
"""By their suffix, files that no format above reads."""
COMPRESSIONS = {".gz", ".zst", ".bz2", ".xz", ".lz4"}


class Reading(Protocol):
    """What decides how a source is read: settings of a recipe, or a source of a catalog."""

    @property
    def format(self) -> str:
        """What its files are."""

    @property
    def column(self) -> str | None:
        """The column that holds its documents; None in formats without columns."""

    @property
    def tokenizer(self) -> str | None:
        """What turns text into ids; None where the files hold ids."""

    @property
    def begin_id(self) -> int | str | None:
        """What stands before the ids of a text."""

    @property
    def end_id(self) -> int | str | None:
        """What stands after the ids of a text."""

    @property
    def fim(self) -> Fim | None:
        """Fill in the middle of its texts."""

    @property
    def map(self) -> MapEntry | None:
        """The function that rows go through."""

    @property
    def items(self) -> Mapping[str, ItemWords]:
        """Items in its texts, or those that the column holds, by kind."""

    @property
    def layout(self) -> RowLayout | None:
        """How rows become documents that are no plain texts or ids."""


def find_source_files(name: str, settings: SourceSettings, directory: Path) -> list[str]:
    """Find the data files of a source; `directory` is the recipe's.

    Returns:
        Paths, relative where the recipe's are, sorted by code point, each file once.

    Raises:
        SourceUnreadable: A path that leads to no file, with the names that come nearest.
    """
    return _row(name, settings.format).find(name, settings.patterns, directory)


def choose_source(
    name: str,
    reading: Reading,
    paths: Iterable[str],
    tokenizers: Tokenizers,
    row_map: RowMap | None = None,
    tables: IndexedItems | None = None,
) -> FormatSource:
    """Choose how a source is read.

    Args:
        name: The source.
        reading: What is known of it.
        paths: Its files.
        tokenizers: Opens its tokenizer, if it has one.
        row_map: The function that its rows go through, if it has one; the caller has it from a recipe.
        tables: The items of its files, where they are to be scanned.

    Raises:
        SourceUnreadable: A file is of a format that is not read, or the tokenizer cannot be.
        RecipeError: The tokenizer's package is missing, or it lacks a token that the recipe names.
    """
    row = _row(name, reading.format)
    if reading.format == DEFAULT_FORMAT:
        for path in paths:
            refuse_other_names(f"source {name!r}: {path}", path)
    if not FORMATS[reading.format].has_columns:
        return _cut(reading, row.make_source(name=name))
    if reading.tokenizer == ITEM_BYTES:
        return _item_column(name, reading, tokenizers)
    if reading.items or (reading.layout is not None and reading.layout.rows != "tokens"):
        return _laid_out(name, reading, tokenizers, tables, _encoder_of_map(name, reading, row_map, None))
    kind: Kind = "tokens" if reading.tokenizer is None else "text"
    tokenizer: Tokenizer | None = None
    if reading.tokenizer is not None:
        tokenizer = tokenizers.open(
            name, reading.tokenizer, begin_id=reading.begin_id, end_id=reading.end_id, fim=reading.fim
        )
    encoder = _encoder_of_map(name, reading, row_map, tokenizer)
    if encoder is not None:
        kind = encoder.takes
    source = row.make_source(name=name, column=reading.column, kind=kind, tokenizer=tokenizer or BYTES, map=encoder)
    if reading.layout is None or reading.layout.loss_mask is None:
        return _cut(reading, source) if kind == "tokens" else source
    mask = reading.layout.loss_mask

    def make_flags(flags: LossFlags) -> FormatSource:
        return row.make_source(name=name, column=mask, kind="flags", tokenizer=flags)

    return LossMasked(name=name, ids=source, column=mask, make_flags=make_flags)


def _cut(reading: Reading, source: FormatSource) -> FormatSource:
    """A source of ids, some of which are cut in three."""
    return source if reading.fim is None else CutIds(name=source.name, ids=source, encoder=FimOfIds(fim=reading.fim))


def _encoder_of_map(
    name: str, reading: Reading, row_map: RowMap | None, tokenizer: Tokenizer | None
) -> MapEncoder | None:
    if reading.map is None:
        return None
    if row_map is None or row_map.words != reading.map.function:
        raise CatalogStale(
            f"source {name!r}: its rows went through the map {reading.map.function!r} when they were indexed, and "
            "no recipe names it here; open it with the recipe, or run torchmix index"
        )
    return MapEncoder(map=row_map, column=str(reading.column), takes=reading.map.takes, tokenizer=tokenizer)


def _item_column(name: str, reading: Reading, tokenizers: Tokenizers) -> FormatSource:
    """The items of a source, as a source of their own."""
    [words] = reading.items.values()
    make = _row(name, reading.format).make_source
    owner = name.removeprefix(".").removesuffix(f".{words.kind}")
    folder = None if words.folder is None else place_of(tokenizers.directory, words.folder)

    def make_column(column: str, raw: RawBytes) -> FormatSource:
        return make(name=owner, column=placed_column(column, words.place), kind="values", tokenizer=raw)

    modality = open_modality(owner, words)
    return ItemColumn(name=name, words=words, folder=folder, modality=modality, make=make_column)


def _laid_out(
    name: str,
    reading: Reading,
    tokenizers: Tokenizers,
    tables: IndexedItems | None,
    mapped: MapEncoder | None,
) -> FormatSource:
    """A source with items in its texts, or of chats."""
    make = _row(name, reading.format).make_source
    assert reading.tokenizer is not None and reading.column is not None, "a recipe with items has texts"
    kind: Kind = "text" if reading.layout is None else "json"
    layout = open_layout(
        name,
        reading.layout,
        reading.items,
        tokenizers,
        tokenizer=reading.tokenizer,
        begin_id=reading.begin_id,
        end_id=reading.end_id,
    )
    place = next((words.place for words in reading.items.values() if words.place is not None), None)

    def make_texts(column: str, tokenizer: Tokenizer) -> FormatSource:
        return make(name=name, column=placed_column(column, place), kind=kind, tokenizer=tokenizer)

    return LaidOutTexts(
        name=name,
        column=reading.column,
        layout=layout,
        modalities=open_modalities(name, reading.items),
        make=make_texts,
        map=mapped,
        tables=None if tables is None else {kind: tables.of_source(name, kind) for kind in reading.items},
    )


def row_of(format: str) -> FormatRow:
    """How files of a format of the table are read."""
    found: FormatRow = of_table(READ_AS[format])
    return found


def type_in_file(format: str, schema: bytes) -> np.dtype[np.integer[Any]] | None:
    """Type of the tokens of a file that holds all of them as they are; None where pages are decoded."""
    read = row_of("megatron" if format == KEPT_IDS else format).type_in_file
    return None if read is None else read(schema)


def files_beside(format: str, path: str) -> tuple[str, ...]:
    """Files that the fingerprint of the one at `path` covers, too."""
    companion = row_of(format).companion
    return () if companion is None else (companion(path),)


def _row(name: str, format: str) -> FormatRow:
    if format not in READ_AS:
        raise SourceUnreadable(f"source {name!r}: this torchmix reads no {format}; update it")
    return row_of(format)


def refuse_other_names(what: str, path: str) -> None:
    """Raise SourceUnreadable, which begins with `what`, for a file that is not of the default format by its name."""
    known = {end: format.title for key, format in FORMATS.items() for end in format.suffixes if key != DEFAULT_FORMAT}
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    other = (known | NOT_READ).get(suffixes[-1]) if suffixes else None
    if (converted := how_to_convert(path)) is not None:
        raise SourceUnreadable(f"{what}: {converted}")
    if other is not None:
        raise SourceUnreadable(
            f"{what} is {other} by its name, and this source counts as "
            f"{FORMATS[DEFAULT_FORMAT].title}; name files that are, or say the source's `format`: one source is read "
            "as one format"
        )
