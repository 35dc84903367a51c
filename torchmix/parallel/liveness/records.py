"""What ranks write for each other into the job's store: beats, identities, one loss.

In: a store. Out: what a rank has written, None before it has. Must hold: no request waits for a key, and each is one
message to the store; what is read was written by a rank of this job. Cost: a message each.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from torchmix.parallel.liveness.evidence import RankIdentity


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank says again and again."""

    count: int
    """Grows with every beat."""
    step: int
    """Last step that the rank's loader delivered, -1 before the first."""
    is_done: bool
    """Whether the rank closed its loader; its last beat."""
    every_s: float = 0.0
    """When the next one comes, at the latest, if the rank is as it should be."""


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank that is lost, as all ranks read it."""

    rank: int
    """-1 for the launcher."""
    text: str
    """Who it is and how it was lost."""


class RecordStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write if the value is the expected one, or if nothing is expected and there is none; the value after it."""

    def add(self, key: str, amount: int, /) -> int:
        """Count; the sum."""


_beats = msgspec.json.Decoder(Beat)
_identities = msgspec.json.Decoder(RankIdentity)
_losses = msgspec.json.Decoder(Loss)
_encode = msgspec.json.encode

_NOTHING = "-"
"""No value of a key: under the abort key that nobody is lost."""


class Records:
    """One rank's hand in the store.

    All methods raise RuntimeError if the store is gone, and MsgspecError if what is read was not written by a rank.
    """

    def __init__(self, store: RecordStore) -> None:
        """Write, if no other rank has, that nobody is lost."""
        self._store = store
        self._identities: dict[int, RankIdentity] = {}
        store.compare_set("abort", "", _NOTHING)

    def write_beat(self, rank: int, beat: Beat) -> None:
        """In the place of the rank's last one."""
        self._store.set(f"beat/{rank}", _encode(beat).decode())

    def write_identity(self, rank: int, identity: RankIdentity) -> None:
        """After the first beat: a rank that is known has one."""
        self._store.set(f"who/{rank}", _encode(identity).decode())

    def identity(self, rank: int) -> RankIdentity | None:
        """Who a rank is; asked for until it is known."""
        if rank not in self._identities:
            if (found := self._read(f"who/{rank}")) is None:
                return None
            self._identities[rank] = _identities.decode(found)
        return self._identities[rank]

    def known_identity(self, rank: int) -> RankIdentity | None:
        """As far as it was asked for before."""
        return self._identities.get(rank)

    def read(self, rank: int) -> tuple[Beat | None, RankIdentity | None]:
        """The latest beat and the identity of a rank, None before it has opened its loader."""
        if (identity := self.identity(rank)) is None or (found := self._read(f"beat/{rank}")) is None:
            return None, None
        return _beats.decode(found), identity

    def loss(self) -> Loss | None:
        """The one that stands."""
        return None if (found := self._read("abort")) is None else _losses.decode(found)

    def write_loss(self, loss: Loss) -> Loss:
        """Write a loss unless there is one; the one that stands."""
        return _losses.decode(self._store.compare_set("abort", _NOTHING, _encode(loss).decode()))

    def say_that_it_ends(self, rank: int) -> None:
        """SIGTERM ends the rank."""
        self._store.set(f"ending/{rank}", "yes")

    def is_ending(self, rank: int) -> bool:
        """Whether SIGTERM ends the rank."""
        return self._read(f"ending/{rank}") is not None

    def count_farewells(self, more: int) -> int:
        """Add ranks that need the store no more; how many there are."""
        return self._store.add("farewells", more)

    def _read(self, key: str) -> bytes | None:
        # `get` and `check` would be two messages, and `get` waits for a key that is not there.
        found = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found
