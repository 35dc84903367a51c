"""The steps of replicas, read in this process: the one place of this room that opens a catalog and a reader.

In: what a stream is made of, and a state to begin at. Out: `StepArrays`, as `shared_steps` makes them. Must hold: all
that was opened is closed when the generator is, or ends. Cost: that of opening, with the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

from torchmix.catalog.open_part import open_part
from torchmix.catalog.store import Catalog
from torchmix.catalog.vocabulary import id_limit
from torchmix.constructor.arrays import StepArrays
from torchmix.constructor.memory import StepMemory
from torchmix.reader.images import open_images
from torchmix.reader.protocol import StepReader
from torchmix.reader.reader import Reader
from torchmix.reader.used_rows import used_rows
from torchmix.recipe.source.bad_rows import masked_sources
from torchmix.recipe.source.row_map import maps_of
from torchmix.service.open_fleet import open_fleet_reader
from torchmix.steps.replica_steps import Consumer, Consumers, SharedStep, StreamSettings, shared_steps


def local_steps(
    settings: StreamSettings,
    state: bytes,
    *,
    catalog: Catalog | None = None,
    memory: StepMemory | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Generator[StepArrays, None, None]:
    """The steps of the settings' replica, from a state on; arguments and errors as those of `replica_steps`.

    Args:
        settings: What the steps follow from.
        state: Where to begin.
        catalog: The part's, where it is open already.
        memory: Where the sequence fields' memory comes from; this process' own if None.
        is_stopped: Asked while a far start is planned.
    """
    one = {0: Consumer(settings.replica, memory or StepMemory())}
    steps = local_shared_steps(settings, state, catalog=catalog, consumers=lambda _: one, is_stopped=is_stopped)
    try:
        for step in steps:
            yield step.arrays[0]
    finally:
        steps.close()


def local_shared_steps(
    settings: StreamSettings,
    state: bytes,
    *,
    consumers: Consumers,
    catalog: Catalog | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Generator[SharedStep, None, None]:
    """The steps of several consumers, with files opened here; arguments and errors as those of `shared_steps`."""
    part = settings.part
    if catalog is None:
        catalog = open_part(Path(settings.catalog_folder), part)
    reader = _open_reader(settings, catalog)
    try:
        yield from shared_steps(
            settings, state, catalog=catalog, reader=reader, consumers=consumers, is_stopped=is_stopped
        )
    finally:
        reader.close()


def _open_reader(settings: StreamSettings, catalog: Catalog) -> StepReader:
    """A reader of files; or of loaders, where the settings say so."""
    part = settings.part
    ids, masked = id_limit(part.vocab_size, settings.padded_vocab_size), masked_sources(part.sources)

    def read_here() -> Reader:
        return Reader(
            catalog,
            Path(settings.base),
            cache_bytes=settings.cache_bytes,
            ids=ids,
            masked=masked,
            seed=part.seed,
            maps=maps_of(part.sources),
            images=open_images(catalog, Path(settings.base)),
            used=used_rows(part, catalog),
        )

    if settings.fleet is None:
        return read_here()
    return open_fleet_reader(settings.fleet, catalog, seed=part.seed, masked=masked, ids=ids, read_here=read_here)
