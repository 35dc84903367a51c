"""Membership: processes that come and go agree, over a torch Store, on who they are and from which state they go on.

    with Membership(store, founders=4) as members:
        meeting = members.meet()                      # rank, world size, state, a store for the process group
        ...
        while not members.ends(step):                 # between two steps
            ...                                       # a step, in which each rank waits for all others
        meeting = members.meet(loader.state_dict(), step=step)     # also after a loss

A *meeting* ends a group of members and makes the next one. Every member comes to it: at the border of a step, if
somebody wants to come or to go, or as soon as a rank is lost. What a member brings is its state after the last step
that it has committed; the group goes on from the newest of them.

Invariants: groups are numbered, and the first member that writes the next one decides for all; nobody writes it before
each member of the last one has come, is gone by the kernel, or has been waited for as long as the patience says.
Whoever is not in it comes again as a new one. Nothing executable is stored, and every message is tried by its meaning.
Cost: a request to the store a step, three on rank 0.

A member may be a *replica* of several ranks, which share a store and no process group with other replicas. All of them
make a Membership and call it alike; its first rank speaks for it, and tells the others over the replica's store what
came of it. Whoever loses a rank is lost as a whole: the others of that replica get a RankLost, and leave, or come again
as a new member once its place is filled.

    come/N          who asks to join, from 1 on without gaps
    group/G         the members of group G, and what it has of those who asked
    at/G/NAME       what a member of G brings to the meeting that ends it; state/G/NAME: its state
    ends/G          the step before which the group meets, said a step ahead, since ranks are at most a step apart
    leaving/G       a member wants to go
    here/G/NAME     a member of G has read that it is one

    brings/N/RANK   in the store of a replica: what each rank brings to its meeting number N
    went/N          what its first rank has to tell of it
    beats/RANK      how often a rank has looked while it waited
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store  # typed here alone

from torchmix.errors import OptionError, PlanDiverged, RankLost, StateError, WireError
from torchmix.parallel.agreement import pauses
from torchmix.parallel.liveness.evidence import Evidence, RankIdentity, evidence_of_process, identity_of_this_process
from torchmix.steps.state import read_state

logger = logging.getLogger(__name__)

MOST_STEPS = 1 << 24
NEW = -1
"""The step of a member that has no state."""
PATIENCE_S = 60.0
_LONGEST_PAUSE_S = 0.25
_Message = TypeVar("_Message", bound=msgspec.Struct)


class _Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who comes to a meeting."""

    name: str
    identity: RankIdentity
    step: int = NEW
    """The step that its state begins with."""
    order: str = ""
    """The order digest of the steps before, 16 hex digits; empty where they were not planned."""
    leaves: bool = False
    others: tuple[RankIdentity, ...] = ()
    """The other ranks of its replica."""

    def check(self) -> None:
        """Raise ValueError if it means nothing."""
        if not (0 < len(self.name) <= 64 and NEW <= self.step <= MOST_STEPS and len(self.order) in (0, 16)):
            raise ValueError(f"name {self.name!r}, step {self.step}")


class _Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of members, by rank."""

    number: int
    members: tuple[_Arrival, ...]
    num_asked: int
    """How many of those who asked to join were looked at, in this group and those before."""

    def check(self) -> None:
        """Raise ValueError if it means nothing."""
        names = [member.name for member in self.members]
        if len({*names}) != len(names) or min(self.number, self.num_asked) < 0:
            raise ValueError(f"number {self.number}, {self.num_asked} asked, members {names}")
        for member in self.members:
            member.check()

    @property
    def source(self) -> int:
        """The rank of the newest state, the lowest of equal ones; -1 if nobody has one."""
        newest = max((member.step for member in self.members), default=NEW)
        return -1 if newest == NEW else [member.step for member in self.members].index(newest)


def _check_orders(group: _Group, step: int) -> None:
    """Compare the orders of members whose states begin with a step. Replicas that are apart hear of no others' before.

    Raises:
        PlanDiverged: Two differ; names both.
    """
    found = [(rank, one.order) for rank, one in enumerate(group.members) if one.step == step and one.order]
    for rank, order in found[1:]:
        if order != found[0][1]:
            raise PlanDiverged(
                f"meet: members were given other documents before step {step}: order digest {found[0][1]} at rank "
                f"{found[0][0]}, {order} at rank {rank}. One had another recipe, catalog or version of torchmix: give "
                "all the same, and start again from a checkpoint of before"
            )


class _Went(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the first rank of a replica tells the others of a meeting."""

    name: str
    """That of the replica; empty: it has left."""
    group: int
    error: str = ""
    """Why there is nothing to tell."""

    def check(self) -> None:
        """Raise ValueError if it means nothing."""
        if self.group < 0 or len(self.name) > 64:
            raise ValueError(f"name {self.name!r}, group {self.group}")


_arrivals, _groups = msgspec.json.Decoder(_Arrival), msgspec.json.Decoder(_Group)
_wents = msgspec.json.Decoder(_Went)
_FOUNDING = _Group(number=0, members=(), num_asked=0)


class Meeting(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a meeting has come to, for one member."""

    number: int
    """The group that it has made is number so many, from 1 on; equal on all ranks."""
    rank: int
    """This member's place; members that stay keep their order, and those that come are behind them. With replicas of
    several ranks it is the number of the replica."""
    world_size: int
    """Members."""
    state_dict: dict[str, Any] | None
    """The newest state of a member; None where nobody has one."""
    step: int
    """The step that it begins with; 0 without a state."""
    source: int
    """The rank that brought it, and has the weights of that step; -1 without a state."""
    behind: tuple[int, ...]
    """Ranks that need the weights of `source`: they are new, or had committed a step less."""
    store: Store
    """For `torch.distributed.init_process_group`: no other group has its keys."""


def _is_replica(value: object) -> bool:
    """Whether this is a store, a rank and a number of ranks above it."""
    if not isinstance(value, tuple) or len(value) != 3:
        return False
    store, rank, num_ranks = value
    return isinstance(store, Store) and type(rank) is int and type(num_ranks) is int and 0 <= rank < num_ranks


@contextmanager
def _naming_the_store() -> Iterator[None]:
    """Raise RankLost where the store does not answer."""
    try:
        yield
    except RuntimeError as error:  # torch's store errors are RuntimeErrors
        raise RankLost(f"the members' store is gone, and so is the process that hosts it: {error}") from error


class Membership:
    """One process' membership in a job whose ranks come and go."""

    def __init__(
        self,
        store: Store,
        *,
        founders: int,
        replica: tuple[Store, int, int] | None = None,
        patience_s: float = PATIENCE_S,
        evidence_of: Callable[[RankIdentity], Evidence] = evidence_of_process,
    ) -> None:
        """Belong to no group yet.

        Args:
            store: Of all members; whoever hosts it must not be one that may be lost.
            founders: How many members make the first group, 1 or more; equal for all.
            replica: Where a replica of several ranks is the member: a store of these ranks alone that nobody has used
                for this, this rank's number in the replica, and how many it has. None: this process is the member.
            patience_s: Seconds, above 0, that a meeting waits for a member which the kernel does not say is gone.
            evidence_of: Stands in for what the kernel says, in tests.

        Raises:
            OptionError: A value is out of its range.
        """
        if type(founders) is not int or founders < 1:
            raise OptionError(f"Membership: founders={founders!r} must be an int of at least 1")
        if type(patience_s) not in (int, float) or not 0 < patience_s < math.inf:
            raise OptionError(f"Membership: patience_s={patience_s!r} must be a number of seconds above 0")
        if not isinstance(store, Store):
            raise OptionError(f"Membership: store={store!r} must be a torch.distributed.Store, such as a TCPStore")
        if replica is not None and not _is_replica(replica):
            raise OptionError(f"Membership: replica={replica!r} must be a store, a rank and a number of ranks above it")
        self._store = PrefixStore("torchmix/members", store)
        self._inner: Store | None
        self._inner, self._rank, self._num_ranks = replica or (None, 0, 1)
        self._num_meetings = 0
        self._fellows: dict[int, RankIdentity] = {}
        """The other ranks of the replica that have come to a meeting."""
        self._base = store
        self._founders, self._patience_s, self._evidence_of = founders, patience_s, evidence_of
        self._identity = identity_of_this_process()
        self._name = ""
        self._group = _FOUNDING
        """The last group that this process knows of."""
        self._has_told = False

    def meet(self, state_dict: dict[str, Any] | None = None, *, step: int = 0, leaves: bool = False) -> Meeting | None:
        """End the group, if this process is in one, and wait for the next. Every member of the group calls it.

        Args:
            state_dict: Of the loader, between two steps, after the last step that this process has committed; None:
                it has no state, and takes that of another member.
            step: The step that the state begins with.
            leaves: This member goes; what it brings still counts while it is the only one that has it.

        Returns:
            The next group; None to a member that leaves.

        Raises:
            StateError: `state_dict` is no state, or `step` is not in [0, 2^24].
            OptionError: `leaves` is neither True nor False.
            RankLost: All members of the group are gone, so nobody has what a new one would need; or the store is gone;
                or another rank of this replica, which is lost with it.
            PlanDiverged: Members that bring a state before the same step were given other documents before it.
            WireError: What stands in the store was not written by a member.
        """
        data = state_dict.get("torchmix_state") if isinstance(state_dict, dict) else None
        if state_dict is not None and not isinstance(data, bytes):
            raise StateError("meet: state_dict is not what loader.state_dict() returned")
        if type(step) is not int or not 0 <= step <= MOST_STEPS:
            raise StateError(f"meet: step={step!r} must be an int in [0, {MOST_STEPS}]")
        if type(leaves) is not bool:
            raise OptionError(f"meet: leaves={leaves!r} must be True or False")
        own = _Arrival(
            name=self._name or uuid.uuid4().hex,
            identity=self._identity,
            step=NEW if data is None else step,
            order="" if data is None else read_state(data).order_digest.hex(),
            leaves=leaves,
        )
        with _naming_the_store():
            if self._inner is None:
                return self._meet(own, data)
            self._num_meetings += 1
            own = self._of_replica(own)
            return self._meet_for_others(own, data) if self._rank == 0 else self._hear(own, data)

    def _meet(self, own: _Arrival, data: bytes | None) -> Meeting | None:
        """End the group, and wait for the next."""
        while True:
            if not self._name:
                if own.leaves:
                    return None
                own = msgspec.structs.replace(own, name=uuid.uuid4().hex)
                self._ask(own)
                group = self._await_invitation(own)
            else:
                group = self._next_group(own, data)
            self._group, self._has_told = group, False
            names = [member.name for member in group.members]
            self._name = own.name if own.name in names else ""
            if own.leaves and not self._name:
                return None
            if self._name and self._are_all_here(group):
                return self._meeting(group, names.index(own.name), data)

    def ends(self, step: int) -> bool:
        """Whether the group meets before this step. Every member asks before each of its steps.

        Members are at most a step apart, since each waits for all others in a step; so what rank 0 says before a step
        is known to all before the next one.

        Raises:
            RankLost: The store is gone.
            WireError: What stands in the store was not written by a member.
        """
        number, key = self._group.number, f"ends/{self._group.number}"
        with _naming_the_store():
            is_first = self._rank == 0 and bool(self._name) and self._name == self._group.members[0].name
            wanted = (f"come/{self._group.num_asked + 1}", f"leaving/{number}")
            if is_first and not self._has_told and any(map(self._has, wanted)):
                self._store.set(key, str(step + 1))
                self._has_told = True
            if not self._has(key):
                return False
            text = self._store.get(key)
        if not text.isdigit() or len(text) > len(str(MOST_STEPS)):
            raise WireError(f"the store of the members has {text[:40]!r} at {key}, which is no step")
        return step >= int(text)

    def ask_to_leave(self) -> None:
        """Have the group meet soon; call `meet(..., leaves=True)` when `ends` says so.

        Raises:
            RankLost: The store is gone.
        """
        with _naming_the_store():
            self._store.set(f"leaving/{self._group.number}", self._name)

    def __enter__(self) -> Membership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._name = ""

    # --- The ranks of a replica.

    def _of_replica(self, own: _Arrival) -> _Arrival:
        """What the replica brings: the first rank's, with the identities of the others.

        Raises:
            StateError: Its ranks have committed different steps.
        """
        assert self._inner is not None, "this rank is of a replica"
        prefix = f"torchmix/brings/{self._num_meetings}"
        self._inner.set(f"{prefix}/{self._rank}", msgspec.json.encode(own).decode())
        brought = [own] * self._num_ranks
        for rank in (*range(self._rank), *range(self._rank + 1, self._num_ranks)):
            brought[rank] = self._told(f"{prefix}/{rank}", _arrivals, rank)
            self._fellows[rank] = brought[rank].identity
        steps = [one.step for one in brought]
        if len({*steps}) > 1:
            raise StateError(
                f"meet: the ranks of this replica bring states before steps {steps} (-1: none). Let them agree that a "
                f"step is to be committed, before one of them does"
            )
        leaves = any(one.leaves for one in brought)
        return msgspec.structs.replace(own, others=tuple(one.identity for one in brought[1:]), leaves=leaves)

    def _meet_for_others(self, own: _Arrival, data: bytes | None) -> Meeting | None:
        """On the first rank: meet, and tell the others what came of it."""
        assert self._inner is not None, "this rank is of a replica"
        key = f"torchmix/went/{self._num_meetings}"
        try:
            meeting = self._meet(own, data)
        except BaseException as error:
            went = _Went(name="", group=0, error=f"{type(error).__name__}: {error}")
            self._inner.set(key, msgspec.json.encode(went).decode())
            raise
        went = _Went(name=self._name if meeting else "", group=self._group.number)
        self._inner.set(key, msgspec.json.encode(went).decode())
        return meeting

    def _hear(self, own: _Arrival, data: bytes | None) -> Meeting | None:
        """On the other ranks: what came of the meeting."""
        went = self._told(f"torchmix/went/{self._num_meetings}", _wents, 0)
        if went.error:
            raise RankLost(f"the first rank of this replica could not meet: {went.error}")
        group = self._read_group(went.group) if went.name else None
        self._name = went.name
        if group is None:
            return None
        self._group = group
        return self._meeting(group, [member.name for member in group.members].index(went.name), data)

    def _told(self, key: str, decoder: msgspec.json.Decoder[_Message], rank: int) -> _Message:
        """Wait for a message of another rank of the replica, while that one runs or waits, too.

        Raises:
            RankLost: A rank of the replica is gone, or this one shows no sign of life.
        """
        assert self._inner is not None, "this rank is of a replica"
        num_beats, since_s = -1, 0.0
        pauses = self._pauses()
        while True:
            try:
                waited_s = next(pauses)
            except RankLost:  # who has told what there is to tell may go
                if (one := self._read(key, decoder, store=self._inner)) is not None:
                    return one
                raise
            if (one := self._read(key, decoder, store=self._inner)) is not None:
                return one
            found = self._inner.add(f"torchmix/beats/{rank}", 0)
            fellow = self._fellows.get(rank)  # one that has not come at all may be starting
            if found != num_beats or fellow is None or self._evidence_of(fellow) == "running":
                num_beats, since_s = found, waited_s
            if waited_s - since_s > self._patience_s:
                break
        raise RankLost(f"rank {rank} of this replica has not come to its meeting within {self._patience_s:.0f} s")

    def _pauses(self) -> Iterator[float]:
        """As `pauses`, while no other rank of the replica is gone.

        Raises:
            RankLost: One is.
        """
        for waited_s in pauses(_LONGEST_PAUSE_S):
            for one in self._fellows.values():
                if self._evidence_of(one) == "gone":
                    raise RankLost(
                        f"{one}, a rank of this replica, is gone, and the replica with it; end, or fill its place and "
                        f"come again by a new Membership without a state"
                    )
            if self._inner is not None:
                self._inner.add(f"torchmix/beats/{self._rank}", 1)
            yield waited_s

    # --- Those who come.

    def _ask(self, own: _Arrival) -> None:
        """Take the first free place among those who ask: a place is taken as it is written, so there are no gaps."""
        number, mine = self._group.num_asked, msgspec.json.encode(own)
        while True:
            number += 1
            if self._store.compare_set(f"come/{number}", "", mine.decode()) == mine:
                return

    def _await_invitation(self, own: _Arrival) -> _Group:
        """The first group that has this process as a member."""
        group, pauses = self._group, self._pauses()
        while True:
            while (found := self._read_group(group.number + 1) or self._founded(group)) is not None:
                group = found
                if any(member.name == own.name for member in group.members):
                    return group
            if group.number > 0 and not any(self._is_alive(member) for member in group.members):
                raise RankLost(
                    f"all {len(group.members)} members of group {group.number} are gone, and with them what a new one "
                    f"needs: start the job again, from its last checkpoint and over a new store"
                )
            next(pauses)

    def _founded(self, group: _Group) -> _Group | None:
        """The first group, if this is the time before it, and enough have asked."""
        asked = self._asked(group.num_asked) if group.number == 0 else []
        if group.number or sum(map(self._is_alive, asked)) < self._founders:
            return None
        return self._write_group(group, [], asked)

    def _asked(self, num_before: int) -> list[_Arrival]:
        """Those who have asked behind the first ones."""
        found: list[_Arrival] = []
        while (one := self._read(f"come/{num_before + len(found) + 1}", _arrivals)) is not None:
            found.append(one)
        return found

    # --- Those who meet.

    def _next_group(self, own: _Arrival, data: bytes | None) -> _Group:
        """Bring what this member has, and wait for the group after this one."""
        group, number = self._group, self._group.number
        if data is not None:
            self._store.set(f"state/{number}/{own.name}", data)  # type: ignore[arg-type]  # bytes are text to its stub
        self._store.set(f"at/{number}/{own.name}", msgspec.json.encode(own).decode())
        came: dict[str, _Arrival] = {}
        pauses = self._pauses()
        while True:
            waited_s = next(pauses)
            found = self._read_group(number + 1)
            if found is not None:
                return found
            missing = []
            for member in group.members:
                if member.name in came:
                    continue
                one = self._read(f"at/{number}/{member.name}", _arrivals, name=member.name)
                if one is not None:
                    came[member.name] = one
                elif self._is_alive(member):
                    missing.append(member)
            if not missing or waited_s > self._patience_s:
                for member in missing:
                    logger.warning(
                        "%s has not come to meeting %d within %.0f s", member.identity, number, self._patience_s
                    )
                return self._write_group(group, [came[one.name] for one in group.members if one.name in came])

    def _write_group(self, group: _Group, came: list[_Arrival], asked: list[_Arrival] | None = None) -> _Group:
        """Write the group behind another, unless somebody was first; the group that stands there."""
        asked = self._asked(group.num_asked) if asked is None else asked
        stay = [one for one in came if not one.leaves]
        if max((one.step for one in stay), default=NEW) < max((one.step for one in came), default=NEW):
            stay = came  # whoever has the newest state cannot go before another has it
        new = [msgspec.structs.replace(one, step=NEW, order="", leaves=False) for one in asked if self._is_alive(one)]
        made = _Group(number=group.number + 1, members=(*stay, *new), num_asked=group.num_asked + len(asked))
        self._store.compare_set(f"group/{made.number}", "", msgspec.json.encode(made).decode())
        stands = self._read_group(made.number)
        assert stands is not None, "it was written"
        return stands

    def _are_all_here(self, group: _Group) -> bool:
        """Wait for all members of a new group to know of it; False if one is gone before."""
        self._store.set(f"here/{group.number}/{self._name}", "")
        missing, pauses = [*group.members], self._pauses()
        while True:
            waited_s = next(pauses)
            missing = [one for one in missing if not self._has(f"here/{group.number}/{one.name}")]
            if not missing:
                return True
            is_late = waited_s > self._patience_s
            if is_late or not all(map(self._is_alive, missing)) or self._has(f"group/{group.number + 1}"):
                return False

    def _meeting(self, group: _Group, rank: int, data: bytes | None) -> Meeting:
        source = group.source
        newest = group.members[source].step if source >= 0 else NEW
        _check_orders(group, newest)
        if source >= 0 and source != rank:
            data = self._store.get(f"state/{group.number - 1}/{group.members[source].name}")
        return Meeting(
            number=group.number,
            rank=rank,
            world_size=len(group.members),
            state_dict=None if source < 0 else {"torchmix_state": data},
            step=max(0, newest),
            source=source,
            behind=tuple(number for number, member in enumerate(group.members) if member.step != newest),
            store=PrefixStore(f"torchmix/group/{group.number}", self._base),
        )

    # --- What stands in the store.

    def _is_alive(self, member: _Arrival) -> bool:
        return all(self._evidence_of(one) != "gone" for one in (member.identity, *member.others))

    def _has(self, key: str) -> bool:
        found: bool = self._store.check([key])
        return found

    def _read_group(self, number: int) -> _Group | None:
        return self._read(f"group/{number}", _groups, number=number)

    def _read(
        self, key: str, decoder: msgspec.json.Decoder[_Message], *, store: Store | None = None, **expected: object
    ) -> _Message | None:
        """A message, if it is there; `store`: that of the replica.

        Raises:
            WireError: It is none, or not the one that belongs there.
        """
        store = self._store if store is None else store
        if not store.check([key]):
            return None
        try:
            message = decoder.decode(store.get(key))
            message.check()  # type: ignore[attr-defined]
            wrong = {
                name: getattr(message, name) for name, value in expected.items() if getattr(message, name) != value
            }
            if wrong:
                raise ValueError(f"{wrong}, where {expected} belongs")
        except (msgspec.MsgspecError, ValueError) as error:
            raise WireError(
                f"what stands at {key} in the members' store was not written by a member: {error}"
            ) from error
        return message
