"""The items of a step that a module computes: pieces of documents, or images in them.

In: the pieces of a step in their samples, and the sizes of their sources. Out: `Items`, one row each, in the order of
samples. Must hold: an item lies in one piece, so in one sample; its order follows from the samples alone, so it is
equal at every layout. Cost: a few array operations; none for a recipe without modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.catalog.items import ItemTable
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import RecipeError
from torchmix.planner.pack import Pieces
from torchmix.recipe.balance.structs import Module
from torchmix.recipe.build import nearest


class Items(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """n items of a step, sorted by (sample, offset). All arrays int64 [n]."""

    piece: Int64Array
    """Index of the piece that holds the item in the plan's pieces."""
    item: Int64Array
    """Number of the item among those of its kind in its source; 0 for a document."""
    sample: Int64Array
    offset: Int64Array
    """First token of the item in its sample."""
    tokens: Int64Array
    """Tokens of the sample that it stands for: the rows that the module gives for it."""
    size: Int64Array
    """What its cost is a function of: the module's column of sizes."""

    def __len__(self) -> int:
        return len(self.piece)

    def take(self, order: Int64Array) -> Items:
        """The items at some places."""
        return Items(**{name: getattr(self, name)[order] for name in Items.__struct_fields__})


class ItemsOfModule:
    """Finds the items of one module in the pieces of a step."""

    def __init__(self, name: str, module: Module, sources: tuple[str, ...], sizes: Sequence[SourceSizes]) -> None:
        """Look the module's columns up.

        Args:
            name: The module's name, for errors.
            module: From the recipe.
            sources: [S] sorted names of the sources of the part.
            sizes: [S] of each of them.

        Raises:
            RecipeError: A source lacks the column, or no source has such items.
        """
        self.name = name
        self.module = module
        self._sources = sources
        chosen = [s for s, source in enumerate(sources) if module.sources is None or source in module.sources]
        self._columns: dict[int, Int64Array | None] = {}
        """A column of sizes for each source with documents for the module; None: tokens."""
        self._tables: dict[int, tuple[ItemTable, Int64Array]] = {}
        for s in chosen:
            of_source = sizes[s]
            if module.items == "document":
                self._columns[s] = None if module.sizes == "tokens" else self._column(s, of_source.columns)
            elif table := of_source.items.get(module.items):
                self._tables[s] = table, self._column(s, {"tokens": table.tokens, **table.sizes})
        if module.sources is not None and module.items != "document":
            for s in chosen:
                if s not in self._tables:
                    where = f"modules.{name}.sources"
                    raise RecipeError(f"source {sources[s]!r} has no {module.items}s in its catalog", where)

    def _column(self, source: int, columns: Mapping[str, object]) -> Int64Array:
        wanted = self.module.sizes
        if wanted not in columns:
            valid = sorted({"tokens", *columns})
            raise RecipeError(
                f"{wanted!r} is no column of sizes of source {self._sources[source]!r}{nearest(wanted, valid)}; it has "
                f"{', '.join(valid)}",
                f"modules.{self.name}.sizes",
            )
        column: Int64Array = columns[wanted]  # type: ignore[assignment]
        return column

    def of_step(self, pieces: Pieces, sample: Int64Array, sample_offset: Int64Array) -> Items:
        """The module's items in the samples of a step.

        Args:
            pieces: [n] sorted by (sample, slot).
            sample: [n] sample of each.
            sample_offset: [n] its first token in the sample.

        """
        if self.module.items == "document":
            return self._documents(pieces, sample, sample_offset)
        found = [self._inside(s, pieces, sample, sample_offset) for s in sorted(self._tables)]
        joined = {
            name: np.concatenate([np.zeros(0, np.int64), *(getattr(part, name) for part in found)])
            for name in Items.__struct_fields__
        }
        return Items(**joined).take(np.lexsort((joined["offset"], joined["sample"])))

    def _documents(self, pieces: Pieces, sample: Int64Array, sample_offset: Int64Array) -> Items:
        chosen = np.flatnonzero(np.isin(pieces.source, list(self._columns)))
        tokens = pieces.tokens[chosen]
        size = tokens.copy()
        for s, column in self._columns.items():
            if column is None:
                continue
            mine = np.flatnonzero(pieces.source[chosen] == s)
            whole = np.maximum(pieces.document_tokens[chosen[mine]], 1)
            of_document = np.asarray(column[pieces.row[chosen[mine]]], np.int64)
            size[mine] = -(-of_document * tokens[mine] // whole)  # a part of a document counts for its part, rounded up
        return Items(
            piece=chosen,
            item=np.zeros(len(chosen), np.int64),
            sample=sample[chosen],
            offset=sample_offset[chosen],
            tokens=tokens,
            size=size,
        )

    def _inside(self, source: int, pieces: Pieces, sample: Int64Array, sample_offset: Int64Array) -> Items:
        """Items that lie inside the pieces of one source; one across the end of a piece is left out."""
        table, column = self._tables[source]
        piece = np.flatnonzero(pieces.source == source)
        row = pieces.row[piece]
        first = np.asarray(table.first_item_of_row[row], np.int64)
        count = np.asarray(table.first_item_of_row[row + 1], np.int64) - first
        item = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        piece = np.repeat(piece, count)
        offset = np.asarray(table.offset[item], np.int64)
        tokens = np.asarray(table.tokens[item], np.int64)
        start, stop = pieces.start[piece], pieces.start[piece] + pieces.tokens[piece]
        is_inside = (offset >= start) & (offset + tokens <= stop)
        item, piece, offset, tokens = item[is_inside], piece[is_inside], offset[is_inside], tokens[is_inside]
        return Items(
            piece=piece,
            item=item,
            sample=sample[piece],
            offset=sample_offset[piece] + offset - pieces.start[piece],
            tokens=tokens,
            size=np.asarray(column[item], np.int64),
        )
