"""A function of the user's, and a tokenizer for the texts that it gives -> an encoder of rows.

    f(columns: Mapping[str, pa.Array], *, row: int64 [n], epoch: int, seed: uint64 [n]) -> Mapping[str, pa.Array]

In: n rows of one column. Out: their tokens, and other ragged arrays that the function gives. Must hold: n rows in, n
rows out, of which one output is `text` or `tokens`; ids are from 0 to 2^31 - 1; what breaks this is an error that names
the row. A row that is null or has no tokens is never given to the function. Cost: that of the function and of the
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import MOST_ID
from torchmix.errors import MemoryLimit, SourceUnreadable
from torchmix.transform.maps.row_map import RowMap
from torchmix.transform.row_encoder import EncodedRows, RowsToEncode
from torchmix.transform.tokenizer import Tokenizer

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
    def transform_id(self) -> str:
        """What turns a row into tokens, with its version."""
        behind = "tokens-1" if self.tokenizer is None else self.tokenizer.transform_id
        return f"map:{self.map.words}@{self.map.version}+{behind}"

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """See `RowEncoder`."""
        try:
            given = self.map.function({self.column: asked.rows}, row=asked.row, epoch=asked.epoch, seed=asked.seed)
        except MemoryError as error:
            raise MemoryLimit(
                f"the map {self.map.words}, given {len(asked.rows)} rows from row {asked.first_row} on, asks for more "
                f"memory than this process may have ({error or 'no more'}): let it hold less, or raise loaders.memory"
            ) from error
        except Exception as error:  # whatever the user's function does
            raise self._fault(asked, f"raises {type(error).__name__}: {error}") from error
        outputs = self._outputs(given, asked)
        self._raise_errors(outputs.pop(ERROR, None), asked)
        if "text" in outputs:
            values, offsets = self._tokenized(outputs.pop("text"), asked)
        else:
            values, offsets = self._ids(outputs.pop("tokens"), asked)
        others = {name: self._others(name, array, asked) for name, array in outputs.items()}
        return EncodedRows(values=values, offsets=offsets, others=others)

    def _outputs(self, given: Any, asked: RowsToEncode) -> dict[str, pa.Array]:
        """The outputs by name, each one array of n rows."""
        if not isinstance(given, Mapping):
            raise self._fault(asked, f"gives a {type(given).__name__}, not a mapping of names to Arrow arrays")
        if ("text" in given) == ("tokens" in given):
            raise self._fault(asked, f"gives {sorted(map(str, given))}: exactly one output must be `text` or `tokens`")
        outputs: dict[str, pa.Array] = {}
        for name, array in given.items():
            if isinstance(array, pa.ChunkedArray):
                array = array.combine_chunks()
            if not isinstance(array, pa.Array):
                raise self._fault(asked, f"gives {name!r} as a {type(array).__name__}, not as a pyarrow.Array")
            if len(array) != len(asked.rows):
                raise self._fault(asked, f"gives {len(array)} rows of {name!r} for {len(asked.rows)}")
            outputs[str(name)] = array
        return outputs

    def _raise_errors(self, errors: pa.Array | None, asked: RowsToEncode) -> None:
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        if errors is not None and errors.null_count < len(errors):
            first = int(pc.index(errors.is_valid(), True).as_py())
            row = asked.first_row + first
            raise SourceUnreadable(f"row {row}: {errors[first].as_py()} (says {self.map.words})", row=row)

    def _tokenized(self, texts: pa.Array, asked: RowsToEncode) -> tuple[NDArray[np.integer[Any]], Int64Array]:
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise self._fault(asked, f"gives `text` of {texts.type}, not of string")
        if self.tokenizer is None:
            raise self._fault(asked, "gives `text`, and the source has no tokenizer; add one, or give `tokens`")
        return self.tokenizer.tokenize(texts, asked.first_row)

    def _ids(self, lists: pa.Array, asked: RowsToEncode) -> tuple[NDArray[np.integer[Any]], Int64Array]:
        values, offsets = self._ragged("tokens", lists, asked)
        ids = values.to_numpy(zero_copy_only=False)
        if ids.dtype.kind not in "iu":
            raise self._fault(asked, f"gives `tokens` of {lists.type}, not lists of integers")
        if len(ids) and (ids.min() < 0 or ids.max() > MOST_ID):
            place = int(np.argmax((ids < 0) | (ids > MOST_ID)))
            row = int(np.searchsorted(offsets, place, side="right")) - 1
            raise self._fault(
                asked, f"gives row {asked.first_row + row} the token {ids[place]}; ids go from 0 to {MOST_ID}"
            )
        return (ids if ids.dtype.itemsize < 4 or ids.dtype == np.int32 else ids.astype(np.int32)), offsets

    def _others(self, name: str, array: pa.Array, asked: RowsToEncode) -> pa.Array:
        """A further output as large_list; a null row has an empty list."""
        values, offsets = self._ragged(name, array, asked)
        begins = pa.py_buffer(offsets)
        return pa.Array.from_buffers(pa.large_list(values.type), len(array), [None, begins], children=[values])

    def _ragged(self, name: str, array: pa.Array, asked: RowsToEncode) -> tuple[pa.Array, Int64Array]:
        """Values of lists end to end, and where each row begins; a null row has none."""
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
        is_list = is_list or pa.types.is_fixed_size_list(array.type)
        numbers = is_list and (
            pa.types.is_integer(array.type.value_type) or pa.types.is_floating(array.type.value_type)
        )
        if not numbers:
            raise self._fault(asked, f"gives {name!r} of {array.type}, not lists of numbers")
        values = array.flatten()
        if values.null_count:
            raise self._fault(asked, f"gives a null inside a list of {name!r}")
        offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False), out=offsets[1:])
        return values, offsets

    def _fault(self, asked: RowsToEncode, what: str) -> SourceUnreadable:
        rows = f"row {asked.first_row}" if len(asked.rows) == 1 else f"{len(asked.rows)} rows"
        return SourceUnreadable(f"{rows}: the map {self.map.words} {what}")
