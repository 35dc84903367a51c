"""Spans against the same said token by token."""

from __future__ import annotations

import numpy as np
import pytest

from torchmix.constructor.spans import PADDING, Spans, slice_spans, spans_of_pieces

Token = tuple[int, int]
"""Position and source."""


def by_token(spans: Spans, num_tokens: int) -> list[Token]:
    tokens: list[Token] = []
    stops = [*spans.start.tolist()[1:], num_tokens]
    columns = zip(spans.start.tolist(), stops, spans.position.tolist(), spans.source.tolist(), strict=True)
    for start, stop, position, source in columns:
        assert len(tokens) == start < stop
        tokens += [(0 if source == PADDING else position + k, source) for k in range(stop - start)]
    return tokens


def random_pieces(seed: int, *, num_tokens: int, border: int) -> tuple[list[np.ndarray], list[Token]]:
    """Columns of pieces with gaps between, none over a multiple of `border`; and what each token is."""
    rng = np.random.default_rng(seed)
    columns, wanted = [], [(0, PADDING)] * num_tokens
    place = int(rng.integers(0, 4))
    while place < num_tokens:
        stop = min(place + int(rng.integers(1, 9)), (place // border + 1) * border)
        position, source = int(rng.integers(0, 50)), int(rng.integers(0, 3))
        columns.append((place, stop - place, position, source))
        wanted[place:stop] = [(position + k, source) for k in range(stop - place)]
        place = stop + int(rng.choice([0, 0, 1, 7, 2 * border]))
    return [np.array(column, np.int64) for column in zip(*columns, strict=True)], wanted


@pytest.mark.parametrize("seed", range(30))
def test_spans_are_the_pieces_and_the_gaps_between(seed: int) -> None:
    pieces, wanted = random_pieces(seed, num_tokens=96, border=24)
    spans = spans_of_pieces(*pieces, tokens_stop=np.arange(24, 97, 24))
    assert by_token(spans, 96) == wanted
    array, stop = spans.to_array(np.arange(24, 97, 24))
    assert (array.dtype, stop.dtype) == (np.int32, np.int64)
    for microbatch, part in enumerate(np.split(array.astype(np.int64), stop[:-1])):
        one = Spans(start=part[:, 0], position=part[:, 1], source=part[:, 2])
        assert by_token(one, 24) == wanted[24 * microbatch : 24 * microbatch + 24]
    again = Spans.from_array(array, stop, 24)
    assert by_token(again, 96) == wanted


def test_no_piece_at_all_is_one_span_of_padding_in_each_microbatch() -> None:
    none = np.zeros(0, np.int64)
    array, stop = spans_of_pieces(none, none, none, none, tokens_stop=np.array([8, 16])).to_array(np.array([8, 16]))
    assert array.tolist() == [[0, 0, PADDING], [0, 0, PADDING]]
    assert stop.tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(30))
def test_a_slice_has_the_tokens_of_its_chunks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pieces, wanted = random_pieces(seed, num_tokens=96, border=24)
    spans = spans_of_pieces(*pieces, tokens_stop=np.arange(24, 97, 24))
    edges = np.unique(rng.integers(0, 97, 12))
    start, stop = edges[:-1][::2], edges[1:][::2]
    tokens = stop - start
    chosen = slice_spans(spans, chunk_start=start, chunk_tokens=tokens, chunk_start_in_slice=np.cumsum(tokens) - tokens)
    expected = [token for a, b in zip(start, stop, strict=True) for token in wanted[a:b]]
    assert by_token(chosen, len(expected)) == expected
