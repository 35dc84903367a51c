"""What a page shows of an item's units: pictures that are cut into the same units again."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from tests.support.image_sources import RULES
from torchmix.modalities.images.kind import ImageModality
from torchmix.modalities.pictures import MOST_SIDE, patches_in_rows, png_image
from torchmix.modalities.table import open_modality
from torchmix.recipe.build import build
from torchmix.recipe.items import KINDS


@pytest.mark.parametrize("rule", RULES)
def test_pictures_of_units_are_those_that_were_cut(rule: str) -> None:
    levels = np.mgrid[0:90, 0:130][0][:, :, None] * np.array([1, 2, 3]) % 256
    image, file = Image.fromarray(levels.astype(np.uint8)), io.BytesIO()
    image.save(file, "TIFF")
    content = file.getvalue()
    modality = open_modality("s", build(KINDS["image"].words, {"column": "i", "token": 1, **RULES[rule]}, "items"))
    assert isinstance(modality, ImageModality)
    measures = modality.measure(lambda at, count: content[at : at + count], len(content))
    sizes = modality.sizes({key: np.array([one]) for key, one in zip(modality.measured, measures, strict=True)})
    units = modality.decode(content, measures)
    pictures = modality.pictures(units, {key: int(column[0]) for key, column in sizes.columns.items()})
    merge = int(getattr(modality.rule, "merge", 1))
    again = np.concatenate([patches_in_rows(one, modality.rule.patch, merge) for one in pictures])
    assert np.array_equal(again, units)
    [shown] = re.findall(r'^<img src="data:image/png;base64,([^"]*)">$', modality.preview(content))
    with Image.open(io.BytesIO(base64.b64decode(shown))) as found:
        assert np.array_equal(np.asarray(found), levels), "no browser shows a TIFF"


def test_large_pictures_are_thinned_out() -> None:
    picture = np.random.default_rng(1).integers(0, 256, (2 * MOST_SIDE + 1, 9, 3)).astype(np.uint8)
    data = base64.b64decode(png_image(picture).split(",")[1].rstrip('">'))
    with Image.open(io.BytesIO(data)) as found:
        assert np.array_equal(np.asarray(found), picture[::3, ::3])
