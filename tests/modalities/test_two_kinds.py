"""Rows with items of two kinds: their documents in every container, the ranks that get them, resume, and refusals."""

from __future__ import annotations

import io
import os
import shutil
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageOps

import torchmix
from tests.support.deadlines import LONG_S
from tests.support.image_oracle import patches_of
from tests.support.image_record import checksum, exchanged
from tests.support.image_world import steps_of_ranks
from tests.support.processes import COMMAND_LINE, Processes
from tests.support.toy_modality.kind import HOME, ROW_OF_RECIPE, write_start_up
from tests.support.two_kinds import (
    CONTAINERS,
    IMAGE,
    NUMBERS,
    Row,
    document,
    items_of_row,
    make_two_kinds,
    packed,
    recipe_of_two_kinds,
    tokens_of_item,
    write_two_kinds,
)
from torchmix.catalog.store import Catalog, open_part
from torchmix.cli.main import main
from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.table import KINDS
from torchmix.parallel import place_rows
from torchmix.parallel.topology import Topology
from torchmix.reader.items import ItemReader, decoded_by_loaders
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.items import KINDS as RECIPE_KINDS
from torchmix.recipe.load import check_recipe, load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.keys import write_keys
from torchmix.service.server import new_pair

STEPS = 3
KIND_OF = {"vision": bytes, "counter": tuple}
ARRAY_OF = {"vision": "pixel_values", "counter": "value"}


@pytest.fixture(autouse=True)
def _with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPE_KINDS, "number", ROW_OF_RECIPE)
    monkeypatch.setitem(KINDS, "number", HOME)


def documents(catalog: Catalog, folder: Path, name: str) -> list[list[int]]:
    """The ids of every row of a source, by the reader."""
    tokens = catalog.sources[name].sizes.tokens.astype(np.int64)
    rows, places = np.arange(len(tokens)), np.cumsum(tokens) - tokens
    number = list(catalog.sources).index(name)
    wanted = WantedPieces.end_to_end(source=number, row=rows, epoch=0, start=0, tokens=tokens)
    with closing(Reader(catalog, folder, cache_bytes=1 << 20)) as reader:
        read = reader.read(wanted)
        return [read.values[place : place + count].tolist() for place, count in zip(places, tokens, strict=True)]


@pytest.mark.parametrize("container", CONTAINERS)
def test_documents_and_items_of_every_container(tmp_path: Path, container: str) -> None:
    rows = make_two_kinds(5, 40)
    source = write_two_kinds(tmp_path, "both", container, [rows[:24], rows[24:]])
    catalog = index_recipe(check_recipe(recipe_of_two_kinds({"both": source})), tmp_path)
    assert documents(catalog, tmp_path, "both") == [document(row, container) for row in rows]
    with closing(ItemReader(catalog, tmp_path)) as reader:
        for kind, of, token in (("image", bytes, IMAGE), ("number", tuple, NUMBERS)):
            items = [(row, item) for row in rows for item in items_of_row(row, of)]
            table = reader.table("both", kind)
            assert np.diff(table.first_run_of_row).tolist() == [len(items_of_row(row, of)) for row in rows]
            assert table.tokens.tolist() == [tokens_of_item(item) for _, item in items]
            for item, row in enumerate(np.repeat(np.arange(len(rows)), np.diff(table.first_run_of_row)).tolist()):
                ids, start = document(rows[row], container), int(table.offset[item])
                assert set(ids[start : start + int(table.tokens[item])]) == {token}
            found = reader.read("both", kind, np.arange(len(items)))
            assert [bytes(one) for one in found] == [one if of is bytes else packed(one) for _, one in items]


def wanted_rows(row: Row, module: str, num_ids: int) -> np.ndarray:
    """What a module's rows must be at each token of a document: a checksum of the item, and the number of the row."""
    wanted, place = np.zeros((num_ids, 2)), 0
    for part in row:
        if isinstance(part, str):
            place += len(part.encode())
            continue
        count, is_around = tokens_of_item(part), isinstance(part, tuple)
        if isinstance(part, KIND_OF[module]):
            units = np.array(part, np.int64) if isinstance(part, tuple) else patches_of(part, "dynamic")[0]
            wanted[place + is_around : place + is_around + count, 0] = checksum(units)
            wanted[place + is_around : place + is_around + count, 1] = np.arange(count) + 1
        place += count + 2 * is_around
    return wanted


def check_step(step: list[list[Any]], rows: dict[str, Row], seen: dict[str, Counter[float]]) -> None:
    """Compare one step of all ranks with the files; `seen` counts the items that were encoded."""
    for module, array in ARRAY_OF.items():
        made, routes = [], []
        for of_rank in step:
            batch = of_rank[0].modules[module]
            stops = [0, *batch.units.cumsum(0).tolist()]
            codes = [checksum(batch.arrays[array][a:b].numpy()) for a, b in pairwise(stops)]
            seen[module].update(codes)
            of_item = torch.repeat_interleave(torch.tensor(codes, dtype=torch.float64), batch.rows)
            number = torch.cat([torch.zeros(0), *(torch.arange(n) + 1.0 for n in batch.rows.tolist())])
            made.append(torch.stack([of_item, number.to(torch.float64)], 1))
            routes.append(batch.routes)
        for rank, of_rank in enumerate(step):
            received = exchanged(made, routes, rank)
            for each in of_rank:
                zeros = torch.zeros(*each.tokens.shape, 2, dtype=torch.float64)
                placed = place_rows(zeros, received, routes[rank], each.index).reshape(-1, 2).numpy()
                tokens, labels = each.tokens.numpy().reshape(-1), each.labels_int32.numpy().reshape(-1)
                start = 0
                for end in np.flatnonzero(tokens == 256).tolist():
                    ids = tokens[start : end + 1]
                    row = rows[bytes(ids[(ids < 256) & (ids > 0)].astype(np.uint8)).decode()]
                    skip = int(np.argmax(ids != 0))
                    assert ids[skip:].tolist() == document(row)
                    np.testing.assert_array_equal(
                        placed[start + skip : end + 1], wanted_rows(row, module, len(ids) - skip)
                    )
                    following = np.append(ids[skip + 1 :], -1)
                    has_none = np.isin(following, (IMAGE, NUMBERS, -1))
                    assert labels[start + skip : end + 1].tolist() == np.where(has_none, -100, following).tolist()
                    start = end + 1


def damage(folder: Path, number: int, row: Row) -> Row:
    """Damage the files of the items of a row; returns the row with what stands for them."""
    for path in (*folder.glob(f"0-{number}-*.number"), *folder.glob(f"0-{number}-*.image")):
        path.write_bytes(b"abc")
    found: Row = []
    for part in row:
        if isinstance(part, bytes):
            with Image.open(io.BytesIO(part)) as opened:
                size = ImageOps.exif_transpose(opened).size
            grey = io.BytesIO()
            Image.new("RGB", size, (128, 128, 128)).save(grey, "PNG")
            found.append(grey.getvalue())
        else:
            found.append((0,) * len(part) if isinstance(part, tuple) else part)
    return found


def write_project(folder: Path, *, damaged: int = 0, **options: Any) -> dict[str, Row]:
    """A recipe of three sources, one of which has images alone; returns the rows by their text.

    Args:
        folder: Where to.
        damaged: In so many rows of a source that masks bad rows, items are damaged once they are indexed; the rows that
            are returned have what stands for these.
        options: The options of the recipe.
    """
    rows = {name: make_two_kinds(seed, 60, name) for seed, name in enumerate(("p", "w", "j"))}
    rows["p"] = [[part for part in row if not isinstance(part, tuple)] for row in rows["p"]]
    containers = {"p": "texts", "w": "members", "j": "parts"}
    sources = {name: write_two_kinds(folder, name, containers[name], [rows[name]]) for name in rows}
    sources["p"].pop("items")
    sources["j"] |= {"bad_rows": "mask"}
    told = recipe_of_two_kinds(sources, packing={"overflow": "error"}, **options)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    index_recipe(load_recipe(folder / "recipe.yaml"), folder)
    for number in range(damaged):
        rows["j"][number] = damage(folder / "j", number, rows["j"][number])
    return {"".join(part for part in row if isinstance(part, str)): row for of in rows.values() for row in of}


@pytest.mark.system
@pytest.mark.parametrize(
    ("place", "loaders"),
    [("rank", "in_process"), ("worker", "node"), ("loader", "job,processes=2"), ("loader", "remote")],
)
def test_ranks_get_the_items_of_both_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, loaders: str
) -> None:
    """Some items are bad once they are indexed, and others stand for them."""
    modules = recipe_of_two_kinds({})["modules"]
    modules["vision"]["decode_at"], modules["counter"]["method"] = place, "none"
    modules["counter"]["decode_at"] = "rank" if loaders == "job,processes=2" else place
    rows = write_project(tmp_path, damaged=20, modules=modules)
    paths = [str(write_start_up(tmp_path / "start_up")), str(Path(__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    recipe, where = tmp_path / "recipe.yaml", loaders
    part = part_of(load_recipe(recipe), "train")
    by_loaders = decoded_by_loaders(part, open_part(tmp_path / "catalog", part), has_loaders=place == "loader")
    assert by_loaders == ({"image", "number"} if loaders == "remote" else {"image"} if place == "loader" else set())
    with Processes(tmp_path) as processes:
        if loaders == "remote":
            recipe, where = served(processes, tmp_path)
        ranks = steps_of_ranks(recipe, Topology(dp=2), STEPS, loaders=where)
    seen: dict[str, Counter[float]] = {module: Counter() for module in ARRAY_OF}
    tokens = Counter[int]()
    for step in zip(*ranks, strict=True):
        check_step(list(step), rows, seen)
        for of_rank in step:
            tokens.update(np.concatenate([each.tokens.numpy().ravel() for each in of_rank]).tolist())
    rows_sent = {m: sum(int(step[0].modules[m].rows.sum()) for rank in ranks for step in rank) for m in ARRAY_OF}
    assert rows_sent == {"vision": tokens[IMAGE], "counter": tokens[NUMBERS]}, "an item is encoded once in the job"
    assert all(len(of_module) > 10 for of_module in seen.values())
    assert seen["counter"][0.0], "zeros stood for numbers"


def served(processes: Processes, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Serve a project; the recipe of a trainer that has the catalog and no data, and how it finds the loaders."""
    trainer = folder / "trainer"
    trainer.mkdir()
    shutil.copy(folder / "recipe.yaml", trainer)
    shutil.copytree(folder / "catalog", trainer / "catalog")
    keys, endpoints = str(folder / "keys"), str(folder / "endpoints")
    write_keys(Path(keys), new_pair, num_clients=1)
    words = ("--bind", "tcp://127.0.0.1:0", "--processes", "2", "--keys", keys, "--register", endpoints)
    child = processes.start_python(*COMMAND_LINE, "serve", str(folder / "recipe.yaml"), *words, name="serve")
    child.wait_for_line("listen at", deadline_s=LONG_S)
    return trainer / "recipe.yaml", {"where": "remote", "endpoints": endpoints, "keys": keys}


@pytest.mark.slow
def test_a_run_resumes_with_items_of_both_kinds(tmp_path: Path) -> None:
    write_project(tmp_path)

    def open_loader() -> Any:
        return torchmix.build_loader(
            tmp_path / "recipe.yaml", topology=Topology.single(), loaders="in_process", max_steps=STEPS
        )

    def held(microbatch: Any) -> list[Any]:
        arrays = [microbatch.modules[module].arrays[array].tolist() for module, array in ARRAY_OF.items()]
        return [microbatch.tokens.tolist(), *arrays]

    with open_loader() as loader:
        whole = []
        for microbatch in loader:
            whole.append(held(microbatch))
            if len(whole) == 1:
                state = loader.state_dict()
    with open_loader() as loader:
        loader.load_state_dict(state)
        assert [held(microbatch) for microbatch in loader] == whole[1:]


@pytest.mark.slow
def test_the_commands_know_both_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_project(tmp_path)
    recipe = str(tmp_path / "recipe.yaml")
    assert main(["check", recipe]) in (0, 1)
    assert main(["plan", recipe, "--steps", "2", "--dp", "2"]) == 0
    told = capsys.readouterr().out
    assert "vision" in told and "counter" in told
    page = tmp_path / "page.html"
    assert main(["show", recipe, "--step", "0", "--html", str(page)]) == 0
    html = page.read_text(encoding="utf-8")
    assert "data:image/" in html
    numbers = [part for row in rows.values() for part in items_of_row(row, tuple)]
    assert any(", ".join(map(str, part)) in html for part in numbers)


def test_a_bad_item_of_one_kind_masks_its_row(tmp_path: Path) -> None:
    rows = make_two_kinds(2, 40)
    with_numbers = next(i for i, row in enumerate(rows) if items_of_row(row, tuple) and items_of_row(row, bytes))
    others = [i for i, row in enumerate(rows) if items_of_row(row, bytes) and i != with_numbers]
    source = write_two_kinds(tmp_path, "both", "parts", [rows])
    (tmp_path / "both" / f"0-{with_numbers}-0.number").write_bytes(b"abc")
    (tmp_path / "both" / f"0-{others[0]}-0.image").write_bytes(b"no image")
    with pytest.raises(SourceUnreadable, match="row"):
        index_recipe(check_recipe(recipe_of_two_kinds({"both": source})), tmp_path)
    recipe = check_recipe(recipe_of_two_kinds({"both": source | {"bad_rows": "mask", "max_bad": "10%"}}))
    catalog = index_recipe(recipe, tmp_path)
    bad = {row.row: row.reason for file in catalog.sources["both"].files for row in file.bad_rows}
    assert sorted(bad) == sorted([with_numbers, others[0]])
    assert "its number" in bad[with_numbers] and "its image" in bad[others[0]]
    wanted = [[] if row in bad else document(rows[row], "parts") for row in range(len(rows))]
    assert documents(catalog, tmp_path, "both") == wanted


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        ({"token": IMAGE}, "items.number.token", "each kind has its own"),
        ({"marker": "<image>"}, "items.number.marker", "overlaps"),
        ({"marker": "mage"}, "items.number.marker", "overlaps"),
        ({"marker": ">>"}, "items.number.marker", "overlaps"),
        ({"place": "p"}, "items.number.place", "parts with their types"),
    ],
)
def test_items_that_cannot_be_told_apart_are_refused(
    tmp_path: Path, change: dict[str, Any], where: str, message: str
) -> None:
    source = write_two_kinds(tmp_path, "both", "parts", [make_two_kinds(1, 4)])
    source["items"]["number"] |= change
    with pytest.raises(RecipeError, match=message) as refused:
        check_recipe(recipe_of_two_kinds({"both": source}))
    assert refused.value.where == f"sources.both.{where}"


def test_a_null_among_items_of_two_kinds_is_a_bad_row(tmp_path: Path) -> None:
    source = write_two_kinds(tmp_path, "both", "parts", [[["one", (1, 2)]]])
    path = tmp_path / "both" / "0.jsonl"
    path.write_text(path.read_text().replace('{"type": "number"}', "null"), encoding="utf-8")
    with pytest.raises(SourceUnreadable, match="row 0: its list holds a null, and the source has items of 2 kinds"):
        index_recipe(check_recipe(recipe_of_two_kinds({"both": source})), tmp_path)


def test_a_part_of_a_kind_that_the_source_lacks_is_a_bad_row(tmp_path: Path) -> None:
    source = write_two_kinds(tmp_path, "both", "parts", [[["one", (1, 2)]]])
    told = recipe_of_two_kinds({"both": {key: value for key, value in source.items() if key != "items"}})
    told["modules"].pop("counter")
    with pytest.raises(SourceUnreadable, match=r"row 0: .* name their column by items\.number\.column"):
        index_recipe(check_recipe(told), tmp_path)
