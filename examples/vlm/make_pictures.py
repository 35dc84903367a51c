"""Pictures of one shape each, with a caption that only the picture tells: a folder of Parquet for the example.

    python examples/vlm/make_pictures.py runs/pictures [--pictures 4000]

Each picture has a ground, a shape and a color, drawn by Pillow at one of three sizes, as JPEG, PNG or WebP. Where
scikit-image is installed, the ground is cut from its photographs of the public domain. A caption is such as "red disc,
top". A model without eyes can only guess.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

COLORS = {"red": (220, 30, 30), "green": (30, 190, 60), "blue": (40, 70, 230), "yellow": (240, 220, 40)}
SHAPES = ("disc", "square", "cross")
PLACES = {"top": (0.5, 0.27), "bottom": (0.5, 0.73), "left": (0.27, 0.5), "right": (0.73, 0.5)}
SIZES = ((32, 32), (48, 32), (32, 48))
KINDS = ("JPEG", "PNG", "WEBP")
FILES = 4


def grounds() -> list[np.ndarray]:
    """Photographs to cut grounds from; none where scikit-image is missing."""
    try:
        from skimage import data
    except ImportError:
        return []
    return [np.asarray(photograph) for photograph in (data.astronaut(), data.rocket(), data.hubble_deep_field())]


def draw(rng: np.random.Generator, photographs: list[np.ndarray]) -> tuple[bytes, str]:
    """One picture and its caption."""
    width, height = SIZES[rng.integers(len(SIZES))]
    color, shape = list(COLORS)[rng.integers(len(COLORS))], SHAPES[rng.integers(len(SHAPES))]
    place = list(PLACES)[rng.integers(len(PLACES))]
    if photographs:
        photograph = photographs[rng.integers(len(photographs))]
        y, x = (int(rng.integers(side - most)) for side, most in zip(photograph.shape, (height, width), strict=False))
        ground = photograph[y : y + height, x : x + width, :3] // 3
    else:
        ground = rng.integers(0, 90, (height // 8, width // 8, 3)).repeat(8, 0).repeat(8, 1)
    image = Image.fromarray(ground.astype(np.uint8))
    pen, (cx, cy), r = ImageDraw.Draw(image), PLACES[place], 0.24 * min(width, height)
    x, y = cx * width, cy * height
    if shape == "disc":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=COLORS[color])
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=COLORS[color])
    else:
        pen.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=COLORS[color])
        pen.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=COLORS[color])
    file = io.BytesIO()
    image.save(file, KINDS[rng.integers(len(KINDS))], quality=95)
    return file.getvalue(), f"{color} {shape}, {place}"


def write_pictures(folder: Path, *, count: int, seed: int) -> None:
    """Write `FILES` files of Parquet with the columns `caption` and `image`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, photographs = np.random.default_rng(seed), grounds()
    for number in range(FILES):
        rows: list[dict[str, Any]] = []
        for _ in range(number, count, FILES):
            image, caption = draw(rng, photographs)
            rows.append({"caption": f"<image>{caption}", "image": {"bytes": image, "path": None}})
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table(
            {
                "caption": [row["caption"] for row in rows],
                "image": pa.array([row["image"] for row in rows], kind),
            }
        )
        pq.write_table(table, folder / f"{number}.parquet", data_page_size=64 << 10, compression="none")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    write_pictures(asked.folder, count=asked.pictures, seed=asked.seed)


if __name__ == "__main__":
    main()
