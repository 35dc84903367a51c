"""`torchmix init` of images and of conversations: what is written indexes and plans, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.arrow_files import write_arrow
from tests.support.chat_templates import CHATML, make_model_folder
from tests.support.image_sources import OF_SEVERAL, ImageRow, make_rows, write_source
from tests.support.synthetic_images import make_image
from tests.support.tar_shards import write_shard
from tests.support.toy_modality.kind import HOME, ROW_OF_RECIPE, SIGN
from tests.support.two_kinds import packed
from tests.support.vocabularies import END, make_tokenizer
from torchmix.cli.main import main
from torchmix.modalities.table import KINDS
from torchmix.recipe.items import KINDS as RECIPE_KINDS
from torchmix.recipe.items import items_of
from torchmix.recipe.load import load_recipe
from torchmix.recipe.structs import Source

HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path


def images(seed: int, count: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [make_image(rng).content for _ in range(count)]


def rows_of_all(seed: int, count: int) -> list[ImageRow]:
    """Rows that have an image each."""
    return [row for row in make_rows(seed, 2 * count) if row.image is not None][:count]


def init(*words: str) -> Source:
    """The only source of the recipe that is written."""
    assert main(["init", *words, "--force"]) == 0
    [source] = load_recipe("recipe.yaml").sources.values()
    return source


def check_that_it_works() -> None:
    assert main(["index", "recipe.yaml"]) == 0
    assert main(["check", "recipe.yaml", "--steps", "2"]) in (0, 1)
    assert main(["plan", "recipe.yaml", "--steps", "2", "--dp", "1"]) == 0


@pytest.mark.parametrize("container", ["parquet", "struct", "webdataset", "members", "lists", "structs"])
def test_images_of_every_container_become_a_recipe_that_indexes_and_plans(folder: Path, container: str) -> None:
    rows = rows_of_all(1, 40)
    expected = write_source(folder, "data/pictures", container, [rows], "dynamic")
    source = init("data/pictures", "--tokenizer", "bytes", "--seq-length", "2048", "--global-batch-size", "4")
    column = {"members": "*.jpg", "webdataset": "jpg"}.get(container, expected["images"]["column"])
    assert source.images is not None
    assert (source.text, source.images.column, source.images.token) == (expected["text"], column, 257)
    check_that_it_works()


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_bytes_that_are_no_images_are_none(folder: Path, format: str) -> None:
    sound = [{"bytes": b"RIFF\0\0\0\0WAVEfmt " + bytes(50), "path": "a.wav"}] * 3
    table = pa.table({"audio": pa.array(sound, HF_IMAGE), "image": [b"some text"] * 3, "text": ["a", "b", "c"]})
    if format == "parquet":
        pq.write_table(table, folder / "data" / "a.parquet")
    else:
        write_arrow(folder / "data" / "a.arrow", table)
    source = init("data", "--tokenizer", "bytes")
    assert source.images is None and source.text == "text"


def test_an_image_of_arrow_is_found_past_a_null(folder: Path) -> None:
    held = pa.array([None, *({"bytes": image, "path": None} for image in images(2, 3))], HF_IMAGE)
    write_arrow(folder / "data" / "a.arrow", pa.table({"picture": held, "caption": ["a", "b", "c", "d"]}))
    source = init("data", "--tokenizer", "bytes")
    assert source.images is not None and (source.images.column, source.text) == ("picture", "caption")
    check_that_it_works()


def test_a_vocabulary_has_the_tokens_of_images_or_they_are_named(folder: Path, capsys: Any) -> None:
    held = pa.array([{"bytes": image, "path": None} for image in images(3, 6)], HF_IMAGE)
    pq.write_table(pa.table({"image": held, "caption": ["a caption"] * 6}), folder / "data" / "a.parquet")
    make_tokenizer(folder / "qwen.json", specials=(END, *QWEN))
    found = init("data", "--tokenizer", "qwen.json").images
    assert found is not None
    assert (found.token, found.before, found.after) == ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    check_that_it_works()
    make_tokenizer(folder / "plain.json")
    assert main(["init", "data", "--tokenizer", "plain.json", "--force"]) == 2
    assert "name one with --image-token TOKEN" in capsys.readouterr().err
    found = init("data", "--tokenizer", "plain.json", "--image-token", "<user>").images
    assert found is not None and (found.token, found.before) == ("<user>", None)
    assert main(["init", "data", "--tokenizer", "plain.json", "--image-token", "<none>", "--force"]) == 2
    assert main(["init", "data", "--tokenizer", "bytes", "--image-token", "7", "--force"]) == 2


def test_conversations_with_paths_of_images_become_chats(folder: Path, capsys: Any) -> None:
    """The form of LLaVA's files, with its images in a folder beside."""
    names = [f"{i}.jpg" for i in range(6)]
    (folder / "data" / "images").mkdir()
    for name, image in zip(names, images(4, 6), strict=True):
        (folder / "data" / "images" / name).write_bytes(image)
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A picture."}]
    lines = [json.dumps({"id": str(i), "image": name, "conversations": turns}) for i, name in enumerate(names)]
    (folder / "data" / "llava.jsonl").write_text("\n".join(lines) + "\n")
    make_tokenizer(folder / "t.json", specials=(END, *QWEN, "<|im_start|>", "<|im_end|>"))
    source = init("data", "--tokenizer", "t.json")
    assert source.images is not None and source.chat is not None
    assert (source.messages, source.chat.template) == ("conversations", "chatml")
    assert (source.images.column, source.images.folder) == ("image", "data/images")
    assert "left out" not in capsys.readouterr().out, "files of images are no data by their names, and are read"
    check_that_it_works()
    source = init("data", "--tokenizer", "bytes")
    assert source.chat is not None and source.chat.template == "plain", "bytes has no tokens of chatml"
    check_that_it_works()


def test_conversations_of_parquet_are_found_beside_other_texts(folder: Path) -> None:
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    pq.write_table(pa.table({"prompt": ["What?"] * 9, "messages": [chat] * 9}), folder / "data" / "a.parquet")
    assert init("data", "--tokenizer", "bytes").messages == "messages"
    check_that_it_works()


def test_a_folder_of_paths_that_is_not_found_is_to_be_written(folder: Path) -> None:
    line = json.dumps({"image": "there/a.png", "caption": "a"})
    (folder / "data" / "a.jsonl").write_text(f"{line}\n")
    source = init("data", "--tokenizer", "bytes")
    assert source.images is not None and source.images.folder == "data"
    assert "images.folder: write where paths such as there/a.png begin" in Path("recipe.yaml").read_text()


def test_images_without_a_text_and_two_columns_of_them_are_named(folder: Path, capsys: Any) -> None:
    held = images(5, 3)
    pq.write_table(pa.table({"image": held}), folder / "data" / "alone.parquet")
    pq.write_table(pa.table({"left": held, "right": held, "text": ["a"] * 3}), folder / "data" / "two.parquet")
    assert main(["init", "data/alone.parquet", "--tokenizer", "bytes"]) == 3
    assert "has images in image, and no text beside them" in capsys.readouterr().err
    assert main(["init", "data/two.parquet", "--tokenizer", "bytes"]) == 2
    assert "say which with --images COLUMN" in capsys.readouterr().err
    found = init("data/two.parquet", "--tokenizer", "bytes", "--images", "right").images
    assert found is not None and found.column == "right"
    assert main(["init", "data/two.parquet", "--tokenizer", "bytes", "--images", "text", "--force"]) == 3
    pq.write_table(pa.table({"text": ["a"] * 3}), folder / "data" / "texts.parquet")
    assert main(["init", "data/texts.parquet", "--tokenizer", "bytes", "--images", "x", "--force"]) == 2
    assert "no images were found" in capsys.readouterr().err


@pytest.mark.parametrize("container", ["parquet", "jsonl", "shard"])
def test_items_of_another_kind_are_found_beside_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, container: str
) -> None:
    monkeypatch.setitem(RECIPE_KINDS, "number", ROW_OF_RECIPE)
    monkeypatch.setitem(KINDS, "number", HOME)
    pictures, numbers = images(7, 6), [SIGN + packed([row, 5]) for row in range(6)]
    if container == "parquet":
        table = pa.table({"text": ["a"] * 6, "image": pictures, "held": numbers, "other": numbers})
        pq.write_table(table, folder / "data" / "a.parquet")
    elif container == "shard":
        held = zip(pictures, numbers, strict=True)
        samples = [(f"s/{i}", {"txt": b"a", "jpg": image, "held": one}) for i, (image, one) in enumerate(held)]
        write_shard(folder / "data" / "a.tar", samples)
    else:
        for row, content in enumerate(numbers):
            (folder / "data" / f"{row}.number").write_bytes(content)
        lines = [json.dumps({"text": "a", "held": f"{row}.number"}) for row in range(6)]
        (folder / "data" / "a.jsonl").write_text("\n".join(lines) + "\n")
    if container == "parquet":
        assert main(["init", "data", "--tokenizer", "bytes"]) == 2
        assert "has numbers in held, other; say which with --number COLUMN" in capsys.readouterr().err
    source = init("data", "--tokenizer", "bytes", *(["--number", "held"] if container == "parquet" else []))
    tokens = {kind: (words.column, words.token) for kind, words in items_of(source).items()}
    of_images = {} if container == "jsonl" else {"image": ("jpg" if container == "shard" else "image", 257)}
    assert tokens == {**of_images, "number": ("held", 257 + len(of_images))}
    assert sorted(load_recipe("recipe.yaml").modules) == ["counter", *(["vision"] if of_images else [])]
    check_that_it_works()
    if container != "jsonl":
        make_tokenizer(folder / "t.json", specials=(END, *QWEN, "<num>"))
        source = init("data", "--tokenizer", "t.json", *(["--number", "other"] if container == "parquet" else []))
        assert [words.token for words in items_of(source).values()] == ["<|image_pad|>", "<num>"]


def test_shares_count_the_tokens_of_images(folder: Path) -> None:
    held = [image.content for image in (make_image(np.random.default_rng(6), most_side=500) for _ in range(8))]
    samples = [(f"s/{i}", {"jpg": image, "txt": b"ab"}) for i, image in enumerate(held)]
    write_shard(folder / "data" / "pictures.tar", samples)
    pq.write_table(pa.table({"text": ["ab"] * 8}), folder / "data" / "texts.parquet")
    assert main(["init", "data", "--tokenizer", "bytes", "--force"]) == 0
    text = Path("recipe.yaml").read_text()
    shares = {name: text.partition(f"\n  {name}: ")[2].partition("\n")[0] for name in ("pictures", "texts")}
    assert all(shares.values())
    recipe = load_recipe("recipe.yaml")
    of_pictures = float(str(recipe.mixture["pictures"]).rstrip("%"))
    assert of_pictures > 50
    assert set(OF_SEVERAL) > {"members"}


def test_chats_without_images_take_the_template_of_the_vocabulary(folder: Path) -> None:
    make_model_folder(folder / "model", CHATML)
    lines = [json.dumps({"messages": [{"role": "user", "content": f"a {number}"}]}) for number in range(6)]
    for path in (folder / "data").iterdir():
        path.unlink()
    (folder / "data" / "a.jsonl").write_text("\n".join(lines) + "\n")
    source = init("data", "--tokenizer", "model/tokenizer.json")
    assert source.chat is not None and source.chat.template == "model/tokenizer_config.json"
