"""Rows on one rank: an indexing, its gradient, and what is refused. Real ranks are in tests/system/test_modules.py."""

from __future__ import annotations

import pytest
import torch

from torchmix.errors import OptionError
from torchmix.parallel import HeldRows, Routes, place_rows, route


def routes(*, num_rows: int = 5) -> Routes:
    """Rows 3, 4 replace tokens 6, 7 of microbatch 1, rows 0 to 2 tokens 1 to 3 of microbatch 0."""
    sends = torch.tensor([[0, 3, 2, 1], [0, 0, 3, 1]], dtype=torch.int32)
    receives = torch.tensor([[0, 1, 6, 2, 1], [0, 0, 1, 3, 1]], dtype=torch.int32)
    return Routes(sends=sends, receives=receives, num_rows=num_rows)


def no_routes() -> Routes:
    none = torch.zeros(0, dtype=torch.int32)
    return Routes(sends=none.view(0, 4), receives=none.view(0, 5), num_rows=0)


def test_rows_reach_their_tokens_and_gradients_come_back() -> None:
    rows = torch.arange(10.0).view(5, 2).requires_grad_()
    moved = route(rows, routes())
    assert moved.tolist() == rows[[3, 4, 0, 1, 2]].tolist()
    embeddings = torch.full((2, 4, 2), -1.0)
    placed = [place_rows(embeddings, moved, routes(), index).view(8, 2) for index in (0, 1)]
    assert placed[0][[1, 2, 3]].tolist() == rows[:3].tolist() and (placed[0][[0, 4, 5, 6, 7]] == -1).all()
    assert placed[1][[6, 7]].tolist() == rows[3:].tolist() and (placed[1][:6] == -1).all()
    (placed[0][2].sum() * 3 + placed[1].sum()).backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [0, 3, 0, 1, 1]


def test_held_rows_collect_the_gradients_of_several_backward_passes() -> None:
    rows = torch.ones(5, 2, requires_grad=True)
    held = HeldRows(route(rows, routes()))
    for index in (0, 1):
        place_rows(torch.zeros(2, 4, 2), held.rows, routes(), index).sum().backward()
    assert rows.grad is None
    held.give_back()
    assert rows.grad is not None and (rows.grad == 1).all()


def test_a_rank_without_rows_enters_the_backward() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    moved = route(torch.zeros(0, 2) @ weight, no_routes())
    place_rows(torch.zeros(1, 4, 2), moved, no_routes(), 0).sum().backward()
    assert weight.grad is not None and (weight.grad == 0).all()
    assert route(torch.zeros(0, 2), no_routes()).requires_grad
    with torch.no_grad():
        assert not route(torch.zeros(0, 2), no_routes()).requires_grad


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(OptionError, match="rows has 4 rows, the items of this rank give 5"):
        route(torch.zeros(4, 2), routes())
