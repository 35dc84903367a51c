"""The open catalog: which data exists, in which order, with sizes ready for planning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.catalog.array_files import Content, open_arrays
from torchmix.catalog.in_store import bring, catalog_place, refresh
from torchmix.catalog.manifest import (
    MOST_ID,
    FileEntry,
    IdRange,
    ListBytes,
    Manifest,
    SourceEntry,
    check_bad_rows,
    most_lists,
    read_manifest,
)
from torchmix.catalog.page_table import ARRAY_NAMES, PageTable
from torchmix.catalog.settings import SourceSettings, SourceWords, settings_of
from torchmix.catalog.sizes import SourceSizes, from_named_arrays
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale, RecipeError
from torchmix.recipe.fingerprint import digest_of
from torchmix.recipe.items import order_of_items, words_of
from torchmix.recipe.parts import Band, Part
from torchmix.recipe.sources import columns_of, path_properties_of, paths_of
from torchmix.recipe.streams import RowSet, row_sets_of
from torchmix.recipe.structs import ItemWords, Source

# --- Denied rows of the catalog, opened.
#
# Rows that were found in other lists, or in other files of the source, are an error and never used. Cost: one mapping
# a source.

ROWS = "rows"
"""The array of an entry."""


class Denied(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rows of one source that are not given."""

    rows: NDArray[np.int64]
    """[n] ascending, each once; mapped."""
    num_tokens: int
    """Tokens of these rows."""
    fingerprint: str
    """16 hex digits over the rows."""


def open_denied(
    folder: Path,
    lists: Sequence[str],
    sources: Mapping[str, str],
    manifest: Manifest,
    opened: dict[str | Path, Content],
) -> dict[str, Denied]:
    """The denied rows of sources, by name; sources without are left out.

    Args:
        folder: The folder of the catalog's arrays.
        lists: Paths of the deny-lists, in the recipe's words.
        sources: Fingerprint of each source.
        manifest: What is published.
        opened: As in `open_arrays`.

    Raises:
        CatalogMissing: A source was not indexed with deny-lists.
        CatalogStale: It was indexed with other ones, or had other files then.
    """
    found: dict[str, Denied] = {}
    for name, fingerprint in sources.items() if lists else ():
        entry = manifest.denied.get(name)
        if entry is None:
            raise CatalogMissing(f"the catalog lacks the denied rows of source {name!r}; run torchmix index")
        if sorted(entry.lists) != sorted(lists) or entry.source_fingerprint != fingerprint:
            what = "had other files" if sorted(entry.lists) == sorted(lists) else "the recipe named other deny-lists"
            raise CatalogStale(
                f"the denied rows of source {name!r} were found when {what} ({', '.join(entry.lists)}); "
                f"run torchmix index"
            )
        if entry.file is not None:
            rows: NDArray[np.int64] = open_arrays(f"{folder}/{entry.file}", entry.arrays, opened)[ROWS]
            found[name] = Denied(rows=rows, num_tokens=entry.num_tokens, fingerprint=entry.fingerprint)
    return found


# --- A part of a recipe -> the views that it needs of each source.
#
# Equal digests give equal rows from equal data. Cost: microseconds a source.

VIEWS_FORMAT = 1
"""Version of the rules by which views choose rows; part of every definition."""


class SourceViews(msgspec.Struct, frozen=True, kw_only=True):
    """The views that a part needs of one source."""

    name: str
    """The source."""
    source: Source
    """What the recipe says of it."""
    row_sets: dict[str, RowSet]
    """All that has a share of its rows, by sorted name; maybe the source itself."""
    band: Band | None
    """The hashes of its rows that the part has; None: all."""

    @property
    def definition(self) -> str:
        """16 hex digits over all that decides the rows, beside the data."""
        source = self.source
        cells = {name: [one.cell.base, one.cell.values] for name, one in self.row_sets.items() if one.cell is not None}
        content = {
            "format": VIEWS_FORMAT,
            "sets": {name: [one.where, one.child, one.overlap] for name, one in self.row_sets.items()},
            "band": None if self.band is None else [source.id, *self.band],
            "columns": columns_of(source),
            "paths": path_properties_of(source),
            "split_by": msgspec.to_builtins(source.split_by),
            "patterns": paths_of(source),
            **({"cells": cells} if cells else {}),
        }
        return digest_of(content)


class PartViews(msgspec.Struct, frozen=True, kw_only=True):
    """The views that a part needs."""

    part: str
    """The part's name."""
    sources: dict[str, SourceViews]
    """By source, sorted; those without views are not in it."""
    deny: tuple[str, ...] = ()
    """Paths of deny-lists."""


def views_of(part: Part) -> PartViews:
    """The views that a part needs."""
    by_source: dict[str, dict[str, RowSet]] = {}
    for name, one in row_sets_of(part).items():
        by_source.setdefault(one.source, {})[name] = one
    wanted = {
        source: SourceViews(name=source, source=part.sources[source], row_sets=row_sets, band=part.bands.get(source))
        for source, row_sets in sorted(by_source.items())
        if source in part.bands or list(row_sets) != [source]
    }
    return PartViews(part=part.name, sources=wanted, deny=part.deny)


# --- Opening a catalog, and what an open one gives.
#
# The catalog was published whole, for these settings; anything else is an error that says so. Opening does not touch
# data files; the reader checks that they are still the indexed ones. Cost: one read of the manifest and one mapping
# per array, whatever the size of the data.

_SETTINGS = ("format", "column", "tokenizer", "begin_id", "end_id", "fim", "layout")
ARRAYS_FOLDER = "arrays"
ROWS_OF_VIEW = "rows"
"""The array of a view: the rows that it keeps."""
BLOCK_ROWS = 1 << 22
"""Sizes that are looked at together."""


class SourceCatalog(SourceWords, frozen=True, kw_only=True, eq=False):
    """One source, open."""

    name: str
    """Its name in the recipe."""
    items: Mapping[str, ItemWords]
    """Items in the texts, or those that the column holds, by kind."""
    transform_id: str
    """Version of the transform from rows to tokens that the lengths were measured with."""
    files: tuple[FileEntry, ...]
    """Data files, in the order in which rows are counted."""
    schemas: tuple[bytes, ...]
    """What decoding needs to know of files besides their pages; `FileEntry.schema` is an index into it."""
    pages: PageTable
    """Where the pages lie."""
    sizes: SourceSizes
    """Rows of pages and tokens of documents, which planning reads."""
    fingerprint: str
    """16 hex digits over all that decides the order of the source's documents."""
    num_documents: int
    """Rows, the empty ones included."""
    num_tokens: int
    """Tokens of all documents."""
    num_empty: int
    """Documents without tokens, bad rows included."""
    max_document_tokens: int
    """Tokens of the longest document."""
    vocab_size: int | None
    """Size of the tokenizer's vocabulary; None where the files hold ids."""

    @property
    def ids(self) -> IdRange | None:
        """Smallest and largest id of all files; None where ids are not checked before they are read."""
        found = [file.ids for file in self.files if file.ids is not None]
        return IdRange(min(ids.smallest for ids in found), max(ids.largest for ids in found)) if found else None

    @property
    def lists(self) -> ListBytes | None:
        """What its map gives beside ids; None where there is nothing."""
        return most_lists([file.lists for file in self.files])

    @property
    def tokens_of_nothing(self) -> int:
        """Most tokens of a document without content: those that begin and end each text."""
        if self.tokenizer is None or self.layout is not None or self.items:
            return 0
        return 1 if self.tokenizer == "bytes" else sum(one is not None for one in (self.begin_id, self.end_id))

    def num_without_content(self, start: int = 0, stop: int | None = None) -> int:
        """Documents of some rows that have no tokens, or those alone that begin and end each text: empty ones.

        A look at the size of each of these rows, where `num_empty` does not tell.
        """
        stop = self.num_documents if stop is None else stop
        if not self.tokens_of_nothing and (start, stop) == (0, self.num_documents):
            return self.num_empty
        blocks = (self.sizes.tokens[at : min(at + BLOCK_ROWS, stop)] for at in range(start, stop, BLOCK_ROWS))
        return sum(int(np.count_nonzero(block <= self.tokens_of_nothing)) for block in blocks)

    @property
    def num_bad_rows(self) -> int:
        """Rows that could not be read when they were indexed."""
        return sum(file.num_bad_rows for file in self.files)


class View(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Some rows of a source: a selection, a child of a source that is cut, or what a hold-out leaves."""

    source: str
    """The source that the rows are of."""
    kept: NDArray[np.integer]
    """[K] rows of the source that are kept, ascending, each once; mapped."""
    window_units: int
    """Pages of a shuffle window, of those of the whole source."""
    fingerprint: str
    """16 hex digits over the kept rows and the window."""
    longest_tokens: int
    """Tokens of the longest kept document."""
    num_tokens: int
    """Tokens of all kept documents."""


class Catalog(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Some sources, open."""

    directory: Path
    """The catalog's folder."""
    sources: dict[str, SourceCatalog]
    """By name, sorted by name."""
    fingerprint: str
    """16 hex digits over the names and fingerprints of these sources, and of views where there are some."""
    views: Mapping[str, View] = msgspec.field(default_factory=dict)
    """By name of what has a share: rows of sources, where it does not have all rows of a source."""
    denied: Mapping[str, Denied] = msgspec.field(default_factory=dict)
    """By source: rows that deny-lists name, where there are some."""

    @property
    def denied_rows(self) -> dict[str, NDArray[np.int64]]:
        """Denied rows of each source that has some, ascending."""
        return {name: one.rows for name, one in self.denied.items()}


class WantedView(Protocol):
    """Views of a source that a part of a recipe needs; see `store.py`."""

    @property
    def row_sets(self) -> Mapping[str, object]:
        """The views, by name."""

    @property
    def definition(self) -> str:
        """16 hex digits over what the recipe says of them."""


class WantedViews(Protocol):
    """What a part of a recipe needs beside its sources."""

    @property
    def part(self) -> str:
        """Name of the part."""

    @property
    def sources(self) -> Mapping[str, WantedView]:
        """By source."""

    @property
    def deny(self) -> tuple[str, ...]:
        """Paths of deny-lists."""


def open_catalog(
    catalog_folder: Path, settings: Mapping[str, SourceSettings], views: WantedViews | None = None
) -> Catalog:
    """Open sources of a catalog, memory-mapped and read-only.

    Args:
        catalog_folder: Where the catalog lies.
        settings: Settings that the sources must have been indexed with, by name; `settings_of` makes them from a
            recipe.
        views: The views of these sources that a part of a recipe needs; None: none.

    Raises:
        CatalogMissing: There is no catalog, or it lacks one of the sources or views.
        CatalogStale: A source or view was indexed with other settings or deny-lists, or by another version.
        TooManyBadRows: More rows of a source could not be read than its `max_bad` allows.
        CatalogError: The catalog is damaged.
    """
    manifest = read_manifest(catalog_folder)
    try:
        return open_manifest(catalog_folder, settings, manifest, views)
    except CatalogError:
        refresh(catalog_folder)
        if (newer := read_manifest(catalog_folder)) == manifest:  # else published while the older arrays were opened
            raise
        return open_manifest(catalog_folder, settings, newer, views)


def open_manifest(
    catalog_folder: Path,
    settings: Mapping[str, SourceSettings],
    manifest: Manifest,
    views: WantedViews | None = None,
) -> Catalog:
    """As `open_catalog`, with a manifest that was read already."""
    sources, opened = dict[str, SourceCatalog](), dict[str | Path, Content]()
    for name in sorted(settings):
        entry = manifest.sources.get(name)
        if entry is None:
            held = ", ".join(manifest.sources) or "none"
            raise CatalogMissing(
                f"the catalog at {catalog_place(catalog_folder)} lacks source {name!r} (it has {held}); "
                "run torchmix index"
            )
        _check_settings(name, entry, settings[name], catalog_folder)
    bring(catalog_folder, _files_of(manifest, settings, views))
    for name in sorted(settings):
        # What decodes items, and where their files lie, is the recipe's to say, also when it says so after the index.
        source = open_source(catalog_folder, name, manifest.sources[name], opened)
        sources[name] = replace(source, items=settings[name].items)
    found = {} if views is None else _open_views(catalog_folder, views, sources, manifest, opened)
    fingerprint = catalog_fingerprint(sources.values(), found)
    deny, prints = () if views is None else views.deny, {name: one.fingerprint for name, one in sources.items()}
    denied = open_denied(catalog_folder / ARRAYS_FOLDER, deny, prints, manifest, opened)
    return Catalog(directory=catalog_folder, sources=sources, fingerprint=fingerprint, views=found, denied=denied)


def _files_of(manifest: Manifest, names: Iterable[str], views: WantedViews | None) -> list[str]:
    """The files of arrays that sources, their views and their denied rows lie in."""
    files: list[str | None] = [manifest.sources[name].file for name in names]
    if views is not None:
        of_part = manifest.views.get(views.part, {})
        files += [of_part[name].file for one in views.sources.values() for name in one.row_sets if name in of_part]
        files += [manifest.denied[name].file for name in names if views.deny and name in manifest.denied]
    return [f"{ARRAYS_FOLDER}/{file}" for file in files if file is not None]


def _open_views(
    folder: Path,
    wanted: WantedViews,
    sources: Mapping[str, SourceCatalog],
    manifest: Manifest,
    opened: dict[str | Path, Content],
) -> dict[str, View]:
    """The views that do not keep all rows of their source, by sorted name."""
    views: dict[str, View] = {}
    for source, of_source in wanted.sources.items():
        for name in of_source.row_sets:
            entry = manifest.views.get(wanted.part, {}).get(name)
            if entry is None:
                raise CatalogMissing(
                    f"the catalog at {catalog_place(folder)} lacks the rows of {name!r} for {wanted.part}; "
                    "run torchmix index"
                )
            if (entry.definition, entry.source_fingerprint) != (of_source.definition, sources[source].fingerprint):
                raise CatalogStale(
                    f"the rows of {name!r} in the catalog at {catalog_place(folder)} were chosen when the recipe said "
                    f"something else of {source!r}, or had other files; run torchmix index"
                )
            if entry.file is not None:
                arrays = open_arrays(f"{folder}/{ARRAYS_FOLDER}/{entry.file}", entry.arrays, opened)
                views[name] = View(
                    source=source,
                    kept=arrays[ROWS_OF_VIEW],
                    window_units=entry.window_units,
                    fingerprint=entry.fingerprint,
                    longest_tokens=entry.max_document_tokens,
                    num_tokens=entry.num_tokens,
                )
    return dict(sorted(views.items()))


def _check_settings(name: str, entry: SourceEntry, settings: SourceSettings, folder: Path) -> None:
    """Raise CatalogStale where a source was indexed for other settings than the recipe has."""
    window_pages = settings.window_pages(
        num_pages=sum(file.num_pages for file in entry.files), num_tokens=entry.num_tokens
    )
    for what, indexed, wanted in (
        ("path", list(entry.patterns), list(settings.patterns)),
        *((key, getattr(entry, key), getattr(settings, key)) for key in _SETTINGS),
        ("map", entry.map and entry.map.function, settings.map and settings.map.function),
        ("items", order_of_items(words_of(entry.items, name)), order_of_items(settings.items)),
        ("a shuffle window in pages", entry.window_pages, window_pages),
    ):
        if indexed != wanted:
            raise CatalogStale(
                f"source {name!r}: the catalog at {catalog_place(folder)} was built with {what} {indexed!r}, "
                f"the recipe says {wanted!r}; run torchmix index"
            )
    check_bad_rows(
        name,
        [(file.path, file) for file in entry.files],
        num_rows=entry.num_documents,
        is_masked=settings.masks_bad_rows,
        max_bad=settings.max_bad,
    )


def open_source(
    folder: Path, name: str, entry: SourceEntry, opened: dict[str | Path, Content] | None = None
) -> SourceCatalog:
    """Map the arrays of one source; `opened` as in `open_arrays`.

    Raises:
        CatalogError: An array is missing, or has another size or type than its entry says.
    """
    if missing := {*ARRAY_NAMES, "tokens"} - set(entry.arrays):
        raise CatalogError(f"source {name!r}: {folder} lacks arrays {sorted(missing)}; run torchmix index")
    arrays: dict[str, NDArray[np.generic]] = open_arrays(f"{folder}/{ARRAYS_FOLDER}/{entry.file}", entry.arrays, opened)
    pages = PageTable(**{key: arrays[key] for key in ARRAY_NAMES})  # type: ignore[arg-type]
    tokens: NDArray[np.int32] = arrays["tokens"]  # type: ignore[assignment]
    found = from_named_arrays(arrays)
    sizes = SourceSizes(
        first_row_of_page=pages.first_row,
        tokens=tokens,
        window_pages=entry.window_pages,
        longest_tokens=entry.max_document_tokens,
        num_tokens=entry.num_tokens,
        columns=found.sizes,
        items=found.items,
        marks=found.marks,
    )
    if pages.num_rows != sizes.num_documents:
        raise CatalogError(
            f"source {name!r}: {folder} holds {pages.num_rows} rows in pages but {sizes.num_documents} lengths; "
            "run torchmix index"
        )
    return SourceCatalog(
        name=name,
        **entry.words(),
        items=words_of(entry.items, name),
        transform_id=entry.transform_id,
        files=entry.files,
        schemas=entry.schemas,
        pages=pages,
        sizes=sizes,
        fingerprint=entry.fingerprint,
        num_documents=entry.num_documents,
        num_tokens=entry.num_tokens,
        num_empty=entry.num_empty,
        max_document_tokens=entry.max_document_tokens,
        vocab_size=entry.vocab_size,
    )


def catalog_fingerprint(sources: Iterable[SourceCatalog], views: Mapping[str, View] | None = None) -> str:
    """Fingerprint of sources by name, with views of them; 16 hex digits, made as `source_fingerprint`."""
    of_sources = {source.name: source.fingerprint for source in sources}
    if not views:
        return digest_of(of_sources)
    return digest_of(
        {"sources": of_sources, "views": {name: [one.source, one.fingerprint] for name, one in views.items()}}
    )


# --- Token ids of sources against the vocabulary of the model.
#
# The same for `check` and for a start.


class IdLimit(NamedTuple):
    """The bound that all ids of a model are below."""

    size: int
    """At most 2^31."""
    reason: str
    """Where the bound comes from, for example `vocab_size is 50257`."""


class Misfit(NamedTuple):
    """Two numbers that contradict each other."""

    where: str
    """Path of keys in the recipe."""
    message: str
    """Both numbers, and what to do."""


ANY_MODEL = IdLimit(MOST_ID + 1, f"ids go from 0 to {MOST_ID}")


def id_limit(vocab_size: int | None, padded_vocab_size: int | None = None) -> IdLimit:
    """The bound of ids: `vocab_size`, else the rows of the model's embedding, else the range of 32 bits."""
    if vocab_size is not None:
        return IdLimit(vocab_size, f"vocab_size is {vocab_size}")
    if padded_vocab_size is not None and padded_vocab_size <= MOST_ID:
        return IdLimit(padded_vocab_size, f"the model's padded vocabulary has {padded_vocab_size}")
    return ANY_MODEL


def vocabulary_misfits(
    vocab_size: int | None, catalog: Catalog | None, *, padded_vocab_size: int | None = None
) -> Iterator[Misfit]:
    """The sources that a model with this vocabulary cannot be trained on.

    Args:
        vocab_size: The recipe's `vocab_size`, if it has one.
        catalog: The recipe's sources; None where they are not indexed yet.
        padded_vocab_size: Rows of the model's embedding; None where they are not known.
    """
    if vocab_size is not None and padded_vocab_size is not None and vocab_size > padded_vocab_size:
        yield Misfit(
            "vocab_size",
            f"{vocab_size} ids, but the model's padded vocabulary has {padded_vocab_size}: its embedding lacks some of "
            "them; give the model the vocabulary of the data",
        )
    if catalog is None:
        return
    limit = id_limit(vocab_size, padded_vocab_size)
    for name, source in catalog.sources.items():
        yield from _ids_outside(source, limit)
        if source.vocab_size is not None and source.vocab_size > limit.size:
            yield Misfit(
                f"sources.{name}.tokenizer",
                f"{source.tokenizer} has ids up to {source.vocab_size - 1}, but {limit.reason}; name the tokenizer of "
                "the model, or give the model all of its ids",
            )


def check_vocabulary(vocab_size: int | None, catalog: Catalog, *, padded_vocab_size: int | None = None) -> None:
    """Raise an error if `vocabulary_misfits` finds anything.

    Raises:
        RecipeError: Some numbers contradict each other; names all of them.
    """
    found = list(vocabulary_misfits(vocab_size, catalog, padded_vocab_size=padded_vocab_size))
    if found:
        first, others = found[0], found[1:]
        raise RecipeError("\n  ".join([first.message, *(f"{one.where}: {one.message}" for one in others)]), first.where)


def _ids_outside(source: SourceCatalog, limit: IdLimit) -> Iterator[Misfit]:
    """The file with the smallest id, if that is below 0, and the one with the largest, if that is too large."""
    seen = [(file.ids, file.path) for file in source.files if file.ids is not None]
    if not seen:
        return
    lowest, highest = min(seen, key=lambda one: one[0].smallest), max(seen, key=lambda one: one[0].largest)
    for token, path, is_outside in (
        (lowest[0].smallest, lowest[1], lowest[0].smallest < 0),
        (highest[0].largest, highest[1], highest[0].largest >= limit.size),
    ):
        if is_outside:
            yield Misfit(
                f"sources.{source.name}",
                f"{path} holds the token {token}, but {limit.reason}; the ids are of another vocabulary, or the column "
                "holds something else",
            )


# --- The catalog of one part of a recipe, opened with its views.


def open_part(catalog_folder: Path, part: Part) -> Catalog:
    """Open the sources of a part, and the views that its streams need; errors as `open_catalog`."""
    return open_catalog(catalog_folder, settings_of(part.sources, part.shuffle), views_of(part))
