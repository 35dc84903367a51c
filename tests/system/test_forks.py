"""Forks that stand in for interpreters: what a test can see of them is the same."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.support.forks import ForkServer
from tests.support.ports import free_port, given_ports
from tests.support.processes import ROOT, Child, Processes, wait_until

pytestmark = pytest.mark.system
IMPORTED = ("json",)
DEADLINE_S = 120.0
PROGRAMS = {
    "arguments": "import sys, os; print(sys.argv, os.getcwd(), os.environ['COLOUR'], os.environ['OMP_NUM_THREADS'])",
    "exit handlers": "import atexit, sys; atexit.register(print, 'handler'); sys.exit(3)",
    "an error": "import json\ndef f():\n    raise ValueError('a mistake')\nf()",
    "an error without a message": "import sys; sys.exit('told')",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 15)",
    "words that wait": "import sys; sys.stdout.reconfigure(line_buffering=False); print('told', end='')",
    "a number of an exit code that is too large": "import sys; sys.exit(259)",
    "a finalizer": "import weakref, json; kept = weakref.finalize(json, print, 'finalized')",
    "a thread that is left": "import threading; threading.Timer(0.1, print, ['told late']).start()",
    "a session": "import os, sys; print(os.getsid(0) == os.getpgid(0) == os.getpid(), repr(sys.stdin.read()))",
    "warnings": "import warnings; warnings.warn('careful')",
    "its own module": "import sys; value = 3; print(sys.modules['__main__'].value, __name__, __spec__ is None)",
}


def end_of(child: Child) -> tuple[int, str, str]:
    """Exit code, stdout, and the last line of stderr."""
    code = child.wait(deadline_s=DEADLINE_S)
    return code, child.stdout(), (child.stderr().splitlines() or [""])[-1]


@pytest.mark.parametrize("program", [("-c",), ("-m", "tests.support.text_program")], ids=["text", "module"])
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_a_fork_ends_as_an_interpreter_does(tmp_path: Path, text: str, program: tuple[str, ...]) -> None:
    command, environment = ("-W", "error", *program, text, "one", "two words"), {"COLOUR": "red"}
    with Processes(tmp_path) as processes:
        forked = end_of(processes.fork_python(*command, after=IMPORTED, environment=environment))
        assert forked == end_of(processes.start_python(*command, environment=environment))


def test_modules_and_scripts_run_as_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, beside; print(sys.argv, beside.NAME, __name__ == '__main__')")
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    with Processes(tmp_path) as processes:
        for command in (
            (str(script), "--flag"),
            ("-m", "tests.no_such_module"),
            ("-m", "json.tool", "x"),
        ):
            found, wanted = (
                end_of(child)
                for child in (processes.fork_python(*command, after=IMPORTED), processes.start_python(*command))
            )
            assert found[:2] == wanted[:2]


def test_the_processes_of_a_job_that_spawn_find_their_main_module(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def work(queue): queue.put((sys.warnoptions, __name__))\n"
        "if __name__ == '__main__':\n"
        "    spawn = multiprocessing.get_context('spawn'); queue = spawn.Queue()\n"
        "    process = spawn.Process(target=work, args=(queue,)); process.start()\n"
        "    print(queue.get()); process.join(); print(process.exitcode)\n"
    )
    with Processes(tmp_path) as processes:
        command = ("-W", "error", str(script))
        forked = end_of(processes.fork_python(*command, after=IMPORTED))
        assert forked == end_of(processes.start_python(*command)) == (0, "(['error'], '__mp_main__')\n0\n", "")


def test_a_server_ends_with_all_that_it_has_forked(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "err"]
    for path in files:
        path.touch()
    server = ForkServer(IMPORTED)
    forks = [server.start(["-c", "import signal; signal.pause()"], ROOT, os.environ, files) for _ in range(2)]
    os.kill(forks[0].pid, signal.SIGSTOP)
    assert [fork.poll() for fork in forks] == [None, None]
    server.close()
    for fork in forks:
        wait_until(lambda pid=fork.pid: not is_running(pid), deadline_s=DEADLINE_S, what="end of a fork")


def test_a_server_that_was_forked_has_imported_more_and_ends_with_its_client(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "err"]
    for path in files:
        path.touch()
    base = ForkServer(IMPORTED)
    server = ForkServer((*IMPORTED, "colorsys"), base=base)
    shows = ["-c", "import sys; print('json' in sys.modules, 'colorsys' in sys.modules)"]
    assert [one.start(shows, ROOT, os.environ, files).wait() for one in (server, base)] == [0, 0]
    assert files[0].read_text() == "True True\nTrue False\n", files[1].read_text()
    fork = server.start(["-c", "import signal; signal.pause()"], ROOT, os.environ, files)
    base.start(["-c", "pass"], ROOT, os.environ, files).wait()
    server.close()
    wait_until(lambda: not is_running(fork.pid), deadline_s=DEADLINE_S, what="end of a fork")
    base.close()


def is_running(pid: int) -> bool:
    stat = Path("/proc", str(pid), "stat")
    return stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z"


def test_a_fork_that_hangs_is_told_with_its_stacks(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        text = "import time\ndef hang():\n    print('up')\n    time.sleep(9999)\nhang()"
        child = processes.fork_python("-c", text, after=IMPORTED)
        child.wait_for_line("up", deadline_s=DEADLINE_S)
        with pytest.raises(AssertionError, match="in hang"):
            child.wait(deadline_s=0.1)


def test_one_that_fails_ends_the_wait_for_all(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        lasting = processes.start_python("-c", "import time; time.sleep(10_000)", name="lasting")
        failed = processes.start_python("-c", "import sys; sys.exit('no port')", name="failed")
        with pytest.raises(AssertionError, match=r"(?s)^\[None, 1\].*lasting.*exit code None.*no port"):
            processes.wait_all([lasting, failed], deadline_s=10_000)


def test_processes_get_other_ports_which_no_connection_gets(tmp_path: Path) -> None:
    program = "from tests.support.ports import free_port; print(*(free_port() for _ in range(50)))"
    with Processes(tmp_path) as processes:
        children = [processes.start_python("-c", program) for _ in range(4)]
        processes.wait_all(children, deadline_s=DEADLINE_S)
        ports = [int(port) for child in children for port in child.stdout().split()]
    assert len(set(ports)) == 200 and set(ports) <= set(given_ports())
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        assert one.getsockname()[1] not in given_ports()


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = free_port()
    counter = tmp_path / "counter"
    counter.write_text(str(given_ports().index(taken)))
    monkeypatch.setattr("tests.support.ports.COUNTER", counter)
    with socket.socket() as one:
        one.bind(("127.0.0.1", taken))
        assert free_port() != taken
    counter.write_text(str(given_ports().index(taken)))
    assert free_port() == taken
