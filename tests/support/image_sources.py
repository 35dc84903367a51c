"""Sources with images in every container, and what they hold, kept apart from torchmix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.support.synthetic_images import WAYS, random_pixels, saved_turned
from tests.support.tar_shards import write_shard

TOKEN = 300
CONTAINERS = ("parquet", "struct", "webdataset", "jsonl")
OF_SEVERAL = ("lists", "structs", "members", "paths", "obelics", "interleaved", "mmc4", "mmc4-shards")
"""Containers whose rows have any number of images."""
RULES: dict[str, dict[str, Any]] = {
    "dynamic": {"patch": 4, "merge": 2, "min_pixels": 64, "max_pixels": 1024},
    "tiles": {"patch": 4, "merge": 2, "tiles": {"size": 16, "min": 1, "max": 4}},
    "anyres": {"patch": 4, "anyres": {"size": 16, "canvases": ["16x32", "32x16", "32x32"]}},
    "own": {"patch": 4, "merge": 2, "size": "tests.support.image_oracle:own_grid"},
}


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """A row: its text, and the bytes of its images."""

    text: str | None
    images: tuple[bytes, ...] = ()

    @property
    def image(self) -> bytes | None:
        """The first one."""
        return self.images[0] if self.images else None

    @property
    def marked(self) -> str:
        """The text with a marker for each image."""
        text = self.text or ""
        return text if "<image>" in text else "<image>" * len(self.images) + text


def make_image_rows(seed: int, count: int, *, most_images: int = 3, most_side: int = 60) -> list[ImageRow]:
    """Rows with up to so many images; texts with markers, and without."""
    rng = np.random.default_rng(seed)
    singles = [row.images[0] for row in make_rows(seed, 3 * count, most_side=most_side) if row.images]
    rows: list[ImageRow] = []
    for _ in range(count):
        images = tuple(singles[i] for i in rng.integers(0, len(singles), int(rng.integers(0, most_images + 1))))
        words = ["".join(rng.choice(list("abcdefg "), int(rng.integers(0, 12)))) for _ in range(len(images) + 1)]
        rows.append(ImageRow(text=("" if rng.random() < 0.3 else "<image>").join(words), images=images))
    return rows


def _interleaved(row: ImageRow) -> list[str | None]:
    """The texts of a row, None for each image."""
    first, *rest = row.marked.split("<image>")
    found: list[str | None] = [first] if first or not rest else []
    for text in rest:
        found += [None, *([text] if text else [])]
    return found


def _mmc4(row: ImageRow, names: list[str]) -> tuple[dict[str, Any], list[int]]:
    """A row as MMC4 has it, its images in another order than their places; and this order."""
    order = sorted(range(len(names)), key=lambda k: (k % 2, k))
    info = [{"image_name": names[k], "matched_text_index": k + 1, "matched_sim": 0.3} for k in order]
    return {"text_list": row.marked.split("<image>"), "image_info": info}, order


def make_rows(seed: int, count: int, *, most_side: int = 90) -> list[ImageRow]:
    """Rows with one image or none; texts with a marker, and without."""
    rng = np.random.default_rng(seed)
    rows: list[ImageRow] = []
    for number in range(count):
        words = "".join(rng.choice(list("abcdefg "), int(rng.integers(0, 30))))
        if rng.random() < 0.2:
            rows.append(ImageRow(text=words))
            continue
        width, height = (int(side) for side in rng.integers(5, most_side, 2))
        kind = ("JPEG", "PNG", "WEBP")[number % 3]
        ways = {str(rng.choice(WAYS[kind])): int(rng.integers(1, 9))} if rng.random() < 0.5 else {}
        image = saved_turned(Image.fromarray(random_pixels(rng, width, height)), kind, ways)
        place = int(rng.integers(0, len(words) + 1))
        text = words if rng.random() < 0.3 else f"{words[:place]}<image>{words[place:]}"
        rows.append(ImageRow(text=text, images=(image,)))
    return rows


def write_source(folder: Path, name: str, container: str, files: list[list[ImageRow]], rule: str) -> dict[str, Any]:
    """Write a source; returns what a recipe says of it. A shard of WebDataset has rows with images alone."""
    images: dict[str, Any] = {"column": "image", "token": TOKEN, **RULES[rule]}
    source: dict[str, Any] = {"tokenizer": "bytes", "text": "text", "images": images}
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(files):
        path = folder / name / f"{number}.x"
        if container in ("parquet", "struct"):
            values: list[Any] = [row.image for row in rows]
            if container == "struct":
                values = [None if value is None else {"bytes": value, "path": "x.jpg"} for value in values]
                images["column"] = "picture"
            table = pa.table({"text": [row.text for row in rows], images["column"]: values})
            pq.write_table(table, path.with_suffix(".parquet"), data_page_size=4096, row_group_size=16)
            source["path"] = f"{name}/*.parquet"
        elif container in ("lists", "structs"):
            lists: list[Any] = [list(row.images) or (None if i % 2 else []) for i, row in enumerate(rows)]
            kind: pa.DataType = pa.binary()
            if container == "structs":
                kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
                lists = [value and [{"bytes": image, "path": None} for image in value] for value in lists]
            else:  # a null is no image
                lists = [[None, *value] if value and i % 3 == 0 else value for i, value in enumerate(lists)]
            held = {"text": [row.text for row in rows], "image": pa.array(lists, pa.list_(kind))}
            pq.write_table(pa.table(held), path.with_suffix(".parquet"), data_page_size=4096, row_group_size=16)
            source["path"] = f"{name}/*.parquet"
        elif container == "obelics":
            texts = [_interleaved(row) for row in rows]
            images_of_row = [iter(row.images) for row in rows]
            of_texts = [
                [None if text is not None else next(held) for text in of_row]
                for of_row, held in zip(texts, images_of_row, strict=True)
            ]
            held = {"texts": pa.array(texts, pa.list_(pa.string())), "image": pa.array(of_texts, pa.list_(pa.binary()))}
            pq.write_table(pa.table(held), path.with_suffix(".parquet"), data_page_size=4096, row_group_size=16)
            source |= {"path": f"{name}/*.parquet", "interleaved": "texts"}
            source.pop("text", None)
        elif container == "mmc4-shards":  # members in another order than the document
            samples = []
            for i, row in enumerate(rows):
                document, order = _mmc4(row, [f"{k}.jpg" for k in range(len(row.images))])
                of_row = {f"{k}.jpg": row.images[place] for k, place in enumerate(order)}
                text = {"json": json.dumps(document).encode()}
                samples.append((f"d/{i}", text | of_row if i % 2 else of_row | text))
            write_shard(path.with_suffix(".tar"), samples)
            source |= {"path": f"{name}/*.tar", "interleaved": "json.text_list"}
            source.pop("text", None)
            images |= {"column": "*.jpg", "place": "json.image_info.matched_text_index"}
        elif container == "members":
            samples = []
            for i, row in enumerate(rows):
                of_row = {f"{k}.jpg": image for k, image in enumerate(row.images)}
                text = {"json": json.dumps({"caption": row.text}).encode()}  # before, or between the images
                samples.append(
                    (f"d/{'long-' * 30 if i % 4 == 0 else ''}{i}", text | of_row if i % 2 else of_row | text)
                )
            write_shard(path.with_suffix(".tar"), samples)
            source |= {"path": f"{name}/*.tar", "text": "json.caption"}
            images["column"] = "*.jpg|*.png"
        elif container == "webdataset":
            samples = [
                (f"d/{i}", {"txt": (row.text or "").encode(), "jpg": row.image or b""}) for i, row in enumerate(rows)
            ]
            write_shard(path.with_suffix(".tar"), samples)
            source |= {"path": f"{name}/*.tar", "text": "txt"}
            images["column"] = "png|jpg"
        else:
            lines = []
            for i, row in enumerate(rows):
                named = [f"{number}/{i}{'' if not k else f'-{k}'}.bin" for k in range(len(row.images))]
                for place, image in zip(named, row.images, strict=True):
                    file = folder / name / "files" / place
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(image)
                value = next(iter(named), None) if container == "jsonl" else named
                line: dict[str, Any] = {"text": row.text, "image": value}
                if container == "interleaved":
                    source.pop("text", None)
                    source["interleaved"] = "parts"
                    parts = [
                        {"type": "text", "text": text} if text is not None else {"type": "image"}
                        for text in _interleaved(row)
                    ]
                    line = {"parts": parts, "image": value}
                if container == "mmc4":
                    source.pop("text", None)
                    source["interleaved"] = "text_list"
                    images |= {"column": "image_info.image_name", "place": "image_info.matched_text_index"}
                    line, _ = _mmc4(row, named)
                lines.append(json.dumps(line))
            path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
            source["path"] = f"{name}/*.jsonl"
            images["folder"] = f"{name}/files"
    return source
