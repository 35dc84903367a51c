"""Items of sources -> their bytes, or their units where a loader decodes for others; and where they are decoded."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.in_store import bring, catalog_place
from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.page_table import PageTable
from torchmix.catalog.settings import name_of_items
from torchmix.catalog.sizes import SourceSizes, TokenRuns
from torchmix.catalog.store import ARRAYS_FOLDER, Catalog, SourceCatalog, catalog_fingerprint, open_source
from torchmix.errors import CatalogMissing, CatalogStale, LoaderClosed, PlanError, RecipeError
from torchmix.formats.items import BYTES_OF_ITEM, item_path
from torchmix.mixture.keys import named_key
from torchmix.modalities.modality import Modality, PlannedItem
from torchmix.modalities.table import open_modality
from torchmix.reader.piece_copy import Scratch
from torchmix.reader.protocol import StepItems, StepReader, Tokens, WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.modules import DOCUMENT
from torchmix.recipe.parts import Part
from torchmix.recipe.structs import Module
from torchmix.storage.store_file import opened
from torchmix.storage.stores import place_of

# --- Where the items of a module are decoded: by loaders, by whoever makes the steps, or by the rank that encodes
# them.
#
# All leaders of a job come to the same, since they have one recipe and one catalog; the bits of their units are the
# same at any place. Cost: two sums over at most LOOKED_AT items of each source.
#
# By default fewer bytes travel: the files of photographs are some twenty times smaller than their patches, so they go
# to the rank as they are; where items are shrunk so much that their units are smaller, loaders decode.

DecodeAt = Literal["loader", "worker", "rank"]
LOOKED_AT = 1 << 20
"""Items of a source whose sizes are summed."""


def decode_place(module: Module, catalog: Catalog, *, has_loaders: bool) -> DecodeAt:
    """Where the items of a module are decoded.

    Args:
        module: The module of a checked recipe; its items are inside documents.
        catalog: The catalog of the part's sources.
        has_loaders: Whether shared loaders read. Without them whoever makes the steps loads.
    """
    asked = module.decode_at
    if asked is None:
        files, units = bytes_that_travel(module, catalog)
        late: DecodeAt = "rank" if module.axis == "WORLD" else "worker"
        asked = late if files <= units else "loader"
    return "worker" if asked == "loader" and not has_loaders else asked


def decoded_by_loaders(part: Part, catalog: Catalog, *, has_loaders: bool) -> frozenset[str]:
    """The kinds of items that loaders decode: those of which a module of the part says so."""
    return frozenset(
        module.items
        for module in part.modules.values()
        if module.items != DOCUMENT and decode_place(module, catalog, has_loaders=has_loaders) == "loader"
    )


def decoded_at_rank(part: Part, catalog: Catalog, *, has_loaders: bool) -> frozenset[str]:
    """Modules of a part whose items the ranks decode."""
    return frozenset(
        name
        for name, module in part.modules.items()
        if module.items != DOCUMENT and decode_place(module, catalog, has_loaders=has_loaders) == "rank"
    )


def bytes_that_travel(module: Module, catalog: Catalog) -> tuple[int, int]:
    """Bytes of the files of a module's items, and of their units."""
    files = units = 0
    for name, source in catalog.sources.items():
        if module.items not in source.items or (module.sources is not None and name not in module.sources):
            continue
        of_files, of_units = bytes_of_items(source, module.items)
        files, units = files + of_files, units + of_units
    return files, units


def bytes_of_items(source: SourceCatalog, kind: str) -> tuple[int, int]:
    """Bytes of the files of a source's items of a kind, and of their units; those behind LOOKED_AT by the mean."""
    table, modality = source.sizes.items[kind], open_modality(source.name, source.items[kind])
    total, found = len(table.tokens), []
    for column, each in ((BYTES_OF_ITEM, 1), (modality.units, modality.unit_bytes)):
        some = np.asarray(table.sizes[column][:LOOKED_AT])
        found.append(each * int(some.sum(dtype=np.int64)) * total // max(1, len(some)))
    return found[0], found[1]


def most_item_bytes(source: SourceCatalog, kind: str) -> int:
    """What decoding the largest item of a source holds: its file, its units, and what a function that alters items is
    given and gives, each of about as many bytes as the units."""
    table = source.sizes.items[kind]
    modality = open_modality(source.name, source.items[kind])
    units = int(np.asarray(table.sizes[modality.units]).max(initial=0)) * (1 if modality.words.augment is None else 3)
    return modality.unit_bytes * units + int(np.asarray(table.sizes[BYTES_OF_ITEM]).max(initial=0))


# --- Items of sources -> their bytes.
#
# What is read is what was indexed, by the same checks as texts; each item of a call is read once.

CACHE_BYTES = 256 << 20


class ItemReader:
    """Reads items of the sources of a catalog; implements `StepItems`."""

    def __init__(
        self,
        catalog: Catalog,
        directory: Path,
        *,
        seed: int = 0,
        cache_bytes: int = CACHE_BYTES,
        open_columns: Callable[[Catalog], StepReader] | None = None,
        units: StepReader | None = None,
        unit_kinds: Collection[str] = (),
    ) -> None:
        """Open the columns of items; no file of data is opened yet.

        Args:
            catalog: The sources, open; at least one has items.
            directory: The recipe's folder.
            seed: The recipe's, for functions that alter items.
            cache_bytes: Pages of items kept.
            open_columns: What reads the columns of items, in the place of a reader of their files.
            units: What gives units of items that others decode, a `StepReader` of `unit_catalog`.
            unit_kinds: The kinds of these items, whose bytes are not read here.

        Raises:
            CatalogMissing, CatalogStale: The items are not indexed as the texts are.
            RecipeError: Sources have units of different sizes, or a function that alters items cannot be imported.
        """
        keys = items_of_sources(catalog)
        self._seed = seed
        self._texts = catalog.sources
        self._columns = item_columns(catalog)
        self._units, self._unit_kinds = units, frozenset(unit_kinds)
        self._reader: StepReader | None = None
        if any(kind not in self._unit_kinds for _, kind in keys):
            if open_columns is None:
                self._reader = Reader(self._columns, directory, cache_bytes=cache_bytes, seed=0)
            else:
                self._reader = open_columns(self._columns)
        self._number_of = {name: i for i, name in enumerate(self._columns.sources)}
        """By the name of the column."""
        self._shift: dict[tuple[str, str], tuple[Int64Array, Int64Array]] = {}
        self._folder: dict[tuple[str, str], str | None] = {}
        self._modalities: dict[tuple[str, str], Modality] = {}
        for name, kind in keys:
            source = catalog.sources[name]
            folder = source.items[kind].folder
            self._shift[name, kind] = _shifts(source, self._columns.sources[name_of_items(name, kind)], kind)
            self._folder[name, kind] = None if folder is None else place_of(directory, folder)
            self._modalities[name, kind] = open_modality(name, source.items[kind], directory)
        for kind in sorted({kind for _, kind in keys}):
            values = {name: one.unit_values for (name, of), one in self._modalities.items() if of == kind}
            if len(set(values.values())) > 1:
                what = self.any_modality(kind).units
                raise RecipeError(f"sources have {what} of different sizes, {values}; a model has one", "sources")

    def table(self, source: str, kind: str) -> TokenRuns:
        """See `StepItems`."""
        return self._texts[source].sizes.items[kind]

    def modality(self, source: str, kind: str) -> Modality:
        """See `StepItems`."""
        return self._modalities[source, kind]

    def any_modality(self, kind: str) -> Modality:
        """See `StepItems`."""
        return next(one for (_, of), one in self._modalities.items() if of == kind)

    def planned(self, source: str, kind: str, items: Int64Array, epochs: Int64Array) -> list[PlannedItem]:
        """See `StepItems`."""
        modality, table = self._modalities[source, kind], self.table(source, kind)
        files = self._texts[source].files
        first_rows = [file.first_row for file in files]
        found = [
            replace(one, file=files[bisect_right(first_rows, one.row) - 1].path)
            for one in (PlannedItem.of(source, modality, table, item) for item in items.tolist())
        ]
        if modality.augment is None:
            return found
        return [with_key(one, kind, self._seed, epoch) for one, epoch in zip(found, epochs.tolist(), strict=True)]

    def read(self, source: str, kind: str, items: Int64Array) -> list[memoryview]:
        """The bytes of some items of a source.

        Args:
            source: Its name.
            kind: What they are.
            items: [n] their numbers in the catalog of the texts.

        Raises:
            SourceChanged, SourceUnreadable, CorruptPage: As `Reader.read`.
        """
        name = name_of_items(source, kind)
        first, shift = self._shift[source, kind]
        item = items + shift[np.searchsorted(first, items, side="right") - 1]
        table = self._columns.sources[name].sizes.items[kind]
        row = np.searchsorted(np.asarray(table.first_run_of_row), item, side="right") - 1
        count = np.asarray(table.tokens[item], np.int64)
        pieces = WantedPieces.end_to_end(
            source=self._number_of[name],
            row=row.astype(np.int64),
            epoch=0,
            start=np.asarray(table.offset[item], np.int64),
            tokens=count,
        )
        assert self._reader is not None, f"loaders decode {kind}s"
        read = self._reader.read(pieces)
        content = memoryview(np.ascontiguousarray(read.values, np.uint8).tobytes())
        values = [content[start : start + n] for start, n in zip(pieces.places.tolist(), count.tolist(), strict=True)]
        folder = self._folder[source, kind]
        if folder is not None:
            values = [_content(source, kind, folder, bytes(value)) for value in values]
        return values

    def gives_units(self, kind: str) -> bool:
        """See `StepItems`."""
        return kind in self._unit_kinds

    def read_units(self, source: str, kind: str, items: Int64Array, epochs: Int64Array) -> list[NDArray[Any]]:
        """See `StepItems`."""
        assert self._units is not None, "loaders decode"
        modality = self._modalities[source, kind]
        width = modality.unit_bytes
        count = np.asarray(self.table(source, kind).sizes[modality.units], np.int64)[items] * width
        number = self._number_of[name_of_items(source, kind)]
        pieces = WantedPieces.end_to_end(source=number, row=items, epoch=epochs, start=0, tokens=count)
        read = self._units.read(pieces)
        values = read.values.astype(np.uint8)  # a copy: the reader's memory is used again
        return [
            values[start : start + n].view(modality.unit_type).reshape(-1, modality.unit_values)
            for start, n in zip(pieces.places.tolist(), count.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Give back all that it holds."""
        for reader in (self._reader, self._units):
            if reader is not None:
                reader.close()


def with_key(planned: PlannedItem, kind: str, seed: int, epoch: int) -> PlannedItem:
    """An item with the key of an epoch, which its random generator is made of.

    Args:
        planned: The item.
        kind: What it is.
        seed: The recipe's.
        epoch: How often the stream that gives its row has been gone through before.
    """
    key = named_key(seed, "augment", planned.source, kind, planned.row, planned.number, epoch)
    return replace(planned, key=key)


def items_of_sources(catalog: Catalog) -> list[tuple[str, str]]:
    """Sources of a catalog with items, and the kind of these; sorted."""
    return sorted((name, kind) for name, source in catalog.sources.items() for kind in source.items)


def item_columns(catalog: Catalog) -> Catalog:
    """The columns of items of a catalog's sources, as sources of bytes.

    Raises:
        CatalogMissing: A column is not indexed.
    """
    folder = catalog.directory
    manifest = read_manifest(folder)
    names = sorted(name_of_items(*key) for key in items_of_sources(catalog))
    for name in names:
        if name not in manifest.sources:
            raise CatalogMissing(f"the catalog at {catalog_place(folder)} lacks {name!r}; run torchmix index")
    bring(folder, [f"{ARRAYS_FOLDER}/{manifest.sources[name].file}" for name in names])
    sources = {name: open_source(folder, name, manifest.sources[name]) for name in names}
    return Catalog(directory=folder, sources=sources, fingerprint=catalog_fingerprint(sources.values()))


def _shifts(texts: SourceCatalog, column: SourceCatalog, kind: str) -> tuple[Int64Array, Int64Array]:
    """What to add to numbers of items of the texts to get those of the column: first item of each file, and sum."""
    file_of_path = {file.path: file for file in column.files}
    first_of_texts = np.asarray(texts.sizes.items[kind].first_run_of_row)
    first_of_column = np.asarray(column.sizes.items[kind].first_run_of_row)
    first: list[int] = []
    shift: list[int] = []
    for file in texts.files:
        other = file_of_path.get(file.path)
        if other is None or (other.footer_hash, other.num_rows) != (file.footer_hash, file.num_rows):
            raise CatalogStale(
                f"source {texts.name!r}: the {kind}s of {file.path} are not indexed as its texts are; "
                "run torchmix index"
            )
        first.append(int(first_of_texts[file.first_row]))
        shift.append(int(first_of_column[other.first_row]) - first[-1])
    return np.array(first, np.int64), np.array(shift, np.int64)


def _content(source: str, kind: str, folder: str, value: bytes) -> memoryview:
    path = item_path(folder, value)
    with opened(path, f"source {source!r}: the {kind} {path}") as file:
        return memoryview(file.read(0, file.num_bytes))


def open_items(catalog: Catalog, directory: Path, *, seed: int) -> ItemReader | None:
    """A reader of the items of a catalog's sources; None where no source has any. As `ItemReader`."""
    return ItemReader(catalog, directory, seed=seed) if items_of_sources(catalog) else None


# --- Items as documents of their units: what a loader gives that decodes for others.
#
# Pure, as the transform is; a bad item is an error, or stood in for where its source masks bad rows.

KEPT_BYTES = 128 << 20
"""Units of the last items."""
BEGUN_BYTES = 1 << 30
"""Units of items that were asked for in part: a long video is, in hundreds of requests, while others ask for theirs."""
MOST_THREADS = 8

_Item = tuple[int, int, int]
"""Source, epoch and number of an item; the epoch is 0 where it alters nothing."""


def decode_threads() -> int:
    """Threads that decode in one process; decoders work without Python's lock."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def unit_catalog(catalog: Catalog, directory: Path) -> Catalog:
    """The items of a catalog's sources as sources of units: a row is an item, a token a byte of a unit.

    The transform of such a source names the build that decodes and the function that alters items, so loaders and
    clients that have others refuse each other. `directory` is the recipe's folder.
    """
    sources = {
        name_of_items(name, kind): _as_units(catalog.sources[name], kind, directory)
        for name, kind in items_of_sources(catalog)
    }
    return Catalog(directory=catalog.directory, sources=sources, fingerprint=catalog_fingerprint(sources.values()))


def _as_units(texts: SourceCatalog, kind: str, directory: Path) -> SourceCatalog:
    """One source; each item is a page."""
    modality = open_modality(texts.name, texts.items[kind], directory)
    table = texts.sizes.items[kind]
    tokens = (np.asarray(table.sizes[modality.units], np.int64) * modality.unit_bytes).astype(np.int32)
    count = len(tokens)
    borders = np.array([0, count], np.int64)
    numbers = np.concatenate([np.arange(count), [0]]).astype(np.uint32)
    none = np.zeros(0, np.uint32)
    pages = PageTable(
        page_start=np.zeros(count + 1, np.uint32),
        page_row=numbers,
        tail_bytes=none,
        page_crc=none,
        chunk_page=borders,
        chunk_row=borders,
        chunk_offset=np.zeros(1, np.int64),
        chunk_bytes=np.array([int(tokens.sum(dtype=np.int64))], np.int64),
        file_of_chunk=np.zeros(1, np.int32),
        companion_offset=np.full(1, -1, np.int64),
        companion_bytes=np.zeros(1, np.int64),
        companion_crc=none,
        kind=np.zeros(1, np.int8),
    )
    return replace(
        texts,
        name=name_of_items(texts.name, kind),
        transform_id=f"{modality.units}-1:{texts.transform_id}:{modality.decoder_id}",
        pages=pages,
        sizes=SourceSizes(first_row_of_page=pages.first_row, tokens=tokens, window_pages=1),
        fingerprint=f"{modality.units} of {texts.fingerprint}",
        num_documents=count,
    )


class UnitReader:
    """Decodes items of files that this process reads; has the methods of a `StepReader`, for one thread at a time."""

    def __init__(
        self,
        catalog: Catalog,
        directory: Path,
        *,
        masked: Collection[str],
        cache_bytes: int,
        keeps: bool = True,
        seed: int = 0,
    ) -> None:
        """Open the columns of items; arguments as those of `ItemReader`.

        Args:
            catalog: The sources, of texts.
            directory: The recipe's folder.
            masked: Names of sources whose bad items are stood in for.
            cache_bytes: Pages of items kept.
            keeps: Whether units of the last items are kept; not where each item is asked for once, and whole.
            seed: The recipe's.
        """
        self._keeps = keeps
        self._keys = items_of_sources(catalog)
        """By number."""
        self._items = ItemReader(catalog, directory, cache_bytes=cache_bytes, seed=seed)
        self._is_altered = np.array([self._items.modality(*key).augment is not None for key in self._keys], np.bool_)
        """[S] sources whose items differ from epoch to epoch."""
        self._masked = frozenset(masked)
        self._kept: OrderedDict[_Item, NDArray[Any]] = OrderedDict()
        self._begun: set[_Item] = set()
        """Those of which more will be asked."""
        self._kept_bytes = self._num_decoded = self._bytes_served = self._most_bytes = 0
        self._pool = ThreadPoolExecutor(decode_threads(), "torchmix-items")
        self._is_closed = False

    @property
    def items(self) -> StepItems | None:
        """None: they are its documents."""
        return None

    def read(self, pieces: WantedPieces, *, scratch: Scratch | None = None) -> Tokens:
        """Bytes of units; arguments and errors as those of `Reader.read`.

        Raises:
            PlanError: There is no such item, or it has fewer bytes.
            CorruptPage: An item cannot be read as it was indexed.
        """
        if self._is_closed:
            raise LoaderClosed("the reader was used after close(); make a new one")
        epochs = np.where(self._is_altered[pieces.source], pieces.epoch, 0)
        wanted = list(zip(pieces.source.tolist(), epochs.tolist(), pieces.row.tolist(), strict=True))
        out = np.zeros(pieces.num_places, np.uint8)
        successors = np.zeros(len(pieces), np.int64)
        units = self._units(sorted(set(wanted)))
        spans = zip(pieces.start.tolist(), pieces.tokens.tolist(), pieces.places.tolist(), strict=True)
        for k, (item, (start, count, place)) in enumerate(zip(wanted, spans, strict=True)):
            values = units[item]
            if not 0 <= start <= start + count <= len(values):
                s, _, row = item
                raise PlanError(f"item {row} of {self._keys[s]} has {len(values)} bytes, not [{start}, +{count})")
            out[place : place + count] = values[start : start + count]
            successors[k] = values[start + count] if start + count < len(values) else 0
            (self._begun.add if start + count < len(values) else self._begun.discard)(item)
        self._most_bytes = max(self._most_bytes, sum(values.nbytes for values in units.values()))
        if self._keeps:
            self._keep(units)
        self._bytes_served += int(pieces.tokens.sum())
        return Tokens(values=out, successors=successors)

    def _units(self, wanted: list[_Item]) -> dict[_Item, NDArray[Any]]:
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        for s in sorted({s for s, _, _ in wanted}):
            name, kind = self._keys[s]
            table = self._items.table(name, kind)
            missing = [key for key in wanted if key[0] == s and key not in found]
            if not missing:
                continue
            epochs, items = np.array(missing, np.int64)[:, 1:].T
            if items.min() < 0 or items.max() >= len(table.tokens):
                raise PlanError(f"{name!r} has {len(table.tokens)} {kind}s, not {items.min()} to {items.max()}")
            modality, is_masked = self._items.modality(name, kind), name in self._masked
            planned = self._items.planned(name, kind, items, epochs)
            contents = self._items.read(name, kind, items)
            decoded = self._pool.map(partial(modality.units_of, is_masked=is_masked), planned, contents)
            for key, made in zip(missing, decoded, strict=True):
                found[key] = np.ascontiguousarray(made, modality.unit_type).reshape(-1).view(np.uint8)
        self._num_decoded += sum(key not in self._kept for key in found)
        return found

    def _keep(self, found: dict[_Item, NDArray[Any]]) -> None:
        """Keep what was asked for last, and what more will be asked of."""
        for key, values in found.items():
            if key not in self._kept:
                self._kept_bytes += values.nbytes
            self._kept[key] = values
            self._kept.move_to_end(key)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            over = next((key for key in self._kept if key not in self._begun), None)
            if over is None and self._kept_bytes <= BEGUN_BYTES:
                break
            key = next(iter(self._kept)) if over is None else over
            self._begun.discard(key)
            self._kept_bytes -= self._kept.pop(key).nbytes

    def pages_at_once(self, source: int) -> int:
        """Nothing is decoded ahead."""
        return 1

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """Do nothing: items are read when they are asked for."""

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """Do nothing: the last items are kept anyway."""

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """Do nothing, as `hold`."""

    def planned_bytes(self, source: int, page_ids: Int64Array) -> list[int]:
        """Memory of the units of each item."""
        name, kind = self._keys[source]
        modality = self._items.modality(name, kind)
        sizes = np.asarray(self._items.table(name, kind).sizes[modality.units], np.int64)[page_ids]
        num_bytes: list[int] = (modality.unit_bytes * sizes).tolist()
        return num_bytes

    def expect(self, stream: int, pages: Sequence[tuple[int, Int64Array | None]]) -> None:
        """Do nothing: items have no windows."""

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """Do nothing: items have no windows."""

    def stats(self) -> dict[str, int | float]:
        """Figures since the reader was made; `item_bytes_at_once`: most bytes of units that one call has decoded."""
        return {
            "bytes_served": self._bytes_served,
            "items_decoded": self._num_decoded,
            "item_bytes_at_once": self._most_bytes,
        }

    def close(self) -> None:
        """Give back all that it holds; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.shutdown(cancel_futures=True)
            self._items.close()
            self._kept.clear()
