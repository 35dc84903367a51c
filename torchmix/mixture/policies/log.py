"""The log of a run's decisions, on a disk that all nodes see: what a policy was told, and what it answered.

In: records, one for each decision, "no change" too. Out: the same records, in order, to whoever plans. Must hold: a
record is never altered; a digest chains all records before it, so a state names its log by a length and a digest; a run
that goes on from an earlier state begins a branch, and the records that it leaves stay in theirs. Cost: one appended
line a decision; reading a branch is one pass over its lines.

    decisions/
        1f0c9a4e77b2d310.jsonl      one start of the job: a line that says where it goes on, then a record a line

A start of a job that goes on has a file of its own, with the name of the file before it and how many records of the run
are older. So no two processes ever write one file. Lines are JSON: an operator reads them with any tool.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from torchmix.errors import StateMismatch, WireError

LOG_START = hashlib.sha256(b"torchmix-decisions-1").hexdigest()[:16]
"""Digest of a log without records."""
MOST_LINE_BYTES = 256 << 20
_NAME = re.compile(r"[0-9a-f]{16}")

_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Sums = dict[str, tuple[float, int]]


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One decision, taken after `step`."""

    step: _Step
    """The last step whose losses are in it."""
    shares: dict[str, int] | None = None
    """The share of each child of the group, integers that sum to 2^32; None: no change."""
    losses: list[tuple[_Step, _Sums]] = []
    """What the policy was told since the record before: of each step the summed loss and the tokens of each child."""
    fault: str = ""
    """Why the policy decided nothing, if it failed and the recipe keeps the shares then."""


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a branch."""

    parent: str
    """Name of the branch that it goes on from; empty for the first one."""
    records: Annotated[int, msgspec.Meta(ge=0)]
    """Records of the run before the first one of this branch."""
    digest: str
    """Of these records."""


def begin_branch(folder: Path, branch: str, *, length: int, digest: str) -> None:
    """Make the file of a start of the job, before anybody reads it.

    Args:
        folder: The log's; made if it does not exist.
        branch: 16 hex digits that no other start has.
        length: Records of the state that the job goes on from; 0 for a new run.
        digest: Of these records; `LOG_START` for a new run.

    Raises:
        StateMismatch: No branch in the folder has records with this digest.
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parent = _branch_with(folder, length, digest) if length else ""
    line = msgspec.json.encode(_Head(parent=parent, records=length, digest=digest)) + b"\n"
    with _path(folder, branch).open("xb") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


class LogWriter:
    """Appends to the branch of this start; one process has it."""

    def __init__(self, folder: Path, branch: str, *, digest: str) -> None:
        """`digest`: of all records of the run so far."""
        self._file = _path(folder, branch).open("ab")
        self.digest = digest

    def append(self, record: DecisionRecord) -> None:
        """Add a record; it is on the disk when this returns."""
        line = msgspec.json.encode(record)
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.digest = next_digest(self.digest, line)

    def close(self) -> None:
        """Give the file back; may be called again."""
        self._file.close()


class LogReader:
    """The records of one branch and of all that it goes on from, as they come."""

    def __init__(self, folder: Path, branch: str) -> None:
        """Open a branch that `begin_branch` has made."""
        self._folder = folder
        self._file = _path(folder, branch).open("rb")
        head = _head(self._file.readline(), branch)
        self._parent, self._before = head.parent, head.records
        self.length, self.digest = head.records, head.digest
        """Of all records that were read, with those of the branches before."""
        self._rest = b""

    def earlier(self) -> list[DecisionRecord]:
        """The records before the first one of this branch.

        Raises:
            StateMismatch: A file of the chain is missing or has fewer records.
        """
        return [record for record, _ in _records(self._folder, self._parent, self._before)]

    def next(self) -> DecisionRecord | None:
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


def records_of_log(folder: Path, *, length: int, digest: str) -> list[DecisionRecord]:
    """The first records of the run whose log has this digest.

    Raises:
        StateMismatch: No branch in the folder has records with this digest.
    """
    if not length:
        return []
    return [record for record, _ in _records(folder, _branch_with(folder, length, digest), length)]


def next_digest(digest: str, line: bytes) -> str:
    """Digest of a log with one more record, 16 hex digits."""
    return hashlib.sha256(bytes.fromhex(digest) + line).hexdigest()[:16]


def _branch_with(folder: Path, length: int, digest: str) -> str:
    """A branch whose first `length` records have a digest."""
    seen: dict[str, str] = {}
    names = sorted(path.stem for path in folder.glob("*.jsonl") if _NAME.fullmatch(path.stem))
    for name in names:
        try:
            found = [line_digest for _, line_digest in _records(folder, name, length)]
        except StateMismatch as error:
            seen[name] = str(error)
            continue
        if len(found) == length and found[-1] == digest:
            return name
    raise StateMismatch(
        f"{folder}: none of its {len(names)} logs has {length} decisions with digest {digest}, which the state goes on "
        f"from; bring back the folder of that run, or let the recipe say `on_missing: constant` to go on with the "
        f"state's shares"
    )


def _records(folder: Path, branch: str, length: int) -> Iterator[tuple[DecisionRecord, str]]:
    """The first `length` records of a branch, with those before it, each with the digest after it."""
    chain: list[tuple[str, _Head, list[bytes]]] = []
    while branch:
        if len(chain) > 100_000 or any(name == branch for name, _, _ in chain):
            raise StateMismatch(f"{folder}: the log {branch} goes on from itself; it is damaged")
        try:
            lines = _path(folder, branch).read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            raise StateMismatch(f"{folder}: the log {branch} is missing, and another one goes on from it") from None
        if not lines:
            raise StateMismatch(f"{folder}: the log {branch} is empty")
        head = _head(lines[0], branch)
        chain.append((branch, head, lines[1:]))
        branch = head.parent
    digest, given = LOG_START, 0
    for i, (name, head, lines) in enumerate(reversed(chain)):
        if head.records != given or head.digest != digest:
            raise StateMismatch(f"{folder}: the log {name} does not go on from the one it names")
        after = chain[len(chain) - 2 - i][1].records if i + 1 < len(chain) else length
        for line in lines[: max(0, min(after, length) - given)]:
            digest = next_digest(digest, line)
            given += 1
            yield _record(line), digest
        if given < min(after, length) and i + 1 < len(chain):
            raise StateMismatch(f"{folder}: the log {name} has {given} records, and the next one begins after {after}")


def _head(line: bytes, branch: str) -> _Head:
    try:
        return msgspec.json.decode(line, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateMismatch(f"the log {branch} has no first line of torchmix's: {error}") from None


def _record(line: bytes) -> DecisionRecord:
    try:
        return msgspec.json.decode(line, type=DecisionRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"a line of the log of decisions is no record ({error}): {line[:60]!r}") from None


def _path(folder: Path, branch: str) -> Path:
    return folder / f"{branch}.jsonl"
