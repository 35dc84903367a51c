"""The steps of replicas, read in this process: the one place of this room that opens a catalog and a reader.

All that was opened is closed when the generator is, or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

from torchmix.catalog.store import Catalog, id_limit
from torchmix.constructor.arrays import BlockArrays, StepMemory
from torchmix.reader.items import decoded_by_loaders, open_items
from torchmix.reader.page_cache import CacheRoom, used_rows
from torchmix.reader.protocol import StepReader, StoppedWaiting
from torchmix.reader.reader import Reader
from torchmix.recipe.sources import maps_of, masked_sources
from torchmix.service.open_fleet import open_fleet_reader
from torchmix.steps.blocks import Consumer, Consumers
from torchmix.steps.history import catalog_of_run
from torchmix.steps.replica_steps import SharedBlock, StreamSettings, shared_blocks
from torchmix.steps.state import LoaderState


class HeldReader:
    """A reader that outlives its stream, for the next stream of the same part, at another layout."""

    def __init__(self) -> None:
        """Hold nothing; a stream's reader is closed with the stream, unless `is_kept` is set before."""
        self.is_kept = False
        self._held: tuple[Catalog, StepReader] | None = None

    def take(self) -> tuple[Catalog, StepReader] | None:
        """The catalog and the reader, if there are any; the taker closes the reader, or gives it back."""
        held, self._held = self._held, None
        return held

    def give_back(self, catalog: Catalog, reader: StepReader) -> None:
        """Keep a reader that a stream has done with, or close it."""
        if self.is_kept:
            self._held = catalog, reader
        else:
            reader.close()

    def close(self) -> None:
        """Close what is held."""
        if (held := self.take()) is not None:
            held[1].close()


def local_blocks(
    settings: StreamSettings,
    state: LoaderState,
    *,
    catalog: Catalog | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    held: HeldReader | None = None,
) -> Generator[BlockArrays, None, None]:
    """The steps of the settings' replica, from a state on; errors as those of `shared_blocks`.

    Args:
        settings: What the steps follow from.
        state: Where to begin, of the settings' part and layout.
        catalog: The part's, where it is open already.
        is_stopped: Asked while a far start is planned, and while a decision or a loader is waited for.
        held: Gives the reader of an earlier stream, and takes it afterwards.
    """
    one = {0: Consumer(settings.replica, StepMemory(), settings.leader)}
    blocks = local_shared_blocks(
        settings, state, catalog=catalog, consumers=lambda _: one, is_stopped=is_stopped, held=held
    )
    try:
        for block in blocks:
            yield block.arrays[0]
    finally:
        blocks.close()


def local_shared_blocks(
    settings: StreamSettings,
    state: LoaderState,
    *,
    consumers: Consumers,
    catalog: Catalog | None = None,
    is_stopped: Callable[[], bool],
    held: HeldReader | None = None,
    room: CacheRoom | None = None,
) -> Generator[SharedBlock, None, None]:
    """The steps of several consumers, with files opened here; arguments and errors as those of `shared_blocks`.

    Args:
        held: Gives the reader of an earlier stream, and takes it afterwards.
        room: Where decoded pages are kept, with those of other streams of this process; this stream's own if None.
    """
    holder = HeldReader() if held is None else held
    with suppress(StoppedWaiting):
        catalog, reader = holder.take() or _opened(settings, catalog, is_stopped, room)
        try:
            yield from shared_blocks(
                settings, state, catalog=catalog, reader=reader, consumers=consumers, is_stopped=is_stopped
            )
        finally:
            holder.give_back(catalog, reader)


def _opened(
    settings: StreamSettings, catalog: Catalog | None, is_stopped: Callable[[], bool], room: CacheRoom | None
) -> tuple[Catalog, StepReader]:
    part = settings.part
    if catalog is None:
        catalog = catalog_of_run(Path(settings.catalog_folder), part, settings.catalog)
    return catalog, _open_reader(settings, catalog, is_stopped, room)


def _open_reader(
    settings: StreamSettings, catalog: Catalog, is_stopped: Callable[[], bool], room: CacheRoom | None
) -> StepReader:
    """A reader of files; or of loaders, where the settings say so."""
    part = settings.part
    ids, masked = id_limit(part.vocab_size, settings.options.padded_vocab_size), masked_sources(part.sources)

    def read_here() -> Reader:
        return Reader(
            catalog,
            Path(settings.base),
            cache_bytes=settings.cache_bytes,
            room=room,
            ids=ids,
            masked=masked,
            seed=part.seed,
            maps=maps_of(part.sources),
            items=open_items(catalog, Path(settings.base), seed=part.seed) if settings.fleet is None else None,
            used=used_rows(part, catalog),
        )

    if settings.fleet is None:
        return read_here()
    return open_fleet_reader(
        settings.fleet,
        catalog,
        Path(settings.base),
        seed=part.seed,
        masked=masked,
        ids=ids,
        cache_bytes=settings.cache_bytes,
        read_here=read_here,
        unit_kinds=decoded_by_loaders(part, catalog, has_loaders=True),
        is_stopped=is_stopped,
    )
