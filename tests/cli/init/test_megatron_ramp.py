from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from torchmix.cli.init.megatron import ramp_stages, schedule_stages
from torchmix.errors import OptionError


@pytest.fixture(scope="module")
def megatron() -> Iterator[ModuleType]:
    """The file of megatron-core that defines the ramp, without the package around it."""
    folder = importlib.util.find_spec("megatron")
    assert folder is not None and folder.submodule_search_locations, "megatron-core is in constraints.txt"
    path = Path(next(iter(folder.submodule_search_locations))) / "core" / "num_microbatches_calculator.py"
    with patch.dict(sys.modules):
        spec = importlib.util.spec_from_file_location("megatron_calculator", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def stages_of(calculator: Any, num_steps: int) -> list[tuple[int, int]]:
    """Stages as Megatron trains: the size of each step from the samples consumed before it."""
    consumed, stages = 0, []
    for step in range(num_steps):
        calculator.update(consumed, consistency_check=False)
        samples = calculator.get_current_global_batch_size()
        if not stages or stages[-1][1] != samples:
            stages.append((step, samples))
        consumed += samples
    return stages


def test_a_ramp_has_the_size_of_megatrons_calculator_at_every_step(megatron):
    draw = random.Random(1)
    for _ in range(400):
        increment, start, increments = draw.randint(1, 50), draw.randint(1, 100), draw.randint(1, 9)
        samples, ramp = start + increment * increments, draw.choice([draw.randint(1, 50), draw.randint(1, 5000)])
        calculator = megatron.RampupBatchsizeNumMicroBatchesCalculator(samples, 1, 1, False, -1, start, increment, ramp)
        stages = ramp_stages(start, increment, ramp, samples)
        assert stages == stages_of(calculator, stages[-1][0] + 30 + ramp // start), (start, increment, ramp, samples)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("0:8", [(0, 8)]),
        ("0:768 250B:1536 500B:3072 750B:6144", [(0, 768), (39737, 1536), (59605, 3072), (69540, 6144)]),
        ("0:8, 81920:16", [(0, 8), (2, 16)]),
        ("0:8 90112:16", [(0, 8), (2, 16)]),
        ("0:8 131073:16", [(0, 8), (2, 16)]),
        ("0:8 139264:16", [(0, 8), (3, 16)]),
        ("81920:1k 0:8", [(0, 8), (2, 1000)]),
        ("0:16 8192:1 16384:2", [(0, 16), (1, 2)]),
        ("0:8 80K:8 400K:9", [(0, 8), (6, 9)]),
        ("0:8 1M:4", [(0, 8), (16, 4)]),
    ],
)
def test_a_schedule_counts_tokens_in_samples_consumed_before_a_step(schedule, stages):
    """Samples have 8192 tokens; a border inside a step counts for the next one."""
    assert schedule_stages(schedule, 8192) == stages


@pytest.mark.parametrize("schedule", ["", "8", "0:8 x:9", "9000:8", "0:8 100:9", "0:0", "0:8 8192:-1"])
def test_what_is_no_schedule_is_named(schedule):
    with pytest.raises(OptionError, match="--step-batch-size-schedule"):
        schedule_stages(schedule, 8192)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((32, 7, 100, 64), "7 does not lead from 32 to --global-batch-size 64"),
        ((65, 1, 100, 64), "does not lead from 65"),
        ((0, 1, 100, 64), "at least 1"),
        ((32, 0, 100, 64), "at least 1"),
        ((32, 32, -1, 64), "samples at least 0"),
    ],
)
def test_numbers_that_megatron_refuses_are_refused(numbers, says):
    with pytest.raises(OptionError, match=says):
        ramp_stages(*numbers)


def test_a_ramp_of_nothing_is_a_constant():
    assert ramp_stages(64, 8, 1000, 64) == ramp_stages(32, 32, 0, 64) == [(0, 64)]
