"""Images for Megatron's own vision scripts: those of each microbatch, and its text with one token for each picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchmix.array_types import Int64Array
from torchmix.constructor.fields import Microbatch
from torchmix.errors import PlanError, RecipeError
from torchmix.megatron_adapter.arguments import MODALITIES, image_token_of
from torchmix.megatron_adapter.losses import MicrobatchSources, sources_of
from torchmix.modalities.table import open_modality
from torchmix.recipe.items import items_of, key_of_items
from torchmix.recipe.modules import DOCUMENT
from torchmix.recipe.ramp import lengths_of
from torchmix.recipe.sources import resets_attention
from torchmix.recipe.structs import Images, Recipe
from torchmix.stateful.tower import Tower, open_tower

# --- What the scripts take. LLaVAModel encodes the pictures of its microbatch on the first stage, and puts the
# embeddings of each where the text has its image token. A picture is an image, or one of its tiles.
#
#     script                            an image token stands for    fields beside those of text
#     pretrain_vlm.py                   a picture                    images
#     examples/multimodal/train.py      an image                     images, num_image_tiles
#
# Both have been like this from core 0.16 to main and dev. A plan has a placeholder for each embedding: by its lengths
# samples are packed and balanced, and the model makes the same lengths of the shorter text again. So tokens, labels,
# loss mask and positions leave all of an image but its image tokens out, as the scripts' own data do:
#
#     plan      a  I  I  I  b  c     labels  .  .  .  b  c  .     positions  0  1  2  3  4  5
#     script    a  -200     b  c             .  .     c  .                   0  1        2  3
#
# Rows of a microbatch become equally long by padding at their ends. The model cuts each behind `length` embeddings, so
# that it has those of the plan. It has no loss on the last embedding of an image, from which the next token would be
# predicted; a plan has one there.
#
# Later stages than the first need no pixels. The last one expands labels, so it needs the places of image tokens and
# the number of pictures. Those between need boundaries alone.
#
# MimoModel of examples/mimo/train.py takes one dict. Its texts have an image token for each embedding, so they are
# those of the plan, with its labels and loss mask; there are no stages. Core 0.16 to main and dev are alike in it, too.
#
# Cost: a copy of the pixels of each microbatch as bytes, on ranks of the first stage; some operations on its tokens.

IMAGES, TILES = "images", "num_image_tiles"
"""The fields, as both scripts of LLaVAModel name them."""
MODULE = "{items: image, sizes: patches, axis: DP, near_text: always}"
"""What a recipe says of the module of images."""


at_hand: VisionScript | None = None
"""The script that trains in this process, if it takes images."""


class VisionScript:
    """What a script takes of images."""

    def __init__(self, names: tuple[str, ...], image_token: int | None) -> None:
        """See `vision_script`.

        Args:
            names: The fields of its batch.
            image_token: The id of its image token; None: it says it at each call.
        """
        self.has_token_of_image = TILES in names
        """Whether an image token stands for an image, and not for one of its pictures."""
        self.tower: Tower | None = None
        """Makes pictures of pixels; there once a recipe is open."""
        self._image_token = image_token
        self._sources: MicrobatchSources | None = None

    def check(self, args: Any, recipe: Recipe) -> None:
        """Refuse sizes that the model does not take; see `open_images`."""
        _check_sizes(args, recipe)

    def check_pictures(self, args: Any, name: str, words: Images, where: str) -> None:
        """Refuse pictures of the source `name` that the model does not take; see `open_images`."""
        _check_pictures(args, name, words, where)

    def sizes_of(self, args: Any) -> Any:
        """Megatron's arguments with the length of the language model as `seq_length`."""
        return LanguageSizes(args)

    def sources_of_last(self) -> MicrobatchSources | None:
        """The sources of the microbatch that was given last: the model makes a loss mask of its own, which is as long
        as the plan's."""
        return self._sources

    def fields_of(self, fields: dict[str, Any], item: Mapping[str, Any], *given: int) -> dict[str, Any]:
        """What the script takes of a microbatch.

        Args:
            fields: Those of its text, [rows, tokens]; without tokens on a last stage, without labels on a first one,
                with neither between.
            item: The microbatch, with what `images_of` says of it.
            given: What the script gave behind its iterator: the id of the image token, and embeddings of a picture.

        Raises:
            PlanError: An image is not where its text is, or is no whole number of pictures.
        """
        some = fields.get("tokens", fields.get("labels"))
        if some is None:
            return fields
        image_token, embeddings = given or (self._image_token, _embeddings())
        first, num_tokens = (item[PLACES][:, column].numpy().astype(np.int64) for column in range(2))
        pictures = num_tokens // embeddings
        if (pictures * embeddings != num_tokens).any():
            raise PlanError(
                f"step {item['step']}: an image has {num_tokens.max()} tokens, and a picture {embeddings} embeddings"
            )
        if not self.has_token_of_image:
            first, num_tokens = _pictures(first, pictures, embeddings)
        text = _Text(first, num_tokens, some.shape)
        found = dict(fields)
        if "labels" in fields:
            self._sources = sources_of(fields["loss_mask"])
            found |= {name: text.of(fields[name]) for name in ("labels", "loss_mask")}
        found["tokens"] = text.of(fields["tokens"]) if "tokens" in fields else text.of(torch.zeros_like(some))
        found["tokens"].masked_fill_(text.on(some.device).is_image, image_token)
        found[TILES] = torch.from_numpy(pictures.astype(np.int32)).to(some.device)
        if "tokens" not in fields:
            return {**found, IMAGES: torch.empty(int(pictures.sum()), 0, device=some.device)}
        found["position_ids"] = text.positions(fields["position_ids"])
        assert self.tower is not None, "the provider has opened the recipe"
        found[IMAGES] = self.tower.of_units(item[PIXELS].to(some.device, non_blocking=True))
        if len(found[IMAGES]) != pictures.sum():
            raise PlanError(
                f"step {item['step']}: this rank trains on the text of {pictures.sum()} pictures, and has "
                f"{len(found[IMAGES])} of them; write near_text: always for the module of images"
            )
        return found


def vision_script(script: Mapping[str, Any], names: tuple[str, ...]) -> VisionScript | None:
    """What a script takes of images; None if it takes none.

    Args:
        script: `globals()` of the script.
        names: What it takes from its `get_batch`.
    """
    if MODALITIES in names:
        return MimoScript(names, image_token_of(script))
    return VisionScript(names, script.get("DEFAULT_IMAGE_TOKEN_INDEX")) if IMAGES in names else None


class MimoScript(VisionScript):
    """What `examples/mimo/train.py` takes, all of it on each rank."""

    def check(self, args: Any, recipe: Recipe) -> None:
        """See `VisionScript`."""
        for flag in ("context_parallel_size", "pipeline_model_parallel_size"):
            if (size := getattr(args, flag)) > 1:
                why = "has no stages" if flag.startswith("pipeline") else "takes whole samples, or cuts them itself"
                name = flag.replace("_", "-")
                raise RecipeError(f"--{name} {size}: the script's model {why}; train without the flag")
        if (provider := args.model_provider) != "llava_vlm":
            raise RecipeError(f"--model-provider {provider}: torchmix gives what llava_vlm takes; give that")
        if resets_attention(recipe.packing):
            raise RecipeError("the script tells its model no ends of documents; write none", "packing.boundaries")

    def check_pictures(self, args: Any, name: str, words: Images, where: str) -> None:
        """See `VisionScript`. Of which size they are, and how many embeddings they have, the model compares itself."""
        form = open_modality(name, words).tower_form()
        if len(form.shape) != 3:
            got = list(form.shape)
            raise RecipeError(
                f"the encoder takes [3, height, width], and would get {got}; write tower: pictures", where
            )

    def sizes_of(self, args: Any) -> Any:
        """See `VisionScript`."""
        return args

    def fields_of(self, fields: dict[str, Any], item: Mapping[str, Any], *given: int) -> dict[str, Any]:
        """See `VisionScript`. Without pictures there is nothing for the encoder: that of Hugging Face fails on none."""
        assert self.tower is not None and self._image_token is not None, "the provider has opened the recipe"
        self._sources, tokens = sources_of(fields["loss_mask"]), fields["tokens"]
        places = _runs(*(item[PLACES][:, column].numpy().astype(np.int64) for column in range(2)))
        index = torch.from_numpy(places).to(tokens.device, non_blocking=True)
        pictures = self.tower.of_units(item[PIXELS].to(tokens.device, non_blocking=True))
        return {
            **fields,
            "input_ids": tokens.flatten().index_fill(0, index, self._image_token).view_as(tokens),
            MODALITIES: {"images": {"clip_encoder": {"pixel_values": pictures}}} if len(pictures) else None,
        }


def _embeddings() -> int:
    """Embeddings of a picture, which both scripts write into Megatron's arguments before they ask for data."""
    from megatron.training import get_args

    return int(get_args().encoder_seq_length)


def _pictures(first: Int64Array, pictures: Int64Array, embeddings: int) -> tuple[Int64Array, Int64Array]:
    """First tokens of pictures, and their tokens, from those of images."""
    image = np.repeat(np.arange(len(first)), pictures)
    number = np.arange(len(image)) - np.repeat(np.cumsum(pictures) - pictures, pictures)
    return first[image] + number * embeddings, np.full(len(image), embeddings)


def _runs(first: Int64Array, lengths: Int64Array) -> Int64Array:
    """The numbers of runs, one run behind the other."""
    return np.repeat(first - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


class _OnDevice:
    """Indices of `_Text` as tensors of a device."""

    def __init__(self, index: Int64Array, is_image: Any, device: torch.device) -> None:
        self.index, self.is_image = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in (index, is_image)
        )
        self.is_padding = self.index < 0


class _Text:
    """The tokens that are left of a microbatch of [rows, tokens], [rows, fewer tokens]."""

    def __init__(self, first: Int64Array, num_tokens: Int64Array, shape: torch.Size) -> None:
        """Leave all tokens out but the first of each run; runs ascend."""
        rows, width = shape
        inner = num_tokens - 1
        is_left = np.ones(rows * width, np.bool_)
        is_left[_runs(first + 1, inner)] = False
        left = np.flatnonzero(is_left)
        row = left // width
        count = np.bincount(row, minlength=rows)
        place = row, np.arange(len(left)) - (np.cumsum(count) - count)[row]
        self._index = np.full((rows, int(count.max())), -1)
        self._index[place] = left
        at = np.searchsorted(left, first)
        self._is_image = np.zeros(self._index.shape, np.bool_)
        self._is_image[place[0][at], place[1][at]] = True
        self._first, self._inner = first, inner
        self._on: _OnDevice | None = None

    def on(self, device: torch.device) -> _OnDevice:
        """Indices on a device."""
        self._on = self._on or _OnDevice(self._index, self._is_image, device)
        return self._on

    def of(self, field: torch.Tensor) -> torch.Tensor:
        """What is left of a field, 0 in padding."""
        on = self.on(field.device)
        return field.reshape(-1)[on.index.clamp(min=0)].masked_fill_(on.is_padding, 0)

    def positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Positions that count a run once; a stretch begins as many tokens before a token as its position says."""
        found, device = self.of(position_ids), position_ids.device
        place = self.on(device).index.clamp(min=0)
        first = torch.from_numpy(self._first).to(device)
        saved = torch.from_numpy(np.concatenate([[0], np.cumsum(self._inner)])).to(device)
        before, at_start = (saved[torch.searchsorted(first, at)] for at in (place, place - found))
        return (found - (before - at_start)).masked_fill_(self.on(device).is_padding, 0)


# --- The images of a microbatch, from what its rank has of the module.

PLACES, PIXELS = "image_places", "image_pixels"
"""What an item has: int32 [k, 2] the first token of each image of its text, and how many it has; uint8 [patches,
values] of these images, where the rank embeds tokens."""


def images_of(microbatch: Microbatch, module: str) -> dict[str, torch.Tensor]:
    """The images of a microbatch, in the order of its tokens.

    Args:
        microbatch: From a loader.
        module: The module of images.
    """
    batch = microbatch.modules[module]
    places = torch.zeros(0, 2, dtype=torch.int32)
    if batch.places is not None:
        places = batch.places[batch.places[:, 0] == microbatch.index][:, 1:3]
    if microbatch.tokens_int32 is None:
        return {PLACES: places}
    # Items and roads of a rank come in one order, and each item of a rank of its text has one road, to itself.
    _, at_microbatch, token, _, _ = batch.routes.receives.numpy().T
    chosen = np.flatnonzero(at_microbatch == microbatch.index)
    pixels = batch.arrays["pixel_values"].split_with_sizes(batch.units.tolist())
    of_items = [pixels[number] for number in chosen[np.argsort(token[chosen])].tolist() if number < len(pixels)]
    return {PLACES: places, PIXELS: torch.cat([batch.arrays["pixel_values"][:0], *of_items])}


# --- What a recipe must say, and Megatron's flags with it. Every rank refuses alike, before anything is read.


class LanguageSizes:
    """Megatron's arguments with the length of the language model as `seq_length`, where these scripts write the number
    of embeddings of a picture."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        if name == "decoder_seq_length":
            return None
        return getattr(self._args, "decoder_seq_length" if name == "seq_length" else name)


def open_images(args: Any, recipe: Recipe, script: VisionScript, directory: Path) -> str:
    """The module of images; the script has its pictures from now on.

    Args:
        args: Megatron's arguments, after the script's model was made.
        recipe: The recipe.
        script: The script that trains.
        directory: The recipe's folder.

    Raises:
        RecipeError: The recipe's images are not those that the model takes, or not with their text.
        OptionError: The sources do not say how pictures are normalised, or differ in it.
    """
    module = _module_of(recipe)
    script.check(args, recipe)
    for name, source in sorted(recipe.sources.items()):
        for kind, words in items_of(source).items():
            where = f"sources.{name}.{key_of_items(kind)}"
            if not isinstance(words, Images):
                raise RecipeError(f"the script takes images alone; leave sources with {kind}s out", where)
            script.check_pictures(args, name, words, where)
    script.tower = open_tower(recipe, module, directory=directory)
    return module


def _module_of(recipe: Recipe) -> str:
    named = [name for name, module in sorted(recipe.modules.items()) if module.items == Images.kind]
    if len(named) != 1:
        raise RecipeError(
            f"the script's model encodes the images of its own microbatch, and the recipe has {len(named)} modules of "
            f"images; write one: NAME: {MODULE}",
            "modules",
        )
    [name] = named
    module = recipe.modules[name]
    if module.axis != "DP" or module.near_text != "always" or module.sources is not None:
        raise RecipeError(
            f"the script's model encodes the images of its own microbatch, so that each must be with its text; write "
            f"{name}: {MODULE}, also with model and decode_at",
            f"modules.{name}",
        )
    for other, one in sorted(recipe.modules.items()):
        if one.items not in (DOCUMENT, Images.kind):
            raise RecipeError("the script takes images alone; remove the module", f"modules.{other}")
    return name


def _check_sizes(args: Any, recipe: Recipe) -> None:
    embeddings, length = int(args.encoder_seq_length), args.decoder_seq_length
    if args.context_parallel_size > 1:
        raise RecipeError(
            f"--context-parallel-size {args.context_parallel_size}: the script's model cuts the sequences itself, for "
            f"which it needs whole samples; a recipe gives it slices: train without the flag"
        )
    text_tokens = getattr(args, "dataloader_seq_length", None)  # of pretrain_vlm.py, which adds one image to them
    lengths = lengths_of(recipe.batch)
    if length not in lengths:
        said = f"--decoder-seq-length is {length}"
        if text_tokens is not None:
            said = f"--dataloader-seq-length is {text_tokens}, and the script adds {length - text_tokens}: {length}"
        wanted = lengths[0] if text_tokens is None else lengths[0] - embeddings
        raise RecipeError(
            f"{said} tokens, images included, and samples of the recipe have {' or '.join(map(str, lengths))}; give "
            f"{wanted}",
            "batch.length",
        )
    if text_tokens is not None and text_tokens + embeddings != length:
        raise RecipeError(
            f"--dataloader-seq-length {text_tokens}: with the {embeddings} embeddings of an image these are "
            f"{text_tokens + embeddings} tokens, which the script pads to {length} by a mask that packed samples do "
            f"not have; give {length - embeddings}",
            "batch.length",
        )
    if resets_attention(recipe.packing) and args.micro_batch_size > 1:
        raise RecipeError(
            f"--micro-batch-size {args.micro_batch_size}: packed samples are one row, and the script's model cuts what "
            f"is longer than {length} tokens off; give 1, or write packing.boundaries: none"
        )
    if getattr(args, "step_batch_size_schedule", None) is not None:
        raise RecipeError(
            "--step-batch-size-schedule: it counts tokens by --seq-length, in whose place the script writes the "
            "embeddings of an image; give --global-batch-size"
        )


def _check_pictures(args: Any, name: str, words: Images, where: str) -> None:
    embeddings, size = int(args.encoder_seq_length), (args.img_h, args.img_w)
    modality = open_modality(name, words)
    form = modality.tower_form()
    shape = form.shape if form.padded is None else form.padded
    if shape != (3, *size) or words.patch != args.patch_dim:
        raise RecipeError(
            f"the encoder would get {list(shape)} with patches of {words.patch}, and by --img-h, --img-w and "
            f"--patch-dim it takes {[3, *size]} and {args.patch_dim}; write tower: pictures, fixed: {{height: "
            f"{size[0]}, width: {size[1]}}} or tiles, and patch: {args.patch_dim}",
            where,
        )
    sides = np.array([size, (size[0], 3 * size[1]), (2 * size[0], size[1])])
    sizes = modality.sizes({"height": sides[:, 0], "width": sides[:, 1]})
    pictures = np.asarray(sizes.columns["segments"])
    if (sizes.tokens != pictures * embeddings).any():
        tokens = int(sizes.tokens[0] // pictures[0])
        hint = "give --disable-vision-class-token" if embeddings == tokens + 1 else "choose another merge or size rule"
        raise RecipeError(
            f"a picture has {tokens} tokens by the recipe, and the script's model makes {embeddings} embeddings of it; "
            f"{hint}",
            where,
        )
