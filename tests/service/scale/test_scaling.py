"""Loaders follow the notes of a run; what is done is what the rule decides, and it is written down."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

from tests.service.scale.test_rule import ROOMY, ramp, steps_of
from tests.support.loads import load_of
from tests.support.scaled_jobs import decisions_of_log
from torchmix.errors import LoaderLost
from torchmix.service.endpoints import Registry
from torchmix.service.main import LoaderStart
from torchmix.service.scale.rule import (
    PROGRESS_NAME,
    ProgressLog,
    RunNote,
    ScaleBounds,
    follow_progress,
    notes_of,
    replay,
)
from torchmix.service.scale.scaling import LEAVE_S, MOST_LEAVE_S, WHOLE_CACHE, LocalSeats, ScaledLoaders
from torchmix.service.server import new_pair

BOUNDS = ScaleBounds(least=1, most=8, budget=ROOMY)


class Seats:
    """Loaders that are only counted."""

    def __init__(self) -> None:
        self.here: dict[int, dict[str, int]] = {}
        self.gone: set[int] = set()
        self.cache_parts: dict[int, int] = {}
        self.refuse: set[int] = set()
        self.owing: set[int] = set()
        self.done: list[tuple[str, int]] = []
        self.lock = threading.Lock()

    def start(self, number, sources, memory_bytes, cache_part):
        assert memory_bytes > 1 << 26
        with self.lock:
            if number in self.refuse:
                raise LoaderLost("no room")
            assert number not in self.here
            self.here[number] = dict(sources)
            self.cache_parts[number] = cache_part
            self.done.append(("start", number))

    def give(self, number, sources):
        assert number in self.here
        self.gone.discard(number)
        self.here[number] = dict(sources)

    def leave(self, number):
        self.gone.add(number)
        self.done.append(("leave", number))

    def is_asked(self, number):
        assert number in self.here
        return number in self.owing

    def stop(self, number):
        del self.here[number]
        self.gone.discard(number)
        self.done.append(("stop", number))

    def look(self):
        pass


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(seats: Seats) -> list[dict[str, int]]:
    """What clients find."""
    return [seats.here[number] for number in sorted(seats.here.keys() - seats.gone)]


def test_a_run_is_followed_up_and_down(tmp_path):
    seats, clock = Seats(), Clock()
    loaders = ScaledLoaders(seats, steps_of(ramp), BOUNDS, tmp_path, clock=clock)
    run = ProgressLog((str(tmp_path),))
    most = 0
    for step in range(1, 601):
        run.note(step, frozenset(), {})
        if step % 7 == 0:
            loaders.look()
        most = max(most, len(asked(seats)))
        clock.now += 0.1
    loaders.look()
    notes = notes_of(tmp_path / PROGRESS_NAME)
    wanted = replay(steps_of(ramp), BOUNDS, notes, notes[-1].step + 1)
    written = decisions_of_log(tmp_path)
    assert [(one["step"], one["reason"], one["loaders"]) for one in written[1:]] == [
        (one.step, one.reason, [dict(place) for place in one.loaders]) for one in wanted
    ], "after the decision before the run began"
    other = WHOLE_CACHE // 2 // 7
    assert seats.cache_parts == {0: WHOLE_CACHE // 2, **dict.fromkeys(range(1, 6), other)}, "it begins with all sources"
    assert most == 6 and len(asked(seats)) == 1 and len(seats.here) == 1
    assert asked(seats) == [dict(wanted[-1].loaders[0])]
    for number in range(1, 6):
        events = [what for what, which in seats.done if which == number]
        assert events[-2:] == ["leave", "stop"], "it has left the folder before it ends"
    loaders.close()
    assert not seats.here


def test_loaders_of_a_fixed_number_have_the_whole_cache_by_their_pages(tmp_path):
    seats = Seats()
    loads = [load_of("wide", 1_000_000, window=3 << 30), load_of("small", 9_000_000, window=1 << 20, most_loaders=1)]
    bounds = ScaleBounds(least=2, most=2, budget=ROOMY)
    ScaledLoaders(seats, lambda *_: loads, bounds, tmp_path, clock=Clock())
    [small] = [number for number, sources in seats.here.items() if "small" in sources]
    assert WHOLE_CACHE - 2 <= sum(seats.cache_parts.values()) <= WHOLE_CACHE
    assert seats.cache_parts[1 - small] > 2 * seats.cache_parts[small]


def test_loaders_that_begin_have_half_of_the_cache_and_all_that_there_may_be_the_whole(tmp_path):
    falls = steps_of(lambda step: 40_000_000 if step < 100 or step >= 400 else 4_000_000)
    rises = steps_of(lambda step: 40_000_000 if step >= 100 else 12_000_000)
    for number, (loads_of, least, began) in enumerate(((rises, 1, 1), (rises, 5, 5), (falls, 8, 8))):
        seats, folder = Seats(), tmp_path / str(number)
        bounds = ScaleBounds(least=least, most=8, budget=ROOMY)
        loaders = ScaledLoaders(seats, loads_of, bounds, folder, clock=Clock())
        first = sum(seats.cache_parts.values())
        assert len(seats.here) == began and WHOLE_CACHE * max(4, began) // 8 - 8 <= first <= WHOLE_CACHE
        run = ProgressLog((str(folder),))
        for step in range(1, 200):
            run.note(step, frozenset(), {})
        loaders.look()
        assert sum(seats.cache_parts.values()) <= WHOLE_CACHE and min(seats.cache_parts.values()) >= WHOLE_CACHE // 64
        loaders.close()


def test_a_loader_that_has_more_of_the_cache_may_use_more_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torchmix.service.scale.scaling.keeper_of_loaders", lambda: SimpleNamespace(add=lambda *_, **__: None)
    )
    monkeypatch.setattr("torchmix.service.scale.scaling.LoaderSeat", lambda start: SimpleNamespace(told=start))
    start = LoaderStart(
        parts={}, base="", catalog_folder="", cache_bytes=1 << 30, bind="tcp://127.0.0.1:0", own=new_pair(), cpu=1
    )
    for shared_cpu, wanted in ((8, [4, 1]), (0, [1, 1])):
        registry = Registry(tmp_path / str(shared_cpu))
        seats = LocalSeats(start, registry, threading.Event(), shared_cpu=shared_cpu)
        for number, part in enumerate((WHOLE_CACHE // 2, WHOLE_CACHE // 14)):
            seats.start(number, {}, 0, part)
        assert [seats._seats[number].told.cpu for number in range(2)] == wanted
        assert seats._seats[0].told.cache_bytes == 1 << 29
        registry.close()


def test_a_loader_that_left_and_is_needed_again_goes_on(tmp_path):
    levels = steps_of(lambda step: 4_000_000 if step < 100 or 200 <= step < 500 else 40_000_000)
    seats, clock = Seats(), Clock()
    loaders = ScaledLoaders(seats, levels, BOUNDS, tmp_path, clock=clock)
    run = ProgressLog((str(tmp_path),))
    for step in range(1, 600):
        run.note(step, frozenset(), {})
        loaders.look()
    assert len(asked(seats)) == 6 and not seats.gone
    assert seats.done.count(("start", 3)) == 1 and ("leave", 3) in seats.done and ("stop", 3) not in seats.done
    clock.now += 2 * LEAVE_S
    loaders.look()
    assert len(seats.here) == 6
    loaders.close()


def test_a_loader_that_left_does_what_it_owes_before_it_ends(tmp_path):
    seats, clock = Seats(), Clock()
    loaders = ScaledLoaders(seats, steps_of(ramp), BOUNDS, tmp_path, clock=clock)
    run = ProgressLog((str(tmp_path),))
    for step in range(1, 600):
        run.note(step, frozenset(), {})
        loaders.look()
    assert seats.gone == {1, 2, 3, 4, 5}
    seats.owing = {2, 4}
    clock.now += LEAVE_S
    loaders.look()
    assert sorted(seats.here) == [0, 2, 4]
    seats.owing = {4}
    loaders.look()
    assert sorted(seats.here) == [0, 4]
    clock.now += MOST_LEAVE_S
    loaders.look()
    assert sorted(seats.here) == [0], "by then nobody waits for a reply"
    loaders.close()


def test_of_several_decisions_at_once_the_last_is_done(tmp_path):
    seats = Seats()
    loaders = ScaledLoaders(seats, steps_of(ramp), BOUNDS, tmp_path, clock=Clock())
    run = ProgressLog((str(tmp_path),))
    for step in range(1, 601):  # asked for at once
        run.note(step, frozenset(), {})
    loaders.look()
    assert [len(one["loaders"]) for one in decisions_of_log(tmp_path)][1:] == [1, 6, 3, 1]
    assert seats.done == [("start", 0)], "by then the steps of the others have been read"
    loaders.close()


def test_a_run_that_begins_again_is_followed_from_there(tmp_path):
    seats = Seats()
    loaders = ScaledLoaders(seats, steps_of(ramp), BOUNDS, tmp_path, clock=Clock())
    run = ProgressLog((str(tmp_path),))
    for step in range(1, 210):
        run.note(step, frozenset(), {})
    loaders.look()
    assert len(asked(seats)) == 6
    again = ProgressLog((str(tmp_path),))
    again.note(21, frozenset(), {})
    loaders.look()
    assert len(asked(seats)) == 1, "what the steps from there on need"
    assert decisions_of_log(tmp_path)[-1]["step"] == 0
    for step in range(22, 210):
        again.note(step, frozenset(), {})
        loaders.look()
    assert len(asked(seats)) == 6
    loaders.close()


def test_a_loader_that_cannot_start_is_tried_with_the_next_decision(tmp_path):
    seats = Seats()
    seats.refuse = {2}
    levels = steps_of(lambda step: 4_000_000 if step < 100 else 16_000_000 if step < 200 else 40_000_000)
    loaders = ScaledLoaders(seats, levels, BOUNDS, tmp_path, clock=Clock())
    run = ProgressLog((str(tmp_path),))
    for step in range(1, 150):
        run.note(step, frozenset(), {})
    loaders.look()
    assert sorted(seats.here) == [0, 1]
    seats.refuse = set()
    for step in range(150, 300):
        run.note(step, frozenset(), {})
    loaders.look()
    assert sorted(seats.here) == [0, 1, 2, 3, 4, 5] == list(range(len(decisions_of_log(tmp_path)[-1]["loaders"])))
    loaders.close()


def test_a_run_writes_only_where_somebody_follows_and_only_news(tmp_path):
    log = ProgressLog((str(tmp_path / "none"), str(tmp_path)))
    log.note(1, frozenset(), {})
    assert not list(tmp_path.iterdir())
    path = follow_progress(tmp_path)
    for step in range(2, 50):
        log.note(step, frozenset({"web"} if step > 33 else ()), {"a": 1} if step > 44 else {})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30, 34, 40, 45]
    assert notes_of(path)[-1] == RunNote(step=45, gone=frozenset({"web"}), decided={"a": 1})


def test_half_a_line_and_steps_taken_back_are_no_notes(tmp_path):
    path = follow_progress(tmp_path)
    path.write_text('{"step":10}\n{"step":20,"gone":["a"]}\nfoo\n{"step":12}\n{"step":3')
    assert notes_of(path) == [RunNote(step=10), RunNote(step=12)]
    assert notes_of(tmp_path / "none") == []
