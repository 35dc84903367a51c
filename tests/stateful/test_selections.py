"""Training on rows of sources: selections, children and hold-outs, from files to tensors, and on from a state.

Every token of the files is the number of its row, so what a loader hands out says by itself which rows it is of.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.loaders import run_job, same_microbatches
from tests.support.selections import make_rows, write_rows
from torchmix.errors import StateMismatch
from torchmix.indexing.scan import index
from torchmix.parallel.topology import Topology
from torchmix.planner.plans import plan
from torchmix.recipe.changes import parse_shares
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of

ROWS = 800
TEXT = """\
version: 1
seed: 3
batch: {samples: 8, length: 64}
sources:
  web: {path: "web/*/*.parquet", tokens: ids, id: url, properties: [lang, quality], split_by: dir}
  german: {from: web, where: "lang = 'de' and quality >= 0.5"}
mixture: {rest: {share: 60%, children: {web: 1, web/b: 2}}, german: 40%}
hold_out: {validation: {web: 10%}}
packing: {align_tokens: 1}
shuffle: {window_pages: 4}
"""
GROUP = "rest: {share: 60%, children: {web: 1, web/b: 2}}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for number, folder in enumerate("ab"):
        write_rows(tmp_path / "web" / folder / "0.parquet", ROWS // 2 * number, ROWS // 2)
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    index(path)
    return path


def streams_by_hand() -> dict[str, set[int]]:
    """The rows of each stream before rows are held out, from the values of the files."""
    rows = make_rows(0, ROWS).to_pylist()
    german = {r for r, one in enumerate(rows) if one["lang"] == "de" and (one["quality"] or 0) >= 0.5}
    b = set(range(ROWS // 2, ROWS)) - german
    return {"german": german, "web/b": b, "web": set(range(ROWS)) - b - german}


def rows_in(microbatches: list[Any]) -> Counter[int]:
    """Tokens of each row that microbatches hold; labels and loss say where a token is none."""
    counts: Counter[int] = Counter()
    for one in microbatches:
        real = one.source_index >= 0
        counts.update(one.tokens[real].tolist())
    return counts


def test_each_stream_gives_its_rows_and_its_share_and_nothing_that_is_held_out(recipe: Path) -> None:
    steps = 60
    rank = run_job(recipe, Topology(dp=1), steps=steps, micro_batch_size=8)[0]
    counts = rows_in(rank.microbatches)
    one_pass = run_job(recipe, Topology(dp=1), part="validation", one_pass=True, micro_batch_size=8)[0]
    held = set(rows_in(one_pass.microbatches))
    assert 40 < len(held) < 120 and not held & set(counts)
    streams = streams_by_hand()
    total = sum(counts.values())
    for name, share in parse_shares(part_of(load_recipe(recipe), "train")).items():
        tokens = sum(count for row, count in counts.items() if row in streams[name])
        assert abs(tokens / total - share) < 0.02, name


def test_a_pass_over_each_part_has_every_row_once_in_one_of_them(recipe: Path) -> None:
    counts: Counter[int] = Counter()
    for part in ("train", "validation"):
        rank = run_job(recipe, Topology(dp=1), part=part, one_pass=True, micro_batch_size=8)[0]
        counts += rows_in(rank.microbatches)
    assert counts == dict(enumerate(len(ids) for ids in make_rows(0, ROWS)["ids"].to_pylist()))


def test_plans_name_stream_and_source(recipe: Path) -> None:
    streams = streams_by_hand()
    for step in plan(recipe, steps=10):
        assert step.streams == ("german", "web", "web/b") and step.sources == ("web",)
        assert set(step.pieces.source.tolist()) == {0}
        for stream, row in zip(step.pieces.stream.tolist(), step.pieces.row.tolist(), strict=True):
            assert row in streams[step.streams[stream]]


def test_a_run_goes_on_bit_for_bit_at_another_layout(recipe: Path) -> None:
    whole = run_job(recipe, Topology(dp=1), steps=12, micro_batch_size=4)[0]
    first = run_job(recipe, Topology(dp=1), steps=5, micro_batch_size=4)[0]
    rest = run_job(recipe, Topology(dp=1), steps=7, micro_batch_size=4, state=first.state)[0]
    assert same_microbatches(whole.microbatches, first.microbatches + rest.microbatches)
    other = run_job(recipe, Topology(dp=2), steps=7, micro_batch_size=4, state=first.state)
    assert [one.digests for one in other] == [whole.digests[5:]] * 2


def test_a_state_belongs_to_the_rows_that_it_was_saved_with(recipe: Path) -> None:
    first = run_job(recipe, Topology(dp=1), steps=3, micro_batch_size=8)[0]
    recipe.write_text(TEXT.replace("quality >= 0.5", "not (quality < 0.5)"))
    index(recipe)
    run_job(recipe, Topology(dp=1), steps=1, micro_batch_size=8, state=first.state)
    recipe.write_text(TEXT.replace("quality >= 0.5", "quality >= 0.6"))
    index(recipe)
    with pytest.raises(StateMismatch):
        run_job(recipe, Topology(dp=1), steps=1, micro_batch_size=8, state=first.state)


def test_a_split_cuts_selections_and_what_they_leave_as_it_cuts_their_source(recipe: Path) -> None:
    text = TEXT.replace("hold_out: {validation: {web: 10%}}", "split: [3, 1]").replace(GROUP, "web: 60%")
    recipe.write_text(text)
    index(recipe)
    lengths = [len(ids) for ids in make_rows(0, ROWS)["ids"].to_pylist()]
    for part, rows in (("train", range(3 * ROWS // 4)), ("validation", range(3 * ROWS // 4, ROWS))):
        rank = run_job(recipe, Topology(dp=1), part=part, one_pass=True, micro_batch_size=8)[0]
        assert rows_in(rank.microbatches) == {row: lengths[row] for row in rows}, part


def test_a_loader_indexes_what_its_recipe_selects(tmp_path: Path) -> None:
    write_rows(tmp_path / "web" / "a" / "0.parquet", 0, 200)
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT.replace(f"{{{GROUP}, german: 40%}}", "{german: 1}"))
    counts = rows_in(run_job(path, Topology(dp=1), steps=3, micro_batch_size=8)[0].microbatches)
    german = {row for row in range(200) if row % 4 == 0}
    assert counts and set(counts) <= german


LICENCES = ["MIT", "Apache-2.0", "GPL-3.0", "CC-BY"]


def test_mixtera_figure_2_a_licence_filter_and_70_to_30(tmp_path: Path) -> None:
    """Python and JavaScript under permissive licences are mixed 70:30.

    Source: figure 2 of Mixtera (Böther et al., 2025): a query keeps licences, a mixture of two languages is 70:30.
    """
    rows = range(1200)
    table = pa.table(
        {
            "ids": [[row] * (1 + row % 30) for row in rows],
            "language": [("Python", "JavaScript", "C")[row % 3] for row in rows],
            "licence": [LICENCES[row * 7 // 5 % 4] for row in rows],
        }
    )
    pq.write_table(table, tmp_path / "code.parquet", data_page_size=2000, write_batch_size=16)
    permissive = "licence in ('MIT', 'Apache-2.0') and language ="
    text = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 8, "length": 64},
        "packing": {"align_tokens": 1},
        "sources": {
            "code": {"path": "code.parquet", "tokens": "ids", "properties": ["language", "licence"]},
            "python": {"from": "code", "where": f"{permissive} 'Python'"},
            "javascript": {"from": "code", "where": f"{permissive} 'JavaScript'"},
        },
        "mixture": {"python": "70%", "javascript": "30%"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(text))
    counts = rows_in(run_job(tmp_path / "recipe.yaml", Topology(dp=1), steps=30, micro_batch_size=8)[0].microbatches)
    values = table.to_pylist()
    assert all(values[row]["licence"] in LICENCES[:2] for row in counts)
    python = sum(count for row, count in counts.items() if values[row]["language"] == "Python")
    javascript = sum(count for row, count in counts.items() if values[row]["language"] == "JavaScript")
    assert python + javascript == sum(counts.values())
    assert abs(python / (python + javascript) - 0.7) < 64 / sum(counts.values())


def test_easy_to_hard_by_quantiles(tmp_path: Path) -> None:
    """A schedule walks through the quarters of a source by a number: easy rows first, hard ones last."""
    rows = range(2000)
    difficulty = [row * 7919 % 2000 for row in rows]
    table = pa.table({"ids": [[row] * (1 + row % 9) for row in rows], "difficulty": difficulty})
    pq.write_table(table, tmp_path / "g.parquet", data_page_size=2000, write_batch_size=32)
    text = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 4, "length": 64},
        "packing": {"align_tokens": 1},
        "sources": {
            "grades": {
                "path": "g.parquet",
                "tokens": "ids",
                "properties": ["difficulty"],
                "split_by": {"column": "difficulty", "quantiles": 4},
            }
        },
        "mixture": {"grades/q1": "100%"},
        "schedule": [{"from": f"{5 * n} steps", "mixture": {f"grades/q{n + 1}": "100%"}} for n in range(1, 4)],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(text))
    index(path)
    for step in plan(path, steps=20):
        quarter = step.step // 5
        drawn = step.pieces.row[step.pieces.drawn_step == step.step]
        assert len(drawn)
        assert all(500 * quarter <= difficulty[row] < 500 * (quarter + 1) for row in drawn.tolist()), step.step
