"""The log of a run's policy, on a disk that all nodes see: what it observed, and what it decided.

A record is never altered; a digest chains all records before it, so a state names its log by a length and a digest; a
run that resumes from an earlier state begins a branch, and the records that it leaves stay in theirs. Cost: one
appended line a step; reading a branch is one pass over its lines.

    decisions/
        1f0c9a4e77b2d310.jsonl      one start of the job: a line that says where it continues, then a record a line

A start of a job that continues has a file of its own, with the name of the file before it and how many records of the
run are older. So no two processes ever write one file. Lines are JSON: an operator reads them with any tool.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from torchmix.errors import StateMismatch, WireError

LOG_START = hashlib.sha256(b"torchmix-decisions-1").hexdigest()[:16]
"""Digest of a log without records."""
MOST_LINE_BYTES = 256 << 20

_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Sums = dict[str, tuple[float, int]]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step: the first one of a run is step 0, and record n is of step n."""

    step: _Step
    losses: _Sums = {}
    """What the policy observed: the summed loss and the tokens of each child that had some."""
    shares: dict[str, int] | None = None
    """What was decided after the step: of each child of the group its share, an integer over 2^32. None: no change."""
    fault: str = ""
    """Why the policy decided nothing, if it failed and the recipe keeps the shares then."""


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a branch."""

    parent: str
    """Name of the branch that it resumes from; empty for the first one."""
    records: Annotated[int, msgspec.Meta(ge=0)]
    """Records of the run before the first one of this branch."""
    digest: str
    """The digest of these records."""


def begin_branch(folder: Path, branch: str, *, parent: str, length: int, digest: str) -> None:
    """Make the file of a start of the job.

    Args:
        folder: The log's; made if it does not exist.
        branch: 16 hex digits that no other start has.
        parent: The branch that it resumes from; empty for a new run.
        length: Records before the first one of this branch.
        digest: The digest of these records.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    line = msgspec.json.encode(_Head(parent=parent, records=length, digest=digest)) + b"\n"
    hidden = folder / f".{branch}"
    with hidden.open("xb") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(_path(folder, branch))  # whoever waits for it finds its first line whole


class LogWriter:
    """Appends to the branch of this start; one process has it."""

    def __init__(self, folder: Path, branch: str, *, digest: str) -> None:
        """`digest`: of all records of the run so far."""
        self._file = _path(folder, branch).open("ab")
        self.digest = digest

    def append(self, record: StepRecord, *, to_disk: bool = False) -> None:
        """Add a record, which all processes see when this returns; `to_disk`: it also outlives this machine."""
        line = encoded(record)
        self._file.write(line + b"\n")
        self._file.flush()
        if to_disk:
            os.fsync(self._file.fileno())
        self.digest = next_digest(self.digest, line)

    def close(self) -> None:
        """Give the file back; may be called again."""
        self._file.close()


class LogReader:
    """The records of one branch and of all that it resumes from, as they come."""

    def __init__(self, folder: Path, branch: str) -> None:
        """Open a branch that `begin_branch` has made."""
        self._folder = folder
        self._file = _path(folder, branch).open("rb")
        head = _head(self._file.readline(), branch)
        self.parent = head.parent
        """The branch that this one resumes from; empty for a first one."""
        self._before = head.records
        self.length, self.digest = head.records, head.digest
        """Number and digest of all records that were read, with those of the branches before."""
        self._rest = b""

    def earlier(self) -> list[tuple[StepRecord, str]]:
        """The records before the first one of this branch, each with the digest of the log up to it.

        Raises:
            StateMismatch: A file of the chain is missing or has fewer records.
        """
        return list(_records(self._folder, self.parent, self._before))

    def next(self) -> StepRecord | None:
        """The next record of this branch, or None if it is not there yet.

        Raises:
            WireError: A line is no record.
        """
        self._rest += self._file.readline(MOST_LINE_BYTES)
        if not self._rest.endswith(b"\n"):
            return None
        line, self._rest = self._rest[:-1], b""
        record = _record(line)
        self.length, self.digest = self.length + 1, next_digest(self.digest, line)
        return record

    def close(self) -> None:
        """Give the file back; may be called again."""
        self._file.close()


def records_of_branch(folder: Path, branch: str) -> list[tuple[StepRecord, str]]:
    """All records of a branch and of those that it resumes from, each with the digest of the log up to it.

    Raises:
        StateMismatch: A file of the chain is missing or damaged.
        WireError: A line is no record.
    """
    return list(_records(folder, branch, 1 << 62))


def encoded(record: StepRecord) -> bytes:
    """The line of a record, without its end."""
    return msgspec.json.encode(record)


def next_digest(digest: str, line: bytes) -> str:
    """Digest of a log with one more record, 16 hex digits."""
    return hashlib.sha256(bytes.fromhex(digest) + line).hexdigest()[:16]


def _records(folder: Path, branch: str, length: int) -> Iterator[tuple[StepRecord, str]]:
    """The first `length` records of a branch, with those before it, each with the digest after it."""
    chain: list[tuple[str, _Head, list[bytes]]] = []
    while branch:
        if len(chain) > 100_000 or any(name == branch for name, _, _ in chain):
            raise StateMismatch(f"{folder}: the log {branch} resumes from itself; it is damaged")
        try:
            lines = _path(folder, branch).read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            raise StateMismatch(f"{folder}: the log {branch} is missing, and another one resumes from it") from None
        if not lines:
            raise StateMismatch(f"{folder}: the log {branch} is empty")
        head = _head(lines[0], branch)
        chain.append((branch, head, lines[1:]))
        branch = head.parent
    digest, given = LOG_START, 0
    for i, (name, head, lines) in enumerate(reversed(chain)):
        if head.records != given or head.digest != digest:
            raise StateMismatch(f"{folder}: the log {name} does not resume from the one it names")
        after = chain[len(chain) - 2 - i][1].records if i + 1 < len(chain) else length
        for line in lines[: max(0, min(after, length) - given)]:
            digest = next_digest(digest, line)
            given += 1
            yield _record(line), digest
        if given < min(after, length) and i + 1 < len(chain):
            raise StateMismatch(f"{folder}: the log {name} has {given} records, and the next one begins after {after}")


_decode_head = msgspec.json.Decoder(_Head).decode


def _head(line: bytes, branch: str) -> _Head:
    try:
        return _decode_head(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateMismatch(f"the log {branch} has no first line of torchmix's: {error}") from None


_decode_step_record = msgspec.json.Decoder(StepRecord).decode


def _record(line: bytes) -> StepRecord:
    try:
        return _decode_step_record(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"a line of the log of decisions is no record ({error}): {line[:60]!r}") from None


def _path(folder: Path, branch: str) -> Path:
    return folder / f"{branch}.jsonl"
