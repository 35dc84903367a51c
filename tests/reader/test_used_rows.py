"""Pages with their used rows alone: the same documents in less memory, and an error for any other row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.catalogs import make_world
from tests.support.files import random_tokens
from torchmix.errors import PlanError
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader

DOCUMENTS = random_tokens(4, 900, mean_tokens=60)


def reader_of(tmp_path: Path, used: list[int] | None) -> Any:
    world = make_world(tmp_path, {"web": [DOCUMENTS]}, choices={"web": {"page_bytes": 8000}})
    rows = None if used is None else {"web": np.array(used, np.int32)}
    return Reader(world.index(), tmp_path, cache_bytes=1 << 20, used=rows)


def read(reader: Any, rows: list[int], starts: list[int] | None = None) -> list[int]:
    """The tokens of the rests of some rows, end to end."""
    begins = np.array(starts or [0] * len(rows), np.int64)
    tokens = np.array([len(DOCUMENTS[row]) for row in rows], np.int64) - begins
    return reader.read(
        WantedPieces.end_to_end(source=0, row=np.array(rows), epoch=0, start=begins, tokens=tokens)
    ).values.tolist()


def test_used_rows_are_what_they_were_in_less_memory(tmp_path: Path) -> None:
    used = [row for row in range(0, 900, 7) if DOCUMENTS[row]]
    order = np.random.default_rng(1).permutation(used).tolist()
    expected = [token for row in order for token in DOCUMENTS[row]]
    sizes = {}
    for name, rows in (("whole", None), ("used", used)):
        reader = reader_of(tmp_path / name, rows)
        for _ in range(2):  # decoded, then kept
            assert read(reader, order) == expected
        sizes[name] = reader.stats()["cache_bytes"]
        assert read(reader, order[:1], [1]) == DOCUMENTS[order[0]][1:]
        reader.close()
    assert sizes["used"] < sizes["whole"] / 2


def test_a_row_that_is_not_used_is_refused(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, [row for row in range(0, 900, 7) if DOCUMENTS[row]])
    row = next(row for row in range(900) if row % 7 and DOCUMENTS[row])
    with pytest.raises(PlanError, match="is asked for, and no stream of the part has it"):
        read(reader, [row])
    reader.close()


def test_warm_keeps_used_rows_too(tmp_path: Path) -> None:
    used = [row for row in range(0, 900, 7) if DOCUMENTS[row]]
    reader = reader_of(tmp_path, used)
    reader.warm(0, np.arange(5))
    decoded = reader.stats()["pages_decoded"]
    assert decoded == 5
    rows = [row for row in used if row < 100]
    assert read(reader, rows) == [token for row in rows for token in DOCUMENTS[row]]
    assert reader.stats()["pages_decoded"] == decoded
    reader.close()
