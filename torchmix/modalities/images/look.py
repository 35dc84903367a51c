"""What seems to be an image in a file that nobody has described, and what a new recipe says of it."""

from __future__ import annotations

import re

from torchmix.errors import ItemUnreadable
from torchmix.modalities.images.header import header_of
from torchmix.modalities.modality import DraftOfKind
from torchmix.recipe.images import MAX_PIXELS, MIN_PIXELS

TOKEN_PIXELS = 28 * 28
"""Pixels that become a token by the default rule."""
_BEGINS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_AVIF = (b"ftypavif", b"ftypavis")
_PATH = re.compile(r".+\.(?:jpe?g|png|webp|avif|gif|bmp|tiff?)", re.IGNORECASE | re.DOTALL)
_NAMES_IMAGES = re.compile(r"image|img|picture|photo", re.IGNORECASE)


def is_image(value: bytes) -> bool:
    """Whether bytes begin as an image does."""
    return value.startswith(_BEGINS) or (value[:4], value[8:12]) == (b"RIFF", b"WEBP") or value[4:12] in _AVIF


def is_path(value: str) -> bool:
    """Whether a text ends as the name of an image file does."""
    return len(value) < 4096 and _PATH.fullmatch(value) is not None


def names_images(path: str) -> bool:
    """Whether the name of a column says that it is of images."""
    return _NAMES_IMAGES.search(path) is not None


def tokens_of(value: bytes) -> float:
    """About how many tokens an image becomes by the default rule."""
    try:
        header = header_of(value)
    except ItemUnreadable:
        return MIN_PIXELS / TOKEN_PIXELS
    return min(MAX_PIXELS, max(MIN_PIXELS, header.width * header.height)) / TOKEN_PIXELS


DRAFT = DraftOfKind(
    columns=("image", "images", "img", "jpg", "jpg|png", "png", "jpeg", "picture", "pixel_values", "image_path"),
    tokens=(
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),  # Qwen
        ("<IMG_CONTEXT>", "<img>", "</img>"),  # InternVL
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),  # Gemma
        ("<image>",),  # LLaVA
    ),
    options=(("patch", "14"), ("merge", "2")),
    note="images by Qwen2-VL's rule of sizes; docs/images.md has others",
    module=(
        "vision:                     # the encoder of the images: all ranks, each its part; docs/images.md",
        "  items: image",
        "  sizes: patches",
        "  near_text: 5%             # how far above the least possible a rank's work may be, so fewer rows travel",
        "  # what an image costs: write the dimensions of your encoder",
        "  model: {layers: 32, hidden: 1280, ffn: 5120, heads: 16, patch: 14, merge: 2, out: 4096}",
    ),
)
