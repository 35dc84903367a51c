"""Images as ranks get them, against tensors that Pillow and numpy make from whole files, without torchmix.

Every text is unique, so its row follows from the tokens that came; the image of that row, cut by loops of this file,
must be what stands in the place of its tokens.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image, ImageOps

from tests.support.decode_log import digest_of
from tests.support.image_record import checksum
from tests.support.image_sources import OF_SEVERAL, RULES, TOKEN, ImageRow, make_image_rows, make_rows, write_source

LENGTH = {"dynamic": 128, "tiles": 128, "anyres": 256, "own": 128}
"""Tokens of a sample, so that every document fits."""


def write_project(
    folder: Path, containers: list[str], *, rule: str = "dynamic", **extra: Any
) -> dict[str, dict[str, ImageRow]]:
    """A recipe over a source of each container; returns the rows of each source by their text without markers."""
    rows: dict[str, dict[str, ImageRow]] = {}
    sources: dict[str, Any] = {}
    for number, container in enumerate(containers):
        name = f"s{number}"
        unique = [
            ImageRow(text=f"{name}-{i}:{row.text}", images=row.images)
            for i, row in enumerate(
                make_image_rows(number, 60, most_images=2, most_side=70)
                if container in OF_SEVERAL
                else make_rows(number, 60, most_side=70)
            )
        ]
        sources[name] = write_source(folder, name, container, [unique[:25], unique[25:]], rule)
        rows[name] = {(row.text or "").replace("<image>", ""): row for row in unique}
    recipe = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": 8, "length": LENGTH[rule]},
        "sources": sources,
        "mixture": dict.fromkeys(sources, 1),
        "packing": {"overflow": "error"},
        "modules": {
            "vision": {"items": "image", "sizes": "patches", "model": {"layers": 2, "hidden": 8, "ffn": 16, "heads": 2}}
        },
        **extra,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return rows


Resize = Callable[[Image.Image, tuple[int, int]], np.ndarray]
"""An image -> its pixels at (width, height)."""


def by_pillow(image: Image.Image, size: tuple[int, int], way: Any = Image.Resampling.BICUBIC) -> np.ndarray:
    """See `Resize`."""
    return np.asarray(image.resize(size, way))


def by_tensors(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """See `Resize`; as torchvision resizes tensors of bytes."""
    held = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].contiguous()
    found = torch.nn.functional.interpolate(held, size=(size[1], size[0]), mode="bicubic", antialias=True)
    return np.asarray(found[0].permute(1, 2, 0))


def patches_of(
    content: bytes,
    rule: str,
    resized: Resize = by_pillow,
    alter: Callable[[np.ndarray], np.ndarray] = lambda pixels: pixels,
) -> tuple[np.ndarray, int, int]:
    """The patches of an image by loops, its tokens, and how many of them are a row of its picture; its pixels are
    altered first."""
    with Image.open(io.BytesIO(content)) as opened:
        image = Image.fromarray(alter(np.array(ImageOps.exif_transpose(opened).convert("RGB"))))
    if rule == "anyres":
        return _anyres_patches(image, resized)
    if rule == "dynamic":
        options, factor = RULES[rule], 8
        height, width = round(image.height / factor) * factor, round(image.width / factor) * factor
        pixels = image.height * image.width
        if height * width > options["max_pixels"]:
            by = math.sqrt(pixels / options["max_pixels"])
            height, width = (max(factor, math.floor(s / by / factor) * factor) for s in (image.height, image.width))
        elif height * width < options["min_pixels"]:
            by = math.sqrt(options["min_pixels"] / pixels)
            height, width = (math.ceil(s * by / factor) * factor for s in (image.height, image.width))
        pictures = [resized(image, (width, height))]
    elif rule == "own":
        (rows, columns), _ = own_grid(image.width, image.height)
        pictures = [resized(image, (4 * columns, 4 * rows))]
    else:
        best = (math.inf, 0, 0)
        for i, j in sorted([(i, j) for i in range(1, 5) for j in range(1, 5) if i * j <= 4], key=lambda p: p[0] * p[1]):
            distance = abs(image.width / image.height - i / j)
            if distance < best[0] or (distance == best[0] and image.width * image.height > 128 * i * j):
                best = (distance, i, j)
        _, columns, rows = best
        canvas = resized(image, (16 * columns, 16 * rows))
        pictures = [canvas[16 * y : 16 * y + 16, 16 * x : 16 * x + 16] for y in range(rows) for x in range(columns)]
        if len(pictures) > 1:
            pictures.append(resized(image, (16, 16)))
    found = []
    for picture in pictures:
        for y in range(0, picture.shape[0], 8):
            for x in range(0, picture.shape[1], 8):
                for dy, dx in ((0, 0), (0, 4), (4, 0), (4, 4)):
                    patch = picture[y + dy : y + dy + 4, x + dx : x + dx + 4]
                    found.append(patch.transpose(2, 0, 1).reshape(-1))
    return np.stack(found), len(found) // 4, pictures[0].shape[1] // 8


def _anyres_patches(image: Image.Image, resized: Resize) -> tuple[np.ndarray, int, int]:
    """As LLaVA-NeXT's processor makes them, with tiles of 16 pixels."""
    best, height, width = (-1, 0), 0, 0
    for canvas_height, canvas_width in ((16, 32), (32, 16), (32, 32)):
        scale = min(canvas_width / image.width, canvas_height / image.height)
        kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        if (kept, kept - canvas_height * canvas_width) > best:
            best, height, width = (kept, kept - canvas_height * canvas_width), canvas_height, canvas_width
    by_width, by_height = width / image.width, height / image.height
    inner = (width, min(math.ceil(image.height * by_width), height))
    if by_width >= by_height:
        inner = (min(math.ceil(image.width * by_height), width), height)
    canvas = Image.new("RGB", (width, height))
    canvas.paste(Image.fromarray(resized(image, inner)), ((width - inner[0]) // 2, (height - inner[1]) // 2))
    whole_canvas = np.asarray(canvas)
    pictures = [resized(image, (16, 16))]
    pictures += [whole_canvas[y : y + 16, x : x + 16] for y in range(0, height, 16) for x in range(0, width, 16)]
    found = []
    for picture in pictures:
        for y in range(0, 16, 4):
            for x in range(0, 16, 4):
                found.append(picture[y : y + 4, x : x + 4].transpose(2, 0, 1).reshape(-1))
    rows, columns = height // 4, width // 4
    if image.width / image.height > columns / rows:
        rows -= (rows - int(round(image.height * (columns / image.width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(image.width * (rows / image.height), 7))) // 2 * 2
    return np.stack(found), 16 + rows * columns + rows, columns


def own_grid(width: int, height: int) -> tuple[tuple[int, int], int]:
    """A size rule of a user's: rows and columns of patches, and tokens."""
    rows, columns = 2 * max(1, min(4, height // 16)), 2 * max(1, min(4, width // 16))
    return (rows, columns), rows * columns // 4


def whole(parts: list[np.ndarray], segments: list[np.ndarray]) -> np.ndarray:
    """Sequences of all microbatches, put together from those of the CP ranks: [microbatches, T, ...]."""
    if len(parts) == 1:
        return parts[0].reshape(len(segments), -1, *parts[0].shape[3:])
    cp, found = len(parts), []
    flat = [part.reshape(len(segments), -1, *part.shape[3:]) for part in parts]
    for number, borders in enumerate(segments):
        chunks: list[np.ndarray] = []
        for start, stop in pairwise(borders.tolist()):
            size = (stop - start) // (2 * cp)
            own = [part[number, start // cp : stop // cp] for part in flat]
            chunks += [each[:size] for each in own] + [each[size:] for each in reversed(own)]
        found.append(np.concatenate(chunks))
    return np.stack(found)


def check(
    found: Sequence[Mapping[str, np.ndarray]],
    decodes: Counter[str] | None,
    rows: dict[str, dict[str, ImageRow]],
    rule: str,
    *,
    positions_at: str = "document",
    least: int = 10,
) -> int:
    """Compare what all ranks got, and how often each image was decoded; returns how many images were.

    Args:
        found: By rank, as `image_record.Record.arrays` has them.
        decodes: By the hash of the image; None: they were not counted.
        rows: The rows of each source by their text without markers.
        rule: A name in `RULES`.
        positions_at: Where positions count from 0, `document` or `sample`.
        least: Rows with images that must be among them.
    """
    by_place = {tuple(one["place"].tolist()): one for one in found}
    num_dp, num_pp, num_cp, _ = (max(place[axis] for place in by_place) + 1 for axis in range(4))
    for (dp, pp, cp, tp), one in by_place.items():  # a TP peer has what its leader has, rows included
        for key in ("tokens", "labels", "placed") if tp else ():
            np.testing.assert_array_equal(one[key], by_place[dp, pp, cp, 0][key])
        assert len(one["tokens"]) == (len(one["totals"]) if pp == 0 else 0)
        assert len(one["labels"]) == (len(one["totals"]) if pp == num_pp - 1 else 0)
    by_text = {text: row for of_source in rows.values() for text, row in of_source.items()}
    seen: list[float] = []
    contents: Counter[str] = Counter()
    num_labels = num_with_images = 0
    for dp in range(num_dp):
        first = [by_place[dp, 0, cp, 0] for cp in range(num_cp)]
        last = [by_place[dp, num_pp - 1, cp, 0] for cp in range(num_cp)]
        segments = np.split(first[0]["segments"], first[0]["segments_stop"][:-1])
        tokens = whole([one["tokens"] for one in first], segments)
        placed = whole([one["placed"] for one in first], segments).reshape(-1, 2)
        positions = None
        if len(first[0]["positions"]):
            positions = whole([one["positions"] for one in first], segments).reshape(-1, 3)
        labels = whole([one["labels"] for one in last], segments)
        tokens, labels = tokens.reshape(-1), labels.reshape(-1)
        num_labels += int((labels >= 0).sum())
        start = 0
        sample, gained = -1, 0  # by which positions in this sample ran ahead less than tokens
        for end in np.flatnonzero(tokens == 256).tolist():
            start = next(i for i in range(start, end + 1) if tokens[i] != 0)
            ids = tokens[start : end + 1]
            text = bytes(ids[(ids != TOKEN) & (ids != 256)].astype(np.uint8)).decode()
            row = by_text[text]
            wanted = np.zeros((len(ids), 2))
            place, parts, of_tokens = 0, row.marked.split("<image>"), list[int]()
            walked, turn = list[tuple[int, int, int]](), 0  # positions of the tokens so far, and the next one
            if positions_at == "sample":
                sample, gained = start // LENGTH[rule], gained if start // LENGTH[rule] == sample else 0
                turn = start % LENGTH[rule] - gained
            for part, image in zip(parts, row.images, strict=False):
                patches, count, columns = patches_of(image, rule)
                columns = max(1, columns)  # a thin image on a canvas may have none
                place += len(part)
                walked += [(turn + i,) * 3 for i in range(len(part))]
                turn += len(part)
                walked += [(turn, turn + i // columns, turn + i % columns) for i in range(count)]
                turn += max(columns, count // columns)
                gained += count - max(columns, count // columns)
                wanted[place : place + count, 0] = checksum(patches)
                wanted[place : place + count, 1] = np.arange(count) + 1
                of_tokens += range(place, place + count)
                place += count
                seen.append(checksum(patches))
                contents[digest_of(image)] += 1
            assert np.flatnonzero(ids == TOKEN).tolist() == of_tokens, text
            num_with_images += bool(row.images)
            if positions is not None:
                walked += [(turn + i,) * 3 for i in range(len(ids) - len(walked))]
                assert positions[start : end + 1].tolist() == [list(each) for each in walked], text
            np.testing.assert_array_equal(placed[start : end + 1], wanted)
            following = np.append(ids[1:], -1)
            np.testing.assert_array_equal(
                labels[start : end + 1], np.where((following == TOKEN) | (following < 0), -100, following)
            )
            start = end + 1
    encoded = sorted(code for one in found for code in one["images"][:, 0].tolist())
    assert encoded == sorted(seen) and num_with_images >= least, "each image is encoded once in the job"
    assert decodes is None or decodes == contents, "each image is decoded once in the job"
    steps = int(found[0]["steps"])
    totals = found[0]["totals"].reshape(steps, -1)[:, 0]
    assert num_labels == totals.sum()
    return len(seen)
