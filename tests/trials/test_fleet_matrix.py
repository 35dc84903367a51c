"""A few cases of the matrix on every run: one of each fleet and of each format."""

from __future__ import annotations

import pytest

from tests.trials.fleet_matrix import FLEETS, FORMATS, Matrix

CASES = (
    ("token lists", "job of 2", "cp2 dp2"),
    ("text", "remote of 2", "tp2 dp2"),
    ("JSON lines", "job of 4", "dp4"),
    ("Arrow", "node before remote of 2", "pp2 dp2"),
    (".bin", "remote of 2", "one rank"),
)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"), 3)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_tensors_are_those_of_the_oracle_whoever_reads_before_and_after_a_resume(
    matrix: Matrix, case: tuple[str, str, str]
) -> None:
    assert matrix.one(matrix.cases.index(case))["tokens"] > 1000


def test_the_matrix_has_every_format_with_every_fleet(matrix: Matrix) -> None:
    assert len(matrix.cases) == len(set(matrix.cases)) == 120
    assert {case[:2] for case in matrix.cases} == {(kind, fleet) for kind in FORMATS for fleet in FLEETS}
