"""Models of transformers of tiny configurations on torchmix's batches: their logits are those of their own processors.

Everything is float64 with eager attention. A document a sample, inputs are equal and logits too, as far as padding
alters the order of sums; packed, within 1e-9.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import torchmix
from tests.support.deadlines import LONG_S
from tests.support.example import EXAMPLE
from tests.support.model_folders import PICTURE_MODELS, SOUND_MODELS, VIDEO_MODELS, write_model
from tests.support.processes import Processes
from tests.support.vocabularies import END, make_tokenizer
from torchmix.constructor.fields import Microbatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel import HeldRows, Topology, place_rows, route
from torchmix.recipe.load import load_recipe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
IMAGE, BEGIN, STOP, VIDEO, SOUND = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|AUDIO|>"
SPECIALS = (END, IMAGE, BEGIN, STOP, VIDEO, SOUND)
ID = {name: number for number, name in enumerate(SPECIALS)}
QWEN = {
    "image_token_id": ID[IMAGE],
    "video_token_id": ID[VIDEO],
    "vision_start_token_id": ID[BEGIN],
    "vision_end_token_id": ID[STOP],
}
LENGTH = 256
TEXT = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def example(name: str) -> ModuleType:
    """A module of examples/models."""
    spec = importlib.util.spec_from_file_location(f"models_{name}", EXAMPLE.parent / "models" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DoubleTorch:
    """torch for a module of a model that asks for float32 inside, in norms and softmax: it gets float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def all_is_float64(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Models compute in float64 throughout."""
    if "learns" not in request.node.name:
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen2_audio", "qwen2"):
            home = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            monkeypatch.setattr(home, "torch", DoubleTorch())


def words(rng: np.random.Generator, count: int) -> str:
    """A text."""
    return " ".join(rng.choice(["the", "quick", "brown", "fox", "alpha", "12", "1234", "jumps"], count))


def write_project(
    folder: Path, rows: list[tuple[str, list[bytes]]], source: dict[str, Any], module: dict[str, Any], method: str
) -> str:
    """A recipe of rows with texts and items, indexed."""
    table = {"text": [text for text, _ in rows], "items": [items for _, items in rows]}
    pq.write_table(
        pa.table(table, schema=pa.schema([("text", pa.string()), ("items", pa.list_(pa.binary()))])),
        folder / "rows.parquet",
    )
    make_tokenizer(folder / "tokenizer.json", specials=SPECIALS)
    recipe = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": len(rows) if method == "pad" else 2, "length": LENGTH},
        "sources": {
            "rows": {"path": "rows.parquet", "text": "text", "tokenizer": "tokenizer.json", "end_id": END, **source}
        },
        "mixture": {"rows": 1},
        "packing": {"method": method},
        "modules": {"tower": module},
        "loaders": {"where": "in_process"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    index_recipe(load_recipe(path), folder)
    return str(path)


def documents(microbatch: Microbatch) -> Iterator[tuple[int, slice]]:
    """Sample and place of each document of a microbatch."""
    starts, lengths = microbatch.cu_seqlens_padded.tolist(), microbatch.cu_seqlens.diff().tolist()
    for start, length in zip(starts, lengths, strict=False):
        if length:
            yield start // LENGTH, slice(start % LENGTH, start % LENGTH + length)


def png(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A picture of noise."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def qwen2_vl() -> Any:
    """Qwen2-VL with two small layers."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(1)
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    config = Qwen2VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision, **QWEN)
    return Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="eager")


def picture_rows() -> list[tuple[str, list[bytes]]]:
    """Texts with none, one or several pictures, also one behind the other."""
    rng = np.random.default_rng(2)
    rows: list[tuple[str, list[bytes]]] = []
    for marks in ("", "<image>", "a <image> b", "<image> x <image>", "y <image> z <image> w <image>", "", "<image>"):
        text = f"{words(rng, 3)} {marks} {words(rng, int(rng.integers(1, 9)))}"
        count = marks.count("<image>")
        rows.append((text, [png(rng, *(int(side) for side in rng.integers(20, 150, 2))) for _ in range(count)]))
    return rows


def picture_project(folder: Path, method: str) -> str:
    """A recipe of these, by the folder of a model."""
    files = {name: dict(content) for name, content in PICTURE_MODELS["Qwen2-VL"].items()}
    files["preprocessor_config.json"] |= {"min_pixels": 784, "max_pixels": 784 * 12}
    files["config.json"] |= QWEN
    write_model(folder / "model", files)
    images = {"processor": "model", "column": "items"}
    return write_project(folder, picture_rows(), {"images": images}, {"items": "image", "sizes": "patches"}, method)


@pytest.mark.parametrize("method, tolerance", [("pad", 1e-12), ("best_fit", 1e-9)])
def test_qwen2_vl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, tolerance: float) -> None:
    from PIL import Image
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    recipe, model, module = picture_project(tmp_path, method), qwen2_vl().double().eval(), example("qwen2_vl")
    # Without torchvision it has no class of processors of videos to compare None with.
    monkeypatch.setattr(Qwen2VLProcessor, "check_argument_for_proper_class", lambda *given: None)
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 784 * 12}),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=END, pad_token=END
        ),
        video_processor=None,
    )
    theirs: dict[tuple[int, ...], tuple[int, Any]] = {}
    for row, (text, pictures) in enumerate(picture_rows()):
        said = text.replace("<image>", f"{BEGIN}{IMAGE}{STOP}") + END
        images = [Image.open(io.BytesIO(one)) for one in pictures] or None
        given = processor(text=[said], images=images, return_tensors="pt")
        theirs[tuple(given["input_ids"][0].tolist())] = row, given
    tower, seen = torchmix.open_tower(recipe, "tower"), 0
    with (
        torch.no_grad(),
        torchmix.build_loader(recipe, micro_batch_size=1, max_steps=1 if method == "pad" else 3) as loader,
    ):
        for step in module.steps_of(loader):
            batch = step[0].modules["tower"]
            received = route(module.encoded(model, batch, tower), batch.routes)
            pixels = torch.split(tower(batch), batch.units.tolist())
            for microbatch in step:
                rows = {"tower": (received, batch.routes)}
                logits = module.logits_of(model, microbatch, rows)
                positions = microbatch.mrope_position_ids("tower")
                for sample, place in documents(microbatch):
                    row, given = theirs[tuple(microbatch.tokens[sample, place].tolist())]
                    if "image_grid_thw" in given:
                        wanted, _ = model.model.get_rope_index(
                            given["input_ids"], given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
                        )
                        assert torch.equal(positions[:, sample, place], wanted[:, 0])
                        mine = [one for one, r in zip(pixels, batch.arrays["row"].tolist(), strict=True) if r == row]
                        assert torch.equal(torch.cat(mine[: len(given["image_grid_thw"])]), given["pixel_values"])
                    found, own = logits[sample, place], model(**given, use_cache=False).logits[0]
                    assert found.dtype == torch.float64
                    torch.testing.assert_close(found, own, rtol=0, atol=tolerance)
                    seen += 1
    assert seen >= len(theirs)


def test_a_step_of_training_learns(tmp_path: Path) -> None:
    recipe, module = picture_project(tmp_path, "best_fit"), example("qwen2_vl")
    losses = module.train(qwen2_vl(), recipe, Topology(), steps=12, rate=3e-3)
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]


def test_the_code_of_the_page_learns_as_the_example_does(tmp_path: Path) -> None:
    """The functions of docs/models.md and its step of training run as they stand, on the first step."""
    page = (EXAMPLE.parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    parts = re.findall(r"^\n((?: {4}.+\n|\n(?= {4}))+)", page, re.MULTILINE)
    code = [textwrap.dedent(part).replace('"vision"', '"tower"') for part in parts if "=" in part]
    assert [part.split("(")[0] for part in code] == [
        "def encoded",
        "def logits_of",
        "def loss_of",
        'batch = step[0].modules["tower"]\nheld = HeldRows',
    ]
    recipe, module, model = picture_project(tmp_path, "best_fit"), example("qwen2_vl"), qwen2_vl()
    names: dict[str, Any] = {"torch": torch, "place_rows": place_rows, "route": route, "HeldRows": HeldRows}
    for part in code[:3]:
        exec(part, names)
    found, own = [], names["loss_of"]
    names["loss_of"] = lambda *given: found.append(own(*given)) or found[-1]  # type: ignore[func-returns-value]
    names |= {"model": model, "tower": torchmix.open_tower(recipe, "tower")}
    with torchmix.build_loader(recipe, micro_batch_size=1, max_steps=1) as loader:
        for names["step"] in module.steps_of(loader):
            exec(code[3], names)
    assert all(weight.grad is not None and weight.grad.any() for weight in model.model.visual.parameters())
    [loss] = module.train(qwen2_vl(), recipe, Topology(), steps=1)
    assert sum(each.item() for each in found) == pytest.approx(loss, rel=1e-6)


@pytest.mark.system
def test_qwen2_vl_learns_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    recipe, losses = picture_project(tmp_path, "best_fit"), []
    qwen2_vl().save_pretrained(tmp_path / "tiny")
    told = (str(EXAMPLE.parent / "models" / "qwen2_vl.py"), recipe, str(tmp_path / "tiny"), "--steps", "4")
    for ranks in (1, 2):
        with Processes(tmp_path) as processes:
            started = processes.start_ranks(*told, world_size=ranks, after=())
            processes.wait_all(started, deadline_s=LONG_S)
            losses.append([float(loss) for loss in re.findall(r"loss (\S+)", started[0].stdout())])
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_qwen2_5_vl_with_seconds_of_videos(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from tests.support.videos import FORMS, drawn_frames, video_of

    rng = np.random.default_rng(4)
    files = {name: dict(content) for name, content in VIDEO_MODELS["Qwen2.5-VL"].items()}
    files["video_preprocessor_config.json"]["size"] = {"shortest_edge": 784, "longest_edge": 784 * 6}
    files["config.json"] |= QWEN
    write_model(tmp_path / "model", files)
    rows = []
    for frames in (9, 40, 61):
        content = video_of(drawn_frames(rng, frames, 64, 48), FORMS[0], rate=8)
        rows.append((f"{words(rng, 2)} <video> {words(rng, 5)}", [content]))
    source = {"items": {"video": {"processor": "model", "column": "items"}}}
    recipe = write_project(tmp_path, rows, source, {"items": "video", "sizes": "patches"}, "pad")
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 4}
    torch.manual_seed(2)
    config = Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision, **QWEN)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager").double().eval()
    module, tower, seen = example("qwen2_vl"), torchmix.open_tower(recipe, "tower"), 0
    with torch.no_grad(), torchmix.build_loader(recipe, micro_batch_size=1, max_steps=1) as loader:
        for step in module.steps_of(loader):
            batch = step[0].modules["tower"]
            received = route(module.encoded(model, batch, tower), batch.routes)
            pixels = torch.split(tower(batch), batch.units.tolist())
            for microbatch in step:
                logits = module.logits_of(model, microbatch, {"tower": (received, batch.routes)}, tokens_per_second=4)
                [(sample, place)] = documents(microbatch)
                ids = microbatch.tokens[sample, place][None]
                [item] = [
                    n
                    for n, grid in enumerate(batch.arrays["video_grid_thw"].tolist())
                    if np.prod(grid) // 4 == int((ids == ID[VIDEO]).sum())
                ]
                grid, lasts = batch.arrays["video_grid_thw"][item].long(), int(batch.arrays["milliseconds"][item])
                given = {
                    "input_ids": ids,
                    "pixel_values_videos": pixels[item],
                    "video_grid_thw": grid[None],
                    "mm_token_type_ids": 2 * (ids == ID[VIDEO]).int(),
                    "second_per_grid_ts": [lasts / 1000 / int(grid[0])],
                }
                own = model(**given, use_cache=False).logits[0]
                torch.testing.assert_close(logits[sample, place], own, rtol=0, atol=1e-12)
                positions = microbatch.mrope_position_ids("tower", tokens_per_second=4, past_time=False)
                assert positions[0].max() > int(grid[0]), "seconds count more than patches in time"
                seen += 1
    assert seen == len(rows)


@pytest.mark.parametrize("method, tolerance", [("pad", 1e-12), ("best_fit", 1e-9)])
def test_qwen2_audio(tmp_path: Path, method: str, tolerance: float) -> None:
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    from tests.support.sounds import drawn_samples, sound_of

    rng, mels = np.random.default_rng(5), 16
    files = {name: dict(content) for name, content in SOUND_MODELS["Qwen2-Audio"].items()}
    files["preprocessor_config.json"]["feature_size"] = mels
    files["config.json"]["audio_token_index"] = ID[SOUND]
    write_model(tmp_path / "model", files)
    rows: list[tuple[str, list[bytes]]] = []
    for counts in ((5_000,), (), (21_007, 9_100), (40_000,)):
        sounds = [sound_of(drawn_samples(rng, count, 16_000), 16_000, ("WAV", "PCM_16")) for count in counts]
        rows.append((f"{words(rng, 3)} {'<audio> and ' * len(counts)}{words(rng, 4)}", sounds))
    source = {"items": {"sound": {"processor": "model", "column": "items"}}}
    recipe = write_project(tmp_path, rows, source, {"items": "sound", "sizes": "positions"}, method)
    audio = {
        "num_mel_bins": mels,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 16,
    }
    torch.manual_seed(3)
    text = {**TEXT, "model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=ID[SOUND])
    model = Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation="eager").double().eval()
    extractor = WhisperFeatureExtractor(feature_size=mels)
    theirs: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for said, sounds in rows:
        ids: list[int] = []
        parts = said.split("<audio>")
        chunks, masks = [], []
        for number, part in enumerate(parts):
            ids += tokenizer.encode(part, add_special_tokens=False).ids
            if number < len(sounds):
                import soundfile

                samples, _ = soundfile.read(io.BytesIO(sounds[number]), dtype="float32")
                columns = -(-len(samples) // 160)
                ids += [ID[SOUND]] * (((columns - 1) // 2 + 1 - 2) // 2 + 1)
                padded = np.pad(samples, (0, 480_000 - len(samples)))
                chunks.append(extractor._np_extract_fbank_features(padded[None], device="cpu")[0])
                masks.append(np.arange(3_000) < columns)
        given = {"input_ids": torch.tensor([[*ids, ID[END]]])}
        if chunks:
            given |= {
                "input_features": torch.tensor(np.array(chunks)),
                "feature_attention_mask": torch.tensor(np.array(masks)).long(),
            }
        theirs[(*ids, ID[END])] = given
    module, tower, seen = example("qwen2_audio"), torchmix.open_tower(recipe, "tower"), 0
    steps_of = example("qwen2_vl").steps_of
    with (
        torch.no_grad(),
        torchmix.build_loader(recipe, micro_batch_size=1, max_steps=1 if method == "pad" else 2) as loader,
    ):
        for step in steps_of(loader):
            batch = step[0].modules["tower"]
            received = route(module.encoded(model, batch, tower), batch.routes)
            for microbatch in step:
                logits = module.logits_of(model, microbatch, received, batch.routes)
                for sample, place in documents(microbatch):
                    given = theirs[tuple(microbatch.tokens[sample, place].tolist())]
                    own = model(**given, use_cache=False).logits[0]
                    torch.testing.assert_close(logits[sample, place], own, rtol=0, atol=tolerance)
                    seen += 1
    assert seen >= len(theirs)
