"""Policies on recorded losses: what they decide, that replaying decides the same, and their bounds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from torchmix.errors import RecipeError
from torchmix.mixture.policies import (
    POLICIES_BY_NAME,
    Ado,
    Exp3,
    Odm,
    Policy,
    SharesFile,
    cost_of,
    fit_scaling_law,
    open_policy,
    smoothed,
    with_floor,
    within,
)
from torchmix.recipe.changes import POLICIES
from torchmix.recipe.structs import Dynamic

NAMES = ["a", "b", "c"]
SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}


def run(policy: Policy, *, steps: int, every: int = 1) -> list[Mapping[str, float]]:
    """Decisions over steps in which `a` has learnt all it can, `b` learns slowly and `c` fast."""
    curves = {"a": (0.0, 0.9, 0.5), "b": (2.0, 0.6, 0.15), "c": (4.0, 0.6, 0.5)}
    policy.start(NAMES, SHARES)
    random, decisions = np.random.default_rng(7), []
    for step in range(steps):
        seen = (step + 1) * 64.0
        losses = {
            name: (float(4096 * (np.exp(e) + np.exp(a) / seen**alpha + random.normal(0, 0.02))), 4096)
            for name, (a, e, alpha) in curves.items()
        }
        policy.observe(step, losses)
        if (step + 1) % every == 0 and (shares := policy.decide(step)) is not None:
            decisions.append(shares)
    return decisions


def test_a_curve_is_found_through_noise_and_outliers() -> None:
    random = np.random.default_rng(1)
    for a, e, alpha in [(3.0, 0.7, 0.3), (1.0, 1.2, 0.1), (6.0, 0.5, 0.6)]:
        seen = np.arange(500, 8000, 10) * 64.0
        losses = (np.exp(e) + np.exp(a) / seen**alpha) * np.exp(random.normal(0, 1e-3, len(seen)))
        losses[::50] *= 1.5
        found = np.array(fit_scaling_law(seen, losses))
        target = np.log(losses)
        assert cost_of(found, np.log(seen), target) <= cost_of(np.array([a, e, alpha]), np.log(seen), target)
        slope = [x[2] * np.exp(x[0]) / seen[-1] ** (x[2] + 1) for x in (found, (a, e, alpha))]
        assert slope[0] == pytest.approx(slope[1], rel=0.25), "the slope is what shares are made of"


def test_smoothing_keeps_what_is_a_polynomial() -> None:
    x = np.linspace(-1, 1, 300)
    cubic = 1 + x - 2 * x**2 + 3 * x**3
    assert np.allclose(smoothed(cubic), cubic)
    noisy = cubic + np.random.default_rng(3).normal(0, 0.1, len(x))
    assert np.abs(smoothed(noisy) - cubic).mean() < 0.3 * np.abs(noisy - cubic).mean()
    assert smoothed(x[:3]) is not None and len(smoothed(x[:40])) == 40


@pytest.mark.slow
def test_ado_gives_more_of_what_is_still_learnt() -> None:
    decisions = run(Ado(ignore_steps=20, start_step=60, refit_steps=40, every=2), steps=400)
    assert len(decisions) == 340, "every step from the 60th on"
    last = decisions[-1]
    assert sum(last.values()) == pytest.approx(1) and min(last.values()) > 0
    assert last["a"] < SHARES["a"], "its loss no longer falls"
    assert last["b"] / SHARES["b"] > last["a"] / SHARES["a"]
    assert run(Ado(ignore_steps=20, start_step=60, refit_steps=40, every=2), steps=160) == decisions[:100]


def test_ado_decides_nothing_before_it_has_seen_enough() -> None:
    assert run(Ado(), steps=200) == []


def test_ado_is_its_authors_code_on_recorded_losses() -> None:
    """Their `AdoSelector`, run on the same losses of 600 steps in samples of 1,024 tokens, some steps without `d`."""
    curves = [(2.0, 0.9, 0.5), (3.0, 0.7, 0.2), (4.0, 0.6, 0.4), (5.0, 0.55, 0.6)]
    policy, names = Ado(ignore_steps=100, start_step=200, refit_steps=200), "abcd"
    policy.start(names, dict(zip(names, [0.55, 0.25, 0.15, 0.05], strict=True)))
    decided: list[list[float] | None] = []
    for step in range(600):
        losses = {}
        for i, (a, e, alpha) in enumerate(curves):
            noise = (step * 7919 + i * 104729) % 1009 / 1009 - 0.5
            loss = math.exp(e) + math.exp(a) / ((step + 1) * 64) ** alpha + 0.04 * noise
            samples = ((step * 31 + i * 17) % 11 + 5) * (11, 5, 3, 1)[i] // 4 if i < 3 or step % 3 else 0
            if samples:
                losses[names[i]] = (loss * samples * 1024, samples * 1024)
        policy.observe(step, losses)
        shares = policy.decide(step)
        decided.append(None if shares is None else list(shares.values()))
    assert decided[:200] == [None] * 200
    for step, theirs in [
        (200, [0.50457821, 0.28894936, 0.15928273, 0.0471897]),
        (399, [0.29084099, 0.4780384, 0.19758604, 0.03353457]),
        (400, [0.29227143, 0.47852958, 0.19572371, 0.03347528]),
        (599, [0.22210425, 0.5500735, 0.20001079, 0.02781146]),
    ]:
        assert decided[step] == pytest.approx(theirs, abs=5e-4), step


def decided_by(policy: Policy, losses: list[dict[str, float]], start: Mapping[str, float]) -> list[list[float]]:
    """The shares after each step with these mean losses, of sources of differing numbers of tokens."""
    policy.start(sorted(start), start)
    decided = []
    for step, means in enumerate(losses):
        counts = {name: 100 + 7 * (step + i) % 40 for i, name in enumerate(sorted(means))}
        policy.observe(step, {name: (mean * counts[name], counts[name]) for name, mean in means.items()})
        shares = policy.decide(step)
        assert shares is not None
        decided.append([shares[name] for name in sorted(start)])
    return decided


@pytest.mark.parametrize("count", [2, 5, 22])
def test_bandits_are_their_formulas(count: int) -> None:
    """Written from the formulas of the page, term by term, without logarithms: 400 steps of some sources each."""
    random = np.random.default_rng(count)
    names = [f"s{i:02}" for i in range(count)]
    start = dict(zip(names, random.dirichlet(np.ones(count)).tolist(), strict=True))
    losses = []
    for step in range(400):
        seen = random.choice(count, size=int(random.integers(1, count + 1)), replace=False)
        losses.append({names[i]: float(random.uniform(1, 6) / (1 + step / 400)) for i in seen})

    def explored(t: int) -> float:
        return min(1 / count, math.sqrt(math.log(count) / (count * t))) if t else 1 / count

    mean_reward, summed = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    shares, of_odm, of_exp3 = dict(start), [], []
    for t, means in enumerate(losses, start=1):
        for name, loss in means.items():
            mean_reward[name] = 0.8 * mean_reward[name] + 0.2 * math.exp(loss)
            summed[name] += loss / 10 / shares[name]
        rest = 1 - count * explored(t)
        total = sum(mean_reward.values())
        of_odm.append([rest * mean_reward[name] / total + explored(t) for name in names])
        powers = {name: math.exp(explored(t - 1) * summed[name]) for name in names}
        shares = {name: rest * powers[name] / sum(powers.values()) + explored(t) for name in names}
        of_exp3.append([shares[name] for name in names])
    assert np.allclose(decided_by(Odm(smoothing=0.8), losses, start), of_odm, rtol=0, atol=1e-9)
    assert np.allclose(decided_by(Exp3(), losses, start), of_exp3, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("policy", "theirs"), [(Odm(), [0.153, 0.186, 0.25, 0.41]), (Exp3(), [0.206, 0.227, 0.258, 0.309])]
)
def test_bandits_are_their_authors_code_at_constant_losses(policy: Policy, theirs: list[float]) -> None:
    """`SmoothedMeanWeightUpdater` and `Exp3WeightUpdater`, after 20,000 steps of all four sources."""
    losses = {"a": 2.0, "b": 2.2, "c": 2.5, "d": 3.0}
    policy.start("abcd", dict.fromkeys("abcd", 0.25))
    for step in range(20_000):
        policy.observe(step, {name: (loss * 10, 10) for name, loss in losses.items()})
        shares = policy.decide(step)
    assert shares is not None and list(shares.values()) == pytest.approx(theirs, abs=5e-4)


def test_a_bandit_learns_nothing_in_its_warmup() -> None:
    for policy in (Odm(warmup_steps=3), Exp3(warmup_steps=3)):
        policy.start("ab", {"a": 0.5, "b": 0.5})
        for step in range(4):
            assert policy.decide(step) is None
            policy.observe(step, {"a": (9.0 if step < 3 else 1.0, 1), "b": (1.0, 1)})
        shares = policy.decide(3)
        assert shares is not None and shares["a"] == shares["b"]


def test_bandits_survive_large_losses() -> None:
    for policy in (Odm(), Odm(smoothing=0), Exp3()):
        policy.start(NAMES, SHARES)
        for step in range(2_000):
            policy.observe(step, {"a": (9000.0, 1), "b": (1.0, 1)})
            shares = policy.decide(step)
        assert shares is not None and np.isfinite(list(shares.values())).all() and min(shares.values()) > 0


def test_a_file_of_an_operator_counts_each_time_that_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "shares.yaml"
    policy = SharesFile(path=str(path))
    policy.start(NAMES, SHARES)
    assert policy.decide(0) is None, "it is not there yet"
    path.write_text("{a: 20%, b: 70%, c: 10%}", encoding="utf-8")
    assert policy.decide(1) == {"a": 0.2, "b": 0.7, "c": 0.1}
    assert policy.decide(2) is None, "it did not change"
    path.write_text(json.dumps({"a": 1, "b": 2, "c": 3}), encoding="utf-8")
    assert policy.decide(3) == {"a": 1.0, "b": 2.0, "c": 3.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 20%, b: 70%}", "has no share of c"),
        ("{a: 20%, b: 70%, cc: 10%}", "'cc' is no child of this group"),
        ("[1, 2]", "holds no mapping"),
        ("{a: 20%, b: [, c: 10%}", "cannot be read as YAML"),
        ("{a: -1, b: 1, c: 1}", "below 0"),
    ],
)
def test_a_wrong_file_is_a_named_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "shares.yaml"
    path.write_text(text, encoding="utf-8")
    policy = SharesFile(path=str(path))
    policy.start(NAMES, SHARES)
    with pytest.raises(RecipeError, match=message) as caught:
        policy.decide(0)
    assert str(path) in str(caught.value)


def test_shares_stay_within_factors_of_the_planned_ones() -> None:
    random = np.random.default_rng(5)
    for _ in range(300):
        count = int(random.integers(2, 30))
        planned = random.dirichlet(np.full(count, 0.4)) + 1e-9
        planned /= planned.sum()
        wanted = random.dirichlet(np.full(count, 0.2)) * random.uniform(0.1, 9)
        shares = within(wanted, planned, lowest=0.5, highest=2.0)
        assert shares.sum() == pytest.approx(1)
        assert (shares >= 0.5 * planned * (1 - 1e-9)).all() and (shares <= 2 * planned * (1 + 1e-9)).all()
        free = (shares > 0.5 * planned * (1 + 1e-6)) & (shares < 2 * planned * (1 - 1e-6))
        if free.sum() > 1:
            ratios = shares[free] / wanted[free]
            assert ratios == pytest.approx(ratios[0]), "shares that are free keep their ratios"
    near = np.array([0.45, 0.35, 0.2])
    assert within(near * 7, np.array([0.5, 0.3, 0.2]), lowest=0.5, highest=2) == pytest.approx(near)
    assert within(near, np.array([0.5, 0.3, 0.2]), lowest=1, highest=1) == pytest.approx([0.5, 0.3, 0.2])


def test_a_floor_is_scaled_where_many_sources_share() -> None:
    shares = np.full(306, 1e-9)
    shares[0] = 1 - shares[1:].sum()
    floored = with_floor(shares, 0.01)
    assert floored.sum() == pytest.approx(1)
    assert floored[0] > 100 * floored[1], "306 times 1 % would leave all shares equal"


def test_a_recipe_names_its_policy_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_policies.py").write_text(
        "class Mine:\n"
        "    def __init__(self, *, step=1): self.step = step\n"
        "    def start(self, names, shares): pass\n"
        "    def observe(self, step, losses): pass\n"
        "    def decide(self, step): return None\n"
        "class Half:\n"
        "    def start(self, names, shares): pass\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(open_policy(Dynamic(policy="ado", options={"start_step": 9}), tmp_path), Ado)
    mine = open_policy(Dynamic(policy="my_own_policies:Mine", options={"step": 5}), tmp_path)
    assert vars(mine) == {"step": 5}
    found = open_policy(Dynamic(policy="file", options={"path": "shares.yaml"}), tmp_path)
    found.start(["a"], {"a": 1.0})
    (tmp_path / "shares.yaml").write_text("{a: 1}", encoding="utf-8")
    assert found.decide(0) == {"a": 1.0}, "relative to the recipe"
    assert isinstance(open_policy(Dynamic(policy="exp3", options={"warmup_steps": 9}), tmp_path), Exp3)
    for policy, options, message in [
        ("odm", {"smoothing": 1.0}, "smoothing is 1.0, which is not in"),
        ("exp3", {"smoothing": 0.5}, "does not take these options"),
        ("my_own_policies:Mine", {"stp": 1}, "does not take these options"),
        ("my_own_policies:Half", {}, "has no method observe, decide"),
        ("my_own_policies:None_", {}, "cannot be imported"),
        ("no_such_module_of_policies:A", {}, "cannot be imported"),
        ("file", {}, "does not take these options"),
    ]:
        with pytest.raises(RecipeError, match=message):
            open_policy(Dynamic(policy=policy, options=options), tmp_path)


def test_both_halves_of_the_table_have_the_same_policies() -> None:
    assert set(POLICIES) == set(POLICIES_BY_NAME)
