"""Trial: sizes from headers against decoded ones, and damaged images against Pillow.

    python -m tests.trials.image_headers --seed 1 --count 10000

Each image is of a random kind, mode, size and orientation, which EXIF or XMP says in the ways of its kind. Its header
must give the size that Pillow's own decoder and `ImageOps.exif_transpose` give. Then bytes of it are altered: it is
refused by name, or gives the pixels of Pillow, and never more than the bound. EXIF blocks are altered apart, and must
say what Pillow reads in them.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from tests.support.synthetic_images import SyntheticImage, make_image, xmp_block
from tests.support.trial import trial_parser, whole
from torchmix.errors import ItemUnreadable
from torchmix.modalities.images.decode import decode_image
from torchmix.modalities.images.header import header_of, orientation_of

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
    assert decoded.size == (header.width, header.height) == turned.size, (image.kind, image.ways)
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
    except ItemUnreadable as error:
        assert str(error)
        return "refused"
    assert decoded.width * decoded.height <= BOUND
    with Image.open(io.BytesIO(bytes(content))) as opened:
        assert opened.size in (decoded.size, decoded.size[::-1])
        if opened.mode == "RGB" and "transparency" not in opened.info:
            try:
                turned = ImageOps.exif_transpose(opened)
            except Exception:  # whatever its readers and writers of EXIF raise
                return "decoded"
            assert np.array_equal(np.asarray(decoded), np.asarray(turned)), image.kind
    return "decoded"


def check_block(rng: np.random.Generator) -> None:
    """A damaged EXIF block says what Pillow reads in it."""
    exif = Image.Exif()
    for tag in rng.choice([0x010F, 0x0110, 0x0112, 0x011A, 0x0131, 0x0132], 4, replace=False).tolist():
        exif[tag] = {0x0112: int(rng.integers(0, 10)), 0x011A: 72.5}.get(tag, "words" * int(rng.integers(0, 4)))
    exif.endian = "<>"[rng.integers(2)]
    block = bytearray(exif.tobytes())
    for place in rng.integers(6, len(block), int(rng.integers(0, 4))).tolist():
        block[place] = int(rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 18, 42, 43, 255]))
    block = block[: int(rng.integers(6, len(block) + 1)) if rng.random() < 0.3 else len(block)]
    info = {"exif": bytes(block)} | ({"xmp": xmp_block(6)} if rng.random() < 0.5 else {})
    image = Image.new("1", (1, 1))
    image.info = dict(info)
    try:
        wanted = image.getexif().get(0x0112, 1)
    except Exception:  # whatever its readers raise
        wanted = 1
    assert orientation_of(info) == (wanted if wanted in range(1, 9) else 1), bytes(block)


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
            check_block(rng)
    return found


def main() -> None:
    """Run from the command line."""
    whole(trial_parser(__doc__, count=10_000, out="image_headers.json").parse_args(), run)


if __name__ == "__main__":
    main()
