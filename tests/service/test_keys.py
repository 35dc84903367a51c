"""Keys are made once, secrets stay secret, and what is no key is refused by its path."""

from __future__ import annotations

import itertools
import os
import socket
import stat
from pathlib import Path

import pytest

from torchmix.errors import OptionError
from torchmix.service.keys import KeyPair, client_keys, mode_fault, server_keys, write_keys
from torchmix.service.main import MetricsPage
from torchmix.service.server import LoaderServer


@pytest.fixture
def folder(tmp_path) -> Path:
    numbers = itertools.count()
    write_keys(
        tmp_path / "k",
        lambda: KeyPair(public=f"{next(numbers):0>40}", secret=f"{next(numbers):s>40}"),
        num_clients=2,
    )
    return tmp_path / "k"


def test_both_sides_find_their_keys(folder):
    ours, client = server_keys(folder), client_keys(folder)
    assert client.server == ours.own.public
    assert client.own.public in ours.allowed() and len(ours.allowed()) == 2
    assert client_keys(folder / "client-1.secret").own != client.own


def test_secrets_are_of_their_owner_alone(folder):
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.secret"))
    (folder / "server.secret").chmod(0o640)
    with pytest.raises(OptionError, match=r"server\.secret is a secret, .* chmod 600"):
        server_keys(folder)


def test_keys_are_not_replaced(folder):
    with pytest.raises(OptionError, match="not empty"):
        write_keys(folder, lambda: KeyPair(public="", secret=""), num_clients=1)


@pytest.mark.parametrize(
    ("mode", "is_own", "group", "is_taken"),
    [
        (0o600, True, 5, True),
        (0o400, True, 5, True),
        (0o440, True, 5, False),  # of this user: it can mend the mode
        (0o440, False, 5, True),  # as a Secret of Kubernetes with fsGroup
        (0o640, False, 5, True),
        (0o440, False, 6, False),
        (0o460, False, 5, False),
        (0o444, False, 5, False),
        (0o404, False, 5, False),
    ],
)
def test_a_secret_is_of_its_owner_or_of_a_group_of_ours_that_may_only_read(
    folder, monkeypatch, mode, is_own, group, is_taken
):
    status = (folder / "server.secret").stat()
    monkeypatch.setattr("os.geteuid", lambda: status.st_uid if is_own else status.st_uid + 1)
    monkeypatch.setattr("os.getegid", lambda: 7)
    monkeypatch.setattr("os.getgroups", lambda: [5])
    fields = list(status)
    fields[0], fields[5] = stat.S_IFREG | mode, group
    assert (mode_fault(os.stat_result(fields)) is None) is is_taken


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "é" * 40, "\0" * 40])
def test_what_is_no_key_is_refused_by_its_path(folder, text):
    (folder / "server.public").write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=r"server\.public"):
        client_keys(folder)


def test_missing_keys_are_named(folder, tmp_path):
    with pytest.raises(OptionError, match=r"no client-K\.secret"):
        client_keys(tmp_path)
    with pytest.raises(OptionError, match=r"server\.secret"):
        server_keys(tmp_path)
    for path in folder.glob("client-*.public"):
        path.unlink()
    with pytest.raises(OptionError, match="nobody could ask"):
        server_keys(folder)


def test_keys_of_clients_are_those_that_are_there_now(folder, caplog):
    ours = server_keys(folder)
    [first, second] = sorted(ours.allowed())
    (folder / "client-0.public").unlink()
    assert ours.allowed() == {second}
    (folder / "client-2.public").write_text(first)
    (folder / "client-3.public").write_text("half a k")  # being written
    assert ours.allowed() == {first, second} == ours.allowed()
    assert caplog.text.count("client-3.public holds no key") == 1, "a fault is logged once"
    folder.rename(folder.with_name("elsewhere"))
    assert ours.allowed() == {first, second}, "a disk that is away takes no key"
    folder.mkdir()
    assert not ours.allowed()


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = f"cannot listen at tcp://127.0.0.1:{port}: Address already in use; name an address of this machine"
        with pytest.raises(OptionError, match=taken):
            LoaderServer(None, bind=f"tcp://127.0.0.1:{port}", keys=server_keys(folder))
        with pytest.raises(OptionError, match=f"--metrics {port}: Address already in use; name a free port"):
            MetricsPage(port, dict)
