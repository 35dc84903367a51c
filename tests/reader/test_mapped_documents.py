"""Maps and kept ids beside messages, lists and items: documents, places, and what must follow from a row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.chats import Chat, labels_of, make_chats, plain_document, write_chats
from tests.support.image_sources import RULES, TOKEN, make_rows
from tests.support.maps import write_functions
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogStale, RecipeError, SourceUnreadable
from torchmix.formats.kept_ids import KEPT_FOLDER
from torchmix.indexing.scan import index_recipe, index_sources
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.sources import maps_of
from torchmix.recipe.structs import Recipe

FUNCTIONS = '''
import json

def of_lists(columns, change):
    [texts] = columns.values()
    return {"text": pa.array([json.dumps(change(json.loads(text))) for text in texts.to_pylist()], pa.string())}

def loud(columns, **_):
    """Contents in capitals, without the messages of the system."""
    def change(held):
        kept = [one for one in held if one.get("role", one.get("from")) != "system"]
        key = "content" if not kept or "content" in kept[0] else "value"
        return [{**one, key: shouted(one[key])} for one in kept]
    return of_lists(columns, change)

def shouted(held):
    return held.upper() if isinstance(held, str) else [part.upper() for part in held]

def shuffled(columns, *, row, epoch, seed):
    """Each epoch has another order of the letters of what is said; a list beside tells how many a row has."""
    keys = iter(seed.tolist())
    def change(held):
        draw = np.random.Generator(np.random.Philox(key=int(next(keys))))
        return [{**one, "content": "".join(draw.permutation(list(one["content"])))} for one in held]
    lengths = pa.array([[len(text)] for text in columns["messages"].to_pylist()], pa.list_(pa.int32()))
    return {**of_lists(columns, change), "letters": lengths}

def moved(columns, *, row, epoch, seed):
    """As many tokens; but for the first rows, the assistant says others of them in other epochs."""
    numbers = iter(row.tolist())
    def change(held):
        if next(numbers) >= first and epoch and len(held) > 1:
            held[0]["content"], held[1]["content"] = held[0]["content"] + "x", held[1]["content"][:-1]
        return held
    return of_lists(columns, change)

def at_end(columns, *, row, epoch, seed):
    """The image behind the text, but in other epochs before it."""
    texts = [text.replace("<image>", "") for text in columns["text"].to_pylist()]
    marks = ["<image>" * text.count("<image>") for text in columns["text"].to_pylist()]
    pairs = zip(texts, marks, row.tolist())
    return {"text": pa.array([m + t if epoch and r >= first else t + m for t, m, r in pairs], pa.string())}

def ids(columns, **_):
    return {"tokens": pa.array([[1]] * len(columns["messages"]))}

def half(columns, **_):
    [texts] = columns.values()
    return {"text": pa.array([text * (1 // ("bad" not in text)) for text in texts.to_pylist()], pa.string())}

first = 0
shuffled.random = moved.random = at_end.random = True
for each in (loud, shuffled, moved, at_end, ids, half):
    each.version = 1
'''


def recipe_of(source: dict[str, Any]) -> Recipe:
    return check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 4, "length": 128},
            "sources": {"main": source},
            "mixture": {"main": 1},
        }
    )


def documents(catalog: Catalog, folder: Path, recipe: Recipe, epoch: int = 0) -> tuple[list[list[int]], Any]:
    """The ids of every row, and what was read."""
    tokens = catalog.sources["main"].sizes.tokens.astype(np.int64)
    wanted = WantedPieces.end_to_end(source=0, row=np.arange(len(tokens)), epoch=epoch, start=0, tokens=tokens)
    reader = Reader(catalog, folder, cache_bytes=1 << 20, maps=maps_of(recipe.sources))
    read, stats = reader.read(wanted), reader.stats()
    reader.close()
    is_kept = (folder / "catalog" / KEPT_FOLDER).exists()
    assert bool(stats["rows_encoded"]) is not is_kept and (is_kept or recipe.sources["main"].keep is None)
    places = zip(wanted.places.tolist(), tokens.tolist(), strict=True)
    return [read.values[place : place + count].tolist() for place, count in places], read


def labels(found: list[list[int]], read: Any) -> list[list[int]]:
    """What the places without a label leave of the labels."""
    values = np.concatenate([[*ids[1:], -100] if ids else [] for ids in found]).astype(np.int64)
    values[read.unlabelled] = -100
    return [part.tolist() for part in np.split(values, np.cumsum(list(map(len, found)))[:-1])]


def loud(chat: Chat | None) -> Chat | None:
    return chat and [(role, content.upper()) for role, content in chat if role != "system"]


@pytest.mark.parametrize("keep", [{}, {"keep": "tokens"}], ids=["read", "kept"])
@pytest.mark.parametrize("container", ["jsonl", "parquet_sharegpt", "parquet_parts", "tar"])
def test_messages_go_through_a_map_before_the_template(tmp_path: Path, container: str, keep: dict[str, str]) -> None:
    chats = make_chats(4, 70)
    name = write_functions(tmp_path, FUNCTIONS)
    plain = write_chats(tmp_path, "chats", container, [chats[:30], chats[30:]]) | keep
    recipe = recipe_of(plain | {"map": f"{name}:loud"})
    catalog = index_recipe(recipe, tmp_path)
    wanted = [plain_document(loud(chat)) for chat in chats]
    found, read = documents(catalog, tmp_path, recipe)
    assert found == [ids for ids, _ in wanted]
    assert labels(found, read) == [labels_of(*one) for one in wanted]
    assert catalog.sources["main"].transform_id.startswith(f"map:{name}:loud@1+")
    with pytest.raises(CatalogStale, match="no recipe names it here"):
        Reader(catalog, tmp_path, cache_bytes=1 << 20)


def test_ids_of_chats_and_of_texts_with_images_are_kept_and_the_order_stays(tmp_path: Path) -> None:
    chats = make_chats(4, 70)
    recipe = recipe_of(write_chats(tmp_path, "chats", "parquet", [chats]))
    plain = index_recipe(recipe, tmp_path)
    expected, read = documents(plain, tmp_path, recipe)
    report = index_sources(recipe, tmp_path, keep_tokens=True)
    assert report.catalog.fingerprint == plain.fingerprint
    assert (tmp_path / "catalog" / KEPT_FOLDER).exists()
    found, again = documents(report.catalog, tmp_path, recipe)
    assert found == expected and again.unlabelled.tolist() == read.unlabelled.tolist()


def images_of(folder: Path, **keys: Any) -> tuple[dict[str, Any], list[str]]:
    """A source of texts with images, all with a marker."""
    rows = [row for row in make_rows(3, 60, most_side=40) if row.images]
    texts = [row.marked for row in rows]
    table = pa.table({"text": texts, "image": [row.images[0] for row in rows]})
    pq.write_table(table, folder / "rows.parquet")
    images = {"column": "image", "token": TOKEN, **RULES["dynamic"]}
    return {"path": "rows.parquet", "text": "text", "tokenizer": "bytes", "images": images, **keys}, texts


@pytest.mark.parametrize("keep", [{}, {"keep": "tokens"}], ids=["read", "kept"])
def test_texts_with_images_go_through_a_map_that_moves_markers(tmp_path: Path, keep: dict[str, str]) -> None:
    name = write_functions(tmp_path, FUNCTIONS.replace("first = 0", "first = 10**9").replace("= at_end.random", ""))
    source, texts = images_of(tmp_path, map=f"{name}:at_end", **keep)
    recipe = recipe_of(source)
    catalog = index_recipe(recipe, tmp_path)
    table = catalog.sources["main"].sizes.items["image"]
    bare = [text.replace("<image>", "") for text in texts]
    assert np.asarray(table.offset).tolist() == [len(text.encode()) for text in bare]
    found, _ = documents(catalog, tmp_path, recipe)
    counts = np.asarray(table.tokens).tolist()
    assert found == [[*text.encode(), *[TOKEN] * n, 256] for text, n in zip(bare, counts, strict=True)]


def test_a_random_map_has_the_letters_of_each_epoch_and_lists_beside(tmp_path: Path) -> None:
    chats = [chat for chat in make_chats(4, 70) if chat]
    name = write_functions(tmp_path, FUNCTIONS)
    recipe = recipe_of(write_chats(tmp_path, "chats", "parquet", [chats]) | {"map": f"{name}:shuffled"})
    catalog = index_recipe(recipe, tmp_path)
    assert catalog.sources["main"].lists is not None
    (first, read), (second, _) = (documents(catalog, tmp_path, recipe, epoch) for epoch in (0, 1))
    assert first == documents(catalog, tmp_path, recipe)[0] and first != second
    plain = [plain_document(chat)[0] for chat in chats]
    assert all(sorted(a) == sorted(b) == sorted(c) for a, b, c in zip(first, second, plain, strict=True))
    [lists] = read.others
    assert lists.name == "letters"
    kept = recipe_of(write_chats(tmp_path, "chats", "parquet", [chats]) | {"map": f"{name}:shuffled", "keep": "tokens"})
    with pytest.raises(RecipeError, match=r"main.keep: .*is random"):
        index_recipe(kept, tmp_path)


@pytest.mark.parametrize("first", [0, 40], ids=["tried", "not tried"])
@pytest.mark.parametrize("function", ["moved", "at_end"])
def test_a_map_that_moves_items_or_loss_with_the_epoch_is_named(tmp_path: Path, function: str, first: int) -> None:
    name = write_functions(tmp_path, FUNCTIONS.replace("first = 0", f"first = {first}"))
    if function == "moved":
        chats = [[("user", f"{n} a"), ("assistant", "bcd")] for n in range(60)]
        source = write_chats(tmp_path, "chats", "parquet", [chats])
    else:
        source, _ = images_of(tmp_path)
    recipe = recipe_of(source | {"map": f"{name}:{function}"})
    if not first:
        with pytest.raises(RecipeError, match=rf"main.map: the map .*{function} moves items, or tokens without loss"):
            index_recipe(recipe, tmp_path)
        return
    catalog = index_recipe(recipe, tmp_path)
    documents(catalog, tmp_path, recipe)
    with pytest.raises(SourceUnreadable, match=r"row 40: the map .* than when it was indexed"):
        documents(catalog, tmp_path, recipe, epoch=1)


def test_a_map_at_fault_is_named_with_its_row_or_masked(tmp_path: Path) -> None:
    chats: list[Chat | None] = [None, [("user", "a")], [("user", "bad")], [("user", "c"), ("assistant", "d")]]
    name = write_functions(tmp_path, FUNCTIONS)
    source = write_chats(tmp_path, "chats", "jsonl", [chats])
    with pytest.raises(SourceUnreadable, match=r"row 2: the map .*half raises ZeroDivisionError"):
        index_recipe(recipe_of(source | {"map": f"{name}:half"}), tmp_path)
    with pytest.raises(SourceUnreadable, match="gives `tokens`, and such rows become documents from `text`"):
        index_recipe(recipe_of(source | {"map": f"{name}:ids"}), tmp_path)
    recipe = recipe_of(source | {"map": f"{name}:half", "bad_rows": "mask", "max_bad": "50%"})
    found, _ = documents(index_recipe(recipe, tmp_path), tmp_path, recipe)
    assert found == [[] if number == 2 else plain_document(chat)[0] for number, chat in enumerate(chats)]
