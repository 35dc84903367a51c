"""A kind of items as somebody might add one: a few whole numbers in a binary column, and a token for some of them.

It and `add_numbers` are all that a kind takes: a folder, and a row in each half of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import Column
from torchmix.errors import ItemUnreadable, RecipeError
from torchmix.modalities.modality import DraftOfKind, ItemSizes, Measures, ReadRange
from torchmix.modalities.table import KINDS
from torchmix.recipe.items import KINDS as RECIPE_KINDS
from torchmix.recipe.items import KindInRecipe
from torchmix.recipe.structs import ItemWords

NUMBER = np.dtype("<i4")
SIGN = (77777777).to_bytes(4, "little")
"""How items begin that `torchmix init` finds: a first number that nobody else writes."""


class NumberWords(ItemWords, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a source."""

    kind: ClassVar[str] = "number"
    marker: str = "<n>"
    per_token: int = 2
    """Numbers that become one token."""


def check_numbers(words: NumberWords, where: str) -> None:
    """See `KindInRecipe.check`."""
    if words.per_token < 1:
        raise RecipeError(f"{words.per_token} is out of range; it must be at least 1", f"{where}.per_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberModality:
    """Implements `modality.Modality`; a unit is a number."""

    words: NumberWords
    kind: ClassVar[str] = "number"
    decoder_id: ClassVar[str] = "numbers-1"
    measured: ClassVar[tuple[str, ...]] = ("count",)
    units: ClassVar[str] = "values"
    segments: ClassVar[str] = "halves"
    unit_array: ClassVar[str] = "value"
    unit_values: ClassVar[int] = 1
    unit_type: ClassVar[np.dtype[Any]] = NUMBER
    item_arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"many": ("count", "values")}
    stand_in_name: ClassVar[str] = "zeros"

    @property
    def column_id(self) -> str:
        """See `Modality`."""
        return "numbers-1"

    @property
    def sizes_id(self) -> str:
        """See `Modality`."""
        return f"numbers-1:{self.words.per_token}"

    def measure(self, read: ReadRange, num_bytes: int) -> Measures:
        """See `Modality`."""
        if num_bytes % NUMBER.itemsize:
            raise ItemUnreadable(f"it has {num_bytes} bytes, no multiple of {NUMBER.itemsize}")
        return (num_bytes // NUMBER.itemsize,)

    def sizes(self, measures: Mapping[str, Column]) -> ItemSizes:
        """See `Modality`."""
        count = np.asarray(measures["count"], np.int64)
        return ItemSizes(tokens=-(-count // self.words.per_token), columns={"values": count, "halves": 2 - count % 2})

    def grids(self, columns: Mapping[str, Column], items: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Modality`."""
        return np.zeros(len(items), np.int64), np.zeros(len(items), np.int64)

    def decode(self, content: bytes | memoryview, measures: Measures) -> NDArray[Any]:
        """See `Modality`."""
        if len(content) != measures[0] * NUMBER.itemsize:
            raise ItemUnreadable(f"it has {len(content)} bytes, the index found {measures[0]} numbers")
        return np.frombuffer(content, NUMBER).reshape(-1, 1)

    def stand_in(self, measures: Measures) -> NDArray[Any]:
        """See `Modality`."""
        return np.zeros((measures[0], 1), NUMBER)

    def preview(self, content: bytes | memoryview) -> str:
        """See `Modality`."""
        return ", ".join(map(str, np.frombuffer(content, NUMBER).tolist()))


class NumberKind:
    """Implements `modality.KindOfItems`."""

    def modality(self, words: NumberWords, where: str) -> NumberModality:
        """See `KindOfItems`."""
        return NumberModality(words=words)

    def arrays_of_nothing(self) -> dict[str, NDArray[Any]]:
        """See `KindOfItems`."""
        return {"item/many": np.zeros((0, 2), np.int32), "unit/value": np.zeros((0, 1), NUMBER)}

    def seems_item(self, value: bytes) -> bool:
        """See `KindOfItems`."""
        return value.startswith(SIGN)

    def seems_path(self, value: str) -> bool:
        """See `KindOfItems`."""
        return value.endswith(".number")

    def seems_column(self, path: str) -> bool:
        """See `KindOfItems`."""
        return False

    def usual_tokens(self, value: bytes) -> float:
        """See `KindOfItems`."""
        return len(value) / NUMBER.itemsize

    @property
    def draft(self) -> DraftOfKind:
        """See `KindOfItems`."""
        return DraftOfKind(tokens=(("<num>",),), module=("counter: {items: number, sizes: values}",))

    def build_id(self) -> str:
        """See `KindOfItems`."""
        return "numbers 1"


ROW_OF_RECIPE = KindInRecipe(words=NumberWords, check=check_numbers, parts=("number",))


def add_numbers() -> None:
    """Add the row of the table, for good."""
    RECIPE_KINDS[NumberWords.kind], KINDS[NumberWords.kind] = ROW_OF_RECIPE, NumberKind()


def write_start_up(folder: Path) -> Path:
    """A folder for the path of other processes, whose interpreter adds the kind when it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    start = "from tests.support.toy_modality.kind import add_numbers\n\nadd_numbers()\n"
    (folder / "sitecustomize.py").write_text(start, encoding="utf-8")
    return folder
