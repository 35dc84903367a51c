"""What every tokenizer and every encoder of rows gives: tokens, how many they are, and text again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable

# --- An Arrow array of strings -> Python strings, a bounded number of bytes at a time.
#
# What is not UTF-8 is an error that names its row; a batch has at most BATCH_BYTES of text, or one text. Cost: about
# 100 ns a text and 0.5 ns a byte. A vocabulary's encoder holds some 25 bytes for each byte of a batch while it works.

BATCH_BYTES = 1 << 20
BATCH_TEXTS = 1 << 14


def text_batches(texts: pa.Array, first_row: int) -> Iterator[list[str | None]]:
    """Cut an array into batches.

    Args:
        texts: [documents], string or large_string, with or without nulls.
        first_row: Row of the first text, for messages.

    Raises:
        SourceUnreadable: A text is not UTF-8.
    """
    import pyarrow.compute as pc  # not needed for ids, and slow to load

    num_bytes = pc.fill_null(pc.binary_length(texts), 0)
    stop_byte = np.cumsum(num_bytes.to_numpy(zero_copy_only=False), dtype=np.int64)
    for start, stop in _ranges(stop_byte):
        batch = texts.slice(start, stop - start)
        try:
            yield batch.to_pylist()
        except UnicodeDecodeError as error:
            at, fault = _first_fault(batch, error)
            row = first_row + start + at
            raise SourceUnreadable(
                f"row {row} is not valid UTF-8: byte {fault.start} is "
                f"0x{fault.object[fault.start]:02x} ({fault.reason}); mend the text, or use tokenizer: bytes, which "
                "takes any bytes",
                row=row,
            ) from None


def _ranges(stop_byte: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(stop_byte):
        begin_byte = int(stop_byte[start - 1]) if start else 0
        fitting = int(np.searchsorted(stop_byte, begin_byte + BATCH_BYTES, side="right"))
        stop = min(max(fitting, start + 1), start + BATCH_TEXTS)
        yield start, stop
        start = stop


def _first_fault(batch: pa.Array, error: UnicodeDecodeError) -> tuple[int, UnicodeDecodeError]:
    for row in range(len(batch)):
        try:
            batch[row].as_py()
        except UnicodeDecodeError as fault:
            return row, fault
    raise error


# --- What every tokenizer gives: the tokens of texts, how many they are, and text again.
#
# Pure and total; `count_tokens` equals the lengths that `tokenize` gives; whatever can alter a length alters
# `transform_id`, since catalogs hold lengths made under it. Safe to share between threads.

Ids = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Turns texts into tokens."""

    @property
    def transform_id(self) -> str:
        """What turns a text into ids, with its version."""

    @property
    def vocab_size(self) -> int:
        """Ids go from 0 to one less."""

    @property
    def vocabulary(self) -> str:
        """The same wherever the same text becomes the same ids, in whatever file and by whatever library."""

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, NDArray[np.int64]]:
        """Tokens of every document, end to end.

        Args:
            texts: [documents], string or large_string, with or without nulls; a null is a document of no tokens.
            first_row: Row of the first text, for messages.

        Returns:
            ids [tokens], and offsets int64 [documents + 1]: document i is `ids[offsets[i]:offsets[i + 1]]`.

        Raises:
            SourceUnreadable: A text is not UTF-8, and the tokenizer needs it to be.
        """

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """Tokens of each document, int64 [documents]; all else as `tokenize`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, for people to read; an id without text is shown as `<|id|>`."""


# --- What a vocabulary gives: ids of texts, and what is tried on it to know it again.
#
# Text that looks like a special token is encoded as plain text: who writes a document must not be able to end it, or
# to speak for the system.

PROBE = (
    "The quick brown fox, 1234567890 3.14 don't DON'T\n\n\t  def f(x):\r\n    return x**2  # na\u00efve caf\u00e9"
    " cafe\u0301 \u00df \ufb01 \u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \u041f\u0440\u0438"
    "\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea"
    " \u00a0\u200b\ufeff <|endoftext|></s>[INST] http://x.y/z?q=1&r=%20 aaaaaaaaaaaaaaaa\x00\x7f"
)
"""Its ids are part of a tokenizer's identity: a library that splits such text otherwise makes another tokenizer."""


class SpecialToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that no text becomes, as it stands in a vocabulary."""

    id: int
    lstrip: bool
    """It takes white space before it with it."""
    rstrip: bool
    """It takes white space behind it with it."""


class Encoder(Protocol):
    """A vocabulary, and how text is cut into it. Safe to share between threads."""

    @property
    def kind(self) -> str:
        """Name and version of this way to encode; begins the transform's id."""

    @property
    def content(self) -> str:
        """64 hex digits over all that the vocabulary's author decided."""

    @property
    def highest_id(self) -> int:
        """No text gives an id above it."""

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of all texts, end to end, and how many each has.

        Raises:
            SourceUnreadable: One of them cannot be encoded.
        """

    def count(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """How many ids each text has."""

    def id_of_token(self, token: str) -> int | None:
        """The id of a token by its name, special or not; None if there is none."""

    def special_tokens(self) -> Iterable[str]:
        """Names that may stand for ids, for messages."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; ids that are not of the vocabulary are left out."""

    def has_id(self, token: int) -> bool:
        """Whether an id is of the vocabulary."""


def is_refusal(error: BaseException) -> bool:
    """Whether a library's error is about the given text: any error except lack of memory or an interrupt.

    Libraries in Rust raise panics, for example when a regular expression exceeds its stack. A panic is no `Exception`.
    """
    is_panic = type(error).__name__ == "PanicException"
    return is_panic or (isinstance(error, Exception) and not isinstance(error, MemoryError))


# --- Rows as a file holds them -> tokens: what a tokenizer, or a function of the user's, makes of single rows.
#
# Pure, and row by row: what becomes of a row depends on that row, its number, epoch and seed alone, never on the rows
# beside it; so rows are encoded in whatever batches are at hand. Its length follows from the row's content alone: the
# index measures it once.


class RowsToEncode(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rows of one source, or of several with the same encoder, in one epoch."""

    rows: pa.Array
    """[n] large_string, or large_list of integers: the column, as the file holds it; none is null."""
    row: Int64Array
    """[n] number of each row in its source; while a file is indexed, in the file."""
    epoch: int
    """Pass over the source, from 0."""
    seed: NDArray[np.uint64]
    """[n] a key of the recipe's seed, source, row and epoch; 0 while a file is indexed."""
    first_row: int
    """Row of the file that the first one is, for messages."""


class EncodedRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What became of n rows."""

    values: NDArray[np.integer[Any]]
    """[tokens] ids of all rows, end to end."""
    offsets: Int64Array
    """[n + 1] where each row begins in them."""
    others: Mapping[str, pa.Array] = msgspec.field(default_factory=dict)
    """[n] lists of numbers of each row, by name, that travel with its ids."""


def join_encoded(parts: Sequence[EncodedRows]) -> EncodedRows:
    """Rows of several parts, end to end; where one of them has no such other array, its rows have empty lists."""
    begins = np.cumsum([0, *(int(part.offsets[-1]) for part in parts)])
    offsets = [part.offsets[1:] + begin for part, begin in zip(parts, begins.tolist(), strict=False)]
    types = {name: array.type for part in parts for name, array in part.others.items()}
    others = {
        name: pa.concat_arrays(
            [part.others[name] if name in part.others else pa.nulls(len(part.offsets) - 1, type) for part in parts]
        )
        for name, type in types.items()
    }
    return EncodedRows(
        values=np.concatenate([part.values for part in parts]),
        offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        others=others,
    )


class RowEncoder(Protocol):
    """Turns rows into tokens. Equal encoders may encode rows of several sources together."""

    @property
    def takes(self) -> Literal["text", "tokens"]:
        """What its rows are."""

    @property
    def is_mapped(self) -> bool:
        """Whether number, epoch and seed of a row matter."""

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """Encode rows.

        Raises:
            SourceUnreadable: A row cannot be encoded.
        """


class TextEncoder(msgspec.Struct, frozen=True):
    """A tokenizer as an encoder of rows."""

    tokenizer: Tokenizer

    @property
    def takes(self) -> Literal["text", "tokens"]:
        """See `RowEncoder`."""
        return "text"

    @property
    def is_mapped(self) -> bool:
        """See `RowEncoder`."""
        return False

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """See `RowEncoder`."""
        values, offsets = self.tokenizer.tokenize(asked.rows, asked.first_row)
        return EncodedRows(values=values, offsets=offsets)


def row_array(values: NDArray[np.integer[Any]], offsets: Int64Array, takes: str) -> pa.Array:
    """Rows of bytes or ids as an Arrow array over the same memory.

    Args:
        values: [offsets[-1]] bytes of texts as uint8, or ids.
        offsets: [n + 1] from 0 on.
        takes: `text` or `tokens`.
    """
    num_rows = len(offsets) - 1
    begins = pa.py_buffer(np.ascontiguousarray(offsets))
    if takes == "text":
        buffers = [None, begins, pa.py_buffer(np.ascontiguousarray(values))]
        return pa.Array.from_buffers(pa.large_string(), num_rows, buffers)
    ids = pa.array(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.large_list(ids.type), num_rows, [None, begins], children=[ids])
