"""Fill in the middle: parts, orders, rates, lengths, and the whole road from the index to a batch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import torchmix
from tests.support.files import random_texts
from tests.support.vocabularies import END, make_tokenizer
from torchmix.errors import CatalogStale, RecipeError
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe, load_recipe
from torchmix.recipe.structs import Fim
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.fim import FimTokenizer, in_order
from torchmix.transform.open_tokenizer import Tokenizers

PREFIX, MIDDLE, SUFFIX = 300, 301, 302
IDS = (PREFIX, MIDDLE, SUFFIX)
TEXTS = [*random_texts(3, 300, mean_words=12), None, "", "a", "caf\u00e9 \u4f60\u597d"]


def of_bytes(**words: Any) -> FimTokenizer:
    """Bytes, some with their middle last."""
    return FimTokenizer(inner=BYTES, fim=Fim(**{"rate": 0.5, "ids": IDS, **words}), ids=IDS, around=(0, 1))


def documents(tokenizer: Any, texts: list[str | None], kind: pa.DataType | None = None) -> list[list[int]]:
    """Ids of each text."""
    ids, offsets = tokenizer.tokenize(pa.array(texts, kind or pa.string()), 0)
    assert len(offsets) == len(texts) + 1 and offsets[-1] == len(ids)
    return [ids[start:stop].tolist() for start, stop in pairwise(offsets)]


def filled(ids: list[int]) -> tuple[list[int], bool] | None:
    """The text that was cut, and whether its suffix comes first; None where it was not cut."""
    if PREFIX not in ids:
        return None
    at_suffix, at_middle = ids.index(SUFFIX), ids.index(MIDDLE)
    if at_suffix == 1:  # nothing tells where the prefix ends: it and the middle follow each other
        return ids[at_middle + 1 : -1] + ids[2:at_middle] + ids[-1:], True
    return ids[1:at_suffix] + ids[at_middle + 1 : -1] + ids[at_suffix + 1 : at_middle] + ids[-1:], False


def test_orders_are_those_of_the_paper() -> None:
    parts = tuple(np.array(part) for part in ([1, 2], [3], [4, 5, 6]))
    for first, wanted in (
        (False, [PREFIX, 1, 2, SUFFIX, 4, 5, 6, MIDDLE, 3]),
        (True, [PREFIX, SUFFIX, 4, 5, 6, MIDDLE, 1, 2, 3]),
    ):
        assert np.concatenate([*in_order(IDS, *parts, is_suffix_first=first)]).tolist() == wanted


@pytest.mark.parametrize("by", ["token", "character"])
def test_a_cut_text_is_the_same_text(by: str) -> None:
    plain, cut = documents(BYTES, TEXTS), documents(of_bytes(by=by, rate=1, spm=0.5), TEXTS, pa.large_string())
    ways = []
    for before, after in zip(plain, cut, strict=True):
        found = filled(after)
        if len(before) <= 1:  # null and empty
            assert after == before
            continue
        assert found is not None and found[0] == before and len(after) == len(before) + 3
        ways.append(found[1])
    assert 0.35 < np.mean(ways) < 0.65
    counts = of_bytes(by=by, rate=1).count_tokens(pa.array(TEXTS), 0)
    assert counts.tolist() == [len(one) for one in documents(of_bytes(by=by, rate=1), TEXTS)]


def test_characters_are_never_cut_apart() -> None:
    texts = ["\u4f60\u597d" * n for n in range(1, 60)]
    for ids in documents(of_bytes(by="character", rate=1, spm=0), texts):
        at = [0, ids.index(SUFFIX), ids.index(MIDDLE), len(ids) - 1]
        for start, stop in pairwise(at):
            bytes(ids[start + 1 : stop]).decode()  # raises where a character is cut


def test_the_text_alone_decides_and_rates_hold() -> None:
    texts = [text for text in TEXTS if text]
    for rate in (0.0, 0.25, 0.5, 1.0):
        cut = [filled(ids) is not None for ids in documents(of_bytes(rate=rate), texts)]  # type: ignore[arg-type]
        assert abs(np.mean(cut) - rate) < 0.1 and (rate not in (0, 1) or np.mean(cut) == rate)
    whole = documents(of_bytes(), TEXTS)
    assert [documents(of_bytes(), [text])[0] for text in TEXTS] == whole
    few, many = (documents(of_bytes(rate=rate), TEXTS) for rate in (0.25, 0.5))
    assert all(b == a for a, b in zip(few, many, strict=True) if PREFIX in a), "a higher rate cuts these, too"
    assert of_bytes().transform_id != of_bytes(rate=0.4).transform_id != of_bytes(by="character").transform_id
    assert of_bytes().vocab_size == 303


def recipe_of(folder: Path, **source: Any) -> Path:
    """A recipe of one source of texts, with a vocabulary."""
    if not (folder / "texts.parquet").exists():
        pq.write_table(pa.table({"text": [text for text in TEXTS if text]}), folder / "texts.parquet")
        make_tokenizer(folder / "tokenizer.json", specials=(END, "<pre>", "<mid>", "<suf>"))
    recipe = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 4, "length": 512},
        "sources": {
            "code": {"path": "texts.parquet", "text": "text", "tokenizer": "tokenizer.json", "end_id": END, **source}
        },
        "mixture": {"code": 1},
        "loaders": {"where": "in_process"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder / "recipe.yaml"


@pytest.mark.parametrize("keep", [None, "tokens"])
@pytest.mark.parametrize("by", ["token", "character"])
def test_batches_have_them_with_the_lengths_of_the_index(tmp_path: Path, by: str, keep: str | None) -> None:
    fim = {"rate": 0.5, "ids": ["<pre>", "<mid>", "<suf>"], "by": by}
    path = recipe_of(tmp_path, fim=fim, **({} if keep is None else {"keep": keep}))
    index_recipe(load_recipe(path), tmp_path)
    tokenizer = Tokenizers(tmp_path).open(
        "code", "tokenizer.json", end_id=END, fim=load_recipe(path).sources["code"].fim
    )
    texts = [text for text in TEXTS if text]
    wanted = {tuple(ids) for ids in documents(tokenizer, texts)}  # type: ignore[arg-type]
    assert max(map(len, wanted)) <= 512
    found: set[tuple[int, ...]] = set()
    with torchmix.build_loader(path, micro_batch_size=4, max_steps=24) as loader:
        for microbatch in loader:
            starts, counts = microbatch.cu_seqlens_padded.tolist(), microbatch.cu_seqlens.diff().tolist()
            flat = microbatch.tokens.flatten().tolist()
            for start, count in zip(starts, counts, strict=False):
                if count:
                    found.add(tuple(flat[start : start + count]))
    assert found <= wanted and len(found) > 0.9 * len(wanted)


def test_the_recipe_says_it_and_an_old_index_is_refused(tmp_path: Path) -> None:
    fim = {"rate": 0.5, "ids": ["<pre>", "<mid>", "<suf>"]}
    plain = load_recipe(recipe_of(tmp_path))
    index_recipe(plain, tmp_path)
    path = recipe_of(tmp_path, fim=fim)
    with pytest.raises(CatalogStale, match="built with fim None"):
        torchmix.build_loader(path)
    assert recipe_fingerprint(plain) != recipe_fingerprint(load_recipe(path))
    index_recipe(load_recipe(path), tmp_path)
    with torchmix.build_loader(path, max_steps=1) as loader:
        assert sum(1 for _ in loader) == 4


@pytest.mark.parametrize(
    "source, message",
    [
        ({"fim": {"rate": 1.5, "ids": [1, 2, 3]}}, "fim.rate"),
        ({"fim": {"rate": 0.5, "ids": [1, 2, 2]}}, "three tokens"),
        ({"fim": {"rate": 0.5, "ids": ["", 2, 3]}}, "is empty"),
        ({"fim": {"rate": 0.5, "ids": [1, 2, 3]}, "tokenizer": "bytes", "end_id": None}, "above 256"),
        ({"fim": {"rate": 0.5, "ids": [1, 2, 3]}, "map": "a:b"}, "without a map"),
        (
            {"fim": {"rate": 0.5, "ids": [1, 2, 3]}, "images": {"column": "i", "token": 7}},
            "without a map, a mask or items",
        ),
    ],
)
def test_options_that_do_not_hold(tmp_path: Path, source: dict[str, Any], message: str) -> None:
    plain = yaml.safe_load(recipe_of(tmp_path).read_text())
    plain["sources"]["code"] |= source
    with pytest.raises(RecipeError, match=message):
        check_recipe(plain)
