"""What a loader process reads: the catalogs of a recipe, and one reader for each that clients ask for.

In: a recipe's parts with their catalogs; a client's hello and requests. Out: named arrays. Must hold: an answer is a
pure function of the request, whoever asked what before; a client of another version, catalog or transform is refused
with a sentence that names the difference. Cost: that of the reader, and one copy of the ids into the reply.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog
from torchmix.errors import TorchmixError, WireError
from torchmix.reader.images.patches import PatchReader
from torchmix.reader.pieces.page_starts import ROW_BITS
from torchmix.reader.pieces.piece_copy import Scratch
from torchmix.reader.reader import Reader
from torchmix.service.messages import ALIGNED_BYTES, Arrays, LoaderHello, PieceColumns, pieces_of
from torchmix.service.row_lists import arrays_of_others

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Between two looks for newer catalogs."""
MOST_CATALOGS = 16
"""Catalogs that one loader serves, at most, before it is started again."""
MOST_OPEN = 4096
"""Documents that are kept because requests are to go on with them; those asked last."""
MOST_FORGETTING = 1 << 20
"""Pages that some clients need no more and others may."""


def transforms_digest(catalog: Catalog, seed: int) -> bytes:
    """8 bytes over the seed and the transform of each source: who agrees on it makes the same tokens of a row."""
    lines = [str(seed), *(f"{name}\t{source.transform_id}" for name, source in catalog.sources.items())]
    text = "\n".join(lines)
    return hashlib.sha256(text.encode()).digest()[:8]


class PartToServe(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a loader needs to know of a part of a recipe."""

    catalog: Catalog
    masked: frozenset[str] = frozenset()
    """Sources whose bad pages are masked."""
    seed: int = 0
    """The recipe's."""
    is_cut: bool = True
    """Whether documents are given in pieces."""
    maps: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The words of the map of each source that has one."""
    decodes: Catalog | None = None
    """The texts whose images are decoded here, where `catalog` is a `patch_catalog`."""


class ServedCatalogs:
    """The catalogs of a recipe, of each of its parts."""

    def __init__(
        self,
        parts: Mapping[str, PartToServe],
        directory: Path,
        *,
        cache_bytes: int,
        parts_now: Callable[[], Mapping[str, PartToServe]] = dict,
    ) -> None:
        """Nothing is read yet, but tokenizers are opened, so that a loader that cannot serve does not start.

        Args:
            parts: By name; the catalogs of several may be equal.
            directory: The recipe's folder.
            cache_bytes: Bytes of decoded pages kept, of all parts together; as much again for each catalog that a
                part gets later.
            parts_now: The parts with the catalogs that they have by now: asked when a client has an unknown catalog.

        Raises:
            CatalogStale: The catalog holds lengths of another transform than this process has.
            RecipeError, SourceUnreadable: A tokenizer cannot be opened here.
        """
        self._directory, self._cache_bytes, self._parts_now = directory, cache_bytes, parts_now
        self._part_of: dict[str, str] = {}
        self._parts: dict[str, _ServedPart] = {}
        self._looked_s = -LOOK_S
        self._take(parts)

    def _take(self, parts: Mapping[str, PartToServe]) -> None:
        """Serve the catalogs of parts, too."""
        new = {part.catalog.fingerprint: part for part in parts.values()}
        new = {fingerprint: part for fingerprint, part in new.items() if fingerprint not in self._parts}
        cache_bytes = self._cache_bytes // max(1, len(new))
        opened = {name: _ServedPart(part, self._directory, cache_bytes) for name, part in new.items()}
        # The reading thread goes through the mappings meanwhile.
        self._parts = {**self._parts, **opened}
        self._part_of = {**self._part_of, **{part.catalog.fingerprint: name for name, part in parts.items()}}

    def _look_again(self) -> None:
        """Take the catalogs that were published since the loader started."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S or len(self._parts) >= MOST_CATALOGS:
            return
        self._looked_s = now
        try:
            self._take(self._parts_now())
        except TorchmixError as error:
            logger.warning("a newer catalog cannot be served: %s", error)

    def refusal(self, hello: LoaderHello) -> str:
        """Why a client is not served; empty where it is."""
        if hello.catalog not in self._parts:
            self._look_again()
        part = self._parts.get(hello.catalog)
        if part is None:
            ours = ", ".join(f"{fingerprint} ({name})" for fingerprint, name in self._part_of.items())
            return (
                f"the client has catalog {hello.catalog}, this loader serves {ours}: their files, columns, tokenizers "
                "or windows differ. Give both the same recipe and the same catalog folder; a loader that was started "
                "before the recipe was edited is started again"
            )
        if hello.transforms != part.transforms:
            return (
                f"the client's transforms from rows to tokens are {hello.transforms.hex()}, this loader's are "
                f"{part.transforms.hex()}, with the same catalog; give both the same seed, and run one torchmix"
            )
        if frozenset(hello.masked) != part.masked:
            return (
                f"the client masks bad rows of {sorted(hello.masked)}, this loader of {sorted(part.masked)}; "
                "give both recipes the same bad_rows"
            )
        return ""

    def read(self, catalog: str, arrays: Arrays) -> Arrays:
        """The tokens of pieces, as the ragged array `ids`.

        Args:
            catalog: Fingerprint, of a hello that was not refused.
            arrays: Of a `PieceRequest`.

        Raises:
            WireError: The request is none.
            CatalogError, PlanError: As `Reader.read`.
        """
        return self._parts[catalog].read(arrays)

    def warm(self, catalog: str, source: int, pages: Int64Array) -> None:
        """Decode pages ahead of need; pages or sources that do not exist are passed over."""
        part = self._parts[catalog]
        known = part.known(source, pages)
        if len(known):
            part.reader.warm(source, known)

    def pages_at_once(self, catalog: str, source: int) -> int:
        """How many pages one `warm` should have at most."""
        part = self._parts[catalog]
        return part.reader.pages_at_once(source) if source < part.num_sources else 1

    def forget(self, catalog: str, source: int, pages: Int64Array, *, num_clients: int) -> None:
        """Note that one more client needs pages no more; drop those that none of `num_clients` does."""
        part = self._parts[catalog]
        over = [page for page in part.known(source, pages).tolist() if part.is_over(source, page, num_clients)]
        if over:
            part.reader.forget(source, np.array(over, np.int64))

    def stats(self) -> dict[str, int | float]:
        """Figures of all readers since they were made; ratios are those of the part that read most."""
        found: dict[str, int | float] = {}
        parts = sorted((part.reader.stats() for part in self._parts.values()), key=lambda one: one["bytes_served"])
        for one in parts:
            for name, value in one.items():
                is_sum = name != "decode_amplification"
                found[name] = found.get(name, 0) + value if is_sum else value
        return found

    def close(self) -> None:
        """Close all readers."""
        for part in self._parts.values():
            part.reader.close()


class OpenRows:
    """The documents of which some tokens were asked for, of whichever client, and others were not."""

    def __init__(self, num_tokens: Sequence[NDArray[np.integer[Any]]]) -> None:
        """`num_tokens`: tokens of each row of each source."""
        self._num_tokens = num_tokens
        self._asked: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        """Source, row and epoch: the stretches that were asked for, ascending and apart."""

    def follow(self, pieces: PieceColumns) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Note a request; which documents are open after it: source, row and the first token to be asked for."""
        total = np.empty(len(pieces.row), np.int64)
        for s in np.unique(pieces.source).tolist():
            chosen = pieces.source == s
            known = self._num_tokens[s]
            # Rows that do not exist are refused by the reader.
            total[chosen] = known[np.clip(pieces.row[chosen], 0, len(known) - 1)] if len(known) else 0
        for k in np.flatnonzero((pieces.start > 0) | (pieces.start + pieces.tokens < total)).tolist():
            key = (int(pieces.source[k]), int(pieces.row[k]), int(pieces.epoch[k]))
            start = int(pieces.start[k])
            asked = _joined([*self._asked.pop(key, []), (start, start + int(pieces.tokens[k]))])
            if asked[0][0] > 0 or asked[0][1] < total[k]:
                self._asked[key] = asked
        while len(self._asked) > MOST_OPEN:
            del self._asked[next(iter(self._asked))]
        first: dict[tuple[int, int], int] = {}
        for (source, row, _), asked in self._asked.items():
            if 0 <= row < 1 << ROW_BITS:
                # The last token asked for may have been the successor of a piece, which begins the next one.
                begin = 0 if asked[0][0] > 0 else asked[0][1] - 1
                first[source, row] = min(begin, first.get((source, row), begin))
        table = np.array([(*place, begin) for place, begin in first.items()], np.int64).reshape(-1, 3).T
        return table[0], table[1], table[2]


def _joined(stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches, ascending and apart, with those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


class _ServedPart:
    """One catalog, with its reader."""

    def __init__(self, part: PartToServe, directory: Path, cache_bytes: int) -> None:
        catalog = part.catalog
        self.reader: Reader | PatchReader
        if part.decodes is not None:
            self.reader = PatchReader(part.decodes, directory, masked=part.masked, cache_bytes=cache_bytes)
        else:
            self.reader = Reader(
                catalog, directory, cache_bytes=cache_bytes, masked=part.masked, seed=part.seed, maps=part.maps
            )
        self.transforms = transforms_digest(catalog, part.seed)
        self.masked = part.masked
        self._pages = [source.pages.num_pages for source in catalog.sources.values()]
        self._scratch = Scratch()
        self._over: dict[tuple[int, int], int] = {}
        self._is_cut = part.is_cut
        self._open = OpenRows([source.sizes.tokens for source in catalog.sources.values()])

    @property
    def num_sources(self) -> int:
        """Sources of the catalog."""
        return len(self._pages)

    def read(self, arrays: Arrays) -> Arrays:
        pieces = pieces_of(arrays)
        if pieces.source.min() < 0 or pieces.source.max() >= self.num_sources:
            raise WireError(f"a request for source {pieces.source.max()}, of {self.num_sources}")
        if self._is_cut:
            self.reader.hold(*self._open.follow(pieces))
        ends = np.cumsum(pieces.tokens)
        read = self.reader.read(
            pieces.source,
            pieces.row,
            pieces.start,
            pieces.tokens,
            places=ends - pieces.tokens,
            num_places=int(ends[-1]),
            epochs=pieces.epoch,
            scratch=self._scratch,
        )
        ids = {"ids": read.values, "ids.lengths": pieces.tokens.astype(np.int32)}
        if not read.others:
            return ids
        num_bytes = sum(array.nbytes + ALIGNED_BYTES for array in ids.values())
        return ids | dict(arrays_of_others(read.others, len(pieces.row), ids_bytes=num_bytes))

    def known(self, source: int, pages: Int64Array) -> Int64Array:
        if source >= self.num_sources:
            return pages[:0]
        return pages[(pages >= 0) & (pages < self._pages[source])]

    def is_over(self, source: int, page: int, num_clients: int) -> bool:
        count = self._over.pop((source, page), 0) + 1
        if count >= num_clients or len(self._over) >= MOST_FORGETTING:
            return True
        self._over[source, page] = count
        return False
