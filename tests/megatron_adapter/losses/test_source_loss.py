"""Losses by source: added up beside the script's own loss, reported at the interval."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fake_megatron import Lines, default_args, installed
from torchmix.megatron_adapter.losses import (
    MOST_SOURCES_IN_A_LINE,
    MicrobatchSources,
    SourceLosses,
    attach,
    line_of,
    with_source_losses,
)


class Board:
    """TensorBoard's writer."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars[name, iteration] = value


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A job of one rank; what was sent."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sent.append(tensor.clone()))
    return sent


@pytest.fixture
def log(one_rank: list[torch.Tensor]) -> Iterator[tuple[Any, Lines, Board]]:
    """Megatron's arguments, its log and its TensorBoard."""
    args, lines, board = default_args(curr_iteration=9, log_interval=10), Lines(), Board()
    with installed(args, core=True, lines=lines, writer=board):
        yield args, lines, board


def own_loss(loss_mask: torch.Tensor, output: torch.Tensor, model: Any = None) -> tuple[Any, ...]:
    return (output * loss_mask).sum(), loss_mask.sum(), {"lm loss": 1}, model


def microbatch(
    losses: SourceLosses, values: list[float], sources: list[int], *, is_last: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of tokens with their sources (-1 is padding), as a script has them."""
    mask = torch.tensor([[float(source >= 0) for source in sources]])
    index = torch.tensor([sources], dtype=torch.int32)
    attach(mask, MicrobatchSources(index=index, losses=losses, step=0, is_first_of_step=True, is_last_of_step=is_last))
    return mask, torch.tensor([values])


def test_the_scripts_loss_is_not_altered(log: tuple[Any, Lines, Board]) -> None:
    losses = SourceLosses(part="train", names=["a", "b"], is_due=lambda: True)
    mask, output = microbatch(losses, [1.0, 2.0, 4.0], [0, 1, -1])
    counting = with_source_losses(own_loss)
    total, tokens, report, model = counting(mask, output, model="m")
    assert (float(total), float(tokens), report, model) == (3.0, 2.0, {"lm loss": 1}, "m")
    assert counting.__name__ == "own_loss"
    plain = with_source_losses(own_loss)(torch.ones(1, 3), output)
    assert float(plain[0]) == 7.0


def test_means_by_source_reach_log_and_tensorboard(log: tuple[Any, Lines, Board], one_rank: list[torch.Tensor]) -> None:
    _, lines, board = log
    losses = SourceLosses(part="train", names=["a", "b", "c"], is_due=lambda: True)
    counting = with_source_losses(own_loss)
    counting(*microbatch(losses, [1.0, 2.0, 99.0, 4.0], [0, 1, -1, 1]))
    assert one_rank == [], "nothing is sent inside a step"
    counting(*microbatch(losses, [6.0], [1], is_last=True))
    assert [tensor.tolist() for tensor in one_rank] == [[[1.0, 12.0, 0.0], [1.0, 3.0, 0.0]]]
    assert board.scalars == {("loss/a", 10): 1.0, ("loss/b", 10): 4.0}, "a source without tokens has no loss"
    assert list(lines) == [" loss by source at iteration 10 | b 4.000000E+00 (3 tokens) | a 1.000000E+00 (1 tokens)"]
    counting(*microbatch(losses, [5.0], [0], is_last=True))
    assert board.scalars["loss/a", 10] == 5.0, "it counts from zero after a report"


def test_steps_between_reports_are_added_up(log: tuple[Any, Lines, Board], one_rank: list[torch.Tensor]) -> None:
    due = iter([False, False, True])
    losses = SourceLosses(part="validation", names=["a"], is_due=lambda: next(due))
    counting = with_source_losses(own_loss)
    for value in (1.0, 2.0, 6.0):
        counting(*microbatch(losses, [value], [0], is_last=True))
    assert len(one_rank) == 1
    assert log[2].scalars == {("validation loss/a", 10): 3.0}


def test_sums_are_those_of_a_plain_loop(log: tuple[Any, Lines, Board], one_rank: list[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    losses = SourceLosses(part="train", names=[f"s{i}" for i in range(7)], is_due=lambda: True)
    expected = torch.zeros(2, 7, dtype=torch.float64)
    for step in range(5):
        values = torch.rand(200, generator=generator)
        sources = torch.randint(-1, 7, (200,), generator=generator)
        for value, source in zip(values.tolist(), sources.tolist(), strict=True):
            if source >= 0:
                expected[:, source] += torch.tensor([value, 1.0])
        mask, output = microbatch(losses, values.tolist(), sources.tolist(), is_last=step == 4)
        with_source_losses(own_loss)(mask, output)
    torch.testing.assert_close(one_rank[0], expected, rtol=1e-6, atol=0)


def test_a_loss_of_another_shape_is_left_alone(log: tuple[Any, Lines, Board]) -> None:
    losses = SourceLosses(part="train", names=["a"], is_due=lambda: pytest.fail("nothing to report"))
    mask, _ = microbatch(losses, [1.0, 2.0], [0, 0], is_last=True)
    with_source_losses(lambda mask, output: None)(mask, torch.tensor(3.0))


def test_a_line_shows_the_sources_with_most_tokens() -> None:
    line = line_of("title", {f"s{i:03}": (1.0, i) for i in range(MOST_SOURCES_IN_A_LINE + 6)})
    assert re.findall(r"s\d+", line)[0] == f"s{MOST_SOURCES_IN_A_LINE + 5:03}"
    assert line.endswith("| 6 more")
