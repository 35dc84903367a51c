"""Tokens and labels from a reader's values: the native call equals its reference, and refuses what is out of bounds."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.native import native_or_not
from tests.support.plans import random_plan, values_of
from torchmix.constructor.arrays import NO_LOSS
from torchmix.constructor.build import ReplicaPieces, fill, fill_plainly, pieces_of_replica
from torchmix.errors import NativeError
from torchmix.native.load import num_calls

DTYPES = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
BAD = (-1, -(2**31), 2**31, 2**32 - 1, 2**32, 2**40, -(2**40), 2**63)
LENGTH = 48


def some_pieces(seed: int, dtype: type) -> tuple[ReplicaPieces, np.ndarray, np.ndarray]:
    """Pieces, and values with some that are no ids, in pieces and in padding."""
    rng = np.random.default_rng(seed)
    plan, documents = random_plan(seed, is_packed=seed % 3 > 0, align_tokens=(1, 4)[seed % 2], length=LENGTH)
    pieces = pieces_of_replica(plan, seed % 2)
    values, successors = values_of(pieces, documents, length=LENGTH, dtype=np.int64)
    info = np.iinfo(dtype)
    values = (values % min(info.max, 60_000)).astype(dtype)
    fitting = [one for one in BAD if info.min <= one <= info.max]
    for place in rng.integers(0, len(values), seed % 4 if fitting else 0):
        values[place] = np.array(rng.choice(np.array(fitting, object)), dtype)
    return pieces, values, successors


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_equals_its_reference(dtype: type) -> None:
    before, num_bad = num_calls().get("tm_fill", 0), 0
    for seed in range(60):
        pieces, values, successors = some_pieces(seed, dtype)
        places = pieces.places(LENGTH)
        found = []
        for native in (True, False):
            tokens, labels = (np.full(len(values), 7, np.int32) for _ in range(2))
            with native_or_not(native):
                bad = fill(values, successors, pieces, places, tokens=tokens, labels=labels)
            found.append((bad.tolist(), tokens.tolist(), labels.tolist()))
        assert found[0] == found[1]
        num_bad += len(found[0][0])
    assert num_calls()["tm_fill"] == before + 60
    assert (num_bad > 0) == (dtype not in (np.uint8, np.uint16))


def test_a_step_without_pieces_is_padding() -> None:
    none = np.zeros(0, np.int64)
    pieces = ReplicaPieces(
        step=0,
        num_tokens_global=0,
        num_samples=2,
        micro_batch_size=1,
        sample=none,
        sample_offset=none,
        source=none.astype(np.int32),
        row=none,
        epoch=none,
        start=none,
        tokens=none,
        ends_document=none.astype(np.bool_),
    )
    values = np.full(6, -5, np.int32)
    for native in (True, False):
        tokens, labels = np.full(6, 7, np.int32), np.full(6, 7, np.int32)
        with native_or_not(native):
            assert not len(fill(values, none, pieces, none, tokens=tokens, labels=labels))
        assert tokens.tolist() == [0] * 6 and labels.tolist() == [NO_LOSS] * 6


def test_forged_pieces_are_refused() -> None:
    rng = np.random.default_rng(1)
    refused = 0
    for seed in range(200):
        pieces, values, successors = some_pieces(seed % 20, np.uint16)
        places, tokens = pieces.places(LENGTH), pieces.tokens.copy()
        at, forged = int(rng.integers(len(places))), int(rng.choice([-1, -(2**62), 2**62, 2**63 - 1, 10**6]))
        (places if seed % 2 else tokens)[at] = forged
        out = [np.zeros(len(values), np.int32) for _ in range(2)]
        with native_or_not(True), pytest.raises(NativeError, match=r"tm_fill refuses entry \d+: a piece lies"):
            fill(values, successors, replace(pieces, tokens=tokens), places, tokens=out[0], labels=out[1])
        refused += 1
    assert refused == 200


def test_arrays_of_other_lengths_are_refused() -> None:
    pieces, values, successors = some_pieces(4, np.int32)
    places, out = pieces.places(LENGTH), np.zeros(len(values), np.int32)
    with native_or_not(True):
        with pytest.raises(NativeError, match="not a value per token"):
            fill(values[:-1], successors, pieces, places, tokens=out, labels=out.copy())
        with pytest.raises(NativeError, match="not an entry per piece"):
            fill(values, successors[:-1], pieces, places, tokens=out, labels=out.copy())


def test_the_reference_needs_no_library() -> None:
    pieces, values, successors = some_pieces(5, np.uint16)
    out = [np.zeros(len(values), np.int32) for _ in range(4)]
    with native_or_not(False):
        fill(values, successors, pieces, pieces.places(LENGTH), tokens=out[0], labels=out[1])
    fill_plainly(values, successors, pieces, pieces.places(LENGTH), tokens=out[2], labels=out[3])
    assert (out[0] == out[2]).all() and (out[1] == out[3]).all()
