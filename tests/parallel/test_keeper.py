"""What becomes of what is kept: over seats that only note what is done, and against an oracle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from torchmix.errors import LoaderLost, WorkerLost
from torchmix.parallel.children import LOOK_S
from torchmix.parallel.keeper import Again, Keeper, Kind

WAITS = Again(first_s=0.5, most_s=30.0, steady_s=60.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Life(msgspec.Struct, frozen=True):
    """What comes of one start; times are seconds since it, multiples of a look."""

    fails: bool = False
    ready_s: float = LOOK_S
    lost_s: float = float("inf")


class Place:
    """A seat that lives one life after the other, and notes when what was done."""

    def __init__(self, clock: Clock, lives: list[Life]) -> None:
        self.clock, self.lives = clock, iter(lives)
        self.starts_s: list[float] = []
        self.num_ended = 0
        self.runs = False

    def start(self) -> None:
        assert not self.runs, "one runs already"
        self.life = next(self.lives, Life())
        self.starts_s.append(self.clock.now_s)
        if self.life.fails:
            raise OSError("no more processes")
        self.runs = True

    def look(self) -> bool:
        assert self.runs
        lived_s = self.clock.now_s - self.starts_s[-1]
        if lived_s >= self.life.lost_s:
            raise LoaderLost("it broke")
        return lived_s >= self.life.ready_s

    def ask_to_end(self) -> None:
        pass

    def end(self, patience_s: float) -> None:
        self.num_ended += 1
        self.runs = False


def kept(
    again: Again, lives: list[Life], *, seconds: float, places: int = 1
) -> tuple[list[Place], Keeper, list[tuple[Kind, str]]]:
    """Places that were kept for a while, each with these lives after a first one that is lost at once."""
    clock, told = Clock(), list[tuple[Kind, str]]()
    keeper = Keeper(again, tell=lambda kind, error, _: told.append((kind, str(error or ""))), clock=clock)
    found = [Place(clock, [Life(ready_s=0.0, lost_s=LOOK_S), *lives]) for _ in range(places)]
    keeper.add(found)
    for _ in range(round(seconds / LOOK_S)):
        clock.now_s += LOOK_S
        keeper.look()
    return found, keeper, told


def test_what_is_lost_soon_again_waits_longer_and_a_healthy_while_ends_that() -> None:
    soon, late = Life(lost_s=1.0), Life(lost_s=61.0)
    [place], keeper, _ = kept(WAITS, [*[soon] * 8, late, soon, soon], seconds=400.0)
    lived_s = [LOOK_S, *[1.0] * 8, 61.0, 1.0, 1.0]
    waits_s = [after - before - lived for (before, after), lived in zip(pairwise(place.starts_s), lived_s, strict=True)]
    assert waits_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 0.0, 0.5, 1.0]
    assert place.runs and keeper.num_lost == 12 == place.num_ended


def test_what_cannot_be_started_is_tried_later_each_time() -> None:
    [place], keeper, told = kept(WAITS, [Life(fails=True)] * 3, seconds=20.0)
    assert place.starts_s == [0.0, 0.75, 1.75, 3.75, 7.75]
    assert told == [("lost", "it broke"), *[("unstarted", "no more processes")] * 3, ("again", "")]
    assert keeper.num_lost == 1 and place.runs


def test_what_is_lost_too_often_is_given_up_and_the_others_are_kept() -> None:
    again = Again(first_s=0.0, steady_s=60.0, most_losses=3)
    [place], _, told = kept(again, [Life(lost_s=1.0)] * 9, seconds=90.0)
    assert place.starts_s == [0.0, LOOK_S, LOOK_S + 1.0] and not place.runs
    assert told == [("lost", "it broke"), ("again", ""), ("lost", "it broke"), ("again", ""), ("over", "it broke")]
    [place], _, told = kept(again, [Life(lost_s=40.0)] * 9, seconds=300.0)
    assert place.runs and "over" not in dict(told), "three within a minute, and no more than that"


def test_one_that_fails_while_it_is_added_ends_all_that_came_with_it() -> None:
    clock = Clock()
    first, other = Place(clock, [Life(ready_s=0.0)]), Place(clock, [Life(ready_s=9.0, lost_s=0.0)])
    keeper = Keeper(clock=clock)
    with pytest.raises(LoaderLost, match="it broke"):
        keeper.add([first, other])
    assert not first.runs and not other.runs
    keeper.look()
    assert len(first.starts_s) == 1 == len(other.starts_s), "they are not kept"


def test_nobody_waits_for_what_is_not_wanted_any_more() -> None:
    place = Place(Clock(), [Life(ready_s=9.0)])

    def check() -> None:
        raise WorkerLost("not wanted")

    with pytest.raises(WorkerLost):
        Keeper().add([place], check=check)
    assert not place.runs and place.starts_s == [0.0]


def test_what_was_removed_or_closed_is_not_started_again() -> None:
    clock = Clock()
    first, other = (Place(clock, [Life(ready_s=0.0, lost_s=5.0)]) for _ in range(2))
    keeper = Keeper(clock=clock)
    keeper.add([first, other])
    keeper.remove(first)
    assert not first.runs and other.runs
    keeper.close()
    keeper.close()
    clock.now_s = 100.0
    keeper.look()
    assert not other.runs and (first.num_ended, other.num_ended) == (1, 1)


@pytest.mark.parametrize("most_losses", [0, 3])
@pytest.mark.slow
def test_random_histories_against_an_oracle(most_losses: int) -> None:
    again = Again(first_s=0.5, most_s=4.0, steady_s=5.0, most_losses=most_losses)
    random_of = random.Random(most_losses)
    for _ in range(500):
        lives = [random_life(random_of) for _ in range(random_of.randint(1, 9))]
        places, keeper, told = kept(again, lives, seconds=120.0, places=2)
        wanted = list(starts_by_oracle(again, [Life(ready_s=0.0, lost_s=LOOK_S), *lives], until_s=120.0))
        assert [place.starts_s for place in places] == [wanted, wanted], lives
        failed = sum(life.fails for life in lives[: len(wanted) - 1])
        lost = len(wanted) - places[0].runs - failed
        assert keeper.num_lost == 2 * lost and places[0].num_ended == lost + failed
        counts = [sum(kind == each for kind, _ in told) for each in ("lost", "unstarted", "again", "over")]
        is_over = not places[0].runs
        assert counts[2] == 2 * (len(wanted) - 1 - failed) and counts[3] == 2 * is_over
        assert sum(counts[:2]) == 2 * (lost + failed - is_over)


def random_life(random_of: random.Random) -> Life:
    def looks(least: int, most: int) -> float:
        return LOOK_S * random_of.randint(least, most)

    kinds = {
        "cannot be started": lambda: Life(fails=True),
        "dies before it is ready": lambda: Life(ready_s=9.0, lost_s=looks(1, 20)),
        "dies soon": lambda: Life(ready_s=looks(1, 3), lost_s=looks(4, 12)),
        "lives": lambda: Life(ready_s=looks(1, 3), lost_s=looks(12, 40)),
    }
    return kinds[random_of.choice([*kinds])]()


def starts_by_oracle(again: Again, lives: list[Life], *, until_s: float) -> Iterator[float]:
    """When each is started, by the words of the table alone."""
    begins_s, wait_s, losses_s = 0.0, again.first_s, list[float]()
    for life in [*lives, Life()]:
        yield begins_s
        lost_s = begins_s + (0.0 if life.fails else life.lost_s)
        if lost_s > until_s:
            return
        losses_s.append(lost_s)
        last_s = losses_s[-again.most_losses :]
        if len(last_s) == again.most_losses and lost_s - last_s[0] < again.steady_s:
            return
        if not life.fails and life.lost_s - life.ready_s >= again.steady_s:
            waits_s, wait_s = 0.0, again.first_s
        else:
            waits_s, wait_s = wait_s, min(2 * wait_s, again.most_s)
        begins_s = lost_s + waits_s
        if begins_s > until_s:
            return
