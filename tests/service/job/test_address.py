"""Where loaders of a node listen."""

from __future__ import annotations

import pytest

from torchmix.errors import OptionError
from torchmix.service.roster import ADDRESS_VARIABLE, bind_of, own_address


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)


def test_without_a_store_it_is_this_machine_alone() -> None:
    assert own_address(None) == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_it_is_the_address_on_the_way_to_the_store(host: str) -> None:
    assert own_address((host, 29500)) in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("said", "bind"), [("10.0.0.7", "tcp://10.0.0.7:0"), ("[::1]", "tcp://[::1]:0"), ("ib0", "tcp://ib0:0")]
)
def test_what_the_user_says_comes_first(said: str, bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, said)
    assert bind_of(own_address(("127.0.0.1", 1))) == bind


@pytest.mark.parametrize("said", ["0.0.0.0", "*", "[::]"])
def test_all_addresses_are_none(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, said)
    with pytest.raises(OptionError, match="name one of this machine"):
        own_address(None)


def test_a_store_that_is_not_reached_is_named() -> None:
    with pytest.raises(OptionError, match=r"no address .* at no\.such\.host\.invalid:1"):
        own_address(("no.such.host.invalid", 1))
