"""The option `--decisions`: the log of a run whose recipe has a policy.

In: the arguments of a verb that plans. Out: the log, or none. Must hold: without it, steps are planned with the
schedule's shares, and a warning says so. Cost: the log is read once.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from torchmix.recipe.parts import Part
from torchmix.steps.decisions import EndedLog, opened_log
from torchmix.steps.state import LoaderState

logger = logging.getLogger(__name__)


def add_decisions(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "--decisions", type=Path, metavar="DIR", help="log of the recipe's policy: plan the shares that it decided"
    )


def decisions_of(
    arguments: argparse.Namespace, part: Part, *, directory: Path | None = None, state: LoaderState | None = None
) -> EndedLog | None:
    """The log that was named, or the one that a state's run has written.

    Args:
        arguments: Of the verb.
        part: Of the recipe.
        directory: The recipe's folder.
        state: Of the run.

    Raises:
        PlanError: There is no log at the place, or several that no other one goes on from.
    """
    if arguments.decisions is not None:
        return opened_log(arguments.decisions)
    if part.dynamic is not None and directory is not None and state is not None and state.log_branch:
        return opened_log(directory / part.dynamic.decisions / f"{state.log_branch}.jsonl")
    if part.dynamic is not None:
        logger.warning("these are the schedule's shares; --decisions DIR plans those that the recipe's policy decided")
    return None
