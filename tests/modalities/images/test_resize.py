"""How pictures are resized and normalised, as tensors of bytes are by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchmix.modalities.pictures import Filter, Resizer, levels

Image = pytest.importorskip("PIL.Image")
SIZES = ((37, 53, 28, 56), (53, 37, 112, 28), (9, 300, 84, 84), (640, 12, 56, 14), (20, 20, 20, 20), (1, 1, 14, 28))
"""Width and height before and after."""


@pytest.mark.parametrize("kind", ["bicubic", "bilinear"])
def test_bytes_are_resized_as_torch_does(kind: Filter) -> None:
    rng = np.random.default_rng(1)
    for width, height, to_width, to_height in SIZES:
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        found = Resizer(arithmetic="tensor", filter=kind).resized(Image.fromarray(pixels), to_width, to_height)
        held = torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()
        wanted = torch.nn.functional.interpolate(held, size=(to_height, to_width), mode=kind, antialias=True)
        assert np.array_equal(found, wanted[0].permute(1, 2, 0).numpy()), (width, height, to_width, to_height)


def test_the_two_families_differ_by_one_level() -> None:
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (61, 83, 3), dtype=np.uint8))
    ours, theirs = (Resizer(arithmetic=one).resized(image, 56, 42) for one in ("pillow", "tensor"))
    apart = np.abs(ours.astype(int) - theirs.astype(int))
    assert apart.max() == 1 and 0 < apart.mean() < 0.1


def test_levels_are_those_of_tensors_and_of_pillow() -> None:
    mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    byte = torch.arange(256, dtype=torch.float32)
    middle, width = (torch.tensor(one)[:, None] * (1.0 / (1 / 255)) for one in (mean, deviation))
    assert np.array_equal(levels("tensor", mean, deviation), ((byte - middle) / width).numpy())
    scaled = (np.arange(256).astype(np.float64) * (1 / 255)).astype(np.float32)
    found = levels("pillow", mean, deviation)
    assert found.dtype == np.float32
    for channel in range(3):
        one = (scaled - np.float32(mean[channel])) / np.float32(deviation[channel])
        assert np.array_equal(found[channel], one)
