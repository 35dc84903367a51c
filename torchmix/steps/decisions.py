"""The log of decisions as planning reads it: a record is waited for until it is there.

A record is read once and never asked of anybody, so planning holds on nothing but the disk; whoever plans for nobody
any more stops waiting. Cost: a look at the end of a file each 20 ms while a record is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from torchmix.errors import PlanError
from torchmix.mixture.policy_log import LogReader, StepRecord, records_of_branch
from torchmix.reader.protocol import StoppedWaiting

logger = logging.getLogger(__name__)

LOOK_S = 0.02
SAY_S = 30.0
"""Between two lines in the log about a record that is missing."""


class FollowedLog:
    """One branch of the log and all that it continues; see `planner.cursor.DecisionRecords`."""

    def __init__(self, folder: Path, branch: str, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Nothing is opened before the first record is asked for."""
        self.branch = branch
        self._folder, self._is_stopped = folder, is_stopped
        self._reader: LogReader | None = None
        self._last: tuple[StepRecord, str] | None = None
        self._earlier: list[tuple[StepRecord, str]] = []

    def record(self, step: int) -> tuple[StepRecord, str]:
        """See `planner.cursor.DecisionRecords.record`.

        Raises:
            StoppedWaiting: The record is not there, and nobody waits for the step any more.
            StateMismatch: A file of the log is missing or damaged.
        """
        said = time.monotonic()
        while self._last is None or self._last[0].step < step:
            if self._read():
                continue
            if self._is_stopped():
                raise StoppedWaiting
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                logger.warning(
                    "waiting for the losses of step %d, in %s: call loader.report(%d, losses) on the ranks of the last "
                    "stage",
                    step,
                    self._folder,
                    step,
                )
            time.sleep(LOOK_S)
        return self._last

    def is_known(self, step: int) -> bool:
        """See `planner.cursor.DecisionRecords.is_known`."""
        while (self._last is None or self._last[0].step < step) and self._read():
            pass
        return self._last is not None and self._last[0].step >= step

    def close(self) -> None:
        """Give the file back; may be called again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self) -> bool:
        """Whether one record more was read."""
        if self._reader is None:
            if not (self._folder / f"{self.branch}.jsonl").exists():
                return False
            self._reader = LogReader(self._folder, self.branch)
            self._earlier = self._reader.earlier()[::-1]
        if self._earlier:
            self._last = self._earlier.pop()
            return True
        record = self._reader.next()
        if record is not None:
            self._last = record, self._reader.digest
        return record is not None


class EndedLog:
    """A log of a run that is over: replay, and plans of it."""

    def __init__(self, folder: Path, branch: str) -> None:
        """Read a branch; its run may have gone on in other ones."""
        self.records = records_of_branch(folder, branch)
        """The record of each step from 0 on, with the digest of the log up to it."""
        self.branch, self._folder = branch, folder

    def record(self, step: int) -> tuple[StepRecord, str]:
        """See `planner.cursor.DecisionRecords.record`.

        Raises:
            PlanError: The log ends before.
        """
        if step >= len(self.records):
            raise PlanError(
                f"the log {self.branch} in {self._folder} has {len(self.records)} steps, and what is decided after "
                f"step {step} is not in it; stop before the steps that it holds for"
            )
        return self.records[step]

    def is_known(self, step: int) -> bool:
        """See `planner.cursor.DecisionRecords.is_known`: nothing is waited for."""
        return True

    def close(self) -> None:
        """Nothing is open."""


def log_of(
    folder: str, branch: str, *, replayed: str = "", is_stopped: Callable[[], bool] = lambda: False
) -> FollowedLog | EndedLog | None:
    """Where the decisions of a policy are read.

    Args:
        folder: The log's, which a policy writes; empty without a policy.
        branch: The branch of this start.
        replayed: Folder or file of a log of an earlier run, whose decisions hold in place of a policy's.
        is_stopped: Asked while a decision is missing.
    """
    if replayed:
        return opened_log(Path(replayed))
    return FollowedLog(Path(folder), branch, is_stopped) if folder else None


def last_branch(folder: Path) -> str:
    """The branch of a log that no other one continues.

    Raises:
        PlanError: There is none, or several; a state names its own.
    """
    if not folder.is_dir():
        raise PlanError(f"{folder} is no folder of a log of decisions")
    names = sorted(path.stem for path in folder.glob("*.jsonl"))
    parents = {parent_of(folder, name) for name in names}
    ends = [name for name in names if name not in parents]
    if len(ends) != 1:
        what = f"{len(ends)} branches end ({', '.join(ends)}); name the file of one" if ends else "no log is in it"
        raise PlanError(f"{folder}: {what}")
    return ends[0]


def parent_of(folder: Path, branch: str) -> str:
    """The branch that a branch continues; empty for a first one."""
    reader = LogReader(folder, branch)
    try:
        return reader.parent
    finally:
        reader.close()


def opened_log(path: Path) -> EndedLog:
    """The log at a path: a folder with one run, or the file of a branch."""
    if path.suffix == ".jsonl":
        if not path.is_file():
            raise PlanError(f"{path} does not exist; name a file of a log of decisions, or its folder")
        return EndedLog(path.parent, path.stem)
    return EndedLog(path, last_branch(path))
