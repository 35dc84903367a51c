"""What a token of each kind costs a loader: texts, images, videos and sounds, by the measurement of `torchmix profile`.

    python benchmarks/modality_cost.py [--seconds 3]

Photographs are JPEG of smooth noise, about 640 x 480, by Qwen2-VL's rule; clips are 10 s of H.264, 640 x 360 at 24
frames a second with keyframes as x264 sets them, seen at 2 frames a second; speech is 20 s of tones and noise, as MP3
and as FLAC at 44,100 samples a second, by Whisper's rule, where 30 s are 1,500 tokens, and by Qwen2-Audio's, where they
are 750. Texts are tokenized with a vocabulary of 32,000 that is trained here; ids are read as they are. Times of texts
are those of processors, of all threads; those of items are of the one thread that decodes, without waiting for a
processor; both are means of what `--seconds` allow.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from image_loading import make_files

from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import check_recipe
from torchmix.service.scale.measure import measure_source

TOKEN = "<item>"
SOUND = {"column": "item", "token": TOKEN, "mels": 128}
ITEMS: dict[str, dict[str, Any]] = {
    "photographs": {"images": {"column": "item", "token": TOKEN, "patch": 14, "merge": 2}},
    "clips": {"items": {"video": {"column": "item", "token": TOKEN, "rate": 2}}},
    "MP3, Whisper's rule": {"items": {"sound": {**SOUND, "rule": "whisper"}}},
    "FLAC, Whisper's rule": {"items": {"sound": {**SOUND, "rule": "whisper"}}},
    "FLAC, Qwen2-Audio's rule": {"items": {"sound": {**SOUND, "rule": "qwen2_audio"}}},
}
WORDS = 30_000


def make_texts(count: int) -> list[str]:
    """Texts of words whose frequencies fall as Zipf's, each of a few hundred words."""
    draw = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choices(letters, range(26, 0, -1), k=draw.randint(2, 10))) for _ in range(WORDS)]
    weights = [1 / (rank + 2) for rank in range(WORDS)]
    return [" ".join(draw.choices(words, weights, k=draw.randint(100, 600))) for _ in range(count)]


def train_vocabulary(path: Path, texts: list[str]) -> None:
    """A byte-level BPE of 32,000 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=32_000, special_tokens=[TOKEN], show_progress=False)
    )
    tokenizer.save(str(path))


def make_clip(rng: np.random.Generator, seconds: int = 10) -> bytes:
    """Noise over a gradient that moves."""
    import av

    file, width, height = io.BytesIO(), 640, 360
    noise = rng.normal(0, 12, (height, width, 3))
    base = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "veryfast"}
        for number in range(24 * seconds):
            pixels = np.roll(base, 3 * number, 1) + np.roll(noise, number, 0)
            frame = av.VideoFrame.from_ndarray(np.clip(pixels, 0, 255).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def make_speech(rng: np.random.Generator, form: str, seconds: int = 20) -> bytes:
    """Tones that change, and noise, in two channels."""
    import soundfile

    rate = 44_100
    time = np.arange(seconds * rate)[:, None] / rate
    pitch = np.repeat(rng.uniform(90, 400, seconds * 4), rate // 4)[:, None]
    samples = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch, axis=0) / rate) + rng.normal(0, 0.02, (len(time), 2))
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), rate, format=form)
    return file.getvalue()


def write_sources(folder: Path) -> dict[str, dict[str, Any]]:
    """Files of all sources; what a recipe says of each."""
    rng = np.random.default_rng(1)
    texts = make_texts(1500)
    train_vocabulary(folder / "tokenizer.json", texts)
    contents = {
        "photographs": make_files(60),
        "clips": [make_clip(rng) for _ in range(4)],
        "MP3, Whisper's rule": [make_speech(rng, "MP3") for _ in range(12)],
        "FLAC, Whisper's rule": [make_speech(rng, "FLAC") for _ in range(12)],
    }
    contents["FLAC, Qwen2-Audio's rule"] = contents["FLAC, Whisper's rule"]
    text = {"text": "text", "tokenizer": "tokenizer.json"}
    sources: dict[str, dict[str, Any]] = {"texts": text, "ids": {"tokens": "ids"}}
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet")
    ids = [rng.integers(0, 32_000, 800).astype(np.int32) for _ in range(1500)]
    pq.write_table(pa.table({"ids": ids}), folder / "ids.parquet")
    for name, items in contents.items():
        rows = pa.table({"text": ["what is this"] * len(items), "item": items})
        pq.write_table(rows, folder / f"{name}.parquet", row_group_size=4)
        sources[name] = {**text, **ITEMS[name]}
    return {name: {"path": f"{name}.parquet", **words} for name, words in sources.items()}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each source, and for its items")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        sources = write_sources(folder)
        told = {"version": 1, "seed": 1, "batch": {"samples": 8, "length": 16_384}, "vocab_size": 50_000}
        recipe = check_recipe({**told, "sources": sources, "mixture": dict.fromkeys(sources, 1)})
        catalog = index_recipe(recipe, folder)
        found = {name: measure_source(catalog, folder, name, most_s=asked.seconds) for name in sources}
    of_text = found["texts"].cpu_ns / found["texts"].tokens
    lines = {name: (one.tokens, one.cpu_ns, None) for name, one in found.items() if not one.items}
    for name, one in found.items():
        for item in one.items.values():
            lines[name] = item.tokens, item.read_ns + item.decode_ns, item
    [image] = found["photographs"].items.values()
    of_image = (image.read_ns + image.decode_ns) / image.tokens
    print("| source | tokens of an item | read, ms | decode, ms | us a token | over images | over texts |")
    print("|---|---|---|---|---|---|---|")
    for name, (tokens, taken, item) in lines.items():
        cells = ["", "", ""]
        if item is not None:
            times = (item.read_ns / item.items / 1e6, item.decode_ns / item.items / 1e6)
            cells = [f"{item.tokens / item.items:,.0f}", *(f"{one:,.2f}" for one in times)]
        of_token = taken / tokens
        over = f"{of_token / of_image:,.3g} | {of_token / of_text:,.3g}"
        print(f"| {name} | {' | '.join(cells)} | {of_token / 1000:,.3g} | {over} |")


if __name__ == "__main__":
    main()
