"""Rows that travel from the ranks that compute them to those that need them, and their gradients back.

Every rank of the job calls `route`, also one without rows to send or to receive; the backward, too, is entered by all
or by none. Cost: one uneven `all_to_all_single` each way, and a copy of the rows on both sides; with one rank, an
indexing.

A rank whose rows take no gradient, or whose loss ignores what it received, would leave the others waiting in the
backward. So what `route` returns always takes a gradient, and `place_rows` makes every embedding depend on it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from torchmix.array_types import Int64Array
from torchmix.errors import OptionError


class Routes(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """What one rank sends and receives of one module. On the CPU, whatever device the rows are on."""

    sends: torch.Tensor
    """int32 [s, 4]: rank, first row, rows, whether gradients come back; sorted by rank."""
    receives: torch.Tensor
    """int32 [r, 5]: rank, microbatch, first token in it, rows, whether gradients go back; sorted by rank."""
    num_rows: int
    """Rows that this rank computes."""

    @property
    def num_received(self) -> int:
        """Rows that this rank receives."""
        return len(self.received_token)

    @cached_property
    def sent_row(self) -> Int64Array:
        """Which of its rows this rank sends, in order."""
        return _ramps(self._column(self.sends, 1), self._column(self.sends, 2))

    @cached_property
    def received_token(self) -> Int64Array:
        """Token of the microbatch [B x T] that each received row replaces."""
        return _ramps(self._column(self.receives, 2), self._column(self.receives, 3))

    @cached_property
    def received_microbatch(self) -> Int64Array:
        """Microbatch of each received row."""
        return np.repeat(self._column(self.receives, 1), self._column(self.receives, 3))

    @cached_property
    def returned(self) -> tuple[Int64Array, Int64Array]:
        """Which of the sent rows get gradients back, and which of the received rows send theirs."""
        sent = np.repeat(self._column(self.sends, 3), self._column(self.sends, 2))
        received = np.repeat(self._column(self.receives, 4), self._column(self.receives, 3))
        return np.flatnonzero(sent), np.flatnonzero(received)

    def splits(self, world_size: int, *, returned: bool = False) -> tuple[list[int], list[int]]:
        """Rows to each rank and from each rank; of those whose gradients come back alone, with `returned`."""
        found = []
        for table, rows, returns in ((self.sends, 2, 3), (self.receives, 3, 4)):
            count = self._column(table, rows)
            weights = count * self._column(table, returns) if returned else count
            split = np.zeros(world_size, np.int64)
            np.add.at(split, self._column(table, 0), weights)
            found.append(split.tolist())
        return found[0], found[1]

    @staticmethod
    def _column(table: torch.Tensor, column: int) -> Int64Array:
        return table.numpy()[:, column].astype(np.int64)


def route(rows: torch.Tensor, routes: Routes, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Move rows to the ranks that need them; differentiable. A collective: every rank calls it.

    Args:
        rows: [routes.num_rows, ...] what this rank has computed, of one dtype and width on all ranks.
        routes: From the microbatch's module.
        group: All ranks of the job, in order; None for the default group.

    Returns:
        [routes.num_received, ...] rows for this rank. It takes a gradient wherever gradients are enabled.

    Raises:
        OptionError: There are more or fewer rows than the routes say.
    """
    if len(rows) != routes.num_rows:
        raise OptionError(
            f"route: rows has {len(rows)} rows, the items of this rank give {routes.num_rows}; pass the module's whole "
            f"output, in the order of its items"
        )
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    moved: torch.Tensor = _Route.apply(rows, routes, group)  # type: ignore[no-untyped-call]
    return moved


def place_rows(embeddings: torch.Tensor, rows: torch.Tensor, routes: Routes, microbatch: int) -> torch.Tensor:
    """Embeddings of a microbatch with the received rows in their places; differentiable in both.

    Args:
        embeddings: [B, T, width] of all tokens of the microbatch on this rank.
        rows: [routes.num_received, width] from `route`.
        routes: The same.
        microbatch: Its `index` in the step.
    """
    chosen = np.flatnonzero(routes.received_microbatch == microbatch)
    token = torch.from_numpy(routes.received_token[chosen]).to(embeddings.device)
    mine = rows.index_select(0, torch.from_numpy(chosen).to(rows.device)).to(embeddings.dtype)
    width = embeddings.shape[-1]
    return embeddings.reshape(-1, width).index_copy(0, token, mine).view(embeddings.shape)


class HeldRows:
    """Received rows that several backward passes use: their gradients add up, and go back once.

    A pipeline runs the backward of each microbatch by itself, and a collective between them would deadlock. So rows of
    a whole step are held apart from their graph, and `give_back` runs the rest of the backward after the schedule.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        """Hold what `route` returned."""
        self._received = rows
        self.rows = rows.detach().requires_grad_(rows.requires_grad)
        """The same rows, for `place_rows`."""

    def give_back(self) -> None:
        """Send the gradients back, through the exchange and the module. A collective: every rank calls it once."""
        gradient = self.rows.grad if self.rows.grad is not None else torch.zeros_like(self.rows)
        self._received.backward(gradient)  # type: ignore[no-untyped-call]


class _Route(torch.autograd.Function):
    """One exchange each way."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, routes: Routes, group: dist.ProcessGroup | None) -> torch.Tensor:
        context.routes, context.group = routes, group
        sent = rows.index_select(0, torch.from_numpy(routes.sent_row).to(rows.device))
        to, come = routes.splits(_world_size(group))
        return _exchange(sent, to, come, group)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        routes: Routes = context.routes
        (gradient,) = gradients
        of_sent, of_received = routes.returned
        to, come = routes.splits(_world_size(context.group), returned=True)
        back = gradient.index_select(0, torch.from_numpy(of_received).to(gradient.device))
        came = _exchange(back, come, to, context.group)
        total = gradient.new_zeros((routes.num_rows, *gradient.shape[1:]))
        return total.index_add(0, torch.from_numpy(routes.sent_row[of_sent]).to(gradient.device), came), None, None


def _exchange(rows: torch.Tensor, to: list[int], come: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    if len(to) == 1:
        return rows.clone()
    received = rows.new_empty((sum(come), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), come, to, group=group)
    return received


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _ramps(start: Int64Array, count: Int64Array) -> Int64Array:
    """start, start + 1, ... of each run, end to end."""
    ramps: Int64Array = np.arange(count.sum()) + np.repeat(start - (np.cumsum(count) - count), count)
    return ramps
