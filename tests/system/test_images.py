"""Images on real ranks, against tensors that Pillow and numpy make from whole files, without torchmix.

Every text is unique, so its row follows from the tokens that came; the image of that row, cut by loops of this file,
must be what stands in the place of its tokens.
"""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageOps

from tests.support.decode_log import decoded, digest_of, site_folder
from tests.support.image_rank import checksum
from tests.support.image_sources import OF_SEVERAL, RULES, TOKEN, ImageRow, make_image_rows, make_rows, write_source
from tests.support.processes import Processes
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

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


def patches_of(content: bytes, rule: str) -> tuple[np.ndarray, int, int]:
    """The patches of an image by loops, its tokens, and how many of them are a row of its picture."""
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
    return np.stack(found), len(found) // 4, pictures[0].shape[1] // 8


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


def check(folder: Path, ranks: int, rows: dict[str, dict[str, ImageRow]], rule: str) -> None:
    found = [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]
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
        if rule == "dynamic":
            positions = whole([one["positions"] for one in first], segments).reshape(-1, 3)
        labels = whole([one["labels"] for one in last], segments)
        tokens, labels = tokens.reshape(-1), labels.reshape(-1)
        num_labels += int((labels >= 0).sum())
        start = 0
        for end in np.flatnonzero(tokens == 256).tolist():
            start = next(i for i in range(start, end + 1) if tokens[i] != 0)
            ids = tokens[start : end + 1]
            text = bytes(ids[(ids != TOKEN) & (ids != 256)].astype(np.uint8)).decode()
            row = by_text[text]
            wanted = np.zeros((len(ids), 2))
            place, parts, of_tokens = 0, row.marked.split("<image>"), list[int]()
            walked, turn = list[tuple[int, int, int]](), 0  # positions of the tokens so far, and the next one
            for part, image in zip(parts, row.images, strict=False):
                patches, count, columns = patches_of(image, rule)
                place += len(part)
                walked += [(turn + i,) * 3 for i in range(len(part))]
                turn += len(part)
                walked += [(turn, turn + i // columns, turn + i % columns) for i in range(count)]
                turn += max(columns, count // columns)
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
    assert encoded == sorted(seen) and num_with_images > 10, "each image is encoded once in the job"
    assert decoded(folder / "decoded") == contents, "each image is decoded once in the job"
    assert min(len(one["images"]) for one in found) > 0
    totals = found[0]["totals"].reshape(STEPS, -1)[:, 0]
    assert num_labels == totals.sum()


@pytest.mark.system
@pytest.mark.parametrize(
    ("containers", "rule", "sizes", "loaders"),
    [
        (["parquet", "webdataset", "jsonl", "struct"], "dynamic", (1, 1, 1, 4), "node"),
        (["webdataset", "parquet"], "tiles", (2, 1, 1, 2), "in_process"),
        (["lists", "members", "structs", "paths"], "dynamic", (1, 2, 1, 2), "node"),
        (["obelics", "interleaved", "parquet"], "tiles", (1, 1, 2, 2), "in_process"),
        (["webdataset", "lists"], "dynamic", (1, 1, 2, 2), "node"),
        (["jsonl", "parquet"], "tiles", (1, 2, 1, 2), "in_process"),
    ],
)
def test_every_tensor_is_what_pillow_makes(
    tmp_path: Path, containers: list[str], rule: str, sizes: tuple[int, int, int, int], loaders: str
) -> None:
    tp, cp, pp, dp = sizes
    rows = write_project(tmp_path, containers, rule=rule)
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    site = site_folder(tmp_path / "site", tmp_path / "decoded")
    paths = [str(site), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    world_size = tp * cp * pp * dp
    with Processes(tmp_path) as processes:
        numbers = map(str, (tp, cp, pp, STEPS))
        arguments = (str(tmp_path / "recipe.yaml"), str(tmp_path), *numbers, loaders, str(tmp_path / "decoded"))
        arguments += (str(int(rule == "dynamic")),)
        ranks = processes.start_ranks(
            "-m",
            "tests.support.image_rank",
            *arguments,
            world_size=world_size,
            environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
    check(tmp_path, world_size, rows, rule)
