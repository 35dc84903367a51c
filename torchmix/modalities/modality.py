"""The seam: what storage, formats, readers and steps ask of a kind of items."""

from __future__ import annotations

import base64
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import Column, TokenRuns
from torchmix.errors import CorruptPage, ItemUnreadable, MemoryLimit, SourceUnreadable
from torchmix.recipe.structs import ItemWords

# --- One kind of items in the rows of one source.
#
# An item is bytes in a column, or in a file that the column names. Its header says what it measures, such as width and
# height; its tokens, its units and all that is planned follow from these numbers alone. A unit is what an encoder takes
# one of, such as a patch. A measure is at least 1: an item that cannot be read has zeros.
#
# Everything is a pure function of the source's options and of its arguments, and safe to share between threads.

logger = logging.getLogger(__name__)

Measures = tuple[int, ...]
"""What the header of an item says, in the order of `Modality.measured`."""
ReadRange = Callable[[int, int], bytes]
"""Offset and number of bytes -> that range of an item, shorter where the item ends."""
Alter = Callable[[NDArray[Any]], NDArray[Any]]
"""What a decoded item becomes in an epoch: as `Augment`, of one item."""
MOST_PATH = 4096
"""A longer text is no path."""


class ItemSizes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What follows from the measures of n items."""

    tokens: Int64Array
    """[n] places in the text, without the ids around them."""
    columns: Mapping[str, Int64Array]
    """[n] other columns of the catalog's table, by name, `Modality.units` among them."""


class ItemGrids(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How the tokens of n items lie, for positions in the text: by frame, row and column; zeros where in no grid."""

    frames: Int64Array
    """[n] grids that follow each other in time; 1 of a picture."""
    rows: Int64Array
    """[n] of each frame."""
    columns: Int64Array
    """[n] of each frame."""
    milliseconds: Int64Array | None = None
    """[n] that the frames last together; None: they do not follow each other in time."""


class TowerForm(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How units become what the encoder of a model takes, one or a whole segment at a time."""

    split: tuple[int, ...]
    """The values of a unit, or of all units of a segment, as an array of this shape."""
    order: tuple[int, ...]
    """Its axes in the order in which the encoder has them."""
    shape: tuple[int, ...]
    """What is made of them then; without the repeated axis."""
    levels: NDArray[np.float32] | None = None
    """[channels, 256] what a byte of a channel becomes; None: values stay."""
    channel_axis: int = 0
    """The axis of `split` that counts channels."""
    repeat: int = 1
    """How often what follows the first axis stands in a row, as the frames of a still image."""
    padded: tuple[int, ...] | None = None
    """The shape with zeros behind each axis; None: `shape`."""


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


class Augment(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the user's over decoded items, imported.

        f(values: NDArray, random: numpy.random.Generator) -> NDArray of the same type

    It is called in several threads at once, and gives the same for the same values and the same generator.
    """

    words: str
    """`module:function`, as the recipe has it."""
    function: Callable[..., Any]
    version: str
    """What its author calls this version."""

    @property
    def augment_id(self) -> str:
        """The function with its version, and whose distributions it draws from."""
        return f"augment {self.words}@{self.version} numpy {np.__version__}"


class PlannedItem(msgspec.Struct, frozen=True, kw_only=True):
    """What the index knows of an item, and what messages call it."""

    source: str
    row: int
    number: int
    """Its place among the items of its row."""
    measures: Measures
    key: int = 0
    """In [0, 2^64): what the generator of `Augment` begins with."""
    file: str = ""
    """Where its row lies, for messages."""

    @classmethod
    def of(cls, source: str, modality: Modality, table: TokenRuns, item: int) -> PlannedItem:
        """An item of a source by its number in the table."""
        row = int(np.searchsorted(table.first_run_of_row, item, side="right")) - 1
        number = item - int(table.first_run_of_row[row])
        measures = tuple(int(table.sizes[key][item]) for key in modality.measured)
        return cls(source=source, row=row, number=number, measures=measures)


class Modality(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of items, by the options of one source.

    Each kind is a class of its own below this one: values of the class hold for all its items, before there is a
    source, and an instance knows the options of one. What is abstract here is all that a kind must say; what follows
    says it for kinds that need nothing else.
    """

    words: ItemWords
    """Where items lie in the rows, and what stands for them in the text."""
    augment: Augment | None = None
    """What alters decoded items; None also where nothing is decoded, whatever the options name."""

    kind: ClassVar[str]
    """Its name in the table of kinds; what messages call an item."""
    header_id: ClassVar[str]
    """What reads headers, with its version."""
    measured: ClassVar[tuple[str, ...]]
    """Names of what a header says; each is a column of the catalog."""
    measured_in: ClassVar[str] = ""
    """What messages call that which is measured, such as pixels."""
    units: ClassVar[str]
    """The column of `sizes` that counts the units of an item."""
    segments: ClassVar[str | None] = None
    """The column of `sizes` that counts the segments of an item, as tiles of an image; None: an item is one.

    The units of an item divide evenly into its segments, in which they attend to each other.
    """
    unit_array: ClassVar[str]
    """The name of the array of units in a step."""
    unit_type: ClassVar[np.dtype[Any]]
    """Type of a value of a unit."""
    item_arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names of arrays of items in a step, each of columns of the catalog that stand side by side."""
    stand_in_name: ClassVar[str]
    """What messages call that which stands for an item that cannot be read."""
    suffixes: ClassVar[str] = ""
    """How names of its files end, as alternatives of a regular expression: `jpe?g|png`."""
    column_words: ClassVar[str] = ""
    """What is in the names of columns that hold such items, likewise."""
    builds_differ: ClassVar[str] = "values may differ in their last bits"
    """What may be different where another build decodes."""
    shown_by: ClassVar[str] = "img"
    """The element of a page that shows an item: img, audio or video."""
    draft: ClassVar[DraftOfKind] = DraftOfKind()
    """What a new recipe says of such items."""

    # What each kind says.

    @abstractmethod
    def measure(self, read: ReadRange, num_bytes: int) -> Measures:
        """What the header of an item says.

        Args:
            read: Reads ranges of it.
            num_bytes: Its size.

        Raises:
            ItemUnreadable: It is none of the kind, is damaged, or is refused.
        """

    @abstractmethod
    def sizes(self, measures: Mapping[str, Column]) -> ItemSizes:
        """Tokens, units and cost of n items, by their measures of at least 1, [n] each."""

    @property
    @abstractmethod
    def rule_id(self) -> str:
        """What makes sizes of measures, with its version and its options."""

    @property
    @abstractmethod
    def unit_values(self) -> int:
        """Values of a unit."""

    @abstractmethod
    def decode(self, content: bytes | memoryview, measures: Measures, alter: Alter | None = None) -> NDArray[Any]:
        """The units of an item, [units, unit_values].

        Args:
            content: Its bytes.
            measures: As the index found them; `check_measures` compares.
            alter: Called once with the decoded item, before units are made of it: an array that nobody else has. None:
                the item stays as it is.

        Raises:
            ItemUnreadable: It does not decode, or measures something else.
        """

    @abstractmethod
    def stand_in(self, measures: Measures) -> NDArray[Any]:
        """The units of what stands for an item that cannot be read."""

    @classmethod
    @abstractmethod
    def build_id(cls) -> str:
        """The build that decodes in this process, whatever the options are."""

    @classmethod
    @abstractmethod
    def seems_item(cls, value: bytes) -> bool:
        """Whether bytes begin as an item does, in a file that nobody has described."""

    @classmethod
    @abstractmethod
    def usual_tokens(cls, value: bytes) -> float:
        """About how many tokens an item becomes by the defaults of a recipe."""

    # What a kind may say.

    @classmethod
    def of(cls, words: Any, where: str) -> Modality:
        """The kind by the options of a source.

        Args:
            words: The words of a checked recipe, of the type that the recipe's half of the table has.
            where: The path of their keys, for errors.

        Raises:
            RecipeError: A function that they name cannot be imported.
        """
        return cls(words=words)

    @property
    def bounds_id(self) -> str:
        """Options by which items are refused."""
        return ""

    @property
    def decoding_id(self) -> str:
        """Options that alter the values of units, and nothing else."""
        return ""

    def may_become(self, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """Whether an item may have another shape behind `alter`; it keeps its own, if a kind does not say otherwise."""
        return before == after

    def grids(self, columns: Mapping[str, Column], items: Int64Array) -> ItemGrids:
        """How the tokens of n items lie; in no grid, if a kind does not say otherwise.

        Args:
            columns: `TokenRuns.sizes` of the source.
            items: [n] their numbers in the table.
        """
        none = np.zeros(len(items), np.int64)
        return ItemGrids(frames=none, rows=none, columns=none)

    def tower_form(self) -> TowerForm:
        """How units become what the encoder of a model takes; they stay as they are, if a kind does not say otherwise.

        Raises:
            OptionError: Options that this needs are missing.
        """
        return TowerForm(split=(self.unit_values,), order=(0,), shape=(self.unit_values,))

    @classmethod
    def media_type(cls, content: bytes | memoryview) -> str:
        """What a browser calls the form of an item."""
        return "application/octet-stream"

    def preview(self, content: bytes | memoryview) -> str:
        """HTML that shows an item."""
        data = f"data:{self.media_type(content)};base64,{base64.b64encode(content).decode('ascii')}"
        if self.shown_by == "img":
            return f'<img src="{data}">'
        return f'<{self.shown_by} controls src="{data}"></{self.shown_by}>'

    def pictures(self, units: NDArray[Any], columns: Mapping[str, int]) -> list[NDArray[np.uint8]]:
        """What an encoder gets of an item as some pictures, uint8 [height, width, 3]; none, if a kind does not say
        otherwise.

        Args:
            units: As `decode` gives them.
            columns: What `sizes` says of the item.
        """
        return []

    # What follows, for all kinds.

    @property
    def column_id(self) -> str:
        """What finds and measures the items of the column; `transform_id` of the column."""
        way = "" if self.words.folder is None else "paths"
        placed = "" if self.words.place is None else f":{self.words.place}"
        limits = (self.words.most_items, self.words.most_item_tokens)
        limited = "" if limits == (None, None) else f":{limits[0] or ''}:{limits[1] or ''}"
        return f"{self.header_id}:{self.bounds_id}:{way}:{self.rule_id}{placed}{limited}"

    @property
    def sizes_id(self) -> str:
        """What makes tokens of measures; a part of `transform_id` of the texts."""
        return f"sized-{self.header_id.rpartition('-')[2]}:{self.rule_id}"

    @property
    def decoder_id(self) -> str:
        """The build that makes units of bytes, and the options that alter them; nothing else alters them."""
        self._check_augment()
        augment_id = "" if self.augment is None else self.augment.augment_id
        return ":".join(filter(None, (self.decoding_id, self.build_id(), augment_id)))

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.unit_values * self.unit_type.itemsize

    def told(self, measures: Measures) -> str:
        """What messages say of an item's size."""
        return f"{' x '.join(map(str, measures))} {self.measured_in}".rstrip()

    def check_measures(self, found: Measures, planned: Measures) -> None:
        """Raise ItemUnreadable where an item measures something else than the index found."""
        if found != planned:
            raise ItemUnreadable(
                f"it has {self.told(found)}, the index found {self.told(planned)}; the file was altered: put it back, "
                "or run torchmix index"
            )

    def units_of(self, planned: PlannedItem, content: bytes | memoryview, *, is_masked: bool) -> NDArray[Any]:
        """The units of an item; what stands for it, with a warning, if it cannot be read and its source masks bad rows.

        Raises:
            CorruptPage: It cannot be read as it was indexed, and its source does not mask.
            SourceUnreadable: The function that the options name fails, or gives something else than such an item.
            MemoryLimit: It, or its function, asks for more memory than there is.
        """
        self._check_augment()
        try:
            alter = None if self.augment is None else partial(self._altered, self.augment, planned)
            return self.decode(content, planned.measures, alter)
        except ItemUnreadable as error:
            what = f"{self._called(planned)}: {error}"
            if not is_masked:
                raise CorruptPage(what) from None
            logger.warning("%s - it comes as %s, as bad_rows: mask says", what, self.stand_in_name)
            return self.stand_in(planned.measures)
        except MemoryError as error:  # whatever bad_rows says: with more memory it is another item
            where = f" in {planned.file}" if planned.file else ""
            raise MemoryLimit(
                f"{self._called(planned)}{where}: decoding it asks for more memory than this process may have "
                f"({str(error) or 'no more'}): raise loaders.memory, or lower read.cache or look_ahead. It is not "
                "masked, since what is delivered may not depend on the memory that is left"
            ) from error

    def _called(self, planned: PlannedItem) -> str:
        """What messages call an item."""
        return f"source {planned.source!r}: {self.kind} {planned.number} of row {planned.row}"

    def _check_augment(self) -> None:
        """Assert that whoever decodes has opened the function."""
        assert (self.augment is None) == (self.words.augment is None), "open_modality, with the recipe's folder"

    def _altered(self, augment: Augment, planned: PlannedItem, values: NDArray[Any]) -> NDArray[Any]:
        """What the user's function makes of an item.

        The generator is PCG64 from the item's key, so nothing but the key decides what it draws.
        """
        shape, kind = values.shape, values.dtype
        what = f"{self._called(planned)}: the function {augment.words} of augment"
        try:
            found = augment.function(values, np.random.Generator(np.random.PCG64(planned.key)))
        except MemoryError as error:
            raise MemoryLimit(
                f"{what} asks for more memory than this process may have ({str(error) or 'no more'}): let it hold "
                "less, or raise loaders.memory"
            ) from error
        except Exception as error:  # whatever the user's function does
            raise SourceUnreadable(f"{what} raises {type(error).__name__}: {error}") from error
        if not isinstance(found, np.ndarray) or found.dtype != kind or not self.may_become(shape, found.shape):
            is_array = isinstance(found, np.ndarray)
            given = f"{found.dtype} {list(found.shape)}" if is_array else f"a {type(found).__name__}"
            raise SourceUnreadable(
                f"{what} gives {given} for {kind} {list(shape)}; give an array of this type and shape, since the "
                "item's tokens are planned already"
            )
        if kind.kind == "f" and not np.isfinite(found).all():
            raise SourceUnreadable(f"{what} gives values that are no numbers")
        return np.ascontiguousarray(found)

    @classmethod
    def arrays_of_nothing(cls) -> dict[str, NDArray[Any]]:
        """The arrays of items and units in a step without any, where no source says how large a unit is."""
        arrays: dict[str, NDArray[Any]] = {
            f"item/{name}": np.zeros((0, len(columns)), np.int32) for name, columns in cls.item_arrays.items()
        }
        return arrays | {f"unit/{cls.unit_array}": np.zeros((0, 0), cls.unit_type)}

    @classmethod
    def seems_path(cls, value: str) -> bool:
        """Whether a text ends as the name of such a file does."""
        pattern = rf".+\.(?:{cls.suffixes})"
        is_short = bool(cls.suffixes) and len(value) < MOST_PATH
        return is_short and re.fullmatch(pattern, value, re.IGNORECASE | re.DOTALL) is not None

    @classmethod
    def seems_column(cls, path: str) -> bool:
        """Whether the name of a column says that it holds such items."""
        return bool(cls.column_words) and re.search(cls.column_words, path, re.IGNORECASE) is not None
