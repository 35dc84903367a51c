"""From settings to a reader that asks a fleet, and that reads here when the fleet is lost.

In: where loaders are, an open catalog, how to read without them. Out: a `StepReader`. Must hold: no data file is opened
while a loader answers; what is read without loaders is what they would have given. Cost: connecting.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog
from torchmix.catalog.vocabulary import IdLimit
from torchmix.errors import LoaderLost, OptionError, SourceUnreadable, TorchmixError
from torchmix.reader.images import CACHE_BYTES, ImageReader
from torchmix.reader.pieces.piece_copy import Tokens
from torchmix.reader.protocol import StepImages, StepReader
from torchmix.reader.reader import Reader
from torchmix.service.client import LoaderLinks
from torchmix.service.endpoints import Endpoints
from torchmix.service.fleet import LoaderFleet
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.keys import ClientKeys, KeyPair, client_keys
from torchmix.service.members import FleetMembers, FleetPatience
from torchmix.service.messages import LoaderHello
from torchmix.service.served import transforms_digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSettings:
    """Where a client finds its loaders; plain values, so that it can travel to a worker process."""

    endpoints: tuple[str, ...]
    """`tcp://` or `ipc://`."""
    folders: tuple[str, ...] = ()
    """Folders where loaders register."""
    keys: str = ""
    """The folder of the client's keys, or its secret; empty: without."""
    own: KeyPair | None = field(default=None, compare=False)
    """The client's keys where they lie in no folder. Leaders that share a worker have one each; any of them will do."""
    server_of: dict[str, str] = field(default_factory=dict)
    """With `own`: public key of each loader, by endpoint."""
    lost_s: float
    """How long no loader may answer."""


def open_fleet_reader(
    settings: FleetSettings,
    catalog: Catalog,
    directory: Path,
    *,
    seed: int,
    masked: frozenset[str],
    ids: IdLimit | None,
    read_here: Callable[[], StepReader],
    is_stopped: Callable[[], bool] = lambda: False,
) -> StepReader:
    """A reader that asks loaders.

    Args:
        settings: Where they are.
        catalog: What is asked for.
        directory: The recipe's folder.
        seed: The recipe's.
        masked: Sources whose bad pages are masked.
        ids: The bound that all ids must be below.
        read_here: Opens the files in this process; called where no loader answers.
        is_stopped: Asked while a loader is waited for; True ends the wait with `StoppedWaiting`.

    Raises:
        OptionError: Keys are missing or wrong, or a source has images in files that its rows name.
        LoaderLost: No loader answers, and files cannot be read here.
    """
    images = _images(settings, catalog, directory, is_stopped)
    try:
        return _asking(settings, catalog, seed, masked, ids, read_here, is_stopped, images)
    except BaseException:
        if images is not None:
            images.close()
        raise


def _asking(
    settings: FleetSettings,
    catalog: Catalog,
    seed: int,
    masked: frozenset[str],
    ids: IdLimit | None,
    read_here: Callable[[], StepReader],
    is_stopped: Callable[[], bool],
    images: ImageReader | None = None,
) -> StepReader:
    hello = LoaderHello(
        client=f"{socket.gethostname()}:{os.getpid()}",
        catalog=catalog.fingerprint,
        transforms=transforms_digest(catalog, seed),
        masked=tuple(sorted(masked)),
    )
    links = LoaderLinks(_keys(settings))
    endpoints = Endpoints(fixed=settings.endpoints, folders=tuple(map(Path, settings.folders)))
    patience = FleetPatience(lost_s=settings.lost_s)
    fleet = LoaderFleet(FleetMembers(endpoints, links, hello, patience=patience, is_stopped=is_stopped))
    try:
        return FleetOrFiles(FleetReader(catalog, fleet, ids=ids), read_here, images=images)
    except LoaderLost as error:
        fleet.close()
        return FleetOrFiles(_files(error, read_here), None, lost=str(error), images=images)
    except BaseException:
        fleet.close()
        raise


def _images(
    settings: FleetSettings, catalog: Catalog, directory: Path, is_stopped: Callable[[], bool]
) -> ImageReader | None:
    """What asks loaders for the images of a catalog's sources, over connections of its own."""
    sources = {name: source.images for name, source in catalog.sources.items() if source.images is not None}
    if not sources:
        return None
    by_path = [name for name, images in sources.items() if images.folder is not None]
    if by_path and settings.own is None:
        raise OptionError(
            f"rows of {', '.join(by_path)} name files of images, which whoever builds the steps opens, and trainers "
            "with loaders.where: remote open no data file; use job or node"
        )

    def open_columns(columns: Catalog) -> StepReader:
        def read_here() -> StepReader:
            return Reader(columns, directory, cache_bytes=CACHE_BYTES, seed=0)

        return _asking(settings, columns, 0, frozenset(), None, read_here, is_stopped)

    return ImageReader(catalog, directory, open_columns=open_columns)


class FleetOrFiles:
    """A `StepReader` that asks a fleet as long as one loader answers, and then reads files."""

    def __init__(
        self,
        reader: StepReader,
        read_here: Callable[[], StepReader] | None,
        *,
        lost: str = "",
        images: ImageReader | None = None,
    ) -> None:
        """Begin with a fleet; or, where it was lost before, with a reader of this process.

        Args:
            reader: Closed by `close`.
            read_here: Opens files when the fleet is lost; None: it was.
            lost: How.
            images: What reads images; closed by `close`. None: whichever reads the rest.
        """
        self._reader = reader
        self._read_here = read_here
        self._lost, self._images = lost, images
        self._held: tuple[Int64Array, Int64Array, Int64Array] | None = None

    @property
    def images(self) -> StepImages | None:
        """The images of a step, from whichever reads."""
        return self._images or self._reader.images

    def read(
        self,
        source: NDArray[np.integer[Any]],
        rows: Int64Array,
        starts: Int64Array,
        tokens: Int64Array,
        *,
        places: Int64Array,
        num_places: int,
        epochs: Int64Array | None = None,
    ) -> Tokens:
        """As `Reader.read`.

        Raises:
            LoaderLost: No loader answers, and files cannot be read here.
        """
        while True:
            try:
                found = self._reader.read(
                    source, rows, starts, tokens, places=places, num_places=num_places, epochs=epochs
                )
                # A reader of files uses its memory in each call, one of loaders in every other.
                return found if self._read_here is not None else replace(found, values=found.values.copy())
            except LoaderLost as error:
                assert self._read_here is not None, "files raise other errors"
                self._reader.close()
                self._reader, self._read_here = _files(error, self._read_here), None
                self._lost = str(error)
                if self._held is not None:
                    self._reader.hold(*self._held)
            except SourceUnreadable as error:
                if not self._lost:
                    raise
                raise LoaderLost(f"{self._lost}. This process cannot read in their place: {error}") from error

    def pages_at_once(self, source: int) -> int:
        """As `Reader.pages_at_once`."""
        return self._reader.pages_at_once(source)

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.warm`."""
        self._reader.warm(source, page_ids)

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """As `Reader.hold`."""
        self._held = source, rows, starts
        self._reader.hold(source, rows, starts)

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.forget`."""
        self._reader.forget(source, page_ids)

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """As `Reader.end_window`."""
        self._reader.end_window(source, page_ids)

    def stats(self) -> dict[str, int | float]:
        """Figures of whichever reads."""
        return self._reader.stats()

    def close(self) -> None:
        """Close whichever reads; may be called again."""
        self._reader.close()
        if self._images is not None:
            self._images.close()


def _keys(settings: FleetSettings) -> ClientKeys | None:
    if settings.own is not None:
        return ClientKeys(own=settings.own, server_of=settings.server_of)
    return client_keys(Path(settings.keys)) if settings.keys else None


def _files(error: LoaderLost, read_here: Callable[[], StepReader]) -> StepReader:
    """A reader of this process, where it sees the files."""
    try:
        reader = read_here()
    except TorchmixError as other:
        raise LoaderLost(f"{error}. This process cannot read in their place: {other}") from other
    logger.warning("%s. This process reads in their place", error)
    return reader
