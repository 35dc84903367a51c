"""The documents that later steps go on with, against the steps themselves."""

from __future__ import annotations

import pytest

from tests.support.mixtures import PACKINGS, SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.planner.planner import BegunDocuments


@pytest.mark.parametrize("packing", PACKINGS)
def test_open_documents_are_those_that_were_begun_and_come_again(packing: str) -> None:
    planner = make_planner(make_recipe(SHARES, samples=4, length=256, packing=PACKINGS[packing]), SIZES)
    plans, cursors = plan_steps(planner, 60)
    followed = BegunDocuments(planner)
    num_open, is_cut = 0, packing == "best_fit" or packing.startswith("concat")
    for step in range(40):
        found = followed.at(cursors[step + 1])
        assert len(set(zip(found.source.tolist(), found.row.tolist(), strict=True))) == len(found.row)
        first = {
            place: start
            for *place, start in zip(found.source.tolist(), found.row.tolist(), found.start.tolist(), strict=True)
            for place in [tuple(place)]
        }
        begun: set[tuple[int, int, int]] = set()
        for plan in plans[max(0, step - 15) : step + 1]:
            columns = (plan.pieces.source, plan.pieces.epoch, plan.pieces.row)
            begun |= set(zip(*(column.tolist() for column in columns), strict=True))
        for plan in plans[step + 1 : step + 15]:
            columns = (plan.pieces.source, plan.pieces.epoch, plan.pieces.row, plan.pieces.start)
            for source, epoch, row, start in zip(*(column.tolist() for column in columns), strict=True):
                if (source, epoch, row) in begun:
                    assert first[source, row] <= start, "a document that goes on is not open"
        num_open += len(found.row)
        assert len(found.row) <= len(SHARES) + len(cursors[step + 1].pool)
    assert bool(num_open) == is_cut, "documents that are not cut are never open"


@pytest.mark.parametrize("packing", PACKINGS)
def test_open_documents_follow_from_the_cursor_alone(packing: str) -> None:
    planner = make_planner(make_recipe(SHARES, samples=4, length=256, packing=PACKINGS[packing]), SIZES)
    _, cursors = plan_steps(planner, 40)
    followed = BegunDocuments(planner)
    for cursor in [*cursors[1:], *cursors[20:25], cursors[1]]:
        each = (followed.at(cursor), BegunDocuments(planner).at(cursor))
        found, alone = (sorted(zip(at.source.tolist(), at.row.tolist(), at.start.tolist(), strict=True)) for at in each)
        assert found == alone
