"""Who meets whom: founding, coming, leaving, losses, and messages that no member wrote. Members are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from tests.support.deadlines import LONG_S
from tests.support.worlds import run_ranks
from torchmix.elastic import Meeting, Membership, _Arrival
from torchmix.errors import OptionError, RankLost, StateError, WireError
from torchmix.parallel.liveness.evidence import Evidence, RankIdentity

PREFIX = "torchmix/members"


def state_of(step: int) -> dict[str, Any]:
    return {"torchmix_state": b"state before step %d" % step}


class Job:
    """Members of one store, some of whom the kernel says are gone."""

    def __init__(self, *, founders: int, patience_s: float = LONG_S) -> None:
        self.store = dist.HashStore()
        self.founders, self.patience_s = founders, patience_s
        self.gone: set[int] = set()
        """Numbers of members, which stand for their process ids."""
        self.members: list[Membership] = []

    def evidence(self, identity: RankIdentity) -> Evidence:
        return "gone" if identity.pid in self.gone else "running"

    def add(self) -> Membership:
        member = Membership(self.store, founders=self.founders, patience_s=self.patience_s, evidence_of=self.evidence)
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
    job, members = founded(3, patience_s=0.2)
    found = job.meet(lambda: members[0].meet(state_of(1), step=1), lambda: members[1].meet(state_of(1), step=1))
    assert [meeting.world_size for meeting in found if meeting is not None] == [2, 2]
    job.patience_s = LONG_S
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
    member = Membership(dist.HashStore(), founders=1)
    for state, step in (({}, 0), (state_of(0), -1), (state_of(0), 1 << 25)):
        with pytest.raises(StateError, match="meet: "):
            member.meet(state, step=step)
