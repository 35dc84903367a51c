"""The log of decisions: branches, digests, a policy that fails, and one that is resumed from the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from torchmix.errors import PlanError, StateMismatch, WireError
from torchmix.mixture.policies import Decider, Odm, Policy
from torchmix.mixture.policy_log import LOG_START, LogReader, LogWriter, StepRecord, begin_branch, records_of_branch

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


def record(step: int) -> StepRecord:
    return StepRecord(step=step, shares={"a": step, "b": 2**32 - step}, losses={"a": (1.5, 3)})


def started(folder: Path, branch: str, *, parent: str = "", length: int = 0, digest: str = LOG_START) -> LogWriter:
    begin_branch(folder, branch, parent=parent, length=length, digest=digest)
    OPENED.append(LogWriter(folder, branch, digest=digest))
    return OPENED[-1]  # type: ignore[return-value]


def filled(
    folder: Path, branch: str, steps: Sequence[int], *, parent: str = "", length: int = 0, digest: str = LOG_START
) -> list[str]:
    """A branch with records; the digest after each."""
    writer, digests = started(folder, branch, parent=parent, length=length, digest=digest), []
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
    writer.append(StepRecord(step=19))
    assert reader.next() == StepRecord(step=19)
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
        assert reader.next() == StepRecord(step=4)
        file.write(b"[]\n")
        file.flush()
        with pytest.raises(WireError, match="no record"):
            reader.next()


def test_a_resume_from_an_older_state_begins_a_branch_and_the_records_that_it_leaves_stay(tmp_path: Path) -> None:
    first = filled(tmp_path, ONE, [0, 1, 2, 3])
    second = filled(tmp_path, TWO, [12, 13], parent=ONE, length=2, digest=first[1])
    filled(tmp_path, THREE, [23], parent=TWO, length=3, digest=second[0])

    def steps(branch: str) -> list[int]:
        return [record.step for record, _ in records_of_branch(tmp_path, branch)]

    assert (steps(ONE), steps(TWO), steps(THREE)) == ([0, 1, 2, 3], [0, 1, 12, 13], [0, 1, 12, 23])
    assert records_of_branch(tmp_path, TWO)[-1][1] == second[1]
    reader = read(tmp_path, THREE)
    assert [record.step for record, _ in reader.earlier()] == [0, 1, 12]
    assert reader.next() == record(23) and reader.length == 4 and reader.parent == TWO


def test_a_chain_that_is_broken_is_refused_by_name(tmp_path: Path) -> None:
    digests = filled(tmp_path, ONE, [0, 1])
    filled(tmp_path, TWO, [2], parent=ONE, length=2, digest=digests[0])
    with pytest.raises(StateMismatch, match=f"{TWO} does not resume from"):
        records_of_branch(tmp_path, TWO)
    filled(tmp_path, THREE, [2], parent=ONE, length=2, digest=digests[1])
    (tmp_path / f"{ONE}.jsonl").unlink()
    with pytest.raises(StateMismatch, match="is missing"):
        records_of_branch(tmp_path, THREE)


def test_an_altered_record_has_another_digest(tmp_path: Path) -> None:
    digests = filled(tmp_path, ONE, [0, 1])
    path = tmp_path / f"{ONE}.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1.6", 1))
    assert [digest for _, digest in records_of_branch(tmp_path, ONE)][1] != digests[1]


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


def decider(policy: Policy, log: LogWriter, *, keep: bool = True, earlier: Sequence[StepRecord] = ()) -> Decider:
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
    kept = [found.observe(step, {"a": (1.0, 2)}) for step in range(3)]
    assert [one.step for one in kept] == [0, 1, 2] and not kept[1].fault
    assert kept[2].shares is None and fault in kept[2].fault
    stopped = decider(Scripted(answer), started(tmp_path, TWO), keep=False)
    with pytest.raises(PlanError, match="policy 'scripted' after step 2"):
        for step in range(3):
            stopped.observe(step, {"a": (1.0, 2)})


def test_decisions_are_bounded_integers(tmp_path: Path) -> None:
    found = decider(Scripted({"a": 0.0, "b": 9.0}), started(tmp_path, ONE))
    for step in range(3):
        decided = found.observe(step, {})
    assert decided.shares == {"a": 2**31, "b": 2**31}, "b at most doubles"


def test_a_policy_that_is_told_the_log_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def losses(step: int) -> dict[str, tuple[float, int]]:
        return {"a": (16.0 + step % 5, 2), "b": (4.0 - step % 3, 3)}

    whole = decider(Odm(), started(tmp_path, ONE))
    expected = [whole.observe(step, losses(step)) for step in range(30)]
    writer = started(tmp_path, TWO)
    before = decider(Odm(), writer)
    given = [before.observe(step, losses(step)) for step in range(15)]
    earlier = [record for record, _ in records_of_branch(tmp_path, TWO)]
    log = started(tmp_path, THREE, parent=TWO, length=15, digest=writer.digest)
    after = decider(Odm(), log, earlier=earlier)
    given += [after.observe(step, losses(step)) for step in range(15, 30)]
    assert given == expected
    assert len({record.shares["a"] for record in given if record.shares}) > 3, "it decides something"
