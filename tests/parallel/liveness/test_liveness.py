"""Liveness of several ranks in one process: threads over one store, and an end of process that is only noted."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch.distributed as dist

from tests.support.deadlines import LONG_S
from tests.support.processes import wait_until
from tests.support.threads import own_threads
from torchmix.errors import RankLost, TopologyError
from torchmix.parallel.liveness.evidence import Patience
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.liveness.open import open_liveness
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology

QUICK = Patience(poll_s=0.01, silence_s=0.2, remote_s=0.2, store_s=LONG_S, grace_s=0.05)
DEADLINE_S = 120.0


@contextmanager
def ranks(
    world_size: int, *, patience: Patience = QUICK, is_elastic: bool = False, store_rank: int = -1
) -> Iterator[tuple[list[Liveness], list[int]]]:
    """The liveness of every rank, and the ranks whose process would have ended."""
    store = dist.HashStore()
    ended: list[int] = []
    opened = [
        Liveness(
            store,
            rank=rank,
            world_size=world_size,
            store_rank=store_rank,
            patience=patience,
            is_elastic=is_elastic,
            end_process=lambda code, rank=rank: ended.append(rank),
        )
        for rank in range(world_size)
    ]
    try:
        yield opened, ended
    finally:
        for each in opened:
            each.close()
            # A rank that is lost does not close; its process would end instead.
            atexit.unregister(each._at_exit)
            each._may_rest.set()
            each._pulse.is_closing.set()
        wait_until(lambda: not own_threads(), deadline_s=DEADLINE_S, what="end of the threads")


def let_beat(liveness: Liveness) -> None:
    """Wait until the rank has looked around a few times more."""
    enough = liveness._pulse.num_beats + 4
    wait_until(lambda: liveness._pulse.num_beats >= enough, deadline_s=DEADLINE_S, what="beats")


def is_lost(liveness: Liveness) -> bool:
    try:
        liveness.check()
    except RankLost:
        return True
    return False


def test_ranks_that_close_one_after_another_lose_nobody() -> None:
    with ranks(3) as (opened, ended):
        for rank, each in enumerate(opened):
            each.close()
            each.close()
            for other in opened[rank + 1 :]:
                let_beat(other)
                other.check()
        assert not ended
    assert not own_threads()


def test_a_failure_is_told_to_all_and_ends_every_process(capfd: pytest.CaptureFixture[str]) -> None:
    with ranks(3) as (opened, ended):
        opened[1].note_step(7)
        opened[1].post_abort(KeyError("shard"))
        wait_until(lambda: sorted(ended) == [0, 1, 2], deadline_s=DEADLINE_S, what="end of all processes")
        for each in opened:
            with pytest.raises(RankLost, match=r"rank 1 \(host .*, pid \d+\) failed: KeyError: 'shard'") as caught:
                each.check()
            assert caught.value.rank == 1
            assert "the last step it delivered was 7; restart the job from its last checkpoint" in str(caught.value)
    lines = capfd.readouterr().err.splitlines()
    assert sorted(line.rpartition("[")[2] for line in lines) == [f"seen by rank {rank}]" for rank in range(3)]
    assert all(line.startswith("torchmix: rank 1 lost: rank 1 (host ") for line in lines)


def test_the_rank_that_serves_the_store_stays_until_a_slow_one_has_read_of_the_loss() -> None:
    with ranks(3, store_rank=0, patience=msgspec.structs.replace(QUICK, farewell_s=LONG_S)) as (opened, ended):
        looks, count = [0], opened[0]._records.count_farewells

        def counted(more: int) -> int:
            looks[0] += 1
            return count(more)

        opened[0]._records.count_farewells = counted  # type: ignore[method-assign]
        is_slow, is_on = threading.Event(), threading.Event()
        opened[2]._pulse.round = lambda: (is_slow.set(), is_on.wait())  # type: ignore[method-assign]
        is_slow.wait()
        try:
            opened[1].post_abort(KeyError("shard"))
            # Far more looks than fit into the grace.
            wait_until(lambda: looks[0] > 200 or 0 in ended, deadline_s=DEADLINE_S, what="looks at who has read")
            assert ended == [1]
        finally:
            del opened[2]._pulse.round  # type: ignore[method-assign]
            is_on.set()
        wait_until(lambda: sorted(ended) == [0, 1, 2], deadline_s=DEADLINE_S, what="end of all processes")
        assert opened[2]._known.loss is not None and opened[2]._known.loss.rank == 1


def test_a_loss_ends_no_process_where_ranks_may_come_and_go_and_whoever_closes_is_free() -> None:
    with ranks(3, is_elastic=True) as (opened, ended):
        opened[1].post_abort(KeyError("shard"))
        for each in opened:
            wait_until(lambda each=each: not each._guard.is_alive(), deadline_s=DEADLINE_S, what="end of the guard")
        assert not ended, "its guard has ended, and it has not"
        for each in opened:
            with pytest.raises(RankLost, match="meet the others again, or restart the job"):
                each.check()
            each.close()
            assert each.is_closed
    assert not own_threads()


def test_the_first_failure_that_is_told_stands() -> None:
    with ranks(3) as (opened, _):
        opened[2].post_abort(KeyError("first"))
        wait_until(lambda: all(is_lost(each) for each in opened), deadline_s=DEADLINE_S, what="the first failure")
        opened[0].post_abort(KeyError("second"))
        for each in opened:
            with pytest.raises(RankLost, match="first"):
                each.check()


def test_an_error_that_follows_from_a_loss_is_explained_by_it() -> None:
    with ranks(3, patience=msgspec.structs.replace(QUICK, silence_s=LONG_S, remote_s=LONG_S)) as (opened, _):
        victim = threading.Thread(
            target=lambda: explained.append(opened[0].explain(RuntimeError("Connection closed by peer")))
        )
        explained: list[BaseException] = []
        victim.start()
        wait_until(lambda: opened[0]._pulse.failure is not None, deadline_s=DEADLINE_S, what="the victim's report")
        opened[2].post_abort(KeyError("cause"))
        victim.join(DEADLINE_S)
        assert isinstance(explained[0], RankLost)
        assert explained[0].rank == 2
        assert "KeyError: 'cause'" in str(explained[0])


def test_an_error_that_nothing_explains_is_told_as_its_own() -> None:
    with ranks(2) as (opened, _):
        error = RuntimeError("out of luck")
        assert opened[0].explain(error) is error
        wait_until(lambda: is_lost(opened[1]), deadline_s=DEADLINE_S, what="the other rank's notice")
        with pytest.raises(RankLost, match=r"rank 0 \(.*\) failed: RuntimeError: out of luck"):
            opened[1].check()


def test_closing_after_a_failure_does_not_hide_it() -> None:
    with ranks(2) as (opened, ended):
        opened[0].post_abort("the exchange broke")
        opened[0].close()
        wait_until(lambda: sorted(ended) == [0, 1], deadline_s=DEADLINE_S, what="end of both processes")


def test_a_rank_that_falls_silent_is_lost() -> None:
    with ranks(3) as (opened, ended):
        opened[1].note_step(3)
        let_beat(opened[1])
        opened[1]._pulse.round = lambda: None  # type: ignore[method-assign]
        for each in opened:  # its process is seen to run, being this one: give that no credit
            each._pulse.ring._evidence_of = lambda identity: "unknown"
        wait_until(lambda: {0, 2} <= set(ended), deadline_s=DEADLINE_S, what="end of the other processes")
        with pytest.raises(
            RankLost, match=r"rank 1 \(.*\) silent for .* s; the last step it delivered was 3"
        ) as caught:
            opened[0].check()
        assert caught.value.rank == 1


def test_it_is_closed_when_the_last_of_its_loaders_is() -> None:
    with ranks(2) as (opened, ended):
        assert opened[0].join() is opened[0]
        opened[0].close()
        assert not opened[0].is_closed
        let_beat(opened[0])
        opened[1].check()
        opened[0].close()
        assert opened[0].is_closed
        let_beat(opened[1])
        opened[1].check()
        assert ended == []


def test_a_job_of_one_rank_watches_nobody() -> None:
    liveness = open_liveness(ClientPlaceTree.from_topology(Topology()))
    liveness.check()
    liveness.note_step(1)
    liveness.post_abort("nobody to tell")
    error = ValueError("mine")
    assert liveness.explain(error) is error
    liveness.close()
    assert not own_threads()


def test_several_ranks_need_an_initialised_job() -> None:
    with pytest.raises(TopologyError, match=r"torch\.distributed is not initialised in rank 0; call"):
        open_liveness(ClientPlaceTree.from_topology(Topology(dp=2)))
