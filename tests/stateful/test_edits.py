"""A recipe that is edited between a save and a load: what stays is not lost or repeated, and other edits are refused.

What was given is counted in the tensors: each token of a document is the document's number.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.files import make_tokens_file
from tests.support.loaders import run_job
from torchmix.cli.main import main
from torchmix.constructor.fields import Microbatch
from torchmix.errors import StateError, StateMismatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps.edits import state_for
from torchmix.steps.state import read_state

ALONE = Topology()
LENGTH, DOCUMENTS = 64, 4000
BASE = {"a": 0, "b": 100_000, "c": 200_000}
"""First number of the documents of each source."""
TOKENS = 12
"""In each document."""


def write(folder: Path, mixture: str, *, sources: str = "ab", extra: str = "", more: str = "") -> Path:
    """The recipe over the files, which are made at the first call; indexed."""
    if not (folder / "a.parquet").exists():
        for name, first in BASE.items():
            make_tokens_file(folder / f"{name}.parquet", [[first + i] * TOKENS for i in range(DOCUMENTS)])
    path = folder / "recipe.yaml"
    lines = "".join(f"  {name}: {{path: {name}.parquet, tokens: input_ids{more}}}\n" for name in sources)
    path.write_text(
        f"version: 1\nseed: 3\nbatch: {{samples: 8, length: {LENGTH}}}\nsources:\n{lines}mixture: {mixture}\n"
        f"shuffle: {{window_pages: 4, window_bytes: 64KiB}}\n{extra}\n",
        encoding="utf-8",
    )
    index_recipe(load_recipe(path), folder)
    return path


def documents(microbatches: list[Microbatch]) -> Counter[int]:
    """Tokens of each document that were given."""
    counts: Counter[int] = Counter()
    for microbatch in microbatches:
        assert microbatch.tokens is not None and microbatch.loss_mask is not None
        assert microbatch.source_index is not None
        counts.update(microbatch.tokens[microbatch.source_index >= 0].tolist())
    return counts


def word_of(recipe: Path, state: dict[str, Any]) -> str:
    """The code that the refusal names."""
    with pytest.raises(StateMismatch, match="accept_edit=") as caught:
        run_job(recipe, ALONE, steps=1, state=state)
    return re.findall(r"accept_edit='([0-9a-f]{16})'", str(caught.value))[0]


def go_on(recipe: Path, state: dict[str, Any], steps: int, topology: Topology = ALONE, **options: Any) -> list[Any]:
    """Some steps more under the edited recipe; every rank accepts the edit."""
    word = word_of(recipe, state)

    def program(loader: Any, rank: Any) -> None:
        loader.load_state_dict(state, accept_edit=word)
        again = loader.state_dict()
        for microbatch in loader:
            rank.microbatches.append(microbatch)
            if microbatch.is_last_of_step:
                rank.digests.append(loader.order_digest)
                if len(rank.digests) == steps:
                    break
        rank.result = again

    return run_job(recipe, topology, program=program, **options)


def share_of(counts: Counter[int], name: str) -> float:
    inside = sum(n for document, n in counts.items() if BASE[name] <= document < BASE[name] + DOCUMENTS)
    return inside / sum(counts.values())


@pytest.mark.parametrize("topology", [ALONE, Topology(dp=2)])
def test_weights_and_sources_change_and_nothing_is_lost_or_repeated(tmp_path: Path, topology: Topology) -> None:
    [first] = run_job(write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=30)
    edited = write(tmp_path, "{a: 20%, b: 30%, c: 50%}", sources="abc")
    ranks = go_on(edited, first.state, 40, topology)
    before = documents(first.microbatches)
    after = documents([microbatch for rank in ranks for microbatch in rank.microbatches])
    assert share_of(before, "a") == pytest.approx(0.8, abs=0.01)
    for name, share in (("a", 0.2), ("b", 0.3), ("c", 0.5)):
        assert share_of(after, name) == pytest.approx(share, abs=0.02), name
    given = before + after
    assert max(given.values()) == TOKENS, "a document of the first epoch comes once"
    partly = [document for document, tokens in given.items() if tokens < TOKENS]
    assert not partly, "each is given whole: what waited in the pool came, too"
    # The prefix of its own order is what a source has given: a run of it alone has the same documents first.
    for name in "ab":
        mine = {document for document in given if BASE[name] <= document < BASE[name] + DOCUMENTS}
        [alone] = run_job(write(tmp_path, f"{{{name}: 100%}}", sources=name), ALONE, steps=len(mine) // 40 + 8)
        order = list(dict.fromkeys(documents(alone.microbatches)))
        assert mine <= set(order)
        waiting = 8 * LENGTH // TOKENS + 8
        assert set(order[: max(0, len(mine) - waiting)]) <= mine, "no gap but for what a pool may hold"


def test_a_source_that_is_removed_takes_its_pool_along_and_moves_no_other(tmp_path: Path) -> None:
    [first] = run_job(write(tmp_path, "{a: 50%, b: 30%, c: 20%}", sources="abc"), ALONE, steps=20)
    [after] = go_on(write(tmp_path, "{a: 60%, b: 40%}"), first.state, 20)
    given = documents(first.microbatches) + documents(after.microbatches)
    stay = {document: tokens for document, tokens in given.items() if document < BASE["c"]}
    assert set(stay.values()) == {TOKENS}
    assert share_of(documents(after.microbatches), "c") == 0


def test_the_state_after_an_edit_is_one_of_the_new_recipe(tmp_path: Path) -> None:
    [first] = run_job(write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=10)
    edited = write(tmp_path, "{a: 10%, b: 90%}")
    [whole] = go_on(edited, first.state, 12)
    [part] = go_on(edited, first.state, 5, look_ahead=4)
    ranks = run_job(edited, Topology(dp=2), steps=7, state=part.state)
    assert [*part.digests, *ranks[0].digests] == whole.digests
    [rest] = run_job(edited, ALONE, steps=12, state=whole.result)
    assert rest.digests == whole.digests, "saved after the edit was accepted and before a step: no word is needed twice"


def test_a_schedule_is_edited_in_the_middle_of_its_ramp(tmp_path: Path) -> None:
    ramp = "schedule: [{from: 0 steps, to: 40 steps, set: {a: 10%}}]"
    [first] = run_job(write(tmp_path, "{a: 90%, b: 10%}", extra=ramp), ALONE, steps=20)
    [after] = go_on(write(tmp_path, "{a: 90%, b: 10%}", extra=ramp.replace("10%", "50%")), first.state, 60)
    given = documents(first.microbatches) + documents(after.microbatches)
    assert set(given.values()) == {TOKENS}
    late = documents([microbatch for microbatch in after.microbatches if microbatch.step >= 45])
    assert share_of(late, "a") == pytest.approx(0.5, abs=0.03)


def test_another_word_is_refused_and_the_loader_keeps_its_place(tmp_path: Path) -> None:
    [first] = run_job(write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=3)
    other = word_of(write(tmp_path, "{a: 70%, b: 30%}"), first.state)
    edited = write(tmp_path, "{a: 60%, b: 40%}")

    def program(loader: Any, rank: Any) -> None:
        for word in (other, 1234567890123456):
            with pytest.raises(StateMismatch, match="accepts another edit"):
                loader.load_state_dict(first.state, accept_edit=word)
        assert next(iter(loader)).step == 0

    run_job(edited, ALONE, program=program)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"extra": "packing: {method: concat}"}, "packing"),
        ({"extra": "packing: {align_tokens: 16}"}, "packing"),
        ({"more": ', documents: ["0%", "50%"]'}, "sources.a"),
    ],
)
def test_what_may_not_change_is_refused_by_key(tmp_path: Path, changes: dict[str, str], key: str) -> None:
    [first] = run_job(write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=3)
    edited = write(tmp_path, "{a: 60%, b: 40%}", **changes)
    with pytest.raises(StateMismatch, match=key) as caught:
        run_job(edited, ALONE, steps=1, state=first.state)
    assert "accept_edit" not in str(caught.value)


def test_rows_that_changed_are_no_edit_of_shares(tmp_path: Path) -> None:
    [first] = run_job(write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=3)
    make_tokens_file(tmp_path / "a.parquet", [[7] * TOKENS for _ in range(DOCUMENTS)])
    edited = write(tmp_path, "{a: 60%, b: 40%}")
    with pytest.raises(StateMismatch, match="does not have the rows that 'a' had"):
        run_job(edited, ALONE, steps=1, state=first.state)


def test_an_edit_begins_with_a_step(tmp_path: Path) -> None:
    recipe = write(tmp_path, "{a: 80%, b: 20%}")
    [first] = run_job(recipe, ALONE, microbatches=8 * 2 + 3)
    edited = write(tmp_path, "{a: 60%, b: 40%}")
    word = word_of(edited, first.state)

    def program(loader: Any, rank: Any) -> None:
        with pytest.raises(StateMismatch, match="from_step_start=True, accept_edit="):
            loader.load_state_dict(first.state, accept_edit=word)
        loader.load_state_dict(first.state, accept_edit=word, from_step_start=True)
        microbatch = next(iter(loader))
        assert (microbatch.step, microbatch.index) == (2, 0)

    run_job(edited, ALONE, program=program)


def test_diff_says_what_changes_and_the_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [first] = run_job(write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=3)
    old = tmp_path / "old.yaml"
    old.write_text((tmp_path / "recipe.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "state").write_bytes(first.state["torchmix_state"])
    edited = write(tmp_path, "{a: 20%, c: 80%}", sources="ac")
    word = word_of(edited, first.state)
    assert main(["diff", str(old), str(edited), "--state", str(tmp_path / "state"), "--steps", "20"]) == 0
    printed = capsys.readouterr().out
    assert word in printed and "from step 3" in printed
    rows = {
        line.split()[0]: line.split()[1:] for line in printed.splitlines() if line[:1] in "abc" and line[1:2] == " "
    }
    assert rows["a"][:4] == ["80", "%", "20", "%"] and "added" in rows["c"] and "removed" in rows["b"]
    assert main(["diff", str(edited), str(old), "--state", str(tmp_path / "state")]) == 3
    assert f"{edited} is not the recipe of the run" in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"PK" + bytes(100))
    assert main(["diff", str(old), str(edited), "--state", str(tmp_path / "checkpoint.pt")]) == 3
    assert "holds the bytes of its 'torchmix_state'" in capsys.readouterr().err
    assert (
        main(["diff", str(old), str(write(tmp_path, "{a: 100%}", sources="a", extra="packing: {method: concat}"))]) == 1
    )
    assert "packing" in capsys.readouterr().out


def test_a_forged_edit_is_a_state_error(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        run_job(
            write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=1, state={"torchmix_state": b"torchmix-state\x01junk"}
        )


@pytest.mark.parametrize("topology", [ALONE, Topology(dp=2)])
def test_the_batch_may_get_later_stages_with_longer_samples(tmp_path: Path, topology: Topology) -> None:
    """As if the stages had been there from the start: what was before them is the same."""
    mixture = "{a: 80%, b: 20%}"
    [first] = run_job(write(tmp_path, mixture), ALONE, steps=6)
    edited = write(tmp_path, mixture)
    stages = "[{from_step: 0, samples: 8}, {from_step: 8, samples: 4, length: 128}, {from_step: 11, samples: 6}]"
    edited.write_text(edited.read_text().replace("samples: 8,", f"samples: {stages},"), encoding="utf-8")
    ranks = go_on(edited, first.state, 8, topology)
    [whole] = run_job(edited, ALONE, steps=14)
    assert first.digests == whole.digests[:6]
    assert ranks[0].digests == whole.digests[6:]
    mine = documents([microbatch for rank in ranks for microbatch in rank.microbatches])
    assert documents(first.microbatches) + mine == documents(whole.microbatches)


@pytest.mark.parametrize(
    "stages",
    [
        "[{from_step: 0, samples: 8}, {from_step: 5, samples: 4, length: 128}]",  # step 5 has been given
        "[{from_step: 0, samples: 4}, {from_step: 8, samples: 8}]",  # another past
    ],
)
def test_stages_of_the_past_are_refused_by_key(tmp_path: Path, stages: str) -> None:
    [first] = run_job(write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=6)
    edited = write(tmp_path, "{a: 80%, b: 20%}")
    edited.write_text(edited.read_text().replace("samples: 8,", f"samples: {stages},"), encoding="utf-8")
    with pytest.raises(StateMismatch, match="these keys differ: batch"):
        run_job(edited, ALONE, steps=1, state=first.state)


def test_a_rank_without_a_catalog_compares_the_half_of_the_word_that_is_of_recipes(tmp_path: Path) -> None:
    [first] = run_job(write(tmp_path, "{a: 80%, b: 20%}"), ALONE, steps=3)
    part = part_of(load_recipe(write(tmp_path, "{a: 20%, b: 80%}")), "train")
    state = read_state(first.state["torchmix_state"])
    with pytest.raises(StateMismatch, match="accept_edit=") as caught:
        state_for(state, part)
    [word] = re.findall(r"accept_edit='([0-9a-f]{16})'", str(caught.value))
    for wrong in (None, word[::-1], "0" * 8 + word[8:]):
        with pytest.raises(StateMismatch, match="accept_edit="):
            state_for(state, part, accept_edit=wrong)
    # The other half is of rows, which leaders alone know.
    assert state_for(state, part, accept_edit=word[:8] + "0" * 8).edited_from
