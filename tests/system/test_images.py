"""Images on real ranks, against tensors that Pillow and numpy make from whole files, without torchmix.

Every text is unique, so its row follows from the tokens that came; the image of that row, cut by loops of this file,
must be what stands in the place of its tokens.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageOps

from tests.support.image_rank import checksum
from tests.support.image_sources import OF_SEVERAL, RULES, TOKEN, ImageRow, make_image_rows, make_rows, write_source
from tests.support.processes import Processes

STEPS = 3
DEADLINE_S = 120.0


def write_project(folder: Path, containers: list[str], *, rule: str = "dynamic") -> dict[str, dict[str, ImageRow]]:
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
        "batch": {"samples": 8, "length": 128},
        "sources": sources,
        "mixture": dict.fromkeys(sources, 1),
        "packing": {"overflow": "error"},
        "modules": {
            "vision": {"items": "image", "sizes": "patches", "model": {"layers": 2, "hidden": 8, "ffn": 16, "heads": 2}}
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return rows


def patches_of(content: bytes, rule: str) -> tuple[np.ndarray, int]:
    """The patches of an image by loops, and its tokens."""
    with Image.open(io.BytesIO(content)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
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
        pictures = [np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))]
    else:
        best = (math.inf, 0, 0)
        for i, j in sorted([(i, j) for i in range(1, 5) for j in range(1, 5) if i * j <= 4], key=lambda p: p[0] * p[1]):
            distance = abs(image.width / image.height - i / j)
            if distance < best[0] or (distance == best[0] and image.width * image.height > 128 * i * j):
                best = (distance, i, j)
        _, columns, rows = best
        canvas = np.asarray(image.resize((16 * columns, 16 * rows), Image.Resampling.BICUBIC))
        pictures = [canvas[16 * y : 16 * y + 16, 16 * x : 16 * x + 16] for y in range(rows) for x in range(columns)]
        if len(pictures) > 1:
            pictures.append(np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)))
    found = []
    for picture in pictures:
        for y in range(0, picture.shape[0], 8):
            for x in range(0, picture.shape[1], 8):
                for dy, dx in ((0, 0), (0, 4), (4, 0), (4, 4)):
                    patch = picture[y + dy : y + dy + 4, x + dx : x + dx + 4]
                    found.append(patch.transpose(2, 0, 1).reshape(-1))
    return np.stack(found), len(found) // 4


def check(folder: Path, ranks: int, tp: int, rows: dict[str, dict[str, ImageRow]], rule: str) -> None:
    found = [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]
    by_text = {text: row for of_source in rows.values() for text, row in of_source.items()}
    seen: list[float] = []
    num_labels = num_with_images = 0
    for rank, one in enumerate(found):
        if rank % tp:  # a TP peer has what its leader has, rows included
            for key in ("tokens", "labels", "placed"):
                np.testing.assert_array_equal(one[key], found[rank - rank % tp][key])
            continue
        tokens, labels, placed = (one[key].reshape(-1, *one[key].shape[3:]) for key in ("tokens", "labels", "placed"))
        num_labels += int((labels >= 0).sum())
        start = 0
        for end in np.flatnonzero(tokens == 256).tolist():
            start = next(i for i in range(start, end + 1) if tokens[i] != 0)
            ids = tokens[start : end + 1]
            text = bytes(ids[(ids != TOKEN) & (ids != 256)].astype(np.uint8)).decode()
            row = by_text[text]
            wanted = np.zeros((len(ids), 2))
            place, parts, of_tokens = 0, row.marked.split("<image>"), list[int]()
            for part, image in zip(parts, row.images, strict=False):
                patches, count = patches_of(image, rule)
                place += len(part)
                wanted[place : place + count, 0] = checksum(patches)
                wanted[place : place + count, 1] = np.arange(count) + 1
                of_tokens += range(place, place + count)
                place += count
                seen.append(checksum(patches))
            assert np.flatnonzero(ids == TOKEN).tolist() == of_tokens, text
            num_with_images += bool(row.images)
            np.testing.assert_array_equal(placed[start : end + 1], wanted)
            following = np.append(ids[1:], -1)
            np.testing.assert_array_equal(
                labels[start : end + 1], np.where((following == TOKEN) | (following < 0), -100, following)
            )
            start = end + 1
    encoded = sorted(code for one in found for code in one["images"][:, 0].tolist())
    assert encoded == sorted(seen) and num_with_images > 10, "each image is encoded once in the job"
    assert min(len(one["images"]) for one in found) > 0
    totals = found[0]["totals"].reshape(STEPS, -1)[:, 0]
    assert num_labels == totals.sum()


@pytest.mark.system
@pytest.mark.parametrize(
    ("containers", "rule", "tp", "world_size"),
    [
        (["parquet", "webdataset", "jsonl", "struct"], "dynamic", 1, 4),
        (["webdataset", "parquet"], "tiles", 2, 4),
        (["lists", "members", "structs", "paths"], "dynamic", 1, 2),
    ],
)
def test_every_tensor_is_what_pillow_makes(
    tmp_path: Path, containers: list[str], rule: str, tp: int, world_size: int
) -> None:
    rows = write_project(tmp_path, containers, rule=rule)
    with Processes(tmp_path) as processes:
        arguments = (str(tmp_path / "recipe.yaml"), str(tmp_path), str(tp), str(STEPS))
        ranks = processes.start_ranks("-m", "tests.support.image_rank", *arguments, world_size=world_size)
        codes = [rank.wait(deadline_s=DEADLINE_S) for rank in ranks]
        assert codes == [0] * world_size, processes.report()
    check(tmp_path, world_size, tp, rows, rule)
