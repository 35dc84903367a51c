"""How many tokens lose their label, counted without reading, against the places where readers find them."""

from __future__ import annotations

import numpy as np
import pytest

from torchmix.catalog.sizes import TokenRuns
from torchmix.reader.piece_copy import num_unlabelled, unlabelled_places
from torchmix.reader.protocol import WantedPieces


def drawn_runs(rng: np.random.Generator, lengths: list[int]) -> TokenRuns:
    """Some runs in each document, none of which overlap."""
    runs = []
    for length in lengths:
        borders = np.sort(rng.choice(length + 1, min(length + 1, 2 * int(rng.integers(0, 4))), replace=False))
        runs.append([(int(a), int(b - a)) for a, b in zip(borders[::2], borders[1::2], strict=False)])
    flat = [run for of_row in runs for run in of_row]
    return TokenRuns(
        first_run_of_row=np.cumsum([0, *map(len, runs)]),
        offset=np.array([offset for offset, _ in flat], np.int64),
        tokens=np.array([tokens for _, tokens in flat], np.int64),
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_count_is_that_of_the_places_that_have_a_label(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [[int(n) for n in rng.integers(1, 30, 12)] for _ in range(3)]
    tables = [(0, drawn_runs(rng, lengths[0])), (2, drawn_runs(rng, lengths[2])), (2, drawn_runs(rng, lengths[2]))]
    pieces, most = [], 20  # tokens of a document, the rest of which is truncated
    for source, row in ((int(rng.integers(3)), int(rng.integers(12))) for _ in range(40)):
        length = min(lengths[source][row], most)
        start, stop = np.sort(rng.choice(length + 1, 2, replace=False)).tolist()
        pieces.append((source, row, start, stop - start, stop == length))
    source, row, start, tokens, ends = (np.array(column) for column in zip(*pieces, strict=True))
    wanted = WantedPieces.end_to_end(source=source, row=row, epoch=0, start=start, tokens=tokens)
    places = unlabelled_places(tables, wanted)
    assert places is not None and len(places) == len(set(places.tolist()))
    has_none = (np.cumsum(tokens) - 1)[ends]
    found = num_unlabelled(tables, source=source, row=row, start=start, tokens=tokens, ends_document=ends)
    assert found == len(set(places.tolist()) - set(has_none.tolist())) > 0
    assert num_unlabelled([], source=source, row=row, start=start, tokens=tokens, ends_document=ends) == 0
