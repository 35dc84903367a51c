"""Deny-lists: a takedown in the middle of a run. What was given is counted in the tensors, token by token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.stateful.test_edits import documents, go_on, word_of
from tests.support.loaders import run_job
from torchmix.cli.main import main
from torchmix.constructor.fields import Microbatch
from torchmix.errors import CatalogStale, DenyListError, RecipeError, StateMismatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe

ALONE = Topology()
LENGTH, DOCUMENTS = 64, 300
BASE = {"a": 0, "b": 100_000}


def tokens_of(row: int) -> int:
    """Every twentieth document is longer than a sample, and stays open for many steps."""
    return 20 * LENGTH + 5 if row % 20 == 7 else 12 + row % 9


def write(folder: Path, *, deny: str = "", method: str = "best_fit", shuffle: str = "page", ids: bool = True) -> Path:
    """The recipe over two sources, indexed; each token is the number of its document."""
    for name, first in BASE.items():
        if not (folder / f"{name}.parquet").exists():
            rows = [[first + row] * tokens_of(row) for row in range(DOCUMENTS)]
            table = {"input_ids": rows, "url": [f"{name}.example/{row}" for row in range(DOCUMENTS)]}
            pq.write_table(pa.table(table), folder / f"{name}.parquet", data_page_size=2048)
    path = folder / "recipe.yaml"
    id_key = ", id: url" if ids else ""
    lines = "".join(f"  {name}: {{path: {name}.parquet, tokens: input_ids{id_key}}}\n" for name in BASE)
    path.write_text(
        f"version: 1\nseed: 3\nbatch: {{samples: 4, length: {LENGTH}}}\nsources:\n{lines}mixture: {{a: 60%, b: 40%}}\n"
        f"shuffle: {{method: {shuffle}, window_pages: 4}}\npacking: {{method: {method}}}\n{deny}\n",
        encoding="utf-8",
    )
    index_recipe(load_recipe(path), folder)
    return path


def deny(folder: Path, name: str = "takedown.parquet", **columns: list[Any]) -> str:
    pq.write_table(pa.table(columns), folder / name)
    return f"deny: [{name}]"


def given(ranks: list[Any]) -> Counter[int]:
    return documents([microbatch for rank in ranks for microbatch in rank.microbatches])


def order_of(microbatches: list[Microbatch], source: str) -> list[int]:
    """Documents of a source as they first come, step by step."""
    first = BASE[source]
    seen: dict[int, None] = {}
    for step in sorted({microbatch.step for microbatch in microbatches}):
        found = documents([microbatch for microbatch in microbatches if microbatch.step == step])
        seen.update(dict.fromkeys(sorted(number for number in found if first <= number < first + DOCUMENTS)))
    return list(seen)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["best_fit", "concat"])
@pytest.mark.parametrize("shuffle", ["page", "row", "none"])
def test_denied_documents_do_not_come_and_no_other_is_moved(tmp_path: Path, method: str, shuffle: str) -> None:
    steps = 8
    [whole] = run_job(write(tmp_path, method=method, shuffle=shuffle), ALONE, steps=2 * steps)
    [first] = run_job(tmp_path / "recipe.yaml", ALONE, steps=steps)
    before = given([first])
    # One that is open, those that wait or come next, and some that were given: all of a, and half of b, but for 40.
    still_open = [number for number, tokens in before.items() if tokens < tokens_of(number % 100_000)]
    assert still_open, "some document is given in part"
    later = [number for number in given([whole]) if number not in before]
    taken = sorted({*still_open, *later[::2]})
    names = ["ab"[number >= BASE["b"]] for number in taken]
    text = deny(tmp_path, source=names, row=[number % 100_000 for number in taken])
    edited = write(tmp_path, deny=text, method=method, shuffle=shuffle)
    [after] = go_on(edited, first.state, 4 * steps)
    counts = given([after])
    assert not set(taken) & set(counts), "no token of a denied document is given after the edit"
    both = before + counts
    for number, tokens in both.items():
        if number not in taken:
            assert tokens <= tokens_of(number % 100_000), "nothing twice in the first epoch"
    for name in BASE:  # the others come in the order that they would have come in
        rest = [number for number in order_of(whole.microbatches, name) if number not in taken and number not in before]
        assert set(rest) <= set(both), name


def test_a_denied_document_is_gone_from_the_start_and_the_state_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, deny=deny(tmp_path, id=["a.example/3", "b.example/4", "b.example/7"]))
    [first] = run_job(path, ALONE, steps=6)
    ranks = run_job(path, Topology(dp=2), steps=160, state=first.state)
    counts = given([first]) + given(ranks)
    assert not {3, 100_004, 100_007} & set(counts) and len(counts) > DOCUMENTS, "an epoch of a, and most of b"


def test_an_edit_of_deny_lists_needs_its_word(tmp_path: Path) -> None:
    [first] = run_job(write(tmp_path), ALONE, steps=3)
    other = word_of(write(tmp_path, deny=deny(tmp_path, "other.parquet", source=["a"], row=[5])), first.state)
    edited = write(tmp_path, deny=deny(tmp_path, source=["a"], row=[3]))

    def program(loader: Any, rank: Any) -> None:
        with pytest.raises(StateMismatch, match="deny-lists changed"):
            loader.load_state_dict(first.state)
        with pytest.raises(StateMismatch, match="accepts another edit"):
            loader.load_state_dict(first.state, accept_edit=other)

    run_job(edited, ALONE, program=program)
    [after] = go_on(edited, first.state, 5)
    [again] = run_job(edited, ALONE, steps=2, state=after.result)
    assert after.digests[:2] == again.digests, "accepted before its first step: no word is needed twice"


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"source": ["a", "web"], "row": [1, 2]}, "line 1 names source 'web'"),
        ({"source": ["a"], "row": [DOCUMENTS]}, f"row {DOCUMENTS} of source 'a', which has {DOCUMENTS} rows"),
        ({"source": ["a"], "row": [-1]}, "row -1 of source 'a'"),
        ({"id": ["a.example/1", "c.example/1"]}, "'c.example/1'"),
        ({"source": ["b"], "id": ["a.example/1"]}, "'a.example/1'"),
        ({"row": [1]}, "it needs `source` and `row`"),
        ({"source": [1], "row": [1]}, "column `source` is int64"),
        ({"source": ["a"], "row": [1.5]}, "column `row` is double"),
        ({"source": ["a", None], "row": [1, 2]}, "line 1 has no `source`"),
    ],
)
def test_a_list_that_fits_no_catalog_is_refused(tmp_path: Path, columns: dict[str, list[Any]], text: str) -> None:
    write(tmp_path)
    with pytest.raises(DenyListError, match=text):
        write(tmp_path, deny=deny(tmp_path, **columns))


def test_other_bad_lists_are_named(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"no parquet")
    with pytest.raises(DenyListError, match=r"no\.parquet is no Parquet file"):
        write(tmp_path, deny="deny: [no.parquet]")
    with pytest.raises(DenyListError, match="an `id` in the recipe"):
        write(tmp_path, deny=deny(tmp_path, id=["a.example/1"]), ids=False)
    with pytest.raises(RecipeError, match=r"deny\[1\].*twice"):
        write(tmp_path, deny="deny: [takedown.parquet, takedown.parquet]")
    path = write(tmp_path, deny=deny(tmp_path, source=["a"], row=[3]))
    deny(tmp_path, source=["a"], row=[4])
    with pytest.raises(CatalogStale, match=r"takedown\.parquet was altered"):
        run_job(path, ALONE, steps=1)


def test_check_says_what_is_denied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, deny=deny(tmp_path, source=["a", "a", "b"], row=[1, 2, 7]))
    assert main(["check", str(path), "--steps", "5"]) in (0, 1)
    printed = capsys.readouterr().out
    assert f"out of a: 2 documents of {tokens_of(1) + tokens_of(2)} tokens" in printed
    assert f"out of b: 1 document of {tokens_of(7):,} tokens" in printed
