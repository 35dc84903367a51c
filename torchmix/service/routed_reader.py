"""A reader that has each page read by loaders or by this process, as a table says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogError, LoaderLost, SourceUnreadable, TorchmixError
from torchmix.mixture.keys import U64
from torchmix.reader.items import UnitReader
from torchmix.reader.open_documents import Run
from torchmix.reader.piece_copy import PieceCopy, Scratch, write_padding
from torchmix.reader.protocol import Filled, Filling, StepItems, Tokens, WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.amounts import bytes_text
from torchmix.service.fleet_reader import FleetReader

logger = logging.getLogger(__name__)

Found = TypeVar("Found", Tokens, Filled)

# --- How much of the reading of a node its own processors and its memory take, before loaders are asked: all of it,
# until they are used.
#
# Both are parts of all pages, in the order of the hashes of their runs, so the smaller one holds. What one node leaves
# to loaders others with as much memory leave, too, and a loader decodes it once for all of them.
#
# By its processors: the fraction is 1 at first, and never moves by more than a step in a second, so that most pages are
# read where they were read before. It goes down by a step where the process has used nine tenths of its processors over
# the last second or longer, planning and building included, and up by a step where it has used less than seven. A
# process that waits for training uses little, so it reads all that it has time for. Cost: two clocks.
#
# By its memory: the sizes of the pages that streams may need, those of their present and next windows, are known before
# any is read. The part is about the largest one of which these take no more than the node has: a little less, so that
# windows that differ a little do not move pages. Cost: a hash and a size of each page of a window, when the window
# begins.

LOOK_S = 1.0
"""Between two looks at the clocks."""
SPENT = 0.9
"""With this part of the processors in use, loaders are asked for more."""
FREE = 0.7
STEP = 1 / 16


class NodeFraction:
    """The fraction of one process."""

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
        self.fraction = 1.0
        """Part of all pages that this process reads."""

    def look(self) -> float:
        """The fraction from now on."""
        now, used = self._clock(), self._cpu_clock()
        if now - self._looked_s >= LOOK_S:
            busy = (used - self._used_s) / (self._cpu * (now - self._looked_s))
            self._looked_s, self._used_s = now, used
            if busy >= SPENT:
                self.fraction = max(0.0, self.fraction - STEP)
            elif busy < FREE:
                self.fraction = min(1.0, self.fraction + STEP)
        return self.fraction


NUM_PARTS = 1024
"""Parts of all pages that a node's memory is counted in."""


class NodeRoom:
    """Which part of the pages that are needed a node's memory holds."""

    def __init__(self, room_bytes: int) -> None:
        """Nothing is needed yet, so all of it fits.

        Args:
            room_bytes: What decoded pages may take, 0 or more.
        """
        self.room_bytes = room_bytes
        self._of: dict[int, Int64Array] = {}
        """[NUM_PARTS] bytes by the hashes of their runs, of each stream."""
        self._ends = np.zeros(NUM_PARTS, np.int64)
        self._num_parts = NUM_PARTS
        """How many of them the node holds."""

    def expect(self, stream: int, runs: U64, num_bytes: Int64Array) -> None:
        """Take the pages that a stream may need, in place of those before.

        Args:
            stream: Its number.
            runs: [k] hash of the run of each page.
            num_bytes: [k] memory that each takes.
        """
        found = np.zeros(NUM_PARTS, np.int64)
        np.add.at(found, (runs >> np.uint64(54)).astype(np.int64), num_bytes)
        before = self._of.get(stream)
        self._of[stream] = found
        self._ends += np.cumsum(found if before is None else found - before)
        most = int(np.searchsorted(self._ends, self.room_bytes, side="right"))
        if not most - most // 16 <= self._num_parts <= most:
            self._num_parts = most if most == NUM_PARTS else most - most // 32

    @property
    def part(self) -> float:
        """The part of the pages that the node holds."""
        return self._num_parts / NUM_PARTS

    @property
    def needed_bytes(self) -> int:
        """Memory of all pages that streams may need; a page counts for each stream that does."""
        return int(self._ends[-1])

    @property
    def held_bytes(self) -> int:
        """Memory of those that the node reads, by the part."""
        return int(self._ends[self._num_parts - 1]) if self._num_parts else 0


# --- The reader.
#
# The tokens are the same whoever reads them. Cost: where all pieces have one road, nothing; else both read at once, and
# their tokens are copied once more, into one array.


class RoutedReader:
    """A `StepReader` of loaders and of files; it belongs to one thread at a time.

    The table has the part of each source's pages that this process reads: 0 where loaders are asked, 1 where they are
    not, and for a node that reads first what it has time and memory for. Then a hash of the page's run decides, so that
    only as many pages change sides as the fraction moves.

    Loaders that are lost come back for a node that reads first, and it tries itself what they cannot read. For all
    others the loss is final: files are opened, if they were not, and the job ends where that is impossible.
    """

    def __init__(
        self,
        catalog: Catalog,
        there: FleetReader | LoaderLost,
        open_files: Callable[[], Reader | UnitReader],
        *,
        here: Collection[str] = (),
        away: Collection[str] = (),
        node_fraction: NodeFraction | None = None,
        room: NodeRoom | None = None,
        items: StepItems | None = None,
    ) -> None:
        """Open files if some are to be read here from the start.

        Args:
            catalog: What is read.
            there: Asks loaders, which it has waited for unless the node reads first; closed by `close`. Or how they
                were lost.
            open_files: Opens the files of all sources; called once, when the first page is to be read here.
            here: Names of sources that no loader is asked for.
            away: Where a node reads first: names of sources that are read here only where no loader answers.
            node_fraction: Where a node reads first: how many of the pages its processors have time for.
            room: Where a node reads first: how many its memory holds. Until a stream says what it may need, these are
                the pages of a call. None: all.
            items: What reads items; closed by `close`. None: whoever reads files.

        Raises:
            LoaderLost: Loaders were lost, and files cannot be read here.
        """
        self._open_files, self._node_fraction, self._room, self._items = open_files, node_fraction, room, items
        self._there = there if isinstance(there, FleetReader) else None
        self._files: Reader | UnitReader | None = None
        self._is_here = np.array([name in here for name in catalog.sources], np.bool_)
        self._is_away = np.array([name in away for name in catalog.sources], np.bool_)
        self._num_pages = [source.pages.num_pages for source in catalog.sources.values()]
        self._part_here = np.where(self._is_here | (node_fraction is not None), 1.0, 0.0)
        """[S] the table."""
        self._weighs = np.ones(len(self._part_here), np.bool_)
        """[S] whether pages that are kept take memory of this process; those of mapped files do not."""
        self._expected: dict[int, list[tuple[int, Int64Array, U64]]] = {}
        """The pages that each stream may need, by source, with their hashes; of a node whose memory is counted."""
        self._part_kept = 1.0
        """Pages above it have been dropped."""
        self._thread = ThreadPoolExecutor(1, "torchmix-far")
        self._scratch, self._other_scratch = Scratch(), Scratch()
        self._parts = Scratch(), Scratch()
        """Memory of what each has read of one call."""
        self._held: tuple[Int64Array, Int64Array, Int64Array] | None = None
        self._lost = ""
        """How loaders were lost for good."""
        self._is_alone = node_fraction is not None
        """Whether no loader of a node that reads first answers."""
        self._is_noted = False
        """Whether the log has been told that it is alone."""
        self._tokens_here = self._tokens_there = self._num_lost = 0
        try:
            if isinstance(there, LoaderLost):
                self._lose(there)
            elif self._part_here.any():
                self._open()
        except BaseException:
            self.close()
            raise

    @property
    def items(self) -> StepItems | None:
        """The items of a step."""
        return self._items if self._items is not None or self._files is None else self._files.items

    def read(self, pieces: WantedPieces) -> Tokens:
        """As `Reader.read`; values are valid until the next call but one.

        Raises:
            LoaderLost: No loader answers, and files cannot be read here.
        """
        self._scratch, self._other_scratch = self._other_scratch, self._scratch
        self._look(pieces)
        is_far = self._is_far(pieces)
        there = self._there
        if there is not None and is_far.all():  # no piece needs no file
            return self._far(pieces, lambda: there.read(pieces, scratch=self._scratch), _reading(self._scratch))
        if there is None or not is_far.any():
            return self._near(pieces, _reading(self._scratch))
        near, far = np.flatnonzero(~is_far), np.flatnonzero(is_far)
        theirs = pieces.take(far)
        coming = self._thread.submit(there.read, theirs)
        try:
            ours = self._near(pieces.take(near), _reading(self._parts[0]))
        finally:
            wait([coming])  # nobody uses the connections afterwards
        found = self._far(theirs, coming.result, _reading(self._parts[1]))
        return joined_tokens(pieces, ((near, ours), (far, found)), self._scratch)

    def fill(self, pieces: WantedPieces, outs: Sequence[Filling], *, pads: bool = True) -> Filled:
        """As `Reader.fill`.

        Raises:
            LoaderLost: No loader answers, and files cannot be read here.
        """
        if pads:
            write_padding(pieces, outs)
        self._look(pieces)
        is_far, there, here = self._is_far(pieces), self._there, _filling(outs)
        if there is not None and is_far.all():
            return self._far(pieces, lambda: there.fill(pieces, outs, pads=False), here)
        if there is None or not is_far.any():
            return self._near(pieces, here)
        near, far = np.flatnonzero(~is_far), np.flatnonzero(is_far)
        theirs = pieces.take(far)
        coming = self._thread.submit(there.fill, theirs, outs, pads=False)
        try:
            ours = self._near(pieces.take(near), here)
        finally:
            wait([coming])
        return joined_filled(((near, ours), (far, self._far(theirs, coming.result, here))))

    def pages_at_once(self, source: int) -> int:
        """As `Reader.pages_at_once`."""
        if self._there is None or self._part_here[source]:
            return self._open().pages_at_once(source)
        return self._there.pages_at_once(source)

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.warm`, by whom the pages will be asked of."""
        is_far = self._are_far(source, page_ids)
        if self._there is not None and is_far.any():
            self._there.warm(source, page_ids[is_far])
        if not is_far.all():
            self._open().warm(source, page_ids[~is_far])

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """As `Reader.hold`; loaders keep the documents that they were asked for in part."""
        self._held = source, rows, starts
        if self._files is not None:
            self._files.hold(*self._held)

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.forget`, by all who may have read some."""
        if self._files is not None:
            self._files.forget(source, page_ids)
        if self._there is not None and not self._is_here[source]:
            self._there.forget(source, page_ids)

    def expect(self, stream: int, pages: Sequence[tuple[int, Int64Array | None]]) -> None:
        """As `StepReader.expect`: what the node's memory does not hold of it, loaders are asked for."""
        if self._room is None or self._there is None:
            return
        files, none = self._open(), np.zeros(0, np.int64)
        found = [(s, np.arange(self._num_pages[s]) if some is None else some) for s, some in pages]
        named = [(s, some, self._runs_to_hold(s, some)) for s, some in found if not self._is_away[s]]
        sizes = [np.array(files.planned_bytes(s, some), np.int64) for s, some, _ in named]
        for (s, some, _), num_bytes in zip(named, sizes, strict=True):
            self._weighs[s] = not len(some) or num_bytes.any()
        if stream != _CALL and self._expected.pop(_CALL, None) is not None:
            self._room.expect(_CALL, none.astype(np.uint64), none)
        runs = np.concatenate([none.astype(np.uint64), *(one[2] for one in named)])
        self._room.expect(stream, runs, np.concatenate([none, *sizes]))
        self._expected[stream] = named

    def _drop(self, part: float) -> None:
        """Drop the pages that loaders are asked for from now on, since the node's memory does not hold them."""
        if part < self._part_kept and self._files is not None and _CALL not in self._expected:
            for s, pages, runs in (one for several in self._expected.values() for one in several):
                if self._weighs[s] and (is_over := _is_above(runs, np.float64(part))).any():
                    self._files.forget(s, pages[is_over])
        self._part_kept = part

    def _runs_to_hold(self, source: int, pages: Int64Array) -> U64:
        """[k] the hashes of pages, as the room takes them: sources that no loader is asked for come first."""
        assert self._there is not None
        if self._is_here[source]:
            return np.zeros(len(pages), np.uint64)
        return self._there.runs_of_pages(source, pages)

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """As `Reader.end_window`, of the pages that are read here."""
        if self._files is not None:
            mine = None if page_ids is None else page_ids[~self._are_far(source, page_ids)]
            self._files.end_window(source, mine)

    def stats(self) -> dict[str, int | float]:
        """Figures of whoever reads, the tokens that each has given, and how often no loader was left."""
        both = [each.stats() for each in (self._there, self._files) if each is not None]
        found = {name: value for stats in both for name, value in stats.items()}
        found["bytes_served"] = sum(stats["bytes_served"] for stats in both)
        if self._node_fraction is not None:
            found["node_fraction"] = self._fraction_here()
        if self._room is not None:
            found["window_bytes"] = self._room.needed_bytes
            found["window_bytes_here"] = self._room.held_bytes
        return found | {
            "total_node_tokens": self._tokens_here,
            "total_loader_tokens": self._tokens_there,
            "total_loader_losses": self._num_lost,
        }

    def _fraction_here(self) -> float:
        """The part that is read here of the pages that both may read; of all, where the recipe says it of all."""
        both = ~(self._is_here | self._is_away)
        some = both if both.any() else np.ones_like(both)
        num_pages = np.array(self._num_pages, np.int64)[some]
        return float((self._part_here[some] * num_pages).sum() / max(1, num_pages.sum()))

    def close(self) -> None:
        """Close all; may be called again."""
        self._thread.shutdown()
        for opened in (self._there, self._files, self._items):
            if opened is not None:
                opened.close()

    def _open(self) -> Reader | UnitReader:
        """Files, opened when they are needed."""
        if self._files is None:
            self._files = self._open_files()
            if self._held is not None:
                self._files.hold(*self._held)
        return self._files

    def _look(self, pieces: WantedPieces) -> None:
        """Bring the table of a node that reads first up to date, before these pieces are read."""
        if self._node_fraction is None or self._there is None:
            return
        fraction = held = self._node_fraction.look()
        why = "the processors of this node are busy"
        if self._room is not None:
            if not self._expected or _CALL in self._expected:
                self.expect(_CALL, self._there.pages_of_pieces(pieces))
            self._drop(self._room.part)
            if self._room.part < fraction:
                held = self._room.part
                room, needed = bytes_text(self._room.room_bytes), bytes_text(self._room.needed_bytes)
                why = f"this node has memory for {room} of the {needed} of pages that it needs"
        if self._there.look():
            self._is_alone = self._is_noted = False
        elif not self._is_alone:
            self._lose(LoaderLost(self._there.why_none()))
        elif (held < 1 or self._is_away.any()) and not (self._is_noted or self._there.is_coming):
            self._is_noted = True
            why = why if held < 1 else "loaders are to read some sources"
            logger.warning("%s, and %s. It reads alone", why, self._there.why_none())
        part = np.where(self._weighs, held, fraction)
        part[self._is_away] = 0.0
        part[self._is_here | self._is_alone] = 1.0
        self._part_here = part

    def _is_far(self, pieces: WantedPieces) -> NDArray[np.bool_]:
        """[n] which pieces loaders are asked for."""
        part = self._part_here[pieces.source]
        is_far: NDArray[np.bool_] = part < 1
        if self._there is not None and (is_far & (part > 0)).any():
            return _is_above(self._there.runs_of_pieces(pieces), part)
        return is_far

    def _are_far(self, source: int, page_ids: Int64Array) -> NDArray[np.bool_]:
        """[k] which pages of a source loaders are asked for."""
        part = self._part_here[source]
        if self._there is not None and 0 < part < 1:
            return _is_above(self._there.runs_of_pages(source, page_ids), part)
        return np.full(len(page_ids), part < 1)

    def _near(self, pieces: WantedPieces, read: Callable[[Reader | UnitReader, WantedPieces], Found]) -> Found:
        """What this process reads."""
        self._tokens_here += int(pieces.tokens.sum())
        try:
            return read(self._open(), pieces)
        except SourceUnreadable as error:
            if not self._lost or self._is_here[pieces.source].all():
                raise
            raise LoaderLost(f"{self._lost}. This process cannot read in their place: {error}") from error

    def _far(
        self,
        pieces: WantedPieces,
        theirs: Callable[[], Found],
        read: Callable[[Reader | UnitReader, WantedPieces], Found],
    ) -> Found:
        """What loaders give; or what this process reads where they fail."""
        try:
            found = theirs()
            self._tokens_there += int(pieces.tokens.sum())
            return found
        except LoaderLost as error:
            self._lose(error)
        except CatalogError as error:
            if self._node_fraction is None:
                raise
            logger.warning("loaders cannot read what this node tries itself then: %s", error)
        return self._near(pieces, read)

    def _lose(self, error: LoaderLost) -> None:
        """Take note that no loader answers.

        Raises:
            LoaderLost: They are lost for good, and files cannot be read here.
        """
        self._num_lost += 1
        self._part_here[:] = 1.0
        if self._node_fraction is not None:
            self._is_alone = self._is_noted = True
            logger.warning("%s. This node reads alone until a loader answers again", error)
            return
        self._lost = str(error)
        if self._there is not None:
            self._there.close()
            self._there = None
        try:
            self._open()
        except TorchmixError as other:
            raise LoaderLost(f"{error}. This process cannot read in their place: {other}") from other
        logger.warning("%s. This process reads in their place", error)


_CALL = -1
"""The pages of one call, in the place of a stream's."""


def _is_above(runs: U64, part_here: NDArray[np.float64] | np.float64) -> NDArray[np.bool_]:
    """[n] which runs of pages, by their hashes, lie above the part that is read here."""
    found: NDArray[np.bool_] = (runs >> np.uint64(11)) * 2.0**-53 >= part_here
    return found


def _reading(scratch: Scratch) -> Callable[[Reader | UnitReader, WantedPieces], Tokens]:
    return lambda reader, pieces: reader.read(pieces, scratch=scratch)


def _filling(outs: Sequence[Filling]) -> Callable[[Reader | UnitReader, WantedPieces], Filled]:
    def fill(reader: Reader | UnitReader, pieces: WantedPieces) -> Filled:
        assert isinstance(reader, Reader), "units of items are read, not filled"
        return reader.fill(pieces, outs, pads=False)

    return fill


def joined_filled(parts: Sequence[tuple[Int64Array, Filled]]) -> Filled:
    """Join what was found of several parts; each part is the numbers of its pieces, with what was found of them."""
    blank = [one._replace(piece=int(chosen[one.piece])) for chosen, part in parts for one in part.blank]
    unlabelled = [part.unlabelled for _, part in parts if part.unlabelled is not None]
    return Filled(
        blank=tuple(sorted(blank)),
        others=tuple(replace(other, piece=chosen[other.piece]) for chosen, part in parts for other in part.others),
        unlabelled=np.concatenate(unlabelled) if unlabelled else None,
    )


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
