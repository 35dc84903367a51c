"""Fill in the middle of ids: choices of Megatron's own function, stretches, files of two formats, a whole loader."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import torchmix
from tests.support.indexed_datasets import write_dataset
from torchmix.catalog.sizes import IN_FILE
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogStale, RecipeError, SourceUnreadable
from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe, load_recipe
from torchmix.recipe.structs import Fim
from torchmix.transform.fim import FimOfIds
from torchmix.transform.tokenizer import RowsToEncode

PREFIX, MIDDLE, SUFFIX, EOD, SPLIT = 300, 301, 302, 7, 8
FIM = {"rate": 0.6, "spm": 0.4, "ids": [PREFIX, MIDDLE, SUFFIX], "eod": EOD}
FILES = FIM | {"split": SPLIT, "fragment_rate": 0.5}


def make_rows(seed: int, count: int) -> list[list[int]]:
    """Rows with documents in them that end, and files between."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(10, 250, int(draw.integers(0, 40))).tolist() for _ in range(count)]
    for row in rows:
        for place in range(len(row)):
            row[place] = int(draw.choice([row[place], EOD, SPLIT], p=[0.9, 0.04, 0.06]))
    return rows


def drawn(ids: list[int]) -> tuple[int, int, int, int]:
    digest = hashlib.blake2b(np.array(ids, "<i4").tobytes(), digest_size=32, person=b"torchmix-fim-ids").digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, 32, 8))  # type: ignore[return-value]


def permuted(ids: list[int], rate: float, spm: float) -> list[int]:
    """A stretch as the page says."""
    number, way, *places = drawn(ids)
    if not ids or number >= rate * 2**64:
        return ids
    first, second = sorted(place % (len(ids) + 1) for place in places)
    prefix, middle, suffix = ids[:first], ids[first:second], ids[second:]
    if way < spm * 2**64:
        return [PREFIX, SUFFIX, *suffix, MIDDLE, *prefix, *middle]
    return [PREFIX, *prefix, SUFFIX, *suffix, MIDDLE, *middle]


def parts_of(ids: list[int], token: int) -> list[list[int]]:
    """What lies between places of a token."""
    found: list[list[int]] = [[]]
    for one in ids:
        if one == token:
            found.append([])
        else:
            found[-1].append(one)
    return found


def joined(parts: list[list[int]], token: int) -> list[int]:
    return [one for part in parts for one in (token, *part)][1:]


def expected(row: list[int], fim: dict[str, Any]) -> list[int]:
    made = []
    for stretch in parts_of(row, fim["eod"]):
        files = parts_of(stretch, fim.get("split", -1))
        if len(files) == 1:
            made.append(permuted(stretch, fim["rate"], fim["spm"]))
        elif drawn(stretch)[0] < fim["rate"] * 2**64:
            made.append(joined([permuted(one, fim["fragment_rate"], fim["spm"]) for one in files], fim["split"]))
        else:
            made.append(stretch)
    return joined(made, fim["eod"])


def encoded(rows: list[list[int]], fim: dict[str, Any], kind: pa.DataType) -> list[list[int]]:
    asked = RowsToEncode(
        rows=pa.array([[9, 9], *rows], pa.large_list(kind)).slice(1),  # offsets that do not begin at 0
        row=np.arange(len(rows)),
        epoch=3,
        seed=np.zeros(len(rows), np.uint64),
        first_row=0,
    )
    made = FimOfIds(fim=Fim(**{**fim, "ids": tuple(fim["ids"])})).encode(asked)
    return [made.values[start:stop].tolist() for start, stop in pairwise(made.offsets.tolist())]


@pytest.mark.parametrize("fim", [FIM, FILES], ids=["documents", "files"])
def test_stretches_between_ends_are_cut_by_a_hash_of_their_ids(fim: dict[str, Any]) -> None:
    rows = make_rows(1, 300)
    wanted = [expected(row, fim) for row in rows]
    assert sum(PREFIX in row for row in wanted) > 100
    for kind in (pa.uint16(), pa.int32(), pa.int64()):
        assert encoded(rows, fim, kind) == wanted
    assert encoded(rows, {**fim, "rate": 0}, pa.uint16()) == rows


# What `GPTFIMDataset._fim_split_and_permute_sequence` of Megatron-LM (main, d98e8a6) makes of ids, with characters that
# are tokens, and choices that were given to it: of what is cut, the two places and whether the suffix comes first.
SAMPLE = [10, 11, 12, 13, 14, 15]
OF_MEGATRON = {
    (2, 5, False): [300, 10, 11, 302, 15, 301, 12, 13, 14],
    (2, 5, True): [300, 302, 15, 301, 10, 11, 12, 13, 14],
    (5, 2, True): [300, 302, 15, 301, 10, 11, 12, 13, 14],
    (0, 0, False): [300, 302, 10, 11, 12, 13, 14, 15, 301],
    (0, 6, True): [300, 302, 301, 10, 11, 12, 13, 14, 15],
    (6, 6, False): [300, 10, 11, 12, 13, 14, 15, 302, 301],
    (3, 3, True): [300, 302, 13, 14, 15, 301, 10, 11, 12],
    (0, 6, False): [300, 302, 301, 10, 11, 12, 13, 14, 15],
    (1, 4, True): [300, 302, 14, 15, 301, 10, 11, 12, 13],
}
OF_FILES = [10, 11, SPLIT, 12, 13, 14, SPLIT, 15]
MEGATRON_OF_FILES = [300, 10, 302, 301, 11, SPLIT, 12, 13, 14, SPLIT, 300, 302, 301, 15]
"""With the choices: (1, 2) and prefix first, not cut, (0, 1) and suffix first."""


class Chosen:
    """A hash that gives the choices of a stretch in turn."""

    def __init__(self, *choices: tuple[int, int, bool] | None) -> None:
        self._choices = list(choices)

    def __call__(self, content: Any, **_: Any) -> Any:
        choice = self._choices.pop(0)
        numbers = (2**64 - 1, 0, 0, 0) if choice is None else (0, 0 if choice[2] else 2**64 - 1, *choice[:2])
        return SimpleNamespace(digest=lambda: b"".join(number.to_bytes(8, "little") for number in numbers))


def test_orders_are_those_of_megatron_by_fixed_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    fim = FILES | {"spm": 0.5}
    for choice, wanted in OF_MEGATRON.items():
        monkeypatch.setattr(hashlib, "blake2b", Chosen(choice))
        assert encoded([SAMPLE], fim, pa.uint16()) == [wanted]
    monkeypatch.setattr(hashlib, "blake2b", Chosen((0, 0, False), (1, 2, False), None, (0, 1, True)))
    assert encoded([OF_FILES], fim, pa.uint16()) == [MEGATRON_OF_FILES]
    monkeypatch.setattr(hashlib, "blake2b", Chosen(None))
    assert encoded([OF_FILES], fim, pa.uint16()) == [OF_FILES]


def world_of(folder: Path, rows: list[list[int]], format: str, fim: dict[str, Any] | None) -> tuple[Any, Catalog]:
    source: dict[str, Any] = {"path": "rows.idx"}
    if format == "megatron":
        write_dataset(folder / "rows", rows, dtype="uint16")
    else:
        table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32()))})
        pq.write_table(table, folder / "rows.parquet", data_page_size=512, write_batch_size=8)
        source = {"path": "rows.parquet", "tokens": "ids"}
    recipe = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 4, "length": 256},
        "sources": {"code": source | ({} if fim is None else {"fim": fim})},
        "mixture": {"code": 1},
        "loaders": {"where": "in_process"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    loaded = load_recipe(folder / "recipe.yaml")
    return loaded, index_recipe(loaded, folder)


@pytest.mark.parametrize("format", ["megatron", "parquet"])
def test_files_are_read_with_the_lengths_of_the_index(tmp_path: Path, format: str) -> None:
    rows = make_rows(2, 400)
    _, plain = world_of(tmp_path, rows, format, None)
    _, catalog = world_of(tmp_path, rows, format, FILES)
    assert plain.fingerprint != catalog.fingerprint
    wanted = [expected(row, FILES) for row in rows]
    sizes = catalog.sources["code"].sizes
    assert sizes.tokens.tolist() == list(map(len, wanted))
    assert np.asarray(sizes.columns[IN_FILE]).tolist() == list(map(len, rows))
    largest = catalog.sources["code"].ids
    assert largest is not None and largest.largest == SUFFIX
    reader = Reader(catalog, tmp_path, cache_bytes=1 << 16)
    for chosen in np.array_split(np.random.default_rng(1).permutation(len(rows)), 3):
        counts = np.asarray(sizes.tokens)[chosen].astype(np.int64)
        half = counts // 2  # the second half of each row
        pieces = WantedPieces.end_to_end(source=0, row=chosen, epoch=2, start=half, tokens=counts - half)
        read = reader.read(pieces)
        for row, place, count in zip(chosen.tolist(), pieces.places.tolist(), (counts - half).tolist(), strict=True):
            assert read.values[place : place + count].tolist() == wanted[row][len(wanted[row]) - count :]
    whole = [np.asarray(reader.page(0, page).values) for page in range(catalog.sources["code"].pages.num_pages)]
    assert np.concatenate(whole).tolist() == [one for row in wanted for one in row]
    reader.close()


def test_an_id_that_no_model_has_is_named_with_its_row_behind_empty_ones(tmp_path: Path) -> None:
    with pytest.raises(SourceUnreadable, match="row 3 holds the token -4"):
        world_of(tmp_path, [[10, 11], [], [12], [-4, 13]], "parquet", FIM)


def test_a_loader_gives_them_and_a_file_that_was_altered_is_named(tmp_path: Path) -> None:
    rows = [row for row in make_rows(3, 60) if row]
    loaded, _ = world_of(tmp_path, rows, "megatron", FIM)
    wanted = {tuple(expected(row, FIM)) for row in rows}
    found: set[tuple[int, ...]] = set()
    with torchmix.build_loader(loaded, directory=tmp_path, max_steps=4) as loader:
        for microbatch in loader:
            starts, counts = microbatch.cu_seqlens_padded.tolist(), microbatch.cu_seqlens.diff().tolist()
            flat = microbatch.tokens.flatten().tolist()
            found |= {tuple(flat[start : start + n]) for start, n in zip(starts, counts, strict=False) if n}
    assert found == wanted
    with pytest.raises(CatalogStale, match="built with fim"):
        torchmix.build_loader(check_recipe(_without_fim(loaded)), directory=tmp_path)


def _without_fim(loaded: Any) -> dict[str, Any]:
    told = {"version": 1, "seed": 1, "batch": {"samples": 4, "length": 256}, "mixture": {"code": 1}}
    return told | {"sources": {"code": {"path": "rows.idx"}}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"fim": FIM | {"by": "character"}}, "between tokens alone"),
        ({"fim": FIM | {"ids": ["<pre>", 301, 302]}}, "write its id"),
        ({"fim": FIM | {"split": 9}}, "given together"),
        ({"fim": FILES | {"split": EOD}}, "stands for something else"),
        ({"fim": FILES | {"fragment_rate": 2}}, "fragment_rate"),
        ({"fim": FIM | {"eod": PREFIX}}, "stands for something else"),
        ({"path": "x.parquet", "text": "t", "tokenizer": "bytes", "fim": FIM}, "this source has texts"),
        ({"path": "x.parquet", "tokens": "t", "loss_mask": "m", "fim": FIM}, "without a map, a mask or items"),
        ({"path": "x.parquet", "messages": "t", "tokenizer": "bytes", "fim": FIM}, "without a map, a mask or items"),
    ],
)
def test_options_that_do_not_hold(source: dict[str, Any], message: str) -> None:
    recipe = {"version": 1, "seed": 1, "batch": {"samples": 1, "length": 8}, "mixture": {"code": 1}}
    with pytest.raises(RecipeError, match=message):
        check_recipe({**recipe, "sources": {"code": {"path": "x.idx", **source}}})
