"""A function of the user's over decoded items: the same wherever they are decoded, another in another epoch."""

from __future__ import annotations

import io
import itertools
import logging
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import torchmix
from tests.support import image_world
from tests.support.book_order import named_key
from tests.support.image_oracle import patches_of, write_project
from tests.support.image_record import checksum
from tests.support.image_sources import RULES, ImageRow
from tests.support.loaders import run_job
from tests.support.sounds import FORMS, SOUND, drawn_samples, sound_of
from tests.support.synthetic_images import random_pixels
from tests.support.videos import FORMS as VIDEO_FORMS
from tests.support.videos import VIDEO, drawn_frames, video_of
from torchmix.catalog.store import Catalog
from torchmix.cli.main import main
from torchmix.errors import CorruptPage, LoaderLost, RecipeError, SourceUnreadable
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.modality import Modality, PlannedItem
from torchmix.modalities.table import decoder_of, open_modality
from torchmix.parallel.topology import Topology
from torchmix.reader.items import ItemReader, UnitReader, unit_catalog
from torchmix.reader.protocol import WantedPieces
from torchmix.recipe.build import build
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.items import KINDS
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe
from torchmix.service import open_fleet
from torchmix.service.main import parts_to_serve

SEED, STEPS = 3, 4
FUNCTIONS = """
import numpy as np

_kept = {}

def speckled(image, random):
    image += random.integers(0, 9, image.shape, dtype=np.uint8)  # in place: nobody else has the array
    return image

def part(image, random):
    top, left = (int(random.integers(0, side // 2 + 1)) for side in image.shape[:2])
    return image[top : top + image.shape[0] // 2 + 1, left : left + image.shape[1] // 2 + 1]

def same(values, random):
    return values

def backwards(values, random):
    return values[::-1]

def raises(values, random):
    raise ValueError("no crop today")

def wide(values, random):
    return values.astype(np.float64)

def listed(values, random):
    return values.tolist()

def grey(values, random):
    return values[..., 0]

def broken(values, random):
    return values * np.float32("nan")

def hungry(values, random):
    raise MemoryError

def shorter(values, random):
    return values[:-1]

for each in (speckled, part, same, backwards, raises, wide, listed, grey, broken, hungry, shorter):
    each.version = 1

def without(values, random):
    return values
"""
_numbers = itertools.count()


def write_functions(folder: Path, text: str = FUNCTIONS) -> str:
    """A module of functions in the recipe's folder; its name, which no other test has."""
    name = f"crops_of_test_{next(_numbers)}"
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return name


def opened(folder: Path, function: str, kind: str = "image", **words: Any) -> Modality:
    """A kind of items with a function of a module in a folder."""
    told = {"column": "c", "token": 1, "augment": f"{write_functions(folder)}:{function}", **words}
    return open_modality("pairs", build(KINDS[kind].words, told, "items"), folder)


def made(modality: Modality, content: bytes, key: int = 7, *, is_masked: bool = False) -> np.ndarray:
    """The units of an item."""
    measures = modality.measure(lambda at, count: content[at : at + count], len(content))
    planned = PlannedItem(source="pairs", row=5, number=1, measures=measures, key=key)
    return modality.units_of(planned, content, is_masked=is_masked)


def png(width: int, height: int, seed: int = 1) -> bytes:
    """A picture of noise."""
    file = io.BytesIO()
    Image.fromarray(random_pixels(np.random.default_rng(seed), width, height)).save(file, "PNG")
    return file.getvalue()


# --- Over readers, layouts, epochs and a resume.


def project(folder: Path, **module: Any) -> dict[str, ImageRow]:
    """A recipe whose pictures are speckled; its rows with pictures, by their text."""
    [rows] = write_project(folder, ["lists"]).values()
    told = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    told["sources"]["s0"]["images"]["augment"] = f"{write_functions(folder)}:speckled"
    told["modules"]["vision"] |= module
    (folder / "recipe.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    index_recipe(load_recipe(folder / "recipe.yaml"), folder)
    return rows


def codes_of(ranks: list[list[list[Any]]]) -> list[list[float]]:
    """By step, a number for the pixels of each picture that came, over all ranks; sorted."""
    found: list[list[float]] = []
    for step in zip(*ranks, strict=True):
        codes: list[float] = []
        for of_rank in step:
            batch = of_rank[0].modules["vision"]
            pixels, stops = batch.arrays["pixel_values"].numpy(), [0, *batch.units.cumsum(0).tolist()]
            codes += [checksum(pixels[start:stop]) for start, stop in itertools.pairwise(stops)]
        found.append(sorted(codes))
    return found


def codes_by_rules(rows: dict[str, ImageRow], epochs: int) -> list[Counter[float]]:
    """By epoch, the numbers of all pictures, by the documentation alone."""
    found = [Counter[float]() for _ in range(epochs)]
    for epoch in range(epochs):
        for row, of_row in enumerate(rows.values()):
            for number, content in enumerate(of_row.images):
                key = named_key(SEED, "augment", "s0", "image", row, number, epoch)
                random = np.random.Generator(np.random.PCG64(key))
                found[epoch][checksum(patches_of(content, "dynamic", alter=_speckled(random))[0])] += 1
    return found


def _speckled(random: np.random.Generator) -> Any:
    return lambda pixels: pixels + random.integers(0, 9, pixels.shape, dtype=np.uint8)


@pytest.mark.slow
def test_each_picture_is_altered_by_its_own_key_at_every_place_and_layout(tmp_path: Path) -> None:
    rows = project(tmp_path, decode_at="rank")
    path = tmp_path / "recipe.yaml"
    whole = codes_of(image_world.steps_of_ranks(path, Topology(dp=2), STEPS, loaders="in_process"))
    by_rules = codes_by_rules(rows, 4)
    came = Counter(code for step in whole for code in step)
    assert came <= sum(by_rules, Counter[float]()), "an item is what its row, its number and the epoch say"
    assert by_rules[0] <= came and sum((came & by_rules[1]).values()) > 3 and len(by_rules[0] & by_rules[1]) == 0
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    told["modules"]["vision"]["decode_at"] = "worker"
    path.write_text(yaml.safe_dump(told), encoding="utf-8")
    assert codes_of(image_world.steps_of_ranks(path, Topology(tp=2, cp=2), STEPS, loaders="in_process")) == whole
    state = run_job(path, Topology(dp=2), steps=STEPS // 2, keep=False)[0].state
    rest = image_world.steps_of_ranks(path, Topology(pp=2), STEPS, loaders="in_process", state=state)
    assert codes_of(rest) == whole[STEPS // 2 :]


@pytest.mark.system
def test_loaders_that_decode_find_the_function_in_the_folder_of_the_recipe(tmp_path: Path) -> None:
    project(tmp_path, decode_at="loader")
    came, here = (
        codes_of(image_world.steps_of_ranks(tmp_path / "recipe.yaml", Topology.single(), STEPS, loaders=loaders))
        for loaders in ("job", "in_process")
    )
    assert came == here


# --- Units of one item: what a function is given, and what it may give.


@pytest.mark.parametrize(
    "kind, content, words",
    [
        ("image", png(50, 40), RULES["dynamic"]),
        ("image", png(50, 40), RULES["tiles"]),
        ("sound", sound_of(drawn_samples(np.random.default_rng(1), 6400, 16_000), 16_000, FORMS[0]), SOUND.words),
        ("video", video_of(drawn_frames(np.random.default_rng(1), 6, 32, 16), VIDEO_FORMS[0]), VIDEO.words),
    ],
    ids=("image", "tiles", "sound", "video"),
)
def test_what_a_function_leaves_is_what_comes_without_one(
    kind: str, content: bytes, words: dict[str, Any], tmp_path: Path
) -> None:
    plain = made(
        open_modality("pairs", build(KINDS[kind].words, {"column": "c", "token": 1, **words}, "items")), content
    )
    assert np.array_equal(made(opened(tmp_path, "same", kind, **words), content), plain)
    turned = made(opened(tmp_path, "backwards", kind, **words), content)
    assert turned.shape == plain.shape and turned.dtype == plain.dtype and not np.array_equal(turned, plain)


def test_a_function_is_given_frames_samples_or_pixels(tmp_path: Path) -> None:
    name = write_functions(tmp_path, "given = []\ndef f(v, r):\n    given.append(v)\n    return v\nf.version = 'a'\n")
    samples = drawn_samples(np.random.default_rng(1), 6400, 16_000)
    contents = {
        "image": (png(50, 40), RULES["dynamic"]),
        "sound": (sound_of(samples, 16_000, FORMS[0]), SOUND.words),
        "video": (video_of(drawn_frames(np.random.default_rng(1), 6, 32, 16), VIDEO_FORMS[0]), VIDEO.words),
    }
    shapes = []
    for kind, (content, words) in contents.items():
        told = {"column": "c", "token": 1, "augment": f"{name}:f", **words}
        modality = open_modality("pairs", build(KINDS[kind].words, told, "items"), tmp_path)
        units = made(modality, content)
        shapes.append(modality.augment.function.__globals__["given"][-1].shape)  # type: ignore[union-attr]
        assert len(units)
    assert shapes[0] == (40, 50, 3) and shapes[1] == (6400,) and len(shapes[2]) == 4 and shapes[2][3] == 3


def test_a_crop_may_have_any_size_of_which_the_rule_makes_the_same(tmp_path: Path) -> None:
    fixed = {"patch": 4, "merge": 2, "fixed": {"height": 16, "width": 24}}
    modality, content = opened(tmp_path, "part", **fixed), png(60, 50)
    one, same, other = (made(modality, content, key) for key in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other) and one.shape == other.shape
    random = np.random.Generator(np.random.PCG64(1))
    top, left = (int(random.integers(0, side // 2 + 1)) for side in (50, 60))
    crop = np.array(Image.open(io.BytesIO(content)).convert("RGB"))[top : top + 26, left : left + 31]
    resized = np.asarray(Image.fromarray(crop).resize((24, 16), Image.Resampling.BICUBIC))
    assert sorted(one.sum(axis=1).tolist()) == sorted(
        int(resized[y : y + 4, x : x + 4].sum()) for y in range(0, 16, 4) for x in range(0, 24, 4)
    )
    with pytest.raises(SourceUnreadable, match=r"gives uint8 \[9, 11, 3\] for uint8 \[16, 20, 3\]; give an array"):
        made(opened(tmp_path, "part", **RULES["dynamic"]), png(20, 16), 1)


@pytest.mark.parametrize(
    "function, message",
    [
        ("raises", "raises ValueError: no crop today"),
        ("wide", r"gives float64 \[40, 50, 3\] for uint8 \[40, 50, 3\]"),
        ("listed", "gives a list for uint8"),
        ("grey", r"gives uint8 \[40, 50\] for"),
        ("hungry", "raise loaders.memory"),
    ],
)
def test_what_a_function_must_not_do_is_named_with_source_row_and_function(
    function: str, message: str, tmp_path: Path
) -> None:
    modality = opened(tmp_path, function, **RULES["dynamic"])
    for is_masked in (False, True):  # a fault of the function is no bad row
        with pytest.raises(
            Exception, match=f"source 'pairs': image 1 of row 5: the function .*:{function} .*{message}"
        ):
            made(modality, png(50, 40), is_masked=is_masked)


def test_sounds_and_videos_keep_their_lengths(tmp_path: Path) -> None:
    sound = sound_of(drawn_samples(np.random.default_rng(1), 6400, 16_000), 16_000, FORMS[0])
    video = video_of(drawn_frames(np.random.default_rng(1), 6, 32, 16), VIDEO_FORMS[0])
    with pytest.raises(SourceUnreadable, match=r"sound 1 of row 5: .* gives float32 \[6399\] for float32 \[6400\]"):
        made(opened(tmp_path, "shorter", "sound", **SOUND.words), sound)
    with pytest.raises(SourceUnreadable, match=r"video 1 of row 5: .* gives uint8 \[\d+, .* for uint8 \[\d+, "):
        made(opened(tmp_path, "shorter", "video", **VIDEO.words), video)


def test_samples_must_be_numbers_and_what_stands_in_is_not_altered(tmp_path: Path) -> None:
    content = sound_of(drawn_samples(np.random.default_rng(1), 6400, 16_000), 16_000, FORMS[0])
    with pytest.raises(SourceUnreadable, match=r"sound 1 of row 5: .*:broken .* values that are no numbers"):
        made(opened(tmp_path, "broken", "sound", **SOUND.words), content)
    modality, damaged = opened(tmp_path, "raises", **RULES["dynamic"]), bytearray(png(50, 40))
    damaged[60:90] = bytes(30)
    with pytest.raises(CorruptPage):
        made(modality, bytes(damaged))
    assert (made(modality, bytes(damaged), is_masked=True) == 128).all()


# --- The recipe, the index, and who must have the same function.


def _with(folder: Path, augment: str | None, **images: Any) -> Recipe:
    told = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    [source] = told["sources"].values()
    source["images"] |= {"augment": augment, **images} if augment else images
    (folder / "other.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return load_recipe(folder / "other.yaml")


def test_what_names_no_function_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_project(tmp_path, ["lists"])
    name, where = write_functions(tmp_path), "sources.s0.images.augment"
    with pytest.raises(RecipeError, match=f"{where}: 'flipped' names no function; write module:function"):
        _with(tmp_path, "flipped")
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    for words, message in (
        ("nowhere_to_be_found:f", "cannot import 'nowhere_to_be_found'"),
        (f"{name}:no", "has no 'no'"),
        (f"{name}:without", "has no version: write `without.version = 1` behind the function"),
    ):
        recipe = _with(tmp_path, words)
        with (
            pytest.raises(RecipeError, match=message),
            torchmix.build_loader(
                recipe, directory=tmp_path, topology=Topology.single(), loaders="in_process"
            ) as loader,
        ):
            next(iter(loader))
        assert main(["check", str(tmp_path / "other.yaml"), "--quiet"]) != 0
        told = " ".join(capsys.readouterr().err.split())
        assert where in told and words.partition(":")[0] in told


def test_the_function_is_in_what_loaders_and_states_compare_and_not_in_the_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_project(tmp_path, ["lists"])
    plain = load_recipe(tmp_path / "recipe.yaml")
    catalog = index_recipe(plain, tmp_path)
    first = f"{write_functions(tmp_path)}:speckled"
    newer = f"{write_functions(tmp_path, FUNCTIONS.replace('each.version = 1', 'each.version = 2'))}:speckled"
    recipes = [plain, *(_with(tmp_path, words) for words in (first, newer))]
    found: list[Catalog] = [index_recipe(recipe, tmp_path) for recipe in recipes]
    assert len({recipe_fingerprint(recipe) for recipe in recipes}) == 1
    assert {one.fingerprint for one in found} == {catalog.fingerprint}, "no index is made again"
    units = [unit_catalog(one, tmp_path).sources[".s0.image"].transform_id for one in found]
    decoders = [decoder_of(recipe.sources, tmp_path) for recipe in recipes]
    assert len(set(units)) == len(set(decoders)) == 3 and f"{first}@1" in units[1] and f"{newer}@2" in units[2]
    states = []
    for recipe, state in zip(recipes[1:], (None, 0), strict=True):
        with (
            caplog.at_level(logging.WARNING),
            torchmix.build_loader(
                recipe, directory=tmp_path, topology=Topology.single(), loaders="in_process", max_steps=4
            ) as loader,
        ):
            if state is not None:
                loader.load_state_dict(states[state])
            taken = iter(loader)
            for _ in range(9):  # the first step and a microbatch
                next(taken)
            states.append(loader.state_dict())
    assert "put back the function of augment" in caplog.text


def test_another_epoch_is_not_given_the_units_of_an_earlier_one(tmp_path: Path) -> None:
    project(tmp_path)
    catalog = index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    [sizes] = [source.sizes.tokens for source in unit_catalog(catalog, tmp_path).sources.values()]

    def asked(reader: UnitReader, *epochs: int) -> list[np.ndarray]:
        count = np.full(len(epochs), int(sizes[4]))
        wanted = WantedPieces.end_to_end(
            source=0, row=np.full(len(epochs), 4), epoch=np.array(epochs), start=0, tokens=count
        )
        return np.split(reader.read(wanted).values, len(epochs))

    with closing(UnitReader(catalog, tmp_path, masked=(), cache_bytes=1 << 20, seed=SEED)) as reader:
        [first] = asked(reader, 0)
        second, again, far = asked(reader, 1, 0, 1 << 31)
        assert np.array_equal(first, again) and not np.array_equal(first, second) and not np.array_equal(second, far)
        assert reader.stats()["items_decoded"] == 3
    with closing(UnitReader(catalog, tmp_path, masked=(), cache_bytes=1 << 20, seed=SEED + 1)) as reader:
        assert not np.array_equal(asked(reader, 0)[0], first)


def test_loaders_and_who_decodes_in_their_place_have_the_seed_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, decode_at="loader")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    part, catalog = part_of(recipe, "train"), index_recipe(recipe, tmp_path)
    served = parts_to_serve({"train": part}, lambda _: catalog, tmp_path)["units of train"]
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(open_fleet, "_fleet", lambda settings, of, seed, *_: asked.append((of.fingerprint, seed)))
    monkeypatch.setattr(open_fleet, "_joined", lambda *_, **words: LoaderLost("no loader answers"))
    kinds, wanted = frozenset(["image"]), (np.arange(3), np.arange(3))
    settings = open_fleet.FleetSettings(endpoints=(), lost_s=1.0)
    items = open_fleet._items(settings, catalog, tmp_path, part.seed, frozenset(), kinds, lambda: False)
    assert items is not None and (served.catalog.fingerprint, served.seed) in asked and served.seed == SEED
    with closing(items), closing(ItemReader(catalog, tmp_path, seed=SEED)) as reader:
        modality, planned = reader.modality("s0", "image"), reader.planned("s0", "image", *wanted)
        contents = reader.read("s0", "image", wanted[0])
        for found, one, content in zip(items.read_units("s0", "image", *wanted), planned, contents, strict=True):
            assert np.array_equal(found, modality.units_of(one, content, is_masked=False))


def test_what_decodes_is_what_the_recipe_says_now(tmp_path: Path) -> None:
    write_project(tmp_path, ["lists"])
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    for place in ("worker", "rank"):
        codes = []
        for resize in ("pillow", "tensor"):
            _with(tmp_path, None, resize=resize)
            told = yaml.safe_load((tmp_path / "other.yaml").read_text(encoding="utf-8"))
            told["modules"]["vision"]["decode_at"] = place
            (tmp_path / "other.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
            codes.append(codes_of(image_world.steps_of_ranks(tmp_path / "other.yaml", Topology.single(), 1)))
        assert codes[0] != codes[1], place


def test_show_draws_what_an_encoder_gets_in_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path)
    given: list[int] = []
    units_of = Modality.units_of
    monkeypatch.setattr(
        Modality,
        "units_of",
        lambda self, planned, *more, **words: given.append(planned.key) or units_of(self, planned, *more, **words),
    )
    page = tmp_path / "page.html"
    assert main(["show", str(tmp_path / "recipe.yaml"), "--step", "3", "--html", str(page)]) == 0
    assert "what an encoder gets" in page.read_text(encoding="utf-8")
    keys = {
        named_key(SEED, "augment", "s0", "image", row, number, epoch): epoch
        for row in range(60)
        for number in range(2)
        for epoch in range(4)
    }
    assert given and {keys[key] for key in given} & {1, 2}
