"""Megatron's vision scripts: what they are given becomes the plan's own sequences, with the pixels of its images."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import torchmix
from tests.support.fake_megatron import Lines, default_args, get_batch, installed
from tests.support.image_oracle import write_project
from tests.support.image_sources import TOKEN
from tests.support.image_world import steps_of_ranks
from tests.support.provider_jobs import job_of_one_rank
from torchmix import megatron_adapter as tmx
from torchmix.constructor.fields import Microbatch, ModuleBatch
from torchmix.errors import RecipeError
from torchmix.megatron_adapter import vision
from torchmix.megatron_adapter.batch import Needs, fields_of
from torchmix.megatron_adapter.microbatches import item_of
from torchmix.megatron_adapter.vision import images_of
from torchmix.parallel.routes import Routes
from torchmix.parallel.topology import Topology

IMAGE, EMBEDDINGS, LENGTH, SAMPLES = -200, 16, 192, 8
MODULE = {"items": "image", "sizes": "patches", "axis": "DP", "near_text": "always"}
PICTURES = {"merge": 1, "tower": "pictures", "mean": [0.5, 0.4, 0.3], "deviation": [0.2, 0.3, 0.4]}
SIZES = {"img_h": 16, "img_w": 16, "patch_dim": 4, "encoder_seq_length": EMBEDDINGS}


def pretrain_vlm(data_iterator: Any, model: Any) -> Any:
    """As in each version from core 0.16 to main."""
    tokens, position_ids, labels, images, loss_mask, attention_mask, packed_seq_params = get_batch(data_iterator)
    return model(images, tokens, position_ids, attention_mask, labels, loss_mask, packed_seq_params)


def multimodal(data_iterator: Any, model: Any) -> Any:
    """As in examples/multimodal/train.py."""
    (
        tokens,
        labels,
        loss_mask,
        attention_mask,
        position_ids,
        images,
        num_image_tiles,
        packed_seq_params,
    ) = get_batch(data_iterator, model.image_token_index, model.img_seq_len)
    return model(images, tokens, position_ids, attention_mask, labels, loss_mask, num_image_tiles, packed_seq_params)


def mimo(data_iterator: Any, model: Any) -> Any:
    """As in examples/mimo/train.py, in each version from core 0.16 to main."""
    data_batch = get_batch(data_iterator)
    output_tensor, loss_mask = model(**data_batch)
    return output_tensor, loss_mask


def model_provider(pre_process: bool = True, image_special_token_id: int = 32000) -> None:
    """As there."""


FIELDS = {
    pretrain_vlm: "tokens position_ids labels images loss_mask attention_mask packed_seq_params",
    multimodal: "tokens labels loss_mask attention_mask position_ids images num_image_tiles packed_seq_params",
}


def script_of(forward_step: Any, **more: Any) -> dict[str, Any]:
    return {"get_batch": get_batch, "forward_step": forward_step, "DEFAULT_IMAGE_TOKEN_INDEX": IMAGE, **more}


def args_of(recipe: Path, **changes: Any) -> SimpleNamespace:
    """Megatron's arguments as they are when the script has made its model."""
    given = {"data_recipe": str(recipe), "global_batch_size": SAMPLES, "seq_length": EMBEDDINGS, **SIZES, **changes}
    return default_args(decoder_seq_length=LENGTH, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes of tiles, in parquet files and paths of files: `document.yaml`, `none.yaml`, by their boundaries."""
    folder = tmp_path_factory.mktemp("vision")
    write_project(folder, ["lists", "paths"], rule="tiles", modules={"vision": MODULE})
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["batch"] = {"samples": SAMPLES, "length": LENGTH}
    for source in recipe["sources"].values():
        source["images"] |= PICTURES
    for boundaries in ("document", "none"):
        recipe["packing"]["boundaries"] = boundaries
        (folder / f"{boundaries}.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def one_rank() -> Iterator[None]:
    with job_of_one_rank():
        yield


def planned(recipe: Path, steps: int, micro_batch_size: int) -> list[Microbatch]:
    with torchmix.build_loader(
        recipe, max_steps=steps, micro_batch_size=micro_batch_size, loaders="in_process"
    ) as loader:
        return list(loader)


def given(args: SimpleNamespace, forward_step: Any, microbatches: int, **more: Any) -> list[dict[str, Any]]:
    """What a script gets of its first microbatches."""
    script = script_of(forward_step, **more)
    own = (IMAGE, EMBEDDINGS) if forward_step is multimodal else ()
    found = []
    with installed(args, core=True):
        get_batch = tmx.get_batch(script)
        train, _, _ = tmx.provider([0, 0, 0])
        for number in range(microbatches):
            values = get_batch(train, *own)
            is_dict = isinstance(values, dict)
            found.append(values if is_dict else dict(zip(FIELDS[forward_step].split(), values, strict=True)))
            if (number + 1) * args.micro_batch_size % SAMPLES == 0:
                args.consumed_train_samples += SAMPLES
        tmx.close()
    return found


def as_model_expands(fields: dict[str, Any], width: int) -> dict[str, list[list[int]]]:
    """By loops, what LLaVAModel makes of a batch, cut at `width`; image tokens have id -200 at each embedding. Also
    where each token begins there."""
    found: dict[str, list[list[int]]] = {"tokens": [], "loss_mask": [], "places": []}
    pictures = iter(fields.get("num_image_tiles", torch.ones(len(fields["images"]), dtype=torch.int32)).tolist())
    for tokens, mask in zip(fields["tokens"].tolist(), fields["loss_mask"].tolist(), strict=True):
        ids: list[int] = []
        counts: list[int] = []
        places: list[int] = []
        for token, count in zip(tokens, mask, strict=True):
            times = next(pictures) * EMBEDDINGS if token == IMAGE else 1
            assert token != IMAGE or count == 0
            places.append(len(ids))
            ids, counts = ids + times * [token], counts + times * [int(count)]
        found["tokens"].append(ids[:width])
        found["loss_mask"].append(counts[:width])
        found["places"].append([place for place in places if place < width])
    assert next(pictures, None) is None
    return found


def pixels_of(microbatches: Sequence[Microbatch]) -> Tensor:
    """The patches of all images, by their texts."""
    found = []
    for microbatch in microbatches:
        batch = microbatch.modules["vision"]
        stop = batch.units.cumsum(0).tolist()
        token = {}
        for number, (_, index, first, _, _) in enumerate(batch.routes.receives.tolist()):
            if index == microbatch.index:
                token[first] = batch.arrays["pixel_values"][stop[number] - int(batch.units[number]) : stop[number]]
        found += [token[first] for first in sorted(token)]
    return torch.cat(found)


@pytest.mark.parametrize(("boundaries", "micro_batch_size"), [("document", 1), ("none", 1), ("none", 4)])
@pytest.mark.parametrize("forward_step", [pretrain_vlm, multimodal])
def test_the_model_makes_the_planned_sequences_again(
    folder: Path, one_rank: None, boundaries: str, micro_batch_size: int, forward_step: Any
) -> None:
    recipe, count = folder / f"{boundaries}.yaml", 2 * SAMPLES // micro_batch_size
    found = given(args_of(recipe, micro_batch_size=micro_batch_size), forward_step, count)
    plan = planned(recipe, 2, micro_batch_size)
    for fields, microbatch in zip(found, plan, strict=True):
        is_image = microbatch.tokens == TOKEN
        expanded = as_model_expands(fields, LENGTH)
        assert expanded["tokens"] == microbatch.tokens.masked_fill(is_image, IMAGE).tolist()
        assert expanded["loss_mask"] == (microbatch.loss_mask * ~is_image).tolist()
        for row, tokens in enumerate(fields["tokens"]):
            kept = [at for at in range(len(tokens)) if tokens[at] != IMAGE and fields["loss_mask"][row][at]]
            trained = (microbatch.loss_mask[row].bool() & ~is_image[row]).nonzero().flatten()
            assert fields["labels"][row][kept].tolist() == microbatch.labels[row][trained].tolist()
            places = expanded["places"][row]
            for at, place in enumerate(places):
                begin = place - int(microbatch.position_ids[row, place])
                assert fields["position_ids"][row, at] == (at - places.index(begin) if begin < place else 0)
        params = fields["packed_seq_params"]
        assert (params is None) == (boundaries == "none")
        if params is not None:
            assert params.cu_seqlens_q.tolist() == microbatch.cu_seqlens_padded.tolist()
        per_picture = 1 if forward_step is pretrain_vlm else 0
        assert (fields["tokens"] == IMAGE).sum() == (
            len(fields["images"]) if per_picture else len(fields["num_image_tiles"])
        )
    tower = torchmix.open_tower(recipe, "vision")
    assert torch.equal(torch.cat([fields["images"] for fields in found]), tower.of_units(pixels_of(plan)))
    assert sum(len(fields["images"]) for fields in found) > 20


def args_of_mimo(recipe: Path, **changes: Any) -> SimpleNamespace:
    given = {"data_recipe": str(recipe), "global_batch_size": SAMPLES, "seq_length": LENGTH, **changes}
    return default_args(**{"model_provider": "llava_vlm", **given})


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_mimo_gets_the_plan_with_its_image_token_in_each_place_of_an_image(
    folder: Path, one_rank: None, micro_batch_size: int
) -> None:
    recipe, count = folder / "none.yaml", 2 * SAMPLES // micro_batch_size
    args = args_of_mimo(recipe, micro_batch_size=micro_batch_size)
    found = given(args, mimo, count, model_provider=model_provider)
    plan = planned(recipe, 2, micro_batch_size)
    tower = torchmix.open_tower(recipe, "vision")
    for fields, microbatch in zip(found, plan, strict=True):
        images = fields.pop("modality_inputs")
        is_image = microbatch.tokens == TOKEN
        assert fields.pop("input_ids").equal(microbatch.tokens.masked_fill(is_image, 32000))
        assert all(fields[name].equal(getattr(microbatch, name)) for name in ("labels", "loss_mask", "position_ids"))
        assert len(fields) == 3
        pictures = images.pop("images").pop("clip_encoder").pop("pixel_values")
        assert pictures.equal(tower.of_units(images_of(microbatch, "vision")["image_pixels"]))
        assert pictures.shape == (is_image.sum() // EMBEDDINGS, 3, 16, 16) and not images
    assert sum(int((microbatch.tokens == TOKEN).sum()) for microbatch in plan) > 20 * EMBEDDINGS


def test_mimo_gets_no_pictures_where_a_microbatch_has_none(folder: Path) -> None:
    script = vision.MimoScript(("modality_inputs",), 32000)
    script.tower = torchmix.open_tower(folder / "none.yaml", "vision")
    [microbatch, *_] = planned(folder / "none.yaml", 1, 4)
    item = item_of(microbatch, part="train", packed=False, images="vision")
    item |= {"image_places": item["image_places"][:0], "image_pixels": item["image_pixels"][:0]}
    found = script.fields_of(fields_of(item, Needs(tokens=True, labels=True)), item)
    assert found["input_ids"].equal(microbatch.tokens)
    assert found["modality_inputs"] is None


@pytest.mark.parametrize(
    ("flags", "change", "message"),
    [
        ({"context_parallel_size": 2}, {}, "--context-parallel-size 2: the script's model takes whole samples"),
        ({"pipeline_model_parallel_size": 2}, {}, "--pipeline-model-parallel-size 2: the script's model has no stages"),
        ({"model_provider": "llava_avlm"}, {}, "--model-provider llava_avlm: .* give that"),
        ({"seq_length": 96}, {}, "batch.length: --seq-length is 96, the recipe.s batch.length is 192"),
        ({}, {"boundaries": "document"}, "packing.boundaries: the script tells its model no ends of documents"),
        ({}, {"tower": "rows"}, r"sources.s0.images: .* would get \[48\]; write tower: pictures"),
    ],
)
def test_what_mimo_does_not_take_is_refused(
    folder: Path, one_rank: None, flags: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    recipe = yaml.safe_load((folder / "none.yaml").read_text())
    recipe["packing"]["boundaries"] = change.get("boundaries", "none")
    for source in recipe["sources"].values():
        source["images"]["tower"] = change.get("tower", "pictures")
    path = folder / "refused.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with installed(args_of_mimo(path, **flags), core=True):
        tmx.get_batch(script_of(mimo, model_provider=model_provider))
        with pytest.raises(RecipeError, match=message):
            tmx.provider([0, 0, 0])


def test_pixels_are_on_first_stages_and_places_on_all(folder: Path) -> None:
    topology = Topology(dp=2, tp=2, pp=3)
    ranks = steps_of_ranks(folder / "document.yaml", topology, 1)
    plan = steps_of_ranks(folder / "document.yaml", Topology(dp=2), 1)
    for rank, [step] in enumerate(ranks):
        place = topology.with_rank(rank).coordinates
        for microbatch, alone in zip(step, plan[place.dp][0], strict=True):
            wanted, found = images_of(alone, "vision"), images_of(microbatch, "vision")
            assert found["image_places"].equal(wanted["image_places"])
            assert ("image_pixels" in found) == (place.pp == 0)
            assert place.pp or found["image_pixels"].equal(wanted["image_pixels"])
            assert place.pp == 0 or not len(microbatch.modules["vision"].units)
    assert sum(len(images_of(one, "vision")["image_pixels"]) for [step] in plan for one in step) > 20 * EMBEDDINGS


@pytest.mark.parametrize("forward_step", [pretrain_vlm, multimodal])
def test_a_last_stage_gets_what_expands_its_labels_and_others_nothing(folder: Path, forward_step: Any) -> None:
    script = vision.VisionScript(tuple(FIELDS[forward_step].split()), None)
    script.tower = torchmix.open_tower(folder / "none.yaml", "vision")
    given = (IMAGE, EMBEDDINGS)
    for microbatch in planned(folder / "none.yaml", 1, 4):
        item = item_of(microbatch, part="train", packed=False, images="vision")
        whole, first, last, between = (
            script.fields_of(fields_of(item, Needs(tokens=tokens, labels=labels)), item, *given)
            for tokens, labels in ((True, True), (True, False), (False, True), (False, False))
        )
        for name in ("tokens", "position_ids", "images", "num_image_tiles"):
            assert first[name].equal(whole[name])
        for name in ("labels", "loss_mask", "num_image_tiles"):
            assert last[name].equal(whole[name])
        torch.save(item, io.BytesIO())  # as Megatron saves the batches of a suspected fault
        assert "labels" not in first and between == {}
        assert last["tokens"].equal(torch.where(whole["tokens"] == IMAGE, IMAGE, 0))
        assert len(last["images"]) == len(whole["images"]) and not last["images"].numel()


def test_losses_are_counted_by_the_sources_of_the_plan(folder: Path, one_rank: None) -> None:
    recipe, lines = folder / "none.yaml", Lines()
    script = script_of(pretrain_vlm, loss_func=lambda mask, output: (mask.view(-1) * output.view(-1)).sum())
    args = args_of(recipe, log_interval=1, micro_batch_size=4)
    with installed(args, core=True, lines=lines):
        get_batch = tmx.get_batch(script)
        train, _, _ = tmx.provider([0, 0, 0])
        for _ in range(SAMPLES // 4):
            fields = dict(zip(FIELDS[pretrain_vlm].split(), get_batch(train), strict=True))
            whole = [row + [0] * 40 for row in as_model_expands(fields, LENGTH)["loss_mask"]]
            script["loss_func"](torch.tensor(whole)[:, :LENGTH], torch.ones(4, LENGTH))  # cut, as the model cuts it
        tmx.close()
    tokens = dict.fromkeys(("s0", "s1"), 0)
    for one in planned(recipe, 1, 1):
        for number, name in enumerate(tokens):
            tokens[name] += int((one.loss_mask * (one.tokens != TOKEN) * (one.source_index == number)).sum())
    for name, count in tokens.items():
        assert f"{name} 1.000000E+00 ({count:,} tokens)" in lines[-1]


def test_validation_has_images_too_and_a_resume_continues(folder: Path, one_rank: None) -> None:
    path = folder / "split.yaml"
    path.write_text((folder / "document.yaml").read_text() + "split: [80, 20]\n")
    args, names = args_of(path, eval_iters=1), FIELDS[pretrain_vlm].split()
    with installed(args, core=True):
        get_batch = tmx.get_batch(script_of(pretrain_vlm))
        train, valid, _ = tmx.provider([0, 0, 0])
        of_valid = [dict(zip(names, get_batch(valid), strict=True)) for _ in range(SAMPLES)]
        for _ in range(SAMPLES):
            get_batch(train)
        saved = SimpleNamespace(**vars(args))
        args.consumed_train_samples += SAMPLES
        expected = get_batch(train)
        tmx.close()
    for fields in of_valid:
        assert (fields["tokens"] == IMAGE).sum() == len(fields["images"])
    assert any(len(fields["images"]) for fields in of_valid)
    resumed = args_of(path, load="/checkpoints", consumed_train_samples=SAMPLES)
    with installed(resumed, core=True) as modules:
        get_batch = tmx.get_batch(script_of(pretrain_vlm))
        modules["megatron.training.checkpointing"].check_checkpoint_args(saved)
        train, _, _ = tmx.provider([0, 0, 0])
        found = dict(zip(names, get_batch(train), strict=True))
        tmx.close()
    for name, wanted in zip(names, expected, strict=True):
        assert not isinstance(wanted, torch.Tensor) or found[name].equal(wanted)


@pytest.mark.parametrize(
    ("flags", "change", "message"),
    [
        ({"context_parallel_size": 2}, {}, "--context-parallel-size 2: the script's model cuts the sequences itself"),
        ({"decoder_seq_length": 96}, {}, "--decoder-seq-length is 96 tokens, images included, .*; give 192"),
        ({"decoder_seq_length": 96, "dataloader_seq_length": 80}, {}, "--dataloader-seq-length is 80, .*; give 176"),
        ({"dataloader_seq_length": 175}, {}, "with the 16 embeddings of an image these are 191 .*; give 176"),
        ({"micro_batch_size": 2}, {}, "--micro-batch-size 2: packed samples are one row"),
        ({"step_batch_size_schedule": "0:8"}, {}, "--step-batch-size-schedule: it counts tokens by --seq-length"),
        (
            {"encoder_seq_length": 17},
            {},
            "sources.s0.images: a picture has 16 .* makes 17 .*--disable-vision-class-tok",
        ),
        (
            {"img_w": 32},
            {},
            r"sources.s0.images: the encoder would get \[3, 16, 16\] .* \[3, 16, 32\] and 4; write tower",
        ),
        ({"patch_dim": 8}, {}, r"sources.s0.images: .* with patches of 4, .* takes \[3, 16, 16\] and 8; write tower"),
        ({}, {"modules": {}}, "modules: .*the recipe has 0 modules of images; write one: NAME: {items: image"),
        ({}, {"modules": {"vision": {**MODULE, "near_text": "5%"}}}, "modules.vision: .*must be with its text"),
        ({}, {"modules": {"vision": {**MODULE, "axis": "WORLD"}}}, "modules.vision: .*must be with its text"),
        (
            {},
            {"images": {"tower": "rows"}},
            r"sources.s0.images: the encoder would get \[48\] .*; write tower: pictures",
        ),
    ],
)
def test_what_the_model_does_not_take_is_refused(
    folder: Path, one_rank: None, flags: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    recipe = yaml.safe_load((folder / "document.yaml").read_text())
    recipe |= {key: value for key, value in change.items() if key != "images"}
    for source in recipe["sources"].values():
        source["images"] |= change.get("images", {})
    path = folder / "refused.yaml"
    path.write_text(yaml.safe_dump(recipe))
    args = args_of(path)
    vars(args).update(flags)
    with installed(args, core=True):
        tmx.get_batch(script_of(pretrain_vlm))
        with pytest.raises(RecipeError, match=message):
            tmx.provider([0, 0, 0])


def test_images_come_in_the_order_of_their_texts_whatever_places_a_strategy_gives() -> None:
    routes = Routes(
        sends=torch.zeros(0, 4, dtype=torch.int32),
        receives=torch.tensor([[0, 1, 60, 2, 1], [0, 0, 3, 1, 1], [0, 1, 5, 1, 1]], dtype=torch.int32),
        num_rows=4,
    )
    batch = ModuleBatch(
        units=torch.tensor([2, 1, 3]),
        segments=torch.ones(3, dtype=torch.int32),
        rows=torch.tensor([2, 1, 1]),
        arrays={"pixel_values": torch.arange(6, dtype=torch.uint8)[:, None]},
        routes=routes,
        places=torch.tensor([[0, 3, 1, 1, 1, 1, 0], [1, 5, 1, 1, 1, 1, 0], [1, 60, 2, 1, 1, 2, 0]], dtype=torch.int32),
    )
    microbatch: Any = SimpleNamespace(index=1, tokens_int32=torch.zeros(2, 40), modules={"vision": batch})
    found = images_of(microbatch, "vision")
    assert found["image_places"].tolist() == [[5, 1], [60, 2]]
    assert found["image_pixels"].flatten().tolist() == [3, 4, 5, 0, 1]
