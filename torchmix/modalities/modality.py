"""The seam: what storage, formats, readers and steps ask of a kind of items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import Column, ItemTable

# --- One kind of items in the rows of one source.
#
# An item is bytes in a column, or in a file that the column names. Its header says what it measures, such as width and
# height; its tokens, its units and all that is planned follow from these numbers alone. A unit is what an encoder takes
# one of, such as a patch. A measure is at least 1: an item that cannot be read has zeros.
#
# Everything is a pure function of the source's options and of its arguments, and safe to share between threads.

Measures = tuple[int, ...]
"""What the header of an item says, in the order of `Modality.measured`."""
ReadRange = Callable[[int, int], bytes]
"""Offset and number of bytes -> that range of an item, shorter where the item ends."""


class ItemSizes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What follows from the measures of n items."""

    tokens: Int64Array
    """[n] places in the text, without the ids around them."""
    columns: Mapping[str, Int64Array]
    """[n] other columns of the catalog's table, by name, `Modality.units` among them."""


class Modality(Protocol):
    """One kind of items, by the options of one source."""

    @property
    def kind(self) -> str:
        """Its name in the table of kinds; what messages call an item."""

    @property
    def column_id(self) -> str:
        """What finds and measures the items of the column, with its version; `transform_id` of the column."""

    @property
    def sizes_id(self) -> str:
        """What makes tokens of measures, with its version; a part of `transform_id` of the texts."""

    @property
    def decoder_id(self) -> str:
        """The build that makes arrays of bytes, and the options that alter what it makes; nothing else alters it."""

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of what a header says; each is a column of the catalog."""

    def measure(self, read: ReadRange, num_bytes: int) -> Measures:
        """What the header of an item says.

        Args:
            read: Reads ranges of it.
            num_bytes: Its size.

        Raises:
            ItemUnreadable: It is none of the kind, is damaged, or is refused.
        """

    def sizes(self, measures: Mapping[str, Column]) -> ItemSizes:
        """Tokens, units and cost of n items, by their measures of at least 1, [n] each."""

    @property
    def units(self) -> str:
        """The column of `sizes` that counts the units of an item."""

    @property
    def segments(self) -> str | None:
        """The column of `sizes` that counts the segments of an item, as tiles of an image; None: an item is one.

        The units of an item divide evenly into its segments, in which they attend to each other.
        """

    @property
    def unit_array(self) -> str:
        """The name of the array of units in a step."""

    @property
    def unit_values(self) -> int:
        """Values of a unit."""

    @property
    def unit_type(self) -> np.dtype[Any]:
        """Type of a value; uint8 where loaders may decode for others."""

    @property
    def item_arrays(self) -> Mapping[str, tuple[str, ...]]:
        """Names of arrays of items in a step, each of columns of the catalog that stand side by side."""

    def grids(self, columns: Mapping[str, Column], items: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Rows and columns in which the tokens of n items lie, for positions in the text; zeros where in no grid.

        Args:
            columns: `ItemTable.sizes` of the source.
            items: [n] their numbers in the table.
        """

    def decode(self, content: bytes | memoryview, measures: Measures) -> NDArray[Any]:
        """The units of an item, [units, unit_values].

        Args:
            content: Its bytes.
            measures: As the index found them.

        Raises:
            ItemUnreadable: It does not decode, or measures something else.
        """

    def stand_in(self, measures: Measures) -> NDArray[Any]:
        """The units of what stands for an item that cannot be read."""

    @property
    def stand_in_name(self) -> str:
        """What messages call that."""

    def preview(self, content: bytes | memoryview) -> str:
        """HTML that shows an item."""


class DraftOfKind(msgspec.Struct, frozen=True, kw_only=True):
    """What `torchmix init` writes of items of a kind."""

    columns: tuple[str, ...] = ()
    """Usual names of their column, the best first."""
    tokens: tuple[tuple[str, ...], ...] = ()
    """What stands for a part of an item, and before and after it, in known vocabularies."""
    options: tuple[tuple[str, str], ...] = ()
    """Other options of a source, with their values as YAML has them."""
    note: str = ""
    """What to say of them."""
    module: tuple[str, ...] = ()
    """Lines of YAML below `modules`."""


class KindOfItems(Protocol):
    """What is known of a kind before there is a source."""

    def modality(self, words: Any, where: str) -> Modality:
        """The kind by the options of a source.

        Args:
            words: Of a checked recipe, of the type that the recipe's half of the table has.
            where: The path of their keys, for errors.

        Raises:
            RecipeError: A function that they name cannot be imported.
        """

    def arrays_of_nothing(self) -> dict[str, NDArray[Any]]:
        """The arrays of items and units in a step without any, where no source says how large a unit is."""

    def seems_item(self, value: bytes) -> bool:
        """Whether bytes begin as an item does, in a file that nobody has described."""

    def seems_path(self, value: str) -> bool:
        """Whether a text ends as the name of such a file does."""

    def seems_column(self, path: str) -> bool:
        """Whether the name of a column says that it holds such items."""

    def usual_tokens(self, value: bytes) -> float:
        """About how many tokens an item becomes by the defaults of a recipe."""

    @property
    def draft(self) -> DraftOfKind:
        """What a new recipe says of such items."""

    def build_id(self) -> str:
        """The build that decodes in this process, whatever the options are."""


class PlannedItem(msgspec.Struct, frozen=True, kw_only=True):
    """What the index knows of an item, and what messages call it."""

    source: str
    row: int
    number: int
    """Its place among the items of its row."""
    measures: Measures

    @classmethod
    def of(cls, source: str, modality: Modality, table: ItemTable, item: int) -> PlannedItem:
        """An item of a source by its number in the table."""
        row = int(np.searchsorted(table.first_item_of_row, item, side="right")) - 1
        number = item - int(table.first_item_of_row[row])
        measures = tuple(int(table.sizes[key][item]) for key in modality.measured)
        return cls(source=source, row=row, number=number, measures=measures)
