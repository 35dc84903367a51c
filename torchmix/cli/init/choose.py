"""The tokenizer of text, and the images of a source with the tokens that stand for them, as keys of a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchmix.cli.init.recipe_yaml import relative_path, text_of
from torchmix.errors import OptionError, RecipeError, SourceUnreadable
from torchmix.formats.look import FoundColumn
from torchmix.recipe.build import nearest
from torchmix.recipe.sources import tokenizer_kind
from torchmix.storage.stores import is_uri
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT
from torchmix.transform.open_tokenizer import Tokenizers

# --- The tokenizer of text, given or asked for, as keys of a recipe.
#
# It is never guessed; a vocabulary is opened, so that a wrong one is an error before anything is written. Cost:
# reading the vocabulary.

TOKENIZERS = "bytes, tiktoken:NAME, or the path of a tokenizer.json"
USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


def choose_tokenizer(given: str | None, names: Sequence[str]) -> str:
    """The tokenizer of some sources of text: the one that is given, or what the user answers.

    Raises:
        OptionError: None is given, and nobody can be asked; or it is none.
    """
    if given is None and sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{', '.join(names)}: text, which needs a tokenizer: {TOKENIZERS}", file=sys.stderr)
        print("tokenizer: ", end="", file=sys.stderr, flush=True)
        given = sys.stdin.readline().strip()
    if not given or tokenizer_kind(given) is None:
        what = f"--tokenizer {given}: no tokenizer" if given else "text needs --tokenizer"
        near = "" if not given or "/" in given else f" (did you mean tiktoken:{given}?)"
        raise OptionError(f"{what}{near}; give {TOKENIZERS}")
    return given


def tokens_among(tokenizer: str, names: Iterable[str]) -> set[str]:
    """Those names that are tokens of a vocabulary that opens; `bytes` has none."""
    if tokenizer_kind(tokenizer) == "bytes":
        return set()
    opened, found = Tokenizers(Path.cwd()), set[str]()
    for name in names:
        try:
            opened.token_id("", tokenizer, name, "")
            found.add(name)
        except RecipeError:
            continue
    return found


def tokenizer_keys(tokenizer: str, end_id: str | None, target: Path) -> tuple[tuple[str, str], ...]:
    """The keys of a source that make ids of its text, as YAML has their values.

    Args:
        tokenizer: As a recipe names it; a path is relative to the present folder.
        end_id: The token after each text; None to look for one that is usual.
        target: The recipe's file, which its paths are relative to.

    Raises:
        OptionError: A package is missing, or the vocabulary lacks the token.
        SourceUnreadable: The vocabulary cannot be read.
    """
    kind = tokenizer_kind(tokenizer)
    if kind == "bytes":
        if end_id is not None:
            raise OptionError("--end-id: bytes ends each document with 256 by itself")
        return (("tokenizer", "bytes"),)
    opened = Tokenizers(Path.cwd())
    ends = USUAL_ENDS if end_id is None else (end_id,)
    end: str | int | None = None
    for name in ends:
        try:
            end = int(name) if name.isdigit() else name
            opened.open("", tokenizer, end_id=end)
            break
        except RecipeError as error:
            if error.where != "sources..end_id":
                raise OptionError(f"--tokenizer {tokenizer}: {error.message}") from None
            if end_id is not None:
                raise OptionError(f"--end-id {end_id}: {error.message}") from None
            end = None
        except SourceUnreadable as error:
            message = str(error).removeprefix("sources..tokenizer: ")
            raise SourceUnreadable(f"--tokenizer {tokenizer}: {message}") from None
    path = relative_path(tokenizer, target, tokenizer) if kind == "file" else tokenizer
    keys = (("tokenizer", text_of(path)),)
    return keys if end is None else (*keys, ("end_id", str(end) if isinstance(end, int) else text_of(end)))


# --- The images of a source, and the tokens that stand for them, as keys of a recipe.
#
# A token is one that the tokenizer has; what cannot be known, as where paths begin, is said. Cost: reading the
# vocabulary.

IMAGE_KINDS = ("items", "item paths")
USUAL_IMAGES = ("image", "images", "img", "jpg", "jpg|png", "png", "jpeg", "picture", "pixel_values", "image_path")
USUAL_TOKENS = (
    ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),  # Qwen
    ("<IMG_CONTEXT>", "<img>", "</img>"),  # InternVL
    ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),  # Gemma
    ("<image>",),  # LLaVA
)
"""What stands for a part of an image, and before and after it, in known vocabularies."""
MODULE = """\
modules:
  vision:                     # the encoder of the images: all ranks, each its part; docs/images.md
    items: image
    sizes: patches
    near_text: 5%             # how far above the least possible a rank's work may be, so that fewer rows travel
    # what an image costs: write the dimensions of your encoder
    model: {layers: 32, hidden: 1280, ffn: 5120, heads: 16, patch: 14, merge: 2, out: 4096}
"""


def choose_images(columns: Sequence[FoundColumn], file: str, wanted: str | None) -> FoundColumn | None:
    """The column of images that is meant; None where there is none.

    Raises:
        SourceUnreadable: The one that the user named is not there.
        OptionError: There are several.
    """
    found = [column for column in columns if column.kind in IMAGE_KINDS]
    names = [column.name for column in found]
    if wanted is not None and found:
        chosen = next((column for column in found if column.name == wanted), None)
        if chosen is None:
            raise SourceUnreadable(f"{file} has no images in {wanted!r}{nearest(wanted, names)}; {_held(found)}")
        return chosen
    usual = [column for name in USUAL_IMAGES for column in found if column.name == name]
    if len(found) > 1 and not usual:
        raise OptionError(f"{file} has images in {', '.join(names)}; say which with --images COLUMN")
    return next(iter(usual or found), None)


def image_tokens(tokenizer: str, given: str | None) -> tuple[tuple[str, str], ...]:
    """`token`, `before` and `after` of images, as YAML has their values.

    Raises:
        OptionError: The tokenizer has none that is usual, and none is given; or not the one that is.
    """
    if tokenizer_kind(tokenizer) == "bytes":
        if given is not None and not (given.isdigit() and int(given) > END_OF_DOCUMENT):
            raise OptionError(f"--image-token {given}: with bytes it is a number above {END_OF_DOCUMENT}")
        return (("token", given or str(END_OF_DOCUMENT + 1)),)
    if given is not None:
        token = int(given) if given.isdigit() else given
        try:
            Tokenizers(Path.cwd()).token_id("", tokenizer, token, "")
        except RecipeError as error:
            raise OptionError(f"--image-token {given}: {error.message}") from None
        return (("token", given if isinstance(token, int) else text_of(given)),)
    known = tokens_among(tokenizer, (word for words in USUAL_TOKENS for word in words))
    for words in USUAL_TOKENS:
        if words[0] in known:
            keys = zip(("token", "before", "after"), words, strict=False)
            return tuple((key, text_of(word)) for key, word in keys if word in known)
    usual = ", ".join(words[0] for words in USUAL_TOKENS)
    raise OptionError(
        f"--tokenizer {tokenizer} has no token that usually stands for a part of an image ({usual}); name one with "
        "--image-token TOKEN, a name or an id of the tokenizer"
    )


def image_keys(
    column: FoundColumn, file: str, tokens: tuple[tuple[str, str], ...], target: Path, words: str
) -> tuple[str, str]:
    """The value of `images`, and what to say of it.

    Args:
        column: Of images, or of paths.
        file: In which it is.
        tokens: Of `image_tokens`.
        target: The recipe's file, which its paths are relative to.
        words: Of the user, which tell whether paths are absolute.
    """
    keys = [("column", text_of(column.name))]
    note = "images by Qwen2-VL's rule of sizes; docs/images.md has others"
    if column.kind == "item paths":
        folder, is_there = _folder(column.example, file)
        keys.append(("folder", text_of(relative_path(folder, target, words) if folder else ".")))
        if not is_there:
            note = f"images.folder: write where paths such as {column.example} begin, which was not found"
    keys += [*tokens, ("patch", "14"), ("merge", "2")]
    return "{" + ", ".join(f"{key}: {value}" for key, value in keys) + "}", note


def _folder(example: str, file: str) -> tuple[str, bool]:
    """The folder that a path begins in, and whether it was found."""
    near = os.path.dirname(file)  # noqa: PTH120 - a URI may be no path
    if is_uri(file) or is_uri(example):
        return near, False
    if Path(example).is_absolute():
        return "/", Path(example).exists()
    up = os.path.dirname(near)  # noqa: PTH120
    for folder in (near, f"{near}/images", f"{near}/image", up, f"{up}/images"):
        if (Path(folder) / example).exists():
            return folder, True
    return near, False


def _held(found: Sequence[FoundColumn]) -> str:
    return "it has " + ", ".join(f"{column.name} ({column.kind})" for column in found)
