"""Trial: sizes from headers against decoded ones, and damaged images against Pillow.

    python -m tests.trials.image_headers --seed 1 --count 10000

Each image is of a random kind, mode, size, orientation and order of chunks. Its header must give the size that Pillow's
own decoder and `ImageOps.exif_transpose` give. Then bytes of it are altered: it is refused by name, or gives the pixels
of Pillow, and never more than the bound.
"""

from __future__ import annotations

import argparse
import io
import json
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tests.support.synthetic_images import SyntheticImage, make_image
from torchmix.errors import ImageUnreadable
from torchmix.transform.images.decode import decode_image
from torchmix.transform.images.header import header_of

BOUND = 1 << 16


def check_image(image: SyntheticImage) -> None:
    """The header's size is that of the decoded image."""
    header = header_of(image.content)
    with Image.open(io.BytesIO(image.content)) as opened:
        assert (header.stored_width, header.stored_height) == opened.size, image
        opened.load()
        turned = ImageOps.exif_transpose(opened)
    decoded = decode_image(image.content, most_pixels=BOUND)
    assert decoded.mode == "RGB"
    assert decoded.size == (header.width, header.height) == turned.size, (image.kind, image.orientation)
    if image.mode == "RGB":
        assert np.array_equal(np.asarray(decoded), np.asarray(turned.convert("RGB"))), image.kind


def check_mutation(image: SyntheticImage, rng: np.random.Generator) -> str:
    """Alter some bytes; returns what became of it."""
    content = bytearray(image.content)
    how = int(rng.integers(4))
    place = int(rng.integers(len(content)))
    if how == 0:
        content = content[:place]
    elif how == 1:
        content[place : place + 50] = bytes(len(content[place : place + 50]))
    elif how == 2:
        content[place] = int(rng.integers(256))
    else:
        content[: min(place, 40)] = rng.integers(0, 256, min(place, 40)).astype(np.uint8).tobytes()
    try:
        decoded = decode_image(bytes(content), most_pixels=BOUND)
    except ImageUnreadable as error:
        assert str(error)
        return "refused"
    assert decoded.width * decoded.height <= BOUND
    with Image.open(io.BytesIO(bytes(content))) as opened:
        assert opened.size in (decoded.size, decoded.size[::-1])
        if opened.mode == "RGB" and header_of(content).orientation == 1 and "transparency" not in opened.info:
            assert np.array_equal(np.asarray(decoded), np.asarray(opened))
    return "decoded"


def run(seed: int, count: int) -> dict[str, int]:
    """Check `count` images and as many mutations; counts of what happened."""
    found = {"images": 0, "refused": 0, "decoded": 0}
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        image = make_image(rng)
        check_image(image)
        found["images"] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of what it repairs
            found[check_mutation(image, rng)] += 1
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("image_headers.json"))
    asked = parser.parse_args()
    found = {"seed": asked.seed, "count": asked.count, **run(asked.seed, asked.count)}
    asked.out.write_text(json.dumps(found))
    print(found)


if __name__ == "__main__":
    main()
