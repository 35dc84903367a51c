"""Trial: damaged tar shards of images.

    python -m tests.trials.image_shards --seed 1 --count 3000

Each mutation alters a shard of texts and images: bytes, zeros, blocks that are lost or doubled, sizes in headers, the
end. A mutated shard is refused by name, or its rows are those that Python's tarfile finds, and each image decodes as
Pillow decodes it. A shard that is mutated after it was indexed is refused by name, or gives what it held before.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.image_sources import ImageRow, make_image_rows, write_source
from tests.support.trial import trial_parser, whole
from torchmix.catalog.store import Catalog
from torchmix.errors import ItemUnreadable, TorchmixError
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.images.decode import decode_image
from torchmix.reader.items import ItemReader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe

BOUND = 1 << 20
BLOCK = 512
KINDS = ("bytes", "zeros", "cut", "lost block", "doubled block", "size", "name", "content")


def mutated(whole: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """A mutation of a shard, and what it is."""
    content = bytearray(whole)
    kind = KINDS[int(rng.integers(len(KINDS)))]
    place = int(rng.integers(len(content)))
    block = place // BLOCK * BLOCK
    headers = [at for at in range(0, len(content), BLOCK) if content[at + 257 : at + 262] == b"ustar"]
    header = headers[int(rng.integers(len(headers)))]
    if kind == "bytes":
        content[place : place + 8] = rng.bytes(len(content[place : place + 8]))
    elif kind == "zeros":
        content[place : place + 700] = bytes(len(content[place : place + 700]))
    elif kind == "cut":
        del content[place:]
    elif kind == "lost block":
        del content[block : block + BLOCK]
    elif kind == "doubled block":
        content[block:block] = content[block : block + BLOCK]
    elif kind in ("size", "name"):
        if kind == "size":
            sizes = (
                b"77777777777\0",
                b"00000000000\0",
                b"%011o\0" % int(rng.integers(3000)),
                b"\x80" + bytes(3) + b"\xff" * 8,
            )
            content[header + 124 : header + 136] = sizes[int(rng.integers(len(sizes)))]
        else:
            content[header + int(rng.integers(8))] = int(rng.integers(1, 256))
        checksum = sum(content[header : header + 148]) + sum(content[header + 156 : header + BLOCK]) + 8 * 0x20
        content[header + 148 : header + 156] = b"%06o\0 " % checksum
    else:
        start = header + BLOCK + int(rng.integers(200))
        content[start : start + 3] = rng.bytes(len(content[start : start + 3]))
    return kind, bytes(content)


class Shard:
    """A shard in a folder, and what it holds."""

    def __init__(self, folder: Path, seed: int) -> None:
        rows = [ImageRow(text=row.text, images=row.images) for row in make_image_rows(seed, 12, most_images=2)]
        self.folder = folder
        source = write_source(folder, "pairs", "members", [rows], "dynamic")
        source["images"] = source["images"] | {"most_pixels": BOUND}
        self.recipe = recipe_of(source)
        self.path = folder / "pairs" / "0.tar"
        self.whole = self.path.read_bytes()

    def index(self, content: bytes) -> Catalog:
        """Index a shard of this content, from nothing."""
        shutil.rmtree(self.folder / "catalog", ignore_errors=True)
        self.path.write_bytes(content)
        return index_recipe(self.recipe, self.folder)

    def images(self, catalog: Catalog) -> list[list[bytes]]:
        """The images of each row, as they are read."""
        first = np.asarray(catalog.sources["pairs"].sizes.items["image"].first_run_of_row)
        reader = ItemReader(catalog, self.folder)
        try:
            read = [bytes(value) for value in reader.read("pairs", "image", np.arange(first[-1]))]
        finally:
            reader.close()
        return [read[start:stop] for start, stop in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)]


def recipe_of(source: dict[str, Any]) -> Recipe:
    """A recipe of one source."""
    return check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 2, "length": 4096},
            "sources": {"pairs": source},
            "mixture": {"pairs": 1},
        }
    )


def images_by_tarfile(content: bytes) -> list[list[bytes]] | None:
    """The images of each sample by Python's own reader; None where it stops early or fails."""
    samples: list[tuple[str, list[bytes]]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(content), ignore_zeros=False) as shard:
            for member in shard:
                folder, _, base = member.name.rpartition("/")
                key, dot, suffix = base.partition(".")
                if not member.isfile() or not key or not dot:
                    continue
                if not samples or samples[-1][0] != f"{folder}/{key}":
                    samples.append((f"{folder}/{key}", []))
                file = shard.extractfile(member)
                if suffix.lower().endswith((".jpg", ".png")) or suffix.lower() in ("jpg", "png"):
                    samples[-1][1].append(b"" if file is None else file.read())
    except (tarfile.TarError, OSError, ValueError, EOFError):
        return None
    return [images for _, images in samples]


def check_pixels(images: list[list[bytes]]) -> None:
    """Each image decodes as Pillow decodes it, within the bound, or is refused."""
    for image in (each for row in images for each in row):
        try:
            decoded = decode_image(image, most_pixels=BOUND)
        except ItemUnreadable as error:
            assert str(error)
            continue
        assert decoded.width * decoded.height <= BOUND
        with Image.open(io.BytesIO(image)) as opened:
            assert opened.size in (decoded.size, decoded.size[::-1])


def check_mutation(shard: Shard, rng: np.random.Generator, before: list[list[bytes]]) -> str:
    """Index and read one mutated shard, and read one that is mutated behind its index; returns what became of them."""
    kind, content = mutated(shard.whole, rng)
    try:
        images = shard.images(shard.index(content))
        outcome = "read"
        wanted = images_by_tarfile(content)
        if wanted is not None:
            held = [[image for image in row if image] for row in wanted]
            assert images == held[: len(images)] and len(held) >= len(images), kind
        check_pixels(images)
    except TorchmixError as error:
        assert "0.tar" in str(error) or "pairs" in str(error), error
        outcome = "refused"
    if len(content) == len(shard.whole) and content != shard.whole:
        catalog = shard.index(shard.whole)
        shard.path.write_bytes(content)
        try:
            assert shard.images(catalog) == before, kind
        except TorchmixError as error:
            assert "0.tar" in str(error) or "pairs" in str(error), error
    return outcome


def run(seed: int, count: int) -> dict[str, int]:
    """Check `count` mutations; counts of what happened."""
    found = {"refused": 0, "read": 0}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of what it repairs
        shard = Shard(Path(folder), seed)
        before = shard.images(shard.index(shard.whole))
        for number in range(count):
            found[check_mutation(shard, np.random.default_rng([seed, number]), before)] += 1
    return found


def main() -> None:
    """Run from the command line."""
    whole(trial_parser(__doc__, count=3_000, out="image_shards.json").parse_args(), run)


if __name__ == "__main__":
    main()
