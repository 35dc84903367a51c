"""The provider's evaluations in a job of one rank: where they begin, their length, a set of each source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_megatron import Lines, installed
from tests.support.provider_jobs import SAMPLES, args_for, job_of_one_rank, write_recipes
from torchmix import megatron_adapter as tmx
from torchmix.constructor.fields import expand_source_index
from torchmix.errors import RecipeError, StateMismatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipes(tmp_path_factory.mktemp("job"))


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with job_of_one_rank():
        yield


def test_validation_goes_on_where_megatron_counts(folder: Path) -> None:
    args = args_for(folder / "split.yaml", eval_iters=2, consumed_valid_samples=3 * SAMPLES)
    with installed(args, core=True):
        _, validation, test = tmx.provider()
        assert validation is not None and test is not None
        items = []
        for _ in range(2):
            items += [next(validation) for _ in range(SAMPLES)]
            args.consumed_valid_samples += SAMPLES
        assert [(items[0]["step"], items[0]["index"]), (items[-1]["step"], items[-1]["part"])] == [
            (3, 0),
            (4, "validation"),
        ]
        assert (next(test)["step"], next(test)["part"]) == (0, "test")
        args.consumed_valid_samples += SAMPLES
        with pytest.raises(
            StateMismatch, match="evaluated 24 samples in this run, this rank has taken 16 of validation"
        ):
            next(validation)


def test_full_validation_has_a_length_and_begins_again(folder: Path) -> None:
    args = args_for(folder / "split.yaml", eval_iters=0, full_validation=True, consumed_valid_samples=64)
    with installed(args, core=True):
        _, validation, _ = tmx.provider()
        assert validation is not None
        steps = len(validation)  # type: ignore[arg-type]
        assert steps > 1
        passes = [[next(validation) for _ in range(steps * SAMPLES)] for _ in range(3)]
        assert [item["step"] for item in passes[0]] == [step for step in range(steps) for _ in range(SAMPLES)]
        for again in passes[1:]:
            assert all(one["tokens"].equal(two["tokens"]) for one, two in zip(passes[0], again, strict=True))


def test_each_source_of_validation_is_a_set(folder: Path) -> None:
    args = args_for(
        folder / "split.yaml", full_validation=True, multiple_validation_sets=True, consumed_valid_samples=64
    )
    with installed(args, core=True, lines=(lines := Lines())):
        _, sets, test = tmx.provider()
        assert test is None
        assert lines[1:] == [
            " > torchmix: the validation sets are prose, tiny, web",
            " > torchmix: no test, which Megatron cannot do with --multiple-validation-sets",
        ]
        assert isinstance(sets, list)
        passes = [[[next(each) for _ in range(len(each) * SAMPLES)] for each in sets] for _ in range(2)]  # type: ignore[arg-type]
        assert len({len(items) for items in passes[0]}) > 1, "sets of several sizes"
        for items, again in zip(*passes, strict=True):
            assert (items[0]["step"], items[0]["index"], items[0]["part"]) == (0, 0, "validation")
            assert items[-1]["is_last_of_step"]
            assert all(one["tokens"].equal(two["tokens"]) for one, two in zip(items, again, strict=True))
        trained = [sum(int((item["labels"] >= 0).sum()) for item in items) for items in passes[0]]
        tmx.close()
    alone = args_for(folder / "split.yaml", full_validation=True)
    with installed(alone, core=True):
        _, validation, _ = tmx.provider()
        assert validation is not None
        items = [next(validation) for _ in range(len(validation) * SAMPLES)]  # type: ignore[arg-type,call-overload]
        sources = [(item["labels"], expand_source_index(item["spans"], item["labels"].shape)) for item in items]
        by_source = [sum(int((labels[index == each] >= 0).sum()) for labels, index in sources) for each in range(3)]
        assert trained == by_source, "each set has the documents of its source, all of them and no others"


def test_a_full_validation_that_megatron_fails_in_is_refused(folder: Path) -> None:
    def evaluate_and_print_results(args: Any, eval_iters: Any) -> None:
        args.eval_iters = eval_iters[0] if not args.multiple_validation_sets else eval_iters

    args = args_for(folder / "split.yaml", full_validation=True)
    with installed(args, core=True) as modules:
        modules["megatron.training.training"].evaluate_and_print_results = evaluate_and_print_results  # type: ignore[attr-defined]
        with pytest.raises(RecipeError, match=r"--full-validation: Megatron .* --multiple-validation-sets"):
            tmx.provider()
        args.multiple_validation_sets = True
        _, sets, _ = tmx.provider()
        assert isinstance(sets, list) and len(sets) == 3


def test_without_training_only_evaluations_are_opened(folder: Path) -> None:
    args = args_for(folder / "split.yaml", eval_iters=1, skip_train=True, consumed_valid_samples=24)
    with installed(args, core=True):
        train, validation, _ = tmx.provider()
        assert train is None
        assert validation is not None
        assert next(validation)["step"] == 0, "as Megatron does with --skip-train"
