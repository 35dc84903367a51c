"""Trial: encoded files of every form, from the index to the tensors of a step, against transformers' own processors.

    python -m tests.trials.drawn_files --seed 1 --count 1000

One is a source of 100 files of one kind, most of them images, read by the settings of a model's folder. The ids of each
document, its loss mask and its positions, and each number that the encoder takes must be those that transformers makes
of the file as Pillow, libav or libsndfile decode it whole: pixels and features bit for bit. Of videos the processor's
own resizing is torchvision's, on frames in RGB, while torchmix scales and converts in one operation of swscale; so
values are compared with frames that swscale made, and `levels` counts bytes by how far torchvision's are from those.
A run that is started again goes on where it stopped.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image, ImageOps

import torchmix
from tests.support.drawn_files import DRAW
from tests.support.model_folders import PICTURE_MODELS, SOUND_MODELS, VIDEO_MODELS, write_model
from tests.support.sounds import whole_waveform
from tests.support.trial import continued, trial_parser
from tests.support.videos import decoded, functions_of_processor
from tests.trials.image_processors import HOME, NOT_INSTALLED
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.sounds.header import is_mp3, with_frame_count
from torchmix.recipe.load import load_recipe

FILES = 100
KINDS = ("image",) * 17 + ("sound",) * 2 + ("video",)
"""By the number of a batch, over and over."""
LENGTH = 1024
END, ITEM, BEFORE, AFTER = 256, 300, 301, 302
QWEN_IDS = {
    "image_token_id": ITEM,
    "video_token_id": ITEM + 3,
    "vision_start_token_id": BEFORE,
    "vision_end_token_id": AFTER,
}
SECONDS = 4
"""Positions of a second, of Qwen2.5-VL."""

BOUNDS = {
    "length": "transformers takes libav's average rate for that of a video, torchmix the times of its packets, of an "
    "MP4 those in its tables; so it sees more or fewer frames of some with uneven times",
    "frames": "transformers steps from frame to frame in 32 bits; some videos have another frame here and there",
    "seconds": "transformers multiplies seconds of patches in 32 bits, and cuts 27.999998 where 28 is meant",
    "delay": "an MP3 that does not say how many frames it has comes without the 529 samples of the decoder's delay, "
    "as one that says it; libsndfile leaves them in",
    "16 bits": "of a grey PNG of 16 bits the higher 8 are taken; Pillow's own conversion makes all above 255 white",
}
"""Where torchmix differs from transformers on purpose: compared are numbers without the fault that is named."""
SMALL: dict[str, dict[str, Any]] = {
    "Qwen2-VL": {"min_pixels": 784, "max_pixels": 784 * 12},
    "Qwen3-VL": {"size": {"shortest_edge": 1024, "longest_edge": 8 * 1024}},
    "InternVL3": {"size": {"height": 56, "width": 56}, "max_patches": 6},
    "LLaVA-1.5": {"crop_size": {"height": 70, "width": 70}, "size": {"shortest_edge": 70}},
    "LLaVA-1.5, padded": {"crop_size": {"height": 70, "width": 70}, "size": {"shortest_edge": 70}},
    "LLaVA-NeXT": {
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
        "crop_size": {"height": 56, "width": 56},
        "size": {"shortest_edge": 56},
    },
    "LLaVA-OneVision": {
        "image_grid_pinpoints": [[56 * rows, 56 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        "size": {"height": 56, "width": 56},
    },
    "SigLIP": {"size": {"height": 62, "width": 62}},
    "Gemma 3": {"size": {"height": 112, "width": 112}},
}
"""The settings by which pictures become small."""


class Wanted(NamedTuple):
    """What transformers makes of a file."""

    tokens: int
    values: np.ndarray
    """What the encoder takes."""
    grids: Mapping[str, Any]
    """What positions follow from; empty where they count tokens."""
    heard: int | None = None
    """Columns of features that are no silence behind the sound."""
    levels: Mapping[int, int] = {}
    """Bytes by how far they are from those of the processor's own resizing."""
    bounds: tuple[str, ...] = ()
    """What is known to differ, and was not compared: a name of BOUNDS."""


# --- What transformers makes of an image.


def settings_of(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of an image processor."""
    found: dict[str, Any] = files.get("preprocessor_config.json") or files["processor_config.json"]["image_processor"]
    return found


def small_model(name: str) -> dict[str, dict[str, Any]]:
    """The files of a model of pictures, with small sizes."""
    files = {file: dict(content) for file, content in PICTURE_MODELS[name].items()}
    if "preprocessor_config.json" not in files:
        files["processor_config.json"]["image_processor"] = dict(files["processor_config.json"]["image_processor"])
    settings_of(files).update(SMALL[name])
    if name == "Gemma 3":
        files["config.json"] |= {"mm_tokens_per_image": 16}
    return files


class ImageProcessor:
    """The processor of a model of pictures."""

    def __init__(self, name: str, files: dict[str, dict[str, Any]]) -> None:
        settings = settings_of(files)
        self.kind = settings["image_processor_type"].removesuffix("Fast")
        home = importlib.import_module(f"transformers.models.{HOME[self.kind]}.image_processing_pil_{HOME[self.kind]}")
        kept = {key: value for key, value in settings.items() if not key.endswith(("_type", "_class"))}
        self._settings, self._processor = settings, getattr(home, f"{self.kind}Pil")(**kept)
        self._patch = 16 if name == "Qwen3-VL" else 14

    def __call__(self, content: bytes, alpha: str) -> Wanted:
        """What it makes of a file."""
        with Image.open(io.BytesIO(content)) as opened:
            image: Any = ImageOps.exif_transpose(opened)
            image.load()
        is_deep = image.mode.startswith("I;16")
        if is_deep:
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        if alpha == "drop":  # as transformers' load_image does
            image = image.convert("RGBA").convert("RGB") if "transparency" in image.info else image.convert("RGB")
        made = self._processor(image, return_tensors="np")
        values, bounds = np.asarray(made["pixel_values"]), ("16 bits",) * is_deep
        if self.kind.startswith("Qwen"):
            grid = torch.as_tensor(np.asarray(made["image_grid_thw"]))
            return Wanted(int(grid.prod()) // 4, values, {"image_grid_thw": grid}, bounds=bounds)
        if values.ndim == 5:
            values = values[0]
        side = values.shape[-1] // self._patch
        return Wanted(self._tokens(image.height, image.width, len(values), side), values, {}, bounds=bounds)

    def _tokens(self, height: int, width: int, pictures: int, side: int) -> int:
        if self.kind == "GotOcr2ImageProcessor":
            return pictures * (side // 2) ** 2
        if self.kind == "Gemma3ImageProcessor":
            return 16
        if self.kind not in ("LlavaNextImageProcessor", "LlavaOnevisionImageProcessor"):
            return side**2
        from transformers.image_processing_utils import select_best_resolution
        from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
        from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

        points = self._settings["image_grid_pinpoints"]
        if self.kind == "LlavaNextImageProcessor":
            to_height, to_width = select_best_resolution((height, width), points)
            scales = (to_height // 56, to_width // 56)
            unpadded = LlavaNextProcessor._get_unpadded_features
            features, newlines = unpadded(None, height, width, side, side, *scales)
            return int(features + newlines + side**2)
        given = SimpleNamespace(
            image_processor=SimpleNamespace(image_grid_pinpoints=points),
            num_image_tokens=side**2,
            vision_aspect_ratio="anyres_max_9",
        )
        given._get_unpadded_features = lambda *some: LlavaOnevisionProcessor._get_unpadded_features(given, *some)
        return int(LlavaOnevisionProcessor._get_number_of_features(given, height, width, 56, 56))


# --- What transformers makes of a sound.


class SoundProcessor:
    """The extractor of a model of sounds, without torch, whose FFT differs in the last bits."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        from transformers.models.whisper import feature_extraction_whisper

        feature_extraction_whisper.is_torch_available = lambda: False
        extractor = feature_extraction_whisper.WhisperFeatureExtractor
        self._name, self._seconds = name, settings["chunk_length"]
        self._extractor = extractor(feature_size=settings["feature_size"], chunk_length=self._seconds)

    def __call__(self, content: bytes) -> Wanted:
        """What it makes of a file."""
        is_untold = not any(name in content[:4096] for name in (b"Info", b"Xing")) and is_mp3(content[:4])
        samples = whole_waveform(with_frame_count(content) if is_untold else content)
        options = {"sampling_rate": 16_000, "return_tensors": "np", "return_attention_mask": True}
        made = self._extractor(samples, **options)
        heard = int(made["attention_mask"].sum())
        is_whisper = self._name == "Whisper"
        tokens = 50 * self._seconds if is_whisper else ((heard - 1) // 2 + 1 - 2) // 2 + 1
        return Wanted(tokens, np.asarray(made["input_features"]), {}, heard, bounds=("delay",) * is_untold)


# --- What transformers makes of a video.


class VideoProcessor:
    """The processor of Qwen2.5-VL's videos, whose module would need torchvision, by its functions."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._functions = functions_of_processor("sample_frames", "smart_resize", "patchify")

    def __call__(self, content: bytes) -> Wanted:
        """What it makes of a file."""
        from av.video.reformatter import Interpolation as Way

        settings, functions = self._settings, self._functions
        frames, _ = decoded(content)
        seconds, rate = length_of(content)
        turned = round(frames[0].rotation) % 180 != 0
        sides = (frames[0].width, frames[0].height) if turned else (frames[0].height, frames[0].width)
        patch, merge, temporal = (settings[key] for key in ("patch_size", "merge_size", "temporal_patch_size"))
        bounds = settings["size"]
        height, width = functions["smart_resize"](
            *sides, patch * merge, bounds["shortest_edge"], bounds["longest_edge"]
        )
        milliseconds = max(1, round(seconds * 1000))
        exact, numbers = self._seen(len(frames), len(frames) * 1000 / milliseconds)
        way = Way.BICUBIC | Way.ACCURATE_RND | Way.BITEXACT | Way.FULL_CHR_H_INT
        pictures, levels = [], Counter[int]()
        for number in exact:
            frame, turns = frames[number], round(frames[number].rotation) // 90
            to = {"width": height, "height": width} if turned else {"width": width, "height": height}
            scaled = np.rot90(frame.reformat(**to, format="rgb24", interpolation=way).to_ndarray(), turns)
            pictures.append(scaled)
            whole = torch.tensor(np.rot90(frame.to_ndarray(format="rgb24"), turns).copy()).permute(2, 0, 1)[None]
            theirs = torch.nn.functional.interpolate(whole, (height, width), mode="bicubic", antialias=True)
            apart = np.abs(theirs[0].permute(1, 2, 0).numpy().astype(int) - scaled)
            levels.update(dict(zip(*(one.tolist() for one in np.unique(apart, return_counts=True)), strict=True)))
        while len(pictures) % temporal:
            pictures.append(pictures[-1])
        mean, deviation = (torch.tensor(settings[key]) * 255.0 for key in ("image_mean", "image_std"))
        held = torch.tensor(np.stack(pictures)).permute(0, 3, 1, 2).float()
        held = (held - mean[:, None, None]) / deviation[:, None, None]
        values = functions["patchify"](SimpleNamespace(), held[None], patch, merge, temporal)[0].reshape(
            -1, 3 * temporal * patch**2
        )
        grid = torch.tensor([[len(pictures) // temporal, height // patch, width // patch]])
        step = milliseconds / 1000 / int(grid[0, 0]) * (1 + 1e-12)  # so that no whole number is cut for its last bit
        grids = {"video_grid_thw": grid, "second_per_grid_ts": [step]}
        bounds = ("frames",) * (numbers != exact)
        bounds += ("length",) * (len(self._seen(len(frames), rate)[0]) != len(exact))
        tokens = int(grid.prod()) // merge**2
        return Wanted(tokens, values.numpy(), grids, None, levels, bounds)

    def _seen(self, frames: int, rate: float) -> tuple[list[int], list[int]]:
        """The numbers of the frames, by whole steps; and as steps of 32 bits give them, which may be one more."""
        settings = self._settings
        given = SimpleNamespace(num_frames=None, fps=settings["fps"], temporal_patch_size=2)
        given.min_frames, given.max_frames = settings["min_frames"], settings["max_frames"]
        if frames < 2:
            return [0], [0]
        metadata = SimpleNamespace(total_num_frames=frames, fps=rate)
        numbers = self._functions["sample_frames"](given, metadata).tolist()
        count = len(numbers) // 2 * 2
        return [number * frames // count for number in range(count)], numbers


def length_of(content: bytes) -> tuple[float, float]:
    """Seconds from the first frame to the end of the last one, by the times of packets; and frames a second as libav
    says it, which transformers takes."""
    import av

    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        has_tables = "mov" in container.format.name and stream.frames > 0
        times = sorted(packet.dts if has_tables else packet.pts for packet in packets)
        step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0
        seconds = float((times[-1] - times[0] + step) * stream.time_base) or 0.04
        return seconds, float(stream.average_rate or 1 / seconds)


# --- Both, of a source.


@functools.cache
def rope_index(with_seconds: bool) -> Any:
    """`get_rope_index` of Qwen2-VL, or of Qwen2.5-VL."""
    name = "Qwen2_5_VL" if with_seconds else "Qwen2VL"
    text = {"vocab_size": 512, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    vision: dict[str, Any] = {"depth": 1, "patch_size": 14, "num_heads": 1, "hidden_size": 8}
    vision |= {"tokens_per_second": SECONDS} if with_seconds else {"embed_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, **QWEN_IDS
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model.model.get_rope_index


def positions_of(ids: Sequence[int], wanted: Wanted, *, in_32_bits: bool = False) -> torch.Tensor:
    """[3, tokens], or [tokens] where they count tokens."""
    if not wanted.grids:
        return torch.arange(len(ids))
    is_video = "video_grid_thw" in wanted.grids
    tokens = torch.tensor([ids])
    of_type = (2 if is_video else 1) * (tokens == ITEM).int()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if in_32_bits else torch.float64)
    try:
        found, _ = rope_index(is_video)(tokens, of_type, **wanted.grids)
    finally:
        torch.set_default_dtype(before)
    return found[:, 0]


def write_source(folder: Path, kind: str, contents: Sequence[bytes], files: Any, words: Mapping[str, Any]) -> Path:
    """A recipe of a source of files of one kind, indexed."""
    write_model(folder / "model", files)
    texts = [f"{row}<item>{row}." for row in range(len(contents))]
    items = pa.array([[content] for content in contents], pa.list_(pa.binary()))
    pq.write_table(pa.table({"text": texts, "items": items}), folder / "rows.parquet")
    told = {"processor": "model", "column": "items", "marker": "<item>", "token": ITEM, "before": BEFORE}
    told |= {"after": AFTER, **words}
    held = {"images": told} if kind == "image" else {"items": {kind: told}}
    sizes = "positions" if kind == "sound" else "patches"
    recipe = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": len(contents), "length": LENGTH},
        "packing": {"method": "pad", "overflow": "error"},
        "sources": {"rows": {"path": "rows.parquet", "text": "text", "tokenizer": "bytes", **held}},
        "mixture": {"rows": 1},
        "modules": {"tower": {"items": kind, "sizes": sizes}},
        "loaders": {"where": "in_process"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    index_recipe(load_recipe(path), folder)
    return path


def compared(recipe: Path, kind: str, wanted: Sequence[Wanted], form: Sequence[str]) -> dict[str, Any]:
    """What a step of all files has, against what transformers makes of them."""
    with torchmix.build_loader(str(recipe), micro_batch_size=1, max_steps=1) as loader:
        step = list(loader)
    batch, tower = step[0].modules["tower"], torchmix.open_tower(str(recipe), "tower")
    made = tower(batch)
    counts = batch.units if len(made) == int(batch.units.sum()) else batch.segments
    values = dict(zip(batch.arrays["row"].tolist(), torch.split(made, counts.tolist()), strict=True))
    heard = dict(zip(batch.arrays["row"].tolist(), batch.arrays.get("feature_lengths", counts).tolist(), strict=True))
    differing, bounds, rows = list[str](), list[str](), set[int]()
    for microbatch in step:
        [count] = [length for length in microbatch.cu_seqlens.diff().tolist() if length]
        ids = microbatch.tokens[0, :count].tolist()
        row = int(bytes(ids[: ids.index(BEFORE)]).decode())
        mine, rows = wanted[row], rows | {row}
        name = list(str(row).encode())
        should = [*name, BEFORE, *[ITEM] * mine.tokens, AFTER, *name, ord("."), END]
        if ids != should:
            differing.append(f"{form[row]}: tokens")
            continue
        options = {"tokens_per_second": SECONDS} if kind == "video" else {}
        positions = microbatch.position_ids[0, :count]
        if mine.grids:
            positions = microbatch.mrope_position_ids("tower", past_time=False, **options)[:, 0, :count]
        if not torch.equal(positions, positions_of(ids, mine)):
            differing.append(f"{form[row]}: positions")
        bounds += mine.bounds
        if kind == "video" and not torch.equal(positions, positions_of(ids, mine, in_32_bits=True)):
            bounds.append("seconds")
        mask = [token != ITEM for token in ids[1:]] + [False]
        if microbatch.loss_mask[0, :count].bool().tolist() != mask or microbatch.loss_mask[0, count:].any():
            differing.append(f"{form[row]}: loss mask")
        if mine.heard is not None and heard[row] != [mine.heard]:
            differing.append(f"{form[row]}: heard")
        found, should_be = seen_part(values[row].numpy(), kind), seen_part(mine.values, kind)
        if found.shape != should_be.shape or not np.array_equal(found, should_be):
            differing.append(f"{form[row]}: values")
    assert rows == set(range(len(wanted))), "each file comes once"
    return {"different": len(differing), "what": differing[:5], "bounds": dict(sorted(Counter(bounds).items()))}


def seen_part(values: np.ndarray, kind: str) -> np.ndarray:
    """Without pixels behind whole patches, which the encoder of a model does not see."""
    if kind == "image" and values.ndim == 4:
        side = values.shape[-1] // 14 * 14
        return values[:, :, :side, :side]
    return values


def try_batch(seed: int, number: int, *, files: int = FILES) -> dict[str, Any]:
    """A source of files of one kind."""
    rng, kind = np.random.default_rng([seed, number]), KINDS[number % len(KINDS)]
    drawn = [DRAW[kind](rng) for _ in range(files)]
    words: dict[str, Any] = {}
    if kind == "image":
        model = list(PICTURE_MODELS)[int(rng.integers(len(PICTURE_MODELS)))]
        of_model, alpha = small_model(model), str(rng.choice(["white", "drop"]))
        words, processor = {"alpha": alpha}, ImageProcessor(model, of_model)
        wanted = [processor(content, alpha) for _, content in drawn]
    elif kind == "sound":
        model = list(SOUND_MODELS)[int(rng.integers(len(SOUND_MODELS)))]
        of_model = {name: dict(content) for name, content in SOUND_MODELS[model].items()}
        settings = of_model["preprocessor_config.json"]
        settings |= {"chunk_length": int(rng.integers(1, 4)), "feature_size": int(rng.choice([80, 128]))}
        wanted = [SoundProcessor(model, settings)(content) for _, content in drawn]
    else:
        model = "Qwen2.5-VL"
        of_model = {name: dict(content) for name, content in VIDEO_MODELS[model].items()}
        settings = of_model["video_preprocessor_config.json"]
        settings["size"] = {"shortest_edge": 784, "longest_edge": 784 * int(rng.integers(2, 8))}
        settings["fps"] = float(rng.choice([1, 2, 4, 7.5]))
        wanted = [VideoProcessor(settings)(content) for _, content in drawn]
    with tempfile.TemporaryDirectory() as held:
        recipe = write_source(Path(held), kind, [content for _, content in drawn], of_model, words)
        found = compared(recipe, kind, wanted, [form for form, _ in drawn])
    levels = sum((Counter(dict(one.levels)) for one in wanted), Counter[int]())
    values = sum(math.prod(one.values.shape) for one in wanted)
    told = {"kind": kind, "model": model, "files": files, "values": values, **found}
    forms = dict(sorted(Counter(form for form, _ in drawn).items()))
    seen = {"levels": {str(key): levels[key] for key in sorted(levels)}} if kind == "video" else {}
    return {**told, "forms": forms, **seen}


def main() -> None:
    """Run from the command line."""
    asked = trial_parser(__doc__, count=1000, out="drawn_files.json").parse_args()
    if importlib.util.find_spec("transformers") is None:
        print(NOT_INSTALLED)
        return
    found = continued(asked, try_batch).values()
    for kind in DRAW:
        mine = [one for one in found if one["kind"] == kind]
        print(kind, {key: sum(one[key] for one in mine) for key in ("files", "values", "different")})
        for key in ("bounds", "levels"):
            counts = sum((Counter(one.get(key, {})) for one in mine), Counter[str]())
            print(f"  {key}", dict(counts))


if __name__ == "__main__":
    main()
