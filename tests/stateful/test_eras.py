"""Rows of streams that change in the middle of a run: files, filters, children of flats.

What was given is counted in the tensors: each token of a document is the document's number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.stateful.test_edits import documents, go_on, word_of
from tests.support.loaders import run_job
from torchmix.cli.main import main
from torchmix.errors import StateMismatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.steps.state import read_state

ALONE = Topology()
LENGTH = 64
ROWS = 200
"""Documents of a file."""


def tokens_of(number: int) -> int:
    """Every twentieth document is longer than a sample."""
    return 6 * LENGTH + 5 if number % 20 == 7 else 12 + number % 9


def make_file(folder: Path, name: str, first: int, numbers: Sequence[int] = ()) -> None:
    """A file of `ROWS` documents, or of some; `score` is the last digit of a document's number."""
    numbers = numbers or range(first, first + ROWS)
    table = {"input_ids": [[n] * tokens_of(n) for n in numbers], "score": [n % 10 for n in numbers]}
    (folder / name).parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(table), folder / name, data_page_size=1024, use_dictionary=False, write_batch_size=8)


def write(
    folder: Path,
    sources: str,
    mixture: str,
    *,
    shuffle: str = "page",
    method: str = "best_fit",
    samples: str = "4",
    more: str = "",
) -> Path:
    """A recipe over files that are there, indexed."""
    path = folder / "recipe.yaml"
    path.write_text(
        f"version: 1\nseed: 3\nbatch: {{samples: {samples}, length: {LENGTH}}}\nsources:\n{sources}mixture: {mixture}\n"
        f"shuffle: {{method: {shuffle}, window_pages: 4}}\npacking: {{method: {method}}}\n{more}\n",
        encoding="utf-8",
    )
    index_recipe(load_recipe(path), folder)
    return path


def given(ranks: list[Any]) -> Counter[int]:
    return documents([microbatch for rank in ranks for microbatch in rank.microbatches])


def source(name: str, path: str) -> str:
    return f"  {name}: {{path: {path}, tokens: input_ids, properties: [score]}}\n"


class Stream(NamedTuple):
    epoch: int
    era: int


def stream_of(rank: Any, name: str) -> Stream:
    state = read_state(rank.state["torchmix_state"])
    epoch = int(state.at.position.epoch[state.rows.streams.index(name)])
    return Stream(epoch, state.at.eras.counts.get(name, 0))


def to_the_end(path: Path, state: dict[str, Any], counts: Counter[int], numbers: Sequence[int]) -> Counter[int]:
    """Go on, at another layout, until every document came; none may come twice before."""
    for _ in range(40):
        ranks = run_job(path, Topology(dp=2), steps=8, state=state)
        counts, state = counts + given(ranks), ranks[0].state
        if all(counts[number] >= tokens_of(number) for number in numbers):
            return counts
    raise AssertionError("a document does not come")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shuffle", "method"), [("page", "best_fit"), ("page", "concat"), ("row", "best_fit"), ("none", "concat")]
)
def test_added_files_share_the_rest_of_the_epoch(tmp_path: Path, method: str, shuffle: str) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    make_file(tmp_path, "b/0.parquet", 10_000)
    lines = source("a", '"a/*.parquet"') + source("b", '"b/*.parquet"')
    path = write(tmp_path, lines, "{a: 80%, b: 20%}", shuffle=shuffle, method=method)
    [first] = run_job(path, ALONE, steps=15)
    assert stream_of(first, "a").epoch == 0 and 20 < sum(number < ROWS for number in given([first])) < ROWS - 20
    make_file(tmp_path, "a/1.parquet", ROWS)
    write(tmp_path, lines, "{a: 80%, b: 20%}", shuffle=shuffle, method=method)
    [after] = go_on(path, first.state, 25)
    counts = given([first]) + given([after])
    assert (stream_of(after, "a").epoch, stream_of(after, "a").era) == (0, 1)
    assert all(tokens <= tokens_of(number) for number, tokens in counts.items() if number < 2 * ROWS)
    news = [sum(ROWS <= number < 2 * ROWS for number in given([one])) for one in (first, after)]
    olds = sum(number < ROWS and number not in given([first]) for number in given([after]))
    assert news[0] == 0 and olds > 20 and (news[1] > 20 or shuffle == "none"), "old and new share what is left"
    assert len(read_state(after.state["torchmix_state"]).at.eras.edits) == 1
    to_the_end(path, after.state, counts, range(2 * ROWS))
    [late] = run_job(path, ALONE, steps=60, state=after.state)
    assert stream_of(late, "a").epoch > 0 and not read_state(late.state["torchmix_state"]).at.eras.edits, "forgotten"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["best_fit, overflow: truncate", "concat, overflow: truncate", "pad, overflow: drop", "pad", "best_fit"],
)
def test_files_are_added_after_samples_have_become_longer(tmp_path: Path, method: str) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    make_file(tmp_path, "b/0.parquet", 10_000)
    lines = source("a", '"a/*.parquet"') + source("b", '"b/*.parquet"')
    counts = (8, 8, 8) if "pad" in method else (4, 2, 1)
    stages = [f"from_step: {step}, samples: {count}" for step, count in zip((0, 3, 5), counts, strict=True)]
    samples = f"[{{{stages[0]}}}, {{{stages[1]}, length: 192}}, {{{stages[2]}, length: 768}}]"
    path = write(tmp_path, lines, "{a: 80%, b: 20%}", method=method, samples=samples)
    [first] = run_job(path, ALONE, steps=12 if "pad" in method else 7)
    assert stream_of(first, "a").epoch == 0
    make_file(tmp_path, "a/1.parquet", ROWS)
    write(tmp_path, lines, "{a: 80%, b: 20%}", method=method, samples=samples)
    [after] = go_on(path, first.state, 2)
    found, state = given([first]) + given([after]), after.state
    while stream_of(after, "a").epoch == 0:
        [after] = run_job(path, ALONE, steps=3, state=state)
        found, state = found + given([after]), after.state
    pool = read_state(state["torchmix_state"]).at.pool
    late = set(given([after])) | {row for row, of in zip(pool.row, pool.stream, strict=True) if not of}
    for number in set(range(2 * ROWS)) - late:
        whole, short = tokens_of(number), found[number] in ({64, 192} if "truncate" in method else {0})
        assert found[number] == whole or (whole > 64 and "overflow" in method and short), (number, found[number])


@pytest.mark.parametrize("shuffle", ["page", "row", "none"])
def test_a_filter_moves_rows_between_streams(tmp_path: Path, shuffle: str) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    selected = "  good: {from: a, where: 'score >= 7'}\n"
    lines = source("a", "a/0.parquet") + selected
    path = write(tmp_path, lines, "{a: 60%, good: 40%}", shuffle=shuffle)
    [first] = run_job(path, ALONE, steps=6)
    before = given([first])
    write(tmp_path, lines.replace(">= 7", ">= 4"), "{a: 60%, good: 40%}", shuffle=shuffle)
    [after] = go_on(path, first.state, 4)
    assert stream_of(after, "a").era == stream_of(after, "good").era == 1
    counts = before + given([after])
    moved = [number for number in range(ROWS) if 4 <= number % 10 < 7]
    assert any(number in before for number in moved) and any(number not in before for number in moved)
    assert all(counts[number] <= tokens_of(number) for number in moved), "given by one of both"
    state = after.state
    for _ in range(30):  # a row that was moved comes in the epoch of its new stream
        [rest] = run_job(path, ALONE, steps=4, state=state)
        counts, state = counts + given([rest]), rest.state
        if stream_of(rest, "good").epoch > 0:
            break
    assert stream_of(rest, "good").epoch > 0
    missing = [number for number in moved if number % 20 != 7 and counts[number] < tokens_of(number)]
    waiting = set(read_state(state["torchmix_state"]).at.pool.row.tolist())
    assert not set(missing) - waiting


def test_an_edit_that_is_forgotten_alters_none_that_is_remembered(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)

    def recipe(x: str, y: str) -> Path:
        lines = source("a", "a/0.parquet")
        for name, where in (("x", x), ("y", y)):
            lines += f"  {name}: {{from: a, where: 'score {where}', overlap: allow}}\n"
        return write(tmp_path, lines, "{x: 20%, y: 80%}")

    path = recipe(">= 5", "<= 4")
    [first] = run_job(path, ALONE, steps=4)
    recipe(">= 3", "<= 2")  # rows go from y to x
    [second] = go_on(path, first.state, 12)
    assert stream_of(second, "x").epoch == 0 < stream_of(second, "y").epoch
    recipe(">= 3", "<= 4")  # and come back to y, while x has them, too
    [third] = go_on(path, second.state, 24)
    state = third.state
    assert [[one.name for one in edit] for edit in read_state(state["torchmix_state"]).at.eras.edits] == [["x", "y"]]
    word = word_of(path, second.state)

    def program(loader: Any, rank: Any) -> None:
        loader.load_state_dict(second.state, accept_edit=word)
        for microbatch in loader:
            if microbatch.is_last_of_step:
                rank.digests.append(loader.order_digest)
                if len(rank.digests) == 60:
                    break

    [whole] = run_job(path, ALONE, program=program)
    [resumed] = run_job(path, ALONE, steps=36, state=state)
    assert third.digests + resumed.digests == whole.digests


@pytest.mark.slow
def test_what_waits_of_an_epoch_that_is_over_is_not_lost_with_its_row(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    lines = source("a", "a/0.parquet") + "  good: {from: a, where: 'score = 7'}\n"
    path = write(tmp_path, lines, "{a: 40%, good: 60%}")
    state, counts = None, Counter[int]()
    for _ in range(60):  # until a step ends with a piece of an earlier epoch in the pool
        [first] = run_job(path, ALONE, steps=1, state=state)
        counts, state = counts + given([first]), first.state
        saved = read_state(state["torchmix_state"])
        at = saved.at
        late = [
            (row, tokens)
            for stream, row, epoch, tokens in zip(
                at.pool.stream, at.pool.row, at.pool.epoch, at.pool.tokens, strict=True
            )
            if saved.rows.streams[stream] == "good" and epoch < stream_of(first, "good").epoch
        ]
        if late:
            break
    assert late, "nothing waits"
    write(tmp_path, lines.replace("score = 7", "score = 7 and score > 100 or score = 8"), "{a: 40%, good: 60%}")
    [after] = go_on(path, state, 1)
    pool = read_state(after.state["torchmix_state"]).at.pool
    news, waiting = given([after]), Counter[int]()
    for row, tokens in zip(pool.row, pool.tokens, strict=True):
        waiting[row] += tokens
    for row, tokens in late:
        assert news[row] + waiting[row] >= tokens, "it is given, or waits"
    [rest] = run_job(path, ALONE, steps=3, state=after.state)
    assert rest.digests


def test_a_file_without_rows_of_a_selection_begins_an_era_of_it(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    lines = source("a", '"a/*.parquet"') + "  good: {from: a, where: 'score >= 7'}\n"
    path = write(tmp_path, lines, "{a: 20%, good: 80%}")
    [first] = run_job(path, ALONE, steps=4)
    make_file(tmp_path, "a/1.parquet", 0, [ROWS, ROWS + 1])
    write(tmp_path, lines, "{a: 20%, good: 80%}")
    [after] = go_on(path, first.state, 3)
    assert stream_of(after, "good").era == 1, "the source has more pages, and its windows are made of them"
    counts = given([first]) + given([after])
    numbers = [number for number in range(ROWS) if number % 10 >= 7]
    assert stream_of(after, "good").epoch == 0
    assert all(counts[number] <= tokens_of(number) for number in numbers)
    to_the_end(path, after.state, counts, numbers)


@pytest.mark.slow
def test_a_child_is_added_to_a_flat(tmp_path: Path) -> None:
    for number, name in enumerate("cde"):
        make_file(tmp_path, f"{name}/0.parquet", 1000 * number)
    make_file(tmp_path, "z/0.parquet", 10_000)
    lines = "".join(source(name, f"{name}/0.parquet") for name in "cez")
    path = write(tmp_path, lines, "{z: 1, f: {share: 3, flat: [c, e]}}")
    [first] = run_job(path, ALONE, steps=12)
    lines = "".join(source(name, f"{name}/0.parquet") for name in "cdez")
    write(tmp_path, lines, "{z: 1, f: {share: 3, flat: [c, d, e]}}")
    [after] = go_on(path, first.state, 20)
    assert (stream_of(after, "f").epoch, stream_of(after, "f").era) == (0, 1)
    counts = given([first]) + given([after])
    mine = [number for number in counts if number < 10_000]
    assert all(counts[number] <= tokens_of(number) for number in mine)
    assert sum(1000 <= number < 2000 for number in given([after])) > 20
    numbers = [1000 * number + row for number in range(3) for row in range(ROWS)]
    to_the_end(path, after.state, counts, numbers)
    write(tmp_path, lines.replace(source("c", "c/0.parquet"), ""), "{z: 1, f: {share: 3, flat: [d, e]}}")
    with pytest.raises(StateMismatch, match="flat 'f' had c"):
        run_job(path, ALONE, steps=1, state=after.state)


def test_files_that_were_altered_are_no_era(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    lines = source("a", '"a/*.parquet"')
    path = write(tmp_path, lines, "{a: 100%}")
    [first] = run_job(path, ALONE, steps=3)
    make_file(tmp_path, "a/0.parquet", 5)
    make_file(tmp_path, "a/1.parquet", ROWS)
    write(tmp_path, lines, "{a: 100%}")
    with pytest.raises(StateMismatch, match="does not have the rows that 'a' had"):
        run_job(path, ALONE, steps=1, state=first.state)


def test_a_split_is_not_moved_by_added_files(tmp_path: Path) -> None:
    make_file(tmp_path, "a/0.parquet", 0)
    lines = source("a", '"a/*.parquet"')
    path = write(tmp_path, lines, "{a: 100%}", more="split: [90, 10]")
    [first] = run_job(path, ALONE, steps=3)
    make_file(tmp_path, "a/1.parquet", ROWS)
    write(tmp_path, lines, "{a: 100%}", more="split: [90, 10]")
    with pytest.raises(StateMismatch, match="between training and validation"):
        run_job(path, ALONE, steps=1, state=first.state)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["page", "row"])
def test_what_a_split_cuts_may_be_selected_otherwise(tmp_path: Path, shuffle: str) -> None:
    for number, name in enumerate("cdez"):
        make_file(tmp_path, f"{name}/0.parquet", 1000 * number)

    def recipe(members: str, least: int) -> Path:
        lines = "".join(source(name, f"{name}/0.parquet") for name in (*members, "z"))
        lines += f"  good: {{from: z, where: 'score >= {least}'}}\n"
        mixture = f"{{z: 1, good: 1, f: {{share: 3, flat: [{', '.join(members)}]}}}}"
        return write(tmp_path, lines, mixture, shuffle=shuffle, more="split: [80, 20]")

    path = recipe("ce", 6)
    [first] = run_job(path, ALONE, steps=20)
    recipe("cde", 3)
    [after] = go_on(path, first.state, 6)
    assert [stream_of(after, name).era for name in ("f", "good", "z")] == [1, 1, 1]
    assert {stream_of(after, name).epoch for name in ("f", "good", "z")} == {0}
    counts, state = given([first]) + given([after]), after.state
    assert not any(number % 1000 >= 160 for number in counts), "rows of validation"
    assert all(tokens <= tokens_of(number) for number, tokens in counts.items())
    whole = dict.fromkeys(("f", "good", "z"), False)
    moving = read_state(state["torchmix_state"]).rows.streams
    assert len(moving) == 3
    while not all(whole.values()):
        [rest] = run_job(path, ALONE, steps=4, state=state)
        counts, state = counts + given([rest]), rest.state
        pool = read_state(state["torchmix_state"]).at.pool
        names = read_state(state["torchmix_state"]).rows.streams
        waiting = {(names[stream], row) for stream, row in zip(pool.stream, pool.row, strict=True)}
        for name in whole:
            if whole[name] or not stream_of(rest, name).epoch:
                continue
            whole[name] = True
            for number in (n for n in range(4000) if n % 1000 < 160):
                home = "f" if number < 3000 else "good" if number % 10 >= 3 else "z"
                late = home == "good" and number % 10 < 6  # what z has given, good has in its next epoch
                if home == name and not late and (name, number % 1000) not in waiting:
                    assert counts[number] >= tokens_of(number), (name, number)


def test_diff_says_which_streams_have_other_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        make_file(tmp_path, f"{name}/0.parquet", 0)
    lines = source("a", '"a/*.parquet"') + source("b", '"b/*.parquet"')
    path = write(tmp_path, lines, "{a: 80%, b: 20%}")
    [first] = run_job(path, ALONE, steps=3)
    (tmp_path / "old.yaml").write_bytes(path.read_bytes())
    (tmp_path / "state").write_bytes(first.state["torchmix_state"])
    make_file(tmp_path, "a/1.parquet", ROWS)
    write(tmp_path, lines, "{a: 80%, b: 20%}")
    assert (
        main(["diff", str(tmp_path / "old.yaml"), str(path), "--state", str(tmp_path / "state"), "--steps", "20"]) == 0
    )
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line[:2] in ("a ", "b ")}
    assert "other rows" in rows["a"] and "other rows" not in rows["b"] and "from step 3 on" in printed
    assert word_of(path, first.state) in printed
