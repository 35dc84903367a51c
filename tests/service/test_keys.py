"""Keys are made once, secrets stay secret, and what is no key is refused by its path."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from torchmix.errors import OptionError
from torchmix.service.keys import KeyPair, client_keys, server_keys, write_keys


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
