"""A policy decides the shares of later steps: one order at any layout and look-ahead, over kills and replays.

Losses are scripted, since real ones differ by layout in the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchmix
from tests.support import strategies
from tests.support.loaders import Rank, run_job, write_job
from tests.support.strategies import turning
from torchmix.errors import OptionError, PlanError, RecipeError, StateMismatch
from torchmix.parallel.topology import Topology
from torchmix.planner.drawing import SharesOfStep
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.reports import AHEAD

DYNAMIC = 'dynamic: {policy: odm, every: 4 steps, lag: 3 steps, within: ["0.2x", "5x"], decisions: ./log}'
ALONE = Topology()
STEPS = 26


def losses_of(step: int) -> dict[str, tuple[float, int]]:
    """Losses that a policy has something to say to; `tiny` is seen in every third step."""
    losses = {"web": (300.0 + step % 7 * 40, 100), "prose": (90.0 + step % 5 * 10, 60)}
    return losses if step % 3 else {**losses, "tiny": (20.0, 4)}


def training(stop: int, *, losses: Callable[[int], Any] = losses_of) -> Callable[[StatefulDataLoader, Rank], None]:
    """A trainer that reports every step before `stop`."""

    def train(loader: StatefulDataLoader, rank: Rank) -> None:
        for microbatch in loader:
            rank.microbatches.append(microbatch)
            if microbatch.is_last_of_step:
                loader.report(microbatch.step, losses(microbatch.step))
                rank.digests.append(loader.order_digest)
                if microbatch.step + 1 == stop:
                    return

    return train


def digests(recipe: Path, topology: Topology = ALONE, *, stop: int = STEPS, **options: Any) -> list[str]:
    """The order digest after each step, which all ranks agree on."""
    ranks = run_job(recipe, topology, program=training(stop), **options)
    assert len({tuple(rank.digests) for rank in ranks}) == 1
    return ranks[0].digests


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_job(tmp_path, extra=DYNAMIC)


@pytest.mark.slow
def test_look_ahead_and_layout_change_nothing(recipe: Path, tmp_path: Path) -> None:
    expected = digests(recipe)
    assert len(expected) == STEPS
    for topology, options in [
        (ALONE, {"look_ahead": 1}),
        (ALONE, {"look_ahead": 16}),
        (Topology(dp=2), {"look_ahead": 4}),
        (Topology(dp=2, tp=2), {"micro_batch_size": 2}),
        (Topology(pp=2, cp=2), {}),
    ]:
        assert digests(recipe, topology, **options) == expected, (topology, options)
    constant = digests(write_job(tmp_path / "constant"))
    assert constant[:6] == expected[:6] and constant[6] != expected[6], "decided after step 3, holds from step 6 on"


def test_the_log_says_what_was_told_and_decided(recipe: Path) -> None:
    digests(recipe, stop=9)
    [path] = (recipe.parent / "log").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][1:]
    assert [line["step"] for line in lines] == list(range(9))
    assert [line["losses"] for line in lines] == [
        {name: list(pair) for name, pair in losses_of(step).items()} for step in range(9)
    ]
    decided = {line["step"]: line["shares"] for line in lines if "shares" in line}
    assert set(decided) == {3, 7} and all(sum(shares.values()) == 1 << 32 for shares in decided.values())


def test_the_tokens_drawn_follow_what_was_decided(recipe: Path) -> None:
    [rank] = run_job(recipe, ALONE, program=training(STEPS))
    [path] = (recipe.parent / "log").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][1:]
    names = ["prose", "tiny", "web"]
    asked = dict.fromkeys(names, 0.0)
    given = dict.fromkeys(names, 0)
    shares = SharesOfStep(part_of(load_recipe(recipe), "train"), dict.fromkeys(names, 1)).at(0, frozenset())
    assert shares is not None
    now = dict(zip(names, shares.tolist(), strict=True))
    by_step: dict[int, dict[str, int]] = {}
    for microbatch in rank.microbatches:
        index, mask = microbatch.source_index, microbatch.loss_mask
        assert index is not None and mask is not None
        counts = by_step.setdefault(microbatch.step, dict.fromkeys(names, 0))
        for number, name in enumerate(names):
            counts[name] += int((index == number).sum())
    for step in range(STEPS):
        after = step - 3
        if after >= 0 and lines[after].get("shares"):
            now = lines[after]["shares"]
        total = sum(by_step[step].values())
        for name in names:
            asked[name] += total * now[name] / (1 << 32)
            given[name] += by_step[step][name]
            assert abs(given[name] - asked[name]) <= 64 + 8 * 64, (step, name)  # half a sample, and the pool of a step
    assert max(abs(now[name] / (1 << 32) - share) for name, share in zip(names, (0.38, 0.02, 0.6), strict=True)) > 0.05


@pytest.mark.parametrize("at", [3, 6, 9, 16])
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(recipe: Path, tmp_path: Path, at: int) -> None:
    """At a decision, between a decision and its effect, within an interval; twice, and at other layouts."""
    expected = digests(write_job(tmp_path / "whole", extra=DYNAMIC))
    [first] = run_job(recipe, ALONE, program=training(at))
    run_job(recipe, ALONE, program=training(at + 4, losses=lambda step: {"web": (9e9, 1)}), state=first.state)
    second = run_job(recipe, Topology(dp=2), program=training(at + 5), state=first.state, look_ahead=4)
    third = run_job(recipe, Topology(tp=2), program=training(STEPS), state=second[1].state)
    given = [*first.digests, *second[0].digests, *third[0].digests]
    assert given == expected, "the branch with other losses is nobody's past"


def test_a_replay_asks_no_policy(recipe: Path, tmp_path: Path) -> None:
    expected = digests(recipe)
    replayed = write_job(tmp_path / "replay", extra=DYNAMIC.replace("odm", "no_such_module:Policy"))
    log = recipe.parent / "log"
    assert digests(replayed, Topology(dp=2), decisions=str(log)) == expected
    assert not (replayed.parent / "log").exists()
    [rank] = run_job(replayed, ALONE, program=training(12), decisions=str(log))
    ranks = run_job(replayed, Topology(dp=2), program=training(STEPS), decisions=str(log), state=rank.state)
    assert [*rank.digests, *ranks[0].digests] == expected


def test_a_replay_ends_with_its_log(recipe: Path, tmp_path: Path) -> None:
    digests(recipe, stop=6)
    with pytest.raises(PlanError, match="has 6 steps, and what is decided after step 7 is not in it"):
        digests(recipe, decisions=str(recipe.parent / "log"))


def test_a_log_that_is_gone_refuses_the_resume_unless_the_recipe_goes_on_with_constant_shares(recipe: Path) -> None:
    [rank] = run_job(recipe, ALONE, program=training(14))
    for path in (recipe.parent / "log").glob("*.jsonl"):
        path.unlink()
    with pytest.raises(StateMismatch, match="on_missing: constant"):
        run_job(recipe, ALONE, program=training(STEPS), state=rank.state)
    recipe.write_text(recipe.read_text().replace("every: 4", "on_missing: constant, every: 4"), encoding="utf-8")
    [after] = run_job(recipe, ALONE, program=training(20), state=rank.state)
    [again] = run_job(recipe, Topology(), program=training(STEPS), state=after.state)
    assert len(rank.digests) + len(after.digests) + len(again.digests) == STEPS


def test_an_edit_changes_shares_of_the_children_that_a_policy_decides_and_no_children(recipe: Path) -> None:
    [rank] = run_job(recipe, ALONE, program=training(12))
    text, shares = recipe.read_text(encoding="utf-8"), "{web: 60%, prose: 38%, tiny: 2%}"
    assert shares in text
    recipe.write_text(text.replace(shares, "{web: 50%, prose: 48%, tiny: 2%}"), encoding="utf-8")
    with pytest.raises(StateMismatch, match="accept_edit="):
        run_job(recipe, ALONE, steps=1, state=rank.state)
    grouped = "{web: 60%, rest: {share: 40%, children: {prose: 95, tiny: 5}}}"
    recipe.write_text(text.replace(shares, grouped), encoding="utf-8")
    with pytest.raises(
        StateMismatch, match="given shares to prose, tiny, web, and by this recipe it decides those of "
    ):
        run_job(recipe, ALONE, steps=1, state=rank.state)


def test_an_edit_of_the_children_is_refused_when_a_decision_is_made_and_does_not_hold_yet(recipe: Path) -> None:
    [rank] = run_job(recipe, ALONE, program=training(5))  # decided after step 3, to hold from step 6 on
    text, shares = recipe.read_text(encoding="utf-8"), "{web: 60%, prose: 38%, tiny: 2%}"
    grouped = "{web: 60%, rest: {share: 40%, children: {prose: 95, tiny: 5}}}"
    recipe.write_text(text.replace(shares, grouped), encoding="utf-8")
    with pytest.raises(StateMismatch, match="has given shares to prose, tiny, web, and by this recipe"):
        run_job(recipe, ALONE, steps=1, state=rank.state)


def test_an_altered_log_is_refused(recipe: Path) -> None:
    [rank] = run_job(recipe, ALONE, program=training(14))
    [path] = (recipe.parent / "log").glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"prose":[', b'"prose":[1', 1))
    with pytest.raises(StateMismatch, match="is not the one that the state"):
        run_job(recipe, ALONE, program=training(STEPS), state=rank.state)


def test_a_step_that_is_not_reported_is_an_error_and_no_hang(recipe: Path) -> None:
    def silent(loader: StatefulDataLoader, rank: Rank) -> None:
        for microbatch in loader:
            if microbatch.step < 2 and microbatch.is_last_of_step:
                loader.report(microbatch.step, {})

    with pytest.raises(PlanError, match=r"step 6 has shares that are decided after step 3.*reported 2 steps"):
        run_job(recipe.parent / "recipe.yaml", ALONE, program=silent)


@pytest.mark.parametrize(
    ("step", "losses", "message"),
    [
        (1, {}, "step 1 was reported, and step 0 comes next"),
        (0, {"wbe": (1.0, 1)}, "'wbe' is no source of the mixture .did you mean 'web'"),
        (0, {"web": (float("nan"), 1)}, "no pair of a finite"),
        (0, {"web": 3.0}, "no pair of a finite"),
        (0, {"web": (3.0, -1)}, "no pair of a finite"),
    ],
)
def test_a_wrong_report_is_a_named_error(recipe: Path, step: int, losses: Any, message: str) -> None:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        next(iter(loader))
        loader.report(step, losses)

    with pytest.raises(OptionError, match=message):
        run_job(recipe, ALONE, program=program)


# --- A function of the step in the place of a policy: nobody reports, and its answers are logged and replayed.

OF_STEP = DYNAMIC.replace("odm, every: 4 steps, lag: 3", '"tests.support.strategies:turning", every: 1 steps, lag: 1')
OF_STEP = OF_STEP.replace('["0.2x", "5x"]', '["0x", "50x"]')


def plain_digests(recipe: Path, topology: Topology = ALONE, steps: int = STEPS, **options: Any) -> list[str]:
    ranks = run_job(recipe, topology, steps=steps, **options)
    assert len({tuple(rank.digests) for rank in ranks}) == 1
    return ranks[0].digests


@pytest.mark.slow
def test_a_function_of_the_step_decides_without_reports(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, extra=OF_STEP)
    expected = plain_digests(recipe)
    assert expected[0] == plain_digests(write_job(tmp_path / "constant"), steps=2)[0], "step 0 is the mixture's"
    assert expected[1] != plain_digests(write_job(tmp_path / "constant"), steps=2)[1]
    [path] = (tmp_path / "log").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][1:]
    assert [line["step"] for line in lines] == list(range(STEPS - 1 + AHEAD)) and "losses" not in lines[0]
    for line in lines:
        wanted, shares = turning(line["step"] + 1), line["shares"]
        for name, share in wanted.items():
            assert abs(shares[name] / (1 << 32) - share / sum(wanted.values())) < 1e-6
    for topology, options in [
        (ALONE, {"look_ahead": 16}),
        (Topology(dp=2, tp=2), {"micro_batch_size": 2}),
        (Topology(pp=2, cp=2), {"loaders": "node"}),
    ]:
        assert plain_digests(recipe, topology, **options) == expected, (topology, options)
    assert digests(recipe) == expected, "a trainer may report all the same"
    assert [plan.order_digest.hex() for plan in torchmix.plan(recipe, steps=STEPS)] == expected, "planned without a log"


def test_what_a_function_has_decided_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps behind a state follow from the log; the function is asked for those that come."""
    extra = OF_STEP.replace("every: 1 steps, lag: 1", "every: 3 steps, lag: 7")
    recipe = write_job(tmp_path, extra=extra)
    expected = plain_digests(recipe)
    [first] = run_job(recipe, ALONE, steps=9)
    again = run_job(recipe, Topology(dp=2), steps=STEPS - 9, state=first.state)
    assert [*first.digests, *again[0].digests] == expected
    asked: list[int] = []

    def other(step: int) -> dict[str, float]:
        asked.append(step)
        return {"web": 1.0, "prose": 9.0, "tiny": 1.0}

    monkeypatch.setattr(strategies, "turning", other)
    [changed] = run_job(recipe, ALONE, steps=STEPS - 9, state=first.state)
    assert min(asked) == 11 + 7, "after step 8 the decision is in the log; the next one is made after step 11"
    assert changed.digests[: 18 - 9] == expected[9:18] and changed.digests[18 - 9] != expected[18]
    replayed = write_job(tmp_path / "replay", extra=extra.replace("tests.support.strategies:turning", "no_such:f"))
    logs = sorted((tmp_path / "log").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    assert plain_digests(replayed, Topology(dp=2), steps=18, decisions=str(logs[0])) == expected[:18]


def test_a_strategy_names_the_function_that_the_recipe_has(tmp_path: Path) -> None:
    own = write_job(tmp_path, extra=OF_STEP)
    expected = plain_digests(own, steps=3)
    strategy = own.with_name("strategy.yaml")
    named = 'balance: {strategy: "tests.support.strategies:with_turning_shares", '
    strategy.write_text(own.read_text().replace("balance: {method: rows, ", named))
    assert plain_digests(strategy, Topology(dp=2), steps=3) == expected
    without = own.with_name("without.yaml")
    without.write_text(strategy.read_text().replace(OF_STEP, ""))
    with pytest.raises(PlanError, match=r'mix: .* write `dynamic: \{policy: "tests.support.strategies:turning"\}`'):
        run_job(without, ALONE, steps=1)


def test_a_function_that_fails_keeps_the_shares_or_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        strategies, "turning", lambda step: {"web": 1.0} if step == 4 else {"web": 1, "prose": 1, "tiny": 1}
    )
    kept = write_job(tmp_path / "keep", extra=OF_STEP)
    assert len(plain_digests(kept, steps=8)) == 8
    [path] = (kept.parent / "log").glob("*.jsonl")
    faults = [json.loads(line).get("fault", "") for line in path.read_text(encoding="utf-8").splitlines()][1:]
    assert "it gives shares of ['web']" in faults[3] and not any(faults[4:])
    stopped = write_job(tmp_path / "stop", extra=OF_STEP.replace("decisions:", "on_error: stop, decisions:"))
    with pytest.raises(PlanError, match=r"policy 'tests.support.strategies:turning' after step 3: .* gives shares"):
        run_job(stopped, ALONE, steps=8)


def test_a_loader_without_a_policy_takes_reports_and_does_nothing(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    assert digests(recipe, stop=3) == run_job(recipe, ALONE, steps=3)[0].digests
    assert not (tmp_path / "decisions").exists()


def test_a_policy_that_cannot_be_opened_is_named_at_the_start(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, extra=DYNAMIC.replace("odm", "no_such_module:Policy"))
    with pytest.raises(RecipeError, match="cannot be imported"):
        digests(recipe)


def test_a_policy_that_fails_keeps_the_shares_or_stops_every_rank(tmp_path: Path) -> None:
    options = "policy: file, options: {path: shares.yaml},"
    kept = write_job(tmp_path / "keep", extra=DYNAMIC.replace("policy: odm,", options))
    (kept.parent / "shares.yaml").write_text("{web: 1}", encoding="utf-8")
    constant = digests(write_job(tmp_path / "constant"))
    assert digests(kept) == constant
    stopped = write_job(tmp_path / "stop", extra=DYNAMIC.replace("policy: odm,", f"{options} on_error: stop,"))
    (stopped.parent / "shares.yaml").write_text("{web: 1}", encoding="utf-8")
    with pytest.raises(PlanError, match="has no share of prose, tiny"):
        digests(stopped)
