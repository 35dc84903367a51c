"""Documents as a person looks at them: where a row lies, its ids, its text.

In: an open catalog, and rows or pieces of its sources. Out: places, ids and text. Must hold: ids come from the reader
that training uses, and text from them, so what is shown is what a model sees; where the source has no tokenizer and
none was named, there is no text. Cost: a page for each row that is not of the page before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.errors import OptionError
from torchmix.formats.source import FormatSource
from torchmix.formats.table import choose_source
from torchmix.reader.reader import Reader
from torchmix.recipe.source.tokenizer_kind import tokenizer_kind
from torchmix.recipe.source_checks import TOKENIZERS
from torchmix.transform.maps.row_map import open_maps
from torchmix.transform.open_tokenizer import Tokenizers
from torchmix.transform.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20


class RowPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a row of a source lies."""

    file: str
    """Path, as the recipe gives it."""
    file_row: int
    """Row of the file."""
    page: int
    """Page of the source."""


class DocumentReader:
    """Reads documents of some sources to show them."""

    def __init__(
        self,
        catalog: Catalog,
        directory: Path,
        *,
        tokenizer: str | None = None,
        maps: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        """Open a catalog's sources.

        Args:
            catalog: The sources.
            directory: The recipe's folder.
            tokenizer: For sources of ids: as in a recipe, but a path is relative to the present folder.
            maps: The words of the map of each source that has one, by name, as the recipe has them.
            seed: The recipe's, for maps that are random.

        Raises:
            CatalogStale: The catalog holds lengths of another tokenizer than the recipe's is now.
            RecipeError, SourceUnreadable: A tokenizer cannot be opened.
        """
        self._catalog = catalog
        self.directory = directory
        """The recipe's folder."""
        self._number = {name: number for number, name in enumerate(catalog.sources)}
        if tokenizer is not None and tokenizer_kind(tokenizer) is None:
            raise OptionError(f"--tokenizer {tokenizer}: no tokenizer; write {TOKENIZERS}")
        own, named = Tokenizers(directory), Tokenizers(Path())
        words = {name: word for name, word in (maps or {}).items() if name in catalog.sources}
        opened = open_maps(words, directory)
        sources: dict[str, FormatSource] = {}
        self._tokenizer: dict[str, Tokenizer | None] = {}
        for name, source in catalog.sources.items():
            sources[name] = choose_source(name, source, (file.path for file in source.files), own, opened.get(name))
            if source.tokenizer is not None:
                ids = {"begin_id": source.begin_id, "end_id": source.end_id}
                self._tokenizer[name] = own.open(name, source.tokenizer, **ids)
            else:
                self._tokenizer[name] = None if tokenizer is None else named.open(name, tokenizer)
        self._reader = Reader(catalog, directory, cache_bytes=CACHE_BYTES, sources=sources, maps=words, seed=seed)

    def __enter__(self) -> DocumentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def ids(
        self, name: str, row: int, start: int = 0, tokens: int | None = None, *, epoch: int = 0
    ) -> NDArray[np.int64]:
        """Ids of a document from token `start` on: all, or `tokens` of them; of a random map, those of an epoch."""
        if tokens is None:
            tokens = int(self._catalog.sources[name].sizes.tokens[row]) - start
        asked = (self._number[name], row, start, tokens)
        source, rows, starts, counts = (np.array([value], np.int64) for value in asked)
        found = self._reader.read(
            source,
            rows,
            starts,
            counts,
            places=np.zeros(1, np.int64),
            num_places=tokens,
            epochs=np.array([epoch], np.int64),
        )
        return found.values.astype(np.int64)

    def text(self, name: str, ids: NDArray[np.int64]) -> str | None:
        """The text of some ids of a source; None where nothing tells how."""
        tokenizer = self._tokenizer[name]
        return None if tokenizer is None else tokenizer.decode(ids.tolist())


def place_of(source: SourceCatalog, row: int) -> RowPlace:
    """Where a row of a source lies."""
    first_rows = [file.first_row for file in source.files]  # of files without rows that of the next, which is found
    file = source.files[int(np.searchsorted(first_rows, row, side="right")) - 1]
    page = int(source.pages.page_of_rows(np.array([row], np.int64))[0])
    return RowPlace(file=file.path, file_row=row - file.first_row, page=page)


def only(catalog: Catalog, name: str) -> Catalog:
    """The catalog with one of its sources alone, so that nothing of the others is opened."""
    return replace(catalog, sources={name: catalog.sources[name]})
