"""Loaders whose global batch grows and shrinks: every tensor, every layout, resumes across the borders."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.loaders import run_job, same_microbatches, write_job
from tests.support.staged_jobs import check_tensors, digests_over_resumes
from torchmix.errors import StateError, TopologyError
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader
from torchmix.steps.state import decode_state, encode_state

RAMP = (
    "[{from_step: 0, samples: 4}, {from_step: 2, samples: 8}, {from_step: 4, samples: 16}, {from_step: 6, samples: 4}]"
)
SAMPLES = [4, 4, 8, 8, 16, 16, 4, 4]
LAYOUTS = {
    "one": Topology(),
    "dp4": Topology(dp=4),
    "tp2dp2": Topology(tp=2, dp=2),
    "cp2dp2": Topology(cp=2, dp=2),
    "pp2dp2": Topology(pp=2, dp=2),
}


@pytest.fixture(scope="module", params=["best_fit", "concat"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp(request.param), method=request.param, samples=RAMP)


@pytest.fixture(scope="module")
def digests(job: Path) -> list[str]:
    return run_job(job, Topology(), steps=len(SAMPLES), keep=False)[0].digests


@pytest.mark.parametrize("layout", ["cp2dp2", "pp2dp2"])
def test_every_tensor_of_every_rank_is_what_the_plan_says(job: Path, layout: str, tmp_path: Path) -> None:
    method = "concat" if "concat" in job.parent.name else "best_fit"
    check_tensors(job, LAYOUTS[layout], tmp_path, samples=SAMPLES, lengths=[64] * len(SAMPLES), method=method)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resume_across_a_border_at_another_layout_continues_the_order(
    job: Path, digests: list[str], layout: str
) -> None:
    assert digests_over_resumes(job, LAYOUTS, layout, (2, 1, 2, 3)) == digests  # some stop at borders


def test_inside_a_step_of_another_size_the_same_layout_continues_bit_equal(job: Path) -> None:
    topology = LAYOUTS["pp2dp2"]
    whole = run_job(job, topology, microbatches=20)
    first = run_job(job, topology, microbatches=15)  # step 4 has 8 microbatches and begins at 12
    rest = run_job(job, topology, microbatches=5, state=first[0].state)
    for rank in range(topology.world_size):
        found = first[rank].microbatches + rest[rank].microbatches
        assert same_microbatches(whole[rank].microbatches, found)


def test_the_number_of_microbatches_is_that_of_the_step_that_comes(job: Path) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process", max_steps=len(SAMPLES)) as loader:
        assert loader.num_microbatches == SAMPLES[0]
        for microbatch in loader:
            is_last = microbatch.is_last_of_step
            assert loader.num_microbatches == ([*SAMPLES, 4][microbatch.step + is_last])
            assert is_last == (microbatch.index == SAMPLES[microbatch.step] - 1)


def test_a_state_beyond_the_microbatches_of_its_step_is_refused(job: Path) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        stream = iter(loader)
        [next(stream) for _ in range(8 + 5)]
        data = loader.state_dict()["torchmix_state"]
        state = decode_state(data, recipe=loader._part)
        assert (state.step, state.microbatch) == (2, 5)
        early = replace(state, at=replace(state.at, step=1))
        with pytest.raises(StateError, match=r"5 consumed microbatches of .* in step 1, which has 4 samples"):
            loader.load_state_dict({"torchmix_state": encode_state(early)})


def test_a_layout_that_a_stage_does_not_divide_by_is_refused_before_anything_is_read(job: Path) -> None:
    with pytest.raises(TopologyError, match="global batch of 4 samples does not divide by dp 8"):
        build_loader(job, topology=Topology(dp=8))
