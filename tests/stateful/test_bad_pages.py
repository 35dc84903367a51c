"""Pages that turn bad after they were indexed, under `bad_rows: mask`: what each rank gets, and where all stop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.catalogs import open_catalog
from tests.support.files import flip_byte, make_tokens_file
from tests.support.loaders import Rank, open_job, run_job
from tests.support.worlds import run_ranks
from torchmix.constructor.fields import Microbatch
from torchmix.errors import CorruptPage, SourceChanged, TooManyBadRows
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.steps.state import decode_state

ROWS, ROW_TOKENS, STEPS = 400, 20, 6
VOCABULARY = ROWS * ROW_TOKENS

RECIPE = """\
version: 1
seed: 3
batch: {{samples: 8, length: 64}}
sources:
  web: {{path: web.parquet, tokens: input_ids, bad_rows: {bad_rows}{max_bad}}}
  clean: {{path: clean.parquet, tokens: input_ids}}
mixture: {{web: 70%, clean: 30%}}
packing: {{method: best_fit, align_tokens: 4}}
balance: {{method: rows, model: {{layers: 4, hidden: 64, ffn: 128, heads: 4}}}}
"""


def write_job(folder: Path, *, bad_rows: str = "mask", max_bad: str = ", max_bad: 50%") -> Path:
    """Row r of `web` holds ids from r * ROW_TOKENS on, and lies in a page alone; so does each row of `clean`."""
    for name in ("web", "clean"):
        rng = np.random.default_rng(len(name))
        rows = [
            np.arange(r * ROW_TOKENS, r * ROW_TOKENS + n).tolist()
            for r, n in enumerate(rng.integers(16, ROW_TOKENS + 1, ROWS))
        ]
        make_tokens_file(folder / f"{name}.parquet", rows, page_bytes=16, codec="none")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(bad_rows=bad_rows, max_bad=max_bad if bad_rows == "mask" else ""))
    index_recipe(load_recipe(recipe), folder)
    return recipe


def damage(recipe: Path, rows: Sequence[int], *, source: str = "web") -> None:
    """Flip a byte in the page of each row, which has no other."""
    pages = open_catalog(load_recipe(recipe), recipe.parent).sources[source].pages
    place = pages.place(pages.page_of_rows(np.array(rows)))
    assert place.num_rows.tolist() == [1] * len(rows)
    for offset, num_bytes in zip(place.offset.tolist(), place.num_bytes.tolist(), strict=True):
        flip_byte(recipe.parent / f"{source}.parquet", offset + num_bytes - 10)


def rows_in(microbatches: Sequence[Microbatch], source: int) -> list[int]:
    """Rows of a source, 0 for `clean` and 1 for `web`, that some microbatches hold tokens of."""
    found: set[int] = set()
    for one in microbatches:
        assert one.tokens is not None and one.source_index is not None
        found |= set((one.tokens[one.source_index == source] // ROW_TOKENS).tolist())
    return sorted(found)


def of_step(rank: Rank, step: int) -> list[Microbatch]:
    return [one for one in rank.microbatches if one.step == step]


def gradients(ranks: Sequence[Rank], step: int) -> list[torch.Tensor]:
    """Gradients of a small model's loss over a global batch, in float64, summed over ranks as a reduction sums them."""
    torch.manual_seed(0)
    table = torch.randn(VOCABULARY, 8, dtype=torch.float64, requires_grad=True)
    head = torch.randn(8, VOCABULARY, dtype=torch.float64, requires_grad=True)
    for rank in ranks:
        for one in of_step(rank, step):
            assert one.tokens is not None and one.labels is not None and one.loss_mask is not None
            scores = torch.tanh(table[one.tokens]) @ head
            losses = torch.nn.functional.cross_entropy(
                scores.flatten(0, 1), one.labels.clamp(min=0).flatten(), reduction="none"
            )
            (torch.dot(losses, one.loss_mask.flatten().double()) / one.num_tokens_global).backward()
    assert table.grad is not None and head.grad is not None
    return [table.grad, head.grad]


@pytest.mark.slow
def test_a_bad_page_on_one_of_four_leaders_is_padding_without_loss_and_gradients_are_those_of_one_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_job(tmp_path)
    sound = run_job(recipe, Topology(dp=4), steps=STEPS)
    step = 2
    row = rows_in(of_step(sound[3], step), source=1)[1]
    assert [row in rows_in(of_step(rank, step), source=1) for rank in sound] == [False, False, False, True]
    damage(recipe, [row])
    caplog.set_level(logging.WARNING, logger="torchmix")
    four, [one] = run_job(recipe, Topology(dp=4), steps=STEPS), run_job(recipe, Topology(), steps=STEPS)
    assert {rank.digests[-1] for rank in (*sound, *four, one)} == {one.digests[-1]}  # the order is as it was
    assert "web.parquet" in caplog.text and "its rows come without loss" in caplog.text

    for rank in (*four, one):
        assert row not in rows_in(rank.microbatches, source=1)
    for s in range(STEPS):
        total = sum(float(m.loss_mask.sum()) for rank in four for m in of_step(rank, s) if m.loss_mask is not None)
        assert {m.num_tokens_global for rank in (*four, one) for m in of_step(rank, s)} == {total}
    lost = of_step(sound[0], step)[0].num_tokens_global - of_step(four[0], step)[0].num_tokens_global
    [bad] = {m.num_tokens_global for m in of_step(one, step)}
    tokens = int(open_catalog(load_recipe(recipe), tmp_path).sources["web"].sizes.tokens[row])
    assert lost == tokens - 1 and bad > 0  # its last token had no label before either

    for before, after in zip(sound[3].microbatches, four[3].microbatches, strict=True):
        held = {"tokens": before.tokens, "labels": before.labels, "loss_mask": before.loss_mask}
        for name, wanted in held.items():
            found = getattr(after, name)
            assert found is not None and wanted is not None and before.tokens is not None
            is_bad = (before.tokens // ROW_TOKENS == row) & (before.source_index == 1)
            assert torch.equal(found[~is_bad], wanted[~is_bad]) and not found[is_bad].any(), name
        assert torch.equal(before.position_ids, after.position_ids)
        assert torch.equal(before.cu_seqlens, after.cu_seqlens)
    for mine, alone in zip(gradients(four, step), gradients([one], step), strict=True):
        torch.testing.assert_close(mine, alone, rtol=1e-12, atol=1e-14)
    assert all(rank.state == four[0].state for rank in four)
    fingerprint = decode_state(one.state["torchmix_state"], recipe=recipe_of(one.state))
    assert fingerprint.bad_tokens == {"web": tokens}


def test_what_several_leaders_of_a_replica_could_not_read_counts_once(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    [sound] = run_job(recipe, Topology(), steps=3)
    damage(recipe, rows_in(of_step(sound, 1), source=1)[:3])
    [one] = run_job(recipe, Topology(), steps=3)
    stages = ClientPlaceTree.from_topology(Topology(pp=2, dp=2), leaders="stage")
    assert len(stages.leaders) == 4
    for rank in run_job(recipe, stages, steps=3):
        found = [of_step(rank, step)[0].num_tokens_global for step in range(3)]
        assert found == [of_step(one, step)[0].num_tokens_global for step in range(3)]
        assert bad_tokens_of(rank) == bad_tokens_of(one) != {}


def bad_tokens_of(rank: Rank) -> dict[str, int]:
    return dict(decode_state(rank.state["torchmix_state"], recipe=recipe_of(rank.state)).bad_tokens)


def recipe_of(state: dict[str, Any]) -> str:
    """The fingerprint that a state holds."""
    text: bytes = state["torchmix_state"]
    at = text.index(b"recipe") + len(b"recipe") + 1
    return text[at : at + 16].decode()


def run_to_the_error(recipe: Path, topology: Topology, state: dict[str, Any] | None = None) -> list[tuple[int, str]]:
    """Whole steps that each rank was given, and how it ended."""

    def consume(loader: StatefulDataLoader) -> tuple[int, str]:
        last = -1
        if state is not None:
            loader.load_state_dict(state)
        with pytest.raises(TooManyBadRows) as caught:
            for one in loader:
                if one.is_last_of_step:
                    last = one.step
                assert last < 60, "a bound that nobody judges"
        loader.close()
        return last, str(caught.value)

    return run_ranks(open_job(recipe, topology), consume, deadline_s=120)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [Topology(tp=2, dp=2), Topology(dp=4), Topology(tp=2), Topology()])
def test_above_the_bound_all_ranks_stop_at_the_same_step_with_the_same_error_however_often_resumed(
    topology: Topology, tmp_path: Path
) -> None:
    recipe = write_job(tmp_path, max_bad=", max_bad: 3%")  # 12 rows an epoch
    damage(recipe, range(0, ROWS, 10))
    ends = run_to_the_error(recipe, topology)
    assert len(set(ends)) == 1
    step, text = ends[0]
    assert step >= 1 and "source 'web'" in text and "max_bad" in text
    state = None
    for _ in range(step):  # stopped after each step, and at another layout
        [rank] = run_job(recipe, Topology(), steps=1, state=state)
        state = rank.state
    assert run_to_the_error(recipe, topology, state) == ends


def test_without_mask_a_bad_page_is_an_error_and_with_it_another_file_still_is(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, bad_rows="error")
    damage(recipe, range(ROWS))
    with pytest.raises(CorruptPage, match="has checksum"):
        run_job(recipe, Topology(), steps=STEPS)
    recipe = write_job(tmp_path)
    make_tokens_file(tmp_path / "web.parquet", [[1, 2, 3]] * 50)
    with pytest.raises(SourceChanged):
        run_job(recipe, Topology(), steps=STEPS)


def test_a_bad_document_of_many_samples_is_blank_in_every_step_that_draws_of_it(tmp_path: Path) -> None:
    """Also what is left of it outside of its page, which later steps take without another look at the page."""
    recipe = write_job(tmp_path, max_bad=", max_bad: 100%")
    rows = [list(range(1, 5001)), *([6000] * 20 for _ in range(60))]
    make_tokens_file(tmp_path / "web.parquet", rows, page_bytes=16)
    index_recipe(load_recipe(recipe), tmp_path)
    [sound] = run_job(recipe, Topology(), steps=20)
    damage(recipe, [0])
    [rank] = run_job(recipe, Topology(), steps=20)
    with_it = set()
    for before, after in zip(sound.microbatches, rank.microbatches, strict=True):
        assert before.tokens is not None and after.tokens is not None and after.loss_mask is not None
        is_bad = (before.source_index == 1) & (before.tokens < 6000)
        with_it |= {before.step} if is_bad.any() else set()
        assert torch.equal(after.tokens[~is_bad], before.tokens[~is_bad])
        assert not after.tokens[is_bad].any() and not after.loss_mask[is_bad].any()
    assert len(with_it) > 3
    for step in range(20):
        total = sum(float(one.loss_mask.sum()) for one in of_step(rank, step) if one.loss_mask is not None)
        assert {one.num_tokens_global for one in of_step(rank, step)} == {total}
