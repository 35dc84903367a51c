"""The log of decisions: branches, digests, a policy that fails, and one that is resumed from the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from torchmix.errors import PlanError, StateMismatch, WireError
from torchmix.mixture.policies.decider import Decider
from torchmix.mixture.policies.log import (
    LOG_START,
    DecisionRecord,
    LogReader,
    LogWriter,
    begin_branch,
    records_of_log,
)
from torchmix.mixture.policies.odm import Odm
from torchmix.mixture.policies.policy import Policy

ONE, TWO, THREE = ("0" * 15 + digit for digit in "123")


OPENED: list[LogWriter | LogReader] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def read(folder: Path, branch: str) -> LogReader:
    OPENED.append(LogReader(folder, branch))
    return OPENED[-1]  # type: ignore[return-value]


def record(step: int) -> DecisionRecord:
    return DecisionRecord(step=step, shares={"a": step, "b": 2**32 - step}, losses=[(step, {"a": (1.5, 3)})])


def started(folder: Path, branch: str, *, length: int = 0, digest: str = LOG_START) -> LogWriter:
    begin_branch(folder, branch, length=length, digest=digest)
    OPENED.append(LogWriter(folder, branch, digest=digest))
    return OPENED[-1]  # type: ignore[return-value]


def filled(folder: Path, branch: str, steps: Sequence[int], *, length: int = 0, digest: str = LOG_START) -> list[str]:
    """A branch with records; the digest after each."""
    writer, digests = started(folder, branch, length=length, digest=digest), []
    for step in steps:
        writer.append(record(step))
        digests.append(writer.digest)
    writer.close()
    return digests


def test_a_reader_has_the_records_as_they_come(tmp_path: Path) -> None:
    writer = started(tmp_path, ONE)
    reader = read(tmp_path, ONE)
    assert reader.next() is None
    writer.append(record(9))
    assert reader.next() == record(9) and reader.next() is None
    writer.append(DecisionRecord(step=19))
    assert reader.next() == DecisionRecord(step=19)
    assert (reader.length, reader.digest) == (2, writer.digest)


def test_half_a_line_is_not_read(tmp_path: Path) -> None:
    started(tmp_path, ONE).close()
    path, reader = tmp_path / f"{ONE}.jsonl", read(tmp_path, ONE)
    with path.open("ab") as file:
        file.write(b'{"step":')
        file.flush()
        assert reader.next() is None
        file.write(b"4}\n")
        file.flush()
        assert reader.next() == DecisionRecord(step=4)
        file.write(b"[]\n")
        file.flush()
        with pytest.raises(WireError, match="no record"):
            reader.next()


def test_a_resume_from_an_older_state_begins_a_branch_and_the_records_that_it_leaves_stay(tmp_path: Path) -> None:
    first = filled(tmp_path, ONE, [9, 19, 29, 39])
    second = filled(tmp_path, TWO, [30, 40], length=2, digest=first[1])
    third = filled(tmp_path, THREE, [50], length=3, digest=second[0])
    assert [r.step for r in records_of_log(tmp_path, length=4, digest=first[3])] == [9, 19, 29, 39]
    assert [r.step for r in records_of_log(tmp_path, length=4, digest=second[1])] == [9, 19, 30, 40]
    assert [r.step for r in records_of_log(tmp_path, length=4, digest=third[0])] == [9, 19, 30, 50]
    reader = read(tmp_path, THREE)
    assert [r.step for r in reader.earlier()] == [9, 19, 30]
    assert reader.next() == record(50) and reader.length == 4
    assert records_of_log(tmp_path, length=0, digest=LOG_START) == []


def test_a_log_that_is_not_the_states_is_refused_by_name(tmp_path: Path) -> None:
    digests = filled(tmp_path, ONE, [9, 19])
    with pytest.raises(StateMismatch, match="on_missing: constant"):
        begin_branch(tmp_path, TWO, length=2, digest=digests[0])
    filled(tmp_path, TWO, [29], length=2, digest=digests[1])
    (tmp_path / f"{ONE}.jsonl").unlink()
    with pytest.raises(StateMismatch, match="is missing"):
        read(tmp_path, TWO).earlier()


def test_an_altered_record_has_another_digest(tmp_path: Path) -> None:
    digests = filled(tmp_path, ONE, [9, 19])
    path = tmp_path / f"{ONE}.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step":9', b'"step":8'))
    with pytest.raises(StateMismatch, match="none of its 1 logs"):
        records_of_log(tmp_path, length=2, digest=digests[1])


class Scripted:
    """Answers what it is given, one answer a decision."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.told = list(answers), list[int]()

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        assert list(names) == ["a", "b"] and sum(shares.values()) == 1

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        self.told.append(step)

    def decide(self, step: int) -> Mapping[str, float] | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]


def decider(policy: Policy, log: LogWriter, *, keep: bool = True, earlier: Sequence[DecisionRecord] = ()) -> Decider:
    planned = {"a": Fraction(3, 4), "b": Fraction(1, 4)}
    return Decider(
        policy,
        log,
        name="scripted",
        planned=lambda step: planned,
        every=3,
        lowest=0.5,
        highest=2.0,
        keep_on_error=keep,
        earlier=earlier,
    )


FAULTS = [
    (RuntimeError("no disk"), "RuntimeError: no disk"),
    ({"a": float("nan"), "b": 1.0}, "the share of 'a' is nan"),
    ({"a": -0.1, "b": 1.0}, "the share of 'a' is -0.1"),
    ({"a": 0.5, "c": 0.5}, "the group has"),
    ({"a": 0.0, "b": 0.0}, "all its shares are 0"),
]


@pytest.mark.parametrize(("answer", "fault"), FAULTS)
def test_a_policy_that_fails_keeps_the_shares_or_stops_the_run(tmp_path: Path, answer: object, fault: str) -> None:
    found = decider(Scripted(answer), started(tmp_path, ONE))
    assert [found.observe(step, {"a": (1.0, 2)}) for step in range(2)] == [None, None]
    kept = found.observe(2, {"a": (1.0, 2)})
    assert kept is not None and kept.shares is None and fault in kept.fault
    stopped = decider(Scripted(answer), started(tmp_path, TWO), keep=False)
    with pytest.raises(PlanError, match="policy 'scripted' after step 2"):
        for step in range(3):
            stopped.observe(step, {"a": (1.0, 2)})


def test_decisions_are_bounded_integers(tmp_path: Path) -> None:
    found = decider(Scripted({"a": 0.0, "b": 9.0}), started(tmp_path, ONE))
    for step in range(3):
        decided = found.observe(step, {})
    assert decided is not None and decided.shares is not None
    assert decided.shares == {"a": 2**31, "b": 2**31}, "b at most doubles"


def test_a_policy_that_is_told_the_log_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def losses(step: int) -> dict[str, tuple[float, int]]:
        return {"a": (16.0 + step % 5, 2), "b": (4.0 - step % 3, 3)}

    whole = decider(Odm(), started(tmp_path, ONE))
    expected = [whole.observe(step, losses(step)) for step in range(30)]
    writer = started(tmp_path, TWO)
    before = decider(Odm(), writer)
    given = [before.observe(step, losses(step)) for step in range(15)]
    earlier = records_of_log(tmp_path, length=5, digest=writer.digest)
    after = decider(Odm(), started(tmp_path, THREE, length=5, digest=writer.digest), earlier=earlier)
    given += [after.observe(step, losses(step)) for step in range(15, 30)]
    assert given == expected
    assert len({record.shares["a"] for record in given if record and record.shares}) > 3, "it decides something"
