"""All ranks of a job were given the same, and leaders plan the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import PlanDiverged, RankLost, RecipeError
from torchmix.recipe.build import listed

# --- What leaders tell each other of the steps that they have, before any rank has these.
#
# A leader tells of the steps at hand, which may be more than another one has: those that all have are compared, and the
# others are told of again. What follows is the same for all leaders. A step of which one of them could not read
# something is compared alone, and all gather once more then, as many integers as there are sources; where no step is
# alike, they gather what each was given, and then the rows of each stream. Cost: 896 bytes a leader.

GOES_ON, ENDS, FAILED, _NO_STEP = 0, 1, 2, 3
"""What becomes of a leader's stream; the last one stands where it has told of all its steps."""
MOST_COMPARED = 16
"""Most steps that are compared at once."""
_PLAN_WORDS = 4
_STATUS, _MASKED, _SOURCES = 4, 5, 6
_WORDS = 7
_FINGERPRINT_BYTES = 16
_CALLED = {"recipe": "recipes", "catalog": "catalogs", "denied": "deny-lists", "log": "logs of decisions"}
"""Fields of `Given` that are compared, and what messages call them."""
_MOST_NAMES = 5
"""Streams that a message names."""


class Masked(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What reading took away from a step: of one replica, or of all."""

    num_tokens: int = 0
    """Tokens that the plan counts in the loss, and that have none."""
    bad_tokens: Int64Array | None = None
    """[S] tokens of each source that could not be read; None if all could."""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader has planned by: fingerprints of at most 16 ASCII letters, empty for what there is none of."""

    recipe: str = ""
    """That of the part of the recipe."""
    catalog: str = ""
    denied: str = ""
    """That of the documents that deny-lists name."""
    log: str = ""
    """The branch of a policy's log of decisions."""
    streams: tuple[str, ...] = ()
    """Sorted names; equal where recipes are."""
    rows: tuple[int, ...] = ()
    """64 bits of the fingerprint of the rows of each stream."""


class ToCompare(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a leader tells of a step."""

    step: int
    order_digest: bytes
    """After the step, 8 bytes."""
    plan_digest: bytes
    """The step's own, 8 bytes."""
    first_microbatch: int = 0
    """Where this rank begins in the step; not 0 where a state inside it was loaded."""
    masked: Masked = Masked()
    """Tokens of this replica that are masked because of bad rows."""


def words_of_steps(steps: Sequence[ToCompare]) -> Int64Array:
    """The integers of a leader that has these steps, 1 to MOST_COMPARED."""
    words = words_of_status(_NO_STEP).view(np.uint64)
    for words_of_step, told in zip(_by_step(words), steps, strict=False):
        num_sources = 0 if told.masked.bad_tokens is None else len(told.masked.bad_tokens)
        digests = (int.from_bytes(told.order_digest, "big"), int.from_bytes(told.plan_digest, "big"))
        words_of_step[:] = (told.step, *digests, told.first_microbatch, GOES_ON, told.masked.num_tokens, num_sources)
    return words.view(np.int64)


def words_of_status(status: int) -> Int64Array:
    """The integers of a leader that has no step."""
    words = np.zeros(MOST_COMPARED * _WORDS, np.int64)
    of_steps = _by_step(words)
    of_steps[:, _STATUS] = _NO_STEP
    of_steps[0, _STATUS] = status
    return words


def _by_step(words: NDArray[Any]) -> NDArray[Any]:
    """[..., MOST_COMPARED, _WORDS] of the words of some leaders, or of one."""
    return words.reshape(*words.shape[:-1], MOST_COMPARED, _WORDS)


def statuses(rows: Int64Array) -> Int64Array:
    """What becomes of the stream of each leader; `rows` are the words of all, in one order."""
    found: Int64Array = rows[:, _STATUS]
    return found


def words_of_given(given: Given) -> Int64Array:
    """The integers of what a leader was given; the last one counts its streams."""
    texts = [getattr(given, name) for name in _CALLED]
    content = b"".join(text.encode().ljust(_FINGERPRINT_BYTES, b"\0") for text in texts)
    return np.append(np.frombuffer(content, np.int64), len(given.streams))


def words_of_rows(given: Given, all_given: Int64Array) -> Int64Array:
    """The integers of the rows of a leader's streams: as many as the leader with most streams has, of all leaders."""
    words = np.zeros(int(all_given[:, -1].max()), np.uint64)
    words[: len(given.rows)] = given.rows
    return words.view(np.int64)


def _given_of(words: Int64Array, rows: Int64Array, streams: tuple[str, ...]) -> Given:
    """What a leader was given, whose streams have these names if its recipe is that of the one that asks."""
    texts = [row.tobytes().rstrip(b"\0").decode() for row in words[:-1].reshape(len(_CALLED), -1)]
    found = dict(zip(_CALLED, texts, strict=True))
    return Given(**found, streams=streams, rows=tuple(rows.view(np.uint64)[: len(streams)].tolist()))


def diverged(
    steps: Int64Array, given: Int64Array, rows: Int64Array, ranks: Sequence[int], rank: int, streams: tuple[str, ...]
) -> PlanDiverged:
    """The error of a leader whose first step is another one than that of some other leader; it has both values.

    Args:
        steps: The words of all leaders, in the order of `ranks`.
        given: Likewise, what they were given.
        rows: Likewise, the rows of their streams.
        ranks: Their global ranks.
        rank: The one that asks.
        streams: The names of its streams.
    """
    place = list(ranks).index(rank)
    of_all = [_given_of(*words, streams) for words in zip(given, rows, strict=True)]
    return next(
        _diverged((rank, steps[place], of_all[place]), (ranks[other], words, of_all[other]))
        for other, words in enumerate(steps)
        if words[_STATUS] == GOES_ON and (words != steps[place])[:_PLAN_WORDS].any()
    )


def num_compared(rows: Int64Array) -> int:
    """How many steps all leaders that go on have alike; 0 where none goes on, one failed, or the first steps differ."""
    status = statuses(rows)
    going_on = _by_step(rows[status == GOES_ON])
    if FAILED in status or not len(going_on):
        return 0
    is_alike = np.logical_and.reduce(going_on[:, :, _STATUS] == GOES_ON, axis=0)
    is_alike &= np.logical_and.reduce(going_on[:, :, :_PLAN_WORDS] == going_on[0, :, :_PLAN_WORDS], axis=(0, 2))
    is_alone = np.logical_or.reduce(going_on[:, :, _SOURCES] > 0, axis=0)
    return min(_first(~is_alike), max(1, _first(is_alone)))


def _first(is_so: NDArray[np.bool_]) -> int:
    """The place of the first one; how many there are if none is."""
    return int(is_so.argmax()) if is_so.any() else len(is_so)


def num_masked_tokens(rows: Int64Array) -> list[int]:
    """Tokens of all replicas that have no loss because of reading, of each step."""
    found: list[int] = _by_step(rows)[:, :, _MASKED].sum(axis=0).tolist()
    return found


def sources_to_gather(rows: Int64Array, count: int) -> int:
    """How many integers leaders gather next, because one of them could not read something; 0: nothing.

    Args:
        rows: The words of all leaders.
        count: `num_compared` of them.
    """
    return int(rows[:, _SOURCES].max()) if count else 0


def _diverged(*both: tuple[int, Int64Array, Given]) -> PlanDiverged:
    plans = "; ".join(
        "rank {} step {}, order digest {:016x}, plan digest {:016x}, from microbatch {}".format(
            rank, *words.view(np.uint64)[:_PLAN_WORDS].tolist()
        )
        for rank, words, _ in both
    )
    differing = [
        f"their {called} differ: "
        + ", ".join(f"rank {rank} has {getattr(given, name) or 'none'}" for rank, _, given in both)
        + (_of_rows(*(given for _, _, given in both)) if name == "catalog" else "")
        for name, called in _CALLED.items()
        if len({getattr(given, name) for _, _, given in both}) > 1
    ]
    if differing:
        return PlanDiverged(f"leaders planned differently: {plans}; {'; '.join(differing)}. Give all ranks the same")
    return PlanDiverged(
        f"leaders planned differently: {plans}; their {', '.join(_CALLED.values())} are alike. Give all ranks the same "
        "state, and the same versions of torchmix and of what it uses"
    )


def _of_rows(one: Given, other: Given) -> str:
    """Which streams have other rows, for a message; nothing where recipes differ, or none has."""
    pairs = zip(one.streams, one.rows, other.rows, strict=True)
    names = [name for name, rows, others in pairs if one.recipe == other.recipe and rows != others]
    return f" ({listed(names, _MOST_NAMES)} with other rows)" if names else ""


# --- All ranks of a job were given the same, and all of them are there.
#
# It is asked before groups are made, since ranks that make different groups wait for each other in silence; a rank
# that fails before it has come, inside `announcing_failures`, ends the wait of the others. Cost: one key in the store,
# read once by every rank, and one or two reads a second while ranks are missing.

_LONGEST_PAUSE_S = 0.5
MOST_DIFFERENCES = 10
"""Most differences that an error names."""
AgreementStore: TypeAlias = Any
"""Torch's `Store`, of which `set`, `get`, `check`, `add` and `timeout` are used; its type is not imported here."""
AGREEMENT = "agreement"


def times_met(store: AgreementStore, what: str, rank: int, more: int = 1) -> int:
    """How often a rank has come to a kind of meeting over this store, `more` times now; equal on all of its ranks.

    The store counts, not the process: ranks that go on over another store begin there with those that are new.
    """
    count: int = store.add(f"torchmix/met/{what}/{rank}", more)
    return count


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
    number = times_met(store, AGREEMENT, rank)
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
    before = 0 if store is None else times_met(store, AGREEMENT, rank, 0)
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):  # the store is gone, and nobody reads it then
            if store is not None and times_met(store, AGREEMENT, rank, 0) == before:
                _tell(store, error, rank=rank, number=times_met(store, AGREEMENT, rank))
        raise


def await_key(store: AgreementStore, key: str, *, rank: int) -> bytes:
    """The value of a key that another rank than `rank` writes before it comes to the next agreement.

    Raises:
        RankLost: A rank failed before it came there, or the key has not come within the store's timeout.
    """
    number = times_met(store, AGREEMENT, rank, 0) + 1
    _await(store, lambda: store.check([key]), number=number, what=f"nobody has written {key}")
    value: bytes = store.get(key)
    return value


def told_by_all(store: AgreementStore, value: str, *, rank: int, world_size: int) -> list[str]:
    """What each rank has to tell, by rank. A collective: all ranks call it, in one order.

    Args:
        store: The store of the job.
        value: What this rank tells.
        rank: Global rank.
        world_size: Ranks of the job.

    Raises:
        RankLost: A rank failed before it came to the next agreement, or has not told within the store's timeout.
    """
    key = f"torchmix/told/{times_met(store, 'told', rank)}"
    if rank:
        store.set(f"{key}/{rank}", value)
        return msgspec.json.decode(await_key(store, key, rank=rank), type=list[str])
    told = [value, *(await_key(store, f"{key}/{other}", rank=0).decode() for other in range(1, world_size))]
    store.set(key, msgspec.json.encode(told).decode())
    return told


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
    for waited_s in pauses(_LONGEST_PAUSE_S):
        try:
            if is_there():
                return
            failure = store.get(_failure_key(number)) if store.check([_failure_key(number)]) else None
        except RuntimeError as error:  # torch's store errors are RuntimeErrors
            raise RankLost(
                f"the job's store is gone, and so is the rank or launcher that serves it: {error}"
            ) from error
        if failure is not None:
            failed = _decode_failure(failure)
            raise RankLost(f"rank {failed.rank} failed before the loaders were built: {failed.text}", failed.rank)
        check()
        if waited_s > limit.total_seconds():
            raise RankLost(f"{what} within {waited_s:.0f} s; all ranks of the job must build the same loaders", -1)


def pauses(longest_s: float) -> Iterator[float]:
    """Seconds since the first, without an end; there is a pause before each of the others, longer and longer."""
    began_s, pause_s = time.monotonic(), 0.002
    while True:
        yield time.monotonic() - began_s
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
