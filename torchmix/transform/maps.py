"""`module:function` in a recipe -> the function, and an encoder of the rows that it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import MOST_ID
from torchmix.errors import MemoryLimit, SourceUnreadable
from torchmix.lazy_names import own_function
from torchmix.transform.tokenizer import EncodedRows, RowsToEncode, Tokenizer

# --- `module:function` in a recipe -> the function.


class RowMap(msgspec.Struct, frozen=True, kw_only=True):
    """A function over rows, imported."""

    words: str
    """`module:function`, as the recipe has it."""
    function: Callable[..., Mapping[str, Any]]
    version: str
    """What its author calls this version: lengths in a catalog are true for this one alone."""
    is_random: bool
    """Whether the epoch and the seed of a row decide its tokens."""


def open_maps(words_of_source: Mapping[str, str], directory: Path) -> dict[str, RowMap]:
    """The function of each source that has one, by the source's name; errors as `open_map`."""
    return {name: open_map(words, directory, f"sources.{name}.map") for name, words in words_of_source.items()}


def open_map(words: str, directory: Path, where: str) -> RowMap:
    """Import a function.

    Args:
        words: `module:function`, as the recipe's check lets pass.
        directory: The recipe's folder.
        where: Path of keys in the recipe, for errors.

    Raises:
        RecipeError: There is no such module or function, or it has no version.
    """
    function, version = own_function(words, directory, where, changes="other tokens; the index is made again then")
    return RowMap(words=words, function=function, version=version, is_random=bool(getattr(function, "random", False)))


# --- A function of the user's, and a tokenizer for the texts that it gives -> an encoder of rows.
#
#     f(columns: Mapping[str, pa.Array], *, row: int64 [n], epoch: int, seed: uint64 [n]) -> Mapping[str, pa.Array]
#
# N rows in, n rows out, of which one output is `text` or `tokens`; ids are from 0 to 2^31 - 1; what breaks this is an
# error that names the row. A row that is null or has no tokens is never given to the function.

ERROR = "error"
"""Output that says what is wrong with a row: text, null where nothing is."""


class MapEncoder(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A `RowEncoder` of one source."""

    map: RowMap
    column: str
    """The name under which the function finds its rows."""
    takes: Literal["text", "tokens"]
    """See `RowEncoder`."""
    tokenizer: Tokenizer | None
    """Encodes the function's `text`; None where the recipe names none."""

    @property
    def is_mapped(self) -> bool:
        """See `RowEncoder`."""
        return True

    @property
    def map_id(self) -> str:
        """The function with its version."""
        return f"map:{self.map.words}@{self.map.version}"

    @property
    def transform_id(self) -> str:
        """What turns a row into tokens, with its version."""
        behind = "tokens-1" if self.tokenizer is None else self.tokenizer.transform_id
        return f"{self.map_id}+{behind}"

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """See `RowEncoder`."""
        outputs = self._outputs(asked)
        if "text" in outputs:
            texts = self._checked_texts(outputs.pop("text"), asked)
            if self.tokenizer is None:
                raise self.fault(asked, "gives `text`, and the source has no tokenizer; add one, or give `tokens`")
            values, offsets = self.tokenizer.tokenize(texts, asked.first_row)
        else:
            values, offsets = self._ids(outputs.pop("tokens"), asked)
        return EncodedRows(values=values, offsets=offsets, others=self._lists(outputs, asked))

    def texts(self, asked: RowsToEncode) -> tuple[pa.Array, dict[str, pa.Array]]:
        """What rows become from which documents are made by messages, lists or items.

        Returns:
            [n] large_string, and the lists beside them as `EncodedRows.others`.

        Raises:
            SourceUnreadable: As `encode`; or the function gives ids.
        """
        outputs = self._outputs(asked)
        if "text" not in outputs:
            raise self.fault(asked, "gives `tokens`, and such rows become documents from `text`; give that")
        texts = self._checked_texts(outputs.pop("text"), asked)
        return texts.cast(pa.large_string()), self._lists(outputs, asked)

    def _outputs(self, asked: RowsToEncode) -> dict[str, pa.Array]:
        """What the function gives, by name, each one array of n rows."""
        try:
            given = self.map.function({self.column: asked.rows}, row=asked.row, epoch=asked.epoch, seed=asked.seed)
        except MemoryError as error:
            raise MemoryLimit(
                f"the map {self.map.words}, given {len(asked.rows)} rows from row {asked.first_row} on, asks for more "
                f"memory than this process may have ({str(error) or 'no more'}): let it hold less, or raise "
                "loaders.memory"
            ) from error
        except Exception as error:  # whatever the user's function does
            raise self.fault(asked, f"raises {type(error).__name__}: {error}") from error
        if not isinstance(given, Mapping):
            raise self.fault(asked, f"gives a {type(given).__name__}, not a mapping of names to Arrow arrays")
        if ("text" in given) == ("tokens" in given):
            raise self.fault(asked, f"gives {sorted(map(str, given))}: exactly one output must be `text` or `tokens`")
        outputs: dict[str, pa.Array] = {}
        for name, array in given.items():
            if isinstance(array, pa.ChunkedArray):
                array = array.combine_chunks()
            if not isinstance(array, pa.Array):
                raise self.fault(asked, f"gives {name!r} as a {type(array).__name__}, not as a pyarrow.Array")
            if len(array) != len(asked.rows):
                raise self.fault(asked, f"gives {len(array)} rows of {name!r} for {len(asked.rows)}")
            outputs[str(name)] = array
        self._raise_errors(outputs.pop(ERROR, None), asked)
        return outputs

    def _raise_errors(self, errors: pa.Array | None, asked: RowsToEncode) -> None:
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        if errors is not None and errors.null_count < len(errors):
            first = int(pc.index(errors.is_valid(), True).as_py())
            row = asked.first_row + first
            raise SourceUnreadable(f"row {row}: {errors[first].as_py()} (says {self.map.words})", row=row)

    def _checked_texts(self, texts: pa.Array, asked: RowsToEncode) -> pa.Array:
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise self.fault(asked, f"gives `text` of {texts.type}, not of string")
        return texts

    def _ids(self, lists: pa.Array, asked: RowsToEncode) -> tuple[NDArray[np.integer[Any]], Int64Array]:
        values, offsets = self._ragged("tokens", lists, asked)
        ids = values.to_numpy(zero_copy_only=False)
        if ids.dtype.kind not in "iu":
            raise self.fault(asked, f"gives `tokens` of {lists.type}, not lists of integers")
        if len(ids) and (ids.min() < 0 or ids.max() > MOST_ID):
            place = int(np.argmax((ids < 0) | (ids > MOST_ID)))
            row = int(np.searchsorted(offsets, place, side="right")) - 1
            raise self.fault(
                asked, f"gives row {asked.first_row + row} the token {ids[place]}; ids go from 0 to {MOST_ID}"
            )
        return (ids if ids.dtype.itemsize < 4 or ids.dtype == np.int32 else ids.astype(np.int32)), offsets

    def _lists(self, outputs: Mapping[str, pa.Array], asked: RowsToEncode) -> dict[str, pa.Array]:
        """Further outputs, each as large_list; a null row has an empty list."""
        found: dict[str, pa.Array] = {}
        for name, array in outputs.items():
            values, offsets = self._ragged(name, array, asked)
            buffers = [None, pa.py_buffer(offsets)]
            found[name] = pa.Array.from_buffers(pa.large_list(values.type), len(array), buffers, children=[values])
        return found

    def _ragged(self, name: str, array: pa.Array, asked: RowsToEncode) -> tuple[pa.Array, Int64Array]:
        """Values of lists end to end, and where each row begins; a null row has none."""
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
        is_list = is_list or pa.types.is_fixed_size_list(array.type)
        numbers = is_list and (
            pa.types.is_integer(array.type.value_type) or pa.types.is_floating(array.type.value_type)
        )
        if not numbers:
            raise self.fault(asked, f"gives {name!r} of {array.type}, not lists of numbers")
        values = array.flatten()
        if values.null_count:
            raise self.fault(asked, f"gives a null inside a list of {name!r}")
        offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False), out=offsets[1:])
        return values, offsets

    def fault(self, asked: RowsToEncode, what: str) -> SourceUnreadable:
        """The error that says of some rows what is wrong with what the function gives."""
        rows = f"row {asked.first_row}" if len(asked.rows) == 1 else f"{len(asked.rows)} rows"
        return SourceUnreadable(f"{rows}: the map {self.map.words} {what}")


# --- A function that is tried with two epochs and seeds.

TRIED_ROWS = 16
OTHER_EPOCH, OTHER_SEED = 1, 0x9E3779B97F4A7C15


def told_of_trial(
    tried: RowMap, rows: Int64Array, tokens: Int64Array, other_tokens: Int64Array, *, is_same: bool
) -> str | None:
    """What is wrong with a function, by what it gave of some rows in one epoch and in another; None: nothing.

    Args:
        tried: The function.
        rows: [n] numbers of the rows.
        tokens, other_tokens: [n] of each row.
        is_same: Whether it gave the same.
    """
    if not np.array_equal(tokens, other_tokens):
        row = int(np.argmax(tokens != other_tokens))
        return (
            f"row {int(rows[row])}: the map {tried.words} gives {tokens[row]} tokens, and {other_tokens[row]} with "
            "another epoch and seed; a length must follow from the row alone, since steps are planned by it"
        )
    if not tried.is_random and not is_same:
        return (
            f"the map {tried.words} gives other tokens with another epoch and seed; if it is to be random, write "
            f"`{tried.words.rpartition(':')[2].rpartition('.')[2]}.random = True` behind the function"
        )
    return None
