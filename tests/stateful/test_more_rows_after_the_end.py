"""Rows that come to a stream that has given its last epoch: they come once, and it runs out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.stateful.test_edits import word_of
from tests.stateful.test_eras import given, make_file, stream_of, tokens_of, write
from tests.support.loaders import Rank, run_job
from torchmix.errors import SourceExhausted
from torchmix.parallel.topology import Topology
from torchmix.steps.state import read_state

ALONE = Topology()
ENDS = ", max_epochs: 1, on_exhausted: renormalise"
BIG = 10_000


def source(name: str, more: str = "") -> str:
    return f'  {name}: {{path: "{name}/*.parquet", tokens: input_ids, properties: [score]{more}}}\n'


def gone(rank: Rank) -> set[str]:
    return {one.name for one in read_state(rank.state["torchmix_state"]).at.decisions if one.kind == "ran_out"}


def edited(path: Path, state: dict[str, Any], steps: int) -> Rank:
    """Some steps more, of two replicas after the first two."""
    word = word_of(path, state)

    def program(loader: Any, rank: Any) -> None:
        loader.load_state_dict(state, accept_edit=word)
        while len(rank.digests) < 2:
            rank.microbatches.append(microbatch := next(rank.__dict__.setdefault("iterator", iter(loader))))
            if microbatch.is_last_of_step:
                rank.digests.append(loader.order_digest)

    [first] = run_job(path, ALONE, program=program)
    ranks = run_job(path, Topology(dp=2), steps=steps, state=first.state)
    first.microbatches += [one for rank in ranks for one in rank.microbatches]
    first.state = ranks[0].state
    return first


def check(counts: Counter[int], once: Sequence[int]) -> None:
    """Documents below `BIG` that came: these, each once."""
    assert {number: n for number, n in counts.items() if number < BIG} == {n: tokens_of(n) for n in once}


def start(folder: Path, lines: str, mixture: str, **options: Any) -> tuple[Path, Rank]:
    make_file(folder, "a/0.parquet", 0, range(40))
    make_file(folder, "b/0.parquet", BIG)
    path = write(folder, lines, mixture, **options)
    return path, run_job(path, ALONE, steps=25)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("shuffle", "method"), [("page", "best_fit"), ("row", "concat"), ("none", "pad")])
def test_appended_files_come_once(tmp_path: Path, shuffle: str, method: str) -> None:
    lines, options = source("a", ENDS) + source("b"), {"shuffle": shuffle, "method": method}
    options["samples"] = "12" if method == "pad" else "4"
    path, first = start(tmp_path, lines, "{a: 50%, b: 50%}", **options)
    counts = given([first])
    assert gone(first) == {"a"} and stream_of(first, "a").epoch == 1
    check(counts, range(40))
    state = first.state
    for number in (1, 2):  # twice: what the first edit has given is not new to the second
        rows = range(1000 * number, 1000 * number + 40)
        make_file(tmp_path, f"a/{number}.parquet", 0, rows)
        write(tmp_path, lines, "{a: 50%, b: 50%}", **options)
        after = edited(path, state, 3)
        assert gone(after) == set() and stream_of(after, "a").epoch == 0
        news = given([after])
        assert any(number in rows for number in news)
        share = sum(n for number, n in news.items() if number < BIG) / sum(news.values())
        assert share == pytest.approx(0.5, abs=0.15) or method == "pad"
        [end] = run_job(path, ALONE, steps=22, state=after.state)
        counts, state = counts + news + given([end]), end.state
        assert gone(end) == {"a"} and stream_of(end, "a").epoch == 1
        check(counts, [*range(40), *(n for of in range(1, number + 1) for n in range(1000 * of, 1000 * of + 40))])


def test_a_run_that_stopped_at_the_end_of_a_source_goes_on_with_its_new_files(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0, range(40))
    make_file(tmp_path, "b/0.parquet", BIG)
    lines = source("a", ", max_epochs: 1") + source("b")
    path = write(tmp_path, lines, "{a: 50%, b: 50%}")

    def to_the_end(state: dict[str, Any] | None, word: str | None = None) -> Rank:
        def program(loader: Any, rank: Any) -> None:
            if state is not None:
                loader.load_state_dict(state, accept_edit=word)
            with pytest.raises(SourceExhausted, match="'a' has given its max_epochs"):
                for microbatch in loader:
                    rank.microbatches.append(microbatch)

        return run_job(path, ALONE, program=program)[0]

    first = to_the_end(None)
    make_file(tmp_path, "a/1.parquet", 0, range(1000, 1040))
    write(tmp_path, lines, "{a: 50%, b: 50%}")
    after = to_the_end(first.state, word_of(path, first.state))
    counts = given([first]) + given([after])
    assert all(n == tokens_of(number) for number, n in counts.items() if number < BIG)
    assert sum(1000 <= number < 1040 for number in counts) > 20


@pytest.mark.slow
def test_the_edit_may_say_that_all_rows_come_again(tmp_path: Path) -> None:
    path, first = start(tmp_path, source("a", ENDS) + source("b"), "{a: 50%, b: 50%}")
    make_file(tmp_path, "a/1.parquet", 0, range(1000, 1040))
    write(tmp_path, source("a", ENDS.replace("1", "2")) + source("b"), "{a: 50%, b: 50%}")
    after = edited(path, first.state, 40)
    counts = given([first]) + given([after])
    assert gone(after) == {"a"} and stream_of(after, "a").epoch == 2
    wanted = {number: tokens_of(number) * (1 + (number < 40)) for number in (*range(40), *range(1000, 1040))}
    assert {number: n for number, n in counts.items() if number < BIG} == wanted


def test_more_epochs_alone_need_no_word(tmp_path: Path) -> None:
    path, first = start(tmp_path, source("a", ENDS) + source("b"), "{a: 50%, b: 50%}")
    write(tmp_path, source("a", ENDS.replace("1", "2")) + source("b"), "{a: 50%, b: 50%}")
    [after] = run_job(path, ALONE, steps=30, state=first.state)
    assert gone(after) == {"a"} and stream_of(after, "a").epoch == 2
    counts = given([first]) + given([after])
    wanted = {number: 2 * tokens_of(number) for number in range(40)}
    assert {number: n for number, n in counts.items() if number < BIG} == wanted


@pytest.mark.slow
def test_a_filter_lets_in_what_has_not_been_given_before(tmp_path: Path) -> None:
    good = "  good: {from: a, where: 'score >= 5'" + ENDS + "}\n"
    lines = source("a") + source("b")
    path, first = start(tmp_path, lines + good, "{good: 50%, b: 50%}")
    counts = given([first])
    assert gone(first) == {"good"}
    check(counts, [number for number in range(40) if number % 10 >= 5])
    state = first.state
    for least, low in ((8, 5), (3, 3), (6, 3), (1, 1)):  # what goes and comes back has been given
        write(tmp_path, lines + good.replace(">= 5", f">= {least}"), "{good: 50%, b: 50%}")
        after = edited(path, state, 23)
        assert gone(after) == {"good"}
        counts, state = counts + given([after]), after.state
        check(counts, [number for number in range(40) if number % 10 >= low])


def test_a_change_that_began_at_the_end_of_the_source_stays_begun(tmp_path: Path) -> None:
    schedule = "schedule: [{from: {epochs: 1, of: a}, mixture: {a: 20%, b: 80%}}]"
    lines = source("a", ENDS) + source("b")
    path, first = start(tmp_path, lines, "{a: 50%, b: 50%}", more=schedule)
    make_file(tmp_path, "a/1.parquet", 0, range(1000, 1040))
    pq.write_table(pa.table({"source": ["b"], "row": pa.array([5], pa.int64())}), tmp_path / "deny.parquet")
    write(tmp_path, lines, "{a: 50%, b: 50%}", more=schedule + "\ndeny: [deny.parquet]")
    after = edited(path, first.state, 8)
    news = given([after])
    assert sum(n for number, n in news.items() if number < BIG) / sum(news.values()) == pytest.approx(0.2, abs=0.05)
    assert [one.kind for one in read_state(after.state["torchmix_state"]).at.decisions] == ["stage"]
