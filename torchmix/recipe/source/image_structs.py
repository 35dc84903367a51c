"""What a recipe says of the images of a source, as values.

In: what the user writes under `images`. Out: the Structs. Must hold: they check nothing; see images.py. Cost: none.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Tiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Square tiles and a thumbnail, as InternVL cuts them."""

    size: int = 448
    """Pixels of a tile's side; a multiple of patch x merge."""
    min: int = 1
    """Fewest tiles, the thumbnail not counted."""
    max: int = 12
    """Most tiles, the thumbnail not counted; at most 64."""


class Anyres(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small picture of the whole and tiles of a canvas, as LLaVA-NeXT makes them."""

    size: int = 336
    """Pixels of a tile's side; a multiple of patch."""
    canvases: tuple[str, ...] | None = None
    """Sizes of canvas, HEIGHTxWIDTH, each a multiple of `size`. None: one tile by two, two by one, two by two, three by
    one, one by three."""


class Images(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The images of a source, and what stands for them in the text."""

    column: str
    """The column that holds them: their bytes, a struct of `bytes`, or with `folder` paths of files. With `webdataset`
    the suffix of a member, as `jpg`, or several as `jpg|png`."""
    place: str | None = None
    """The column of the places of images in the list of texts of `interleaved`: an image stands before the text of this
    number. None: the list itself has a null, or a part, for each image."""
    folder: str | None = None
    """The column holds paths of image files, relative to this folder, which is relative to the recipe's."""
    token: int | str
    """The token that stands for a part of an image, as often as the image has tokens: an id, or the name of a token."""
    before: int | str | None = None
    """A token before the tokens of each image; None: nothing."""
    after: int | str | None = None
    """A token after the tokens of each image; None: nothing."""
    marker: str = "<image>"
    """Where an image goes in the text. A text without markers has its images before it."""
    patch: int = 14
    """Pixels of a patch's side."""
    merge: int = 2
    """Patches of the side of a block that becomes one token; not with `anyres`."""
    min_pixels: int | None = None
    """Smaller images are enlarged; only where neither of the next three keys is given. None: 3136."""
    max_pixels: int | None = None
    """Larger images are shrunk; only where neither of the next three keys is given. None: 1003520."""
    tiles: Tiles | None = None
    """Cut tiles."""
    anyres: Anyres | None = None
    """Cut tiles of a canvas."""
    size: str | None = None
    """`module:function` of the user's: (width, height) -> ((rows, columns) of patches, tokens)."""
    alpha: Literal["white", "drop"] = "white"
    """What becomes of transparent pixels: they turn white, or keep the color that they hide."""
    most_pixels: int = 89_478_485
    """An image whose header says more is refused, before it is decoded."""
