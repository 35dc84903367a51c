"""One harness for resume: stop anywhere, continue at another layout, worker count or look-ahead, and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loaders import open_job, run_job, same_microbatches, write_job
from torchmix.parallel.topology import Topology
from torchmix.steps import state

STEPS = 6
LAYOUTS = {
    "one": Topology(),
    "dp4": Topology(dp=4),
    "tp2dp2": Topology(tp=2, dp=2),
    "cp2dp2": Topology(cp=2, dp=2),
    "pp2dp2": Topology(pp=2, dp=2),
    "tp2pp2": Topology(tp=2, pp=2),
}


@pytest.fixture(scope="module", params=["best_fit", "concat"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp(request.param), method=request.param)


@pytest.fixture(scope="module")
def digests(job: Path) -> list[str]:
    return run_job(job, Topology(), steps=STEPS, keep=False)[0].digests


@pytest.mark.slow
@pytest.mark.parametrize("look_ahead", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_digest_is_equal_at_every_layout(job: Path, digests: list[str], layout: str, look_ahead: int) -> None:
    ranks = run_job(job, LAYOUTS[layout], steps=STEPS, look_ahead=look_ahead, keep=False)
    assert [rank.digests for rank in ranks] == [digests] * LAYOUTS[layout].world_size


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resume_of_a_resume_at_other_layouts_continues_the_order(job: Path, digests: list[str], layout: str) -> None:
    names = list(LAYOUTS)
    second = LAYOUTS[names[(names.index(layout) + 1) % len(names)]]
    third = LAYOUTS[names[(names.index(layout) + 3) % len(names)]]
    found: list[str] = []
    state = None
    for topology, steps in ((LAYOUTS[layout], 1), (second, 2), (third, STEPS - 3)):
        ranks = run_job(job, topology, steps=steps, state=state, keep=False)
        assert all(rank.state == ranks[-1].state for rank in ranks)
        found += ranks[0].digests
        state = ranks[-1].state  # of a peer, where the layout has one
    assert found == digests


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp4", "tp2dp2", "pp2dp2"])
def test_inside_a_step_the_same_layout_continues_bit_equal(job: Path, layout: str) -> None:
    topology = LAYOUTS[layout]
    whole = run_job(job, topology, microbatches=12)
    first = run_job(job, topology, microbatches=5)
    rest = run_job(job, topology, microbatches=7, state=first[0].state)
    for rank in range(topology.world_size):
        found = first[rank].microbatches + rest[rank].microbatches
        assert same_microbatches(whole[rank].microbatches, found)


def test_a_process_decodes_the_state_that_it_loads_once(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [first] = run_job(job, Topology(), steps=3)
    decode, decoded = state._decode_loader_state, []

    def noted(data: bytes) -> state.LoaderState:
        decoded.append(data)
        return decode(data)

    [loader] = open_job(job, Topology())
    monkeypatch.setattr(state, "_decode_loader_state", noted)
    with loader:
        loader.load_state_dict(first.state)
        assert next(iter(loader)).step == 3
    assert len(decoded) == 1
