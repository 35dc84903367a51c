"""Shares that count documents: `unit: documents`, from files to tensors, and on from a state.

Every token of the files is the number of its row, so what a loader hands out says by itself which rows it is of.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.loaders import Rank, run_job, same_microbatches
from tests.support.mixtures import forecast_of
from torchmix.catalog.store import open_part
from torchmix.cli.main import main
from torchmix.errors import StateMismatch
from torchmix.indexing.scan import index
from torchmix.parallel.topology import Topology
from torchmix.planner.plans import plan
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful.loader import StatefulDataLoader

TEXT = """\
version: 1
seed: 3
unit: documents
batch: {samples: 8, length: 64}
sources:
  books: {path: "books.parquet", tokens: ids}
  chats: {path: "chats.parquet", tokens: ids}
  notes: {path: "notes.parquet", tokens: ids, max_epochs: 1, on_exhausted: renormalise}
mixture: {books: 20%, chats: 70%, notes: 10%}
packing: {align_tokens: 1}
shuffle: {window_pages: 4}
"""
SHARES = {"books": 0.2, "chats": 0.7, "notes": 0.1}
ROWS = {"books": 150, "chats": 2000, "notes": 90}
"""Books have up to 300 tokens, which is many samples; chats and notes up to 12; one row in seven is empty."""


def lengths_of(name: str) -> list[int]:
    most = 300 if name == "books" else 12
    return [0 if r % 7 == 3 else 1 + r * 37 % most for r in range(ROWS[name])]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    first = 0
    for name, count in ROWS.items():
        ids = [[first + r] * n for r, n in enumerate(lengths_of(name))]
        table = pa.table({"ids": pa.array(ids, pa.list_(pa.int64()))})
        pq.write_table(table, tmp_path / f"{name}.parquet", data_page_size=2000, write_batch_size=16)
        first += count
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    index(path)
    return path


def begun_documents(recipe: Path, steps: int) -> list[Counter[str]]:
    """Documents of each source whose first piece was drawn up to each step, in samples or waiting."""
    counts = [Counter[str]() for _ in range(steps)]
    for step in plan(recipe, steps=steps + 20):
        pieces = step.pieces.take(step.pieces.start == 0)
        for source, drawn in zip(pieces.source.tolist(), pieces.drawn_step.tolist(), strict=True):
            for after in range(drawn, steps):
                counts[after][step.sources[source]] += 1
    return counts


def test_documents_have_their_shares_after_every_step(recipe: Path) -> None:
    steps = 12
    counts = begun_documents(recipe, steps)
    for step, count in enumerate(counts):
        total = sum(count.values())
        assert total > 5
        for name, share in SHARES.items():
            assert abs(count[name] - share * total) <= 0.5 + share * 0.5 * len(SHARES) + 0.1, (step, name)
    drawn = Counter[str]()
    for one in plan(recipe, steps=steps):
        drawn.update(dict(zip(one.streams, one.drawn_tokens.tolist(), strict=True)))
        assert one.fill > 0.9
    assert drawn["books"] / sum(drawn.values()) > 0.7, "books are long, and few"


def test_an_epoch_has_every_document_once_and_a_run_goes_on_at_another_layout(recipe: Path) -> None:
    once = run_job(recipe, Topology(dp=1), one_pass=True, micro_batch_size=8)[0]
    counts: Counter[int] = Counter()
    for one in once.microbatches:
        counts.update(one.tokens[one.source_index >= 0].tolist())
    wanted = [n for name in ROWS for n in lengths_of(name)]
    assert counts == {row: n for row, n in enumerate(wanted) if n}
    whole = run_job(recipe, Topology(dp=1), steps=30, micro_batch_size=4)[0]
    first = run_job(recipe, Topology(dp=1), steps=11, micro_batch_size=4)[0]
    rest = run_job(recipe, Topology(dp=1), steps=19, micro_batch_size=4, state=first.state)[0]
    assert same_microbatches(whole.microbatches, first.microbatches + rest.microbatches)
    other = run_job(recipe, Topology(dp=2), steps=19, micro_batch_size=4, state=first.state)
    assert [one.digests for one in other] == [whole.digests[11:]] * 2


def test_it_is_part_of_the_order_and_works_with_every_shuffle_and_packing(recipe: Path) -> None:
    digests = {}
    for packing in ("best_fit", "concat"):
        for shuffle in ("page", "row", "none"):
            text = TEXT.replace("window_pages: 4", f"window_pages: 4, method: {shuffle}")
            recipe.write_text(text.replace("align_tokens: 1", f"align_tokens: 8, method: {packing}"))
            digests[packing, shuffle] = [one.order_digest for one in plan(recipe, steps=6)][-1]
    assert len(set(digests.values())) == len(digests)
    recipe.write_text(TEXT)
    state = run_job(recipe, Topology(dp=1), steps=3, micro_batch_size=8)[0].state
    recipe.write_text(TEXT.replace("unit: documents", "unit: tokens"))
    with pytest.raises(StateMismatch, match="differ"):
        run_job(recipe, Topology(dp=1), steps=1, micro_batch_size=8, state=state)


def test_sizes_of_groups_count_documents_and_check_estimates_tokens(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(recipe), "--steps", "80"]) == 0
    shown = capsys.readouterr().out
    assert "sources.notes: runs out" in shown
    group = "{all: {share: 1, proportional: 1, children: [books, chats, notes]}}"
    recipe.write_text(TEXT.replace("{books: 20%, chats: 70%, notes: 10%}", group))
    asked = np.zeros(3)
    for one in plan(recipe, steps=5):
        asked += one.asked_tokens
    assert asked / asked.sum() == pytest.approx(np.array(list(ROWS.values())) / sum(ROWS.values()), abs=0.01)


def test_an_estimate_beyond_the_planned_steps_counts_tokens(recipe: Path) -> None:
    part = part_of(load_recipe(recipe), "train")
    catalog = open_part(recipe.parent / "catalog", part)
    sizes = {name: one.sizes for name, one in catalog.sources.items()}
    exact, guess = (forecast_of(part, sizes, 60, simulated_steps=n) for n in (60, 12))
    for one, other in zip(exact.sources, guess.sources, strict=True):
        assert other.delivered_tokens == pytest.approx(one.delivered_tokens, rel=0.15), one.name
    ends: list[Any] = [one.sources[2].runs_out_step for one in (exact, guess)]
    assert abs(ends[0] - ends[1]) <= 3


@pytest.mark.system
def test_a_worker_of_the_node_gives_the_same_batches(recipe: Path) -> None:
    alone = run_job(recipe, Topology(), steps=6, micro_batch_size=4)[0]
    [worker] = run_job(recipe, Topology(), steps=6, micro_batch_size=4, loaders="node")
    assert worker.digests == alone.digests and worker.state == alone.state
    assert same_microbatches(worker.microbatches, alone.microbatches)


def test_a_policy_decides_shares_of_documents(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounded = TEXT.replace(", max_epochs: 1, on_exhausted: renormalise", "")
    dynamic = "dynamic: {policy: file, every: 2 steps, lag: 1 steps, options: {path: shares.yaml}}\n"
    recipe.write_text(bounded + dynamic)
    shares = {"books": "10%", "chats": "75%", "notes": "15%"}
    (recipe.parent / "shares.yaml").write_text(str(shares).replace("'", ""))
    losses = dict.fromkeys(shares, (3.0, 1))

    def train(loader: StatefulDataLoader, rank: Rank) -> None:
        for microbatch in loader:
            if microbatch.is_last_of_step:
                loader.report(microbatch.step, losses)
                rank.digests.append(loader.order_digest)
                if microbatch.step == 23:
                    return

    alone = run_job(recipe, Topology(), program=train, micro_batch_size=8)[0]
    recipe.write_text(bounded + dynamic.replace("options", "decisions: ./of-pair, options"))
    pair = run_job(recipe, Topology(dp=2), program=train, micro_batch_size=4)
    assert pair[0].digests == pair[1].digests == alone.digests
    steps = ["--start", "4", "--steps", "20", "--decisions", str(recipe.parent / "decisions"), "--json"]
    assert main(["plan", str(recipe), *steps]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["order_digest"] == alone.digests[-1]
    asked = {one["name"]: one["asked_tokens"] for one in planned["sources"]}
    total = sum(asked.values())
    assert {name: round(100 * of_name / total) for name, of_name in asked.items()} == {
        "books": 10,
        "chats": 75,
        "notes": 15,
    }


def test_a_module_computes_each_piece_of_its_documents_once(recipe: Path) -> None:
    before = [one.order_digest for one in plan(recipe, steps=4)]
    recipe.write_text(TEXT + "modules: {query: {sources: [books], axis: WORLD}}\n")
    for digest, one in zip(before, plan(recipe, steps=4, dp=2), strict=True):
        assert one.order_digest == digest, "a module moves no piece"
        module = one.item_modules["query"]
        books = np.flatnonzero(one.pieces.source == one.sources.index("books"))
        assert np.array_equal(np.sort(module.items.piece), books) and len(books) > 2
        assert np.array_equal(module.items.tokens, one.pieces.tokens[module.items.piece])
        assert set(module.consumer_of_item.tolist()) == {0, 1}
