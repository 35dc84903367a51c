"""Random recipes, folded by the native library and by the reference: a few of the trial, and that it can fail."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.mixtures import make_planner
from tests.support.native import built_library, native_or_not
from tests.support.recipes import make_recipe
from tests.trials.folds import try_recipe
from torchmix.catalog.sizes import SourceSizes
from torchmix.planner import folding
from torchmix.planner.pack import Pieces


@pytest.fixture(autouse=True)
def native_library() -> None:
    built_library()


WITH_CUT_SOURCES = (17, 42, 99)


@pytest.mark.parametrize("number", [*range(6), *WITH_CUT_SOURCES])
def test_a_native_fold_is_that_of_the_reference(number: int) -> None:
    found = try_recipe(5, number, steps=25)
    assert found.get("refused") or found["calls"] > 0


def test_whole_documents_that_exceed_a_batch_beside_cut_ones_are_held_back_alike() -> None:
    names = [f"s{number}" for number in range(12)]
    shares = dict.fromkeys(names, "7%") | {"cut": "16%"}
    packing = {"method": "best_fit", "align_tokens": 1}
    recipe = make_recipe(
        shares, samples=2, length=64, packing=packing, sources={"cut": {"packing": {"method": "concat"}}}
    )
    sizes = {
        name: SourceSizes(
            first_row_of_page=np.array([0, 40]),
            tokens=np.random.default_rng(number).integers(1, 6 if name == "cut" else 64, 40, np.int32),
            window_pages=1,
        )
        for number, name in enumerate(sorted(shares))
    }
    digests, most = [], 0
    for is_native in (False, True):
        with native_or_not(is_native):
            planner, cursor = make_planner(recipe, sizes), None
            for _ in range(40):
                before = planner.start() if cursor is None else cursor
                packed, drawn, _, cursor = planner.fold(before)
                at_hand = Pieces.concatenate([before.pool, drawn])
                most = max(most, int(at_hand.tokens[planner.cuts(64)[at_hand.source] > 0].sum()))
                digests.append((is_native, cursor.order_digest, packed.pool.row.tolist()))
    assert most > 2 * 64 + 64, "whole ones are more than a batch, so that some are held back"
    assert [one[1:] for one in digests[:40]] == [one[1:] for one in digests[40:]]


def test_what_is_drawn_goes_on_with_what_waits_of_its_document() -> None:
    shares, align = {"chats": "50%", "books": "40%", "logs": "10%"}, 8
    sources = {name: {"packing": {"method": "concat"}} for name in ("books", "logs")}
    recipe = make_recipe(
        shares, samples=4, length=256, packing={"method": "best_fit", "align_tokens": align}, sources=sources
    )
    longest = {"chats": 200, "books": 3000, "logs": 700}
    sizes = {
        name: SourceSizes(
            first_row_of_page=np.array([0, 30]),
            tokens=np.random.default_rng(most).integers(1, most, 30, np.int32),
            window_pages=1,
        )
        for name, most in longest.items()
    }
    digests, num_joined = [], 0
    for is_native in (True, False):
        with native_or_not(is_native):
            planner = make_planner(recipe, sizes)
            cursor = planner.start()
            for _ in range(40):
                pool = cursor.pool
                waiting = {*zip(pool.row.tolist(), (pool.start + pool.tokens).tolist(), strict=True)}
                packed, drawn, _, cursor = planner.fold(cursor)
                digests.append(cursor.order_digest)
                flows = packed.pieces.source != planner.sources.index("chats")
                columns = (packed.sample, packed.pieces.source, packed.pieces.epoch, packed.pieces.row)
                parts = np.stack([column[flows] for column in columns], axis=1)
                assert len(np.unique(parts, axis=0)) == len(parts), "one part of a document a sample"
                begun = drawn.take(drawn.start > 0)
                num_joined += sum(
                    place in waiting for place in zip(begun.row.tolist(), begun.start.tolist(), strict=True)
                )
    assert num_joined > 20
    assert digests[:40] == digests[40:]


def test_a_fold_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "named_key", lambda *_: 5)
    with pytest.raises(AssertionError, match="step"):
        try_recipe(5, 3, steps=9)
