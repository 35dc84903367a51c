"""Images from files to tensors: images per second of processor time, against a torch DataLoader and WebDataset.

    python benchmarks/image_loading.py [--images 600] [--rounds 3]

All make the same patches with the same Pillow calls: open, turn by EXIF, RGB, resize by Qwen2-VL's rule, cut. torchmix
plans, packs, balances and reads a recipe over Parquet or shards; the DataLoader reads a file for each image; WebDataset
reads shards in their order. Each runs in one process without workers, so that its processor time, threads included, is
that of `time.process_time`. Images are JPEG of generated pixels, with the sides of photographs. The first batch of each
is not counted. WebDataset is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

import torchmix
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.images.rules import DynamicRule
from torchmix.modalities.pictures import patches_in_rows
from torchmix.recipe.load import check_recipe

RULE = DynamicRule(patch=14, merge=2, min_pixels=3_136, max_pixels=1_003_520)
BATCH = 16
TOKEN = 300


def make_files(count: int) -> list[bytes]:
    """JPEG files of smooth noise, with sides about 640 x 480."""
    rng = np.random.default_rng(1)
    files = []
    for _ in range(count):
        width, height = (int(side) for side in rng.integers(400, 900, 2))
        small = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    return files


def patches_of(content: bytes) -> torch.Tensor:
    """The patches of one file, with Pillow's calls alone."""
    with Image.open(io.BytesIO(content)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    width, height = (int(side[0]) for side in RULE.resized(np.array([image.width]), np.array([image.height])))
    pixels = np.asarray(image.resize((width, height), resample=Image.Resampling.BICUBIC))
    return torch.from_numpy(patches_in_rows(pixels, RULE.patch, RULE.merge))


class Files(Dataset[torch.Tensor]):
    """A file for each image."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted((folder / "files").iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        return patches_of(self._paths[number].read_bytes())


def by_dataloader(folder: Path) -> Iterator[int]:
    """Images of each batch."""
    for batch in DataLoader(Files(folder), batch_size=BATCH, shuffle=True, collate_fn=list):
        torch.cat(batch)
        yield len(batch)


def by_webdataset(folder: Path) -> Iterator[int]:
    """Images of each batch."""
    import webdataset

    shards = webdataset.WebDataset(str(folder / "0.tar"), shardshuffle=False).to_tuple("jpg").map_tuple(patches_of)
    batch: list[torch.Tensor] = []
    for (patches,) in shards:
        batch.append(patches)
        if len(batch) == BATCH:
            torch.cat(batch)
            yield len(batch)
            batch = []


def by_torchmix(folder: Path, source: dict[str, Any]) -> Iterator[int]:
    """Images of each step."""
    images = {"column": "jpg", "token": TOKEN, "patch": 14, "merge": 2}
    recipe = check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": BATCH, "length": 1344},
            "packing": {"method": "pad"},
            "sources": {"pairs": {"text": "txt", "tokenizer": "bytes", "images": images, **source}},
            "mixture": {"pairs": 1},
            "catalog": f"catalog-{source['path']}",
            "modules": {"vision": {"items": "image", "sizes": "patches"}},
        }
    )
    index_recipe(recipe, folder)
    with torchmix.build_loader(
        recipe, directory=folder, topology=torchmix.Topology.single(), loaders="in_process", one_pass=True
    ) as loader:
        count = 0
        for microbatch in loader:
            if microbatch.is_last_of_step:
                batch = microbatch.modules["vision"]
                assert batch.arrays["pixel_values"].shape[0] == int(batch.units.sum())
                count = len(batch.units)
                yield count


def rate(batches: Callable[[], Iterator[int]]) -> float:
    """Images per second of processor time, behind the first batch."""
    found, began_s = 0, 0.0
    for number, count in enumerate(batches()):
        if number == 0:
            began_s = time.process_time()
        else:
            found += count
    return found / (time.process_time() - began_s)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = make_files(asked.images)
        (folder / "files").mkdir()
        for number, content in enumerate(files):
            (folder / "files" / f"{number:06}.jpg").write_bytes(content)
        texts = [f"caption {number}" for number in range(len(files))]
        pq.write_table(pa.table({"txt": texts, "jpg": files}), folder / "0.parquet", data_page_size=1 << 18)
        with tarfile.open(folder / "0.tar", "w") as shard:
            for number, content in enumerate(files):
                for suffix, held in (("jpg", content), ("txt", texts[number].encode())):
                    member = tarfile.TarInfo(f"{number:06}.{suffix}")
                    member.size = len(held)
                    shard.addfile(member, io.BytesIO(held))
        ways: dict[str, Callable[[], Iterator[int]]] = {
            "DataLoader, a file an image": lambda: by_dataloader(folder),
            "torchmix, Parquet": lambda: by_torchmix(folder, {"path": "0.parquet"}),
            "torchmix, WebDataset shards": lambda: by_torchmix(folder, {"path": "0.tar"}),
        }
        if importlib.util.find_spec("webdataset") is not None:
            ways["WebDataset"] = lambda: by_webdataset(folder)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(asked.rounds):
            for way, batches in ways.items():
                found[way].append(rate(batches))
    base = np.median(found["DataLoader, a file an image"])
    print(
        f"{asked.images} JPEG files of {sum(map(len, files)) / len(files):.0f} bytes; median of {asked.rounds} rounds"
    )
    print("| way | images per second of processor time | of the DataLoader's |")
    print("|---|---|---|")
    for way, rates in found.items():
        print(f"| {way} | {np.median(rates):.1f} | {np.median(rates) / base:.2f} |")
    if "WebDataset" not in found:
        print("WebDataset is not installed")
    print("goal: at least 0.95 of the DataLoader's")
    print(json.dumps({way: [round(one, 2) for one in rates] for way, rates in found.items()}))


if __name__ == "__main__":
    main()
