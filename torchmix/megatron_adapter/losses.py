"""The loss of each source, into Megatron's logs and to the policy of the recipe."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from torchmix.constructor.fields import Microbatch
from torchmix.errors import PlanError

# --- How unequal the tokens of microbatches are, where Megatron would weight microbatches alike.
#
# It looks at one step and then never again. Cost: a sum over the loss masks of one step.

logger = logging.getLogger(__name__)


class FirstStepTokens:
    """Counts the trained tokens of each microbatch of the first step, and warns once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._is_done = False

    def note(self, microbatch: Microbatch) -> None:
        """Look at a microbatch; after the first step's last one, warn if they differ."""
        if self._is_done or microbatch.labels_int32 is None:
            return
        self._tokens.append(int((microbatch.labels_int32 >= 0).sum()))
        if microbatch.is_last_of_step:
            self._is_done = True
            self._warn(microbatch)

    def _warn(self, microbatch: Microbatch) -> None:
        fewest, most = min(self._tokens), max(self._tokens)
        if fewest == most:
            return
        mean = sum(self._tokens) / len(self._tokens)
        logger.warning(
            "the loss is averaged over microbatches, not over tokens, and the %d microbatches of this rank in step %d "
            "have %s to %s tokens that count (mean %s): a token of the emptiest weighs %.3f times the mean, one of the "
            "fullest %.3f times. Give --calculate-per-token-loss to weight all tokens alike, or write "
            "per_token_loss: require in the recipe to refuse anything else",
            len(self._tokens),
            microbatch.step,
            f"{fewest:,}",
            f"{most:,}",
            f"{mean:,.0f}",
            mean / max(fewest, 1),
            mean / most,
        )


# --- The losses of each step, told to the recipe's policy.
#
# Each step is told once and in order, also where Megatron computes a step twice or passes over it. Cost: the host
# waits for the loss of the last microbatch of each step; 16 bytes a source are copied, and the report's own collective
# is between the same ranks, and at the same place, as Megatron's sum of its loss.

Report = Callable[[int, Mapping[str, tuple[float, int]]], None]
"""`loader.report`."""


class StepReports:
    """Tells the losses of steps; a run that continues with a later step tells those from there on."""

    def __init__(self, names: Sequence[str], report: Report) -> None:
        """Begin.

        Args:
            names: Sources, as `source_index` counts them.
            report: Called once a step.
        """
        self._names, self._report = names, report
        self._sums: torch.Tensor | None = None
        self._last_told = -1

    def add(self, sums: torch.Tensor, *, step: int, is_first_of_step: bool, is_last_of_step: bool) -> None:
        """Count a microbatch.

        Args:
            sums: float [2, sources]: summed losses, tokens.
            step: The step of the microbatch; one that was told already is computed again, and says nothing new.
            is_first_of_step, is_last_of_step: Where it stands in its step.

        Raises:
            PlanError: The step's first microbatch had no loss on this rank.
        """
        if step <= self._last_told:
            return
        if is_first_of_step:
            self._sums = sums.double()
        elif self._sums is None:
            raise PlanError(
                f"the policy of the recipe needs all losses of step {step}, and its first microbatches had none; give "
                f"each microbatch to the script's loss_func"
            )
        else:
            self._sums = self._sums + sums
        if is_last_of_step:
            totals, tokens = self._sums.tolist()
            self._sums = None
            values = zip(self._names, totals, tokens, strict=True)
            self._tell(step, {name: (total, round(count)) for name, total, count in values if count > 0})

    def skip(self, step: int) -> None:
        """Tell that a step was passed over: nobody has losses of it."""
        if step > self._last_told:
            self._tell(step, {})

    def _tell(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        self._report(step, losses)
        self._last_told = step


# --- The loss of each source: from `source_index` on the last stage, into Megatron's log, TensorBoard, W&B, and a
# policy.
#
# Why not as entries of Megatron's report: it would send one message for each source in each step, and divide by zero
# where a source had no token in a step.
#
# The road of a microbatch: `attach` ties its sources to its loss mask, which `forward_step` passes to `loss_func`.
#
# Cost: two `index_add_` over the tokens of a microbatch; a message of 16 bytes a source at each log interval.

MOST_SOURCES_IN_A_LINE = 24
"""Sources in a line of the log, those with most tokens first; TensorBoard gets all."""
_TIE = "torchmix_sources"


class MicrobatchSources(msgspec.Struct, frozen=True, kw_only=True):
    """What `loss_func` must know of a microbatch."""

    index: torch.Tensor
    """int32, the source of each token of the loss mask, -1 in padding; on the loss mask's device."""
    losses: SourceLosses
    """Where to add."""
    step: int
    is_first_of_step: bool
    is_last_of_step: bool


@dataclass(kw_only=True)
class SourceLosses:
    """Loss and tokens of each source since the last report, of one part of the recipe."""

    part: str
    names: Sequence[str]
    """Sorted, as `source_index` counts them."""
    is_due: Callable[[], bool]
    """Asked after the last microbatch of each step: whether to report now; the same on all ranks."""
    reports: StepReports | None = None
    """Tells the policy of the recipe, where it has one."""
    _sums: torch.Tensor | None = field(default=None, repr=False)
    """float64 [2, sources]: losses, tokens."""

    def add(self, losses: torch.Tensor, loss_mask: torch.Tensor, sources: MicrobatchSources) -> None:
        """Add a microbatch; losses, mask and index have the same number of tokens, on one device."""
        mask = loss_mask.reshape(-1).float()
        place = sources.index.reshape(-1).clamp(min=0)  # padding counts nothing, wherever it goes
        values = torch.stack([losses.detach().reshape(-1).float() * mask, mask])
        part = torch.zeros(2, len(self.names), dtype=torch.float32, device=mask.device).index_add_(1, place, values)
        self._sums = part.double() if self._sums is None else self._sums.add_(part)
        if self.reports is not None:
            self.reports.add(
                part,
                step=sources.step,
                is_first_of_step=sources.is_first_of_step,
                is_last_of_step=sources.is_last_of_step,
            )

    def reduce(self) -> torch.Tensor:
        """Sums over all ranks of the last stage, float64 [2, sources]; counts from zero again. A collective."""
        from megatron.core import parallel_state

        assert self._sums is not None, "a report follows a microbatch"
        sums, self._sums = self._sums, None
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return sums


def attach(loss_mask: torch.Tensor, sources: MicrobatchSources) -> None:
    """Tie sources to the very tensor that `get_batch` returns as loss mask."""
    setattr(loss_mask, _TIE, sources)


def sources_of(loss_mask: torch.Tensor) -> MicrobatchSources | None:
    """What `attach` has tied to a loss mask; None: nothing."""
    found: MicrobatchSources | None = getattr(loss_mask, _TIE, None)
    return found


def with_source_losses(
    loss_func: Callable[..., Any], of_last: Callable[[], MicrobatchSources | None] | None = None
) -> Callable[..., Any]:
    """A script's `loss_func(loss_mask, output_tensor, ...)` that also adds up losses by source.

    Args:
        loss_func: The script's own; its arguments and its result stay what they are.
        of_last: The sources of the microbatch that was given last, where the model makes a loss mask of its own.
    """

    @functools.wraps(loss_func)
    def counting(loss_mask: torch.Tensor, output_tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if of_last is not None:
            loss_mask = loss_mask.contiguous()  # Megatron's own functions ask for it, and that of the model was cut
        result = loss_func(loss_mask, output_tensor, *rest, **named)
        sources = sources_of(loss_mask) if of_last is None else of_last()
        if sources is not None and output_tensor.numel() == loss_mask.numel():
            sources.losses.add(output_tensor, loss_mask, sources)
            if sources.is_last_of_step and sources.losses.is_due():
                _report(sources.losses)
        return result

    return counting


def _report(losses: SourceLosses) -> None:
    sums = losses.reduce()
    if dist.get_rank() != dist.get_world_size() - 1:  # Megatron's rank that logs and writes
        return
    from megatron.training import get_args
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import print_rank_last

    iteration = int(getattr(get_args(), "curr_iteration", 0)) + 1
    totals, tokens = sums.tolist()
    mean_of_source = {
        name: (total / count, int(count))
        for name, total, count in zip(losses.names, totals, tokens, strict=True)
        if count > 0
    }
    prefix = "loss" if losses.part == "train" else f"{losses.part} loss"
    print_rank_last(line_of(f"{prefix} by source at iteration {iteration}", mean_of_source))
    scalars = {f"{prefix}/{name}": mean for name, (mean, _) in mean_of_source.items()}
    if (writer := get_tensorboard_writer()) is not None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
    if (wandb := get_wandb_writer()) is not None and scalars:
        wandb.log(scalars, iteration)


def line_of(title: str, mean_of_source: dict[str, tuple[float, int]]) -> str:
    """A line of the log.

    Args:
        title: What it begins with.
        mean_of_source: Name -> mean loss and trained tokens.
    """
    by_tokens = sorted(mean_of_source, key=lambda name: (-mean_of_source[name][1], name))
    shown = [
        f"{name} {mean_of_source[name][0]:.6E} ({mean_of_source[name][1]:,} tokens)"
        for name in by_tokens[:MOST_SOURCES_IN_A_LINE]
    ]
    more = len(by_tokens) - len(shown)
    return f" {title} | " + " | ".join([*shown, *([f"{more} more"] if more else [])])
