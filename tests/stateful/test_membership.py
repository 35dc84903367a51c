"""Who meets whom: founding, coming, leaving, losses, and messages that no member wrote. Members are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from tests.support.deadlines import LONG_S
from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from tests.support.worlds import run_ranks
from torchmix.elastic import Meeting, Membership, _Arrival
from torchmix.errors import OptionError, PlanDiverged, RankLost, StateError, WireError
from torchmix.parallel.liveness.evidence import Evidence, RankIdentity
from torchmix.steps.state import encode_state, state_of_cursor

PREFIX = "torchmix/members"


PLANNER = make_planner(make_recipe({"a": "100%"}), {"a": synthetic_sizes(50, shortest=3, longest=90, salt=1)})


def state_of(step: int, order: bytes = b"as plan.") -> dict[str, Any]:
    cursor = msgspec.structs.replace(PLANNER.start(), step=step, order_digest=order)
    return {"torchmix_state": encode_state(state_of_cursor(cursor, PLANNER, recipe="0" * 16, catalog="1" * 16))}


class Job:
    """Members of one store, some of whom the kernel says are gone."""

    def __init__(self, *, founders: int, patience_s: float = LONG_S) -> None:
        self.store = dist.HashStore()
        self.founders, self.patience_s = founders, patience_s
        self.gone: set[int] = set()
        """Numbers of members, which stand for their process ids."""
        self.is_elsewhere = False
        """Whether the kernel knows of those who are not gone."""
        self.members: list[Membership] = []

    def evidence(self, identity: RankIdentity) -> Evidence:
        return "gone" if identity.pid in self.gone else "unknown" if self.is_elsewhere else "running"

    def add(self, replica: tuple[dist.Store, int, int] | None = None) -> Membership:
        member = Membership(
            self.store,
            founders=self.founders,
            replica=replica,
            patience_s=self.patience_s,
            evidence_of=self.evidence,
        )
        member._identity = msgspec.structs.replace(member._identity, pid=len(self.members))
        self.members.append(member)
        return member

    def meet(self, *programs: Callable[[], Meeting | None]) -> list[Meeting | None]:
        return run_ranks(list(programs), lambda program: program())


def founded(count: int, **options: Any) -> tuple[Job, list[Membership]]:
    job = Job(founders=count, **options)
    members = [job.add() for _ in range(count)]
    meetings = job.meet(*(member.meet for member in members))
    by_rank = {meeting.rank: member for member, meeting in zip(members, meetings, strict=True) if meeting is not None}
    return job, [by_rank[rank] for rank in range(count)]


def test_founders_make_the_first_group_and_have_no_state() -> None:
    job = Job(founders=3)
    members = [job.add() for _ in range(3)]
    found = job.meet(*(member.meet for member in members))
    assert sorted(meeting.rank for meeting in found if meeting is not None) == [0, 1, 2]
    for meeting in found:
        assert meeting is not None
        assert (meeting.number, meeting.world_size, meeting.state_dict) == (1, 3, None)
        assert (meeting.step, meeting.source, meeting.behind) == (0, -1, ())


def test_survivors_go_on_from_the_newest_state_and_keep_their_order() -> None:
    job, members = founded(4)
    job.gone.add(members[1]._identity.pid)
    found = job.meet(
        lambda: members[0].meet(state_of(6), step=6),
        lambda: members[2].meet(state_of(7), step=7),
        lambda: members[3].meet(state_of(7), step=7),
    )
    for rank, meeting in enumerate(found):
        assert meeting is not None
        assert (meeting.number, meeting.rank, meeting.world_size) == (2, rank, 3)
        assert (meeting.step, meeting.source, meeting.behind) == (7, 1, (0,))
        assert meeting.state_dict == state_of(7)


def test_members_that_were_given_other_documents_do_not_go_on() -> None:
    """Those that are a step behind take the state of others, and are not compared."""
    job, members = founded(4)
    orders = ((6, b"behind.."), (7, b"as plan."), (7, b"as plan."), (7, b"another."))

    def meet(member: Membership, step: int, order: bytes) -> None:
        with pytest.raises(PlanDiverged) as caught:
            member.meet(state_of(step, order), step=step)
        first, other = b"as plan.".hex(), b"another.".hex()
        assert f"before step 7: order digest {first} at rank 1, {other} at rank 3. " in str(caught.value)

    job.meet(*(lambda rank=rank: meet(members[rank], *orders[rank]) for rank in range(4)))


def test_who_asks_joins_at_the_next_border_which_all_see_before_the_same_step() -> None:
    job, members = founded(2)
    assert [member.ends(3) for member in members] == [False, False]
    asked = threading.Event()
    new = job.add()

    def come() -> Meeting | None:
        asked.set()
        return new.meet()

    def stay(member: Membership) -> Meeting | None:
        asked.wait(LONG_S)
        while not job.store.check([f"{PREFIX}/come/3"]):
            time.sleep(0.005)
        return member.meet(state_of(5), step=5)

    def border() -> None:
        while not job.store.check([f"{PREFIX}/come/3"]):
            time.sleep(0.005)
        # Rank 0 has not reached this step, so the other member learns nothing from it.
        assert [members[1].ends(4), members[0].ends(4), members[1].ends(4)] == [False, False, False]
        assert [member.ends(5) for member in members] == [True, True]

    checked = threading.Thread(target=border)
    checked.start()
    found = job.meet(lambda: stay(members[0]), lambda: (checked.join(), stay(members[1]))[1], come)
    assert [meeting.rank for meeting in found if meeting is not None] == [0, 1, 2]
    assert found[2] is not None
    assert (found[2].state_dict, found[2].step, found[2].source, found[2].behind) == (state_of(5), 5, 0, (2,))


def test_who_asked_and_is_gone_gets_no_place() -> None:
    job, members = founded(1)
    gone = job.add()
    gone._ask(_Arrival(name="gone", identity=gone._identity))
    job.gone.add(gone._identity.pid)
    assert [members[0].ends(1), members[0].ends(2)] == [False, True]
    meeting = members[0].meet(state_of(2), step=2)
    assert meeting is not None and (meeting.number, meeting.world_size) == (2, 1)
    assert not members[0].ends(9), "it is not looked at again"


def test_who_leaves_gets_no_place_and_the_last_with_a_state_stays_until_another_has_it() -> None:
    job, members = founded(2)
    members[1].ask_to_leave()
    assert [member.ends(1) for member in members] == [False, False]
    assert [member.ends(2) for member in members] == [True, True]
    found = job.meet(
        lambda: members[0].meet(state_of(2), step=2), lambda: members[1].meet(state_of(2), step=2, leaves=True)
    )
    assert found[1] is None and found[0] is not None and found[0].world_size == 1
    alone = members[0].meet(state_of(3), step=3, leaves=True)
    assert alone is not None and (alone.number, alone.world_size, alone.source) == (3, 1, 0)


def test_a_member_that_is_waited_for_in_vain_comes_anew() -> None:
    job, members = founded(3)
    came = [f"{PREFIX}/at/1/{member._name}" for member in members[:2]]

    def pauses() -> Iterator[float]:
        """Seconds of waiting: the third one is late when both others have come, whenever that is."""
        while True:
            time.sleep(0.005)
            yield 2 * LONG_S if job.store.check(came) and not job.store.check([f"{PREFIX}/group/2"]) else 0.0

    with pytest.MonkeyPatch.context() as patch:
        for member in members[:2]:
            patch.setattr(member, "_pauses", pauses)
        found = job.meet(lambda: members[0].meet(state_of(1), step=1), lambda: members[1].meet(state_of(1), step=1))
    assert [meeting.world_size for meeting in found if meeting is not None] == [2, 2]
    again = job.meet(
        lambda: members[2].meet(state_of(1), step=1),
        lambda: _when(job, f"{PREFIX}/come/4", lambda: members[0].meet(state_of(2), step=2)),
        lambda: _when(job, f"{PREFIX}/come/4", lambda: members[1].meet(state_of(2), step=2)),
    )
    late = again[0]
    assert late is not None and (late.rank, late.world_size, late.step, late.behind) == (2, 3, 2, (2,))


def _when(job: Job, key: str, program: Callable[[], Meeting | None]) -> Meeting | None:
    while not job.store.check([key]):
        time.sleep(0.005)
    return program()


def test_a_member_that_is_lost_between_the_list_and_its_confirmation_is_left_out() -> None:
    job, members = founded(3)
    dies = job.add()
    dies._are_all_here = lambda group: job.gone.add(dies._identity.pid) or True  # type: ignore[method-assign]
    programs = [
        lambda member=member: _when(job, f"{PREFIX}/come/4", lambda: member.meet(state_of(1), step=1))
        for member in members
    ]
    found = job.meet(*programs, dies.meet)
    for meeting in found[:3]:
        assert meeting is not None and (meeting.number, meeting.world_size) == (3, 3)


def replicas(*sizes: int, founders: int) -> tuple[Job, list[list[Membership]]]:
    """Replicas of so many ranks each, which have founded a group."""
    job = Job(founders=founders)
    found = []
    for size in sizes:
        store = dist.HashStore()
        found.append([job.add((store, rank, size)) for rank in range(size)])
    job.meet(*(rank.meet for ranks in found for rank in ranks))
    return job, sorted(found, key=lambda ranks: [one.name for one in ranks[0]._group.members].index(ranks[0]._name))


def test_a_replica_is_one_member_and_all_its_ranks_hear_the_same() -> None:
    job, (first, second) = replicas(2, 3, founders=2)
    assert {rank._group.number for rank in (*first, *second)} == {1}
    first[1].ask_to_leave()
    assert [rank.ends(1) for rank in (*second, *reversed(first))] == [False] * 5
    assert [rank.ends(2) for rank in (*second, *first)] == [True] * 5
    found = job.meet(
        *(lambda rank=rank: rank.meet(state_of(2), step=2, leaves=True) for rank in first),
        *(lambda rank=rank: rank.meet(state_of(2), step=2) for rank in second),
    )
    assert found[:2] == [None, None]
    for meeting in found[2:]:
        assert meeting is not None and (meeting.number, meeting.rank, meeting.world_size) == (2, 0, 1)
        assert (meeting.state_dict, meeting.source, meeting.behind) == (state_of(2), 0, ())


def test_what_the_first_rank_has_told_counts_also_once_it_is_gone() -> None:
    job, founded = replicas(2, 1, founders=2)
    (stays,), (first, slow) = sorted(founded, key=len)
    brings = _Arrival(name="x", identity=slow._identity, step=2)
    slow._inner.set("torchmix/brings/2/1", msgspec.json.encode(brings).decode())  # type: ignore[union-attr]
    assert job.meet(lambda: first.meet(state_of(2), step=2, leaves=True), lambda: stays.meet(state_of(2), step=2))
    job.gone.add(first._identity.pid)
    assert slow.meet(state_of(2), step=2, leaves=True) is None


@pytest.mark.parametrize("lost", [0, 1])
def test_who_loses_a_rank_is_lost_as_a_whole_and_comes_again_without_a_state(lost: int) -> None:
    job, (first, second) = replicas(2, 2, founders=2)
    job.gone.add(first[lost]._identity.pid)
    with pytest.raises(RankLost, match="a rank of this replica, is gone, and the replica with it"):
        first[1 - lost].meet(state_of(5), step=5)
    found = job.meet(*(lambda rank=rank: rank.meet(state_of(4), step=4) for rank in second))
    for meeting in found:
        assert meeting is not None and (meeting.rank, meeting.world_size, meeting.step) == (0, 1, 4)
    store = dist.HashStore()
    again = [job.add((store, rank, 2)) for rank in range(2)]
    found = job.meet(
        *(lambda rank=rank: _when(job, f"{PREFIX}/come/3", lambda: rank.meet(state_of(6), step=6)) for rank in second),
        *(rank.meet for rank in again),
    )
    for number, meeting in enumerate(found):
        assert meeting is not None and (meeting.rank, meeting.world_size) == (number // 2, 2)
        assert (meeting.state_dict, meeting.source, meeting.behind) == (state_of(6), 0, (1,))


def test_ranks_of_a_replica_that_have_committed_different_steps_or_are_silent_are_told() -> None:
    job, [ranks] = replicas(2, founders=1)
    with pytest.raises(StateError, match=r"ranks of this replica bring states before steps \[3, 4\]"):
        job.meet(lambda: ranks[0].meet(state_of(3), step=3), lambda: ranks[1].meet(state_of(4), step=4))
    job.is_elsewhere, ranks[0]._patience_s = True, 0.2
    with pytest.raises(RankLost, match="rank 1 of this replica has not come to its meeting within 0 s"):
        ranks[0].meet(state_of(4), step=4)


def test_the_first_rank_tells_the_others_why_it_could_not_meet() -> None:
    job, [ranks] = replicas(2, founders=1)
    job.store.set(f"{PREFIX}/group/2", "nonsense")
    heard: list[str] = []

    def meet(rank: Membership) -> None:
        with pytest.raises((RankLost, WireError)) as error:
            rank.meet(state_of(1), step=1)
        heard.append(f"{error.typename}: {error.value}")

    job.meet(*(lambda rank=rank: meet(rank) for rank in ranks))
    text = "WireError: what stands at group/2 in the members' store was not written by a member"
    assert sorted(heard)[0].startswith(f"RankLost: the first rank of this replica could not meet: {text}")
    assert sorted(heard)[1].startswith(text)


def test_who_comes_when_all_are_gone_is_told_so() -> None:
    job, _ = founded(2)
    job.gone |= {0, 1}
    with pytest.raises(RankLost, match="all 2 members of group 1 are gone"):
        job.add().meet()


def test_a_store_that_is_gone_is_told() -> None:
    _, members = founded(1)

    def fail(_: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")

    members[0]._store = type("Gone", (), {"check": staticmethod(fail), "set": lambda *_: None})()
    for ask in (lambda: members[0].ends(1), lambda: members[0].meet(state_of(1), step=1)):
        with pytest.raises(RankLost, match="store is gone"):
            ask()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group/2", "nonsense"),
        ("group/2", '{"number": 3, "members": [], "num_asked": 2}'),
        ("group/2", '{"number": 2, "members": [], "num_asked": -1}'),
        ("group/2", '{"number": 2, "members": [], "num_asked": 2, "more": 1}'),
        ("come/3", '{"name": "", "identity": {"host": "h", "pid": 1, "started": "", "pid_space": ""}}'),
        ("come/3", '{"name": "x", "identity": {"host": "h", "pid": 1, "started": "", "pid_space": ""}, "step": -2}'),
    ],
)
def test_what_no_member_wrote_is_refused(key: str, value: str) -> None:
    job, members = founded(2)
    job.store.set(f"{PREFIX}/{key}", value)
    with pytest.raises(WireError, match=f"at {key} in the members' store"):
        job.gone.add(members[1]._identity.pid)
        members[0].meet(state_of(1), step=1)


def test_two_members_of_one_name_and_a_step_that_is_none_are_refused() -> None:
    job, members = founded(2)
    group = msgspec.json.decode(job.store.get(f"{PREFIX}/group/1"))
    double = {**group, "number": 2, "members": [group["members"][0]] * 2}
    job.store.set(f"{PREFIX}/group/2", msgspec.json.encode(double).decode())
    with pytest.raises(WireError, match="group/2"):
        members[0].meet(state_of(1), step=1)
    job.store.set(f"{PREFIX}/ends/1", "-5")
    with pytest.raises(WireError, match="is no step"):
        members[0].ends(1)


def test_values_out_of_range_are_refused() -> None:
    for options in ({"founders": 0}, {"founders": 2, "patience_s": 0}, {"founders": "2"}):
        with pytest.raises(OptionError, match="Membership: "):
            Membership(dist.HashStore(), **options)  # type: ignore[arg-type]
    store = dist.HashStore()
    for replica in ((store, 2, 2), (store, 0), (store, "0", 2), (store, 0, 2, 3), ("store", 0, 2), store):
        with pytest.raises(OptionError, match="a number of ranks above it"):
            Membership(dist.HashStore(), founders=1, replica=replica)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="store='tcp://host' must be a torch"):
        Membership("tcp://host", founders=1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="leaves='yes' must be True or False"):
        Membership(store, founders=1).meet(leaves="yes")  # type: ignore[arg-type]
    member = Membership(dist.HashStore(), founders=1)
    for state, step in (({}, 0), (state_of(0), -1), (state_of(0), 1 << 25)):
        with pytest.raises(StateError, match="meet: "):
            member.meet(state, step=step)
