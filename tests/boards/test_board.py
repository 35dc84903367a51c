"""A board is read from outside as it was written, and by nobody's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from tests.support.processes import Processes
from torchmix.boards import board as boards
from torchmix.boards.board import MOST_EVENTS, Board, encode_board, own_board, text_in
from torchmix.boards.find import SeenProcess, board_of, runs_of, seen_processes
from torchmix.parallel.liveness.evidence import identity_of_this_process, is_alive


def close(board: Board) -> None:
    assert board._memory is not None and board._descriptor is not None
    board._memory.close()
    os.close(board._descriptor)


@pytest.fixture(autouse=True)
def no_other_board() -> None:
    """This process shows nothing yet, whatever other tests in it have shown."""
    if own_board._memory is not None:
        close(own_board)
        own_board._memory = own_board._descriptor = None


def test_a_board_is_found_by_its_process_and_has_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "SHOW_S", LONG_S)
    board = Board()
    board.show("train", lambda: {"step": 1})  # before it is open: nothing
    board.open("trainer", run="job 7", facts={"rank": 3})
    try:
        board.show("train", lambda: {"step": 5, "share": 0.25}, is_now=True)
        board.show("train", lambda: {"step": 6})  # too soon after
        for number in range(MOST_EVENTS + 2):
            board.note(f"event {number}")
        found = board_of(os.getpid())
        assert found is not None
        assert (found.kind, found.run, found.facts) == ("trainer", "job 7", {"rank": 3})
        assert found.figures == {"train": {"step": 5, "share": 0.25}}
        assert [event.text for event in found.events] == [f"event {n}" for n in range(2, MOST_EVENTS + 2)]
        assert (found.pid, found.started) == (os.getpid(), identity_of_this_process().started)
        [seen] = [one for one in seen_processes() if one.board.pid == os.getpid()]
        assert seen.state == "running" and seen.pss_bytes > 1 << 20 and not seen.is_orphan
        board.withdraw("train")
        again = board_of(os.getpid())
        assert again is not None and again.figures == {}
    finally:
        close(board)
    assert board_of(os.getpid()) is None


def test_a_fork_has_no_board_of_its_own() -> None:
    board = Board()
    board.open("trainer")
    try:
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            board.note("of the fork")
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        of_fork, own = board_of(child), board_of(os.getpid())
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        assert of_fork is None
        assert own is not None and own.events == []
    finally:
        close(board)


def test_half_a_board_is_none() -> None:
    board = Board()
    board.open("trainer")
    try:
        assert board._memory is not None
        content = board._memory[:]
        assert text_in(content) is not None
        assert text_in(content[:20]) is None and text_in(b"") is None
        assert text_in(content[:30] + bytes([content[30] ^ 1]) + content[31:]) is None
    finally:
        close(board)


def test_processes_are_grouped_by_job_and_what_they_have_started() -> None:
    def seen(kind: str, pid: int, parent: int, run: str = "", **facts: int) -> SeenProcess:
        text = boards.BoardText(
            kind=kind,
            pid=pid,
            started="1",
            parent_pid=parent,
            parent_started="1",
            run=run,
            since_s=0.0,
            shown_s=0.0,
            facts=dict(facts),
            figures={},
            events=[],
        )
        assert boards.decode_board(encode_board(text)) == text
        return SeenProcess(board=text, state="running", pss_bytes=1, cpu_s=0.0)

    runs = runs_of(
        [
            seen("node worker", 9, 5),
            seen("trainer", 6, 1, "a", rank=1),
            seen("trainer", 5, 1, "a", rank=0),
            seen("trainer", 7, 1, "b", rank=0),
            seen("loader", 8, 4),
        ]
    )
    assert [(run.name, [one.board.pid for one in run.processes]) for run in runs] == [
        ("a", [5, 6, 9]),
        ("b", [7]),
        ("process 4", [8]),
    ]


def test_a_process_that_has_ended_is_not_alive(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start_python("-c", "import time; time.sleep(10_000)")
        assert not is_alive(child.pid, "another start")
    assert is_alive(os.getpid(), identity_of_this_process().started)


def test_another_run_takes_the_name_once_nothing_of_the_first_is_shown() -> None:
    board = Board()
    board.open("trainer", run="job 7", facts={"rank": 3})
    try:
        board.show("train", lambda: {"step": 5}, is_now=True)
        board.open("trainer", run="job 8", facts={"dp": 2})
        first = board_of(os.getpid())
        assert first is not None and (first.run, first.facts) == ("job 7", {"rank": 3, "dp": 2})
        board.withdraw("train")
        board.open("serve", run="job 8", facts={"port": 1})
        second = board_of(os.getpid())
        assert second is not None and (second.kind, second.run, second.facts) == ("serve", "job 8", {"port": 1})
    finally:
        close(board)
