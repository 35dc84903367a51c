"""`torchmix calibrate`: coefficients that the timings were made with come back, and what is no timing is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.projects import make_indexed_project
from torchmix.cli.main import main
from torchmix.recipe.load import load_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_indexed_project(tmp_path)


def write(folder: Path, *lines: str, columns: str = "lengths,seconds") -> str:
    path = folder / "timings.csv"
    path.write_text("\n".join((columns, *lines)) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("per_token", "per_pair"), [(2e-6, 3e-11), (2e-6, 0.0), (0.0, 3e-11), (5e-9, 4e-9)])
def test_coefficients_come_back(
    recipe: Path, capsys: pytest.CaptureFixture[str], per_token: float, per_pair: float
) -> None:
    rng = np.random.default_rng(4)
    lines = []
    for _ in range(40):
        lengths = rng.integers(100, 60_000, int(rng.integers(1, 6)))
        seconds = per_token * lengths.sum() + per_pair * float((lengths.astype(float) ** 2).sum())
        lines.append(f"{' '.join(map(str, lengths))},{seconds * (1 + 0.01 * rng.standard_normal()):.9g}")
    assert main(["calibrate", str(recipe), write(recipe.parent, *lines), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["largest_error"] < 0.05 and found["mean_error"] < 0.02 <= found["largest_error_of_recipe"]
    ) or not per_pair
    expected = per_pair / (per_token + per_pair * 256)
    assert found["per_pair"] / (found["per_token"] + found["per_pair"] * 256) == pytest.approx(
        expected, rel=0.1, abs=1e-9
    )
    text = recipe.read_text(encoding="utf-8").replace(
        "balance: {", f"balance: {{cost: {{per_token: {found['per_token']}, per_pair: {found['per_pair']}}}, "
    )
    recipe.write_text(text, encoding="utf-8")
    assert load_recipe(recipe).balance.cost is not None


@pytest.mark.parametrize(("per_exchanged", "per_microbatch"), [(4e-8, 0.002), (0.0, 0.002), (4e-8, 0.0), (2e-6, 0.05)])
def test_prices_of_runs_come_back(
    recipe: Path, capsys: pytest.CaptureFixture[str], per_exchanged: float, per_microbatch: float
) -> None:
    rng = np.random.default_rng(5)
    lines = []
    for number in range(60):
        ranks = (1, 2, 4, 8)[number % 4]
        lengths = rng.integers(100, 60_000, int(rng.integers(1, 6)))
        tokens, pairs = float(lengths.sum()), float((lengths.astype(float) ** 2).sum())
        work = (2e-6 * tokens + 3e-11 * pairs) / ranks
        seconds = work + per_exchanged * tokens / ranks * (ranks - 1) + per_microbatch
        lines.append(f"{' '.join(map(str, lengths))},{seconds * (1 + 0.003 * rng.standard_normal()):.9g},{ranks}")
    given = write(recipe.parent, *lines, columns="lengths,seconds,ranks")
    assert main(["calibrate", str(recipe), given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["largest_error"] < 0.03
    for key, expected in (("per_exchanged", per_exchanged / 2e-6), ("per_microbatch", per_microbatch / 2e-6)):
        assert found[key] / found["per_token"] == pytest.approx(expected, rel=0.2, abs=0.005 if "ex" in key else 40)
    assert main(["calibrate", str(recipe), given]) == 0
    out = capsys.readouterr().out
    assert f"context: {{per_exchanged: {found['per_exchanged']}, per_microbatch: " in out and "8 rank(s)" in out


def test_prices_of_runs_need_runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lines, message in (
        (["100,1,1", "200,2,2", "300,3,4"], "four coefficients need timings of at least four"),
        (["100,1,2", "200,2,2", "300,3,2", "400,3,2"], "at least two numbers of ranks"),
        (["100,1,0", "200,2,2"], "line 2: ranks are 1 or more"),
    ):
        assert main(["calibrate", str(recipe), write(recipe.parent, *lines, columns="lengths,seconds,ranks")]) == 2
        assert message in capsys.readouterr().err


def test_the_keys_are_printed_with_residuals(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(recipe), write(recipe.parent, "100,1.0", "200,2.2")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("balance: {cost: {per_token: ") and "100 tokens" in out and "2 timings: off by" in out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["5,1"], "at least two different samples"),
        (["5,1", "x,2"], "line 3: .* is no timing"),
        (["5,1", "6,0"], "line 3: lengths are 1 or more, and seconds above 0"),
        (["5,1", "0,1"], "line 3: lengths are 1 or more"),
    ],
)
def test_what_is_no_timing_is_named(
    recipe: Path, capsys: pytest.CaptureFixture[str], lines: list[str], message: str
) -> None:
    assert main(["calibrate", str(recipe), write(recipe.parent, *lines)]) == 2
    assert re.search(message, capsys.readouterr().err)
