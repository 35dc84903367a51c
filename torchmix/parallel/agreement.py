"""All ranks of a job were given the same, and all of them are there.

In: what each rank was given, as short texts by name, and the job's store. Out: nothing once all ranks have come, or an
error. Must hold: it is asked before groups are made, since ranks that make different groups wait for each other in
silence; a rank that fails before it has come, inside `announcing_failures`, ends the wait of the others. Cost: one key
in the store, read once by every rank, and one or two reads a second while ranks are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec

from torchmix.errors import RankLost, RecipeError

_LONGEST_PAUSE_S = 0.5
MOST_DIFFERENCES = 10
"""Most differences that an error names."""
_num_asked = 0
"""Agreements that this process has come to, or failed before; equal on all ranks."""


AgreementStore: TypeAlias = Any
"""Torch's `Store`, of which `set`, `get`, `check`, `add` and `timeout` are used; its type is not imported here."""


class _Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that will not come to an agreement."""

    rank: int
    text: str


def agree(
    store: AgreementStore,
    *,
    rank: int,
    world_size: int,
    facts: Mapping[str, str],
    check: Callable[[], None] = lambda: None,
    what: str = "build_loader",
) -> None:
    """Compare what this rank was given with rank 0, and wait for all. A collective: all ranks call it, in one order.

    Args:
        store: The store of the job.
        rank: Global rank.
        world_size: Ranks of the job.
        facts: Name -> value, as a message may show them; the names are the same on all ranks of one torchmix.
        check: Raises while this waits, if there is something else that ends the job.
        what: The call that asks, for messages.

    Raises:
        RecipeError: This rank differs from rank 0; names what, with both values.
        RankLost: Another rank failed before it came here, or a rank has not come within the store's timeout.
    """
    global _num_asked
    _num_asked += 1
    number = _num_asked
    key, arrivals = f"torchmix/agreement/{number}", f"torchmix/arrivals/{number}"
    if rank == 0:
        store.set(key, msgspec.json.encode(dict(facts)).decode())
    else:
        _await(store, lambda: store.check([key]), number=number, check=check, what="rank 0 has not said what it runs")
        first = msgspec.json.decode(store.get(key), type=dict[str, str])
        differences = [
            f"{name} {_cut(facts.get(name, 'missing'))}, rank 0 {_cut(first.get(name, 'missing'))}"
            for name in sorted({*facts, *first})
            if facts.get(name) != first.get(name)
        ]
        if differences:
            more = f" and {len(differences) - MOST_DIFFERENCES} more" if len(differences) > MOST_DIFFERENCES else ""
            error = RecipeError(
                f"{what}: rank {rank} was given other values than rank 0: "
                f"{'; '.join(differences[:MOST_DIFFERENCES])}{more}. Give all ranks the same"
            )
            _tell(store, error, rank=rank, number=number)
            raise error
    store.add(arrivals, 1)
    _await(
        store,
        lambda: store.add(arrivals, 0) >= world_size,
        number=number,
        check=check,
        what="some ranks have not built their loaders",
    )


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


@contextmanager
def announcing_failures(store: AgreementStore | None, *, rank: int) -> Iterator[None]:
    """Let an error that leaves the block end the wait of the ranks that come to the next agreement.

    Args:
        store: The store of the job; None outside of one, where nobody waits.
        rank: Global rank.
    """
    global _num_asked
    coming = _num_asked + 1
    try:
        yield
    except BaseException as error:
        if store is not None and _num_asked < coming:
            _num_asked = coming
            with suppress(RuntimeError):  # the store is gone, and nobody reads it then
                _tell(store, error, rank=rank, number=coming)
        raise


def await_key(store: AgreementStore, key: str) -> bytes:
    """The value of a key that a rank writes before it comes to the next agreement.

    Raises:
        RankLost: A rank failed before it came there, or the key has not come within the store's timeout.
    """
    _await(store, lambda: store.check([key]), number=_num_asked + 1, what=f"nobody has written {key}")
    value: bytes = store.get(key)
    return value


def _tell(store: AgreementStore, error: BaseException, *, rank: int, number: int) -> None:
    failure = _Failure(rank=rank, text=f"{type(error).__name__}: {error}")
    store.set(_failure_key(number), msgspec.json.encode(failure).decode())


def _failure_key(number: int) -> str:
    return f"torchmix/failure/{number}"


_decode_failure = msgspec.json.Decoder(_Failure).decode


def _await(
    store: AgreementStore,
    is_there: Callable[[], bool],
    *,
    number: int,
    what: str,
    check: Callable[[], None] = lambda: None,
) -> None:
    limit: timedelta = store.timeout
    began, pause_s = time.monotonic(), 0.002
    while True:
        try:
            if is_there():
                return
            failure = store.get(_failure_key(number)) if store.check([_failure_key(number)]) else None
        except RuntimeError as error:  # torch's store errors are RuntimeErrors
            raise RankLost(f"the job's store is gone, and so is the rank or launcher that hosts it: {error}") from error
        if failure is not None:
            failed = _decode_failure(failure)
            raise RankLost(f"rank {failed.rank} failed before the loaders were built: {failed.text}", failed.rank)
        check()
        waited_s = time.monotonic() - began
        if waited_s > limit.total_seconds():
            raise RankLost(f"{what} within {waited_s:.0f} s; all ranks of the job must build the same loaders", -1)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
