"""What a process reads itself, in the place of loaders or before it asks them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import CatalogError, LoaderLost, SourceUnreadable, TorchmixError
from torchmix.mixture.keys import U64
from torchmix.reader.items import ItemReader
from torchmix.reader.piece_copy import PieceCopy, Run, Scratch
from torchmix.reader.protocol import StepItems, StepReader, Tokens, WantedPieces
from torchmix.reader.reader import Reader
from torchmix.service.fleet_reader import FleetReader

# --- How much of the reading of a node its own processors take, before loaders are asked: all of it, until they are
# busy.
#
# It is 1 at first, and never moves by more than a step in a second, so that most pages are read where they were read
# before. Cost: two clocks.
#
# The share goes down by a step where the process has used nine tenths of its processors over the last second or
# longer, planning and building included, and up by a step where it has used less than seven. A process that waits for
# training uses little, so it reads all that it has time for.

LOOK_S = 1.0
"""Between two looks at the clocks."""
SPENT = 0.9
"""With this part of the processors in use, loaders are asked for more."""
FREE = 0.7
STEP = 1 / 16


class CpuShare:
    """The share of one process."""

    def __init__(
        self,
        cpu: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Begin with all of the reading.

        Args:
            cpu: Processors that the process may use, 1 or more.
            clock: Seconds, of any zero.
            cpu_clock: Processor seconds that this process has used.
        """
        self._cpu, self._clock, self._cpu_clock = cpu, clock, cpu_clock
        self._looked_s, self._used_s = clock(), cpu_clock()
        self.share = 1.0
        """Part of all pages that this process reads."""

    def look(self) -> float:
        """The share from now on."""
        now, used = self._clock(), self._cpu_clock()
        if now - self._looked_s >= LOOK_S:
            busy = (used - self._used_s) / (self._cpu * (now - self._looked_s))
            self._looked_s, self._used_s = now, used
            if busy >= SPENT:
                self.share = max(0.0, self.share - STEP)
            elif busy < FREE:
                self.share = min(1.0, self.share + STEP)
        return self.share


# --- The pieces of a step, split between this process and loaders, read by both at once and joined.
#
# A thread asks loaders while this process reads; when `read_both` returns or raises, nobody uses the connections.
# Cost: the tokens of both parts are copied once more, into one array.


class ReadBoth(NamedTuple):
    """What two readers have read of one step."""

    near: Int64Array
    """[n] the pieces that this process has read, by their places in what was asked for."""
    far: Int64Array
    """[m] the pieces that loaders were asked for, likewise."""
    asked_far: WantedPieces
    """These, as loaders were asked for them."""
    ours: Tokens
    """The tokens of the near pieces."""
    coming: Future[Tokens]
    """What loaders gave, or their error; it is there."""


def read_both(
    asked: WantedPieces,
    is_far: NDArray[np.bool_],
    thread: ThreadPoolExecutor,
    *,
    here: Callable[[WantedPieces], Tokens],
    there: Callable[[WantedPieces], Tokens],
) -> ReadBoth:
    """Read some pieces here while a thread asks loaders for the others.

    Args:
        asked: All pieces.
        is_far: [n] which of them loaders are asked for.
        thread: Runs `there`.
        here: Reads files.
        there: Asks loaders. Its error stays in `coming`.
    """
    near, far = np.flatnonzero(~is_far), np.flatnonzero(is_far)
    asked_far = asked.take(far)
    coming = thread.submit(there, asked_far)
    try:
        ours = here(asked.take(near))
    finally:
        wait([coming])  # nobody uses the connections afterwards
    return ReadBoth(near, far, asked_far, ours, coming)


def joined_tokens(asked: WantedPieces, parts: Sequence[tuple[Int64Array, Tokens]], scratch: Scratch) -> Tokens:
    """Join the tokens of several parts; each part is the places of its pieces, with their tokens."""
    order = np.concatenate([chosen for chosen, _ in parts])
    places = asked.places[order]
    copy = PieceCopy(
        sizes=asked.tokens[order],
        places=places,
        goes_on=np.zeros(len(order), np.bool_),
        num_places=asked.num_places,
        scratch=scratch,
    )
    successors, runs, first = np.empty(len(order), np.int64), list[Run](), 0
    for chosen, found in parts:
        successors[chosen] = found.successors
        runs.append((found.values, first, places[first : first + len(chosen)].tolist()))
        first += len(chosen)
    copy.copy_all(runs)
    others = [replace(other, piece=chosen[other.piece]) for chosen, found in parts for other in found.others]
    without = [found.unlabelled for _, found in parts if found.unlabelled is not None]
    return Tokens(
        values=copy.out,
        successors=successors,
        others=tuple(others),
        unlabelled=np.concatenate(without) if without else None,
    )


# --- A reader that reads what its processors have time for, and asks loaders for the rest.
#
# The tokens are the same whoever reads them; nothing waits for a loader that is not there, and when the last one has
# gone this process reads alone, until one is back. Cost: while this process reads alone, a look at the connections;
# else both read at once, and their tokens are copied into one array.
#
# Who reads a page follows from a hash of its run: below the share it is read here, else by the run's owner. So when
# the share moves by a step, only as many pages change sides.

logger = logging.getLogger(__name__)


class NodeFirst:
    """Reads here first; it belongs to one thread at a time."""

    def __init__(self, here: Reader, there: FleetReader, share: CpuShare) -> None:
        """Begin by reading all here.

        Args:
            here: Reads files; closed by `close`.
            there: Asks loaders; closed by `close`. It has not waited for them.
            share: Of the pages that are read here.
        """
        self._here, self._there, self._share = here, there, share
        self._thread = ThreadPoolExecutor(1, "torchmix-far")
        self._scratch, self._other_scratch = Scratch(), Scratch()
        self._parts = Scratch(), Scratch()
        """Memory of what is read here beside loaders, and of what they did not read."""
        self._tokens_here = self._tokens_there = self._num_lost = 0
        self._is_alone = True
        self._is_noted = False
        """Whether the log has been told that no loader answers."""

    @property
    def items(self) -> StepItems | None:
        """The items of a step: they are read here."""
        return self._here.items

    def read(self, pieces: WantedPieces) -> Tokens:
        """As `Reader.read`; values are valid until the next call but one."""
        self._scratch, self._other_scratch = self._other_scratch, self._scratch
        is_far = self._is_far(pieces)
        if not is_far.any():
            self._tokens_here += int(pieces.tokens.sum())
            return self._here.read(pieces, scratch=self._scratch)
        if is_far.all():
            return self._far(pieces, partial(self._there.read, pieces), self._scratch)
        here = partial(self._here.read, scratch=self._parts[0])
        both = read_both(pieces, is_far, self._thread, here=here, there=self._there.read)
        self._tokens_here += int(pieces.tokens[both.near].sum())
        theirs = self._far(both.asked_far, both.coming.result, self._parts[1])
        return joined_tokens(pieces, ((both.near, both.ours), (both.far, theirs)), self._scratch)

    def pages_at_once(self, source: int) -> int:
        """As `Reader.pages_at_once`."""
        return self._here.pages_at_once(source)

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.warm`, by whom the pages will be asked of."""
        is_far = self._are_far(self._there.runs_of_pages(source, page_ids))
        self._here.warm(source, page_ids[~is_far])
        self._there.warm(source, page_ids[is_far])

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """As `Reader.hold`."""
        self._here.hold(source, rows, starts)

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.forget`, by all."""
        self._here.forget(source, page_ids)
        self._there.forget(source, page_ids)

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """As `Reader.end_window`, of the pages that are read here."""
        if page_ids is not None:
            page_ids = page_ids[~self._are_far(self._there.runs_of_pages(source, page_ids))]
        self._here.end_window(source, page_ids)

    def stats(self) -> dict[str, int | float]:
        """Figures of both, the tokens that each has given, the share, and how often no loader was left."""
        there, here = self._there.stats(), self._here.stats()
        return {
            **there,
            **here,
            "bytes_served": here["bytes_served"] + there["bytes_served"],
            "node_share": self._share.share,
            "total_node_tokens": self._tokens_here,
            "total_loader_tokens": self._tokens_there,
            "total_loader_losses": self._num_lost,
        }

    def close(self) -> None:
        """Close both; may be called again."""
        self._thread.shutdown()
        self._there.close()
        self._here.close()

    def _is_far(self, pieces: WantedPieces) -> NDArray[np.bool_]:
        """[n] which pieces loaders are asked for."""
        share = self._share.look()
        if self._there.look():
            self._is_alone = self._is_noted = False
        elif not self._is_alone:
            self._lose(self._there.why_none())
        elif share < 1 and not self._is_noted:
            self._is_noted = True
            logger.warning("the processors of this node are busy, and %s. It reads alone", self._there.why_none())
        if self._is_alone or share >= 1:
            return np.zeros(len(pieces), np.bool_)
        return self._are_far(self._there.runs_of_pieces(pieces))

    def _are_far(self, runs: U64) -> NDArray[np.bool_]:
        """Which runs of pages loaders are asked for."""
        if self._is_alone:
            return np.zeros(len(runs), np.bool_)
        found: NDArray[np.bool_] = (runs >> np.uint64(11)) * 2.0**-53 >= self._share.share
        return found

    def _far(self, asked: WantedPieces, theirs: Callable[[], Tokens], scratch: Scratch) -> Tokens:
        """What loaders give; or what this process reads where they fail."""
        try:
            found = theirs()
            self._tokens_there += int(asked.tokens.sum())
            return found
        except LoaderLost as error:
            self._lose(str(error))
        except CatalogError as error:
            logger.warning("loaders cannot read what this node tries itself then: %s", error)
        self._tokens_here += int(asked.tokens.sum())
        return self._here.read(asked, scratch=scratch)

    def _lose(self, reason: str) -> None:
        self._is_alone = self._is_noted = True
        self._num_lost += 1
        logger.warning("%s. This node reads alone until a loader answers again", reason)


# --- A reader that reads and transforms some sources itself, and asks loaders for the others.
#
# The tokens are the same wherever a source is read; no loader is asked for a source of this process. Cost: where a
# step has sources of both, they are read at once, and their tokens are copied into one array.


class BySource:
    """Reads some sources here; it belongs to one thread at a time."""

    def __init__(self, here: Reader, there: StepReader, names: Sequence[str], here_names: Collection[str]) -> None:
        """Nothing is read.

        Args:
            here: Reads files; closed by `close`.
            there: Asks loaders; closed by `close`.
            names: All sources, by number.
            here_names: Those that are read here.
        """
        self._here, self._there = here, there
        self._is_here = np.array([name in here_names for name in names], np.bool_)
        self._thread = ThreadPoolExecutor(1, "torchmix-there")
        self._scratch, self._other_scratch = Scratch(), Scratch()
        self._part = Scratch()
        self._tokens_here = self._tokens_there = 0

    @property
    def items(self) -> StepItems | None:
        """The items of a step: loaders are asked for them."""
        return self._there.items

    def read(self, pieces: WantedPieces) -> Tokens:
        """As `Reader.read`; values are valid until the next call but one."""
        self._scratch, self._other_scratch = self._other_scratch, self._scratch
        is_here = self._is_here[pieces.source]
        self._tokens_here += int(pieces.tokens[is_here].sum())
        self._tokens_there += int(pieces.tokens[~is_here].sum())
        if is_here.all():
            return self._here.read(pieces, scratch=self._scratch)
        if not is_here.any():
            return self._there.read(pieces)
        here = partial(self._here.read, scratch=self._part)
        both = read_both(pieces, ~is_here, self._thread, here=here, there=self._there.read)
        return joined_tokens(pieces, ((both.near, both.ours), (both.far, both.coming.result())), self._scratch)

    def pages_at_once(self, source: int) -> int:
        """As `Reader.pages_at_once`."""
        return self._of(source).pages_at_once(source)

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.warm`."""
        self._of(source).warm(source, page_ids)

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """As `Reader.hold`, each of its own."""
        is_here = self._is_here[source]
        self._here.hold(source[is_here], rows[is_here], starts[is_here])
        self._there.hold(source[~is_here], rows[~is_here], starts[~is_here])

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.forget`."""
        self._of(source).forget(source, page_ids)

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """As `Reader.end_window`."""
        self._of(source).end_window(source, page_ids)

    def stats(self) -> dict[str, int | float]:
        """Figures of both, and the tokens that each has given."""
        there, here = self._there.stats(), self._here.stats()
        return {
            **there,
            **here,
            "bytes_served": here["bytes_served"] + there["bytes_served"],
            "total_worker_tokens": self._tokens_here,
            "total_loader_tokens": self._tokens_there,
        }

    def close(self) -> None:
        """Close both; may be called again."""
        self._thread.shutdown()
        self._there.close()
        self._here.close()

    def _of(self, source: int) -> StepReader:
        return self._here if self._is_here[source] else self._there


# --- A reader that asks loaders, until none answers: then it reads the files itself.
#
# No data file is opened while a loader answers; what is read without loaders is what they would have given.


class FleetOrFiles:
    """A `StepReader` that asks a fleet as long as one loader answers, and then reads files."""

    def __init__(
        self,
        reader: StepReader,
        read_here: Callable[[], StepReader] | None,
        *,
        lost: str = "",
        items: ItemReader | None = None,
    ) -> None:
        """Begin with a fleet; or, where it was lost before, with a reader of this process.

        Args:
            reader: Closed by `close`.
            read_here: Opens files when the fleet is lost; None: it was.
            lost: How.
            items: What reads items; closed by `close`. None: whichever reads the rest.
        """
        self._reader = reader
        self._read_here = read_here
        self._lost, self._items = lost, items
        self._held: tuple[Int64Array, Int64Array, Int64Array] | None = None

    @property
    def items(self) -> StepItems | None:
        """The items of a step, from whichever reads."""
        return self._items or self._reader.items

    def read(self, pieces: WantedPieces) -> Tokens:
        """As `Reader.read`.

        Raises:
            LoaderLost: No loader answers, and files cannot be read here.
        """
        while True:
            try:
                found = self._reader.read(pieces)
                # A reader of files uses its memory in each call, one of loaders in every other.
                return found if self._read_here is not None else replace(found, values=found.values.copy())
            except LoaderLost as error:
                assert self._read_here is not None, "files raise other errors"
                self._reader.close()
                self._reader, self._read_here = files_instead(error, self._read_here), None
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
        if self._items is not None:
            self._items.close()


def files_instead(error: LoaderLost, read_here: Callable[[], StepReader]) -> StepReader:
    """A reader of this process, where it sees the files.

    Args:
        error: How the loaders were lost.
        read_here: Opens the files.

    Raises:
        LoaderLost: It does not see them.
    """
    try:
        reader = read_here()
    except TorchmixError as other:
        raise LoaderLost(f"{error}. This process cannot read in their place: {other}") from other
    logger.warning("%s. This process reads in their place", error)
    return reader
