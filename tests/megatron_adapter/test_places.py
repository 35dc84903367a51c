"""parallel_state -> place tree, and what each model chunk needs."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.fake_megatron import default_args, installed
from torchmix.errors import TopologyError
from torchmix.megatron_adapter.batch import Needs, needs_of_chunk, tree_of_job
from torchmix.parallel.topology import Topology


class ParallelState(ModuleType):
    """Megatron's, of one rank of a job in its default order."""

    def __init__(self, topology: Topology, vp: int | None = None) -> None:
        super().__init__("megatron.core.parallel_state")
        place = topology.coordinates
        axes = {"tensor_model_parallel": "tp", "context_parallel": "cp", "pipeline_model_parallel": "pp"}
        for name, axis in {**axes, "data_parallel": "dp"}.items():
            setattr(self, f"get_{name}_world_size", partial(getattr, topology, axis))
            setattr(self, f"get_{name}_rank", partial(getattr, place, axis))
        self._place, self._topology, self._vp = place, topology, vp

    def is_pipeline_first_stage(self, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        return self._place.pp == 0 and (ignore_virtual or self._vp is None or vp_stage == 0)

    def is_pipeline_last_stage(self, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        is_last_chunk = ignore_virtual or self._vp is None or vp_stage == self._vp - 1
        return self._place.pp == self._topology.pp - 1 and is_last_chunk


def be(
    monkeypatch: pytest.MonkeyPatch, topology: Topology, *, vp: int | None = None, world_size: int | None = None
) -> ParallelState:
    """This process is that rank, for Megatron and for torch.distributed."""
    state = ParallelState(topology, vp)
    core = ModuleType("megatron.core")
    core.parallel_state = state  # type: ignore[attr-defined]
    for module in (ModuleType("megatron"), core, state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size or topology.world_size)
    monkeypatch.setattr(dist, "get_rank", lambda: topology.rank)
    return state


def test_the_tree_is_that_of_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(tp=2, cp=2, pp=2, dp=2, rank=11)
    be(monkeypatch, topology)
    tree = tree_of_job(default_args())
    assert tree.topology == topology
    assert tree.role.stage == "last"
    assert tree.role.cp_rank == 1


def test_an_axis_that_torchmix_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, Topology(tp=2, dp=2), world_size=8)
    with pytest.raises(TopologyError, match="tp 2 x cp 1 x pp 1 x dp 2 makes 4 ranks, the job has 8"):
        tree_of_job(default_args())


def test_stages_of_a_replica_may_be_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(pp=2, dp=2, rank=1, order="tp-cp-pp-dp")
    be(monkeypatch, topology)
    tree = tree_of_job(default_args(use_tp_pp_dp_mapping=True))
    assert (tree.topology, tree.role.stage, tree.leaders) == (topology, "last", (0, 2))


def test_each_stage_may_have_a_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, Topology(pp=2, dp=2, rank=3))
    assert tree_of_job(default_args(data_leaders="stage")).leaders == (0, 2, 1, 3)


def test_another_order_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, Topology(pp=2, dp=2, rank=1, order="tp-cp-pp-dp"))
    with pytest.raises(TopologyError, match=r"rank 1 is at .* = \(0, 0, 1, 0\) for Megatron, and at \(0, 0, 0, 1\)"):
        tree_of_job(default_args())


@pytest.mark.parametrize(
    ("pp", "rank", "vp", "vp_stage", "tokens", "labels"),
    [
        (1, 0, None, None, True, True),
        (3, 0, None, None, True, False),
        (3, 1, None, None, False, False),
        (3, 2, None, None, False, True),
        (2, 0, 2, 0, True, False),
        (2, 0, 2, 1, False, False),
        (2, 1, 2, 0, False, False),
        (2, 1, 2, 1, False, True),
    ],
)
def test_a_chunk_needs_what_its_stage_works_with(
    pp: int,
    rank: int,
    vp: int | None,
    vp_stage: int | None,
    tokens: bool,
    labels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch, Topology(pp=pp, rank=rank), vp=vp)
    assert needs_of_chunk(default_args(), vp_stage) == Needs(tokens=tokens, labels=labels)


def prediction_of_core(version: str, stages: set[int], state: Any) -> ModuleType:
    """multi_token_prediction.py, with layers on these stages; two signatures are in use."""
    module = ModuleType("megatron.core.transformer.multi_token_prediction")

    def on_stage() -> bool:
        return state._place.pp in stages

    def older(config: Any, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        assert config.mtp_num_layers == 1
        return on_stage()

    def newer(
        layout: Any = None, mtp_num_layers: int | None = None, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        assert mtp_num_layers == 1
        return on_stage()

    module.mtp_on_this_rank = older if version == "0.16" else newer  # type: ignore[attr-defined]
    module.get_mtp_ranks = lambda ranks, config: [ranks[stage] for stage in stages]  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_a_stage_that_predicts_several_tokens_needs_all(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = default_args(mtp_num_layers=1, pipeline_model_parallel_layout=SimpleNamespace())
    trees = []
    for rank in range(6):
        state = be(monkeypatch, Topology(cp=2, pp=3, rank=rank))
        name = "megatron.core.transformer.multi_token_prediction"
        monkeypatch.setitem(sys.modules, "megatron.core.transformer", ModuleType("megatron.core.transformer"))
        monkeypatch.setitem(sys.modules, name, prediction_of_core(version, {1}, state))
        with installed(args):
            trees.append(tree_of_job(args))
            needs = needs_of_chunk(args, None)
        assert needs == Needs(tokens=rank < 4, labels=rank >= 2)
    assert {tree.role_of_rank for tree in trees} == {trees[0].role_of_rank}
    assert [role.stage for role in trees[0].role_of_rank] == ["first"] * 2 + ["only"] * 2 + ["last"] * 2
