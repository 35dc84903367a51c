"""The corpus of the matrix: the same each time, readable, and planned without Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.example import PRETRAIN_GPT, example_module

corpus = example_module("corpus", PRETRAIN_GPT)
consumed = example_module("consumed", PRETRAIN_GPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("corpus")
    corpus.write_corpus(made)
    return made


def test_it_is_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    corpus.write_corpus(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert {"notes.bin", "notes.idx", "code.parquet", "web.parquet", "dense.yaml", "thd.yaml"} < set(names)
    assert all((folder / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


@pytest.mark.parametrize("name", ["dense", "thd", "thd-other"])
def test_its_recipes_are_planned_step_by_step(folder: Path, name: str) -> None:
    plan = consumed.planned_samples(folder / f"{name}.yaml", 3)
    assert [len(samples) for samples in plan.values()] == [corpus.SAMPLES] * 3
    assert len({sample for samples in plan.values() for sample in samples}) == 3 * corpus.SAMPLES


def test_the_ramp_has_fewer_samples_at_first(folder: Path) -> None:
    plan = consumed.planned_samples(folder / "thd-ramp.yaml", 4)
    assert [len(samples) for samples in plan.values()] == [4, 4, 8, 8]


def test_parts_and_mixtures_differ(folder: Path) -> None:
    plans = [
        consumed.planned_samples(folder / name, 2, part=part)
        for name, part in (("thd.yaml", "train"), ("thd.yaml", "validation"), ("thd-other.yaml", "train"))
    ]
    assert plans[0] != plans[1] != plans[2] != plans[0]
