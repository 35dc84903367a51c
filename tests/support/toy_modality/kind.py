"""A kind of items as somebody might add one: a few whole numbers in a binary column, and a token for some of them.

It and `add_numbers` are all that a kind takes: a folder, and a row in each half of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.sizes import Column
from torchmix.errors import ItemUnreadable, RecipeError
from torchmix.modalities.modality import Alter, DraftOfKind, ItemSizes, Measures, Modality, ReadRange
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


class NumberModality(Modality, frozen=True, kw_only=True):
    """The numbers of a source; a unit is a number."""

    words: NumberWords

    kind: ClassVar[str] = "number"
    header_id: ClassVar[str] = "numbers-1"
    measured: ClassVar[tuple[str, ...]] = ("count",)
    units: ClassVar[str] = "values"
    segments: ClassVar[str | None] = "halves"
    unit_array: ClassVar[str] = "value"
    unit_type: ClassVar[np.dtype[Any]] = NUMBER
    item_arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"many": ("count", "values")}
    stand_in_name: ClassVar[str] = "zeros"
    suffixes: ClassVar[str] = "number"
    draft: ClassVar[DraftOfKind] = DraftOfKind(
        tokens=(("<num>",),), module=("counter: {items: number, sizes: values}",)
    )

    @property
    def rule_id(self) -> str:
        """See `Modality`."""
        return f"numbers-1:{self.words.per_token}"

    @property
    def unit_values(self) -> int:
        """See `Modality`."""
        return 1

    def measure(self, read: ReadRange, num_bytes: int) -> Measures:
        """See `Modality`."""
        if num_bytes % NUMBER.itemsize:
            raise ItemUnreadable(f"it has {num_bytes} bytes, no multiple of {NUMBER.itemsize}")
        return (num_bytes // NUMBER.itemsize,)

    def sizes(self, measures: Mapping[str, Column]) -> ItemSizes:
        """See `Modality`."""
        count = np.asarray(measures["count"], np.int64)
        return ItemSizes(tokens=-(-count // self.words.per_token), columns={"values": count, "halves": 2 - count % 2})

    def decode(self, content: bytes | memoryview, measures: Measures, alter: Alter | None = None) -> NDArray[Any]:
        """See `Modality`; what is altered are the numbers, [count]."""
        self.check_measures((len(content) // NUMBER.itemsize,), measures)
        values = np.frombuffer(content, NUMBER).copy()
        return (values if alter is None else alter(values)).reshape(-1, 1)

    def stand_in(self, measures: Measures) -> NDArray[Any]:
        """See `Modality`."""
        return np.zeros((measures[0], 1), NUMBER)

    def preview(self, content: bytes | memoryview) -> str:
        """See `Modality`."""
        return ", ".join(map(str, np.frombuffer(content, NUMBER).tolist()))

    @classmethod
    def build_id(cls) -> str:
        """See `Modality`."""
        return "numbers 1"

    @classmethod
    def seems_item(cls, value: bytes) -> bool:
        """See `Modality`."""
        return value.startswith(SIGN)

    @classmethod
    def usual_tokens(cls, value: bytes) -> float:
        """See `Modality`."""
        return len(value) / NUMBER.itemsize


HOME = "tests.support.toy_modality.kind:NumberModality"
"""The row of the other half of the table."""
ROW_OF_RECIPE = KindInRecipe(words=NumberWords, check=check_numbers, parts=("number",))


def add_numbers() -> None:
    """Add the row of the table, for good."""
    RECIPE_KINDS[NumberWords.kind], KINDS[NumberWords.kind] = ROW_OF_RECIPE, HOME


def write_start_up(folder: Path) -> Path:
    """A folder for the path of other processes, whose interpreter adds the kind when it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    start = "from tests.support.toy_modality.kind import add_numbers\n\nadd_numbers()\n"
    (folder / "sitecustomize.py").write_text(start, encoding="utf-8")
    return folder
