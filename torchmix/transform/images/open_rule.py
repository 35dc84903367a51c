"""The recipe's words for images -> a size rule.

In: `images` of a checked source. Out: a `SizeRule`. Must hold: what the words leave open is in the recipe's defaults.
Cost: importing the user's function.
"""

from __future__ import annotations

from torchmix.recipe.source.image_structs import Images
from torchmix.recipe.source.images import canvases_of, pixel_bounds
from torchmix.transform.images.anyres import AnyresRule
from torchmix.transform.images.dynamic import DynamicRule
from torchmix.transform.images.own_rule import OwnRule, import_function
from torchmix.transform.images.rule import SizeRule
from torchmix.transform.images.tiles import TilesRule


def rule_of(images: Images, where: str) -> SizeRule:
    """The size rule of a source; `where` is the path of keys of its `images`."""
    patch, merge = images.patch, images.merge
    if images.tiles is not None:
        tiles = images.tiles
        return TilesRule(patch=patch, merge=merge, size=tiles.size, min=tiles.min, max=tiles.max)
    if images.anyres is not None:
        return AnyresRule(patch=patch, size=images.anyres.size, canvases=canvases_of(images, where))
    if images.size is not None:
        function = import_function(images.size, f"{where}.size")
        return OwnRule(name=images.size, function=function, patch=patch, merge=merge)
    least, most = pixel_bounds(images)
    return DynamicRule(patch=patch, merge=merge, min_pixels=least, max_pixels=most)
