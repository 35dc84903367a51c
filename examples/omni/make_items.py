"""Texts, pictures, clips and sounds whose captions only the item tells: folders of Parquet for the example.

    python examples/omni/make_items.py runs/omni [--rows 2000]

Pictures are those of `examples/vlm`. A clip is a square of a color that moves to one side. A sound is a tone that is
low, middle or high, and rises, falls or stays. A text is a sum of two digits.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "vlm"))

from make_pictures import COLORS, draw

SIDE, FRAMES, RATE = 32, 8, 8
"""Pixels of a side of a clip, its frames, and frames a second."""
SQUARE = 14
MOVES = {"left": (-2, 0), "right": (2, 0), "up": (0, -2), "down": (0, 2)}
SAMPLES_A_SECOND = 16_000
TONES = {"low": 220.0, "middle": 700.0, "high": 2_200.0}
BENDS = {"falls": 0.6, "stays": 1.0, "rises": 1.7}
Row = tuple[str, bytes | None]
"""A caption, and its item."""


def text(rng: np.random.Generator) -> Row:
    """A sum."""
    a, b = (int(one) for one in rng.integers(0, 10, 2))
    return f"{a} and {b} make {a + b}", None


def picture(rng: np.random.Generator) -> Row:
    """A shape of a color at a place."""
    image, caption = draw(rng, [])
    return f"<image>{caption}", image


def clip(rng: np.random.Generator) -> Row:
    """A square that moves, as MP4."""
    import av

    color, move = list(COLORS)[rng.integers(len(COLORS))], list(MOVES)[rng.integers(len(MOVES))]
    place = (SIDE - SQUARE) // 2 - np.array(MOVES[move]) * FRAMES // 2
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width = stream.height = SIDE
        stream.pix_fmt, stream.bit_rate = "yuv420p", 1_000_000
        for number in range(FRAMES):
            pixels = np.full((SIDE, SIDE, 3), 30, np.uint8)
            x, y = np.clip(place + np.array(MOVES[move]) * number, 0, SIDE - SQUARE)
            pixels[y : y + SQUARE, x : x + SQUARE] = COLORS[color]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return f"<video>{color} goes {move}", file.getvalue()


def sound(rng: np.random.Generator) -> Row:
    """A tone of a second at most, as FLAC."""
    import soundfile

    tone, bend = list(TONES)[rng.integers(len(TONES))], list(BENDS)[rng.integers(len(BENDS))]
    count = int(rng.integers(SAMPLES_A_SECOND * 3 // 4, SAMPLES_A_SECOND))
    pitch = TONES[tone] * np.linspace(1.0, BENDS[bend], count)
    wave = 0.4 * np.sin(2 * np.pi * np.cumsum(pitch) / SAMPLES_A_SECOND) + rng.normal(0, 0.01, count)
    file = io.BytesIO()
    soundfile.write(file, wave.astype(np.float32), SAMPLES_A_SECOND, format="FLAC")
    return f"<audio>{tone} {bend}", file.getvalue()


KINDS: dict[str, Callable[[np.random.Generator], Row]] = {
    "texts": text,
    "pictures": picture,
    "clips": clip,
    "sounds": sound,
}
"""By source."""


def write_items(folder: Path, *, count: int, seed: int) -> None:
    """A file of Parquet for each source, with the columns `caption` and `item`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, make) in enumerate(KINDS.items()):
        rng = np.random.default_rng([seed, number])
        rows = [make(rng) for _ in range(count)]
        columns = {"caption": pa.array([caption for caption, _ in rows])}
        if name != "texts":
            columns["item"] = pa.array([item for _, item in rows], pa.binary())
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", data_page_size=64 << 10, compression="none")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=2_000, help="rows of each source")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    write_items(asked.folder, count=asked.rows, seed=asked.seed)


if __name__ == "__main__":
    main()
