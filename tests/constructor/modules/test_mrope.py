"""Positions in three dimensions, against a walk over the tokens of each segment."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from torchmix.constructor.fields import mrope_position_ids
from torchmix.errors import OptionError

LENGTH = 48
LASTS = 2300
"""Milliseconds of a video."""


def walk(
    tokens: int,
    images: list[tuple[int, int, int, int]],
    *,
    step: Callable[[int], float] = lambda frames: 1.0,
    past_time: bool = True,
) -> list[tuple[int, int, int]]:
    """Positions of a segment; `images` are offset, frames, rows and columns, and `step` the positions from a frame of
    so many to the next."""
    found: list[tuple[int, int, int]] = []
    position, rest = 0, list(images)
    while len(found) < tokens:
        if rest and rest[0][0] == len(found):
            _, *sides = rest.pop(0)
            times = [math.floor(f * step(sides[0])) for f in range(sides[0])]
            found += [(position + times[f], position + r, position + c) for f, r, c in product(*map(range, sides))]
            position += max(times[-1] + 1 if past_time else 1, *sides[1:])
        else:
            found.append((position,) * 3)
            position += 1
    return found


def make_microbatch(
    rng: np.random.Generator, num_samples: int
) -> tuple[list[int], list[list[int]], list[list[tuple[int, int, int, int]]]]:
    """Where documents begin and the last one ends, the table of images, and the images of each document."""
    borders, table, documents = [0], [], []
    while borders[-1] < num_samples * LENGTH:
        room = LENGTH - borders[-1] % LENGTH
        width = min(room, int(rng.integers(1, 6)) * 8)
        offset, images = int(rng.integers(0, 3)), []
        while rng.random() < 0.8:
            frames = int(rng.choice([1, 1, 2, 5]))  # an image is one frame
            rows, columns = (int(side) for side in rng.integers(1, 4, 2))
            count = frames * rows * columns
            if offset + count > width:
                break
            images.append((offset, frames, rows, columns))
            table.append([0, borders[-1] + offset, count, frames, rows, columns, LASTS * (frames > 1)])
            offset += count + int(rng.integers(0, 3))
        documents.append(images)
        borders.append(borders[-1] + width)
    return borders, table, documents


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("positions_at", ["document", "sample"])
@pytest.mark.parametrize("attention_to", ["document", "sample"])
def test_positions_are_those_of_a_walk(cp: int, positions_at: str, attention_to: str) -> None:
    for seed in range(30):
        documents, table, images = make_microbatch(np.random.default_rng(seed), 2)
        samples = [0, LENGTH, 2 * LENGTH]
        stretches = documents if positions_at == "document" else samples
        wanted = []
        for start, stop in pairwise(stretches):
            inside = zip(documents, images, strict=False)
            wanted += walk(
                stop - start,
                [(first - start + a, *sides) for first, of in inside for a, *sides in of if start <= first < stop],
            )
        position = np.concatenate([np.arange(stop - start) for start, stop in pairwise(stretches)])
        borders = documents if attention_to == "document" else samples
        for rank in range(cp):
            places = np.arange(len(position))
            if cp > 1:
                chunks = [np.array_split(np.arange(a, b), 2 * cp) for a, b in pairwise(borders)]
                places = np.concatenate([np.concatenate([c[rank], c[2 * cp - 1 - rank]]) for c in chunks])
            found = mrope_position_ids(
                torch.from_numpy(position[places]).reshape(2, -1),
                torch.tensor(borders, dtype=torch.int32),
                torch.tensor(table, dtype=torch.int32).reshape(-1, 7),
                cp_rank=rank,
            )
            assert found.shape == (3, 2, LENGTH // cp) and found.dtype == torch.int64
            assert found.reshape(3, -1).T.tolist() == np.array(wanted)[places].tolist(), seed


def test_padding_has_the_position_0() -> None:
    position = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]])
    table = torch.tensor([[0, 0, 4, 1, 2, 2, 0], [0, 8, 2, 1, 1, 2, 0]], dtype=torch.int32)
    found = mrope_position_ids(position, torch.tensor([0, 16], dtype=torch.int32), table, cp_rank=0)
    assert found[0].tolist() == [[0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 2, 3, 0, 0, 0, 0]]
    assert found[2].tolist() == [[0, 1, 0, 1, 2, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]]


def test_tiles_have_no_grid_of_tokens() -> None:
    table = torch.tensor([[0, 2, 10, 0, 0, 0, 0]], dtype=torch.int32)
    with pytest.raises(OptionError, match="cuts tiles"):
        mrope_position_ids(torch.arange(16).reshape(1, 16), torch.tensor([0, 16], dtype=torch.int32), table, cp_rank=0)


@pytest.mark.parametrize("past_time", [True, False])
@pytest.mark.parametrize("tokens_per_second", [None, 0.5, 4.0])
def test_seconds_of_videos_are_those_of_a_walk(tokens_per_second: float | None, past_time: bool) -> None:
    def step(frames: int) -> float:
        if tokens_per_second is None or frames == 1:
            return 1.0
        return LASTS / 1000 / frames * tokens_per_second

    for seed in range(30):
        documents, table, images = make_microbatch(np.random.default_rng(seed), 2)
        wanted, position = [], []
        for (start, stop), of in zip(pairwise(documents), images, strict=True):
            wanted += walk(stop - start, of, step=step, past_time=past_time)
            position += range(stop - start)
        found = mrope_position_ids(
            torch.tensor(position).reshape(2, -1),
            torch.tensor(documents, dtype=torch.int32),
            torch.tensor(table, dtype=torch.int32).reshape(-1, 7),
            cp_rank=0,
            tokens_per_second=tokens_per_second,
            past_time=past_time,
        )
        assert found.reshape(3, -1).T.tolist() == np.array(wanted).tolist(), seed


def test_whole_positions_of_seconds_are_not_cut() -> None:
    table = torch.tensor([[0, 0, 12, 12, 1, 1, 25_000]], dtype=torch.int32)
    found = mrope_position_ids(
        torch.arange(12)[None],
        torch.tensor([0, 12], dtype=torch.int32),
        table,
        cp_rank=0,
        tokens_per_second=4,
    )
    assert found[0].tolist() == [[frame * 100 // 12 for frame in range(12)]], "25 is of frame 3, not 24"
