from __future__ import annotations

import signal

import pytest

from tests.support.deadlines import LONG_S
from tests.support.processes import Processes
from torchmix.errors import OptionError
from torchmix.service.endpoints import (
    Registry,
    endpoints_of,
    expanded,
    is_beyond_this_machine,
    registered,
    registration_path,
    with_port,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tcp://cpu:7700", ["tcp://cpu:7700"]),
        ("tcp://cpu-[0-2]:77", ["tcp://cpu-0:77", "tcp://cpu-1:77", "tcp://cpu-2:77"]),
        ("tcp://c[09-10]:[1-2]", ["tcp://c09:1", "tcp://c09:2", "tcp://c10:1", "tcp://c10:2"]),
    ],
)
def test_ranges_are_written_out(text, found):
    assert expanded(text) == found


@pytest.mark.parametrize("text", ["tcp://c[2-1]:1", "tcp://c[0-99]:[0-99]", "tcp://c[0-9999]:1"])
def test_ranges_that_are_empty_or_too_long_are_refused(text):
    with pytest.raises(OptionError):
        expanded(text)


def test_a_folder_is_looked_at_each_time(tmp_path):
    found = endpoints_of(["e", "tcp://a:1"], tmp_path)
    assert found.now() == {"tcp://a:1": None}
    registry = Registry(tmp_path / "e")
    registry.put("tcp://b:7")
    registry.put("tcp://b:8")
    registry.put("tcp://b:8", {"web": 3})
    (tmp_path / "e" / "foreign.loader").write_bytes(b"\xff")
    (tmp_path / "e" / "other.loader").write_text('{"endpoint": 3}')
    assert found.now() == {"tcp://a:1": None, "tcp://b:7": None, "tcp://b:8": {"web": 3}}
    registry.remove("tcp://b:7")
    assert [one.endpoint for one in registered(tmp_path / "e")] == ["tcp://b:8"]
    registry.close()
    assert not registered(tmp_path / "e") and not list((tmp_path / "e").glob(".*"))


def test_what_somebody_else_removes_is_registered_again(tmp_path):
    registry = Registry(tmp_path)
    registry.put("tcp://b:7", {"web": 3})
    before = registered(tmp_path)
    registration_path(tmp_path, "tcp://b:7").unlink()
    registry.look()
    assert registered(tmp_path) == before != []
    registry.close()


@pytest.mark.system
def test_what_a_killed_keeper_has_left_goes_when_the_next_one_begins(tmp_path):
    ours = Registry(tmp_path / "e")
    ours.put("tcp://b:7")
    with Processes(tmp_path) as processes:
        program = (
            "import sys, time, pathlib; from torchmix.service.endpoints import Registry; "
            "one = Registry(pathlib.Path(sys.argv[1])); one.put('tcp://b:8'); one.put('tcp://b:8', {'web': 1}); "
            "print('there', flush=True); time.sleep(1000)"
        )
        child = processes.start_python("-c", program, str(tmp_path / "e"), name="keeper")
        child.wait_for_line("there", deadline_s=LONG_S)
        Registry(tmp_path / "e")
        assert {one.endpoint for one in registered(tmp_path / "e")} == {"tcp://b:7", "tcp://b:8"}, "both live"
        child.send_signal(signal.SIGKILL)
        child.wait(deadline_s=LONG_S)
        assert len(registered(tmp_path / "e")) == 2
        Registry(tmp_path / "e")
        assert [one.endpoint for one in registered(tmp_path / "e")] == ["tcp://b:7"]
    ours.close()


@pytest.mark.parametrize("text", ["http://x:1", "udp://x:1"])
def test_other_schemes_are_refused(tmp_path, text):
    with pytest.raises(OptionError, match="tcp:// or ipc://"):
        endpoints_of([text], tmp_path)


@pytest.mark.parametrize(
    ("endpoint", "is_beyond"),
    [
        ("ipc:///tmp/x", False),
        ("tcp://127.0.0.1:1", False),
        ("tcp://[::1]:1", False),
        ("tcp://localhost:1", False),
        ("tcp://10.0.0.7:1", True),
        ("tcp://0.0.0.0:1", True),
        ("tcp://*:1", True),
        ("tcp://lo:1", True),
        ("tcp://cpu-0:1", True),
    ],
)
def test_which_addresses_other_machines_reach(endpoint, is_beyond):
    assert is_beyond_this_machine(endpoint) is is_beyond


def test_ports_count_up_from_the_first():
    assert with_port("tcp://10.0.0.7:7700", 3) == "tcp://10.0.0.7:7703"
    assert with_port("tcp://[::1]:0", 3) == "tcp://[::1]:0"
    assert with_port("ipc:///tmp/x", 3) == "ipc:///tmp/x/3"
    for bind in ("tcp://10.0.0.7", "tcp://10.0.0.7:65535", "udp://10.0.0.7:1"):
        with pytest.raises(OptionError):
            with_port(bind, 1)
