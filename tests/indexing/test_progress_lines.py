"""Lines of an index run: at the start, every minute and at the end, with rate and time left."""

from __future__ import annotations

from torchmix.indexing.file_changes import ProgressLines, duration_text

MIB = 1 << 20


class Told:
    """Lines that were said, by a clock that is set."""

    def __init__(self, *, only_long: bool = False) -> None:
        self.lines: list[str] = []
        self.now_s = 1000.0
        self.progress = ProgressLines(self.lines.append, only_long=only_long, clock=lambda: self.now_s)

    def at(self, second: float, done_mib: int, all_mib: int = 600) -> None:
        self.now_s = 1000.0 + second
        self.progress(done_mib * MIB, all_mib * MIB, "web", "data/web-3.parquet")


def test_a_line_comes_at_the_start_every_minute_and_at_the_end() -> None:
    told = Told()
    for second in range(151):
        told.at(second, 2 * second)
    told.now_s = 1000.0 + 300
    told.progress.end()
    assert told.lines == [
        "indexing 600.0 MiB",
        "indexing: 120.0 MiB of 600.0 MiB (20 %), 2.0 MiB/s, 0:04:00 left; now web: data/web-3.parquet",
        "indexing: 240.0 MiB of 600.0 MiB (40 %), 2.0 MiB/s, 0:03:00 left; now web: data/web-3.parquet",
        "scanned 300.0 MiB in 0:05:00, 1.0 MiB/s",
    ]


def test_the_rate_is_that_of_the_last_minute() -> None:
    told = Told()
    told.at(0, 300)  # scanned by an earlier run
    told.at(60, 360)
    told.at(120, 360)
    assert told.lines[1].endswith("1.0 MiB/s, 0:04:00 left; now web: data/web-3.parquet")
    assert "0 B/s, no byte since" in told.lines[2]


def test_where_only_long_runs_are_told_of_a_short_one_says_nothing() -> None:
    told = Told(only_long=True)
    told.at(0, 0)
    told.at(59, 500)
    told.progress.end()
    assert told.lines == []
    told.at(60, 550)
    told.progress.end()
    assert [line.split()[0] for line in told.lines] == ["indexing:", "scanned"]


def test_nothing_to_scan_is_nothing_to_say() -> None:
    told = Told()
    told.progress.end()
    assert told.lines == []


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert [duration_text(seconds) for seconds in (0, 65.4, 3600 * 27 + 59)] == ["0:00:00", "0:01:05", "27:00:59"]
