"""Training on cells: shares of several properties at once, from files to tensors, and on from a state.

Every token of the files is the number of its row, so what a loader hands out says by itself which rows it is of.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.loaders import run_job, same_microbatches
from torchmix.cli.main import main
from torchmix.errors import RecipeError
from torchmix.indexing.scan import index
from torchmix.parallel.topology import Topology
from torchmix.planner.plans import plan

ROWS = 900
"""In each source."""
TEXT = """\
version: 1
seed: 3
batch: {samples: 8, length: 64}
sources:
  wiki: {path: "wiki.parquet", tokens: ids, properties: [lang, year]}
  subtitles: {path: "subtitles.parquet", tokens: ids, properties: [lang, year]}
mixture:
  talk: {cells: {of: [wiki, subtitles], shares: {source: {wiki: 50%, subtitles: 50%}, lang: {en: 80%, de: 20%}}}, \
share: 100%}
packing: {align_tokens: 1}
shuffle: {window_pages: 4}
"""
LANGUAGES = {"wiki": ["en", "en", "de", "fr", "en"], "subtitles": ["de", "en", "de", None, "de"]}


def row_facts() -> list[tuple[str, str | None, int]]:
    """Source, language and tokens of each row, by the number that its tokens have."""
    names = ("wiki", "subtitles")
    return [(name, LANGUAGES[name][r % 5], 1 + r * 7 % 40) for name in names for r in range(ROWS)]


def write_corpus(folder: Path, *, languages: dict[str, list[Any]] | None = None) -> None:
    for first, name in enumerate(("wiki", "subtitles")):
        rows = range(ROWS)
        table = pa.table(
            {
                "ids": [[first * ROWS + r] * (1 + r * 7 % 40) for r in rows],
                "lang": [(languages or LANGUAGES)[name][r % 5] for r in rows],
                "year": [2000 + r % 3 for r in rows],
            }
        )
        pq.write_table(table, folder / f"{name}.parquet", data_page_size=2000, write_batch_size=16)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    index(path)
    return path


def tokens_in(microbatches: list[Any]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for one in microbatches:
        counts.update(one.tokens[one.source_index >= 0].tolist())
    return counts


def test_mixtera_50_to_50_by_source_and_80_to_20_by_language(recipe: Path) -> None:
    """Source: the example of Mixtera (Böther et al., 2025) whose mixture has two properties."""
    steps = 60
    whole = run_job(recipe, Topology(dp=1), steps=steps, micro_batch_size=4)[0]
    facts, by_source, by_language = row_facts(), Counter[str](), Counter[str | None]()
    for row, count in tokens_in(whole.microbatches).items():
        by_source[facts[row][0]] += count
        by_language[facts[row][1]] += count
    total = sum(by_source.values())
    assert total > 0.97 * steps * 8 * 64 and set(by_language) == {"en", "de"}
    assert by_source["wiki"] / total == pytest.approx(0.5, abs=0.005)
    assert by_language["en"] / total == pytest.approx(0.8, abs=0.005)
    first = run_job(recipe, Topology(dp=1), steps=25, micro_batch_size=4)[0]
    rest = run_job(recipe, Topology(dp=2), steps=steps - 25, micro_batch_size=4, state=first.state)
    assert [one.digests for one in rest] == [whole.digests[25:]] * 2
    same = run_job(recipe, Topology(dp=1), steps=steps - 25, micro_batch_size=4, state=first.state)[0]
    assert same_microbatches(whole.microbatches, first.microbatches + same.microbatches)


def test_a_deny_list_that_empties_a_cell_leaves_the_others(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, facts = recipe.parent, row_facts()
    recipe.write_text(
        TEXT.replace("properties:", "id: ids_text, properties:") + "hold_out: {validation: {wiki: 5%, subtitles: 5%}}\n"
    )
    for name in ("wiki", "subtitles"):
        table = pq.read_table(folder / f"{name}.parquet")
        names = pa.array([f"{name}-{row}" for row in range(ROWS)])
        pq.write_table(table.append_column("ids_text", names), folder / f"{name}.parquet", data_page_size=2000)
    index(recipe)
    [before] = run_job(recipe, Topology(), steps=20, part="validation")
    mine = tokens_in(before.microbatches)
    cell = {row for row in mine if facts[row][:2] == ("wiki", "de")}
    assert cell
    held = pa.array(sorted(cell), pa.int64())
    pq.write_table(pa.table({"source": ["wiki"] * len(cell), "row": held}), folder / "deny.parquet")
    recipe.write_text(recipe.read_text() + "deny: [deny.parquet]\n")
    index(recipe)
    [after] = run_job(recipe, Topology(), steps=20, part="validation")
    counts = tokens_in(after.microbatches)
    assert set(counts) == set(mine) - cell
    of_language = sum(n for row, n in counts.items() if facts[row][1] == "en") / sum(counts.values())
    assert of_language == pytest.approx(0.8, abs=0.02), "the other cells have its share"
    capsys.readouterr()
    for words in (
        ["check", str(recipe), "--steps", "5"],
        ["plan", str(recipe), "--steps", "5", "--part", "validation"],
    ):
        assert main(words) in (0, 1)
        assert "deny-lists name all" not in capsys.readouterr().err
    [train] = run_job(recipe, Topology(), steps=5)
    assert tokens_in(train.microbatches)


def test_each_step_has_its_shares_and_an_epoch_has_each_row_once(recipe: Path) -> None:
    cells = ("talk/subtitles/de", "talk/subtitles/en", "talk/wiki/de", "talk/wiki/en")
    asked: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    rows: dict[str, list[int]] = {name: [] for name in cells}
    for step in plan(recipe, steps=40):
        assert step.streams == cells
        asked.update(dict(zip(cells, step.asked_tokens.tolist(), strict=True)))
        drawn.update(dict(zip(cells, step.drawn_tokens.tolist(), strict=True)))
        assert all(abs(asked[name] - drawn[name]) <= 20 + 1 for name in cells), "half the longest document"
        pieces = step.pieces
        for stream, row, epoch in zip(pieces.stream.tolist(), pieces.row.tolist(), pieces.epoch.tolist(), strict=True):
            rows[cells[stream]] += [row] if epoch == 0 else []
    for name, found in rows.items():
        _, source, language = name.split("/")
        own = {r for r in range(ROWS) if LANGUAGES[source][r % 5] == language}
        assert len(set(found)) == len(found) and set(found) <= own
    assert set(rows["talk/subtitles/en"]) == set(range(1, ROWS, 5)), "the small cell has had an epoch"


def test_check_counts_rows_in_no_cell_and_shows_each_cell(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recipe), "--steps", "40"]) == 0
    shown = capsys.readouterr().out
    assert "note: mixture.talk.cells: 180 rows of wiki are in no cell, since their lang is none of de, en" in shown
    assert "180 rows of subtitles are in no cell" in shown
    assert "talk/wiki/en" in shown and re.search(r"^talk +100 %", shown, re.MULTILINE)


def test_cells_that_do_not_exist_have_no_share_and_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path, languages={"wiki": ["en"] * 5, "subtitles": ["en", "de", "en", "de", "de"]})
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    index(path)
    whole = run_job(path, Topology(dp=1), steps=20, micro_batch_size=8)[0]
    first = run_job(path, Topology(dp=1), steps=9, micro_batch_size=8)[0]
    rest = run_job(path, Topology(dp=1), steps=11, micro_batch_size=8, state=first.state)[0]
    assert same_microbatches(whole.microbatches, first.microbatches + rest.microbatches)
    assert main(["check", str(path), "--steps", "300"]) == 0
    shown = capsys.readouterr().out
    assert "talk/subtitles/de" in shown and "talk/wiki/de" not in shown.partition("rows of")[0]
    assert main(["plan", str(path), "--steps", "5"]) == 0
    assert "talk/wiki/de" not in capsys.readouterr().out


def test_shares_that_the_cells_cannot_have_are_an_error_with_the_nearest(tmp_path: Path) -> None:
    write_corpus(tmp_path, languages={"wiki": ["en"] * 5, "subtitles": ["de"] * 5})
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    index(path)
    with pytest.raises(RecipeError, match="no shares of the cells that exist") as caught:
        list(plan(path, steps=1))
    assert caught.value.where == "mixture.talk.cells.shares" and "lang: de" in caught.value.message
    path.write_text(TEXT.replace("de: 20%", "sv: 20%"))
    index(path)
    with pytest.raises(RecipeError, match="no document has lang 'sv'"):
        list(plan(path, steps=1))


def test_numbers_are_values_and_sources_without_shares_come_by_their_size(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    path = tmp_path / "recipe.yaml"
    head, _, _ = TEXT.partition("mixture:")
    cells = 'talk: {share: 100%, cells: {of: [subtitles, wiki], shares: {lang: {de: 3, en: 1}, year: {"2000": 60%, '
    cells += '"2002": 40%}}}}'
    path.write_text(f"{head}mixture: {{{cells}}}\npacking: {{align_tokens: 1}}\n")
    index(path)
    given: Counter[str] = Counter()
    for step in plan(path, steps=80):
        given.update(dict(zip(step.streams, step.drawn_tokens.tolist(), strict=True)))
    total = sum(given.values())

    def part(text: str) -> float:
        return sum(count for name, count in given.items() if text in name) / total

    assert part("/de/") == pytest.approx(0.75, abs=0.005) and part("/2000") == pytest.approx(0.6, abs=0.005)
    facts = [(name, language, 2000 + r % ROWS % 3, n) for r, (name, language, n) in enumerate(row_facts())]
    sizes = {
        name: sum(n for source, language, year, n in facts if (source, language, year) == (name, "de", 2000))
        for name in ("wiki", "subtitles")
    }
    assert given["talk/wiki/de/2000"] / given["talk/subtitles/de/2000"] == pytest.approx(
        sizes["wiki"] / sizes["subtitles"], rel=0.02
    )


def test_a_hold_out_has_cells_too_and_no_row_of_training(recipe: Path) -> None:
    recipe.write_text(TEXT + "hold_out: {validation: {wiki: 2%, subtitles: 1%}}\n")
    index(recipe)
    train = set(
        tokens_in(run_job(recipe, Topology(dp=1), part="train", one_pass=True, micro_batch_size=8)[0].microbatches)
    )
    held = run_job(recipe, Topology(dp=1), part="validation", one_pass=True, micro_batch_size=8)[0]
    rows = set(tokens_in(held.microbatches))
    facts = row_facts()
    assert rows and not rows & train
    assert rows | train == {r for r, (_, language, _) in enumerate(facts) if language in ("en", "de")}


def test_cells_run_out_and_change_over_a_schedule_as_other_streams_do(recipe: Path) -> None:
    text = TEXT.replace("properties: [lang, year]}\n  sub", "properties: [lang, year], max_epochs: 1, "
                        "on_exhausted: renormalise}\n  sub")  # fmt: skip
    later = "cells: {of: [wiki, subtitles], shares: {source: {wiki: 1, subtitles: 3}, lang: {en: 1, de: 1}}}"
    text += f"schedule: [{{from: 10 steps, mixture: {{talk: {{share: 100%, {later}}}}}}}]\n"
    recipe.write_text(text)
    index(recipe)
    shares = []
    for step in plan(recipe, steps=300):
        shares.append(step.asked_tokens / step.asked_tokens.sum())
    assert shares[5][2:].sum() == pytest.approx(0.5, abs=0.01)
    assert shares[12][2:].sum() == pytest.approx(0.25, abs=0.01)
    assert shares[12][[1, 3]].sum() == pytest.approx(0.5, abs=0.01)
    assert shares[-1][2:].sum() == 0 and shares[-1].sum() == pytest.approx(1)
