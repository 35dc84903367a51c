"""What a source costs a loader, measured on some of its rows.

Rows are read by the code that loaders read with, their map and tokenizer included; the pages lie evenly over the
source; time in which the thread could have run and had no processor counts for nothing. Memory is right in a process
that has measured no other source.
"""

from __future__ import annotations

import io
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog, SourceCatalog, catalog_fingerprint
from torchmix.reader.items import ItemReader
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.service.scale.loads import ItemProfile, SourceProfile

MOST_TOKENS = 1 << 20
"""Read of a source."""
MOST_S = 2.0
"""Spent on a source; and as much on its items of each kind."""
CALL_TOKENS = 1 << 14
"""Tokens of one call, so that a slow map is noticed in time."""
CACHE_BYTES = 256 << 20
MOST_PAGES = 64
"""Most pages of a source that are measured."""
MOST_ITEMS = 256
_STATUS = Path("/proc/self/status")
_SCHEDULE = Path("/proc/thread-self/schedstat")


class Clocks(msgspec.Struct, frozen=True):
    """Times of this thread and process at one moment, in ns."""

    wall: int
    waited: int
    """How long this thread could run while others had the processors. 0 where the kernel does not say."""
    cpu: int
    """What all threads of the process used."""

    @classmethod
    def now(cls) -> Clocks:
        """At this moment."""
        waited = _waited_ns()
        while True:
            found = cls(time.perf_counter_ns(), waited, time.process_time_ns())
            if (waited := _waited_ns()) == found.waited:
                return found  # else others had the processor in between, and the times are not of one moment

    def busy_since(self, before: Clocks) -> int:
        """Time since another moment, without waiting for a processor."""
        return max(0, self.wall - before.wall - (self.waited - before.waited))


def _waited_ns() -> int:
    try:
        return int(_SCHEDULE.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def measure_source(
    catalog: Catalog,
    directory: Path,
    name: str,
    *,
    seed: int = 0,
    masked: Collection[str] = (),
    maps: Mapping[str, str] | None = None,
    most_tokens: int = MOST_TOKENS,
    most_s: float = MOST_S,
) -> SourceProfile:
    """Read rows of a source as a loader does, and say what they cost.

    Args:
        catalog: It has the source.
        directory: The recipe's folder.
        name: The source.
        seed: The recipe's.
        masked: Sources whose bad pages are masked.
        maps: The words of the map of each source that has one.
        most_tokens: Stop after so many, 1 or more.
        most_s: Stop after so long; rows of one call are read in any case.

    Raises:
        CatalogError: The source cannot be read.
        RecipeError: Its tokenizer or map cannot be opened here.
    """
    source = catalog.sources[name]
    alone = Catalog(
        directory=catalog.directory, sources={name: source}, fingerprint=catalog_fingerprint([source], {}), views={}
    )
    rows = _some_rows(source, most_tokens)
    tokens = np.asarray(source.sizes.tokens[rows], np.int64)

    def opened() -> Reader:
        return Reader(alone, directory, cache_bytes=CACHE_BYTES, seed=seed, masked=masked, maps=_only(maps, name))

    _begin_decoding()
    before_bytes = _resident_bytes("VmRSS")
    with closing(opened()) as first:  # what a first row alone costs: libraries, vocabularies, open files
        _read(first, rows[:1], tokens[:1])
    reader = opened()
    try:
        done, began, deadline = 0, Clocks.now(), time.monotonic() + most_s
        for start, stop in _calls(tokens):
            _read(reader, rows[start:stop], tokens[start:stop])
            done = stop
            if time.monotonic() > deadline:
                break
        ended, stats = Clocks.now(), reader.stats()
        most_bytes = _resident_bytes("VmHWM")
    finally:
        reader.close()
    num_tokens, decoded_pages = int(tokens[:done].sum()), max(1, int(stats["pages_decoded"]))
    page_bytes = int(stats["cache_bytes"]) // max(1, int(stats["cache_pages"])) if stats["pages_decoded"] else 0
    return SourceProfile(
        tokens=num_tokens,
        busy_ns=ended.busy_since(began),
        cpu_ns=ended.cpu - began.cpu,
        read_bytes=int(stats["bytes_read"]),
        decoded_bytes=int(stats["bytes_decoded"]),
        sent_bytes=int(stats["bytes_served"]),
        window_bytes=page_bytes * min(source.pages.num_pages, 2 * source.sizes.window_pages),
        state_bytes=max(0, most_bytes - before_bytes - page_bytes * decoded_pages),
        pages=source.pages.num_pages,
        items=_items(alone, directory, name, seed=seed, is_masked=name in masked, most_s=most_s),
    )


def _begin_decoding() -> None:
    """Have pyarrow take what it takes once: that belongs to the process, not to the source."""
    file = io.BytesIO()
    pq.write_table(pa.table({"ids": [[1, 2, 3]] * 1000}), file)
    file.seek(0)
    pq.read_table(file)


def _read(reader: Reader, rows: Int64Array, tokens: Int64Array) -> None:
    """Read whole documents of the one source."""
    reader.read(WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=tokens))


def _items(
    catalog: Catalog, directory: Path, name: str, *, seed: int, is_masked: bool, most_s: float
) -> dict[str, ItemProfile]:
    """What items of a source cost whoever reads and whoever decodes them, by kind."""
    source = catalog.sources[name]
    if not source.items:
        return {}
    with closing(ItemReader(catalog, directory, seed=seed)) as reader:
        kinds = [kind for kind in sorted(source.items) if len(reader.table(name, kind).tokens)]
        return {kind: _items_of_kind(reader, source, kind, is_masked=is_masked, most_s=most_s) for kind in kinds}


def _items_of_kind(
    reader: ItemReader, source: SourceCatalog, kind: str, *, is_masked: bool, most_s: float
) -> ItemProfile:
    name, total = source.name, len(source.sizes.items[kind].tokens)
    table, modality = reader.table(name, kind), reader.modality(name, kind)

    def content_of(item: int) -> memoryview:
        [content] = reader.read(name, kind, np.array([item], np.int64))
        return content

    def units_of(item: int, content: memoryview) -> int:
        [planned] = reader.planned(name, kind, np.array([item]), np.zeros(1, np.int64))
        return modality.units_of(planned, content, is_masked=is_masked).nbytes

    some = np.unique(np.linspace(0, total - 1, min(total, MOST_ITEMS)).astype(np.int64))
    some = some[np.argsort(_bit_reversed(len(some)), kind="stable")]  # wherever it stops, they lie evenly
    first = int(some[0])
    units_of(first, content_of(first))  # what a first item alone costs: libraries, tables
    done, read_ns, decode_ns, file_bytes, unit_bytes = list[int](), 0, 0, 0, 0
    deadline = time.monotonic() + most_s
    for item in some.tolist():
        began = Clocks.now()
        content = content_of(item)
        between = Clocks.now()
        unit_bytes += units_of(item, content)
        decode_ns += Clocks.now().busy_since(between)
        read_ns += between.busy_since(began)
        file_bytes += len(content)
        done.append(item)
        if time.monotonic() > deadline:
            break
    return ItemProfile(
        items=len(done),
        tokens=int(np.asarray(table.tokens)[done].sum(dtype=np.int64)),
        source_tokens=source.num_tokens * len(done) // total,
        read_ns=read_ns,
        decode_ns=decode_ns,
        file_bytes=file_bytes,
        unit_bytes=unit_bytes,
    )


def _some_rows(source: SourceCatalog, most_tokens: int) -> Int64Array:
    """[n] rows of pages that lie evenly over the source, as many as have the tokens; ascending, none without tokens."""
    pages = np.unique(np.linspace(0, source.pages.num_pages - 1, MOST_PAGES).astype(np.int64))
    tokens, found, num_tokens = source.sizes.tokens, list[Int64Array](), 0
    order = np.argsort(_bit_reversed(len(pages)), kind="stable")  # wherever it stops, what was read lies evenly
    for page in pages[order].tolist():
        start, stop = (int(source.pages.first_row[one]) for one in (page, page + 1))
        rows = start + np.flatnonzero(np.asarray(tokens[start:stop]))
        found.append(rows.astype(np.int64))
        num_tokens += int(np.asarray(tokens[start:stop]).sum(dtype=np.int64))
        if num_tokens >= most_tokens:
            break
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _bit_reversed(count: int) -> Int64Array:
    """[count] for each number the one with its bits in reverse, of 16."""
    bits = np.unpackbits(np.arange(count, dtype=">u2").view(np.uint8).reshape(-1, 2), axis=1)[:, ::-1]
    found: Int64Array = np.packbits(bits, axis=1).view(">u2").reshape(-1).astype(np.int64)
    return found


def _calls(tokens: Int64Array) -> list[tuple[int, int]]:
    """Ranges of rows, about as many tokens each, at least a row."""
    group = (np.cumsum(tokens) - tokens) // CALL_TOKENS
    borders = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(tokens)] if len(tokens) else []
    return list(pairwise(borders))


def _only(maps: Mapping[str, str] | None, name: str) -> dict[str, str]:
    return {name: maps[name]} if maps is not None and name in maps else {}


def _resident_bytes(key: str) -> int:
    """Memory of this process, now (`VmRSS`) or at most so far (`VmHWM`); 0 where the kernel does not say."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)
