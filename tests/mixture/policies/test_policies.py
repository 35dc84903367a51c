"""Policies on recorded losses: what they decide, that replaying decides the same, and their bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from torchmix.errors import RecipeError
from torchmix.mixture.policies.ado import Ado
from torchmix.mixture.policies.limits import with_floor, within
from torchmix.mixture.policies.odm import Odm
from torchmix.mixture.policies.open_policy import open_policy
from torchmix.mixture.policies.policy import Policy
from torchmix.mixture.policies.scaling_law import cost_of, fit_scaling_law, smoothed
from torchmix.mixture.policies.shares_file import SharesFile
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


def test_ado_gives_more_of_what_is_still_learnt() -> None:
    decisions = run(Ado(ignore_steps=20, start_step=60, refit_steps=40, every=2), steps=400)
    assert len(decisions) == 340, "every step from the 60th on"
    last = decisions[-1]
    assert sum(last.values()) == pytest.approx(1) and min(last.values()) > 0
    assert last["a"] < SHARES["a"], "its loss no longer falls"
    assert last["b"] / SHARES["b"] > last["a"] / SHARES["a"]
    assert run(Ado(ignore_steps=20, start_step=60, refit_steps=40, every=2), steps=400) == decisions


def test_ado_decides_nothing_before_it_has_seen_enough() -> None:
    assert run(Ado(), steps=200) == []


def test_odm_is_its_authors_code_on_recorded_losses() -> None:
    """Their `Exp3WeightUpdater`, run on the same losses, one source a step."""
    policy = Odm()
    policy.start(NAMES, SHARES)
    decided = []
    for step in range(40):
        number = step + 1
        loss = 2 + 0.5 * (number % 3) + 0.1 * ((number * 7) % 5)
        policy.observe(step, {NAMES[number % 3]: (loss * 100, 100)})
        decided.append(policy.decide(step))
    assert decided[0] is not None and list(decided[0].values()) == pytest.approx([1 / 3] * 3)
    assert decided[9] is not None
    assert list(decided[9].values()) == pytest.approx([0.3140944473905787, 0.3504694163525343, 0.3354361362568871])
    assert decided[39] is not None
    assert list(decided[39].values()) == pytest.approx([0.2990743898249577, 0.34346792595455644, 0.35745768422048585])


def test_odm_survives_large_rewards() -> None:
    policy = Odm()
    policy.start(NAMES, SHARES)
    for step in range(20_000):
        policy.observe(step, {"a": (900.0, 1), "b": (1.0, 1)})
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
    for policy, options, message in [
        ("my_own_policies:Mine", {"stp": 1}, "does not take these options"),
        ("my_own_policies:Half", {}, "has no method observe, decide"),
        ("my_own_policies:None_", {}, "cannot be imported"),
        ("no_such_module_of_policies:A", {}, "cannot be imported"),
        ("file", {}, "does not take these options"),
    ]:
        with pytest.raises(RecipeError, match=message):
            open_policy(Dynamic(policy=policy, options=options), tmp_path)
