"""Megatron's data flags -> datasets, their exact shares, and where their documents end."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import OptionError, located
from torchmix.formats.megatron.files import IndexHeader, index_path, read_header
from torchmix.recipe.amounts import apportioned, numerators
from torchmix.recipe.sources import rows_of
from torchmix.recipe.structs import Source
from torchmix.storage.random_access import LocalFile
from torchmix.storage.store_file import opened

# --- A look into a Megatron dataset: do its documents hold the id that ends them before their end, too?
#
# The id is only guessed where every document that was looked at ends with it. Cost: reading LOOK_BYTES of the .bin at
# most, in RUNS places spread evenly over its documents.

LOOK_BYTES = 32 << 20
"""Bytes of a .bin that are looked at."""
RUNS = 16
"""Runs of documents that they are spread over."""
BLOCK_DOCUMENTS = 1 << 14
"""Documents that are looked at together."""


class InnerEnds(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    end_id: int | None
    """The EOD as given; else the id that all documents end with, None where they end with several."""
    num_documents: int
    """Documents with tokens that were looked at."""
    num_holding: int
    """Those that hold `end_id` before their last token."""
    is_whole: bool
    """Whether these are all documents."""


def look_for_inner_ends(bin_path: Path, *, end_id: int | None) -> InnerEnds:
    """Look for an EOD inside documents.

    Args:
        bin_path: The .bin of the dataset.
        end_id: The tokenizer's EOD; None to take the id that all documents end with.

    Raises:
        SourceUnreadable: The .idx is none.
        OSError: A file cannot be read.
    """
    path = index_path(str(bin_path))
    index, content = LocalFile(path), LocalFile(bin_path)
    try:
        with located(path):
            header = read_header(index)
        is_whole = content.num_bytes <= LOOK_BYTES
        runs = list(_runs(index, content, header, 1 if is_whole else RUNS))
    finally:
        index.close()
        content.close()
    last = np.unique(np.concatenate([np.zeros(0, np.int64), *(values[ends - 1] for values, ends in runs)]))
    if end_id is None and len(last) == 1:
        end_id = int(last[0])
    return InnerEnds(
        end_id=end_id,
        num_documents=sum(len(ends) for _, ends in runs),
        num_holding=0 if end_id is None else sum(_num_holding(values, ends, end_id) for values, ends in runs),
        is_whole=is_whole,
    )


Run = tuple[NDArray[np.integer[Any]], NDArray[np.int64]]
"""Tokens of consecutive documents, end to end, and where each that has tokens ends."""


def _num_holding(values: NDArray[np.integer[Any]], ends: NDArray[np.int64], end_id: int) -> int:
    places = np.flatnonzero(values == end_id)
    document = np.searchsorted(ends, places, side="right")
    return len(np.unique(document[places < ends[document] - 1]))


def _runs(index: LocalFile, content: LocalFile, header: IndexHeader, num_runs: int) -> Iterator[Run]:
    """The first documents of each of some equal stretches of a dataset, whole ones, up to LOOK_BYTES in all."""
    borders = [number * header.num_documents // num_runs for number in range(num_runs + 1)]
    for first, stop in pairwise(borders):
        room = LOOK_BYTES // num_runs
        for start in range(first, stop, BLOCK_DOCUMENTS):
            if room <= 0:
                break
            values, ends = _block(index, content, header, start, min(start + BLOCK_DOCUMENTS, stop), room)
            room -= values.nbytes
            yield values, ends


def _block(index: LocalFile, content: LocalFile, header: IndexHeader, start: int, stop: int, room: int) -> Run:
    """The documents from `start` on that fit in `room` bytes, or the first one."""
    borders = header.document_indices(index, start, stop + 1)
    first = int(borders[0])
    lengths = header.lengths(index, first, int(borders[-1]))
    pointers = header.pointers(index, first, int(borders[-1]))
    token_stop = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[borders - first]
    fitting = max(1, int(np.searchsorted(token_stop[1:] * header.dtype.itemsize, room, side="right")))
    num_sequences = int(borders[fitting]) - first
    values = _tokens(content, header.dtype, lengths[:num_sequences], pointers[:num_sequences])
    return values, np.unique(token_stop[1 : fitting + 1][np.diff(token_stop[: fitting + 1]) > 0])


def _tokens(
    content: LocalFile, dtype: np.dtype[np.integer[Any]], lengths: NDArray[np.int32], pointers: NDArray[np.int64]
) -> NDArray[np.integer[Any]]:
    """Tokens of sequences, end to end; read at once where they lie so."""
    num_bytes = lengths.astype(np.int64) * dtype.itemsize
    if len(pointers) and np.array_equal(pointers, pointers[0] + np.cumsum(num_bytes) - num_bytes):
        return np.frombuffer(content.read(int(pointers[0]), int(num_bytes.sum())), dtype)
    parts = [content.read(pointer, size) for pointer, size in zip(pointers.tolist(), num_bytes.tolist(), strict=True)]
    return np.frombuffer(b"".join(parts), dtype)


# --- Megatron's data flags -> datasets and their exact shares.
#
# What Megatron refuses is refused, and says why.
#
# The rules are those of `get_blend_from_list` (megatron/core/datasets/utils.py) and of `BlendedMegatronDatasetBuilder`
# in Megatron-LM: an odd number of words, or none that is a number where a weight would stand, is a list without
# weights.

PER_SPLIT_KEYS = {"train": "train", "valid": "validation", "test": "test"}
"""Parts, as Megatron's file names them and as a recipe does."""
SHARE_DIGITS = 15
"""Decimals of a percentage whose exact value has no end: a share of 1e-17, less than a double tells."""
LENGTHS_TOGETHER = 1 << 22


class Blend(msgspec.Struct, frozen=True, kw_only=True):
    """Datasets by their prefixes, in Megatron's order; a prefix may stand more than once."""

    prefixes: tuple[str, ...]
    """At least one."""
    weights: tuple[Fraction, ...] | None
    """The weight of each, above 0; None if they follow from sizes."""
    left_out: tuple[str, ...] = ()
    """Prefixes whose weight is 0."""


def words_of(given: Sequence[str]) -> list[str]:
    """The words of a flag; a single one that holds several, as a whole list in quotes, is taken apart."""
    return shlex.split(given[0]) if len(given) == 1 else list(given)


def words_of_file(path: Path) -> list[str]:
    """The words of a `--data-args-path` file.

    Raises:
        OptionError: It cannot be read.
    """
    return _read(path).split()


def words_of_split_file(path: Path) -> dict[str, list[str]]:
    """Part -> words, of a `--per-split-data-args-path` file.

    Raises:
        OptionError: It cannot be read, or is not an object with `train`, `valid` and `test`.
    """
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise OptionError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict) or set(content) != set(PER_SPLIT_KEYS):
        raise OptionError(f"{path} is not an object with the keys train, valid and test")
    words: dict[str, list[str]] = {}
    for key, part in PER_SPLIT_KEYS.items():
        value = content[key]
        if isinstance(value, list) and all(isinstance(word, str | int | float) for word in value):
            words[part] = [str(word) for word in value]
        elif isinstance(value, str):
            words[part] = value.split()
        elif value is not None:
            raise OptionError(f"{path}: {key} is {value!r}; write a list of weights and prefixes, or text")
    return {part: found for part, found in words.items() if found}


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """Understand the words of a flag as Megatron does.

    Raises:
        OptionError: There are none, some pairs have a weight and some do not, a weight is below 0, or all are 0.
    """
    if not words:
        raise OptionError(f"{flag} names no dataset")
    numbers = [_number(word) for word in words[::2]] if len(words) % 2 == 0 else [None]
    if None in numbers:
        if len(words) % 2 == 0 and any(number is not None for number in numbers):
            word = words[2 * numbers.index(None)]
            raise OptionError(f"{flag}: {word!r} stands where a weight should; give one to every prefix, or to none")
        if any(_number(word) is not None for word in words):
            raise OptionError(
                f"{flag}: {len(words)} words, some of them numbers; Megatron takes pairs of weight and prefix, or "
                "prefixes alone"
            )
        return Blend(prefixes=tuple(word.strip() for word in words), weights=None)
    pairs = [(word, prefix.strip()) for word, prefix in zip(words[::2], words[1::2], strict=True)]
    is_kept = [number != 0 for number in numbers]
    for (word, prefix), number in zip(pairs, numbers, strict=True):
        if number is not None and not (0 <= number < math.inf and any(is_kept)):
            raise OptionError(f"{flag}: the weight {word} of {prefix} must be above 0")
    kept = [pair for pair, keep in zip(pairs, is_kept, strict=True) if keep]
    return Blend(
        prefixes=tuple(prefix for _, prefix in kept),
        weights=tuple(Fraction(Decimal(word.strip())) for word, _ in kept),
        left_out=tuple(prefix for (_, prefix), keep in zip(pairs, is_kept, strict=True) if not keep),
    )


def samples_of_one_pass(bin_path: str, *, seq_length: int, documents: tuple[str, str] | None) -> int:
    """Samples that Megatron's GPTDataset makes of one epoch of a dataset.

    Args:
        bin_path: Its .bin, a path or a URI.
        seq_length: Tokens of a sample.
        documents: The part of its sequences that counts; None for all.

    Raises:
        SourceUnreadable: Its .idx is none.
    """
    path = index_path(bin_path)
    with opened(path, path) as index:
        header = read_header(index)
        start, stop = rows_of(Source(path=path, documents=documents), header.num_sequences)
        tokens = 0
        for first in range(start, stop, LENGTHS_TOGETHER):
            lengths = header.lengths(index, first, min(first + LENGTHS_TOGETHER, stop))
            tokens += int(lengths.sum(dtype="int64"))
    return max(0, tokens - 1) // seq_length


def num_documents(bin_path: str) -> int:
    """Documents of a dataset, as its .idx has them.

    Raises:
        SourceUnreadable: Its .idx is none.
    """
    path = index_path(bin_path)
    with opened(path, path) as index:
        return read_header(index).num_documents


def share_texts(weights: Sequence[Fraction | int]) -> list[str]:
    """Percentages in proportion to weights, each exact if all are finite decimals, else the nearest of SHARE_DIGITS
    decimals; their sum is 100 %."""
    total = sum(weights, Fraction(0))
    shares = [100 * Fraction(weight) / total for weight in weights]
    scale = 10**SHARE_DIGITS
    if any((share * scale).denominator != 1 for share in shares):
        parts, whole = numerators(share * scale for share in shares)
        shares = [Fraction(unit, scale) for unit in apportioned(parts, whole, 100 * scale)]
    return [f"{_decimal(share)}%" for share in shares]


def _decimal(value: Fraction) -> str:
    """A fraction of at most SHARE_DIGITS decimals, without zeros at its end."""
    whole, rest = divmod(value.numerator * 10**SHARE_DIGITS // value.denominator, 10**SHARE_DIGITS)
    return f"{whole}.{rest:0{SHARE_DIGITS}}".rstrip("0").rstrip(".")


def _number(word: str) -> float | None:
    """As Megatron reads a weight."""
    try:
        return float(word)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
