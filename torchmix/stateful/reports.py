"""Losses from the trainer to the policy: reduced, decided upon by one rank, and logged.

A state that is saved after the report of its last step continues with all that was told and decided; every rank of the
last stage reports every step, in order. Cost: one reduction of 16 bytes a child and one line of a file each step, and
the policy's own time.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
from collections.abc import Callable, Mapping
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from torchmix.errors import OptionError, PlanError, RecipeError, StateMismatch
from torchmix.mixture.policies import Decider, decider_of, function_of_step
from torchmix.mixture.policy_log import (
    LOG_START,
    LogWriter,
    StepRecord,
    begin_branch,
    encoded,
    next_digest,
    records_of_branch,
)
from torchmix.parallel.agreement import AgreementStore, times_met
from torchmix.parallel.fan_out import FanOut
from torchmix.parallel.groups import TIMEOUT_S
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.planner.drawing import SharesOfStep
from torchmix.planner.entering import MOST_NAMES
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.changes import Deciding, dynamic_of, tree_of_part
from torchmix.recipe.parts import Part
from torchmix.recipe.tree import Node, streams_of
from torchmix.steps.state import LoaderState

Losses = Mapping[str, tuple[float, int]]
AHEAD = 64
"""Steps by which the records of a function of the step are written before the step at hand."""


class Reports:
    """What this rank knows of the decisions; on all ranks alike, so that all agree on the branch of the log."""

    def __init__(
        self,
        part: Part,
        tree: ClientPlaceTree,
        folder: Path,
        *,
        base: Path,
        nonce: str,
        group: dist.ProcessGroup | None,
        planned: Callable[[int], Mapping[str, Fraction]],
    ) -> None:
        """Nothing is written before `begin`.

        Args:
            part: Has a policy.
            tree: The job's.
            folder: The folder of the log.
            base: Folder of the recipe.
            nonce: Equal on all ranks, and of this start of the job alone.
            group: The ranks that report; None in a job of one rank, and where all ranks are in one process.
            planned: Step -> the schedule's shares in the group.
        """
        deciding = dynamic_of(part)
        assert deciding is not None and part.dynamic is not None, "the part has a policy"
        self._deciding: Deciding = deciding
        self._dynamic = part.dynamic
        self._folder, self._base, self._nonce, self._group, self._planned = folder, base, nonce, group, planned
        reporters = reporting_ranks(tree)
        self.reports = tree.topology.rank in reporters
        """Whether this rank's losses count."""
        self._deciding_rank = reporters[0]
        self._decides = tree.topology.rank == self._deciding_rank
        self._decider: Decider | None = None
        self._log: LogWriter | None = None
        self._loads = 0
        self._next = 0
        self._needs_losses = function_of_step(part.dynamic) is None
        """Else a function decides by the step alone: nobody reports, and records are written ahead."""
        self._child_of = _child_of_name(part, deciding)

    def begin(self, state: LoaderState) -> LoaderState:
        """Resume from a state, on a branch of the log of its own: the same state, with that branch.

        Raises:
            StateMismatch: The log of the state is missing; or the state names a step alone.
        """
        if state.step and not state.is_planned:
            raise StateMismatch(
                f"the run has a policy, so a step number alone ({state.step}) does not say which shares it had; resume "
                f"from a state of state_dict()"
            )
        parent, records, digest = self._records_before(state)
        seed = f"{self._nonce} {digest} {state.step} {self._loads}"
        branch = hashlib.sha256(seed.encode()).hexdigest()[:16]
        self._loads += 1
        self._next = state.step
        if self._decides:
            self._open(branch, parent, records, digest, state.step)
        if not self._needs_losses:
            self._write_ahead(state.step)
        decided = state.at.decided
        if decided.length:
            decided = msgspec.structs.replace(decided, digest=_digest_at(records, decided.length))
        return msgspec.structs.replace(state, log_branch=branch, at=msgspec.structs.replace(state.at, decided=decided))

    def check_children(self, state: LoaderState) -> None:
        """Raise if the log of a state has decisions on other children, which need not hold yet.

        Raises:
            StateMismatch: Names both sets of children; or the log of the state is missing.
        """
        _, records, _ = self._records_before(state)
        children = list(self._deciding.children)
        decided = next((sorted(one.shares) for one in reversed(records) if one.shares is not None), children)
        if decided != children:
            raise StateMismatch(
                f"the policy of the run has given shares to {listed(decided, MOST_NAMES)}, "
                f"and by this recipe it decides those of {listed(children, MOST_NAMES)}: what it has learned is of "
                f"other children. Restore these at `dynamic.at`, or start a new run"
            )

    def report(self, step: int, losses: Losses) -> None:
        """Take this rank's losses of a step; returns when the step is in the log.

        Raises:
            OptionError: Another step than the next one, a name that is no source, or a value that is no sum.
            PlanError: The policy failed, and the recipe says `on_error: stop`.
        """
        if not self._needs_losses:
            return
        if step != self._next:
            raise OptionError(
                f"report: step {step} was reported, and step {self._next} comes next; report each step once"
            )
        sums = torch.zeros(len(self._deciding.children) + 1, 2, dtype=torch.float64)
        for name, value in losses.items():
            sums[self._place_of(name)] += torch.tensor(_checked(name, value), dtype=torch.float64)
        self._next = step + 1
        if not self.reports:
            return
        fault = torch.zeros(1, dtype=torch.int64)
        if self._group is not None:
            dist.reduce(sums, self._deciding_rank, group=self._group)
        error: Exception | None = None
        if self._decider is not None:
            try:
                self._decider.observe(step, self._by_child(sums))
            except Exception as raised:  # the others wait for the answer
                error, fault[0] = raised, 1
        if self._group is not None:
            dist.broadcast(fault, self._deciding_rank, group=self._group)
        if error is not None:
            raise error
        if fault[0]:
            raise PlanError(f"rank {self._deciding_rank} failed to decide after step {step}; its own error says why")

    def check_reported(self, step: int) -> None:
        """Raise if a step cannot come before an earlier one is reported.

        Raises:
            PlanError: Names the step whose losses are missing.
        """
        if not self._needs_losses:
            self._write_ahead(step)
            return
        every = self._deciding.every_steps
        last = (step - self._deciding.lag_steps + 1) // every * every - 1
        if self.reports and last >= self._next:
            raise PlanError(
                f"step {step} has shares that are decided after step {last}, and this rank has reported "
                f"{self._next} steps: call loader.report(step, losses) after each step"
            )

    def _write_ahead(self, step: int) -> None:
        """Have the log reach beyond a step, so that planning of later ones waits for no trainer."""
        while self._decider is not None and self._next < step + AHEAD:
            self._decider.observe(self._next, {})
            self._next += 1

    def close(self) -> None:
        """Give the log and the group back; may be called again, and after the job has destroyed its groups."""
        self._close_log()
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(ValueError, AssertionError, RuntimeError):  # destroyed before, or broken
                dist.destroy_process_group(group)

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _place_of(self, name: str) -> int:
        """The row of a child's losses; those of what the policy does not decide have one of their own."""
        if name not in self._child_of:
            raise OptionError(f"report: {name!r} is no source of the mixture{nearest(name, self._child_of)}")
        child = self._child_of[name]
        return len(self._deciding.children) if child is None else self._deciding.children.index(child)

    def _by_child(self, sums: torch.Tensor) -> dict[str, tuple[float, int]]:
        pairs = zip(self._deciding.children, sums.tolist(), strict=False)
        return {child: (loss_sum, round(tokens)) for child, (loss_sum, tokens) in pairs if tokens >= 1}

    def _records_before(self, state: LoaderState) -> tuple[str, list[StepRecord], str]:
        """The branch that a state resumes from, the records of all steps before it, and their digest."""
        if not state.step:
            return "", [], LOG_START
        decided = state.at.decided
        try:
            found = records_of_branch(self._folder, state.log_branch)[: state.step]
            at = _digest_at([record for record, _ in found], decided.length)
            if len(found) < decided.length or at != decided.digest:
                raise StateMismatch(
                    f"{self._folder}: the log {state.log_branch} has {len(found)} steps, and is not the one that the "
                    f"state at step {state.step} follows from"
                )
        except StateMismatch as error:
            if self._dynamic.on_missing == "refuse":
                raise StateMismatch(
                    f"{error}; bring back the folder of that run, or let the recipe say `on_missing: constant` to go "
                    f"on with the state's shares"
                ) from None
            records = [StepRecord(step=step) for step in range(state.step)]
            if decided.length:
                last = decided.length - 1
                records[last] = StepRecord(step=last, shares=dict(decided.shares) or None)
            return "", records, LOG_START
        records = [record for record, _ in found]
        return state.log_branch, records, found[-1][1] if found else LOG_START

    def _open(self, branch: str, parent: str, records: list[StepRecord], digest: str, step: int) -> None:
        """Begin a branch; steps that were not reported before the state was saved have nothing in it."""
        self._close_log()
        begin_branch(self._folder, branch, parent=parent, length=len(records) if parent else 0, digest=digest)
        self._log = LogWriter(self._folder, branch, digest=digest)
        missing = records if not parent else [StepRecord(step=late) for late in range(len(records), step)]
        for record in missing:
            self._log.append(record)
        self._decider = decider_of(self._dynamic, self._deciding, self._base, self._log, self._planned, records)


def open_reports(
    part: Part,
    tree: ClientPlaceTree,
    folder: Path,
    *,
    base: Path,
    fan_out: FanOut | None,
    store: AgreementStore | None,
) -> Reports:
    """This rank's end. A collective when the job has several ranks.

    Args:
        part, tree, folder, base: See `Reports`.
        fan_out: The exchange of the job; None in a job of one rank.
        store: The job's; None in a job of one rank, and where all ranks are in one process.
    """
    nonce = fan_out.world if fan_out is not None and fan_out.world else secrets.token_hex(8)
    group = None
    if store is not None:
        key = f"torchmix/decisions/{times_met(store, 'decisions', tree.topology.rank)}"
        if tree.topology.rank == 0:
            store.set(key, nonce)
        nonce = store.get(key).decode()
        if function_of_step(part.dynamic) is None:
            group = dist.new_group(reporting_ranks(tree), backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    shares = SharesOfStep(part, dict.fromkeys(part.streams, 1))
    return Reports(part, tree, folder, base=base, nonce=nonce, group=group, planned=shares.in_group)


def reporting_ranks(tree: ClientPlaceTree) -> list[int]:
    """Ranks whose losses count: of the last pipeline stage one a tensor-parallel group; the first of them decides."""
    topology = tree.topology
    places = ((rank, topology.coordinates_of(rank)) for rank in range(topology.world_size))
    return [rank for rank, place in places if place.pp == topology.pp - 1 and place.tp == 0]


def _digest_at(records: list[StepRecord], length: int) -> str:
    digest = LOG_START
    for record in records[:length]:
        digest = next_digest(digest, encoded(record))
    return digest


def _checked(name: str, value: object) -> tuple[float, float]:
    try:
        loss_sum, num_tokens = map(float, value)  # type: ignore[call-overload]
        if num_tokens < 0 or not math.isfinite(loss_sum):
            raise ValueError
        return loss_sum, num_tokens
    except (TypeError, ValueError):
        raise OptionError(
            f"report: {name!r}: {value!r} is no pair of a finite summed loss and a number of tokens"
        ) from None


def _child_of_name(part: Part, deciding: Deciding) -> dict[str, str | None]:
    """Child of the group that the losses of a source, a stream or a child count for; None: of what is not decided.

    Raises:
        RecipeError: A source is in several children of the group, so its losses are of none in particular.
    """
    root = tree_of_part(part)
    node: Node = root
    for name in deciding.path:
        node = next(child for child in node.children if child.name == name)
    found: dict[str, str | None] = dict.fromkeys([*part.sources, *part.streams])
    for child in node.children:
        found[child.name] = child.name
        for stream in streams_of(child):
            for name in (stream, *part.streams[stream].sources):
                if found.get(name) not in (None, child.name):
                    raise RecipeError(
                        f"source {name!r} is in {found[name]!r} and in {child.name!r}, so its losses are of neither; a "
                        f"policy needs children with sources of their own",
                        "dynamic.at",
                    )
                found[name] = child.name
    return found
